"""make test: a server of the test's own. The benchmarks' HTTP clients ask, ask again and count as they say."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from itertools import pairwise

import pytest
import uvloop

from benchmarks import overload_client
from benchmarks.http_client import Exchange, ask_all, deposit
from benchmarks.overload_client import Load
from benchmarks.workload import deposits
from proofs.kit import posts_answered
from tools.testing.fixtures import SEED

ACCOUNTS = 20
COUNT = 300
IDS = [order.id for order in deposits(0, ACCOUNTS, COUNT, SEED)]


class Server:
    """Answers each request with a rising version; `keys` are those that came, in their order."""

    def __init__(self) -> None:
        self.port = 0
        self.keys: list[str] = []
        self.hangs_up = False
        self.refuses: dict[str, str] | None = None
        """The headers with which it refuses each deposit once."""

    def answer(self, _path: str, key: str) -> tuple[int, dict[str, str], bytes] | None:
        is_refused = key not in self.keys and self.refuses is not None
        self.keys.append(key)
        body = b'{"outcome":"accepted","version":%d}' % len(self.keys)
        return None if self.hangs_up else (429, self.refuses or {}, body) if is_refused else (200, {}, body)


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    with posts_answered(server.answer) as server.port:
        yield server


def asked(server: Server, connections: int, rate: float = 0) -> list[Exchange]:
    requests = [deposit(order) for order in deposits(0, ACCOUNTS, COUNT, SEED)]
    return ask_all(requests, connections, rate, server.port)


def test_each_request_is_sent_once_and_one_at_a_time_on_a_connection(server: Server) -> None:
    exchanges = asked(server, 1)
    assert server.keys == IDS
    assert [(one.number, one.version, one.status) for one in exchanges] == [(n, n + 1, 200) for n in range(COUNT)]
    assert all(before.answered <= after.sent for before, after in pairwise(exchanges))


def test_connections_ask_side_by_side(server: Server) -> None:
    exchanges = asked(server, 8)
    assert sorted(server.keys) == sorted(IDS)
    assert any(after.sent < before.answered for before, after in pairwise(sorted(exchanges, key=lambda one: one.sent)))


def test_a_request_without_a_free_connection_has_waited_since_it_was_due(server: Server) -> None:
    exchanges = asked(server, 1, rate=1e9)
    assert exchanges[-1].since < exchanges[0].answered, "all were due at once"
    assert exchanges[-1].sent >= exchanges[-2].answered


def test_a_server_that_hangs_up_is_an_error(server: Server) -> None:
    server.hangs_up = True
    with pytest.raises(ConnectionError):
        asked(server, 2)


@pytest.mark.parametrize("refuses", [{"Retry-After": "0"}, {}], ids=["told when", "not told when"])
@pytest.mark.parametrize("patient", [True, False], ids=["patient", "impatient"])
def test_a_client_sends_a_refused_deposit_again_and_counts_what_it_was_told(
    server: Server, refuses: dict[str, str], patient: bool
) -> None:
    server.refuses = refuses
    load = Load(server.port, ACCOUNTS, SEED, patient)
    uvloop.run(load.run(4, 0, 1))
    accepted, refused = load.statuses[b"200"], load.statuses[b"429"]
    assert sum(load.accepted) == accepted > 0
    assert sum(load.unknown) == len(set(server.keys)) - accepted == refused - accepted <= 4
    assert len(server.keys) == accepted + refused == len(load.times)
    assert load.without_retry_after == (0 if refuses else refused)
    assert load.done <= accepted
    assert load.lost == 0


def test_an_answer_that_never_comes_counts_as_long_as_it_was_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overload_client, "DRAIN_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # the system takes its connections, and nobody reads
        load = Load(silent.getsockname()[1], ACCOUNTS, SEED, patient=False)
        uvloop.run(load.run(2, 0, 1))
    assert len(load.times) == 2
    assert min(load.times) >= 1_000
