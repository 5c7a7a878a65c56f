"""Webhooks: the outbox's posts go to the endpoints that the settings name, signed as Standard Webhooks says.

A post is deleted from the outbox when its endpoint has answered with a 2xx, so each arrives at least once. A lane is what one
policy posts to one endpoint because of one stream. Its posts go out one after the other: the next one when the outbox shows that
its predecessor was delivered or has become a dead letter. That holds for two processes too, so the first arrivals are in order.
"""

from __future__ import annotations

import asyncio
import logging
import random
import socket
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from enum import StrEnum
from functools import partial
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any, NamedTuple, TypeAlias, TypeVar

import httpx
from standardwebhooks.webhooks import Webhook

from infra.database.connect import Connection, DatabaseUnavailable, connect, naming
from infra.domain_model.contexts import has_personal_fields
from infra.errors import in_words
from infra.log.clients import KafkaUnavailable
from infra.observability import logs, metrics
from infra.personal.keys import Keys
from infra.personal.tokens import key_ids, opened
from infra.settings import Endpoint, Settings

log = logging.getLogger(__name__)
for _name in ("httpx", "httpcore"):
    logging.getLogger(_name).setLevel(logging.WARNING)  # below it they log whole URLs, secrets and all

DELAYS_S = (5, 300, 1_800, 7_200, 18_000, 36_000, 50_400, 72_000, 86_400)
"""After the first failed attempt, after the second, …; what then fails once more is a dead letter."""
JITTER = 0.1
"""The largest part of a delay that is added to it at random: posts that failed together are not repeated together."""
MAX_RETRY_AFTER_S = 86_400.0
IN_FLIGHT = 4
"""Requests to one endpoint at once."""
POLL_S = 1.0
REST, MAX_REST_S = 9, 5.0
"""How many times as long as reading the outbox took the next reading waits, however many posts are there."""
AGAIN_S = 0.25
"""Until a lost connection to PostgreSQL is replaced."""
LONGEST_BODY, BODY_S = 4_096, 1.0
"""An answer's body is read up to here, so that its connection can be used again."""

T = TypeVar("T")
Partitions: TypeAlias = Callable[[], Mapping[str, Collection[int]]]
"""Tells which partitions of each policy are this process's now."""
Lane: TypeAlias = tuple[str, str]
"""Policy and stream; each endpoint has its own."""


class Result(StrEnum):
    """What became of an attempt."""

    DELIVERED = "delivered"
    GONE = "gone"
    """The answer was 410: the receiver wants no more."""
    REFUSED = "refused"
    """Another 4xx."""
    FAILED = "failed"
    """5xx, or no valid status."""
    REDIRECTED = "redirected"
    """3xx: a URL comes from the settings only."""
    TIMED_OUT = "timed-out"
    UNREACHABLE = "unreachable"
    """No connection, or a broken one."""


class Answer(NamedTuple):
    result: Result
    why: str
    """Without URL, headers and body: each may be a secret."""
    retry_after_s: float = 0.0


class Post(NamedTuple):
    """A row of the outbox."""

    id: str
    policy: str
    partition: int
    body: str
    attempts: int


def _now() -> datetime:
    return datetime.now(UTC)


class Webhooks:
    """Posts the rows of the outbox that are due, in the partitions that this process has.

    Its constructor raises MasterKeyUnusable, where bodies may have personal values.
    """

    def __init__(
        self,
        settings: Settings,
        name: str,
        partitions: Partitions,
        *,
        clock: Callable[[], datetime] = _now,
        delays_s: Sequence[float] = DELAYS_S,
    ) -> None:
        self._settings = settings
        self._name = f"samefold {name} webhooks"
        self.partitions = partitions
        self.clock = clock
        self.delays_s = delays_s
        self.status = logs.StatusLog(log, name)
        self._thread = ThreadPoolExecutor(1, self._name)
        self._connection: Connection | None = None
        self._keys = Keys(settings) if settings.webhooks and has_personal_fields() else None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wakes: list[asyncio.Event] = []

    async def run(self) -> None:
        """Post until this is cancelled; posts in flight stay in the outbox. Waits while the database is unavailable.

        Raises DatabaseBehind, DatabaseRefused, ValueRefused, and of keys MasterKeyUnusable, TopicChanged, …
        """
        self._loop = asyncio.get_running_loop()
        if self._keys is not None:
            await self._tried(partial(self._asked, self._keys.start))
        async with _client() as client:
            endpoints = self._settings.webhooks.items()
            queues = [_Queue(self, name, endpoint, client) for name, endpoint in endpoints]
            self._wakes = [queue.wake for queue in queues]
            work = [self._bury_unknown(), *(queue.run() for queue in queues)]
            tasks = [asyncio.create_task(part) for part in work]
            try:
                await asyncio.gather(*tasks)
            finally:
                self._loop = None
                await _cancel(tasks)
                self._thread.submit(self._disconnect)
                self._thread.shutdown(wait=False)

    def kick(self) -> None:
        """Read the outbox now: it has new rows. Any thread may call this."""
        if loop := self._loop:
            with suppress(RuntimeError):  # the loop has ended
                for wake in self._wakes:
                    loop.call_soon_threadsafe(wake.set)

    async def execute(self, statement: str, values: Mapping[str, object]) -> list[tuple[Any, ...]]:
        """The rows of a statement, tried while the database is unavailable: what an endpoint answered must not be forgotten."""
        return await self._tried(partial(self._execute, statement, values))

    async def shown(self, body: str) -> str:
        """A body as endpoints may see it: personal values, or what is shown for a forgotten one."""
        if self._keys is None or not (ids := key_ids(body)):
            return body
        find = partial(self._keys.keys_for, ids=ids)
        return opened(body.encode(), await self._tried(partial(self._asked, find))).decode()

    async def _tried(self, ask: Callable[[], T]) -> T:
        while True:
            try:
                answer = await asyncio.get_running_loop().run_in_executor(self._thread, ask)
            except (DatabaseUnavailable, KafkaUnavailable) as error:  # the keys of personal values are in Kafka
                self.status.wrong("database", str(error))
                await asyncio.sleep(AGAIN_S)
            else:
                self.status.well("database", "the database is available again")
                return answer

    def _execute(self, statement: str, values: Mapping[str, object]) -> list[tuple[Any, ...]]:
        return self._asked(lambda connection: connection.execute(statement.encode(), values).fetchall())

    def _asked(self, ask: Callable[[Connection], T]) -> T:
        if self._connection is None:
            self._connection = connect(self._settings, self._name, by_key=True)
        try:
            with naming(self._settings):
                return ask(self._connection)
        except BaseException:
            self._disconnect()
            raise

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    async def _bury_unknown(self) -> None:
        """Make dead letters of posts to endpoints that the settings don't name."""
        known = [*self._settings.webhooks]
        while True:
            began = time.monotonic()
            rows = await self.execute(_UNKNOWN, {"mine": _names(self.partitions()), "known": known})
            rest_s = _rest_s(time.monotonic() - began)  # it goes through all posts, in the thread of all endpoints
            for endpoint, posts in Counter(endpoint for (endpoint,) in rows).items():
                log.error(
                    "%d posts are dead letters: SAMEFOLD_WEBHOOKS names no endpoint '%s'. "
                    "Add it, then run `samefold outbox retry`.",
                    posts,
                    endpoint,
                )
            await asyncio.sleep(max(POLL_S, rest_s))


class _Queue:
    """The posts to one endpoint. Its requests in flight are counted apart, so that it does not hold up another endpoint."""

    def __init__(self, webhooks: Webhooks, name: str, endpoint: Endpoint, client: httpx.AsyncClient) -> None:
        self.wake = asyncio.Event()
        self._webhooks = webhooks
        self._name = name
        self._endpoint = endpoint
        self._client = client
        self._lookups = ThreadPoolExecutor(IN_FLIGHT, f"names for {name}")
        self._in_doubt = True
        """Whether its name may be one that nobody resolves: the last attempt had no answer."""
        self._signer = Webhook(endpoint.secret.get_secret_value())
        self._sending: dict[Lane, asyncio.Task[None]] = {}
        self._quiet_until = webhooks.clock()
        self._rested_at = 0.0

    async def run(self) -> None:
        try:
            while True:
                for lane, ids in (await self._due()).items():
                    while len(self._sending) >= IN_FLIGHT:
                        await self._woken()
                    self._sending[lane] = asyncio.create_task(self._deliver(ids))
                    self._sending[lane].add_done_callback(lambda _: self.wake.set())
                await self._woken(POLL_S)
        finally:
            await _cancel(self._sending.values())
            self._lookups.shutdown(wait=False, cancel_futures=True)

    async def _woken(self, timeout_s: float | None = None) -> None:
        """Wait for a kick or the end of a lane, and raise what that one raised."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self.wake.wait()
        self.wake.clear()
        for lane, task in [*self._sending.items()]:
            if task.done():
                del self._sending[lane]
                task.result()

    async def _due(self) -> dict[Lane, list[str]]:
        """The lanes whose first post is due, the longest waiting one first, with the ids of their posts."""
        if self._webhooks.clock() < self._quiet_until or len(self._sending) >= IN_FLIGHT:
            return {}
        await asyncio.sleep(max(0.0, self._rested_at - time.monotonic()))
        values = {
            "endpoint": self._name,
            "mine": _names(self._webhooks.partitions()),
            "busy": [stream for _, stream in self._sending],
            "now": self._webhooks.clock(),
        }
        began = time.monotonic()
        rows = await self._webhooks.execute(_DUE, values)
        ended = time.monotonic()
        self._rested_at = ended + _rest_s(ended - began)
        lanes: dict[Lane, list[str]] = {}
        for policy, stream, post in rows:
            lanes.setdefault((policy, stream), []).append(post)
        return lanes

    async def _deliver(self, posts: Sequence[str]) -> None:
        """Post a lane's rows in order, up to the first one that is not delivered."""
        for post_id in posts:
            now = self._webhooks.clock()
            rows = await self._webhooks.execute(_POST, {"id": post_id, "now": now})
            # a row that is gone was delivered by another process, or dropped: what follows it is read anew
            if not rows or now < self._quiet_until:
                return
            post = Post(*rows[0])
            if post.partition not in self._webhooks.partitions().get(post.policy, ()):
                return
            answer = await self._attempt(post._replace(body=await self._webhooks.shown(post.body)))
            metrics.WEBHOOK_ATTEMPTS.labels(self._name, answer.result).inc()
            if not await self._record(post, answer):
                return

    async def _attempt(self, post: Post) -> Answer:
        answer = await self._asked(post)
        self._in_doubt = answer.result in (Result.TIMED_OUT, Result.UNREACHABLE)
        return answer

    async def _asked(self, post: Post) -> Answer:
        now = self._webhooks.clock()
        headers = {
            "content-type": "application/json",
            "user-agent": "samefold",
            "webhook-id": post.id,
            "webhook-timestamp": str(int(now.timestamp())),
            "webhook-signature": self._signer.sign(post.id, now.astimezone(UTC), post.body),
        }
        url, content = self._endpoint.url.get_secret_value(), post.body.encode()
        answer: Answer | None = None
        try:
            async with asyncio.timeout(self._endpoint.timeout_s):
                if self._in_doubt:
                    await self._look_up(httpx.URL(url).raw_host)
                async with self._client.stream("POST", url, content=content, headers=headers) as response:
                    answer = _answer(response, now)
                    await _read_little(response)
        except TimeoutError:
            return answer or Answer(Result.TIMED_OUT, f"no answer within {self._endpoint.timeout_s:g} s")
        except Exception as error:  # whatever an endpoint makes the client raise, only this attempt has failed
            why = in_words(error) if isinstance(error, httpx.TransportError) else type(error).__name__
            return answer or Answer(Result.UNREACHABLE, why)
        return answer

    async def _look_up(self, host: bytes) -> None:
        """Resolve a name in a thread of this endpoint's own: one that nobody resolves would take up those that all have.

        `host` is in ASCII, as the request will ask for it: Python encodes other letters by an older rule, to another name.
        """
        try:
            await asyncio.get_running_loop().run_in_executor(self._lookups, socket.getaddrinfo, host, None)
        except OSError as error:
            raise httpx.ConnectError(str(error)) from error

    async def _record(self, post: Post, answer: Answer) -> bool:
        """Write what became of an attempt. Returns whether this process delivered the post."""
        if answer.result is Result.DELIVERED:
            self._webhooks.status.well(f"endpoint {self._name}", f"endpoint '{self._name}' takes posts again")
            return bool(await self._webhooks.execute(_DELIVERED, {"id": post.id}))
        delays_s, tried = self._webhooks.delays_s, post.attempts + 1
        dead = next_attempt = None
        if answer.result is Result.GONE:
            dead = f"gone: {answer.why}"
        elif tried > len(delays_s):
            dead = f"gave-up: attempt {tried}: {answer.why}"
        else:
            delay_s = max(delays_s[post.attempts] * random.uniform(1, 1 + JITTER), answer.retry_after_s)
            next_attempt = self._webhooks.clock() + timedelta(seconds=delay_s)
        if answer.retry_after_s:
            self._quiet_until = self._webhooks.clock() + timedelta(seconds=answer.retry_after_s)
        told = f"endpoint '{self._name}' did not take post {post.id}: {answer.why}"
        self._webhooks.status.wrong(f"endpoint {self._name}", told, answer.result)
        values = {"id": post.id, "tried": tried, "next_attempt": next_attempt, "dead": dead}
        if await self._webhooks.execute(_NOT_DELIVERED, values) and dead:
            log.error("post %s to endpoint '%s' is a dead letter: %s", post.id, self._name, dead)
        return False


def _client() -> httpx.AsyncClient:
    """Without the environment's proxies and passwords, redirects and cookies. It trusts the authorities of SSL_CERT_FILE if set."""
    return httpx.AsyncClient(
        verify=httpx.create_ssl_context(),
        trust_env=False,
        follow_redirects=False,
        cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),
        timeout=None,  # noqa: S113 - each attempt has one as a whole
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=20, keepalive_expiry=5),
    )


def _answer(response: httpx.Response, now: datetime) -> Answer:
    status = response.status_code
    why = f"it answered {status}"
    if response.is_success:
        return Answer(Result.DELIVERED, why)
    if status == httpx.codes.GONE:
        return Answer(Result.GONE, why)
    if response.is_redirect or 300 <= status < 400:
        return Answer(Result.REDIRECTED, f"{why}, a redirect, which is not followed")
    retry_after_s = _retry_after_s(response.headers.get("retry-after", ""), now)
    return Answer(Result.REFUSED if response.is_client_error else Result.FAILED, why, retry_after_s)


def _retry_after_s(header: str, now: datetime) -> float:
    """Seconds, or the time from now to a date; 0 where it is neither."""
    try:
        wait_s = float(header) if header.isdecimal() else (parsedate_to_datetime(header) - now).total_seconds()
    except (ValueError, TypeError, OverflowError):
        return 0.0
    return min(max(wait_s, 0.0), MAX_RETRY_AFTER_S)


async def _read_little(response: httpx.Response) -> None:
    """Read a short body. The connection of a longer one is closed."""
    size = 0
    with suppress(TimeoutError, httpx.HTTPError):
        async with asyncio.timeout(BODY_S):
            async for part in response.aiter_raw():
                size += len(part)
                if size > LONGEST_BODY:
                    return


def _rest_s(reading_s: float) -> float:
    return min(reading_s * REST, MAX_REST_S)


async def _cancel(tasks: Collection[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _names(partitions: Mapping[str, Collection[int]]) -> list[str]:
    return [f"{policy}/{partition}" for policy, numbers in partitions.items() for partition in numbers]


_UNKNOWN = """
update outbox set dead = 'unknown-endpoint: SAMEFOLD_WEBHOOKS does not name it'
where kind = 'post' and sent_at is null and dead is null
    and policy || '/' || partition = any(%(mine)s) and target <> all(%(known)s)
returning target
"""
_DUE = """
select policy, stream, id from (
    select policy, stream, id, row_number() over lane as place, first_value(next_attempt) over lane as due,
        first_value(wished_at) over lane as wished_at
    from outbox
    where kind = 'post' and sent_at is null and dead is null and target = %(endpoint)s
        and policy || '/' || partition = any(%(mine)s) and stream <> all(%(busy)s)
    window lane as (partition by policy, stream order by version, number)
) as posts
where place <= 100 and (due is null or due <= %(now)s)
order by coalesce(due, wished_at), policy, stream, place
limit 1000
"""
# Those by id don't say that `sent_at` is null, as it always is for posts. Otherwise a plan from when the table was empty scans
# the index of all posts.
_POST = """
select id, policy, partition, body, attempts from outbox
where id = %(id)s and kind = 'post' and dead is null and (next_attempt is null or next_attempt <= %(now)s)
"""
_DELIVERED = "delete from outbox where id = %(id)s returning id"
_NOT_DELIVERED = """
update outbox set attempts = %(tried)s, next_attempt = %(next_attempt)s, dead = %(dead)s
where id = %(id)s and kind = 'post' and dead is null and attempts = %(tried)s - 1
returning id
"""
