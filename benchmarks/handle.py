"""How many commands one handler decides and appends in a second, states read from PostgreSQL; and while the agent runs."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass

from benchmarks.check import OUTCOMES, STATES, check_count, check_decisions, check_rows, require
from benchmarks.fill import fill_commands
from benchmarks.peers.job import Job
from benchmarks.peers.turn import turn
from benchmarks.processes import Process, wait_until
from benchmarks.reading import Progressed, progress_of
from benchmarks.results import Aim, Result, Sample, middle
from benchmarks.stage import Bench, World
from benchmarks.workload import OPEN, Expected, Ledger, Order, movements, opening_orders

CASES = {"wide": 200_000, "hot": 1_000}
"""Streams."""
COMMANDS = 300_000
HANDLER = "samefold handler"
COMBINED = "samefold handler and agent"
PEER = "pyeventsourcing, get + save, database functions"
PEERS = {"pyeventsourcing, get + save": {}, PEER: {"POSTGRES_ENABLE_DB_FUNCTIONS": "y"}}
"""As it comes, and its fastest setting in which states are read from PostgreSQL, which counts."""
PEER_COMMANDS = 5_000
VIEWS = ["balances"]
LOOK_S = 0.05


def run(bench: Bench) -> Result:
    count = bench.options.scaled(COMMANDS)
    streams = {case: bench.options.scaled(size) for case, size in CASES.items()}
    samples: list[Sample] = []
    for number in range(1, bench.options.rounds + 1):
        for case in CASES:
            samples += _ours(bench, case, streams[case], count, number)
            samples += [_peer(bench, peer, case, streams[case], number) for peer in PEERS]
    ours = {case: middle(samples, HANDLER, case) for case in CASES}
    aims = [
        Aim("one handler, wide", 50_000, ours["wide"], unit="commands/s", case="wide"),
        *(Aim(f"beside {PEER}, {case}", 60, ours[case] / middle(samples, PEER, case), unit="x") for case in CASES),
    ]
    title = "Commands decided and appended per second"
    size = {"commands": count, "streams": streams, "commands_of_peers": bench.options.scaled(PEER_COMMANDS)}
    return Result("handle", title, "commands/s", samples, aims, size)


def _ours(bench: Bench, case: str, streams: int, count: int, number: int) -> list[Sample]:
    """The handler by itself, then handler and agent together, on a read model that knows every stream."""
    chance = bench.chance("handle", case, number)
    with bench.world(run_ahead=10 * (count + streams)) as world, progress_of(world) as progress:
        turn = _Turn(bench, world, progress, Ledger(streams), f"handle {case}, round {number}")
        turn.open_accounts(chance)
        handled = turn.handler_alone(turn.load(count, chance), case, number)
        turn.drain()
        combined = turn.combined(turn.load(count, chance), case, number)
        check_rows(world.settings, STATES, turn.ledger.rows(), "states of streams")
        check_count(world.settings, OUTCOMES, streams + 2 * count, "outcomes")
    return [handled, combined]


def _peer(bench: Bench, peer: str, case: str, streams: int, number: int) -> Sample:
    """The peer has in its tables only the streams that it will meet, which is in its favour."""
    orders = list(movements(streams, bench.options.scaled(PEER_COMMANDS), bench.chance("handle peer", case, number)))
    ledger = Ledger(streams)
    ledger.enter_all(Order(number, OPEN, "") for number in {order.account for order in orders})
    ledger.enter_all(orders)
    job = Job(orders=orders, options=PEERS[peer])
    with turn(bench, bench.stack.settings(), "pyeventsourcing_commands", job, peer, case, number) as (done, sample, _):
        require(done.rows == ledger.rows(), f"{peer}: its aggregates are not those of the ledger")
    return sample


@dataclass(slots=True)
class _Turn:
    """One round on one world. `ledger` knows what must have become of all that was sent."""

    bench: Bench
    world: World
    progress: Progressed
    ledger: Ledger
    title: str

    def open_accounts(self, chance: random.Random) -> None:
        """Every stream gets its row the product's own way, before anything is measured."""
        orders = opening_orders(len(self.ledger.version), chance)
        self.ledger.enter_all(orders)
        with self.bench.handler(self.world) as handler, self.bench.agent(self.world, VIEWS) as agent:
            self.progress.carry_out(self.bench, orders, f"{self.title}: open accounts", handler, agent)
        self.progress.vacuum()

    def load(self, count: int, chance: random.Random) -> Mapping[str, Expected]:
        """So many undecided commands in the topic, and the expected outcome of each."""
        self.bench.progress.begin(f"{self.title}: load commands", count)
        orders = list(movements(len(self.ledger.version), count, chance))
        fill_commands(self.world.settings, orders, self.bench.progress.advance)
        return self.ledger.enter_all(orders)

    def handler_alone(self, expected: Mapping[str, Expected], case: str, number: int) -> Sample:
        """From the first commit to the last, by the broker's clock."""
        start = self.progress.ends()
        before = sum(start.values()) + len(start)  # a takeover begins with an opening for each partition
        self.bench.progress.begin(f"{self.title}: handler", len(expected))
        with self.bench.handler(self.world) as handler:
            self._wait(lambda: self.progress.appended() - before, 1, handler)
            meter = self.bench.cpu(handler=[handler])
            self._wait(lambda: self.progress.appended() - before, len(expected), handler)
            cpu = meter.spent()
        self.bench.progress.begin(f"{self.title}: check", None)
        decided = check_decisions(self.world.settings, start, self.progress.ends(), expected)
        more = {"start_up_s": decided.first_ms / 1000 - handler.started_at}
        return Sample(HANDLER, case, number, decided.rate, decided.commits, decided.seconds, cpu, more)

    def drain(self) -> None:
        """The agent catches up with the handler."""
        self.bench.progress.begin(f"{self.title}: agent catches up", None)
        with self.bench.agent(self.world, VIEWS) as agent:
            self._wait(self.progress.folded, self.progress.appended(), agent)
        self.progress.vacuum()

    def combined(self, expected: Mapping[str, Expected], case: str, number: int) -> Sample:
        """From the first commit until the last outcome is visible."""
        start = self.progress.ends()
        before = self.progress.answered()
        self.bench.progress.begin(f"{self.title}: handler and agent", len(expected))
        with ExitStack() as processes:
            agent = processes.enter_context(self.bench.agent(self.world, VIEWS))
            agent.wait_for_log("has partitions")
            handler = processes.enter_context(self.bench.handler(self.world))
            self._wait(lambda: self.progress.answered() - before, 1, handler, agent)
            meter = self.bench.cpu(handler=[handler], agent=[agent])
            self._wait(lambda: self.progress.answered() - before, len(expected), handler, agent)
            visible_at = time.time()
            cpu = meter.spent()
        decided = check_decisions(self.world.settings, start, self.progress.ends(), expected)
        seconds = visible_at - decided.first_ms / 1000
        more = {"decided_per_s": decided.rate}
        return Sample(COMBINED, case, number, decided.commits / seconds, decided.commits, seconds, cpu, more)

    def _wait(self, done: Callable[[], int], total: int, *processes: Process) -> None:
        wait_until(done, total, processes, self.bench.progress.advance, every=LOOK_S)
