"""Kafka or PostgreSQL freezes, stops, restarts or is killed under load, while a command of the command line is at work too.

Each fault returns whether it took effect. After it, handlers, agents and the API must work again by themselves; the command must
have ended well or with a named error, and then succeed when it is run again.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Literal, get_args

import psutil

from infra.database.connect import connect
from proofs.chaos.field import Field
from proofs.chaos.ledger import Sent
from tools.dev.kafka import Kafka
from tools.dev.postgres import Postgres

Store = Literal["broker", "database"]
How = Literal["frozen for 4 s", "frozen for 20 s", "stopped for 5 s", "restarted", "killed"]
Job = Literal["send", "rebuild", "verify", "archive"]
STORES: tuple[Store, ...] = get_args(Store)
WAYS: tuple[How, ...] = get_args(How)
JOBS: tuple[Job, ...] = get_args(Job)
SENT = 3_000
"""Commands of one `samefold send`."""
HEAD_START_S = 2.5
"""At most, from the start of a job until the store stumbles: it may still be starting, or nearly through."""
GONE_S = 15
"""In which a killed server must have ended."""
JOB_S = 120.0
"""In which a job must have ended, whatever happened to it."""


def stumble(field: Field, store: Store, how: How, job: Job) -> bool:
    """The store stumbles while the job runs; recovery is counted from the moment when the store is back."""
    service = field.ground.stack.kafka if store == "broker" else field.ground.stack.postgres
    under_way = _Running(field, job)
    field.pause(field.random.uniform(0, HEAD_START_S))
    began = time.monotonic()
    _WAYS[how](field, service)
    back = time.monotonic()
    field.effects.took_effect(f"{store}: {how}")
    field.effects.took_effect(f"{job} while the {store} stumbled")
    once = f"{store}, once it answers"
    with ExitStack() as times:
        times.enter_context(field.effects.recovery(store, began))
        times.enter_context(field.effects.recovery(once, back))
        field.until_visible()
    with field.effects.recovery("API, once the store answers", back):
        field.until_answered()
    if not under_way.ended_well():
        with field.effects.recovery("job, run again"):
            again = _Running(field, job, under_way)
            if not again.ended_well():
                field.violations.append(f"F: `{job}` fails after the {store} is back: {again.output()}")
    return True


# ── what a store does ──


def _freeze(seconds: float) -> Callable[[Field, Kafka | Postgres], None]:
    """As a paused virtual machine or a sleeping laptop: no process of it does anything, no connection is closed."""

    def freeze(field: Field, service: Kafka | Postgres) -> None:
        main = service.process()
        assert main is not None
        family = [main, *main.children(recursive=True)]
        try:
            _signal(family, signal.SIGSTOP)
            field.pause(seconds)
        finally:
            _signal(family, signal.SIGCONT)

    return freeze


def _stop(seconds: float) -> Callable[[Field, Kafka | Postgres], None]:
    """An orderly shutdown, and a start after so many seconds; returns when it answers."""

    def stop(field: Field, service: Kafka | Postgres) -> None:
        service.stop()
        field.pause(seconds)
        service.start()

    return stop


def _kill(_field: Field, service: Kafka | Postgres) -> None:
    main = service.process()
    assert main is not None
    main.kill()
    main.wait(GONE_S)
    service.start()


_WAYS: dict[How, Callable[[Field, Kafka | Postgres], None]] = {
    "frozen for 4 s": _freeze(4),
    "frozen for 20 s": _freeze(20),
    "stopped for 5 s": _stop(5),
    "restarted": _stop(0),
    "killed": _kill,
}


def _signal(processes: list[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        try:
            process.send_signal(number)
        except psutil.NoSuchProcess:
            continue  # a session that has just ended


# ── the database alone ──


def terminate_sessions(field: Field) -> bool:
    """`pg_terminate_backend` of one or more sessions of handlers, agents and builders, whichever they are."""
    with connect(field.world, "chaos terminate") as connection:
        found = connection.execute(
            "select pid from pg_stat_activity where datname = current_database() and application_name like 'samefold %'"
        )
        pids = [pid for (pid,) in found]
        if not pids:
            return False
        chosen = field.random.sample(pids, field.random.randint(1, len(pids)))
        with field.effects.recovery("ended sessions"):
            ended = connection.execute(
                "select pid, pg_terminate_backend(pid) from unnest(%s) pid", (chosen,)
            ).fetchall()
            took = [pid for pid, done in ended if done]
            for _ in took:
                field.effects.took_effect("session terminated")
            field.until_visible()
    return bool(took)


# ── the job that runs meanwhile ──


class _Running:
    """One run of `samefold JOB`, through the proxies like everything else."""

    def __init__(self, field: Field, job: Job, before: _Running | None = None) -> None:
        """`before` is the run that this one repeats."""
        self.field, self.job = field, job
        number = field.number()
        self._log = field.folder / f"{job}-{number}.out"
        self.commands: list[Sent] = before.commands if before else self._commands(number) if job == "send" else []
        file = field.folder / f"send-{number}.jsonl"
        file.write_text("".join(map(_line, self.commands)))
        arguments: dict[Job, list[str]] = {
            "send": [str(file), "--wait"],
            "rebuild": [field.random.choice(["balances", "statement", "daily_totals"])],
            "verify": ["--json"],
            "archive": [],
        }
        self._process = field.crew.samefold(self._log, job, *arguments[job])

    def ended_well(self) -> bool:
        """Whether it succeeded. What it must never do is a violation: hang, end in a traceback, say what is not so."""
        try:
            code = self._process.wait(JOB_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            self.field.violations.append(f"F: `{self.job}` did not end in {JOB_S:.0f} s: {self.output()}")
            return True
        if "Traceback" in self.output() or code not in (0, 1):
            self.field.violations.append(f"`{self.job}` ended with {code}: {self.output()}")
        if self.job == "verify" and re.search(r'"differences": *[1-9]', self._log.read_text()):
            self.field.violations.append(f"C: verify found differences: {self.output()}")
        if self.job == "send" and code == 0:
            self.field.load.acknowledged.update((one.stream, one.id) for one in self.commands)
        return code == 0

    def output(self) -> str:
        return self._log.read_text(errors="replace")[-2_000:]

    def _commands(self, number: int) -> list[Sent]:
        names = [f"accounts/s{number}-{n}" for n in range(50)]
        commands = [Sent(name, f"open-{name}", "OpenAccount", 0, "2026-01-01") for name in names]
        commands += [Sent(names[n % 50], f"send-{n}", "Deposit", 1 + n % 100, "2026-01-02") for n in range(SENT)]
        self.field.load.sent.update({(one.stream, one.id): one for one in commands})
        return commands


def _line(command: Sent) -> str:
    return json.dumps({"stream": command.stream, "id": command.id, "type": command.type, "data": command.body}) + "\n"
