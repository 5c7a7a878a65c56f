"""`samefold dev run --watch`: what runs follows the saved files.

A saved file is imported in a process of its own, which brings tables and rows to the code (`tools/sync.py`). Then the processes
that use the file start again. Where it has an error, that is shown, and what runs goes on.
"""

import importlib.util
import multiprocessing
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import typer

from infra.errors import SamefoldError
from infra.observability import logs
from infra.processes import supervisor
from infra.processes.interrupts import ending_signals
from infra.processes.supervisor import Child, Supervisor
from infra.processes.warm import Warm
from infra.settings import PREFIX, Settings
from tools.dev.stack import development_stack
from tools.saved import Synced, own_files


def run(settings: Settings) -> None:
    """What `samefold run all` runs, until Ctrl-C. `warm.prepare` was called."""
    logs.configure(settings.log_level, settings.log_format)
    with supervisor.place(settings.group_prefix) as here:
        # of the start, whatever `.env` says when a process starts again
        environment = {f"{PREFIX}KAFKA_BOOTSTRAP": settings.kafka, **settings.secret_files()}
        if settings.database_url_file is None:
            environment[f"{PREFIX}DATABASE_URL"] = settings.database
        supervised = Supervisor([], environment, metrics_port=settings.metrics_port, is_warm=True)
        for number in ending_signals():
            signal.signal(number, lambda *_: supervised.stop())
        watch = Watch(supervised, here)
        try:
            supervised.run(watch.steps())
        finally:
            watch.end()


class Watch:
    """Follows the service's own files. A supervisor keeps its children running, and asks for the steps of this work beside it."""

    def __init__(self, supervised: Supervisor, place: str) -> None:
        self._supervised = supervised
        self._place = place
        self._running: dict[str, tuple[str, int]] = {}
        """By a process's name, the digest of its code, and how often it had been started: once more, and it may have other code."""
        self._serves = dict[Path, tuple[int, ...]]()
        """The files of the code that runs."""
        self._seen = dict[Path, tuple[int, ...]]()
        """The files that were followed, or written by it."""
        self._sync: Warm | None = None
        self._started = dict[str, None]()
        """The names of what was started again and has not been told."""

    def steps(self) -> Iterator[None]:
        """For ever: look for saved files, and follow them."""
        for _ in self._saves():
            self._hold_ended()
            yield

    def _saves(self) -> Iterator[None]:
        looked_at = time.time()
        while True:
            found, now, seen = _saved(), time.time(), self._seen
            changed = [file for file in {**found, **seen} if found.get(file) != seen.get(file)]
            yield
            if not changed or found != _saved():  # an editor or `git checkout` has not written all
                continue
            for file in changed:
                # Python compares sizes and whole seconds: a second save within a second may look the same to it
                Path(importlib.util.cache_from_source(str(file))).unlink(missing_ok=True)
            saved_at = max(found[file][0] / 1e9 if file in found else 0 for file in changed)
            began_at = saved_at if saved_at > looked_at else now  # a file that was moved here has an older time
            moment, self._seen, looked_at = f"the {'save' if seen else 'start'}", found, now
            yield from self._follow(moment, began_at)

    def end(self) -> None:
        """End what is under way: the next start goes on with it."""
        if self._sync is not None:
            self._sync.kill()
            self._sync.wait()

    def _hold_ended(self) -> None:
        """Code that was saved and does not serve yet, or is refused, must not fold into the rows that are live."""
        down = [one for one in self._supervised.children if one.process is None and not one.is_held]
        if down and _code(_saved()) != self._serves:
            for child in down:
                child.is_held = True
                typer.echo(f"watch: {child.name} does not run; it starts after the next good save")

    def _follow(self, moment: str, began_at: float) -> Iterator[None]:
        here, there = multiprocessing.Pipe()
        saved, has_rows = _code(_saved()), False
        self._sync = Warm(_synced, there)
        there.close()
        while True:
            while not here.poll():
                if _code(_saved()) != saved:
                    return self.end()  # this code will not serve: newer code is there
                yield
            try:
                kind, what = here.recv()
            except (EOFError, OSError):
                kind, what = "failed", ("It has ended before it was done.", "Save a file again.")
            match kind:
                case "step":
                    step, written = what
                    typer.echo(f"watch: {step}")
                    self._seen |= {file: at for file, at in _saved().items() if file == written}
                case "switch":
                    has_rows = True
                    self._hold([one for one in self._other_code(what) if one.module != "api"])  # which only reads
                    _answer(here, None)
                case "done":
                    started = self._run(what, saved)
                    self._started |= dict.fromkeys(one.name for one in started)
                    _answer(here, [one.module for one in started])
                case "served":
                    self._running = {one.name: (what.code[one.module], one.starts) for one in self._supervised.children}
                    names, self._started = ", ".join(self._started), {}
                    to = f"to the new {'rows' if has_rows else 'code'} (started again: {names})"
                    to = to if names or has_rows else "until nothing was to do"
                    typer.echo(f"watch: {time.time() - began_at:.1f} s from {moment} {to}")
                    return None
                case _:
                    message, hint = what
                    typer.secho(f"watch: {message}", fg="red")
                    typer.echo("\n".join([*(f"  → {hint}" for _ in hint[:1]), f"watch: {self._goes_on()}"]))
                    return None

    def _goes_on(self) -> str:
        """What a failure leaves, in words."""
        runs = any(one.process for one in self._supervised.children)
        held = ", ".join(one.name for one in self._supervised.children if one.is_held)
        goes_on = "what runs goes on" if runs else "nothing runs"
        return f"{goes_on}; after the next good save: {held}" if held else goes_on

    def _other_code(self, done: Synced) -> list[Child]:
        """The children that run, with other code than this."""
        running = [child for child in self._supervised.children if child.process]
        return [one for one in running if self._running.get(one.name) != (done.code.get(one.module), one.starts)]

    def _hold(self, children: list[Child]) -> None:
        for child in children:
            child.is_held = True
        self._supervised.end(children)

    def _run(self, done: Synced, saved: dict[Path, tuple[int, ...]]) -> list[Child]:
        """Let exactly the processes run that this code needs, with this code; those that are started."""
        needed = [
            *supervisor.handlers(1, self._place),
            *(child for agent in done.agents for child in supervisor.agents(1, self._place, agent)),
            *(supervisor.policies(1, self._place) if "policies.engine.process" in done.code else ()),
            *((supervisor.publisher(self._place),) if "policies.engine.publisher" in done.code else ()),
            supervisor.api(self._place),
        ]
        known = {child.name: child for child in self._supervised.children}
        gone = known.keys() - {child.name for child in needed}
        self._hold([*self._other_code(done), *(known[name] for name in gone)])
        self._supervised.children = [known.get(child.name, child) for child in needed]
        started = [child for child in self._supervised.children if child.process is None]
        for child in started:
            child.is_held, child.failures, child.due_at = False, 0, 0.0
        self._serves = saved
        return started


def _answer(here: Connection, what: object) -> None:
    with suppress(OSError):  # it has ended, which is read next
        here.send(what)


def _saved() -> dict[Path, tuple[int, ...]]:
    """The service's own files, each with what a save changes."""
    found = dict[Path, tuple[int, ...]]()
    for file in own_files():
        try:
            at = file.stat()
        except OSError:  # removed just now
            continue
        found[file] = at.st_mtime_ns, at.st_size, at.st_ino
    return found


def _code(saved: Mapping[Path, tuple[int, ...]]) -> dict[Path, tuple[int, ...]]:
    """Without the migrations, which following a save may write itself."""
    return {file: what for file, what in saved.items() if file.parent.name != "migrations"}


def _synced(there: Connection) -> None:
    """In a process of its own, which has imported nothing of the service yet."""
    from tools import sync

    def ask(kind: str, what: Any) -> Any:
        there.send((kind, what))
        return there.recv()

    try:
        settings = Settings()
        development_stack(settings)  # `.env` may have been saved since the start
        done = sync.sync(
            settings, lambda step, file=None: there.send(("step", (step, file))), lambda code: ask("switch", code)
        )
        epochs = sync.epochs_now(settings)
        started = ask("done", done)
        sync.wait_until_serving(settings, epochs if "commands.handler" in started else None)
        there.send(("served", done))
    except SamefoldError as error:
        there.send(("failed", (f"{error.code}: {error.message}", error.hint)))
