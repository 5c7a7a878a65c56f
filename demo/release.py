"""The demo's end: the next release changes an event and a view, is rolled out in parallel, and takes over under load.

Each step is as in production, by the next release's own command line and processes: its check against what was released, its
migration, its agents and handlers in parallel to the old ones, its rebuild on Spark with the switch, its verify, and a rebuild as
of before the release.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from psycopg import sql

from commands.client import wait_for
from demo import question, report, tree
from demo.bank import Bank, command_for
from demo.crew import Crew
from demo.proof import Key, Proof, counted_in, rows_of
from demo.question import Year, years_of
from demo.report import Reporter
from demo.traffic import Traffic
from demo.watch import Before, Watch
from domain.accounts import Deposit
from infra.database.connect import connect
from infra.errors import SamefoldError
from infra.log.records import Command
from infra.settings import Settings

ACCOUNTS = 100
"""So many accounts have traffic."""
SPARK = ("--engine", "spark", "--master", "local[2]")
WITHIN_S = 60.0
NEVER = Before()
COMMAND_S = 180.0
GRACE_S = 15.0
DIFFERENCES = 1
"""The exit code of a verify that found some."""


class Sums(NamedTuple):
    """Over all accounts of the bank in one table of balances, in cents."""

    balance: int
    deposited: int


class Bodies(NamedTuple):
    """An event that the old release stored, how the next one reads it, and one that the next one stored; with their stored types.

    All are of one stream.
    """

    stored: Mapping[str, Any]
    read: Mapping[str, Any]
    new: Mapping[str, Any]


@dataclass(slots=True)
class Released:
    """What became of the next release. `took` is in seconds, by what was done.

    `lost` counts commands sent meanwhile without a commit or an outcome, `doubled` their commits beyond one. `rebuilt` is what
    the rebuild said, `differences` what verify found in `rows`. `then` is of the table as of `as_of`, when nothing of all this
    had begun and which the command `look_back` made, and `now` of the live one, with what the proof, the file and the traffic say
    they should be.
    """

    as_of: datetime
    sent: int
    lost: int
    doubled: int
    rebuilt: Mapping[str, Any]
    rows: int
    differences: int
    bodies: Bodies
    look_back: str
    table_then: str
    then: Sums
    now: Sums
    expected_then: Sums
    expected_now: Sums
    years: list[Year]
    expected_years: list[Year]
    took: dict[str, float] = field(default_factory=dict)

    @property
    def holds(self) -> bool:
        return not any((self.lost, self.doubled, self.differences, self.disagreements))

    @property
    def disagreements(self) -> list[str]:
        """Sums and events that are not what the proof, the file and the traffic say, as sentences."""
        pairs = ((self.then, self.expected_then), (self.now, self.expected_now))
        told = [
            f"the balances come to {found}, and should come to {expected}"
            for found, expected in pairs
            if found != expected
        ]
        if self.years != self.expected_years:
            told.append(f"the log's answer is {self.years}, and the file's {self.expected_years}")
        stored, read, new = self.bodies
        types = (stored["type"], read["type"], new["type"])
        if types != (tree.EVENT, f"{tree.EVENT}/2", f"{tree.EVENT}/2"):
            told.append(f"the events are of the types {', '.join(types)}")
        if read["data"] != stored["data"] | {"currency": "CZK"}:
            told.append(f"what was stored as {stored['data']} is read as {read['data']}")
        return told

    @property
    def drop(self) -> str:
        """The command that drops the table of time travel."""
        return f"samefold views drop {tree.VIEW} {self.table_then}"


def release(
    settings: Settings, folder: Path, old: Crew, watch: Watch, bank: Bank, proof: Proof, reporter: Reporter
) -> Released:
    """Roll out the next release in parallel to `old`, whose processes end here.

    Raises NotTheSample, NotAtWork, CommandFailed, OutcomeMissing, and what keeps the parts from working.
    """
    took: dict[str, float] = {}

    @contextmanager
    def timed(name: str, what: str) -> Iterator[None]:
        with reporter.timed(what):
            yield
        took[name] = round(reporter.took[what], 2)

    before = datetime.now(UTC)
    look_back = ("rebuild", tree.VIEW, "--as-of", before.isoformat(timespec="milliseconds"), "--no-switch")
    copy = folder / tree.FOLDER
    code = tree.environment(copy)
    samefold = CommandLine(copy, settings.environment() | code)
    accounts = sorted({transaction.account for transaction in bank.transactions})[:ACCOUNTS]
    with Traffic(settings, accounts, bank.transactions[-1].on) as traffic:
        report.show_change(tree.make(copy))
        with timed("check", "compared with what was released (events check, events release)"):
            samefold.run("events", "check")
            samefold.run("events", "release")
        with timed("migrate", "its table made by its migration (db revision, db upgrade)"):
            samefold.run("db", "revision", "-m", f"{tree.VIEW} {tree.COLUMN}")
            samefold.run("db", "upgrade")
        place = f"{settings.group_prefix}-next"
        with (
            Crew(settings, folder / "logs" / tree.FOLDER, place=place, environment=code) as new,
            reporter.until_the_end(),
        ):
            with timed("beside", "2 handlers and 2 agents of it, in parallel to the old ones"):
                # its handlers wait for agents that can fold their events, and its agents for the switch
                watch.wait_until(lambda: watch.is_ready([], [*new.handlers, *new.agents, *new.policies]), new)
            with timed("rebuild", f"'{tree.VIEW}' rebuilt with Spark, and switched to"):
                rebuilt = samefold.told("rebuild", tree.VIEW, *SPARK)
            with timed("handover", "its agents and handlers at work"):
                at_work = [*new.agents, *new.handlers]
                watch.wait_until(lambda: all(watch.has_worked(child, NEVER) for child in at_work), new)
            with timed("stop", "the old ones stopped, the last commands answered"):
                old.stop()
                traffic.stop()
                wait_for(settings, traffic.commands, lambda _count: None, timeout_s=WITHIN_S)
            with timed("verify", "all rows compared with a fold of the log, with Spark"):
                verified = samefold.told("verify", *SPARK)
            with timed("as_of", f"'{tree.VIEW}' as it was before, in a table of its own"):
                travelled = samefold.told(*look_back)
            with timed("question", "the log asked in SQL, with Spark"):
                told = samefold.python("the question", question.PROGRAM, before.isoformat(), question.QUESTION)
                years = [Year(*row) for row in json.loads(told.splitlines()[-1])]
            bodies = bodies_in(samefold, traffic.commands)
    log = counted_in(settings)
    lost, doubled = judge(traffic.commands, log, rows_of(settings, log).outcomes)
    table_then = travelled["tables"][tree.VIEW]
    deposited = sum(one.cents for one in bank.transactions if isinstance(command_for(one), Deposit))
    return Released(
        as_of=before,
        sent=len(traffic.commands),
        lost=lost,
        doubled=doubled,
        rebuilt=rebuilt,
        rows=sum(view["rows"] for view in verified["views"].values()),
        differences=verified["differences"],
        bodies=bodies,
        look_back=f"samefold {' '.join(look_back)}",
        table_then=table_then,
        then=sums_of(settings, table_then),
        now=sums_of(settings, rebuilt["tables"][tree.VIEW]),
        expected_then=Sums(proof.balance, deposited),
        expected_now=Sums(proof.balance + traffic.deposited - traffic.withdrawn, deposited + traffic.deposited),
        years=years,
        expected_years=years_of(bank.transactions),
        took=took,
    )


def judge(commands: Sequence[Command], log: Mapping[Key, int], outcomes: Mapping[Key, object]) -> tuple[int, int]:
    """(lost, doubled): commands without a commit or an outcome, and commits beyond one for each command."""
    asked = [(command.stream, command.id) for command in commands]
    lost = sum(not log.get(key) or key not in outcomes for key in asked)
    return lost, sum(max(log.get(key, 0) - 1, 0) for key in asked)


def sums_of(settings: Settings, table: str) -> Sums:
    """Of a table of balances in the next release's shape."""
    query = sql.SQL(
        "select coalesce(sum(cents), 0)::bigint, coalesce(sum({}), 0)::bigint from {} where account not like 'transfer-%'"
    )
    with connect(settings, "samefold demo") as connection:
        row = connection.execute(query.format(sql.Identifier(tree.COLUMN), sql.Identifier(table))).fetchone()
    assert row is not None, "sums have a row"
    return Sums(*row)


def bodies_in(samefold: CommandLine, commands: Sequence[Command]) -> Bodies:
    """Of the stream that had the last deposit of these commands, with which the next release was at work."""
    stream = next(command.stream for command in reversed(commands) if command.type == Deposit.__name__)

    def deposits(*how: str) -> list[Mapping[str, Any]]:
        entries = map(json.loads, samefold.run("history", stream, "--json", *how).splitlines())
        events = (event for entry in entries for event in entry["events"])
        return [event for event in events if event["type"].partition("/")[0] == tree.EVENT]

    stored = deposits("--stored")
    return Bodies(stored[0], deposits()[0], stored[-1])


class CommandFailed(SamefoldError):
    """A command of the next release did not do what it should."""


class CommandLine:
    """`samefold` of the tree in `folder`."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self._folder = folder
        self._environment = os.environ | environment

    def told(self, *arguments: str) -> dict[str, Any]:
        """The command's result with `--json`. Raises CommandFailed."""
        found: dict[str, Any] = json.loads(self.run(*arguments, "--json").splitlines()[-1])
        return found

    def run(self, *arguments: str) -> str:
        """The command's output. Raises CommandFailed."""
        return self.python(f"samefold {' '.join(arguments)}", "from tools.cli import main; main()", *arguments)

    def python(self, typed: str, program: str, *arguments: str) -> str:
        """A program's output. An interrupt ends it with all that it started. Raises CommandFailed, which calls it `typed`."""
        with subprocess.Popen(
            [sys.executable, "-c", program, *arguments],
            cwd=self._folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C reaches the demo only, which then ends this in order
        ) as process:
            try:
                output, errors = process.communicate(timeout=COMMAND_S)
            except subprocess.TimeoutExpired as error:
                raise CommandFailed(f"`{typed}` did not end within {COMMAND_S:.0f} s.") from error
            finally:
                if process.poll() is None:
                    _end(process)
        if process.returncode and not (process.returncode == DIFFERENCES and output):
            raise CommandFailed(
                f"`{typed}` ended with exit code {process.returncode}.",
                "Its output: " + " | ".join([*output.splitlines(), *errors.splitlines()][-8:]),
            )
        return output


def _end(process: subprocess.Popen[str]) -> None:
    """End the process with all that it started, such as Spark's JVM and its workers: they are in its session."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, number)
            process.wait(GRACE_S)
