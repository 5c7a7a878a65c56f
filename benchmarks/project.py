"""How many events an agent folds in a second, live, over Faust: states, outcomes and one entity view."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import chain

from benchmarks.check import BALANCES, OUTCOMES, STATES, check_count, check_rows, require
from benchmarks.fill import fill_log
from benchmarks.one_in_ten import POLICY
from benchmarks.peers.job import Job
from benchmarks.peers.simple_tables import applied_orders, balances_of
from benchmarks.peers.turn import turn
from benchmarks.processes import Process, wait_until
from benchmarks.reading import progress_of
from benchmarks.results import Aim, Result, Sample, middle
from benchmarks.stage import Bench, World
from benchmarks.workload import Ledger, Order, history
from infra.database.connect import connect
from infra.log.contract import Contract
from projections.engine.live.startup import ensure_started
from projections.engine.views.core_views import all_views
from projections.engine.views.view import CORE

CASES = {"wide": 200_000, "hot": 1_000}
"""Streams."""
EVENTS = 600_000
ONE = "samefold, 1 process"
REACTED_TO = "samefold, 1 process, and a policy"
TWO = "samefold, 2 processes"
PLAIN = "one event, one transaction"
PIPELINED = "one event, one transaction, pipelined"
FAUST = "stock Faust agent"
RUNNER = "pyeventsourcing ProjectionRunner"
PEERS = {PLAIN: "one_by_one", PIPELINED: "one_by_one", FAUST: "stock_faust", RUNNER: "pyeventsourcing_runner"}
WANTED = {PLAIN: 25, FAUST: 40, RUNNER: 25}
"""Times as fast as the peer, one process, wide."""
PEER_EVENTS = 10_000
VIEW = "balances"
LOOK_S = 0.02

WISHES = "select count(*) from outbox"
ACCEPTED = f"{OUTCOMES} where code is null"


def run(bench: Bench) -> Result:
    count = bench.options.scaled(EVENTS)
    streams = {case: bench.options.scaled(size) for case, size in CASES.items()}
    samples: list[Sample] = []
    with ExitStack() as worlds:
        logs = {}
        for case, size in streams.items():
            world = worlds.enter_context(bench.world())
            bench.progress.begin(f"project {case}: load events", count)
            orders = list(history(size, count, bench.chance("project", case)))
            fill_log(world.settings, world.commands.id, orders, bench.progress.advance)
            logs[case] = world, orders
        for number in range(1, bench.options.rounds + 1):
            for case, (world, orders) in logs.items():
                for contender, processes in ((ONE, 1), (REACTED_TO, 1), (TWO, 2)):
                    samples.append(fold(bench, world, orders, contender, case, number, processes))
                samples += [_peer(bench, world, orders, contender, case, number) for contender in PEERS]
    ours = middle(samples, ONE, "wide")
    aims = [
        Aim("one process, wide", 60_000, ours, unit="events/s", case="wide"),
        Aim("beside no policy, wide", 0.9, middle(samples, REACTED_TO, "wide") / ours, unit="x"),
        *(
            Aim(f"beside {peer}, wide", wanted, ours / middle(samples, peer, "wide"), unit="x")
            for peer, wanted in WANTED.items()
        ),
    ]
    title = "Events folded live, per second"
    sizes = {"events": count, "streams": streams, "events_of_peers": bench.options.scaled(PEER_EVENTS)}
    return Result("project", title, "events/s", samples, aims, sizes)


def fold(
    bench: Bench,
    log: World,
    orders: Sequence[Order],
    contender: str,
    case: str,
    number: int,
    processes: int,
    agent: str = CORE,
) -> Sample:
    """From the moment when the processes, ready and with their partitions, may begin, until all is committed.

    An agent that is not the core one has the entity view only.
    """
    ledger = Ledger(1 + max(order.account for order in orders))
    ledger.enter_all(orders)
    bench.progress.begin(f"project {case}, round {number}: {contender}", len(orders))
    with bench.world(beside=log) as world, progress_of(world) as progress, ExitStack() as running:
        ends = world.ends()
        total = sum(ends.values())
        start_held(world, agent)
        names = [f"agent-{n}" for n in range(1, processes + 1)]
        agents = tuple(running.enter_context(bench.agent(world, [VIEW], name, agent=agent)) for name in names)
        wait_for_assignment(agents, world.settings.partitions)
        groups = {"agent": agents}
        if contender == REACTED_TO:
            policy = running.enter_context(bench.process(world, "policy", "benchmarks.one_in_ten"))
            policy.wait_for_log("waits")
            groups["policy"] = (policy,)
        measured = tuple(chain.from_iterable(groups.values()))
        meter = bench.cpu(**groups)
        began = release(world)
        wait_until(lambda: progress.folded(agent), total, measured, bench.progress.advance, every=LOOK_S)
        seconds = time.monotonic() - began
        cpu = meter.spent()
        if contender == REACTED_TO:
            wait_until(lambda: progress.folded(POLICY.agent), total, measured, lambda _: None, every=LOOK_S)
            check_count(world.settings, WISHES, sum(len(range(10, end, 10)) for end in ends.values()), "wishes")
        running.pop_all().close()
        if agent == CORE:
            check_rows(world.settings, STATES, ledger.rows(), "states of streams")
            check_count(world.settings, ACCEPTED, len(orders), "outcomes")
        check_rows(world.settings, BALANCES, ledger.rows(), "balances")
    return Sample(contender, case, number, len(orders) / seconds, len(orders), seconds, cpu)


def _peer(bench: Bench, log: World, orders: Sequence[Order], contender: str, case: str, number: int) -> Sample:
    """The same log, for as many events as a peer gets done in some seconds; pyeventsourcing has them in its own."""
    partitions = log.settings.partitions
    count = min(bench.options.scaled(PEER_EVENTS), len(orders))
    options = {"pipeline": "yes"} if contender == PIPELINED else {}
    own = contender == RUNNER
    job = Job(topic=log.events.name, partitions=partitions, count=count, options=options)
    if own:
        job = Job(orders=list(orders[:count]))
    with turn(bench, log.settings, PEERS[contender], job, contender, case, number) as (done, sample, url):
        require(done.count == count, f"{contender} did {done.count} events, not {count}")
        applied = orders[:count] if own else applied_orders(orders, partitions, url)
        require(len(applied) == count, f"{contender}: its offsets stand for {len(applied)} events, not {count}")
        ledger = Ledger(1 + max(order.account for order in applied))
        ledger.enter_all(applied)
        require(
            (done.rows if own else balances_of(url)) == ledger.rows(), f"{contender}: its rows are not the ledger's"
        )
    return sample


def start_held(world: World, agent: str = CORE) -> None:
    """Make the agent's first start, with a version recorded live that no code has: workers take partitions and hold."""
    views = {name: view for name, view in all_views().items() if name == VIEW or (view.is_system and agent == CORE)}
    with connect(world.settings, "samefold bench") as connection:
        ensure_started(connection, agent, views, Contract.of(world.events))
        connection.execute("update live set version = version + 1000 where view = %s", [VIEW])


def release(world: World) -> float:
    with connect(world.settings, "samefold bench") as connection:
        connection.execute("update live set version = version - 1000 where view = %s", [VIEW])
    return time.monotonic()


def wait_for_assignment(agents: Sequence[Process], partitions: int) -> None:
    """Until the group has given each process its share and no partition is without an owner."""

    def is_assigned() -> int:
        shares = [_share(agent) for agent in agents]
        return int(all(shares) and sorted(chain.from_iterable(shares)) == list(range(partitions)))

    wait_until(is_assigned, 1, tuple(agents), lambda _: None, every=LOOK_S)


def _share(agent: Process) -> list[int]:
    """The partitions that the agent logged last."""
    logged = re.findall(r"has partitions \[([0-9, ]*)\]", agent.log.read_text(errors="replace"))
    return [int(number) for number in logged[-1].split(",") if number.strip()] if logged else []
