"""make test + test-all: connections are opened and closed in milliseconds, a database that hangs takes seconds.

So many connections may be open, and so much may lie unread: clients that wait keep no other client out, no request waits for ever,
and none takes room after its client has gone.
"""

from __future__ import annotations

import asyncio
import gc
import json
import resource
import socket
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

import httpx
import psycopg
import pytest
from psycopg_pool import PoolTimeout

from api import server, services
from infra.database.connect import parameters
from infra.database.deadline import Pool
from infra.settings import Settings
from projections.engine.views.token import Token
from tests.engine.api.api import Api, everything, problem, served, serving
from tests.engine.api.front import frozen
from tests.engine.api.raw_http import answer, ask, connection, head, post
from tests.engine.api.test_api_views import folded, token_now
from tests.engine.spine import handler, open_account, set_up
from tools.testing.waiting import DEADLINE_S, until

if TYPE_CHECKING:
    from tools.dev.stack import Stack

MOST = 20
LIVE = "/views/balances/nobody/live"
PROBE = head("GET", "/health/live")
HALF = head("POST", "/accounts/a/deposit", [("Content-Type", "application/json"), ("Content-Length", "9")])
SILENT = {
    "nothing": b"",
    "half a head": b"GET /views HTTP/1.1\r\nHost: te",
    "half a body": HALF,
    "half a body after an answer": PROBE + HALF,
    "no more than one request": PROBE,
}


@pytest.fixture(scope="module")
def api(shared_world: Settings) -> Iterator[Api]:
    set_up(shared_world)
    with served(shared_world.model_copy(update={"api_max_connections": MOST})) as running:
        yield running


def subscribed(stack: ExitStack, api: Api) -> socket.socket:
    """A connection with a request that goes on."""
    opened = stack.enter_context(connection(api.server.port))
    opened.sendall(head("GET", LIVE))
    assert b"200 OK" in opened.recv(20)
    return opened


def goes_on(opened: socket.socket) -> bool:
    """Whether the server has not closed it; what it has sent is read."""
    opened.setblocking(False)
    try:
        while said := opened.recv(65_536):
            assert said
    except BlockingIOError:
        return True
    except ConnectionResetError:
        pass
    return False


@pytest.mark.parametrize("said", SILENT)
def test_connections_that_wait_for_their_client_keep_no_other_out(api: Api, said: str) -> None:
    with ExitStack() as stack:
        live = subscribed(stack, api)
        for _ in range(3 * MOST):
            stack.enter_context(connection(api.server.port)).sendall(SILENT[said])
            assert len(api.server.server_state.connections) <= MOST + 1
        for _ in range(3):
            assert ask(api.server.port, PROBE).status == 200
        assert goes_on(live), "a request that is being answered is not ended for them"


def test_where_all_are_being_answered_a_further_one_is_closed(api: Api) -> None:
    until(lambda: not api.server.server_state.connections, "the others are gone")
    with ExitStack() as stack:
        live = [subscribed(stack, api) for _ in range(MOST)]
        with connection(api.server.port) as further, suppress(ConnectionResetError):
            assert further.recv(1) == b""
        assert all(map(goes_on, live))
        live[0].close()
        until(lambda: len(api.server.server_state.connections) < MOST, "one is gone")
        assert ask(api.server.port, PROBE).status == 200


def test_little_is_read_of_requests_behind_one_that_goes_on(api: Api) -> None:
    many = bytearray(head("GET", "/health/live", [("Much", "a" * 60_000)]) * 90)
    with ExitStack() as stack:
        opened = subscribed(stack, api)
        bounded = (one for one in api.server.server_state.connections if isinstance(one, server.BoundedConnection))
        ours = next(one for one in bounded if one.client == opened.getsockname())
        opened.setblocking(False)
        until(lambda: is_full(opened, many) and ours.flow.read_paused, "no more is read")
        assert len(ours.pipeline) < 20


def is_full(opened: socket.socket, data: bytearray) -> bool:
    """Whether there is no room for what is left of the data; else some is sent."""
    with suppress(BlockingIOError):
        del data[: opened.send(data)]
        return not data
    return True


def test_an_evicted_connection_is_counted(api: Api) -> None:
    def evicted() -> float:
        # over a connection of its own: one that is kept may be evicted itself
        lines = httpx.get(f"{api.url}/metrics").text.splitlines()
        return float(next(one for one in lines if one.startswith("samefold_http_evicted_conn")).split(" ")[1])

    before = evicted()
    with ExitStack() as stack:
        for _ in range(MOST + 5):
            stack.enter_context(connection(api.server.port))
        until(lambda: evicted() >= before + 5, "it is counted")


def test_many_connections_that_come_at_once_are_accepted_in_few_rounds_of_the_loop(shared_world: Settings) -> None:
    many, go = 200, threading.Event()
    with served(shared_world) as api, ExitStack() as stack:
        before = len(api.server.server_state.connections)

        async def rounds() -> int:
            number = 0
            while len(api.server.server_state.connections) < before + many:
                number += 1
                await asyncio.sleep(0)
            return number

        api.loop.call_soon_threadsafe(go.wait, DEADLINE_S)
        for _ in range(many):
            stack.enter_context(connection(api.server.port))
        counted = asyncio.run_coroutine_threadsafe(rounds(), api.loop)
        go.set()
        assert counted.result(DEADLINE_S) < many / 8


def test_answers_that_are_not_read_take_a_bounded_memory_in_all(
    shared_world: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MAX_UNREAD", 2**20)
    with serving(shared_world) as api, ExitStack() as stack:
        size = len(api.client.get("/openapi.json").content)
        deaf = [stack.enter_context(connection(api.server.port)) for _ in range(3 * 2**20 // size + 10)]
        for one in deaf:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
            one.sendall(100 * head("GET", "/openapi.json"))
            assert b"200 OK" in one.recv(20)
        until(lambda: len(api.server.server_state.connections) < len(deaf) * 2 // 3, "those before are disconnected")
        assert api.client.get("/health/live").status_code == 200
        with connection(api.server.port) as reading:
            reading.sendall(head("GET", "/openapi.json"))
            assert answer(reading).status == 200


def test_no_more_are_let_in_than_the_process_may_open_files_for(shared_world: Settings) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard // 2, hard))
    with serving(shared_world.model_copy(update={"api_max_connections": 10**9})) as api:
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == hard, "it asked for all that it may have"
        most: int = vars(api.server.config.http_protocol_class)["most"]
        assert most == hard - server.OWN_FILES - shared_world.api_connections
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_reads_that_hang_are_told_so_and_never_make_the_process_unready(
    world: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services, "POOL_WAIT_S", 0.5)
    with (
        everything(world.model_copy(update={"api_connections": 2})) as api,
        psycopg.connect(world.database) as locking,
        ThreadPoolExecutor(8) as many,
    ):
        assert api.client.get("/views/balances").status_code == 200
        locking.execute("lock table balances_v2 in access exclusive mode")
        reads = [many.submit(ask, api.server.port, head("GET", "/views/balances")) for _ in range(8)]
        until(lambda: sum(one.done() for one in reads) >= 6, "those that got no connection are answered")
        assert [one.result().json["code"] for one in reads if one.done()] == ["too-many-readers"] * 6
        checked = api.services.stores.seen
        until(lambda: api.services.stores.seen not in (None, checked), "the stores are checked meanwhile")
        assert ask(api.server.port, head("GET", "/health/ready")).status == 200
        locking.rollback()
        assert [one.result().status for one in reads].count(200) == 2


class Asked:
    """What a request holds."""


def test_a_request_that_gets_no_connection_in_time_leaves_nothing_behind(world: Settings) -> None:
    """An error that kept itself would keep the request, too, until a collection: these are rare."""

    async def ask(pool: Pool) -> weakref.ref[Asked]:
        asked = Asked()
        with suppress(PoolTimeout):
            async with pool.connection(0.01):
                raise AssertionError("the only connection was lent twice")
        return weakref.ref(asked)

    async def refused() -> weakref.ref[Asked]:
        session = parameters(world, "test")
        pool = Pool(session.pop("conninfo"), kwargs=session, seconds=DEADLINE_S, min_size=1, max_size=1, open=False)
        async with pool, pool.connection():
            return await ask(pool)

    gc.disable()
    try:
        assert asyncio.run(refused())() is None
    finally:
        gc.enable()


# ── a database that hangs, and clients that hang up ──

ROOM = 3
OPEN = json.dumps({"overdraft_limit": 0, "on": "2026-01-01"}).encode()


@pytest.fixture(scope="module")
def small(shared_world: Settings) -> Iterator[Api]:
    """With little room, a short deadline for the database, and no agent: what waits goes on waiting."""
    set_up(shared_world)
    with ExitStack() as running:
        running.enter_context(handler(shared_world))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(services, "QUERY_S", 2.0)
            api = running.enter_context(served(shared_world.model_copy(update={"api_max_waiting": ROOM})))
        yield api


@pytest.mark.slow
def test_a_database_that_hangs_is_answered_with_503_by_every_read_and_found_again(
    small: Api, shared_world: Settings, stack: Stack
) -> None:
    folded(shared_world, open_account("hung"))
    seen = token_now(shared_world)
    paths = [
        "/views",
        "/views/balances",
        "/views/balances?cents=0",
        "/views/balances/hung",
        f"/views/balances/hung?after={seen}",
        "/views/statement/hung/1",
        "/outcomes/accounts/hung/open-hung",
    ]

    get = small.get
    for path in paths:
        assert get(path).status_code != 503, path
    with ThreadPoolExecutor(3 * len(paths)) as clients:
        with frozen(stack.postgres):
            # more of them than there are connections, and before the API can have noticed
            under_way = [clients.submit(get, path) for path in 3 * paths]
            for answer in [one.result() for one in under_way]:  # on a slow machine it may still be taken for a busy one
                problem(
                    answer, *((429, "too-many-readers") if answer.status_code == 429 else (503, "database-unavailable"))
                )
                assert answer.headers["Retry-After"] == "1"
            for answer in map(get, paths):
                assert problem(answer, 503, "database-unavailable")
                assert answer.headers["Retry-After"] == "1"
            problem(small.post("hung", "deposit", cents=1), 503, "database-unavailable")
        until(lambda: all(get(path).status_code != 503 for path in paths), "the database is found again")


@pytest.mark.parametrize("ahead", [b"", head("GET", "/health/live")], ids=["alone", "with another request sent ahead"])
@pytest.mark.parametrize("waits_for", ["outcome of a new command", "outcome", "position", "live row"])
def test_a_client_that_has_gone_takes_no_room(small: Api, waits_for: str, ahead: bytes) -> None:
    never = Token.of(small.services.stores.topics()[1].id, {0: 10**12})
    prefer = ("Prefer", "wait=60")
    requests = {
        "outcome of a new command": post("/accounts/gone/open-account", OPEN, prefer),
        "outcome": head("GET", "/outcomes/accounts/gone/nothing", [prefer]),
        "position": head("GET", f"/views/balances?after={never}", [prefer]),
        "live row": head("GET", "/views/balances/gone/live"),
    }

    def waiting() -> int:
        return len(small.services.outcomes) + len(small.services.positions) + small.services.subscribers.taken

    assert waiting() == 0
    with ExitStack() as clients:
        waiters: list[socket.socket] = []
        for _ in range(ROOM):
            waiters.append(clients.enter_context(connection(small.server.port)))
            waiters[-1].sendall(requests[waits_for] + ahead)
        until(lambda: waiting() == ROOM, "all of them wait")
        for waiter in waiters[1:]:
            waiter.close()
        until(lambda: waiting() == 1, "the room of those who have gone is free")
    until(lambda: waiting() == 0, "and of the last one")
