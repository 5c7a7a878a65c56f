"""The HTTP benchmark's instrument: its client, the parts of a request, and that a wrong answer makes a run void."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from benchmarks.check import RunVoid
from benchmarks.http import CONSTANT, FULL, OURS, REQUESTS, check_versions
from benchmarks.http_client import Exchange, ask_all, deposit
from benchmarks.http_parts import LAST, PARTS, means, parts_of
from benchmarks.plot import draw
from benchmarks.stage import Bench, Options
from benchmarks.workload import Ledger, deposits, opening_orders
from infra.dev.stack import Stack
from infra.testing.fixtures import SEED
from projections.engine.rebuild.engines import Silent

pytestmark = pytest.mark.slow

ACCOUNTS = 5
COUNT = 300


class Server:
    """Answers each request with a rising version; `keys` are those that came, in their order."""

    def __init__(self) -> None:
        self.keys: list[str] = []
        self.hangs_up = False
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            wbufsize = -1  # head and body in two packets would wait for an acknowledgement between them

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                server.keys.append(self.headers["Idempotency-Key"].strip('"'))
                if server.hangs_up:
                    self.close_connection = True
                    return
                body = b'{"outcome":"accepted","version":%d}' % len(server.keys)
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None: ...

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    thread = threading.Thread(target=server.http.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.http.shutdown()
    thread.join()
    server.http.server_close()


def asked(server: Server, connections: int, rate: float) -> list[Exchange]:
    requests = [deposit(order) for order in deposits(0, ACCOUNTS, COUNT, SEED)]
    return ask_all(requests, connections, rate, server.http.server_port)


def test_each_request_is_sent_once_and_one_at_a_time_on_a_connection(server: Server) -> None:
    exchanges = asked(server, 1, 0)
    assert server.keys == [order.id for order in deposits(0, ACCOUNTS, COUNT, SEED)]
    assert [(one.number, one.version, one.status) for one in exchanges] == [(n, n + 1, 200) for n in range(COUNT)]
    assert all(before.answered <= after.sent for before, after in pairwise(exchanges))


def test_connections_ask_side_by_side(server: Server) -> None:
    exchanges = asked(server, 8, 0)
    assert sorted(server.keys) == sorted(order.id for order in deposits(0, ACCOUNTS, COUNT, SEED))
    assert any(after.sent < before.answered for before, after in pairwise(sorted(exchanges, key=lambda one: one.sent)))


def test_a_request_without_a_free_connection_has_waited_since_it_was_due(server: Server) -> None:
    exchanges = asked(server, 1, 1e9)
    assert exchanges[-1].since < exchanges[0].answered, "all were due at once"
    assert exchanges[-1].sent >= exchanges[-2].answered
    began = time.monotonic()
    assert max(one.sent for one in asked(server, 8, 500)) - began >= (COUNT - 1) / 500


def test_a_server_that_hangs_up_is_an_error(server: Server) -> None:
    server.hangs_up = True
    with pytest.raises(ConnectionError):
        asked(server, 2, 0)


def marks(exchange: Exchange, steps: list[float]) -> dict[str, list[float]]:
    """The points of one request, each a step after the one before."""
    found: dict[str, list[float]] = {}
    at = exchange.sent
    for point, step in zip(PARTS.values(), steps, strict=True):
        at += step
        found[point] = [0.0, at, 999.0]
    return found


def test_the_parts_of_a_request_add_up_to_the_whole() -> None:
    exchange = Exchange(0, 10.0, 10.0, 11.0, 200, 2)
    steps = [0.01 * n for n in range(1, len(PARTS) + 1)]
    [parts] = parts_of([exchange], marks(exchange, steps))
    assert sum(parts.values()) == pytest.approx(1000)
    assert [parts[name] for name in PARTS] == pytest.approx([1000 * step for step in steps])
    assert list(parts)[-1] == LAST

    late = marks(exchange, steps)
    late["commit sent"] = [late["batch read"][1] + 0.001]
    [parts] = parts_of([exchange], late)
    assert parts["hop to the agent"] == 0
    assert sum(parts.values()) == pytest.approx(1000)

    [missing] = random.sample(list(PARTS.values()), 1)
    noted = marks(exchange, steps) | {missing: [0.0, 999.0]}
    with pytest.raises(RunVoid, match="1 of 1 requests passed a point without a mark"):
        parts_of([exchange], noted)
    others = [exchange._replace(sent=10.0 + n, answered=11.0 + n) for n in range(1, 10)]
    also = {point: sorted(at for one in others for at in marks(one, steps)[point]) for point in noted}
    together = {point: sorted([*also[point], *noted[point]]) for point in noted}
    assert len(parts_of([exchange, *others], together)) == 9


def test_means_are_of_the_requests_between_two_shares() -> None:
    parts = [{"a": float(n), "b": 1.0} for n in range(100)]
    assert means(parts, (0.4, 0.6)) == {"a": 49.5, "b": 1.0}
    assert means(parts, (0.99, 1.0)) == {"a": 99.0, "b": 1.0}
    assert means(parts[:1], (0.99, 1.0)) == {"a": 0.0, "b": 1.0}


def test_each_deposit_has_a_version_of_its_own() -> None:
    ledger = Ledger(2)
    ledger.enter_all(opening_orders(2, random.Random(SEED)))
    ledger.enter_all(deposits(0, 1, 3, SEED))
    check_versions({0: [4, 2, 3]}, ledger)
    for wrong in ({0: [2, 3, 3]}, {0: [2, 3]}, {0: [2, 3, 4], 1: [2]}, {0: [3, 4, 5]}):
        with pytest.raises(RunVoid, match="versions"):
            check_versions(wrong, ledger)


@pytest.mark.timeout(300)
def test_http_is_measured_beside_a_constant_and_divided(stack: Stack, tmp_path: Path) -> None:
    from benchmarks import http

    result = http.run(Bench(Options(rounds=1, scale=0.01, seed=SEED), stack, tmp_path, Silent()))
    assert set(result.contenders) == {(contender, case) for contender in (OURS, CONSTANT) for case in REQUESTS}
    assert all(sample.value > 0 for sample in result.samples)
    assert {"api", "handler", "agent", "kafka", "postgres", "client"} <= result.of(OURS, FULL)[0].cpu.keys()
    parts = result.plots["parts"]
    assert list(parts["middle"]) == [*PARTS, LAST]
    assert 0 < sum(parts["middle"].values()) < sum(parts["slowest"].values())
    draw(result, tmp_path / "http.svg", "a machine")
    text = (tmp_path / "http.svg").read_text()
    assert all(what in text for what in (OURS, CONSTANT, *PARTS, LAST))
