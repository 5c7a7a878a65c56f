"""The benchmarks of growth and of overload, and profiles: their instruments are right, and each measures what it says."""

from __future__ import annotations

import json
import random
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
import uvloop

from benchmarks import growth, overload, overload_client
from benchmarks.check import RunVoid, check_rows
from benchmarks.fill import Standing, fill_log
from benchmarks.overload import Case, check_told
from benchmarks.overload_client import Load, Told
from benchmarks.processes import Process
from benchmarks.profile import NotProfiled, Profile
from benchmarks.stage import Bench, Options
from benchmarks.workload import Ledger, Order, history, opening_orders
from infra.dev.stack import Stack
from infra.log.rule import START, read
from infra.log.topics import ensure
from infra.settings import Settings
from infra.testing.fixtures import SEED, Samefold
from projections.engine.rebuild.engines import Silent
from tests.engine import spine

ACCOUNTS = 20
COUNT = 200


class Refusing:
    """Refuses each deposit once, with a `Retry-After` or without, and then accepts it."""

    def __init__(self, *, tells: bool) -> None:
        self.keys: list[str] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            wbufsize = -1

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                key = self.headers["Idempotency-Key"]
                self.send_response(200 if key in server.keys else 429)
                if tells and key not in server.keys:
                    self.send_header("Retry-After", "0")
                server.keys.append(key)
                self.send_header("Content-Length", "2")
                self.end_headers()
                self.wfile.write(b"{}")

            def log_message(self, *_: Any) -> None: ...

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)


@pytest.fixture(params=[True, False], ids=["told when", "not told when"])
def refusing(request: pytest.FixtureRequest) -> Iterator[Refusing]:
    server = Refusing(tells=request.param)
    thread = threading.Thread(target=server.http.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.http.shutdown()
    thread.join()
    server.http.server_close()


@pytest.mark.parametrize("patient", [True, False], ids=["patient", "impatient"])
def test_a_client_sends_a_refused_deposit_again_and_counts_what_it_was_told(refusing: Refusing, patient: bool) -> None:
    load = Load(refusing.http.server_port, ACCOUNTS, SEED, patient)
    uvloop.run(load.run(4, 0, 1))
    accepted, refused = load.statuses[b"200"], load.statuses[b"429"]
    assert sum(load.accepted) == accepted > 10
    assert sum(load.unknown) == len(set(refusing.keys)) - accepted == refused - accepted <= 4
    assert len(refusing.keys) == accepted + refused == len(load.times)
    assert load.without_retry_after in (0, refused)
    assert 0 < load.done <= accepted
    assert load.lost == 0


def test_what_clients_were_told_is_there_and_nothing_that_was_not_sent() -> None:
    rows = {"000000": (4, 3), "000001": (1, 0)}
    check_told(rows, [3, 0], [0, 0])
    check_told(rows, [2, 0], [1, 5])
    for accepted, unknown in (([4, 0], [0, 0]), ([2, 0], [0, 0]), ([3, 1], [0, 0])):
        with pytest.raises(RunVoid, match="clients were told"):
            check_told(rows, accepted, unknown)
    with pytest.raises(RunVoid, match="3 events"):
        check_told({"000000": (3, 3)}, [3], [0])


def test_an_answer_that_never_comes_counts_as_long_as_it_was_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overload_client, "DRAIN_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # the system takes its connections, and nobody reads
        load = Load(silent.getsockname()[1], ACCOUNTS, SEED, patient=False)
        uvloop.run(load.run(2, 0, 1))
    assert len(load.times) == 2
    assert min(load.times) >= 1_500


def test_a_log_that_another_writer_goes_on_with_counts_whole(world: Settings) -> None:
    spine.set_up(world)
    commands, _ = ensure(world)
    chance, ledger, versions = random.Random(SEED), Ledger(ACCOUNTS), dict[str, int]()
    orders = chain(opening_orders(ACCOUNTS, chance), history(ACCOUNTS, COUNT, chance, opened=True))

    def entered(count: int) -> Iterator[Order]:
        for order in islice(orders, count):
            assert ledger.enter(order).accepted
            yield order

    standing = {partition: Standing(0, -1) for partition in range(world.partitions)}
    for _ in range(2):
        fill_log(world, commands.id, entered(COUNT // 2), lambda _: None, standing=standing, versions=versions)
        ends = dict.fromkeys(range(world.partitions), 0)
        for record in spine.records_of(world, world.events_topic):
            ends[record.partition] += 1
        standing = {partition: Standing(end, -1) for partition, end in ends.items()}
    counted = 0
    for partition in range(world.partitions):
        records = [r for r in spine.records_of(world, world.events_topic) if r.partition == partition]
        _, commits, void = read(START, records)
        assert void == []
        counted += len(commits)
    assert counted == COUNT == spine.project(world)
    check_rows(world, "select account, transactions + 1, cents from balances_v2", ledger.rows(), "balances")


def test_a_process_that_py_spy_may_not_look_into_is_a_named_error(tmp_path: Path) -> None:
    with Process(Settings(), tmp_path, "gone", "this") as process:
        process.wait(20)
        with pytest.raises(NotProfiled, match="can't look into gone"):
            Profile(tmp_path, "x").begin([process])


def test_only_growth_has_parts(samefold: Samefold) -> None:
    done = samefold("bench", "handle", "--part", "views")
    assert done.returncode == 2
    assert "commits, views, partitions, processes" in " ".join(done.stderr.split())


def tiny(stack: Stack, folder: Path, part: str = "") -> Bench:
    return Bench(Options(rounds=1, scale=0.001, seed=SEED, part=part, commits=2), stack, folder, Silent())


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_growth_of_the_log_is_measured_and_void_when_sums_differ(
    stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(growth, "MARKS", (1, 2))
    result = growth.run(tiny(stack, tmp_path, "commits"))
    assert [case for _, case in result.contenders] == ["0.001 million", "0.002 million"]
    for sample in result.samples:
        assert all(figure > 0 for figure in (sample.value, *sample.more.values())), sample

    real = Ledger.enter

    def enter(ledger: Ledger, order: Order) -> Any:
        done = real(ledger, order)
        ledger.balance[order.account] += order.account == 7
        return done

    monkeypatch.setattr(Ledger, "enter", enter)
    with pytest.raises(RunVoid, match="how many, versions, cents"):
        growth.run(tiny(stack, tmp_path, "commits"))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("part", "sizes", "cases"),
    [
        ("views", (1, 3), ["1 view", "3 views"]),
        ("partitions", (1, 3), ["1 partition", "3 partitions"]),
        ("processes", (1, 2), ["1 agent", "2 agents"]),
    ],
)
def test_growth_of_other_things_is_measured(
    stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str, sizes: tuple[int, ...], cases: list[str]
) -> None:
    monkeypatch.setattr(growth, part.upper(), sizes)
    result = growth.run(tiny(stack, tmp_path, part))
    assert (result.name, [case for _, case in result.contenders]) == (f"growth-{part}", cases)
    assert all(sample.value > 0 and sample.more["agent_mb"] > 10 for sample in result.samples)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_overload_is_measured_and_void_when_a_client_was_told_what_is_not_there(
    stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = {overload.NORMAL: Case(10), overload.DEAF: Case(10, deaf=2), overload.HOT: Case(5, accounts=1)}
    monkeypatch.setattr(overload, "CASES", cases)
    result = overload.run(tiny(stack, tmp_path))
    assert [case for _, case in result.contenders] == list(cases)
    assert all(sample.more["answered_200"] > 0 and sample.more["api_mb"] > 10 for sample in result.samples)

    real = overload._Turns._enter

    def enter(turns: overload._Turns, told: Told) -> None:
        told.accepted[0] += 1
        real(turns, told)

    monkeypatch.setattr(overload, "CASES", {overload.NORMAL: Case(10)})
    monkeypatch.setattr(overload._Turns, "_enter", enter)
    with pytest.raises(RunVoid, match="account 0 has"):
        overload.run(tiny(stack, tmp_path))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_profile_is_a_file_for_each_process_that_is_measured(
    stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(growth, "VIEWS", (1, 2))
    profile = Profile(tmp_path, "growth-views")
    profile.programs = None  # the stack of the tests has what set-up has
    with profile.of(stack):
        bench = tiny(stack, tmp_path, "views")
        bench.profile = profile
        growth.run(bench)
    files = list(tmp_path.glob("growth-views-*.speedscope.json"))
    assert len(files) == 2
    assert all("speedscope" in json.loads(file.read_text())["$schema"] for file in files)
