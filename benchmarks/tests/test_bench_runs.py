"""make prove: each benchmark starts its processes and all peers. It measures each contender, and is void when one cheats."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from benchmarks import check, crud, handle, http, jvm, overload, project, reads, rebuild, scan, spark, starts, switch
from benchmarks.check import RunVoid
from benchmarks.cli import NAMES
from benchmarks.overload import Case
from benchmarks.overload_client import Told
from benchmarks.peers.jvm import jar_of
from benchmarks.plot import draw
from benchmarks.profile import Profile
from benchmarks.results import Result
from benchmarks.stage import Bench, Options
from benchmarks.workload import Ledger, Order
from infra.processes.engines import Silent
from tools.dev.stack import Stack
from tools.testing.fixtures import SEED

pytestmark = pytest.mark.prove(part="bench-self")

BUILT = [peer for peer, name in jvm.PEERS.items() if jar_of(name).is_file()]


class Run(NamedTuple):
    """A small run of a benchmark: what is set smaller in its module, and whom or what it must have measured."""

    measured: Collection[str]
    smaller: Mapping[str, Any] = {}
    part: str = ""
    scale: float = 0.001
    rounds: int = 1


RUNS = {
    "handle": Run({handle.HANDLER, handle.COMBINED, *handle.PEERS}, {"CASES": {"wide": 200_000}}),
    # the second round finds the commands that a policy sent in the first
    "project": Run(
        {project.ONE, project.REACTED_TO, project.TWO, *project.PEERS}, {"CASES": {"wide": 200_000}}, rounds=2
    ),
    "rebuild": Run({rebuild.IN_ALL, rebuild.AFTER_START, *rebuild.SIZES}),
    "spark": Run(
        {spark.LOCAL, spark.FIRST, spark.WARM, spark.SIMPLE, spark.first_job(spark.CALLS[0])},
        {"SIZES": {spark.MEASURED: 5_000_000}, "CALLS": spark.CALLS[:1]},
    ),
    "scan": Run({scan.OURS, scan.PEER}),
    "latency": Run({"samefold, send to visible"}, scale=0.05),
    "http": Run({http.OURS, http.WITHOUT, http.CONSTANT, *http.REQUESTS}, scale=0.01),
    "switch": Run({switch.WAIT, switch.GAP, switch.RELEASE}),
    "jvm": Run({jvm.ONE, jvm.TWO, jvm.WITH_CORE, jvm.REBUILD, *BUILT}),
    # in the second round policies and publisher start again, and read on
    "crud": Run({crud.OURS, crud.WITHOUT, crud.PEER}, {"AIMS": {4: 0.1, 8: 0.1}}, rounds=2),
    "reads": Run({reads.OURS, reads.PEER}, {"AIMS": {4: 0.1}}),
    "growth commits": Run({"0.001 million", "0.002 million"}, {"MARKS": (1, 2)}, "commits"),
    "growth views": Run({"1 view", "3 views"}, {"VIEWS": (1, 3)}, "views"),
    "growth partitions": Run({"1 partition", "3 partitions"}, {"PARTITIONS": (1, 3)}, "partitions"),
    "growth processes": Run({"1 agent", "2 agents"}, {"PROCESSES": (1, 2)}, "processes"),
    "overload": Run(
        {overload.NORMAL, overload.DEAF, overload.HOT},
        {"CASES": {overload.NORMAL: Case(10), overload.DEAF: Case(10, deaf=2), overload.HOT: Case(5, accounts=1)}},
    ),
    "starts": Run(  # the supervisor's processor time counts in steps of 10 ms, one in ten seconds
        {*starts.SERVES, starts.ALL, starts.IMPORTS, starts.BACK, starts.IDLE, starts.BROKER, starts.NOBODY}, scale=1
    ),
}
MEMORY = {"agent_mb", "api_mb", "peak_memory_mb"}


def run(name: str, stack: Stack, folder: Path, monkeypatch: pytest.MonkeyPatch, profile: Profile | None = None) -> Any:
    module, of = import_module(f"benchmarks.{name.partition(' ')[0]}"), RUNS[name]
    for what, value in of.smaller.items():
        monkeypatch.setattr(module, what, value)
    options = Options(rounds=of.rounds, scale=of.scale, seed=SEED, part=of.part, commits=2)
    return module.run(Bench(options, stack, folder, Silent(), profile))


@pytest.mark.parametrize("name", RUNS)
def test_all_that_it_names_is_measured(
    name: str, stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result: Result = run(name, stack, tmp_path, monkeypatch)
    if name in ("crud", "reads") and result.not_run:
        assert "install `wrk`" in result.not_run[0]
        return
    assert set(RUNS[name].measured) <= {what for contender in result.contenders for what in contender}
    assert all(sample.value > 0 for sample in result.samples)
    assert result.not_run == (jvm.not_built(BUILT) if name == "jvm" else [])
    memory = [sample.more[what] for sample in result.samples for what in sample.more.keys() & MEMORY]
    assert all(megabytes > 10 for megabytes in memory)
    draw(result, tmp_path / "plot.svg", "a machine")
    assert (tmp_path / "plot.svg").stat().st_size > 0


def test_all_benchmarks_are_run() -> None:
    assert {name.partition(" ")[0] for name in RUNS} == set(NAMES)


def another_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is there, the ledger says something else."""
    monkeypatch.setattr(Ledger, "rows", lambda _ledger: {"000000": (1, 0)})


def another_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Ledger.enter

    def enter(ledger: Ledger, order: Order) -> Any:
        done = real(ledger, order)
        ledger.balance[order.account] += order.account == 7
        return done

    monkeypatch.setattr(Ledger, "enter", enter)


def another_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    real = overload._Turns._enter

    def enter(turns: overload._Turns, told: Told) -> None:
        told.accepted[0] += 1
        real(turns, told)

    monkeypatch.setattr(overload._Turns, "_enter", enter)


def more_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if one record had not been published."""
    monkeypatch.setattr(check, "EVENTS", "select 1 + sum(transactions + 1)::bigint from balances_v2")


@pytest.mark.parametrize(
    ("name", "cheat", "found"),
    [
        ("project", another_row, "states of streams"),
        ("spark", another_row, r"balances_v2_r2 \(local\)"),
        ("growth commits", another_sum, "how many, versions, cents"),
        ("overload", another_answer, "account 0 has"),
        ("http", more_events, "events, beside the records that were published"),
    ],
)
def test_a_run_is_void_when_the_end_is_another(
    name: str,
    cheat: Callable[[pytest.MonkeyPatch], None],
    found: str,
    stack: Stack,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cheat(monkeypatch)
    with pytest.raises(RunVoid, match=found):
        run(name, stack, tmp_path, monkeypatch)


def test_a_profile_is_a_file_for_each_process_that_is_measured(
    stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = Profile(tmp_path, "growth-views")
    profile.programs = None  # the stack of the tests has what set-up has
    with profile.of(stack):
        run("growth views", stack, tmp_path, monkeypatch, profile)
    files = list(tmp_path.glob("growth-views-*.speedscope.json"))
    assert len(files) == len(RUNS["growth views"].measured)
    assert all("speedscope" in json.loads(file.read_text())["$schema"] for file in files)
