"""How long one command takes from sending until its outcome is visible, compared with the least that its way costs."""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from confluent_kafka import Producer

from benchmarks.check import BALANCES, OUTCOMES, check_count, check_rows, require
from benchmarks.fill import DAY_TEXT
from benchmarks.floor import floor_of
from benchmarks.processes import wait_until
from benchmarks.reading import progress_of
from benchmarks.results import Aim, Result, Sample, curve, latency_sample, middle
from benchmarks.stage import Bench, World, background
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

OURS_ALONE = f"{BALANCES} where account < '000100'"
OTHERS = "select coalesce(sum(cents), 0) from balances_v2 where account >= '000100'"


def run(bench: Bench) -> Result:
    count = bench.options.scaled(COMMANDS, least=BLOCK)
    warm_up = bench.options.scaled(WARM_UP)
    samples: list[Sample] = []
    ledger = Ledger(CLIENT_ACCOUNTS)
    with (
        bench.world() as world,
        progress_of(world) as progress,
        bench.world(beside=world) as aside,
        ExitStack() as open_,
    ):
        agent = open_.enter_context(bench.agent(world, VIEWS))
        handler = open_.enter_context(bench.handler(world))
        client = open_.enter_context(client_of(world, bench.chance("latency"), ledger.enter))
        floor = open_.enter_context(floor_of(aside))
        orders = opening_orders(CLIENT_ACCOUNTS + OTHER_ACCOUNTS, bench.chance("open"))
        ledger.enter_all(order for order in orders if order.account < CLIENT_ACCOUNTS)
        progress.carry_out(bench, orders, "latency: open accounts", handler, agent)
        others = 0
        times: dict[tuple[str, str], list[float]] = {}
        for number in range(1, bench.options.rounds + 1):
            for case, rate in CASES.items():
                bench.progress.begin(f"latency {case}, round {number}", count)
                with ExitStack() as beside:
                    where = (CLIENT_ACCOUNTS, OTHER_ACCOUNTS, rate, number)
                    load = beside.enter_context(background(bench, world, *where)) if rate else None
                    repeat(client.step, warm_up)
                    repeat(floor.step, warm_up)
                    turn: dict[str, list[float]] = {OURS: [], FLOOR: []}
                    cpu: dict[str, float] = defaultdict(float)
                    for _ in range(max(count // BLOCK, 1)):
                        meter = bench.cpu(handler=[handler], agent=[agent])
                        turn[OURS] += repeat(client.step, BLOCK)
                        for name, seconds in meter.spent().items():
                            cpu[name] += seconds
                        turn[FLOOR] += repeat(floor.step, BLOCK)
                        bench.progress.advance(BLOCK)
                others += load.sent() if load else 0
                rates = {"others_per_s": load.rate() if load else 0.0}
                for contender, measured in turn.items():
                    times.setdefault((contender, case), []).extend(measured)
                    sample = latency_sample(contender, case, number, measured)
                    # with others' commands among it, processor time says nothing about ours
                    spent = cpu if contender == OURS and not rate else {}
                    sample.cpu.update({name: round(seconds, 2) for name, seconds in spent.items()})
                    sample.more.update(rates)
                    samples.append(sample)
        bench.progress.begin("latency: wait for all outcomes", None)
        total = len(orders) + client.sent + others
        wait_until(progress.answered, total, (handler, agent), lambda _: None, every=0.05)
        check_rows(world.settings, OURS_ALONE, ledger.rows(), "balances")
        check_count(world.settings, OTHERS, others, "cents of the background load")
        check_count(aside.settings, OUTCOMES, floor.count, "transactions of the floor")
    curves = {f"{contender}, {case}": curve(measured) for (contender, case), measured in times.items()}
    beside_floor = {case: middle(samples, OURS, case) / middle(samples, FLOOR, case) for case in CASES}
    aims = [Aim(f"p50 beside the floor's, {case}", 1.8, x, at_most=True, unit="x") for case, x in beside_floor.items()]
    title = "From sending a command until its outcome is visible"
    return Result("latency", title, "ms, p50", samples, aims, {"commands": count, "block": BLOCK}, {"curves": curves})


@dataclass(slots=True)
class Client:
    """Sends a command and waits for its outcome, as `commands.client` does, for one at a time."""

    world: World
    chance: random.Random
    database: Connection
    producer: Producer
    enter: Callable[[Order], object]
    """Into the ledger, each before it is sent."""
    first: int = 0
    """Of the accounts that are its own."""
    sent: int = 0

    def step(self) -> None:
        """One deposit, until it is visible. Raises RunVoid where it is not accepted."""
        order = Order(self.first + self.chance.randrange(CLIENT_ACCOUNTS), 1, order_id(self.chance))
        self.enter(order)
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
def client_of(
    world: World, chance: random.Random, enter: Callable[[Order], object], first: int = 0
) -> Iterator[Client]:
    with connect(world.settings, "samefold bench client") as database:
        database.execute(f"listen {CORE_CHANNEL}".encode())
        yield Client(world, chance, database, clients.producer(world.settings), enter, first)


def repeat(step: Callable[[], None], count: int) -> list[float]:
    """Milliseconds of each step."""
    times = []
    for _ in range(count):
        began = time.perf_counter()
        step()
        times.append(1000 * (time.perf_counter() - began))
    return times
