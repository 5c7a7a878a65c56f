"""The door over HTTP: who has no valid token gets nothing, one caller can't take all, and nothing listens to everybody."""

from __future__ import annotations

import asyncio
import gc
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from api import caller_limits, views
from api.caller_limits import Bucket, CallerLimits
from api.door import DOCS, OPEN
from api.problems import Problem
from api.safe_start import ListensToAll, require_safe
from infra.dev.stack import Stack
from infra.settings import Settings
from infra.testing.fixtures import Samefold, world_of
from tests.engine.api.api import Api, agent, ready, serving
from tests.engine.api.tokens import Keys, bearer, issuer_server, key_file, locked
from tests.engine.spine import DEADLINE_S, handler, set_up, until

ON = "2026-01-02"
DEPOSIT = {"cents": 100, "on": ON}


@pytest.fixture(scope="module")
def keys() -> Keys:
    return Keys("https://issuer.example", one="ES256")


@pytest.fixture(scope="module")
def world(shared_world: Settings, keys: Keys, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    return locked(shared_world, keys, key_file(tmp_path_factory.mktemp("keys"), keys), api_caller_requests=5)


@pytest.fixture(scope="module")
def api(world: Settings) -> Iterator[Api]:
    set_up(world)
    with handler(world), agent(world), serving(world) as api:
        ready(api)
        until(lambda: httpx.get(f"{api.url}/health/ready").status_code == 200, "the issuer's keys are read")
        yield api


def test_nothing_but_health_is_there_without_a_token(api: Api, world: Settings) -> None:
    with serving(world.model_copy(update={"api_docs": True}), "documented") as documented:
        paths = {path.partition("{")[0] or path for path in _paths(documented)}
        for path in paths - OPEN:
            for method in ("GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS"):
                answer = api.client.request(method, path)
                assert answer.status_code == 401, (method, path)
                assert answer.headers["WWW-Authenticate"] == "Bearer"
                assert method == "HEAD" or answer.json()["code"] == "not-authenticated"
    for path in ("/docs", "/openapi.json", "/metrics", "/nothing", "//health/live", "/health/live/", "/HEALTH/live"):
        assert api.client.get(path).status_code == 401, path
    for path in OPEN:
        assert api.client.get(path).status_code == 200


def _paths(api: Api) -> set[str]:
    found: dict[str, object] = api.client.get("/openapi.json").json()["paths"]
    assert len(found) > 20
    return set(found)


def test_with_a_token_of_every_right_it_is_as_it_was(api: Api, keys: Keys) -> None:
    token = bearer(keys.token(sub="tess"))
    opened = api.client.post(
        "/accounts/7/open-account", json={"overdraft_limit": 0, "on": ON, "owner": "ada"}, headers=token
    )
    assert opened.status_code == 200, opened.text
    assert api.client.get("/views/balances/7", headers=token).json()["row"]["owner"] == "ada"


@pytest.mark.parametrize(
    ("header", "status", "code"),
    [
        ("letmein", 401, "not-authenticated"),
        ("Basic YWRhOmxvdmVsYWNl", 401, "not-authenticated"),
        ("Bearer", 401, "not-authenticated"),
        ("Bearer a b", 401, "not-authenticated"),
        ("Bearer a,b", 401, "not-authenticated"),
        ("Bearer \xe9", 401, "not-authenticated"),
        ("Bearer " + "a" * 60_000, 401, "not-authenticated"),
        ("Bearer " + "a" * 1_000_000, 431, "head-too-large"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_an_odd_header_is_refused(api: Api, header: str, status: int, code: str) -> None:
    answer = httpx.get(f"{api.url}/views", headers=[(b"Authorization", header.encode("latin-1"))])
    assert (answer.status_code, answer.json()["code"]) == (status, code)
    assert status != 401 or answer.headers["WWW-Authenticate"] == 'Bearer error="invalid_token"'


def test_two_headers_are_refused_even_if_one_is_good(api: Api, keys: Keys) -> None:
    good = f"Bearer {keys.token()}".encode()
    answer = httpx.get(f"{api.url}/views", headers=[(b"Authorization", good), (b"authorization", b"Bearer x")])
    assert (answer.status_code, answer.json()["code"]) == (400, "bad-header")


def test_metrics_need_their_scope(api: Api, keys: Keys) -> None:
    assert api.client.get("/metrics", headers=bearer(keys.token())).status_code == 403
    found = api.client.get("/metrics", headers=bearer(keys.token(sub="prometheus", roles=None, scope="metrics")))
    assert found.status_code == 200
    assert "prometheus" not in found.text
    assert "ada" not in found.text


def test_a_live_feed_ends_with_its_token(api: Api, keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("api.issuer.LEEWAY_S", 0)
    with (
        httpx.Client(base_url=api.url, timeout=DEADLINE_S) as client,
        client.stream("GET", "/views/balances/7/live", headers=bearer(keys.token(**_soon()))) as feed,
    ):
        assert feed.status_code == 200
        assert "event: " in "".join(feed.iter_text())  # which returns when the feed ends
    assert api.client.get("/views", headers=bearer(keys.token())).status_code == 200


def test_a_live_feed_is_asked_for_again_now_and_then(api: Api, keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that it ends where a key or a right was withdrawn meanwhile."""
    monkeypatch.setattr(views, "LONGEST_FEED_S", 0.3)
    with (
        httpx.Client(base_url=api.url, timeout=DEADLINE_S) as client,
        client.stream("GET", "/views/balances/7/live", headers=bearer(keys.token(exp=time.time() + 3_600))) as feed,
    ):
        assert feed.status_code == 200
        assert "event: " in "".join(feed.iter_text())  # which returns when the feed ends


def _soon() -> dict[str, Any]:
    return {"exp": time.time() + 2}


def problems() -> dict[int, Problem]:
    """All that are in memory, by identity."""
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
            with socket.create_connection(("127.0.0.1", api.client.base_url.port or 0)) as client:
                client.sendall(b"\x16\x03\x01")
                client.recv(100)
    assert 0 < sum(record.name == "uvicorn.error" for record in caplog.records) < 90


def test_refused_tokens_are_logged_but_do_not_fill_the_disk(api: Api, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", "api.door"):
        for _ in range(300):
            api.client.get("/views", headers=bearer("forged"))
    lines = [record.getMessage() for record in caplog.records if record.name == "api.door"]
    assert 0 < len(lines) < 250
    assert all("127.0.0.1" in line for line in lines)
    assert not any("forged" in line for line in lines)


def test_a_caller_waits_for_tokens_of_its_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    bucket = Bucket(rate=2, burst=3)
    assert [bucket.take() for _ in range(3)] == [0, 0, 0]
    assert bucket.take() == 0.5
    now[0] = 0.5
    assert bucket.take() == 0
    assert bucket.take() == 0.5
    now[0] = 1_000
    assert [bucket.take() for _ in range(3)] == [0, 0, 0]
    assert bucket.take() > 0


def test_of_many_callers_the_idle_are_forgotten_and_never_the_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caller_limits, "MOST_CALLERS", 2)
    limits = CallerLimits(rate=1, at_once=1)
    with limits.taking("a"), limits.taking("b"), limits.taking("c"):
        for busy in ("a", "b", "c"):
            with pytest.raises(Problem, match="too-many-requests"), limits.taking(busy):
                pass
    for number in range(9):
        with limits.taking(f"other {number}"):
            pass
    with limits.taking("a"), pytest.raises(Problem), limits.taking("a"):
        pass


def test_what_one_caller_has_too_many_of_the_next_has_none_less(world: Settings, keys: Keys) -> None:
    """Four times its share from one caller: it is told to wait, and another one's requests are all answered."""
    slow = world.model_copy(update={"api_caller_rate": 5.0, "api_caller_requests": 1_000})
    with serving(slow, "limited") as api:
        ready(api)
        until(lambda: httpx.get(f"{api.url}/health/ready").status_code == 200, "the issuer's keys are read")
        greedy, modest = bearer(keys.token(sub="greedy")), bearer(keys.token(sub="modest"))
        with ThreadPoolExecutor(8) as pool, httpx.Client(base_url=api.url, timeout=DEADLINE_S) as client:
            many = list(pool.map(lambda _: client.get("/views", headers=greedy), range(200)))
            few = [client.get("/views", headers=modest) for _ in range(8)]
        refused = [answer for answer in many if answer.status_code == 429]
        assert len(refused) > 100
        assert {answer.json()["code"] for answer in refused} == {"too-many-requests"}
        assert all(int(answer.headers["Retry-After"]) >= 1 for answer in refused)
        assert [answer.status_code for answer in few] == [200] * 8


def test_one_caller_has_only_so_many_requests_at_once(api: Api, keys: Keys) -> None:
    """Subscriptions are requests, too: they could take all the places."""
    token = bearer(keys.token(sub="watcher"))

    async def subscribe() -> list[int]:
        async with httpx.AsyncClient(base_url=api.url, timeout=DEADLINE_S) as client:
            asked = [
                client.send(client.build_request("GET", f"/views/balances/{number}/live", headers=token), stream=True)
                for number in range(8)
            ]
            answers = await asyncio.gather(*asked)
            other = await client.get("/views", headers=bearer(keys.token(sub="another")))
            assert other.status_code == 200
            for answer in answers:
                await answer.aclose()
            return [answer.status_code for answer in answers]

    assert sorted(asyncio.run(subscribe())) == [200] * 5 + [429] * 3
    until(lambda: api.client.get("/views", headers=token).status_code == 200, "their places are free again")


def test_a_process_that_has_read_no_keys_is_not_ready_and_lets_nobody_in(world: Settings, keys: Keys) -> None:
    with issuer_server() as issuer:
        other = Keys(issuer.url, one="ES256")
        down = locked(world, other, f"{issuer.url}/jwks")
        with serving(down, "keyless") as api:
            ready(api)
            found = api.client.get("/health/ready")
            assert found.json()["checks"]["issuer"]["code"] == "keys-not-known"
            answer = api.client.get("/views", headers=bearer(other.token()))
            assert (answer.status_code, answer.json()["code"]) == (503, "keys-not-known")
            assert "127.0.0.1" not in answer.text + found.text


def test_the_document_tells_of_the_door(world: Settings) -> None:
    with serving(world.model_copy(update={"api_docs": True}), "documented") as api:
        document = api.client.get("/openapi.json").json()
        assert api.client.get("/docs").status_code == 200
    assert document["security"] == [{"token": []}]
    assert document["components"]["securitySchemes"]["token"]["scheme"] == "bearer"
    for path, operations in document["paths"].items():
        for operation in operations.values():
            is_open = operation.get("security") == []
            assert is_open == (path in OPEN)
            assert is_open or {"400", "401", "403", "429", "503"} <= operation["responses"].keys()
    assert DOCS("/docs/../views") is None


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "bank.example", "127.0.0.1.example.com"])
def test_off_does_not_listen_beyond_this_machine(samefold: Samefold, world: Settings, host: str) -> None:
    off = world.model_copy(update={"auth": "off"})
    with pytest.raises(ListensToAll):
        require_safe(off, host)
    done = samefold("run", "api", "--host", host, settings=off)
    assert done.returncode == 2
    assert "SAMEFOLD_AUTH=jwt" in done.stderr
    assert samefold("run", "all", "--host", host, settings=off).returncode == 2


@pytest.mark.parametrize("url", ["http://issuer.example", "issuer.example", "ftp://issuer.example/keys"])
def test_keys_that_anybody_could_answer_with_are_refused_at_the_start(
    samefold: Samefold, world: Settings, url: str, tmp_path: Path
) -> None:
    done = samefold(
        "run",
        "api",
        settings=world.model_copy(update={"jwt_issuer": url, "jwt_keys": None, "data_dir": tmp_path}),
        process_s=30,
    )
    assert done.returncode == 2
    assert "https://" in done.stderr


def test_jwt_needs_to_know_the_issuer_and_the_audience(samefold: Samefold, world: Settings, tmp_path: Path) -> None:
    done = samefold(
        "run", "api", settings=world.model_copy(update={"jwt_audience": None, "data_dir": tmp_path}), process_s=30
    )
    assert done.returncode == 2
    assert "jwt_audience" in done.stderr


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
    from infra.dev.issuer import AUDIENCE, ISSUER, DevIssuer

    issuer = DevIssuer(stack.folder / "issuer")
    of_stack = {"jwt_issuer": ISSUER, "jwt_audience": AUDIENCE, "jwt_keys": str(issuer.keys)}
    dev = world.model_copy(update={**of_stack, "data_dir": stack.folder})
    done = samefold("dev", "token", "--subject", "ada", "--role", "teller", "--scope", "metrics", settings=dev)
    assert done.returncode == 0, done.stderr
    with serving(dev, "development") as api:
        ready(api)
        for path in ("/views", "/metrics"):
            assert api.client.get(path, headers=bearer(done.stdout.strip())).status_code == 200
    elsewhere = samefold("dev", "token", "--subject", "ada", settings=world.model_copy(update={"data_dir": tmp_path}))
    assert elsewhere.returncode == 1
    assert "another issuer" in elsewhere.stderr


def test_requests_of_other_threads_do_not_share_a_caller(api: Api, keys: Keys) -> None:
    """Each of many callers sees its own rows while all ask at once."""
    teller = bearer(keys.token(sub="tess"))
    names = [f"holder-{number}" for number in range(12)]
    for name in names:
        body = {"overdraft_limit": 0, "on": ON, "owner": name}
        assert api.client.post(f"/accounts/{name}/open-account", json=body, headers=teller).status_code == 200
    seen: dict[str, set[str]] = {}
    together = threading.Barrier(len(names))

    def look(name: str) -> None:
        token = bearer(keys.token(sub=name, roles=None))
        together.wait(DEADLINE_S)
        with httpx.Client(base_url=api.url, timeout=DEADLINE_S) as client:
            found = [client.get("/views/balances", headers=token).json()["items"] for _ in range(3)]
        seen[name] = {row["account"] for rows in found for row in rows}

    with ThreadPoolExecutor(len(names)) as pool:
        list(pool.map(look, names))
    assert seen == {name: {name} for name in names}
