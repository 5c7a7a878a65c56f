"""The peers on the JVM and plain CRUD: what was not installed is reported, and a deposit too many or too few makes a run void."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest

from benchmarks import crud, jvm
from benchmarks.check import RunVoid
from benchmarks.crud import Turn
from benchmarks.peers.jvm import jar_of
from benchmarks.report import Report
from benchmarks.results import Result
from benchmarks.stage import Bench, Options, postgres_for_work
from benchmarks.tests.test_bench import tiny
from benchmarks.workload import OPEN, Ledger, Order
from infra.dev.stack import Stack
from projections.engine.rebuild.engines import Silent


def test_peers_that_are_not_built_are_reported_and_the_rest_goes_on() -> None:
    assert jvm.not_built([*jvm.PEERS]) == []
    assert jvm.not_built([]) == [f"{jvm.FLINK} and {jvm.STREAMS}: build them with `make bench-jvm`, which needs Maven"]
    assert jvm.not_built([jvm.FLINK]) == [f"{jvm.STREAMS}: build them with `make bench-jvm`, which needs Maven"]


def test_without_a_load_generator_nothing_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    result = crud.run(Bench(Options(), Stack(tmp_path / "never-started"), tmp_path, Silent()))
    assert result.samples == []
    [told] = result.not_run
    assert "install `wrk`" in told


def test_a_report_of_nothing_says_what_was_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = Report(tmp_path, quiet=False)
    report.add(Result("crud", "How fast", "answers/s", [], [], {}, not_run=["a peer: install it"]), Options())
    assert "not run: a peer: install it" in capsys.readouterr().out
    assert [file.name for file in tmp_path.iterdir()] == ["crud.json"]
    assert json.loads((tmp_path / "crud.json").read_text())["not_run"] == ["a peer: install it"]


def test_postgresql_takes_at_most_a_quarter_of_the_machine() -> None:
    megabytes = int(postgres_for_work()["shared_buffers"].removesuffix("MB"))
    assert 0 < megabytes <= min(4096, psutil.virtual_memory().total / 2**22)


def test_the_deposits_that_are_there_are_those_that_were_sent_and_all_that_were_answered() -> None:
    ledger = Ledger(crud.ACCOUNTS)
    accounts = [number * crud.STRIDE % crud.ACCOUNTS for number in (1, 3)]
    ledger.enter_all(Order(account, OPEN, "") for account in accounts)
    crud.enter(["t1-1", "t1-3", "an opening"], {"t1": Turn(sent=3, succeeded=2)}, ledger, "ours")
    assert [ledger.balance[account] for account in accounts] == [2, 4]

    for wrong in (["t1-1", "t1-4"], ["t1-0", "t1-1"], ["t1-1", "t1-1"], ["t1-1"]):
        with pytest.raises(RunVoid):
            crud.enter(wrong, {"t1": Turn(sent=3, succeeded=2)}, Ledger(crud.ACCOUNTS), "ours")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_same_work_is_measured_beside_those_peers_that_are_built(stack: Stack, tmp_path: Path) -> None:
    built = [peer for peer, name in jvm.PEERS.items() if jar_of(name).is_file()]
    result = jvm.run(tiny(stack, tmp_path))
    ours = {jvm.ONE, jvm.TWO, jvm.WITH_CORE}
    assert {contender for contender, case in result.contenders if case == "hot"} == {*ours, *built}
    assert {contender for contender, case in result.contenders if case == "wide"} == {*ours, *built, jvm.REBUILD}
    assert all(sample.value > 0 for sample in result.samples)
    assert result.not_run == jvm.not_built(built)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_plain_crud_is_asked_the_same_where_a_load_generator_is_there(
    stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crud, "AIMS", {4: 0.1})
    result = crud.run(tiny(stack, tmp_path))
    if not result.not_run:
        assert {contender for contender, _ in result.contenders} == {crud.OURS, *crud.WORKERS}
        assert all(sample.more["other_answers"] == 0 for sample in result.samples)
