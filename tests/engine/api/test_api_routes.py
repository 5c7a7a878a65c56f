"""make test: the app is made, and not served.

`Direct` takes a request to the route that FastAPI takes it to, with the same parameters.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from fastapi.routing import APIRoute
from starlette.routing import Match
from starlette.types import Scope

from api.app import Direct, create_app
from infra.settings import Settings

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
    assert direct.matches(_scope("HEAD", "/views/balances/ada/live"))[0] is Match.NONE, "that would not end"


def _by_fastapi(routes: Any, method: str, path: str) -> tuple[Any, Any]:
    for route in routes:
        match, child = route.matches(_scope(method, path))
        if match is Match.FULL:
            return route, child["path_params"]
    pytest.fail(f"FastAPI knows no {method} {path}")
