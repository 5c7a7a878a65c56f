"""The benchmarks' instrument: its input and its independent fold are right, and a wrong end state makes a run void."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from benchmarks.check import OUTCOMES, STATES, RunVoid, check_count, check_decisions, check_rows
from benchmarks.cli import NAMES
from benchmarks.fill import DAY, fill_commands, fill_log
from benchmarks.peers.job import Done, Job, Stopwatch, read_job, told, write_job
from benchmarks.plot import draw
from benchmarks.processes import BenchmarkStalled, Process, wait_until
from benchmarks.results import Aim, Result, Sample, middle, percentile
from benchmarks.stage import Bench, Options
from benchmarks.switch import Answer, longest_waits, older_answers
from benchmarks.workload import OPEN, OVERDRAFT_LIMIT, Expected, Ledger, Order, history, movements, opening_orders
from domain import accounts
from domain.accounts import Command, Deposit, OpenAccount, State, Withdraw
from domain.language import Refusal
from infra.dev.stack import Stack
from infra.log.records import Commit, encode
from infra.log.rule import START, read
from infra.log.topics import describe, ensure
from infra.settings import Settings
from infra.testing.fixtures import SEED, Samefold
from projections.engine.rebuild.engines import Silent
from tests.engine import spine

pytestmark = pytest.mark.slow

ACCOUNTS = 20
COUNT = 400


@pytest.fixture
def orders() -> list[Order]:
    """Each account opened, then movements, large enough that some are refused."""
    chance = random.Random(SEED)
    some = [replace_cents(order, 30 * order.cents) for order in movements(ACCOUNTS, COUNT, chance)]
    return [*opening_orders(ACCOUNTS, chance), *some]


def replace_cents(order: Order, cents: int) -> Order:
    return Order(order.account, cents, order.id)


def test_the_ledger_agrees_with_the_domain(orders: list[Order]) -> None:
    ledger = Ledger(ACCOUNTS)
    states = dict.fromkeys(range(ACCOUNTS), State())
    refused = 0
    for order in [*orders, *orders[:3]]:
        before = states[order.account]
        try:
            for event in accounts.decide(command(order), before):
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


def test_options_scale_sizes_and_keep_them_above_nothing() -> None:
    assert Options(scale=0.1).scaled(200_000) == 20_000
    assert Options(scale=0.001).scaled(1_000) == 10


def test_medians_ratios_and_aims() -> None:
    samples = [Sample("ours", "wide", n, value, 10, 1.0, {"a": 0.001 * n}) for n, value in enumerate((5.0, 1.0, 9.0))]
    result = Result("x", "X", "events/s", samples, [], {})
    assert middle(samples, "ours", "wide") == 5.0
    [median] = result.medians()
    assert (median.rounds, median.cpu_us_each) == ([5.0, 1.0, 9.0], {"a": 100.0})
    assert Aim("", 60, 60).is_met
    assert not Aim("", 60, 59.9).is_met
    assert Aim("", 1.8, 1.8, at_most=True).is_met
    assert not Aim("", 1.8, 1.9, at_most=True).is_met


def test_percentiles_are_values_that_were_measured() -> None:
    values = [float(n) for n in range(100, 0, -1)]
    assert [percentile(values, p) for p in (1, 50, 99, 99.9)] == [1.0, 50.0, 99.0, 100.0]
    assert percentile([7.0], 50) == 7.0


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


def test_a_peer_is_told_its_job_and_tells_what_it_did(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job("postgresql://x", "kafka:1", orders=[Order(1, -5, "a")], options={"pipeline": "yes"})
    write_job(job, tmp_path / "job")
    monkeypatch.setattr("sys.argv", ["peer", str(tmp_path / "job")])
    assert read_job() == job
    assert told('a warning\n{"count":3,"seconds":1.5,"cpu_s":1.0,"rows":{"a":[1,2]}}\n') == Done(
        3, 1.5, 1.0, {"a": (1, 2)}
    )
    assert Stopwatch().done(2).seconds >= 0


def test_a_process_that_ends_is_noticed_and_quoted(tmp_path: Path) -> None:
    with Process(Settings(), tmp_path, "p", "calendar", "--type") as process:
        process.wait(30)
        with pytest.raises(BenchmarkStalled, match="p ended with exit code 2") as raised:
            wait_until(lambda: 0, 1, (process,), lambda _: None, every=0.01)
    assert "expected one argument" in raised.value.hint


def test_what_a_handler_decided_is_checked_command_by_command(world: Settings, orders: list[Order]) -> None:
    spine.set_up(world)
    expected = Ledger(ACCOUNTS).enter_all(orders)
    start = describe(world, world.events_topic).end
    fill_commands(world, orders, lambda _: None)
    with spine.handler(world):
        spine.until(lambda: len(spine.commits(world)) == len(orders), "all are decided")
    end = describe(world, world.events_topic).end
    assert check_decisions(world, start, end, expected).commits == len(orders)
    assert sum(not one.accepted for one in expected.values()) > 0

    some = random.choice(list(expected))
    for wrong in (
        expected | {some: replace_version(expected[some])},
        expected | {some: Expected(not expected[some].accepted, expected[some].version)},
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


def replace_version(expected: Expected) -> Expected:
    return expected._replace(version=expected.version + 1)


def test_a_log_that_the_benchmark_wrote_counts_whole_and_folds_to_the_ledger(world: Settings) -> None:
    spine.set_up(world)
    commands, _ = ensure(world)
    orders = list(history(ACCOUNTS, COUNT, random.Random(SEED)))
    ledger = Ledger(ACCOUNTS)
    ledger.enter_all(orders)
    written, passed = fill_log(world, commands.id, orders, lambda _: None, marks=[100, COUNT])
    assert (sum(passed[100]), passed[COUNT]) == (100, written)
    for partition in range(world.partitions):
        records = [r for r in spine.records_of(world, world.events_topic) if r.partition == partition]
        _, counted, void = read(START, records)
        assert (len(counted), void) == (written[partition], [])

    assert spine.project(world) == COUNT
    rows = ledger.rows()
    check_rows(world, STATES, rows, "states")
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


def tiny(stack: Stack, folder: Path) -> Bench:
    return Bench(Options(rounds=1, scale=0.001, seed=SEED), stack, folder, Silent())


@pytest.mark.timeout(300)
def test_projecting_is_measured_for_all_contenders_and_void_when_one_cheats(
    stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks import project

    monkeypatch.setattr(project, "CASES", {"wide": 200_000})
    result = project.run(tiny(stack, tmp_path))
    assert {contender for contender, _ in result.contenders} == {
        project.ONE,
        project.REACTED_TO,
        project.TWO,
        *project.PEERS,
    }
    assert all(sample.value > 0 for sample in result.samples)

    # whatever is there, the ledger says something else
    monkeypatch.setattr(Ledger, "rows", lambda ledger: {"000000": (1, 0)})
    with pytest.raises(RunVoid, match="states of streams"):
        project.run(tiny(stack, tmp_path))


@pytest.mark.timeout(300)
def test_handling_is_measured_for_all_contenders(stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import handle

    monkeypatch.setattr(handle, "CASES", {"wide": 200_000})
    result = handle.run(tiny(stack, tmp_path))
    assert {contender for contender, _ in result.contenders} == {handle.HANDLER, handle.COMBINED, *handle.PEERS}


@pytest.mark.timeout(300)
def test_rebuilding_is_measured_with_its_memory(stack: Stack, tmp_path: Path) -> None:
    from benchmarks import rebuild

    result = rebuild.run(tiny(stack, tmp_path))
    assert [case for contender, case in result.contenders if contender == rebuild.IN_ALL] == list(rebuild.SIZES)
    assert all(one.more["peak_memory_mb"] > 10 for one in result.samples if one.contender == rebuild.AFTER_START)


@pytest.mark.timeout(300)
def test_switches_are_measured_for_readers_and_agents(stack: Stack, tmp_path: Path) -> None:
    from benchmarks import switch

    result = switch.run(tiny(stack, tmp_path))
    assert result.size["switches"] == 3
    assert result.size["releases"] == 1
    assert {case for _, case in result.contenders} == {switch.WAIT, switch.GAP, switch.RELEASE}
    assert all(sample.value > 0 for sample in result.samples)
    assert result.samples[0].more["reads"] > 100


def test_an_answer_is_older_only_than_what_was_seen_before_it_was_asked() -> None:
    first = Answer(0.0, 0.0, 1.0, 7, 5)
    meanwhile, other = first._replace(asked=0.9, answered=1.1, seen=4), first._replace(asked=2.0, account=8, seen=1)
    older = first._replace(asked=1.05, answered=1.2, seen=4)
    assert older_answers([older, meanwhile, other, first]) == [(older, 5)]


def test_a_wait_is_that_of_the_answers_under_way_near_a_switch() -> None:
    answers = [Answer(start, start, start + 0.004, 7, 1) for start in (0.0, 9.0, 9.95, 11.0)]
    slow = Answer(10.05, 10.06, 10.25, 7, 1)
    waits = longest_waits([*answers[:3], slow, answers[3]], [10.0, 20.0])
    assert waits == [pytest.approx(200.0)]


@pytest.mark.timeout(300)
def test_spark_is_measured_beside_its_peers_and_void_when_its_rows_are_wrong(
    stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks import spark

    monkeypatch.setattr(spark, "SIZES", {spark.MEASURED: 5_000_000})
    monkeypatch.setattr(spark, "CALLS", spark.CALLS[:1])
    result = spark.run(tiny(stack, tmp_path))
    grouped = {spark.first_job(spark.CALLS[0]), spark.warm(spark.CALLS[0])}
    assert {contender for contender, _ in result.contenders} == {
        *(spark.LOCAL, spark.FIRST, spark.WARM, spark.SIMPLE),
        *grouped,
    }
    assert all(sample.value > 0 for sample in result.samples)
    assert all(aim.found > 0 for aim in result.aims)
    [first] = result.of(spark.FIRST, spark.MEASURED)
    assert first.more["peak_memory_mb"] > 100, "the JVM's too"
    assert first.more["first_event_s"] >= first.more["session_s"] > 0


@pytest.mark.timeout(300)
def test_spark_s_rows_are_compared_with_the_ledger_for_each_job(
    stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks import spark

    monkeypatch.setattr(spark, "SIZES", {spark.MEASURED: 5_000_000})
    monkeypatch.setattr(Ledger, "rows", lambda ledger: {"000000": (1, 0)})
    with pytest.raises(RunVoid, match=r"balances_v2_r2 \(local\)"):
        spark.run(tiny(stack, tmp_path))


@pytest.mark.timeout(300)
def test_the_command_writes_json_and_a_plot_and_leaves_nothing_behind(samefold: Samefold, tmp_path: Path) -> None:
    done = samefold(
        "bench", "latency", "--rounds", "1", "--scale", "0.05", "--json", "--out", str(tmp_path / "out"), process_s=240
    )
    assert done.returncode == 0, done.stderr
    told_ = json_of(done.stdout)
    assert told_["benchmark"] == "latency"
    assert {one["contender"] for one in told_["medians"]} >= {"samefold, send to visible"}
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["latency.json", "latency.svg"]


def test_an_unknown_benchmark_is_wrong_usage(samefold: Samefold) -> None:
    done = samefold("bench", "nonsense")
    assert done.returncode == 2
    assert ", ".join(NAMES) in " ".join(done.stderr.split())


def json_of(text: str) -> dict[str, Any]:
    import json

    found: dict[str, Any] = json.loads(text.splitlines()[-1])
    return found
