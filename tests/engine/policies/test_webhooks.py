"""make test + test-all: a receiver in this process; what waits and kills takes longer.

Webhooks arrive at least once, signed and in order per stream, whatever the receiver answers and whoever is killed."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from infra.database.connect import Connection, connect
from infra.errors import BadSettings
from infra.observability.metrics import REGISTRY
from infra.settings import Endpoint, Settings
from policies.engine import webhooks as webhooks_engine
from policies.engine.operate import Which, retry
from policies.engine.outbox import Wish
from policies.engine.posts import PendingPost, writes
from policies.engine.process import Policies
from policies.engine.relay import Relay
from policies.engine.webhooks import DELAYS_S, Webhooks
from projections.engine.views.event_context import At
from tests.engine.api.api import in_a_loop
from tests.engine.policies.webhook_receiver import MOODS
from tools.testing.fixtures import ROOT
from tools.testing.waiting import until

SECRET = "whsec_" + "c2VjcmV0" * 4
QUICK_S = [0.05] * 500
CERTIFICATE = ROOT / "tests" / "engine" / "policies" / "localhost.pem"
"""Of `localhost`, signed by itself, with its key."""
START = datetime(2026, 1, 1, tzinfo=UTC)


class Receiver:
    """The receiver's process, started again whenever it ends."""

    def __init__(self, folder: Path, *certificate: str) -> None:
        self._certificate = certificate
        self.journal = folder / "journal.jsonl"
        self.starts = 0
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self._ending = threading.Event()
        self._start()
        self._keeper = threading.Thread(target=self._keep, daemon=True)
        self._keeper.start()

    def _start(self) -> None:
        self.starts += 1
        program = str(ROOT / "tests" / "engine" / "policies" / "webhook_receiver.py")
        command = [sys.executable, program, str(self.port), str(self.journal), SECRET, *self._certificate]
        self._process = subprocess.Popen(command, stderr=subprocess.DEVNULL)

    def _keep(self) -> None:
        while not self._ending.is_set():
            try:
                self._process.wait(0.05)
            except subprocess.TimeoutExpired:
                continue
            if not self._ending.is_set():
                self._start()

    def end(self) -> None:
        self._ending.set()
        self._keeper.join()
        self._process.kill()
        self._process.wait()

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}/{path}"

    def got(self, name: str | None = None) -> list[dict[str, Any]]:
        """What it has processed, in order: all requests, or those of an endpoint."""
        lines = self.journal.read_text().splitlines(keepends=True) if self.journal.exists() else []
        requests = [json.loads(line) for line in lines if line.endswith("\n")]  # the last may not be written completely
        return [request for request in requests if name in (None, request["name"])]

    def answers(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), 1).close()
        except OSError:
            return False
        return True


@pytest.fixture
def receiver(tmp_path: Path) -> Iterator[Receiver]:
    receiver = Receiver(tmp_path)
    try:
        until(receiver.answers, "the receiver answers")
        yield receiver
    finally:
        receiver.end()


def with_endpoints(world: Settings, **urls: str) -> Settings:
    endpoints = {
        name: Endpoint.model_validate({"url": url, "secret": SECRET, "timeout_s": 1}) for name, url in urls.items()
    }
    return world.model_copy(update={"webhooks": endpoints})


def within(settings: Settings, seconds: float, *names: str) -> Settings:
    """These endpoints may take so long to answer."""
    changed = {name: settings.webhooks[name].model_copy(update={"timeout_s": seconds}) for name in names}
    return settings.model_copy(update={"webhooks": settings.webhooks | changed})


def put(
    settings: Settings, endpoint: str, stream: str, versions: Collection[int], policy: str = "letters"
) -> list[str]:
    """Posts, as a policy's batch writes them; their ids."""
    with connect(settings, "test") as db, db.transaction():
        return written(db, endpoint, stream, versions, policy)


def written(
    db: Connection, endpoint: str, stream: str, versions: Collection[int], policy: str = "letters"
) -> list[str]:
    """The same in this transaction."""
    ids = [f"{policy}~{endpoint}.{stream.replace('/', '.')}.{version}" for version in versions]
    time_ms = int(START.timestamp() * 1000)
    wishes = [
        Wish(ident, "post", 0, At(stream, version, time_ms), target=endpoint, body=body(stream, version))
        for ident, version in zip(ids, versions, strict=True)
    ]
    for statement in writes(policy, wishes):
        db.execute(statement.query, statement.parameters)
    return ids


def body(stream: str, version: int) -> str:
    return f'{{"stream":"{stream}",  "version":{version}, "text":"zwölf Boxkämpfer"}}'


def waiting(settings: Settings) -> dict[str, tuple[int, str | None]]:
    """The posts that no endpoint has taken: attempts, and why they are dead letters."""
    with connect(settings, "test") as db:
        return {row[0]: (row[1], row[2]) for row in db.execute("select id, attempts, dead from posts")}


def due_in_s(settings: Settings, post: str, now: datetime) -> float:
    with connect(settings, "test") as db:
        row = db.execute(
            "select next_attempt from lanes join posts using (endpoint, policy, stream) where id = %s", (post,)
        ).fetchone()
    assert row
    return float((row[0] - now).total_seconds())


@contextmanager
def posting(
    settings: Settings,
    delays_s: Sequence[float] = QUICK_S,
    clock: Callable[[], datetime] | None = None,
) -> Iterator[Webhooks]:
    """Webhooks in a thread, for as long as the block runs: they look often. An error of theirs is the block's."""
    webhooks = Webhooks(settings, "policies", **({"clock": clock} if clock else {}))
    loop = asyncio.new_event_loop()
    task = loop.create_task(webhooks.run())
    thread = threading.Thread(target=lambda: loop.run_until_complete(asyncio.wait([task])))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(webhooks_engine, "POLL_S", 0.05)
        patch.setattr(webhooks_engine, "DELAYS_S", delays_s)
        thread.start()
        try:
            yield webhooks
        finally:
            loop.call_soon_threadsafe(task.cancel)
            thread.join(20)
    assert not thread.is_alive()
    loop.close()
    assert task.cancelled(), task.exception()


def empty(settings: Settings) -> Callable[[], bool]:
    return lambda: not waiting(settings)


def in_order(requests: Sequence[dict[str, Any]]) -> bool:
    """Whether the first arrivals of each stream's posts are in the order of its events."""
    seen: dict[str, list[int]] = {}
    for request in requests:
        versions = seen.setdefault(request["body"]["stream"], [])
        if request["taken"] and request["body"]["version"] not in versions:
            versions.append(request["body"]["version"])
    return all(versions == sorted(versions) for versions in seen.values())


# ── what is promised ──


def test_a_post_arrives_signed_as_it_was_written_and_leaves_the_outbox(world: Settings, receiver: Receiver) -> None:
    settings = with_endpoints(world, good=receiver.url("good/ok"))
    [post] = put(settings, "good", "boxes/1", [1])
    with posting(settings):
        until(empty(settings), "the outbox is empty")
    [request] = receiver.got()
    headers = request["headers"]
    assert (request["verified"], request["body"]) == (True, json.loads(body("boxes/1", 1)))
    assert (headers["webhook-id"], headers["content-type"]) == (post, "application/json")
    assert abs(int(headers["webhook-timestamp"]) - time.time()) < 60
    assert int(headers["content-length"]) == len(body("boxes/1", 1).encode())


def test_each_post_arrives_once_after_dedup_in_order_from_a_receiver_that_fails_in_every_way(
    world: Settings, receiver: Receiver
) -> None:
    settings = with_endpoints(world, first=receiver.url("first/moody"), second=receiver.url("second/moody"))
    ids = put_many(settings, streams=3, versions=4)
    with posting(settings):
        until(empty(settings), "the outbox is empty")
    require_all(settings, receiver, ids)
    assert {request["mood"] for request in receiver.got()} == set(MOODS)
    assert receiver.starts > 1, "it crashed at least once after it had processed a post"


def put_many(settings: Settings, *, streams: int, versions: int) -> list[str]:
    """For each endpoint so many posts of so many streams; their ids."""
    return [
        post
        for endpoint in settings.webhooks
        for number in range(streams)
        for post in put(settings, endpoint, f"boxes/{number}", range(1, versions + 1))
    ]


def require_all(settings: Settings, receiver: Receiver, ids: Collection[str]) -> None:
    """All these posts have arrived, signed and in order."""
    requests = receiver.got()
    for endpoint in settings.webhooks:
        assert in_order(receiver.got(endpoint))
    assert {request["headers"]["webhook-id"] for request in requests if request["taken"]} == set(ids)
    assert all(request["verified"] for request in requests)


@pytest.mark.slow
def test_none_is_lost_and_first_arrivals_are_in_order_when_senders_are_killed_and_overlap(
    world: Settings, receiver: Receiver
) -> None:
    settings = with_endpoints(world, first=receiver.url("first/hasty"), second=receiver.url("second/ok"))
    ids = put_many(settings, streams=6, versions=25)
    program = str(ROOT / "tests" / "engine" / "policies" / "webhook_sender.py")
    environment = os.environ | settings.environment() | {"PYTHONPATH": str(ROOT)}
    senders: list[subprocess.Popen[bytes]] = []
    kills = 0
    try:
        while waiting(settings):
            while len(senders) < 2:  # as in a rebalance, two have the same partitions
                senders.append(subprocess.Popen([sys.executable, program, f"sender-{kills}", "0.05"], env=environment))
            before = len(receiver.got())
            until(lambda seen=before: len(receiver.got()) > seen + 30 or not waiting(settings), "posts arrive")  # type: ignore[misc]
            victim = senders.pop(random.randrange(2))
            victim.kill()
            victim.wait()
            kills += 1
    finally:
        for sender in senders:
            sender.kill()
            sender.wait()
    assert kills >= 5
    require_all(settings, receiver, ids)


def test_the_next_post_of_a_stream_waits_for_its_predecessor_and_other_streams_do_not(
    world: Settings, receiver: Receiver
) -> None:
    settings = with_endpoints(world, down=receiver.url("down/status/500"))
    first, second = put(settings, "down", "boxes/1", [1, 2])
    [other] = put(settings, "down", "boxes/2", [1])
    with posting(settings, [3600.0] * 3):
        until(lambda: waiting(settings)[first][0] == waiting(settings)[other][0] == 1, "both were tried")
        put(settings, "down", "boxes/3", [1])  # tried later than what may be wrong
        until(lambda: len(receiver.got()) == 3, "the third stream's was tried")
    assert waiting(settings)[second] == (0, None)
    assert {request["headers"]["webhook-id"] for request in receiver.got()}.isdisjoint({second})


def test_a_slow_endpoint_does_not_hold_up_another(
    world: Settings, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhooks_engine, "END_S", 0.1)
    settings = with_endpoints(world, slow=receiver.url("slow/never"), fast=receiver.url("fast/ok"))
    slow = settings.webhooks["slow"].model_copy(update={"timeout_s": 300, "in_flight": 7})
    settings = settings.model_copy(update={"webhooks": settings.webhooks | {"slow": slow}})
    for number in range(10):
        put(settings, "slow", f"boxes/{number}", [1, 2])
    with posting(settings) as webhooks:
        until(lambda: len(receiver.got("slow")) == 7, "the slow endpoint has all that it gets at once")
        for number in range(10):
            put(settings, "fast", f"boxes/{number}", range(1, 6))
        webhooks.kick()
        until(lambda: len(receiver.got("fast")) == 50, "the fast endpoint has got all")
        until(lambda: len(waiting(settings)) == 20, "all of them have left the outbox")
        assert len(receiver.got("slow")) == 7
    assert len(waiting(settings)) == 20, "a request that was cancelled is not forgotten"
    with posting(with_endpoints(world, slow=receiver.url("again/ok"))):
        until(empty(settings), "the process gave its lanes back: nobody waits for the end of a lease of five minutes")


def test_a_claim_that_waited_longer_than_a_turn_is_served(
    world: Settings, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database is slow, and all that is asked of it waits in a queue."""
    now_s, asked = [0.0], Webhooks.asked

    async def late(webhooks: Webhooks, ask: Callable[[Connection], Any]) -> Any:
        def its_turn(db: Connection) -> Any:
            now_s[0] += 2 * webhooks_engine.TURN_S
            return ask(db)

        return await asked(webhooks, its_turn)

    monkeypatch.setattr(Webhooks, "asked", late)
    monkeypatch.setattr(webhooks_engine, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    settings = with_endpoints(world, good=receiver.url("good/ok"))
    put_many(settings, streams=4, versions=2)
    with posting(settings):
        until(empty(settings), "all is delivered")


def test_a_planned_stop_repeats_nothing(world: Settings, receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhooks_engine, "END_S", 60.0)
    ended = threading.Event()  # the relay ends at once
    monkeypatch.setattr(Relay, "run", lambda _: ended.wait())
    monkeypatch.setattr(Relay, "stop", lambda _: ended.set())
    settings = with_endpoints(world, slow=receiver.url("slow/trickle"))  # the answer takes a second to be read
    settings = within(settings, 15, "slow")
    ids = put_many(settings, streams=12, versions=1)
    for _ in range(3):
        before = len(receiver.got())
        ended.clear()
        with in_a_loop(lambda: Policies(settings, (), "policies"), "policies"):
            until(lambda seen=before: len(receiver.got()) > seen, "posts are in flight")  # type: ignore[misc]
    with posting(settings):
        until(empty(settings), "all is delivered")
    assert len(receiver.got()) == len(ids), "each once"


def test_two_processes_share_what_is_posted(world: Settings, receiver: Receiver) -> None:
    """As of two releases in a deployment, whose groups have all partitions each."""
    settings = with_endpoints(world, first=receiver.url("first/ok"), second=receiver.url("second/ok"))
    settings = within(
        settings, 120, *settings.webhooks
    )  # on a busy machine an answer takes a while, and is asked for again
    ids = put_many(settings, streams=8, versions=5)
    with posting(settings), posting(settings):
        until(empty(settings), "all is delivered")
    require_all(settings, receiver, ids)
    assert len(receiver.got()) == len(ids), "each once"


def test_posts_that_come_while_their_lane_ends_are_posted(world: Settings, receiver: Receiver) -> None:
    settings = with_endpoints(world, good=receiver.url("good/ok"))
    with posting(settings) as webhooks:
        for version in range(1, 101):
            put(settings, "good", "boxes/1", [version])
            webhooks.kick()
        until(empty(settings), "none is left without a lane")
    assert [request["body"]["version"] for request in receiver.got()] == [*range(1, 101)]


def test_names_that_nobody_resolves_do_not_hold_up_another_endpoint(
    world: Settings, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looking up a name takes a thread until the resolver gives up, however long ago the attempt has timed out."""
    looked_up, over = socket.getaddrinfo, threading.Event()

    def look_up(host: Any, *more: Any, **named: Any) -> Any:
        if host in ("nowhere.test", b"nowhere.test"):
            over.wait()
            raise socket.gaierror(socket.EAI_AGAIN, "temporary failure in name resolution")
        return looked_up(host, *more, **named)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    fast = f"http://localhost:{receiver.port}/fast/ok"
    settings = with_endpoints(world, slow="http://nowhere.test/hooks", fast=fast)
    settings = within(settings, 0.2, "slow")
    for number in range(60):
        put(settings, "slow", f"boxes/{number}", [1])
    try:
        with posting(settings):
            until(lambda: sum(tried for tried, _ in waiting(settings).values()) >= 12, "its attempts time out")
            put(settings, "fast", "boxes/1", [1])
            until(lambda: len(receiver.got("fast")) == 1, "the fast endpoint has its post")
            over.set()
    finally:
        over.set()


@pytest.mark.parametrize("host", ["xn--strae-oqa.test", "localhost", "[::1]"])
def test_the_name_that_is_looked_up_is_the_one_that_is_asked(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """httpx shows a name with its letters, which Python would encode by another rule: `straße` as `strasse`."""
    looked_up: list[Any] = []
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, _: looked_up.append(host))
    endpoint = Endpoint.model_validate({"url": f"https://{host}/hooks", "secret": SECRET})
    post = PendingPost("letters~1", "{}", 0, 1, 0)

    async def ask() -> webhooks_engine.Answer:
        async with httpx.AsyncClient(transport=httpx.MockTransport(lambda _: httpx.Response(204))) as client:
            webhooks = Webhooks(Settings(), "policies")
            return await webhooks_engine._Queue(webhooks, "good", endpoint, client)._attempt(post)

    assert asyncio.run(ask()).result is webhooks_engine.Result.DELIVERED
    assert looked_up == [host.strip("[]").encode()]


def test_what_was_answered_while_the_database_was_away_is_not_posted_again(world: Settings, receiver: Receiver) -> None:
    settings = with_endpoints(world, good=receiver.url("good/trickle"))  # the answer takes a second to be read
    put(settings, "good", "boxes/1", [1])
    with posting(settings):
        until(lambda: len(receiver.got()) == 1, "the post was processed")
        with connect(settings, "test") as db:
            db.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity"
                " where datname = current_database() and application_name like '%webhooks'"
            )
        until(empty(settings), "the outbox is empty")
    assert len(receiver.got()) == 1


# ── retries and dead letters ──


@pytest.mark.slow
def test_attempts_are_repeated_later_and_later_and_then_the_post_is_a_dead_letter_and_the_next_one_goes(
    world: Settings, receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    settings = with_endpoints(world, down=receiver.url("down/status/500?token=hidden"))
    first, second = put(settings, "down", "boxes/1", [1, 2])
    now = START
    with posting(settings, DELAYS_S, clock=lambda: now), caplog.at_level(logging.DEBUG):
        for tried, delay_s in enumerate(DELAYS_S, start=1):
            until(lambda tried=tried: waiting(settings)[first] == (tried, None), f"attempt {tried} was made")  # type: ignore[misc]
            wait_s = due_in_s(settings, first, now)
            assert delay_s <= wait_s <= delay_s * 1.2
            now += timedelta(seconds=wait_s)
        until(lambda: waiting(settings)[second][0] == 1, "the next one goes")
    assert sum(DELAYS_S) / 86_400 > 3
    assert waiting(settings)[first] == (10, "gave-up: attempt 10: it answered 500")
    assert f"post {first} to endpoint 'down' is a dead letter" in caplog.text
    assert "hidden" not in caplog.text
    assert SECRET not in caplog.text


def test_a_dead_letter_that_is_made_alive_again_is_posted(world: Settings, receiver: Receiver) -> None:
    settings = with_endpoints(world, gone=receiver.url("gone/status/410"))
    [post] = put(settings, "gone", "boxes/1", [1])
    with posting(settings):
        until(lambda: waiting(settings)[post][1] is not None, "it is a dead letter")
    assert waiting(settings)[post] == (1, "gone: it answered 410")
    assert retry(settings, Which(ids=[post])) == (1, 0)
    with posting(with_endpoints(world, gone=receiver.url("gone/ok"))):
        until(empty(settings), "the outbox is empty")


def test_posts_to_an_endpoint_that_the_settings_do_not_name_wait_for_a_process_that_has_it(
    world: Settings, receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    """One process without the setting must not make dead letters of what others could deliver."""
    settings = with_endpoints(world, good=receiver.url("good/ok"))
    unknown = put(settings, "god", "boxes/1", [1, 2])
    put(settings, "good", "boxes/1", [1])
    with posting(settings):
        until(lambda: set(waiting(settings)) == set(unknown), "the good one is served")
        until(lambda: told_unknown("god") == 1 and told_unknown("good") != 1, "it is measured")
        assert "posts wait for endpoint 'god', which SAMEFOLD_WEBHOOKS does not name" in caplog.text
        assert "--endpoint god" in caplog.text
        with posting(with_endpoints(world, god=receiver.url("god/ok"))):
            until(empty(settings), "the process that has the endpoint delivers")
        until(lambda: told_unknown("god") == 0, "nothing waits for it any more")
    assert [request["body"]["version"] for request in receiver.got("god")] == [1, 2]


def told_unknown(endpoint: str) -> float | None:
    return REGISTRY.get_sample_value("samefold_webhook_endpoint_unknown", {"endpoint": endpoint})


@pytest.mark.slow_but("900")
@pytest.mark.parametrize("header", ["900", "Thu, 01 Jan 2026 00:15:00 GMT"])
def test_retry_after_is_kept_and_nothing_else_is_posted_before(
    header: str, world: Settings, receiver: Receiver
) -> None:
    settings = with_endpoints(world, busy=receiver.url(f"busy/later/{quote(header)}"), good=receiver.url("good/ok"))
    [first] = put(settings, "busy", "boxes/1", [1])
    now = START
    with posting(settings, [5.0, 5.0], clock=lambda: now) as webhooks:
        until(lambda: waiting(settings)[first][0] == 1, "it was too much")
        assert due_in_s(settings, first, now) == 900
        [other] = put(settings, "busy", "boxes/2", [1])
        for version in (1, 2):
            [known] = put(settings, "good", "boxes/2", [version])
            webhooks.kick()
            until(lambda post=known: post not in waiting(settings), "both endpoints were looked at")  # type: ignore[misc]
            assert waiting(settings)[other] == (0, None)
            now = START + timedelta(seconds=899)
        now += timedelta(seconds=1)
        until(lambda: len(receiver.got("busy")) == 3, "both are posted")


# ── bad answers ──

BAD = {
    "moved": ("moved/to", "redirected", "it answered 301, a redirect, which is not followed"),
    "found": ("status/302", "redirected", "it answered 302, a redirect, which is not followed"),
    "unmodified": ("status/304", "redirected", "it answered 304, a redirect, which is not followed"),
    "missing": ("status/404", "refused", "it answered 404"),
    "overloaded": ("status/503", "failed", "it answered 503"),
    "silent": ("never", "timed-out", "no answer within 1 s"),
    "reset": ("reset", "unreachable", "ReadError"),
    "garbage": ("garbage", "unreachable", "RemoteProtocolError"),
    "headers": ("headers", "unreachable", ""),
    "closed": ("http://127.0.0.1:1/", "unreachable", "ConnectError: "),
    "nowhere": ("http://no-such-host.invalid/", "unreachable", "ConnectError: "),
    "plain": ("https://127.0.0.1:{port}/", "unreachable", "ConnectError: "),
}


def test_a_bad_answer_is_a_failed_attempt_with_a_reason(world: Settings, receiver: Receiver) -> None:
    def url(name: str, path: str) -> str:
        return (path.format(port=receiver.port) if "://" in path else receiver.url(f"{name}/{path}")) + "?token=hidden"

    urls = {name: url(name, path) for name, (path, _, _) in BAD.items()}
    settings = with_endpoints(world, **urls, good=receiver.url("good/ok"))
    settings = within(settings, 120, "good", *(BAD.keys() - {"silent"}))
    posts = {name: put(settings, name, f"boxes/{name}", [1])[0] for name in settings.webhooks}
    before = {name: attempts(name, result) for name, (_, result, _) in BAD.items()}
    with posting(settings, []):
        until(lambda: posts["good"] not in waiting(settings), "the good endpoint is served")
        until(lambda: all(dead for _, dead in waiting(settings).values()), "the others' posts are dead letters")
    for name, (_, result, why) in BAD.items():
        tried, dead = waiting(settings)[posts[name]]
        assert tried == 1
        assert dead
        assert dead.startswith(f"gave-up: attempt 1: {why}"), name
        assert "hidden" not in dead
        assert attempts(name, result) == before[name] + 1
    assert not receiver.got("followed") + receiver.got("elsewhere")


def attempts(endpoint: str, result: str) -> float:
    labels = {"endpoint": endpoint, "result": result}
    return REGISTRY.get_sample_value("samefold_webhook_attempts_total", labels) or 0.0


def test_the_body_of_an_answer_is_not_read(world: Settings, receiver: Receiver) -> None:
    settings = with_endpoints(world, huge=receiver.url("huge/huge"), slow=receiver.url("slow/trickle"))
    for name in settings.webhooks:
        put(settings, name, "boxes/1", [1, 2])
    with posting(settings):
        until(empty(settings), "the outbox is empty")
    assert len(receiver.got()) == 4


def test_certificates_are_verified_with_the_authorities_of_the_environment(
    world: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver = Receiver(tmp_path, str(CERTIFICATE))
    try:
        until(receiver.answers, "the receiver answers")
        port = receiver.port
        settings = with_endpoints(world, good=f"https://localhost:{port}/ok", other=f"https://127.0.0.1:{port}/ok")
        [good], [other] = put(settings, "good", "boxes/1", [1]), put(settings, "other", "boxes/1", [1])
        with posting(settings, []):
            until(lambda: all(dead for _, dead in waiting(settings).values()), "both are dead letters")
        assert not receiver.got()
        dead = waiting(settings)[good][1]
        assert dead
        assert "certificate verify failed" in dead
        retry(settings, Which(ids=[good, other]))
        monkeypatch.setenv("SSL_CERT_FILE", str(CERTIFICATE))
        with posting(settings, []):
            until(lambda: set(waiting(settings)) == {other} and bool(waiting(settings)[other][1]), "one is delivered")
    finally:
        receiver.end()


def test_neither_cookies_nor_a_proxy_nor_passwords_of_the_environment_are_used(
    world: Settings, receiver: Receiver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:1")
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password mine\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    settings = with_endpoints(world, good=receiver.url("good/cookie"))
    put(settings, "good", "boxes/1", [1, 2])
    with posting(settings):
        until(empty(settings), "the outbox is empty")
    assert len(receiver.got()) == 2
    assert all({"cookie", "authorization"}.isdisjoint(request["headers"]) for request in receiver.got())


# ── settings ──


def as_json(**changes: object) -> str:
    return json.dumps({"billing": {"url": "https://billing.example.com/in?key=hidden", "secret": SECRET} | changes})


def test_endpoints_are_read_from_json_shown_without_secrets_and_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAMEFOLD_WEBHOOKS", as_json(timeout_s=3))
    found = Settings()
    assert found.webhooks["billing"].timeout_s == 3
    shown = f"{found!r} {found} {found.model_dump()} {found.model_dump_json()}"
    assert SECRET not in shown
    assert "hidden" not in shown
    for name, value in found.environment().items():
        monkeypatch.setenv(name, value)
    assert Settings() == found


def test_the_nearest_source_names_all_endpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".env").write_text(f"SAMEFOLD_WEBHOOKS={as_json().replace('billing', 'other')}\n")
    assert set(Settings().webhooks) == {"other"}
    monkeypatch.setenv("SAMEFOLD_WEBHOOKS", as_json())
    assert set(Settings().webhooks) == {"billing"}
    monkeypatch.setenv("SAMEFOLD_WEBHOOKS", "{}")
    assert not Settings().webhooks


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ("{hidden", "SAMEFOLD_WEBHOOKS: it is not JSON"),
        ('["hidden"]', "SAMEFOLD_WEBHOOKS: Input should be a valid dictionary"),
        (as_json().replace("billing", "Billing", 1), "SAMEFOLD_WEBHOOKS, Billing"),
        (as_json(secret="hidden"), "SAMEFOLD_WEBHOOKS, billing, secret: write whsec_"),
        (as_json(secret="whsec_c2hvcnQ="), "SAMEFOLD_WEBHOOKS, billing, secret: write whsec_"),
        (as_json(secret=None), "SAMEFOLD_WEBHOOKS, billing, secret"),
        (as_json(url="ftp://a/hidden"), "SAMEFOLD_WEBHOOKS, billing, url: write http"),
        (as_json(url="https:///hidden"), "SAMEFOLD_WEBHOOKS, billing, url: write http"),
        (as_json(url="https://me:hidden@a/"), "SAMEFOLD_WEBHOOKS, billing, url: it must hold no user"),
        (as_json(url="https://a:99999/hidden"), "SAMEFOLD_WEBHOOKS, billing, url: it is not a URL"),
        (as_json(timeout_s=0), "SAMEFOLD_WEBHOOKS, billing, timeout_s"),
        (as_json(in_flight=0), "SAMEFOLD_WEBHOOKS, billing, in_flight"),
        (as_json(uri="hidden"), "SAMEFOLD_WEBHOOKS, billing, uri"),
    ],
)
def test_a_wrong_endpoint_is_refused_by_name_and_not_quoted(
    value: str, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAMEFOLD_WEBHOOKS", value)
    with pytest.raises(BadSettings) as refusal:
        Settings()
    told = f"{refusal.value} {refusal.value!r}"
    assert named in told
    assert "hidden" not in told
    assert SECRET not in told
