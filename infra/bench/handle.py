"""How many commands one handler decides and appends in a second, states read from PostgreSQL; and with the agent beside it."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from contextlib import ExitStack

from infra.bench.check import check_count, check_decisions, check_rows
from infra.bench.fill import fill_commands
from infra.bench.processes import wait_until
from infra.bench.results import Aim, Result, Sample, middle
from infra.bench.run import Bench, World
from infra.bench.workload import Expected, Ledger, movements, opening_orders
from infra.database.connect import connect

CASES = {"wide": 200_000, "hot": 1_000}
"""Streams."""
COMMANDS = 300_000
HANDLER = "samefold handler"
COMBINED = "samefold handler and agent"
VIEWS = ["balances"]
LOOK_S = 0.05

ROWS = """
select split_part(stream, '/', 2), version, (state->>'balance')::bigint from streams_accounts_v1
"""
OUTCOMES = "select count(*) from command_outcomes_v1"


def run(bench: Bench) -> Result:
    samples: list[Sample] = []
    for number in range(1, bench.options.rounds + 1):
        for case, streams in CASES.items():
            samples += _ours(bench, case, bench.options.scaled(streams), number)
    aims = [Aim("one handler, 200,000 streams", 50_000, middle(samples, HANDLER, "wide"), unit="commands/s")]
    return Result(
        "handle",
        "Commands decided and appended per second",
        "commands/s",
        samples,
        aims,
        {
            "commands": bench.options.scaled(COMMANDS),
            "streams": {case: bench.options.scaled(streams) for case, streams in CASES.items()},
        },
    )


def _ours(bench: Bench, case: str, streams: int, number: int) -> list[Sample]:
    """The handler by itself, then handler and agent together, on a read model that knows every stream."""
    count = bench.options.scaled(COMMANDS)
    chance = bench.chance("handle", case, number)
    ledger = Ledger(streams)
    with bench.world(run_ahead=10 * (count + streams)) as world:
        _open_accounts(bench, world, ledger, case, number)
        handled = _handler_alone(bench, world, _load(bench, world, ledger, count, chance), case, number)
        _drain(bench, world)
        combined = _combined(bench, world, _load(bench, world, ledger, count, chance), case, number)
        check_rows(world.settings, ROWS, ledger.rows(), "states of streams")
        check_count(world.settings, OUTCOMES, streams + 2 * count, "outcomes")
    return [handled, combined]


def _open_accounts(bench: Bench, world: World, ledger: Ledger, case: str, number: int) -> None:
    """Every stream gets its row by the product's own way: handler and agent, before anything is measured."""
    orders = opening_orders(len(ledger.version), bench.chance("open", case, number))
    ledger.enter_all(orders)
    bench.progress.begin(f"handle {case}, round {number}: open accounts", len(orders))
    fill_commands(world.settings, orders, lambda _: None)
    with bench.handler(world, "opening-handler") as handler, bench.agent(world, VIEWS, "opening-agent") as agent:
        wait_until(lambda: _visible(world), len(orders), (handler, agent), bench.progress.advance, every=LOOK_S)
    _vacuum(world)


def _load(bench: Bench, world: World, ledger: Ledger, count: int, chance: random.Random) -> Mapping[str, Expected]:
    """So many commands in the topic, nobody there to decide them; what must become of each."""
    bench.progress.begin("load commands", count)
    orders = list(movements(len(ledger.version), count, chance))
    fill_commands(world.settings, orders, bench.progress.advance)
    return ledger.enter_all(orders)


def _handler_alone(bench: Bench, world: World, expected: Mapping[str, Expected], case: str, number: int) -> Sample:
    start = world.ends()
    total = len(expected) + len(start)  # an opening for each partition
    bench.progress.begin(f"handle {case}, round {number}: handler", total)
    with bench.handler(world) as handler:
        meter = bench.cpu(handler=[handler])
        wait_until(
            lambda: sum(world.ends().values()) - sum(start.values()),
            total,
            (handler,),
            bench.progress.advance,
            every=LOOK_S,
        )
        cpu = meter.spent()
        started_at = handler.started_at
    bench.progress.begin("check", None)
    decided = check_decisions(world.settings, start, world.ends(), expected)
    return Sample(
        HANDLER,
        case,
        number,
        decided.rate,
        decided.commits,
        (decided.last_ms - decided.first_ms) / 1000,
        cpu,
        {"with_start_up_s": decided.last_ms / 1000 - started_at},
    )


def _drain(bench: Bench, world: World) -> None:
    """The agent catches up with the handler."""
    ends = world.ends()
    bench.progress.begin("agent catches up", None)
    with bench.agent(world, VIEWS, "draining-agent") as agent:
        wait_until(lambda: _position(world), sum(ends.values()), (agent,), lambda _: None, every=LOOK_S)
    _vacuum(world)


def _combined(bench: Bench, world: World, expected: Mapping[str, Expected], case: str, number: int) -> Sample:
    """From the first commit until the last outcome is visible, both processes at work."""
    start = world.ends()
    before = _visible(world)
    bench.progress.begin(f"handle {case}, round {number}: handler and agent", len(expected))
    with ExitStack() as processes:
        agent = processes.enter_context(bench.agent(world, VIEWS))
        agent.wait_for_log("has partitions")
        handler = processes.enter_context(bench.handler(world))
        meter = bench.cpu(handler=[handler], agent=[agent])
        wait_until(
            lambda: _visible(world) - before, len(expected), (handler, agent), bench.progress.advance, every=LOOK_S
        )
        visible_at = time.time()
        cpu = meter.spent()
    decided = check_decisions(world.settings, start, world.ends(), expected)
    seconds = visible_at - decided.first_ms / 1000
    return Sample(
        COMBINED,
        case,
        number,
        decided.commits / seconds,
        decided.commits,
        seconds,
        cpu,
        {"decided_per_s": decided.rate},
    )


def _position(world: World) -> int:
    """How many records of the log the agent has folded."""
    return _number(world, b"select coalesce(sum(next_offset), 0) from positions")


def _visible(world: World) -> int:
    """How many commands' outcomes are visible; every command so far came to one commit."""
    return _number(world, b"select coalesce(sum(command_offset + 1), 0) from positions")


def _number(world: World, query: bytes) -> int:
    with connect(world.settings, "samefold bench") as connection:
        row = connection.execute(query).fetchone()
    return int(row[0]) if row else 0


def _vacuum(world: World) -> None:
    """No autovacuum of what came before in the middle of a measurement."""
    with connect(world.settings, "samefold bench", statement_timeout_ms=0) as connection:
        connection.execute("vacuum analyze")
