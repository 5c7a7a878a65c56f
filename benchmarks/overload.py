"""What the API does under more load than it can carry: whether it goes on as fast, answers in time, and keeps its memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import psutil

from benchmarks.check import BALANCES, OUTCOMES, check_count, require
from benchmarks.fill import fill_commands
from benchmarks.http import Server, served
from benchmarks.overload_client import DRAIN_S, Told
from benchmarks.processes import PeakMemory, wait_until
from benchmarks.reading import progress_of
from benchmarks.results import Aim, Result, Sample, middle
from benchmarks.stage import Bench, World
from benchmarks.workload import Order, name_of, opening_orders, order_id, stream_of
from infra.database.connect import connect
from infra.log import topics
from infra.log.partitioner import partition_of

OURS = "samefold"


class Case(NamedTuple):
    connections: int
    patient: bool = False
    deaf: int = 0
    accounts: int = 1_000


NORMAL, TWICE, TENFOLD = "1,000 clients", "4,000 clients", "10,000 clients"
HOT = "1,000 clients, one stream"
DEAF = "1,000 clients, and 50 that read nothing"
CASES = {
    NORMAL: Case(1_000),
    TWICE: Case(4_000),
    TENFOLD: Case(10_000),
    f"{TENFOLD} that wait as told": Case(10_000, patient=True),
    DEAF: Case(1_000, deaf=50),
    HOT: Case(1_000, accounts=1),
}
SECONDS = 60
ACCOUNTS = 1_000
BOUND_MS = 20_000
"""Of each answer: twice the time after which a command without an outcome is answered 202."""


def run(bench: Bench) -> Result:
    samples: list[Sample] = []
    with bench.world() as world, served(bench, world) as server:
        turns = _Turns(bench, world, server)
        turns.open_accounts()
        for number in range(1, bench.options.rounds + 1):
            samples += [turns.take(name, case, number) for name, case in CASES.items()]
        turns.check()
    usual = middle(samples, OURS, NORMAL)
    require(usual > 0, f"nothing was done for {NORMAL}")
    aims = [
        Aim(f"{case} beside {NORMAL}", 0.9, middle(samples, OURS, case) / usual, unit="x")
        for case in CASES
        if case not in (NORMAL, HOT)
    ]
    aims += [
        Aim(
            "429 and 503 without Retry-After", 0, sum(one.more["without_retry_after"] for one in samples), at_most=True
        ),
        Aim("the slowest answer", BOUND_MS, max(one.more["max_ms"] for one in samples), at_most=True, unit="ms"),
    ]
    if bench.options.rounds > 1:
        first, second = (max(one.more["api_mb"] for one in samples if one.round == number) for number in (1, 2))
        aims.append(
            Aim("memory of the API in the second round beside the first", 1.1, second / first, at_most=True, unit="x")
        )
    cases = {name: case._asdict() for name, case in CASES.items()}
    size = {"seconds": turns.seconds, "cases": cases, "running": [*server.processes]}
    return Result("overload", "Commands done per second under more and more clients", "done/s", samples, aims, size)


@dataclass(slots=True)
class _Turns:
    """What all clients were told so far, by account."""

    bench: Bench
    world: World
    server: Server
    accepted: list[int] = field(default_factory=lambda: [0] * ACCOUNTS)
    unknown: list[int] = field(default_factory=lambda: [0] * ACCOUNTS)
    _turn: int = 0

    @property
    def seconds(self) -> int:
        return self.bench.options.scaled(SECONDS, least=6)

    def open_accounts(self) -> None:
        orders = opening_orders(ACCOUNTS, self.bench.chance("open"))
        with progress_of(self.world) as progress:
            progress.carry_out(self.bench, orders, "overload: open accounts", *self.server.processes.values())

    def take(self, name: str, case: Case, number: int) -> Sample:
        """One case's turn; then all that it left is worked off."""
        self.bench.progress.begin(f"overload {name}, round {number}", None)
        self._turn += 1
        given = case._asdict() | {"patient": int(case.patient), "port": self.server.port, "seconds": self.seconds}
        seed = self.bench.options.seed * 1_000 + self._turn
        api = self.server.processes["api"]
        meter = self.bench.cpu(**{group: [process] for group, process in self.server.processes.items()})
        with (
            PeakMemory(api.pid) as peak,
            self.bench.process(self.world, "load", "benchmarks.overload_client", seed=seed, **given) as load,
        ):
            if load.wait(self.seconds + DRAIN_S + 60):
                load.fail("The client of the benchmark failed.")
        cpu = meter.spent()
        self.server.check()
        told = msgspec.json.decode(load.last_line(), type=Told)
        self._enter(told)
        self._work_off()
        more = {
            **{f"answered_{status}": float(told.statuses.pop(status, 0)) for status in ("200", "202", "429", "503")},
            "answered_else": float(sum(told.statuses.values())),
            **{name: getattr(told, name) for name in _FIGURES},
            "api_mb": peak.bytes / 2**20,
            "api_after_mb": psutil.Process(api.pid).memory_info().rss / 2**20,
        }
        cpu["client"] = round(told.cpu_s, 2)
        return Sample(OURS, name, number, told.done / told.seconds, max(sum(told.accepted), 1), told.seconds, cpu, more)

    def _enter(self, told: Told) -> None:
        for account, (accepted, unknown) in enumerate(zip(told.accepted, told.unknown, strict=True)):
            self.accepted[account] += accepted
            self.unknown[account] += unknown

    def _work_off(self) -> None:
        """Until the last command of each partition, one of our own, is decided and visible: so are those before."""
        chance = self.bench.chance("overload", self._turn)
        partitions = self.world.settings.partitions
        last = {partition_of(stream_of(account), partitions): account for account in range(ACCOUNTS)}
        orders = [Order(account, 1, order_id(chance)) for account in last.values()]
        fill_commands(self.world.settings, orders, lambda _: None)
        for order in orders:
            self.accepted[order.account] += 1
        with progress_of(self.world) as progress:
            ends = topics.describe(self.world.settings, self.world.commands.name).end
            processes = tuple(self.server.processes.values())
            wait_until(progress.answered, sum(ends.values()), processes, lambda _: None, every=0.05)

    def check(self) -> None:
        """Every deposit that a client was told of is there, and none that was not sent. Raises RunVoid."""
        with connect(self.world.settings, "samefold bench check") as database:
            rows = {account: (version, cents) for account, version, cents in database.execute(BALANCES)}
        require(len(rows) == ACCOUNTS, f"{len(rows)} accounts are there, not {ACCOUNTS}")
        check_told(rows, self.accepted, self.unknown)
        check_count(self.world.settings, OUTCOMES, sum(version for version, _ in rows.values()), "outcomes")


def check_told(rows: Mapping[str, tuple[int, int]], accepted: list[int], unknown: list[int]) -> None:
    """Raises RunVoid. `rows` are versions and cents by name; deposits are of one cent, after one opening."""
    for account, (told, more) in enumerate(zip(accepted, unknown, strict=True)):
        version, cents = rows[name_of(account)]
        require(version == cents + 1, f"account {account} has {cents} cents, but {version} events")
        require(
            told <= cents <= told + more,
            f"account {account} has {cents} cents; clients were told of {told}, and sent {more} more",
        )


_FIGURES = (
    *("p50_ms", "p99_ms", "max_ms", "done_p50_ms", "done_p99_ms"),
    *("without_retry_after", "lost", "unanswered"),
)
