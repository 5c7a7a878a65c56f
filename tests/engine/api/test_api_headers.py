"""make test: one API for all, and an answer takes milliseconds.

What every answer says to browsers and caches, also one that the app did not write; what pages of other origins may read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from api.server import HEADERS
from infra.errors import BadSettings
from infra.observability import metrics
from infra.settings import Settings
from tests.engine.api.api import Api, problem, serving
from tests.engine.api.front import free_port
from tests.engine.api.raw_http import ask, connection, head, post
from tools.testing.waiting import DEADLINE_S

PAGE = "https://bank.example.com"
VERSIONS = re.compile(r"uvicorn|starlette|fastapi|python|wsgi|httptools", re.IGNORECASE)


@pytest.fixture(scope="module")
def with_cors(shared_world: Settings) -> Iterator[Api]:
    with serving(shared_world.model_copy(update={"api_cors_origins": f"http://localhost:3000,{PAGE}"})) as running:
        yield running


def answers(api: Api) -> dict[str, httpx.Headers]:
    client, port = api.client, api.server.port
    opened = api.open("headers")
    row = client.get("/views/balances/headers", params={"after": opened.json()["position"]})
    assert (opened.status_code, row.status_code) == (200, 200)
    found = {
        "command": opened,
        "refused": api.post("headers", "withdraw", cents=1),
        "outcome": client.get("/outcomes/accounts/headers/headers"),
        "row": row,
        "unchanged": client.get("/views/balances/headers", headers={"If-None-Match": row.headers["ETag"]}),
        "page": client.get("/views/balances"),
        "no row": client.get("/views/balances/nobody"),
        "nothing": client.get("/nothing"),
        "no method": client.delete("/views"),
        "invalid": client.post("/accounts/headers/deposit", json={}),
        "health": client.get("/health/ready"),
        "metrics": client.get("/metrics"),
        "document": client.get("/openapi.json"),
        "docs": client.get("/docs"),
    }
    assert found["unchanged"].status_code == 304
    assert found["refused"].status_code == 409
    headers = {name: answer.headers for name, answer in found.items()}
    with client.stream("GET", "/views/balances/headers/live") as live:
        headers["live"] = live.headers
    reply = ask(port, b"nonsense\r\n\r\n")
    assert reply.status == 400
    headers["400"] = httpx.Headers(reply.headers)
    return headers


def test_every_answer_tells_browsers_to_keep_and_guess_nothing_and_no_version(api: Api) -> None:
    for name, headers in answers(api).items():
        for header, value in HEADERS:
            assert headers.get_list(header) == [value], (name, header)
        assert "server" not in headers
        assert not VERSIONS.search(str({**headers, "etag": "", "samefold-position": ""})), name
        assert not [header for header in headers if header.startswith("access-control")], name
    kept = dict(HEADERS)
    assert (kept["X-Content-Type-Options"], kept["Cache-Control"]) == ("nosniff", "no-store")
    assert "frame-ancestors 'none'" in kept["Content-Security-Policy"]


def test_without_configured_origins_a_preflight_is_an_unknown_method(api: Api) -> None:
    asked = {"Origin": PAGE, "Access-Control-Request-Method": "GET"}
    assert api.client.options("/views", headers=asked).status_code == 405


def test_pages_of_configured_origins_read_answers_and_errors_and_send_no_cookies(
    with_cors: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("a defect")

    with monkeypatch.context() as patch:
        patch.setattr(with_cors.services.views, "left_out", fail)
        defect = with_cors.client.get("/views", headers={"Origin": PAGE})
    problem(defect, 500, "defect")
    for answer in (defect, with_cors.client.get("/nothing", headers={"Origin": PAGE})):
        assert answer.headers["Access-Control-Allow-Origin"] == PAGE
        assert {"ETag", "Samefold-Position", "Correlation-Id", "Retry-After", "Location"} <= set(
            answer.headers["Access-Control-Expose-Headers"].split(", ")
        )
        assert "Origin" in answer.headers["Vary"]
        assert "Access-Control-Allow-Credentials" not in answer.headers


def test_a_preflight_needs_no_token_and_allows_what_clients_send(with_cors: Api) -> None:
    sent = "authorization, content-type, idempotency-key, if-match, prefer, correlation-id"
    asked = {"Origin": PAGE, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": sent}
    answer = with_cors.client.options("/accounts/a/deposit", headers=asked)
    assert (answer.status_code, answer.headers["Access-Control-Allow-Origin"]) == (200, PAGE)
    for unwanted in ({"Access-Control-Request-Method": "DELETE"}, {"Access-Control-Request-Headers": "x-other"}):
        assert with_cors.client.options("/accounts/a/deposit", headers=asked | unwanted).status_code == 400


@pytest.mark.parametrize(
    "origin", ["https://evil.example", f"{PAGE}.evil.example", "http://bank.example.com", "null", "*", f"{PAGE}:444"]
)
def test_pages_of_other_origins_read_nothing(with_cors: Api, origin: str) -> None:
    preflight = {"Origin": origin, "Access-Control-Request-Method": "GET"}
    for answer in (
        with_cors.client.get("/health/live", headers={"Origin": origin}),
        with_cors.client.options("/views", headers=preflight),
    ):
        assert "Access-Control-Allow-Origin" not in answer.headers


@pytest.mark.parametrize("origins", ["*", "null", "https://", f"{PAGE}/", f"{PAGE},*", f"{PAGE} http://a", "HTTPS://A"])
def test_what_is_no_origin_is_refused_at_the_start(origins: str) -> None:
    with pytest.raises(BadSettings, match="API_CORS_ORIGINS"):
        Settings(api_cors_origins=origins)


@pytest.mark.keeps_its_port
def test_a_port_of_metrics_tells_no_version_whatever_is_asked() -> None:
    port = free_port()
    metrics.serve(Settings(metrics_port=port))
    for request, status in (
        (head("GET", "/metrics"), 200),
        (head("BREW", "/metrics"), 501),
        (head("GET", "/" + "x" * 70_000), 414),
        (post("/metrics", b"x" * 1_000), 501),
    ):
        reply = ask(port, request)
        assert (reply.status, reply.headers["x-content-type-options"]) == (status, "nosniff")
        assert "server" not in reply.headers
        if status != 200:
            assert reply.body == str(status).encode()


@pytest.mark.keeps_its_port
def test_a_port_of_metrics_serves_the_next_client_however_many_are_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "SCRAPE_S", DEADLINE_S)
    port = free_port()
    metrics.serve(Settings(metrics_port=port))
    with ExitStack() as stack:
        silent = [stack.enter_context(connection(port)) for _ in range(3 * metrics.MAX_SCRAPERS)]
        assert ask(port, head("GET", "/metrics")).status == 200
        monkeypatch.setattr(metrics, "SCRAPE_S", 0.0)
        for one in silent:  # the last ones by their deadline
            assert one.recv(1) == b""
