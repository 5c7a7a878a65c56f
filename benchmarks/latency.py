"""How long one command takes from its sending until its outcome is visible, beside what its way costs at the very least."""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from math import ceil
from statistics import median

from confluent_kafka import Producer

from benchmarks.check import check_count, check_rows, require
from benchmarks.fill import DAY_TEXT, fill_commands
from benchmarks.floor import Floor
from benchmarks.processes import Process, wait_until
from benchmarks.reading import Progressed, progress_of
from benchmarks.results import Aim, Result, Sample, middle
from benchmarks.stage import Bench, World
from benchmarks.workload import Ledger, Order, opening_orders, order_id, stream_of
from commands.client import CORE_CHANNEL
from commands.outcomes import outcomes_of
from infra.database.connect import Connection, connect
from infra.log import clients
from infra.log.partitioner import partition_of

OURS = "samefold, send to visible"
FLOOR = "floor: two sends, one transaction"
CASES = {"idle": 0, "1,000/s": 1_000}
"""Other commands per second, meanwhile."""
COMMANDS = 1_000
BLOCK = 50
"""Of each contender, before it is the other's turn."""
WARM_UP = 2_000
"""Of each contender, before each turn: the broker compiles what it does often."""
CLIENT_ACCOUNTS = 100
OTHER_ACCOUNTS = 1_000
VIEWS = ["balances"]
LOST_S = 30.0
PERCENTILES = (50, 75, 90, 95, 99, 99.9)

BALANCES = """
select account, transactions + 1, cents from balances_v1 where account < '000100'
"""
OTHERS = "select coalesce(sum(cents), 0) from balances_v1 where account >= '000100'"
FLOOR_COUNT = "select count(*) from command_outcomes_v1"


def run(bench: Bench) -> Result:
    count = bench.options.scaled(COMMANDS, least=BLOCK)
    warm_up = bench.options.scaled(WARM_UP)
    samples: list[Sample] = []
    curves: dict[str, list[float]] = {}
    with bench.world() as world, progress_of(world) as progress, bench.beside(world) as aside, ExitStack() as open_:
        agent = open_.enter_context(bench.agent(world, VIEWS))
        handler = open_.enter_context(bench.handler(world))
        client = open_.enter_context(_client(world, bench.chance("latency")))
        floor = open_.enter_context(Floor(aside))
        _open_accounts(bench, world, progress, client, (handler, agent))
        others = 0
        times: dict[tuple[str, str], list[float]] = {}
        for number in range(1, bench.options.rounds + 1):
            for case, rate in CASES.items():
                bench.progress.begin(f"latency {case}, round {number}", count)
                with _load(bench, world, rate, number) as load:
                    _repeat(client.step, warm_up)
                    _repeat(floor.step, warm_up)
                    turn: dict[str, list[float]] = {OURS: [], FLOOR: []}
                    cpu: dict[str, float] = defaultdict(float)
                    for _ in range(max(count // BLOCK, 1)):
                        meter = bench.cpu(handler=[handler], agent=[agent])
                        turn[OURS] += _repeat(client.step, BLOCK)
                        for name, seconds in meter.spent().items():
                            cpu[name] += seconds
                        turn[FLOOR] += _repeat(floor.step, BLOCK)
                        bench.progress.advance(BLOCK)
                others += load.sent()
                for contender, measured in turn.items():
                    times.setdefault((contender, case), []).extend(measured)
                    # with others' commands among it, processor time says nothing about ours
                    spent = (
                        {name: round(seconds, 2) for name, seconds in cpu.items()}
                        if contender == OURS and not rate
                        else {}
                    )
                    samples.append(_sample(contender, case, number, measured, spent, {"others_per_s": load.rate()}))
        _wait_for_all(bench, progress, client, others, (handler, agent))
        check_rows(world.settings, BALANCES, client.ledger.rows(), "balances")
        check_count(world.settings, OTHERS, others, "cents of the background load")
        check_count(aside.settings, FLOOR_COUNT, floor.count, "transactions of the floor")
    for (contender, case), measured in times.items():
        curves[f"{contender}, {case}"] = curve(measured)
    aims = [
        Aim(
            f"p50 beside the floor's, {case}",
            1.8,
            middle(samples, OURS, case) / middle(samples, FLOOR, case),
            at_most=True,
            unit="x",
        )
        for case in CASES
    ]
    title = "From sending a command until its outcome is visible"
    return Result("latency", title, "ms, p50", samples, aims, {"commands": count, "block": BLOCK}, {"curves": curves})


@dataclass(slots=True)
class _Client:
    """Sends a command and waits for its outcome, as `commands.client` does, for one at a time."""

    world: World
    chance: random.Random
    database: Connection
    producer: Producer
    ledger: Ledger = field(default_factory=lambda: Ledger(CLIENT_ACCOUNTS))
    sent: int = 0

    def step(self) -> None:
        """One deposit, until it is visible. Raises RunVoid where it is not accepted."""
        order = Order(self.chance.randrange(CLIENT_ACCOUNTS), 1, order_id(self.chance))
        self.ledger.enter(order)
        self.sent += 1
        stream = stream_of(order.account)
        settings = self.world.settings
        self.producer.produce(
            settings.commands_topic,
            _DEPOSIT % (order.id.encode(), stream.encode()),
            key=stream.encode(),
            partition=partition_of(stream, settings.partitions),
        )
        self.producer.poll(0)
        deadline = time.monotonic() + LOST_S
        while True:
            for _ in self.database.notifies(timeout=1, stop_after=1):
                pass
            if found := outcomes_of(self.database, [(stream, order.id)]):
                require(found[stream, order.id].outcome == "accepted", f"command {order.id} was rejected")
                return
            require(time.monotonic() < deadline, f"command {order.id} has no outcome after {LOST_S:.0f} s")


_DEPOSIT = (
    b'{"samefold":"command/1","id":"%s","stream":"%s","type":"Deposit","data":{"cents":1,"on":"'
    + DAY_TEXT
    + b'"},"expected_version":null}'
)


@contextmanager
def _client(world: World, chance: random.Random) -> Iterator[_Client]:
    with connect(world.settings, "samefold bench client") as database:
        database.execute(f"listen {CORE_CHANNEL}".encode())
        yield _Client(world, chance, database, clients.producer(world.settings))


def _open_accounts(
    bench: Bench, world: World, progress: Progressed, client: _Client, processes: tuple[Process, ...]
) -> None:
    orders = opening_orders(CLIENT_ACCOUNTS + OTHER_ACCOUNTS, bench.chance("open"))
    client.ledger.enter_all(order for order in orders if order.account < CLIENT_ACCOUNTS)
    fill_commands(world.settings, orders, lambda _: None)
    bench.progress.begin("latency: open accounts", len(orders))
    wait_until(progress.answered, len(orders), processes, bench.progress.advance, every=0.05)


@dataclass(slots=True)
class _Load:
    """The background load of one turn; `sent` is known when it has ended."""

    process: Process | None

    def sent(self) -> int:
        return self._told()[0]

    def rate(self) -> float:
        """Sent per second: what the machine made of the rate that was asked for."""
        sent, milliseconds = self._told()
        return 1000 * sent / milliseconds

    def _told(self) -> tuple[int, int]:
        if self.process is None:
            return 0, 1
        sent, milliseconds = self.process.log.read_text().splitlines()[-1].split()
        return int(sent), int(milliseconds)


@contextmanager
def _load(bench: Bench, world: World, rate: int, number: int) -> Iterator[_Load]:
    if not rate:
        yield _Load(None)
        return
    given = {"first": CLIENT_ACCOUNTS, "accounts": OTHER_ACCOUNTS, "rate": rate, "seed": number}
    arguments = [text for name, value in given.items() for text in (f"--{name}", str(value))]
    with Process(world.settings, bench.folder, "background", "benchmarks.background", *arguments) as process:
        yield _Load(process)


def _wait_for_all(
    bench: Bench, progress: Progressed, client: _Client, others: int, processes: tuple[Process, ...]
) -> None:
    total = CLIENT_ACCOUNTS + OTHER_ACCOUNTS + client.sent + others
    bench.progress.begin("latency: wait for all outcomes", None)
    wait_until(progress.answered, total, processes, lambda _: None, every=0.05)


def _repeat(step: Callable[[], None], count: int) -> list[float]:
    """Milliseconds of each step."""
    times = []
    for _ in range(count):
        began = time.perf_counter()
        step()
        times.append(1000 * (time.perf_counter() - began))
    return times


def _sample(
    contender: str, case: str, number: int, measured: list[float], cpu: dict[str, float], more: dict[str, float]
) -> Sample:
    percentiles = {f"p{p:g}_ms": percentile(measured, p) for p in PERCENTILES if p != 50} | {"max_ms": max(measured)}
    more = percentiles | more
    return Sample(contender, case, number, median(measured), len(measured), sum(measured) / 1000, cpu, more)


def percentile(values: list[float], percent: float) -> float:
    """The smallest value that so many per cent of all do not exceed."""
    ordered = sorted(values)
    return ordered[max(ceil(len(ordered) * percent / 100), 1) - 1]


def curve(values: list[float]) -> list[float]:
    """The percentiles 1 to 100."""
    return [round(percentile(values, percent), 3) for percent in range(1, 101)]
