"""make test + test-all: one API for all, and a refusal takes milliseconds.

The door over HTTP: who has no valid token gets nothing, and nothing listens to everybody.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from api import views
from api.door import DOCS, OPEN
from api.problems import Problem
from api.safe_start import ListensToAll, require_safe
from infra.errors import BadSettings
from infra.settings import Settings
from tests.engine.api.api import DAY, Api, agent, problem, served, serving
from tests.engine.api.raw_http import connection
from tests.engine.api.tokens import Keys, bearer, issuer_server, key_file, locked
from tests.engine.spine import handler, set_up
from tools.dev.stack import Stack
from tools.testing.fixtures import Samefold, world_of
from tools.testing.waiting import DEADLINE_S, SLOWNESS, until

DEPOSIT = {"cents": 100, "on": DAY}


@pytest.fixture(scope="module")
def keys() -> Keys:
    return Keys("https://issuer.example", one="ES256")


@pytest.fixture(scope="module")
def world(shared_world: Settings, keys: Keys, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    return locked(shared_world, keys, key_file(tmp_path_factory.mktemp("keys"), keys))


@pytest.fixture(scope="module")
def api(world: Settings) -> Iterator[Api]:
    set_up(world)
    with handler(world), agent(world), served(world) as api:
        until(lambda: api.get("/health/ready").status_code == 200, "the issuer's keys are read")
        yield api


@pytest.fixture(scope="module")
def document(world: Settings) -> dict[str, Any]:
    with serving(world.model_copy(update={"api_docs": True}), "documented") as documented:
        assert documented.get("/docs").status_code == 200
        found: dict[str, Any] = documented.get("/openapi.json").json()
        return found


def test_nothing_but_health_is_there_without_a_token(api: Api, document: dict[str, Any]) -> None:
    assert len(document["paths"]) > 20
    for path in {path.partition("{")[0] or path for path in document["paths"]} - OPEN:
        for method in ("GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS"):
            answer = api.client.request(method, path)
            assert answer.status_code == 401, (method, path)
            assert answer.headers["WWW-Authenticate"] == "Bearer"
            assert method == "HEAD" or answer.json()["code"] == "not-authenticated"
    for path in ("/docs", "/openapi.json", "/metrics", "/nothing", "//health/live", "/health/live/", "/HEALTH/live"):
        assert api.client.get(path).status_code == 401, path
    for path in OPEN:
        assert api.client.get(path).status_code == 200


ODD = [
    "letmein",
    "Basic YWRhOmxvdmVsYWNl",
    "Bearer",
    "Bearer a b",
    "Bearer a,b",
    "Bearer \xe9",
    "Bearer " + "a" * 60_000,
]


@pytest.mark.parametrize("header", ODD, ids=lambda header: header[:20])
def test_an_odd_header_is_refused(api: Api, header: str) -> None:
    answer = api.client.get("/views", headers=[(b"Authorization", header.encode("latin-1"))])
    problem(answer, 401, "not-authenticated")
    assert answer.headers["WWW-Authenticate"] == 'Bearer error="invalid_token"'


def test_two_headers_are_refused_even_if_one_is_good(api: Api, keys: Keys) -> None:
    good = f"Bearer {keys.token()}".encode()
    answer = api.client.get("/views", headers=[(b"Authorization", good), (b"authorization", b"Bearer x")])
    problem(answer, 400, "bad-header")


def test_metrics_need_their_scope(api: Api, keys: Keys) -> None:
    assert api.get("/metrics", **bearer(keys.token())).status_code == 403
    found = api.get("/metrics", **bearer(keys.token(sub="prometheus", roles=None, scope="metrics")))
    assert found.status_code == 200
    assert "prometheus" not in found.text
    assert "ada" not in found.text


def test_a_live_feed_ends_with_its_token(api: Api, keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("api.issuer.LEEWAY_S", 0)
    assert_feed_ends(api, keys.token(exp=time.time() + 5 * SLOWNESS))
    assert api.get("/views", **bearer(keys.token())).status_code == 200


def test_a_live_feed_is_asked_for_again_now_and_then(api: Api, keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that it ends where a key or a right was withdrawn meanwhile."""
    monkeypatch.setattr(views, "LONGEST_FEED_S", 0.3)
    assert_feed_ends(api, keys.token(exp=time.time() + 3_600))


def assert_feed_ends(api: Api, token: str) -> None:
    with api.client.stream("GET", "/views/balances/7/live", headers=bearer(token)) as feed:
        assert feed.status_code == 200
        assert "event: " in "".join(feed.iter_text())  # which returns when the feed ends


def problems() -> dict[int, Problem]:
    return {id(one): one for one in gc.get_objects() if isinstance(one, Problem)}


def test_a_refused_request_leaves_nothing_behind(api: Api, keys: Keys) -> None:
    """A problem that kept itself would keep its request, too, until a collection: these are rare."""
    good, other = bearer(keys.token(roles=[])), keys.token(iss="https://evil.example")
    asked: list[tuple[str, str, dict[str, str]]] = [
        ("GET", "/views", {}),
        ("GET", "/views", bearer("letmein")),
        ("GET", "/views", bearer(other)),
        ("GET", "/metrics", good),
        ("GET", "/views/transfers", good),
        ("GET", "/views/balances/nobody", good),
        ("GET", "/nowhere", good),
        ("POST", "/accounts/nobodys/deposit", good),
        ("POST", "/accounts/nobodys/charge-fee", good),
    ]
    gc.collect()
    known = problems()  # of other tests, whose errors pytest may keep
    gc.disable()
    try:
        for method, path, headers in asked * 3:
            body = DEPOSIT if method == "POST" else None
            answer = api.client.request(method, path, json=body, headers=headers | {"Long": "x" * 30_000})
            assert answer.status_code >= 400
        until(lambda: problems().keys() <= known.keys(), "nothing is left of them")
    finally:
        gc.enable()


def test_what_is_no_http_is_logged_but_does_not_fill_the_disk(api: Api, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", "uvicorn.error"):
        for _ in range(100):
            with connection(api.server.port) as client:
                client.sendall(b"\x16\x03\x01")
                client.recv(100)
    assert 0 < sum(record.name == "uvicorn.error" for record in caplog.records) < 90


def test_refused_tokens_are_logged_but_do_not_fill_the_disk(api: Api, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", "api.door"):
        for _ in range(300):
            api.get("/views", **bearer("forged"))
    lines = [record.getMessage() for record in caplog.records if record.name == "api.door"]
    assert 0 < len(lines) < 250
    assert all("127.0.0.1" in line for line in lines)
    assert not any("forged" in line for line in lines)


def test_a_process_that_has_read_no_keys_is_not_ready_and_lets_nobody_in(world: Settings, keys: Keys) -> None:
    with issuer_server() as issuer:
        other = Keys(issuer.url, one="ES256")
        down = locked(world, other, f"{issuer.url}/jwks")
        with served(down, "keyless") as api:
            found = api.client.get("/health/ready")
            assert found.json()["checks"]["issuer"]["code"] == "keys-not-known"
            problem(api.get("/views", **bearer(other.token())), 503, "keys-not-known")
            problem(found, 503, "not-ready")


def test_the_document_tells_of_the_door(document: dict[str, Any]) -> None:
    assert document["security"] == [{"token": []}]
    assert document["components"]["securitySchemes"]["token"]["scheme"] == "bearer"
    for path, operations in document["paths"].items():
        for operation in operations.values():
            is_open = operation.get("security") == []
            assert is_open == (path in OPEN)
            assert is_open or {"400", "401", "403", "503"} <= operation["responses"].keys()
    assert DOCS("/docs/../views") is None


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "bank.example", "127.0.0.1.example.com"])
def test_off_does_not_listen_beyond_this_machine(world: Settings, host: str) -> None:
    with pytest.raises(ListensToAll):
        require_safe(world.model_copy(update={"auth": "off"}), host)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        *(({"jwt_issuer": f"{url}issuer.example", "jwt_keys": None}, "https://") for url in ("http://", "", "ftp://")),
        ({"jwt_audience": None}, "jwt_audience"),
    ],
)
def test_keys_that_anybody_could_answer_with_are_refused_at_the_start(
    world: Settings, change: dict[str, Any], why: str
) -> None:
    with pytest.raises(BadSettings, match=why):
        require_safe(world.model_copy(update=change), "127.0.0.1")


@pytest.mark.slow
@pytest.mark.parametrize("role", ["api", "all"])
def test_a_process_whose_door_would_be_open_does_not_start(
    samefold: Samefold, world: Settings, role: str, tmp_path: Path
) -> None:
    off = world.model_copy(update={"auth": "off", "data_dir": tmp_path})
    done = samefold("run", role, "--host", "0.0.0.0", settings=off)
    assert (done.returncode, "SAMEFOLD_AUTH=jwt" in done.stderr) == (2, True)


def test_whoever_starts_no_api_needs_no_issuer(tmp_path: Path) -> None:
    """As `samefold dev up` in a new folder, which makes one."""
    assert Settings(auth="jwt", data_dir=tmp_path).jwt_issuer is None


def test_the_services_own_tests_ask_without_a_token(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAMEFOLD_AUTH", "jwt")
    monkeypatch.setenv("SAMEFOLD_API_HOST", "0.0.0.0")
    with world_of(stack) as settings:
        require_safe(settings, settings.api_host)
        assert settings.auth == "off"


def test_dev_token_opens_the_door_of_the_development_stack(
    samefold: Samefold, world: Settings, stack: Stack, tmp_path: Path
) -> None:
    from tools.dev.issuer import AUDIENCE, ISSUER, DevIssuer

    issuer = DevIssuer(stack.folder / "issuer")
    of_stack = {"jwt_issuer": ISSUER, "jwt_audience": AUDIENCE, "jwt_keys": str(issuer.keys)}
    dev = world.model_copy(update={**of_stack, "data_dir": stack.folder})
    done = samefold("dev", "token", "--subject", "ada", "--role", "teller", "--scope", "metrics", settings=dev)
    assert done.returncode == 0, done.stderr
    with served(dev, "development") as api:
        for path in ("/views", "/metrics"):
            assert api.client.get(path, headers=bearer(done.stdout.strip())).status_code == 200
    elsewhere = samefold("dev", "token", "--subject", "ada", settings=world.model_copy(update={"data_dir": tmp_path}))
    assert elsewhere.returncode == 1
    assert "another issuer" in elsewhere.stderr


def test_requests_of_other_threads_do_not_share_a_caller(api: Api, keys: Keys) -> None:
    teller = bearer(keys.token(sub="tess"))
    names = [f"holder-{number}" for number in range(12)]
    for name in names:
        assert api.post(name, "open-account", teller, overdraft_limit=0, owner=name).status_code == 200
    together = threading.Barrier(len(names))

    def seen(name: str) -> set[str]:
        token = bearer(keys.token(sub=name, roles=None))
        together.wait(DEADLINE_S)
        found = [api.get("/views/balances", **token).json()["items"] for _ in range(3)]
        return {row["account"] for rows in found for row in rows}

    with ThreadPoolExecutor(len(names)) as pool:
        assert list(pool.map(seen, names)) == [{name} for name in names]
