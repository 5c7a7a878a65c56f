"""make test + prove: judges need no run; a log, or a benchmark, takes long. A wrong end state makes a run void.

All benchmarks are run in `test_bench_runs.py`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from benchmarks import crud, jvm
from benchmarks.check import BALANCES, OUTCOMES, STATES, RunVoid, check_count, check_decisions, check_rows
from benchmarks.cli import NAMES
from benchmarks.crud import Turn
from benchmarks.fill import DAY, Standing, fill_commands, fill_log
from benchmarks.http import check_versions, children_of
from benchmarks.http_client import HOST, Exchange
from benchmarks.http_parts import LAST, PARTS, parts_of
from benchmarks.overload import check_told
from benchmarks.plot import draw
from benchmarks.processes import BenchmarkStalled, Process, wait_until
from benchmarks.profile import NotProfiled, Profile
from benchmarks.rebuild import AFTER_START, IN_ALL
from benchmarks.report import Report
from benchmarks.results import Aim, Result, Sample, middle, percentile
from benchmarks.stage import Options
from benchmarks.switch import Answer, longest_waits, older_answers
from benchmarks.workload import (
    OPEN,
    OVERDRAFT_LIMIT,
    Expected,
    Ledger,
    Order,
    deposits,
    history,
    movements,
    opening_orders,
)
from domain import accounts
from domain.accounts import Command, Deposit, OpenAccount, State, Withdraw
from domain.language import Refusal
from infra.log.records import Commit, encode
from infra.log.rule import START, read
from infra.log.topics import describe, ensure
from infra.processes.supervisor import Child
from infra.settings import Settings
from tests.engine import spine
from tools.cli import run
from tools.testing.fixtures import SEED, Samefold
from tools.testing.waiting import DEADLINE_S, until

ACCOUNTS = 20
COUNT = 400


@pytest.fixture
def orders() -> list[Order]:
    """Each account opened, then movements, large enough that some are refused."""
    chance = random.Random(SEED)
    large = [order._replace(cents=30 * order.cents) for order in movements(ACCOUNTS, COUNT, chance)]
    return [*opening_orders(ACCOUNTS, chance), *large]


# ── the independent fold ──


def test_the_ledger_agrees_with_the_domain(orders: list[Order]) -> None:
    ledger = Ledger(ACCOUNTS)
    states = dict.fromkeys(range(ACCOUNTS), State())
    refused = 0
    for order in [*orders, *orders[:3]]:
        try:
            for event in accounts.decide(command(order), states[order.account]):
                states[order.account] = accounts.evolve(states[order.account], event)
            accepted = True
        except Refusal:
            accepted = False
            refused += 1
        assert ledger.enter(order).accepted == accepted
    assert ledger.balance == [state.balance for state in states.values()]
    assert refused > 3


def command(order: Order) -> Command:
    if order.cents == OPEN:
        return OpenAccount(overdraft_limit=OVERDRAFT_LIMIT, on=DAY)
    return Deposit(cents=order.cents, on=DAY) if order.cents > 0 else Withdraw(cents=-order.cents, on=DAY)


def test_a_history_is_one_that_was_accepted_and_comes_again_from_its_seed() -> None:
    first, again, other = (list(history(ACCOUNTS, 5_000, random.Random(seed))) for seed in (SEED, SEED, SEED + 1))
    ledger = Ledger(ACCOUNTS)
    assert all(ledger.enter(order).accepted for order in first)
    assert first == again != other


# ── what makes a run void ──


@pytest.mark.prove(part="bench-self")
def test_what_a_handler_decided_is_checked_command_by_command(world: Settings, orders: list[Order]) -> None:
    spine.set_up(world)
    expected = Ledger(ACCOUNTS).enter_all(orders)
    start = describe(world, world.events_topic).end
    fill_commands(world, orders, lambda _: None)
    with spine.handler(world):
        until(lambda: len(spine.commits(world)) == len(orders), "all are decided")
    end = describe(world, world.events_topic).end
    assert check_decisions(world, start, end, expected).commits == len(orders)
    assert sum(not one.accepted for one in expected.values()) > 0

    some = random.choice(list(expected))
    accepted, version = expected[some]
    for wrong in (
        expected | {some: Expected(accepted, version + 1)},
        expected | {some: Expected(not accepted, version)},
        expected | {"never-sent": Expected(True, 1)},
        {key: value for key, value in expected.items() if key != some},
    ):
        with pytest.raises(RunVoid):
            check_decisions(world, start, end, wrong)

    partition = random.choice([p for p, offset in end.items() if offset > 1])
    stray = Commit("accounts/000000", 1, [], "stray", 0, "f", "rejected", None, epoch=0, seq=999_999)
    spine.produce(world, world.events_topic, partition, None, encode(stray))
    with pytest.raises(RunVoid, match="does not count"):
        check_decisions(world, start, describe(world, world.events_topic).end, expected)


@pytest.mark.prove(part="bench-self")
def test_a_log_that_the_benchmark_wrote_counts_whole_and_folds_to_the_ledger(world: Settings) -> None:
    """Also where another writer goes on with it."""
    spine.set_up(world)
    commands, _ = ensure(world)
    chance, ledger, versions = random.Random(SEED), Ledger(ACCOUNTS), dict[str, int]()
    orders = chain(opening_orders(ACCOUNTS, chance), history(ACCOUNTS, COUNT, chance, opened=True))

    def entered(count: int) -> Iterator[Order]:
        for order in islice(orders, count):
            assert ledger.enter(order).accepted
            yield order

    standing: dict[int, Standing] | None = None
    ends = describe(world, world.events_topic).end
    for _ in range(2):
        given: dict[str, Any] = {"marks": [100, COUNT // 2], "standing": standing, "versions": versions}
        written, passed = fill_log(world, commands.id, entered(COUNT // 2), lambda _: None, **given)
        assert (sum(passed[100]), passed[COUNT // 2]) == (100, written)
        ends = describe(world, world.events_topic).end
        standing = {partition: Standing(end, -1) for partition, end in ends.items()}
    records = spine.records_of(world, world.events_topic)
    found = [read(START, [one for one in records if one.partition == partition]) for partition in ends]
    assert (sum(len(counted) for _, counted, _ in found), [void for _, _, void in found if void]) == (COUNT, [])

    assert spine.project(world) == COUNT
    rows = ledger.rows()
    check_rows(world, STATES, rows, "states")
    check_rows(world, BALANCES, rows, "balances")
    check_count(world, OUTCOMES, COUNT, "outcomes")
    name, (version, balance) = random.choice(list(rows.items()))
    for wrong in (
        rows | {name: (version, balance + 1)},
        rows | {"nobody": (1, 0)},
        {key: row for key, row in rows.items() if key != name},
    ):
        with pytest.raises(RunVoid, match="states"):
            check_rows(world, STATES, wrong, "states")
    with pytest.raises(RunVoid, match=f"outcomes: {COUNT}, not {COUNT + 1}"):
        check_count(world, OUTCOMES, COUNT + 1, "outcomes")


def test_what_clients_were_told_is_there_and_nothing_that_was_not_sent() -> None:
    rows = {"000000": (4, 3), "000001": (1, 0)}
    check_told(rows, [3, 0], [0, 0])
    check_told(rows, [2, 0], [1, 5])
    for accepted in ([4, 0], [2, 0], [3, 1]):
        with pytest.raises(RunVoid, match="clients were told"):
            check_told(rows, accepted, [0, 0])
    with pytest.raises(RunVoid, match="3 events"):
        check_told({"000000": (3, 3)}, [3], [0])


def test_each_deposit_has_a_version_of_its_own() -> None:
    ledger = Ledger(2)
    ledger.enter_all(opening_orders(2, random.Random(SEED)))
    ledger.enter_all(deposits(0, 1, 3, SEED))
    check_versions({0: [4, 2, 3]}, ledger.version)
    for wrong in ({0: [2, 3, 3]}, {0: [2, 3]}, {0: [2, 3, 4], 1: [2]}, {0: [3, 4, 5]}):
        with pytest.raises(RunVoid, match="versions"):
            check_versions(wrong, ledger.version)


def test_the_deposits_that_are_there_are_those_that_were_sent_and_all_that_were_answered() -> None:
    ledger = Ledger(crud.ACCOUNTS)
    numbers = [number * crud.STRIDE % crud.ACCOUNTS for number in (1, 3)]
    ledger.enter_all(Order(number, OPEN, "") for number in numbers)
    crud.enter(["t1-1", "t1-3", "an opening"], {"t1": Turn(sent=3, succeeded=2)}, ledger, "ours")
    assert [ledger.balance[number] for number in numbers] == [2, 4]
    for wrong in (["t1-1", "t1-4"], ["t1-0", "t1-1"], ["t1-1", "t1-1"], ["t1-1"]):
        with pytest.raises(RunVoid):
            crud.enter(wrong, {"t1": Turn(sent=3, succeeded=2)}, Ledger(crud.ACCOUNTS), "ours")


# ── figures ──


def test_an_answer_is_older_only_than_what_was_seen_before_it_was_asked() -> None:
    first = Answer(0.0, 0.0, 1.0, 7, 5)
    meanwhile, other = first._replace(asked=0.9, answered=1.1, seen=4), first._replace(asked=2.0, account=8, seen=1)
    older = first._replace(asked=1.05, answered=1.2, seen=4)
    assert older_answers([older, meanwhile, other, first]) == [(older, 5)]


def test_a_wait_is_that_of_the_answers_under_way_near_a_switch() -> None:
    answers = [Answer(start, start, start + 0.004, 7, 1) for start in (0.0, 9.0, 9.95, 11.0)]
    slow = Answer(10.05, 10.06, 10.25, 7, 1)
    assert longest_waits([*answers[:3], slow, answers[3]], [10.0, 20.0]) == [pytest.approx(200.0)]


def test_the_parts_of_a_request_add_up_to_the_whole() -> None:
    exchange = Exchange(0, 10.0, 10.0, 11.0, 200, 2)
    steps = [0.01 * n for n in range(1, len(PARTS) + 1)]
    marks = {point: [0.0, 10.0 + sum(steps[: n + 1]), 999.0] for n, point in enumerate(PARTS.values())}
    [parts] = parts_of([exchange], marks)
    assert parts == pytest.approx({**dict(zip(PARTS, [1000 * step for step in steps], strict=True)), LAST: parts[LAST]})
    assert sum(parts.values()) == pytest.approx(1000)

    [parts] = parts_of([exchange], marks | {"commit sent": [marks["batch read"][1] + 0.001]})
    assert parts["hop to the agent"] == 0
    assert sum(parts.values()) == pytest.approx(1000)

    without = marks | {random.choice(list(PARTS.values())): [0.0, 999.0]}
    with pytest.raises(RunVoid, match="1 of 1 requests passed a point without a mark"):
        parts_of([exchange], without)


def test_medians_percentiles_and_aims() -> None:
    samples = [Sample("ours", "wide", n, value, 10, 1.0, {"a": 0.001 * n}) for n, value in enumerate((5.0, 1.0, 9.0))]
    assert middle(samples, "ours", "wide") == 5.0
    [median] = Result("x", "X", "events/s", samples, [], {}).medians()
    assert (median.rounds, median.cpu_us_each) == ([5.0, 1.0, 9.0], {"a": 100.0})
    assert [percentile([float(n) for n in range(100, 0, -1)], p) for p in (1, 50, 99, 99.9)] == [1.0, 50.0, 99.0, 100.0]
    aims = [Aim("", 60, 60), Aim("", 60, 59.9), Aim("", 1.8, 1.8, at_most=True), Aim("", 1.8, 1.9, at_most=True)]
    assert [aim.is_met for aim in aims] == [True, False, True, False]


@pytest.mark.parametrize("name", ["project", "latency"])
def test_a_plot_names_each_contender(tmp_path: Path, name: str) -> None:
    contenders = ["samefold, 1 process", "a peer"]
    samples = [Sample(c, case, 1, 1000.0, 1, 1.0) for case in ("wide", "hot") for c in contenders]
    curves = {f"{c}, {case}": [1.0] * 100 for case in ("wide", "hot") for c in contenders}
    plots: dict[str, Any] = {"curves": curves} if name == "latency" else {}
    aims = [Aim("x", 900, 1000, unit="events/s", case="wide")]
    file = tmp_path / "x.svg"
    draw(Result(name, "How fast", "events/s", samples, aims, {}, plots), file, "a machine")
    text = " ".join(ET.parse(file).getroot().itertext())  # our own file
    assert all(what in text for what in (*contenders, "wide", "hot", "How fast", "a machine"))
    assert ("aim 900" in text) == (name == "project")


# ── what runs ──


def test_the_service_of_the_benchmarks_is_what_run_all_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    children: list[Child] = []
    monkeypatch.setattr(run, "_supervise", lambda _name, _port, make: children.extend(make("here")))
    run.run_all(host=HOST, port=8000)
    found = {(child.module, child.arguments) for child in children_of("here", 8000).values()}
    assert found == {(child.module, child.arguments) for child in children}
    assert len(children) == len(found)


# ── what is not there ──


def test_a_process_that_ends_is_noticed_and_quoted(tmp_path: Path) -> None:
    with Process(Settings(), tmp_path, "p", "calendar", "--type") as process:
        process.wait(30)
        with pytest.raises(BenchmarkStalled, match="p ended with exit code 2") as raised:
            wait_until(lambda: 0, 1, (process,), lambda _: None, every=0.01)
        with pytest.raises(NotProfiled, match="can't look into p"):
            Profile(tmp_path, "x").begin([process])
    assert "expected one argument" in raised.value.hint


def test_peers_that_are_not_built_are_reported_and_the_rest_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert jvm.not_built([*jvm.PEERS]) == []
    told = jvm.not_built([jvm.FLINK])
    assert told == [f"{jvm.STREAMS}: build them with `make bench-jvm`, which needs Maven"]
    Report(tmp_path, quiet=False).add(Result("jvm", "How fast", "events/s", [], [], {}, not_run=told), Options())
    assert f"not run: {told[0]}" in capsys.readouterr().out
    assert [file.name for file in tmp_path.iterdir()] == ["jvm.json"]
    assert json.loads((tmp_path / "jvm.json").read_text())["not_run"] == told


@pytest.mark.parametrize(
    ("arguments", "told"),
    [(["nonsense"], ", ".join(NAMES)), (["handle", "--part", "views"], "commits, views, partitions, processes")],
)
def test_what_there_is_not_is_wrong_usage(samefold: Samefold, arguments: list[str], told: str) -> None:
    done = samefold("bench", *arguments)
    assert done.returncode == 2
    assert told in " ".join(done.stderr.split())


@pytest.mark.prove(part="bench-self")
@pytest.mark.integration
def test_the_command_writes_json_and_a_plot_and_leaves_nothing_behind(samefold: Samefold, tmp_path: Path) -> None:
    small = ("--rounds", "1", "--scale", "0.001", "--json", "--out", str(tmp_path / "out"))
    done = samefold("bench", "rebuild", *small, process_s=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["benchmark"] == "rebuild"
    assert {one["contender"] for one in told["medians"]} >= {IN_ALL, AFTER_START}
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["rebuild.json", "rebuild.svg"]
