"""Reads a request: segments of its path, its headers, its body within bounds, and whether its client is still connected.

A header that must come once and comes twice, or in a form that can't be understood, is refused: 400.
"""

from __future__ import annotations

import asyncio
import re
from codecs import BOM_UTF8
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import NamedTuple
from urllib.parse import quote, unquote_to_bytes
from uuid import uuid4

from fastapi import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from api.problems import ClientGone, Problem, invalid, kind
from api.request_metrics import MAX_ID_BYTES
from infra.observability import correlation

BAD_SEGMENT = kind(422, "bad-segment", "A part of the path is not UTF-8.")
BAD_HEADER = kind(400, "bad-header", "A header can't be understood.")
TOO_LARGE = kind(413, "too-large", "That is too much.")

LONGEST_WAIT_S = 60
"""Proxies close connections that are silent for longer."""
WATCHED_AFTER_S = 1.0
"""Nearly all requests have their answer before that, and need no task that waits for their client to disconnect."""
_PLAIN = "!$&'()*+,;=:@"
"""What RFC 3986 allows in a segment, apart from letters, digits and `-._~`."""
_IN_QUOTES = r'[ !#-\[\]-~]|\\["\\]'
_BARE_CHARACTER = r"[!#-+\--:<-\[\]-~]"
"""Visible ASCII without quote, comma, semicolon and backslash, which would make it two keys or none."""
_QUOTED = re.compile(r'"((?:[ !#-\[\]-~]++|\\["\\])*+)"').fullmatch
"""Runs of `_IN_QUOTES` at once: half the time."""
_UNESCAPED = re.compile(r'\\(["\\])').sub
_BARE = re.compile(rf"{_BARE_CHARACTER}+").fullmatch
KEY = rf'^("({_IN_QUOTES}){{1,{MAX_ID_BYTES}}}"|{_BARE_CHARACTER}{{1,{MAX_ID_BYTES}}})$'
"""The pattern of an Idempotency-Key."""
_VERSION = re.compile(r'"(0|[1-9][0-9]{0,17})"').fullmatch
# Possessive, here and below: with backtracking, a few thousand spaces in a header would take seconds.
_JSON = re.compile(r"\s*+application/json\s*+(;\s*+charset\s*+=\s*+\"?utf-8\"?\s*+)?;?\s*+", re.IGNORECASE).fullmatch
_PREFERENCE = re.compile(r'\s*+([!#$%&\'*+\-.^_`|~0-9A-Za-z]++)\s*+(?:=\s*+("[^"]*+"|[^\s,;"]*+))?\s*+(?:;[^,]*+)?')
_SECONDS = re.compile(r"[0-9]{1,9}").fullmatch


# ── the path ──


class RawPath:
    """Middleware that routes on the path before decoding, so that `%2F` stays inside its segment (RFC 3986, section 2.2).

    A stream's name may hold a slash; in a decoded path it would look like a separator. Each segment gets its normal form: encoded
    where it must be, and nowhere else.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            raw: bytes = scope.get("raw_path") or b""
            scope["path"] = normal(raw.partition(b"?")[0]) if raw else quote(scope["path"])
        await self.app(scope, receive, send)


def normal(raw: bytes) -> str:
    """A raw path with equal segments written equally: `/a%2Fb/%64` becomes `/a%2Fb/d`."""
    if b"%" not in raw and raw.isascii():
        return raw.decode()
    return "/".join(quote(unquote_to_bytes(segment), safe=_PLAIN) for segment in raw.split(b"/"))


def segment(request: Request, name: str) -> str:
    """The decoded text of a path parameter. Raises Problem 422."""
    try:
        return unquote_to_bytes(request.path_params[name]).decode()
    except UnicodeDecodeError:
        raise BAD_SEGMENT(f"'{name}' is not UTF-8.") from None


def path_of(*segments: str) -> str:
    """The path of these segments, each encoded by itself."""
    return "".join(f"/{quote(one, safe=_PLAIN)}" for one in segments)


def refuse_unknown(
    request: Request, known: Collection[str] = (), operators: Collection[str] = (), no_filters: Collection[str] = ()
) -> None:
    """Refuse a parameter of the query that is unknown: a misspelled filter must not be ignored. Raises Problem 422.

    `operators` are known, too: columns with an operator behind a dot. `no_filters` are columns that can't be compared.
    """
    errors = []
    names = [name for name, _ in request.query_params.multi_items()] if request.scope["query_string"] else []
    for name in dict.fromkeys(names):
        if name not in known and name not in operators:
            column = name.partition(".")[0]
            there = [one for one in (*known, *operators) if one.partition(".")[0] == column] or known
            why = "A column with parts is no filter." if column in no_filters else "No such parameter."
            errors.append((f"query.{name}", f"{why} There are: {', '.join(sorted(there)) or 'none'}."))
        elif name != "after" and names.count(name) > 1:
            errors.append((f"query.{name}", "It may come once; a list has commas between its values."))
    if errors:
        raise invalid(errors)


# ── headers ──


def single(request: Request, name: str) -> str | None:
    """The header's value, or None without one. Raises Problem 400 where it comes more than once."""
    values = request.headers.getlist(name)
    if len(values) > 1:
        raise BAD_HEADER(f"{name} comes {len(values)} times; it must come once.")
    return values[0].strip(" \t") if values else None


def idempotency_key(request: Request) -> tuple[str, bool]:
    """The command's id, and whether it is the caller's; else a new one. Raises Problem 400.

    A string of RFC 9651 (`"8e03978e"`), as draft-ietf-httpapi-idempotency-key-header has it; a bare one is accepted too.
    """
    value = single(request, "Idempotency-Key")
    if value is None:
        return str(uuid4()), False
    string = _QUOTED(value)
    key = _UNESCAPED(r"\1", string[1]) if string else value if _BARE(value) else ""
    if not 0 < len(key) <= MAX_ID_BYTES:
        raise BAD_HEADER(
            f'Idempotency-Key must be a string like "8e03978e-40d5", of 1 to {MAX_ID_BYTES} printable ASCII characters.'
        )
    return key, True


def quoted(key: str) -> str:
    """A key as the value of a header."""
    return '"' + key.replace("\\", r"\\").replace('"', r"\"") + '"'


def expected_version(request: Request) -> int | None:
    """The version that the stream must have: of `If-Match: "3"`, or 0 for `If-None-Match: *`. Raises Problem 400."""
    match, none_match = single(request, "If-Match"), single(request, "If-None-Match")
    if match is not None and none_match is not None:
        raise BAD_HEADER("If-Match and If-None-Match exclude each other here.")
    if none_match is not None:
        if none_match != "*":
            raise BAD_HEADER("If-None-Match must be *: the stream must have no events yet.")
        return 0
    if match is None:
        return None
    found = _VERSION(match)
    if found is None:
        raise BAD_HEADER('If-Match must be one version as an answer\'s ETag has it: "3".')
    return int(found[1])


def correlation_id(request: Request) -> str | None:
    """The caller's id, which the commit keeps, as RequestMetrics has read it. Raises Problem 400 where it could not."""
    given = correlation.current.get()
    if given is None and "Correlation-Id" in request.headers:
        raise BAD_HEADER(f"Correlation-Id must come once, and have 1 to {MAX_ID_BYTES} printable ASCII characters.")
    return given


def is_json(request: Request) -> bool:
    """Whether the body is declared to be JSON in UTF-8, uncompressed. Raises Problem 400 where it is declared twice."""
    value = single(request, "Content-Type")
    return value is not None and _JSON(value) is not None and "Content-Encoding" not in request.headers


class Preferences(NamedTuple):
    """The header Prefer (RFC 7240): `respond-async`, and `wait=N` in seconds, up to LONGEST_WAIT_S. Others are ignored."""

    respond_async: bool = False
    wait_s: int | None = None

    def wait_or(self, default_s: float) -> float:
        """How long to wait, in seconds."""
        return self.wait_s if self.wait_s is not None else 0.0 if self.respond_async else default_s

    @property
    def applied(self) -> dict[str, str]:
        """The header Preference-Applied, where a preference was given."""
        applied = ["respond-async"] if self.respond_async else []
        applied += [f"wait={self.wait_s}"] if self.wait_s is not None else []
        return {"Preference-Applied": ", ".join(applied)} if applied else {}


def preferences(request: Request) -> Preferences:
    """Where a preference is repeated, the first counts, as the RFC has it."""
    given: dict[str, str] = {}
    for part in ",".join(request.headers.getlist("Prefer")).split(","):
        if match := _PREFERENCE.fullmatch(part):
            given.setdefault(match[1].lower(), (match[2] or "").strip('"'))
    wait = given.get("wait", "")
    return Preferences("respond-async" in given, min(int(wait), LONGEST_WAIT_S) if _SECONDS(wait) else None)


# ── the body, and the client ──


async def body_of(request: Request, most: int) -> bytes:
    """The body without a byte order mark, of at most that many bytes. Raises Problem 413, ClientGone."""
    return (await bytes_of(request, most)).removeprefix(BOM_UTF8)


async def bytes_of(request: Request, most: int) -> bytes:
    """The body as it came, of at most that many bytes. Raises Problem 413, ClientGone, having read no more than it must."""
    declared = request.headers.get("Content-Length", "")
    if declared.isdecimal() and int(declared[:20]) > most:
        raise _too_large(most)
    body, is_more = bytearray(), True
    while is_more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        body += message.get("body", b"")
        if len(body) > most:
            raise _too_large(most)
        is_more = message.get("more_body", False)
    return bytes(body)


def _too_large(most: int) -> Problem:
    return TOO_LARGE(f"The body may have {most} bytes.", limit=most)


@contextmanager
def watched(request: Request) -> Iterator[None]:
    """Ends a block that lasts longer than WATCHED_AFTER_S with ClientGone when the request's client disconnects."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    watching: list[asyncio.Task[None]] = []
    is_gone = False

    async def watch() -> None:
        nonlocal is_gone
        while (await request.receive())["type"] != "http.disconnect":
            pass
        is_gone = True
        task.cancel()

    later = loop.call_later(WATCHED_AFTER_S, lambda: watching.append(loop.create_task(watch())))
    try:
        yield
    except asyncio.CancelledError:
        if is_gone and not task.uncancel():
            raise ClientGone from None
        raise
    finally:
        later.cancel()
        for one in watching:
            one.cancel()
