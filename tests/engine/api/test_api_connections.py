"""make test + test-all: connections are opened and closed in milliseconds, a database that hangs takes seconds.

So many connections may be open, no request waits for ever, and none takes room after its client has gone.
"""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest
from psycopg_pool import PoolTimeout

from api import server, services
from infra.database.connect import parameters
from infra.database.deadline import Pool
from infra.settings import Settings
from projections.engine.views.token import Token
from tests.engine.api.api import Api, everything, problem, served
from tests.engine.api.front import api_process, frozen, listening_port
from tests.engine.api.raw_http import ask, connection, head, post
from tests.engine.api.test_api_views import folded, token_now
from tests.engine.spine import handler, open_account, set_up
from tools.testing.waiting import DEADLINE_S, until

if TYPE_CHECKING:
    from tools.dev.stack import Stack


PROBE = head("GET", "/health/live")


@pytest.fixture(scope="module")
def few(shared_world: Settings) -> Iterator[Api]:
    set_up(shared_world)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server, "MAX_CONNECTIONS", 10)
        with served(shared_world) as running:
            yield running


def test_beyond_the_bound_requests_are_answered_with_503_until_connections_are_closed(few: Api) -> None:
    with ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(connection(few.server.port)).sendall(PROBE)
        assert ask(few.server.port, PROBE).status == 503
    until(lambda: ask(few.server.port, PROBE).status == 200, "the others are gone")


def test_a_process_that_may_open_few_files_bounds_its_connections_by_them(world: Settings, tmp_path: Path) -> None:
    with ExitStack() as stack:
        process = stack.enter_context(api_process(world, tmp_path / "api.log", files=server.OWN_FILES + 20))
        port = listening_port(process)
        assert ask(port, PROBE).status == 200
        for _ in range(30):
            stack.enter_context(connection(port)).sendall(PROBE)
        assert ask(port, PROBE).status == 503


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


@pytest.mark.parametrize("waits_for", ["outcome of a new command", "outcome", "position", "live row"])
def test_a_client_that_has_gone_takes_no_room(small: Api, waits_for: str) -> None:
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
            waiters[-1].sendall(requests[waits_for])
        until(lambda: waiting() == ROOM, "all of them wait")
        for waiter in waiters[1:]:
            waiter.close()
        until(lambda: waiting() == 1, "the room of those who have gone is free")
    until(lambda: waiting() == 0, "and of the last one")
