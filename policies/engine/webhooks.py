"""Webhooks: posts go to the endpoints that the settings name, signed as Standard Webhooks says.

A post is deleted when its endpoint has answered with a 2xx, so each arrives at least once. Each process claims lanes of its own
(`posts`) and posts what is in a lane one after the other: the next one when it is recorded that its predecessor was delivered or
is a dead letter. A process that was frozen may repeat a post, so only the first arrivals are in order.
"""

from __future__ import annotations

import asyncio
import logging
import random
import socket
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from enum import StrEnum
from functools import partial
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import NamedTuple, TypeVar

import httpx
import psycopg
from psycopg.errors import LockNotAvailable
from standardwebhooks.webhooks import Webhook

from domain.engine.contexts import has_personal_fields
from domain.engine.personal.keys import Keys
from domain.engine.personal.tokens import key_ids, opened
from infra.database.connect import Connection, DatabaseUnavailable, connect, named_error
from infra.errors import SamefoldError, in_words
from infra.log.clients import KafkaUnavailable
from infra.observability import logs, metrics
from infra.processes.process_end import Thread
from infra.settings import Endpoint, Settings
from policies.engine import posts
from policies.engine.dead_letters import DeadReason
from policies.engine.posts import Lane, PendingPost

log = logging.getLogger(__name__)
for _name in ("httpx", "httpcore"):
    logging.getLogger(_name).setLevel(logging.WARNING)  # below it they log whole URLs, secrets and all

DELAYS_S: Sequence[float] = (5, 300, 1_800, 7_200, 18_000, 36_000, 50_400, 72_000, 86_400)
"""After the first failed attempt, after the second, …; what then fails once more is a dead letter."""
JITTER = 0.1
"""The largest part of a delay that is added to it at random: posts that failed together are not repeated together."""
MAX_RETRY_AFTER_S = 86_400.0
POLL_S = 1.0
TURN_S, TURN = 5.0, 100
"""A lane is served for at most so many seconds and posts; then other lanes have their turn."""
AGAIN_S = 0.25
"""Until a lost connection to PostgreSQL is replaced, and a row that is locked is asked for again."""
END_S = 8.0
"""How long a process that stops waits for posts in flight. The supervisor waits 15 s: the rest is for giving the lanes back."""
LONGEST_BODY, BODY_S = 4_096, 1.0
"""An answer's body is read up to here, so that its connection can be used again."""

T = TypeVar("T")


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


class Webhooks:
    """Posts what is due. `clock` takes the place of the database's time, if it is not None.

    Its constructor raises MasterKeyUnusable, where bodies may have personal values.
    """

    def __init__(self, settings: Settings, name: str, *, clock: Callable[[], datetime | None] = lambda: None) -> None:
        self._settings = settings
        self.clock = clock
        self.status = logs.StatusLog(log, name)
        self._posts = _Session(settings, f"samefold {name} webhooks", self.status, "the database is available again")
        self._keys = Keys(settings) if settings.webhooks and has_personal_fields() else None
        self._opening = _Session(settings, f"samefold {name} keys", self.status, "personal values are opened again")
        """Apart: keys wait for Kafka, and posts without personal values must not."""
        self.is_ending = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wakes: list[asyncio.Event] = []

    async def run(self) -> None:
        """Post until this is cancelled, then let posts in flight end; those that need more than END_S are posted again.

        Waits while the database is unavailable. Raises DatabaseBehind, DatabaseRefused, ValueRefused, and of keys
        MasterKeyUnusable, TopicChanged, …
        """
        self._loop = asyncio.get_running_loop()
        async with _client() as client:
            endpoints = self._settings.webhooks.items()
            queues = [_Queue(self, name, endpoint, client) for name, endpoint in endpoints]
            self._wakes = [queue.wake for queue in queues]
            work = [self._report_unknown(), *(queue.run() for queue in queues)]
            if self._keys is not None:
                work.append(self._opening.asked(self._keys.start))
            tasks = [asyncio.create_task(part) for part in work]
            try:
                await asyncio.gather(*tasks)
            finally:
                self._loop, self.is_ending = None, True
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                await asyncio.gather(*(queue.end() for queue in queues))
                self._posts.end()
                self._opening.end()

    def now(self) -> datetime:
        return self.clock() or datetime.now(UTC)

    def kick(self) -> None:
        """Check for posts now: there are new ones. Any thread may call this."""
        if loop := self._loop:
            with suppress(RuntimeError):  # the loop has ended
                for wake in self._wakes:
                    loop.call_soon_threadsafe(wake.set)

    async def asked(self, ask: Callable[[Connection], T]) -> T:
        """The answer of the database about posts."""
        return await self._posts.asked(ask)

    async def shown(self, body: str) -> str:
        """A body as endpoints may see it: personal values, or what is shown for a forgotten one."""
        if self._keys is None or not (ids := key_ids(body)):
            return body
        return opened(body.encode(), await self._opening.asked(partial(_keys_for, self._keys, ids))).decode()

    async def _report_unknown(self) -> None:
        """Report which endpoints posts wait for that the settings don't name. Another process may have them."""
        reported: set[str] = set()
        while True:
            endpoints = await self.asked(posts.endpoints)
            unknown = endpoints - self._settings.webhooks.keys()
            for name in endpoints | reported:
                metrics.WEBHOOK_ENDPOINT_UNKNOWN.labels(name).set(name in unknown)
            for name in unknown:
                self.status.wrong(
                    f"no endpoint {name}",
                    f"posts wait for endpoint '{name}', which SAMEFOLD_WEBHOOKS does not name here. Add it and start this process "
                    f"again, or drop them: `samefold outbox drop --all --endpoint {name}`",
                )
            for name in reported - unknown:
                self.status.well(f"no endpoint {name}", f"nothing waits for endpoint '{name}' any more")
            reported = unknown
            await asyncio.sleep(POLL_S)


def _keys_for(keys: Keys, ids: Collection[str], connection: Connection) -> dict[str, bytes | None]:
    if not keys.is_started:
        keys.start(connection)
    return keys.keys_for(connection, ids)


class _Session:
    """A connection in a thread of its own, which answers one question after the other."""

    def __init__(self, settings: Settings, name: str, status: logs.StatusLog, again: str) -> None:
        self._settings = settings
        self._name = name
        self._status = status
        self._again = again
        self._thread = Thread(name)
        self._connection: Connection | None = None

    async def asked(self, ask: Callable[[Connection], T]) -> T:
        """The answer, asked for again while a store is unavailable: what an endpoint answered must not be forgotten."""
        while True:
            try:
                answer = await self._thread.run(partial(self._asked, ask))
            except LockNotAvailable:
                await asyncio.sleep(AGAIN_S)
            except (DatabaseUnavailable, KafkaUnavailable) as error:  # the keys of personal values are in Kafka
                self._status.wrong(self._name, str(error))
                await asyncio.sleep(AGAIN_S)
            else:
                self._status.well(self._name, self._again)
                return answer

    def end(self) -> None:
        self._thread.close(self._disconnect)

    def _asked(self, ask: Callable[[Connection], T]) -> T:
        if self._connection is None:
            self._connection = connect(self._settings, self._name, by_key=True)
        try:
            return ask(self._connection)
        except LockNotAvailable:
            raise
        except psycopg.Error as error:
            self._disconnect()
            raise named_error(error, self._settings) from error
        except BaseException:
            self._disconnect()
            raise

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class _Queue:
    """The posts to one endpoint. Its requests in flight are counted apart, so that it does not hold up another endpoint."""

    def __init__(self, webhooks: Webhooks, name: str, endpoint: Endpoint, client: httpx.AsyncClient) -> None:
        self.wake = asyncio.Event()
        self._webhooks = webhooks
        self._name = name
        self._endpoint = endpoint
        self._client = client
        self._lookups = ThreadPoolExecutor(endpoint.in_flight, f"names for {name}")
        self._in_doubt = True
        """The last attempt had no answer: the endpoint's name may not resolve."""
        self._signer = Webhook(endpoint.secret.get_secret_value())
        self._sending: dict[Lane, asyncio.Task[None]] = {}
        self._quiet_until = webhooks.now()

    async def run(self) -> None:
        while True:
            if len(self._sending) < self._endpoint.in_flight and not self._is_quiet():
                await self._claim(self._endpoint.in_flight - len(self._sending))
            await self._woken()

    async def _woken(self) -> None:
        """Wait for a kick, the end of a lane or the time, and raise what a lane raised."""
        with suppress(TimeoutError):
            async with asyncio.timeout(POLL_S):
                await self.wake.wait()
        self.wake.clear()
        for lane, task in [*self._sending.items()]:
            if task.done():
                del self._sending[lane]
                task.result()

    def _is_quiet(self) -> bool:
        return self._webhooks.is_ending or self._webhooks.now() < self._quiet_until

    async def _claim(self, most: int) -> None:
        """Claim so many lanes, the longest due first, and begin to deliver them."""
        lease_s = TURN_S + self._endpoint.timeout_s + TURN_S  # the last one, to record its last answer
        claim = partial(posts.claim, endpoint=self._name, most=most, lease_s=lease_s, now=self._webhooks.clock())
        # the turn begins with the lease: until then the claim may have waited behind others
        until, claimed = await self._webhooks.asked(lambda connection: (time.monotonic() + TURN_S, claim(connection)))
        for lane, post in claimed:
            self._sending[lane] = asyncio.create_task(self._deliver(lane, post, until))
            self._sending[lane].add_done_callback(lambda _: self.wake.set())

    async def end(self) -> None:
        """Let what is in flight end, and other processes have the other lanes at once, if the database answers."""
        with suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                await asyncio.gather(*self._sending.values(), return_exceptions=True)
        self._lookups.shutdown(wait=False, cancel_futures=True)
        with suppress(SamefoldError, TimeoutError):
            async with asyncio.timeout(TURN_S):
                for lane in [lane for lane, task in self._sending.items() if task.cancelled()]:
                    await self._webhooks.asked(partial(posts.release, lane=lane, now=self._webhooks.clock()))

    async def _deliver(self, lane: Lane, post: PendingPost | None, until: float) -> None:
        """Post what is in the lane, in order, up to the first one that is to be tried later."""
        turn = TURN
        while post and turn:
            turn -= 1
            try:
                async with asyncio.timeout(until - time.monotonic()):  # keys may be long in coming
                    body = await self._webhooks.shown(post.body)
            except TimeoutError:
                break
            if time.monotonic() >= until or self._is_quiet():
                break
            answer = await self._attempt(post._replace(body=body))
            self._in_doubt = answer.result in (Result.TIMED_OUT, Result.UNREACHABLE)
            metrics.WEBHOOK_ATTEMPTS.labels(self._name, answer.result).inc()
            if answer.result is Result.DELIVERED:
                self._webhooks.status.well(f"endpoint {self._name}", f"endpoint '{self._name}' takes posts again")
                post = await self._webhooks.asked(partial(posts.delivered, lane=lane, post=post))
            elif (delay_s := self._failed(post, answer)) is not None:
                clock = self._webhooks.clock
                later = partial(posts.try_later, lane=lane, post=post, delay_s=delay_s, now=clock())
                await self._webhooks.asked(later)
                return
            else:
                gave_up = f"{DeadReason.GAVE_UP}: attempt {post.attempts + 1}"
                dead = f"{DeadReason.GONE if answer.result is Result.GONE else gave_up}: {answer.why}"
                was_buried, following = await self._webhooks.asked(partial(posts.bury, lane=lane, post=post, dead=dead))
                if was_buried:
                    log.error("post %s to endpoint '%s' is a dead letter: %s", post.id, self._name, dead)
                post = following
        await self._webhooks.asked(partial(posts.release, lane=lane, now=self._webhooks.clock()))

    def _failed(self, post: PendingPost, answer: Answer) -> float | None:
        """Log it. Returns the seconds until the next attempt, None if there is none."""
        what = f"endpoint '{self._name}' did not take post {post.id}: {answer.why}"
        self._webhooks.status.wrong(f"endpoint {self._name}", what, answer.result)
        if answer.retry_after_s:
            self._quiet_until = self._webhooks.now() + timedelta(seconds=answer.retry_after_s)
        if answer.result is Result.GONE or post.attempts >= len(DELAYS_S):
            return None
        return max(DELAYS_S[post.attempts] * random.uniform(1, 1 + JITTER), answer.retry_after_s)

    async def _attempt(self, post: PendingPost) -> Answer:
        now = self._webhooks.now()
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
        """Resolve a name in a thread of this endpoint's own: a name without an answer would occupy the threads that all share.

        `host` is in ASCII, as the request will ask for it: Python encodes other letters by an older rule, to another name.
        """
        try:
            await asyncio.get_running_loop().run_in_executor(self._lookups, socket.getaddrinfo, host, None)
        except OSError as error:
            raise httpx.ConnectError(str(error)) from error


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
    if response.is_redirect:
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
