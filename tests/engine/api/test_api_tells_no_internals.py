"""make test-all: all errors at every route take seconds.

No answer of any route names an address, a path, a user or the text of another program, whatever went wrong. (Where a request is
wrong, each test looks at the problem that it gets: `Reply.is_problem`, `problem`.)

The routes are those of the app, and the errors all that there are: a new one of either is asked for by itself.
"""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import httpx
import psycopg
import pytest
from confluent_kafka import KafkaError, KafkaException
from fastapi import FastAPI
from fastapi.routing import APIRoute
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from pydantic import SecretStr

from api import services
from api.health import SUBJECTS
from api.server import HEADERS
from infra.errors import SamefoldError
from infra.log import topics
from infra.observability.logs import EventFormatter
from infra.settings import Settings
from tests.engine.api.api import Api, serving
from tests.engine.api.raw_http import INTERNALS, SECRET
from tools.testing.fixtures import ROOT
from tools.testing.waiting import until

NOWHERE = "127.0.0.1:1"
LIVE = re.compile("/live$")
"""Answers without an end."""
BODIES: dict[str, Any] = {"open-account": {"overdraft_limit": 0, "on": "2026-01-01"}}
MONEY = {"cents": 1, "on": "2026-01-02"}
SHARES = 3


def app_of(api: Api) -> FastAPI:
    app: FastAPI = api.server.config.loaded_app
    return app


def paths(api: Api) -> list[tuple[str, str]]:
    """(method, path with parameters) of every route."""
    found = [(method, one.path) for one in routes(app_of(api).routes) for method in one.methods or ()]
    assert {"/health/ready", "/views/balances", "/outcomes/{context}/{stream_id}/{key}"} <= {path for _, path in found}
    assert any(method == "POST" for method, _ in found)
    return sorted(pair for pair in found if not LIVE.search(pair[1]))


def routes(some: Any) -> Iterator[APIRoute]:
    for one in some:
        if isinstance(one, APIRoute):
            yield one
        else:
            yield from routes(getattr(getattr(one, "original_router", one), "routes", ()))


def ask_all(api: Api, share: int = 0, shares: int = 1) -> dict[str, httpx.Response]:
    """Every route's answer, or that of every so many-th one; none has an internal in it."""
    found: dict[str, httpx.Response] = {}
    for method, path in paths(api)[share % shares :: shares]:
        target = re.sub(r"\{\w+\}", "x", path.replace("{context}", "accounts"))
        body = BODIES.get(path.rpartition("/")[2], MONEY) if method == "POST" else None
        name = f"{method} {path}"
        found[name] = answer = api.client.request(method, target, json=body, headers={"Prefer": "wait=0"})
        if answer.is_success and "/health" not in name:
            continue
        random_digits = answer.headers.get("Correlation-Id", " ")
        told = f"{answer.headers} {answer.text}".replace(random_digits, " ")
        assert not (leak := INTERNALS.search(told)), f"{name}: {leak[0]!r} in {told}"
        for secret in secrets(api.services.settings):
            assert secret not in told, f"{name}: {secret!r} in {told}"
    return found


def secrets(settings: Settings) -> list[str]:
    known = conninfo_to_dict(settings.database)
    places = [settings.kafka, settings.kafka.partition(":")[2], str(settings.data_dir), str(ROOT)]
    names = [str(known[name]) for name in ("host", "dbname") if known.get(name)]
    return [one for one in places + names + [f"'{known['user']}'", f'"{known["user"]}"'] if len(one) > 1]


def elsewhere(world: Settings, **other: str) -> Settings:
    """These settings, with another part of the database's address."""
    return world.model_copy(update={"database_url": SecretStr(make_conninfo(world.database, **other))})


NOT_THERE: dict[str, tuple[str, Callable[[Settings], Settings]]] = {
    "no store is there": (
        "database-unavailable",
        lambda world: elsewhere(world, host="127.0.0.1", port="1").model_copy(update={"kafka_bootstrap": NOWHERE}),
    ),
    "no such host": ("database-unavailable", lambda world: elsewhere(world, host="db.intern.invalid")),
    "no such user": ("database-refused", lambda world: elsewhere(world, user="nobody_of_ours")),
    "no such database": ("database-refused", lambda world: elsewhere(world, dbname="nothing_of_ours")),
    "no tables": ("database-behind", lambda world: elsewhere(world, dbname="postgres")),
}


@pytest.mark.parametrize("situation", NOT_THERE)
@pytest.mark.slow
def test_of_a_store_that_is_not_as_it_should_be(
    situation: str, shared_world: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topics, "TIMEOUT_S", 0.5)
    monkeypatch.setattr(services, "POOL_WAIT_S", 0.5)
    code, change = NOT_THERE[situation]
    with serving(change(shared_world)) as api:
        until(lambda: "database" in api.services.stores.failures, "it notices")
        found = ask_all(api)
        checks = found["GET /health/ready"].json()["checks"]
    assert checks["database"]["code"] == code
    assert found["GET /views/balances"].json()["code"] == code


class Raising:
    """In the place of something that the routes use: whatever they ask of it raises."""

    def __init__(self, error: Callable[[], BaseException], settings: Settings) -> None:
        self._error = error
        self.settings = settings

    def __getattr__(self, name: str) -> Any:
        raise self._error()


def every_error() -> list[Callable[[], BaseException]]:
    found: list[Callable[[], BaseException]] = [
        lambda: RuntimeError(SECRET),
        lambda: OSError(2, SECRET, "/var/lib/samefold"),
        lambda: KafkaException(KafkaError(KafkaError._TRANSPORT, SECRET)),
        lambda: psycopg.OperationalError(SECRET),
        lambda: psycopg.errors.UndefinedTable(SECRET),
    ]
    return found + [partial(named, one) for one in hidden(SamefoldError)]


def hidden(root: type[SamefoldError]) -> Iterator[type[SamefoldError]]:
    """The kinds of named errors whose words are not for clients."""
    for one in root.__subclasses__():
        if not one.is_public:
            yield one
        yield from hidden(one)


def named(kind: type[SamefoldError]) -> SamefoldError:
    error = kind.__new__(kind)
    SamefoldError.__init__(error, SECRET, SECRET)
    return error


@contextmanager
def logged() -> Iterator[Callable[[], list[dict[str, str]]]]:
    """What the process logs meanwhile, as it would."""
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    handler.setFormatter(EventFormatter("json"))
    logging.getLogger().addHandler(handler)
    try:
        yield lambda: [json.loads(line) for line in text.getvalue().splitlines()]
    finally:
        logging.getLogger().removeHandler(handler)


@pytest.mark.slow
def test_of_any_error_a_client_is_told_the_code_and_an_id_and_the_log_the_rest(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every error at some routes, every route with some errors."""
    state = app_of(api).state
    settings = api.services.settings
    with logged() as lines:
        answers: list[httpx.Response] = []
        for number, error in enumerate(every_error()):
            with monkeypatch.context() as patch:
                for name in ("services", "readiness"):
                    patch.setitem(state._state, name, Raising(error, settings))
                answers += [one for one in ask_all(api, number, SHARES).values() if one.status_code >= 500]
        assert len(answers) > 2 * len(every_error())
        events = lines()
    # why no command may be appended now is what the process knew before, and has logged
    answers = [answer for answer in answers if "appended" not in answer.json()]
    for answer in answers:
        assert all(answer.headers[name] == value for name, value in HEADERS), "as every answer has them"
        assert answer.headers["Correlation-Id"] == answer.json()["correlation_id"]
    by_id = {event["correlation_id"]: event for event in events if SECRET in json.dumps(event)}
    assert {answer.json()["correlation_id"] for answer in answers} <= by_id.keys()


@pytest.mark.slow
def test_of_what_the_process_knows_to_be_wrong(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stuck(dict[str, SamefoldError]):
        def __setitem__(self, *_: Any) -> None:
            pass

        def pop(self, *_: Any) -> Any:
            return None

    errors = [*map(named, hidden(SamefoldError))]
    for first in range(0, len(errors), len(SUBJECTS)):
        failures = dict(zip(SUBJECTS, errors[first:], strict=False))
        monkeypatch.setattr(api.services.stores, "failures", Stuck(failures))
        checks = ask_all(api)["GET /health/ready"].json()["checks"]
        assert {subject: checks[subject]["code"] for subject in failures} == {
            subject: error.code for subject, error in failures.items()
        }
    monkeypatch.setattr(api.services.stores, "failures", {})
