"""make test: the app is made, and not served.

`Direct` takes a request to the route that FastAPI takes it to, with the same parameters.
"""

from __future__ import annotations

import asyncio
from itertools import product
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute
from starlette.routing import Match
from starlette.types import Scope

from api.app import Direct, create_app
from infra.database.connect import DatabaseUnavailable
from infra.settings import Settings
from tests.engine.api.test_api_views import with_views
from tests.engine.projections.bankviews import view

VALUES = ("4711", "live", "deposit", "views", "{account}", "...", "%2F", "a b", "")


def _scope(method: str, path: str) -> Scope:
    return {"type": "http", "method": method, "path": path, "root_path": ""}


def test_each_request_gets_the_route_and_the_parameters_that_fastapi_gives_it() -> None:
    app = create_app(Settings(database_url="postgresql://127.0.0.1:1/none", kafka_bootstrap="127.0.0.1:1"))
    direct: Any = next(route for route in app.routes if isinstance(route, Direct))
    ours: Any = [route for route in app.routes if isinstance(route, APIRoute) and "docs" not in route.path]
    asked = 0
    for route in ours:
        places = route.path.split("/")
        parameters = [number for number, part in enumerate(places) if part.startswith("{")]
        for values in product(VALUES, repeat=len(parameters)):
            for number, value in zip(parameters, values, strict=True):
                places[number] = value
            path = "/".join(places)
            for asked_path, method in product((path, f"{path}/", f"{path}/live"), ("GET", "POST", "DELETE", "HEAD")):
                scope = _scope(method, asked_path)
                match, found = direct.matches(scope)
                if match is Match.FULL:
                    expected = _by_fastapi(ours, "GET" if method == "HEAD" else method, asked_path)
                    assert (found["route"], found["path_params"]) == expected, asked_path
                    asked += 1
            if "" not in values:
                for method in route.methods or ():
                    assert direct.matches(_scope(method, path))[0] is Match.FULL, path
    assert asked > len(ours)
    assert direct.matches(_scope("HEAD", "/views/balances/ada"))[0] is Match.FULL


def _by_fastapi(routes: Any, method: str, path: str) -> tuple[Any, Any]:
    for route in routes:
        match, child = route.matches(_scope(method, path))
        if match is Match.FULL:
            return route, child["path_params"]
    pytest.fail(f"FastAPI knows no {method} {path}")


WORDS = """
    class Word(Enum):
        ONE = "{word}"

    class Row(NamedTuple):
        word: Key[{type}]
        cents: Sum[int]

    def delta(event: MoneyDeposited, at: At) -> Iterable[Row]: ...
"""


@pytest.mark.parametrize(
    ("type_", "word", "may_be_a_row"),
    [("Word", "live", True), ("Word", "lives", False), ("str", "", True), ("bytes", "", True), ("int", "", False)],
)
def test_the_path_of_a_live_list_is_that_of_a_row_where_its_word_may_be_a_key(
    type_: str, word: str, *, may_be_a_row: bool
) -> None:
    """The question says which it is: `after` is for rows only, as all that is read needs the database."""
    with with_views({"words": view(WORDS.format(type=type_, word=word), "words")}):
        app = create_app(Settings(database_url="postgresql://127.0.0.1:1/none", kafka_bootstrap="127.0.0.1:1"))
    app.state.services.stores.failures["database"] = DatabaseUnavailable("It is away.")

    async def asked(*paths: str) -> list[int]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://samefold") as client:
            return [(await client.get(path)).status_code for path in paths]

    statuses = asyncio.run(asked("/views/words/live", "/views/words/live?limit=1", "/views/words/live?after=a"))
    assert statuses == [503, 503, 503 if may_be_a_row else 422]
