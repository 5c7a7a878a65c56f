"""make test + test-all: a client that goes takes milliseconds, a database that hangs seconds.

No request waits for ever, and none takes room after its client has gone: a database that hangs, and clients that hang up.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from api import services as api_services
from infra.settings import Settings
from infra.testing.waiting import until
from projections.engine.views.token import Token
from tests.engine.api.api import Api, problem, served
from tests.engine.api.front import frozen
from tests.engine.api.raw_http import connection, head, post
from tests.engine.api.test_api_views import folded, token_now
from tests.engine.spine import handler, open_account, set_up

if TYPE_CHECKING:
    from infra.dev.stack import Stack

ROOM = 3
OPEN = json.dumps({"overdraft_limit": 0, "on": "2026-01-01"}).encode()


@pytest.fixture(scope="module")
def api(shared_world: Settings) -> Iterator[Api]:
    """With little room, a short deadline for the database, and no agent: what waits goes on waiting."""
    set_up(shared_world)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api_services, "QUERY_S", 2.0)
        with handler(shared_world), served(shared_world.model_copy(update={"api_max_waiting": ROOM})) as api:
            yield api


@pytest.mark.slow
def test_a_database_that_hangs_is_answered_with_503_by_every_read_and_found_again(
    api: Api, shared_world: Settings, stack: Stack
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

    get = api.get
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
            problem(api.post("hung", "deposit", cents=1), 503, "database-unavailable")
        until(lambda: all(get(path).status_code != 503 for path in paths), "the database is found again")


@pytest.mark.parametrize("ahead", [b"", head("GET", "/health/live")], ids=["alone", "with another request sent ahead"])
@pytest.mark.parametrize("waits_for", ["outcome of a new command", "outcome", "position", "live row"])
def test_a_client_that_has_gone_takes_no_room(api: Api, waits_for: str, ahead: bytes) -> None:
    never = Token.of(api.services.events.id, {0: 10**12})
    prefer = ("Prefer", "wait=60")
    requests = {
        "outcome of a new command": post("/accounts/gone/open-account", OPEN, prefer),
        "outcome": head("GET", "/outcomes/accounts/gone/nothing", [prefer]),
        "position": head("GET", f"/views/balances?after={never}", [prefer]),
        "live row": head("GET", "/views/balances/gone/live"),
    }

    def waiting() -> int:
        return len(api.services.outcomes) + len(api.services.positions) + api.services.subscribers.taken

    assert waiting() == 0
    with ExitStack() as clients:
        waiters: list[socket.socket] = []
        for _ in range(ROOM):
            waiters.append(clients.enter_context(connection(api.server.port)))
            waiters[-1].sendall(requests[waits_for] + ahead)
        until(lambda: waiting() == ROOM, "all of them wait")
        for waiter in waiters[1:]:
            waiter.close()
        until(lambda: waiting() == 1, "the room of those who have gone is free")
    until(lambda: waiting() == 0, "and of the last one")
