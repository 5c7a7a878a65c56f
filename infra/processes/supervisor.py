"""Keeps processes running: starts them, restarts them with backoff, and stops them cleanly."""

import itertools
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from infra.processes.locks import locked
from infra.processes.warm import start_module
from infra.settings import PREFIX

log = logging.getLogger(__name__)

BACKOFF_S = (0.2, 10.0)
HEALTHY_S = 30.0
GRACE_S = 15.0
LOOK_S = 0.1

_BOTH = {"policies.engine.process", "api"}
_SECRETS_OF = {"webhooks": {"policies.engine.process"}, "sources": _BOTH, "master_key_file": _BOTH}
"""The modules that need these; all need Kafka's password and the database's. No other child gets them in its environment."""


@dataclass(slots=True)
class Child:
    """One supervised process: a module run with arguments. `pid` is None while it is down."""

    name: str
    module: str
    arguments: tuple[str, ...] = ()
    process: subprocess.Popen[bytes] | None = None
    starts: int = 0
    failures: int = 0
    started_at: float = 0.0
    due_at: float = 0.0
    is_held: bool = False
    """Not to be started now."""

    @property
    def pid(self) -> int | None:
        return self.process.pid if self.process and self.process.poll() is None else None


@dataclass(slots=True)
class Supervisor:
    """Runs children until `stop`. Their output goes to `log_dir/<name>.log`, or to this process's own standard error."""

    children: Sequence[Child]
    environment: dict[str, str] = field(default_factory=dict)
    log_dir: Path | None = None
    metrics_port: int | None = None
    """The first child's; each further one exposes its metrics on the next port. 0: each on a free port."""
    is_warm: bool = False
    """Whether children are forked from a process that has imported their libraries (`warm.py`)."""
    stopping: bool = False
    """Not a threading.Event: a signal handler that sets one while its own thread waits for it can deadlock."""

    def run(self, beside: Iterator[None] | None = None) -> None:
        """Blocks until `stop` is called (from a signal handler or another thread), then ends every child.

        `beside` is asked for the next step of other work ten times a second; it may change the children.
        """
        try:
            while not self.stopping:
                self._look()
                if beside is not None:
                    next(beside)
                time.sleep(LOOK_S)
        finally:
            self.end(self.children)

    def stop(self) -> None:
        self.stopping = True

    def _look(self) -> None:
        now = time.monotonic()
        for child in self.children:
            process = child.process
            if process is None:
                if now >= child.due_at and not child.is_held:
                    try:
                        self._start(child)
                    except OSError as error:  # no memory, too many processes
                        self._pause(child, child.failures + 1, f"can't be started: {error}")
            elif process.poll() is not None:
                healthy = now - child.started_at > HEALTHY_S
                self._pause(child, 0 if healthy else child.failures + 1, _ended(process.returncode))
                self._close(child)

    def _pause(self, child: Child, failures: int, why: str) -> None:
        child.failures = failures
        pause = min(BACKOFF_S[0] * 2 ** (failures - 1), BACKOFF_S[1]) if failures else 0.0
        log.warning("%s %s; starting it again in %.1f s", child.name, why, pause)
        child.due_at = time.monotonic() + pause

    def _start(self, child: Child) -> None:
        port = self.metrics_port
        ports = {} if port is None else {f"{PREFIX}METRICS_PORT": str(port and port + self.children.index(child))}
        environment = own_secrets(child.module, os.environ | self.environment) | ports
        if self.is_warm:
            child.process = start_module(child.module, child.arguments, environment)  # type: ignore[assignment]  # as good
        else:
            child.process = self._popen(child, environment)
        child.starts += 1
        child.started_at = time.monotonic()

    def _popen(self, child: Child, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        with (self.log_dir / f"{child.name}.log").open("ab") if self.log_dir else nullcontext() as output:
            # a session of its own: Ctrl-C reaches this process only, which then ends the children in order
            return subprocess.Popen(
                [sys.executable, "-m", "infra.processes.supervised", child.module, *child.arguments],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=environment,
                start_new_session=True,
            )

    def end(self, children: Collection[Child]) -> None:
        """SIGTERM to these, SIGKILL to those still there after a grace period: dying is always safe here, only slower to recover.

        Unless they are held, they are started again.
        """
        for child in children:
            if child.pid:
                child.process.send_signal(signal.SIGCONT)  # type: ignore[union-attr]  # a pid means a process
                child.process.terminate()  # type: ignore[union-attr]
        deadline = time.monotonic() + GRACE_S
        for child in children:
            if child.process is None:
                continue
            try:
                child.process.wait(max(deadline - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                log.warning("%s did not end within %.0f s and is killed", child.name, GRACE_S)
                child.process.kill()
                child.process.wait()
            self._close(child)

    def _close(self, child: Child) -> None:
        if child.process and child.process.stdin:
            child.process.stdin.close()
        child.process = None


@contextmanager
def place(groups: str) -> Iterator[str]:
    """A name for this machine's processes: `<host>-1` for the first supervisor of these consumer groups, `<host>-2` for the next.

    The names are static members of consumer groups. A process that restarts under its name gets its partitions back at once; two
    processes with one name would take them from each other for ever.
    """
    for number in itertools.count(1):
        lock = Path(tempfile.gettempdir()) / f"samefold-{os.getuid()}-{groups}-{number}.lock"
        with locked(lock) as is_mine:
            if is_mine:
                yield f"{socket.gethostname()}-{number}"
                return


def handlers(count: int, place: str) -> list[Child]:
    """Handlers whose names begin with `place`."""
    names = [f"handler-{number}" for number in range(1, count + 1)]
    return [Child(name, "commands.handler", ("--name", f"{place}-{name}")) for name in names]


def agents(count: int, place: str, agent: str = "core") -> list[Child]:
    """Processes of one agent, whose names begin with `place`."""
    names = [f"agent-{agent}-{number}" for number in range(1, count + 1)]
    return [
        Child(name, "projections.engine.live.agent", ("--agent", agent, "--name", f"{place}-{name}")) for name in names
    ]


def policies(count: int, place: str) -> list[Child]:
    """Processes that run all policies, whose names begin with `place`."""
    names = [f"policies-{number}" for number in range(1, count + 1)]
    return [Child(name, "policies.engine.process", ("--name", f"{place}-{name}")) for name in names]


def publisher(place: str) -> Child:
    """The process that writes the public topic, whose name begins with `place`."""
    return Child("publisher", "policies.engine.publisher", ("--name", f"{place}-publisher"))


def api(place: str, host: str | None = None, port: int | None = None) -> Child:
    """The HTTP API, whose name begins with `place`; it listens where the settings say, if not given here."""
    where = [*(("--host", host) if host else ()), *(("--port", str(port)) if port is not None else ())]
    return Child("api", "api", ("--name", f"{place}-api", *where))


def spark_agent(place: str, agent: str, master: str) -> Child:
    """An agent as a Spark query, whose name begins with `place`."""
    name = f"agent-{agent}-spark"
    return Child(name, "spark_jobs.engine.agent", ("--agent", agent, "--name", f"{place}-{name}", "--master", master))


def exporter(place: str) -> Child:
    """The process that exposes the lag if there is no API."""
    return Child("exporter", "projections.engine.live.exporter", ("--name", f"{place}-exporter"))


def own_secrets(module: str, environment: dict[str, str]) -> dict[str, str]:
    """The environment without the secrets that this module does not use."""
    foreign = [PREFIX + name.upper() for name, modules in _SECRETS_OF.items() if module not in modules]
    hidden = {*foreign, *(f"{name}_FILE" for name in foreign)}
    return {name: value for name, value in environment.items() if name.upper() not in hidden}


def _ended(code: int) -> str:
    return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
