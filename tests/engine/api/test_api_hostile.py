"""Hostile and unlucky input over raw sockets: refused as a problem, without cost to other clients, and with nothing in the log."""

from __future__ import annotations

import asyncio
import gzip
import json
import resource
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import repeat
from random import Random
from urllib.parse import quote, unquote

import psutil
import pytest

from api.server import OWN_FILES
from infra.settings import Settings
from infra.testing.fixtures import SEED
from tests.engine.api.evidence import Told
from tests.engine.api.front import Front, front_of, new_name
from tests.engine.api.raw_http import Reply, answer, ask, chunked, connection, has_answer, head, post, pour
from tests.engine.spine import until

MB = 1024 * 1024
REFUSED = range(400, 500)

DEPOSIT = b'{"cents": 100, "on": "2026-01-02"}'

Pieces = Callable[[str], Iterator[bytes]]
"""A request to a target, in the pieces in which it is sent."""


@pytest.fixture(scope="module")
def front(shared_world: Settings, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    """One for all tests here: whatever they do to it, the next is served, and all of its answers are true in the end."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # inherited by the process
    # room for ten thousand requests at once, and for those that look how others fare
    world = shared_world.model_copy(update={"api_read_timeout_s": 2.0, "api_max_connections": 11_000})
    with front_of(world, tmp_path_factory.mktemp("front")) as front:
        yield front
        front.assert_true()


@pytest.fixture
def account(front: Front) -> str:
    """An open account's stream."""
    return front.open()


# ── bodies ──

NOT_JSON = {
    "nothing": b"",
    "white space": b" \n",
    "cut off": b'{"cents": 100, "on": "2026-01-0',
    "a bare word": b"deposit",
    "two values": DEPOSIT + DEPOSIT,
    "a trailing comma": b'{"cents": 100, "on": "2026-01-02",}',
    "single quotes": b"{'cents': 100, 'on': '2026-01-02'}",
    "a comment": b'{"cents": 100, /* all of it */ "on": "2026-01-02"}',
    "a NUL after it": DEPOSIT + b"\0",
    "a byte order mark": b"\xef\xbb\xbf" + DEPOSIT,
    "UTF-16": DEPOSIT.decode().encode("utf-16"),
    "bytes that are no UTF-8": b'{"cents": 100, "on": "2026-01-02", "details": {"purpose": "\xff\xfe"}}',
    "an overlong slash": b'{"cents": 100, "on": "2026-01-02", "details": {"purpose": "\xc0\xaf"}}',
    "a surrogate as bytes": b'{"cents": 100, "on": "2026-01-02", "details": {"purpose": "\xed\xa0\x80"}}',
    "a form": b"cents=100&on=2026-01-02",
}

WRONG = {
    "null": b"null",
    "a list": b"[" + DEPOSIT + b"]",
    "a string": b'"deposit"',
    "a number": b"100",
    "no members": b"{}",
    "an unknown member": b'{"cents": 100, "on": "2026-01-02", "overdraft_limit": 1}',
    "an inherited member": b'{"cents": 100, "on": "2026-01-02", "__class__": "x", "__proto__": {}}',
    "an unknown member with a long name": b'{"' + b"x" * 200_000 + b'": 1}',
    "many unknown members": b"{" + b",".join(b'"%d":0' % n for n in range(25_000)) + b"}",
    "deep lists": b'{"cents": 100, "on": "2026-01-02", "details": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep objects": b'{"details": ' * 15_000 + b"1" + b"}" * 15_000,
    "deep and cut off": b"[" * 200_000,
}

NUMBERS = {
    "zero": "0",
    "minus one": "-1",
    "minus zero": "-0",
    "one too many": str(10**14 + 1),
    "2**63": str(2**63),
    "enormous": str(10**30),
    "five thousand digits": "9" * 5_000,
    "1e400": "1e400",
    "-1e400": "-1e400",
    "NaN": "NaN",
    "Infinity": "Infinity",
    "a fraction": "1.5",
    "a whole float": "100.0",
    "an exponent": "1e2",
    "a leading zero": "0100",
    "hexadecimal": "0x64",
    "underscores": "1_00",
    "a string": '"100"',
    "true": "true",
    "null": "null",
    "Arabic digits": '"\u0661\u0660\u0660"',
}

DATES = {
    "the year 0": '"0000-01-01"',
    "before the year 0": '"-0001-01-01"',
    "the year 10000": '"10000-01-01"',
    "30 February": '"2026-02-30"',
    "29 February of a common year": '"2026-02-29"',
    "month 13": '"2026-13-01"',
    "one digit": '"2026-1-1"',
    "a week": '"2026-W01-1"',
    "a time of day": '"2026-01-02T10:00:00Z"',
    "a number": "20260102",
    "1e400": "1e400",
    "a list": '["2026-01-02"]',
    "words": '"tomorrow"',
    "nothing": '""',
    "a NUL": '"2026-01-02\\u0000"',
    "full-width digits": '"\uff12\uff10\uff12\uff16-01-02"',
}

TEXTS = {
    "a NUL": "a\\u0000b",
    "a line break": "a\\nb",
    "an escape": "\\u001b[2J",
    "a C1 control": "a\\u0085b",
    "a lone high surrogate": "\\ud800",
    "a lone low surrogate": "\\udc00",
    "surrogates the wrong way round": "\\udc00\\ud800",
    "201 characters": "x" * 201,
    "200,000 characters": "x" * 200_000,
}


def bodies() -> Iterable[tuple[str, bytes]]:
    yield from ((f"not JSON: {name}", body) for name, body in NOT_JSON.items())
    yield from ((f"wrong: {name}", body) for name, body in WRONG.items())
    for name, number in NUMBERS.items():
        yield f"cents: {name}", f'{{"cents": {number}, "on": "2026-01-02"}}'.encode()
    for name, date in DATES.items():
        yield f"on: {name}", f'{{"cents": 100, "on": {date}}}'.encode()
    for name, text in TEXTS.items():
        yield f"purpose: {name}", f'{{"cents": 100, "on": "2026-01-02", "details": {{"purpose": "{text}"}}}}'.encode()


@pytest.mark.parametrize(("name", "body"), [pytest.param(*one, id=one[0]) for one in bodies()])
def test_a_body_that_does_not_fit_is_refused_by_name(front: Front, account: str, name: str, body: bytes) -> None:
    reply = front.command(account, "deposit", body)
    assert reply.status in {400, 422}, reply
    assert reply.is_problem
    if reply.status == 422:
        places = {one["at"].rpartition(".")[2][:50] for one in reply.json["errors"]}
        field = name.partition(":")[0]
        assert places == {"body"} or field in places or name.startswith("wrong"), "the problem names the field"
    assert len(reply.body) < 20_000, "a problem does not give all of the input back"


def test_the_last_of_two_equal_members_is_what_counts_in_the_log_and_in_the_rows(front: Front, account: str) -> None:
    """Readers of JSON may differ there; ours must not."""
    body = b'{"cents": 1, "cents": 100, "on": "2026-01-02"}'
    assert front.command(account, "deposit", body).status in {200, 422}


# ── questions ──

QUERIES = {
    "no rows": "limit=0",
    "fewer than none": "limit=-1",
    "a float": "limit=1e3",
    "more than there are": "limit=99999999999999999999",
    "full-width digits": "limit=%EF%BC%91",
    "two limits": "limit=1&limit=2",
    "an empty cursor": "cursor=",
    "a cursor of nothing": "cursor=AAAA",
    "a NUL in a cursor": "cursor=%00",
    "no token": "after=",
    "half a token": "after=1~abc.0-",
    "a token of another log": "after=1~abc.0-1",
    "a token beyond all numbers": "after=1~abc.0-" + "9" * 30,
    "a token without end": "after=1~" + "a.0-1~" * 2_000,
    "a NUL": "account=%00",
    "no UTF-8": "account=%FF%FE",
    "a surrogate": "account=%ED%A0%80",
    "an account of 10 kB": "account=" + "x" * 10_000,
    "two accounts": "account=a&account=b",
    "2**63": f"cents={2**63}",
    "-1e400": "cents=-1e400",
    "NaN": "cents=NaN",
    "underscores": "cents=1_0",
    "30 February": "opened_on=2026-02-30",
    "the year 0": "opened_on=0000-01-01",
    "for ever": "opened_on=infinity",
    "no such column": "password=1",
    "SQL": "account=" + quote("' or 1=1; --", safe=""),
    "many parameters": "&".join(f"p{n}=1" for n in range(6_000)),
    "only ampersands": "&" * 30_000,
}


@pytest.mark.parametrize("query", [pytest.param(query, id=name) for name, query in QUERIES.items()])
def test_a_question_that_makes_no_sense_finds_nothing_and_costs_nothing(front: Front, account: str, query: str) -> None:
    began = time.monotonic()
    reply = front.get(f"/views/balances?{query}")
    assert time.monotonic() - began < 2
    if reply.status == 200 and not query.startswith("&"):
        assert reply.json["items"] == []
    elif reply.status != 200:
        assert reply.status in {400, 409, 422}, reply
        assert reply.is_problem
        assert len(reply.body) < 20_000


# ── ids in the path ──

IDS = {
    "a slash": "a%2Fb",
    "a slash in lower case": "b%2fb",
    "an escaped escape": "a%252Fb",
    "two dots": "..",
    "escaped dots": "%2E%2E%2F%2E%2E",
    "a dot": ".",
    "a space": "a%20b",
    "a plus": "a+b",
    "a question mark": "a%3Fb",
    "a hash": "a%23b",
    "a backslash": "a%5Cb",
    "a semicolon": "a;b=c",
    "a bank": "%F0%9F%8F%A6",
    "a flag of two code points": "%F0%9F%87%A8%F0%9F%87%BF",
    "an accent apart": "e%CC%81",
    "the same accent": "%C3%A9",
    "right to left": "%E2%80%AEabc",
    "nothing wide": "%E2%80%8B",
    "the last code point": "%F4%8F%BF%BF",
    "SQL": quote("'; drop table positions; --", safe=""),
    "a format": quote("%s {0} ${x}", safe=""),
    "a route": "outcomes",
    "a command": "deposit",
    "as long as may be": "x" * (200 - len("accounts/")),
}

NO_IDS = {
    "nothing": "",
    "a NUL": "%00",
    "a NUL within": "a%00b",
    "a line break": "a%0D%0Ab",
    "a delete": "%7F",
    "a C1 control": "%C2%85",
    "no UTF-8": "%FF",
    "an overlong slash": "%C0%AF",
    "a surrogate": "%ED%A0%80",
    "beyond Unicode": "%F5%80%80%80",
    "half an escape": "a%2",
    "no escape": "%zz",
    "one byte too many": "x" * (201 - len("accounts/")),
    "200 characters, 400 bytes": "%C3%A9" * 200,
    "10 kB": "x" * 10_000,
    "10 kB of escapes": "%2F" * 10_000,
    "one more segment": "a/b",
}


@pytest.mark.parametrize("segment", [pytest.param(value, id=name) for name, value in IDS.items()])
def test_an_id_may_hold_anything_but_control_characters_and_comes_back_as_it_was(front: Front, segment: str) -> None:
    stream, key = f"accounts/{unquote(segment)}", new_name("key")
    body = b'{"overdraft_limit": 0, "on": "2026-01-01"}'
    opened = front.send(f"/accounts/{segment}/open-account", body, stream=stream, key=key)
    assert (opened.status, opened.json["stream"]) == (200, stream)
    assert front.get(f"/outcomes/accounts/{segment}/{key}").json["stream"] == stream
    row = front.get(f"/views/balances/{segment}")
    assert row.status == 200, row
    assert unquote(segment) in json.dumps(row.json, ensure_ascii=False).replace("\\\\", "\\")


@pytest.mark.parametrize("segment", [pytest.param(value, id=name) for name, value in NO_IDS.items()])
def test_what_can_t_be_an_id_is_refused_in_every_path(front: Front, segment: str) -> None:
    post_open = front.send(f"/accounts/{segment}/open-account", b"{}", stream="accounts/?", key=new_name("key"))
    targets = (f"/outcomes/accounts/{segment}/k", f"/views/balances/{segment}")
    for reply in (post_open, *map(front.get, targets)):
        if not (segment == "" and reply.status == 200):  # `/views/balances/` may be the list
            assert reply.status in REFUSED, reply
            assert reply.is_problem


TARGETS = {
    "not ASCII": "/accounts/\u00e9/open-account",
    "a tab": "/accounts/a\tb/open-account",
    "a space": "/accounts/a b/open-account",
    "no slash": "accounts/a/open-account",
    "an authority": "http://elsewhere/accounts/a/nothing",
    "everything": "*",
    "up and away": "/../../../etc/passwd",
    "two slashes": "//accounts/a/nothing",
    "a fragment": "/accounts/a#/nothing",
}


@pytest.mark.parametrize("target", [pytest.param(value, id=name) for name, value in TARGETS.items()])
def test_a_target_that_is_none_is_refused(front: Front, target: str) -> None:
    reply = ask(front.port, post(target, b"{}"))
    assert reply.status in REFUSED, reply


# ── headers ──

KEYS = {
    "nothing": b"",
    "empty": b'""',
    "10 kB": b'"' + b"x" * 10_000 + b'"',
    "201 bytes": b'"' + b"x" * 201 + b'"',
    "unterminated": b'"abc',
    "a list": b'"a", "b"',
    "two words": b"a b",
    "Latin-1": b'"\xe9"',
    "UTF-8": '"\N{BANK}"'.encode(),
    "a tab": b'"a\tb"',
    "a number": b"1.5.3",
}


@pytest.mark.parametrize("value", [pytest.param(value, id=name) for name, value in KEYS.items()])
def test_an_idempotency_key_is_taken_as_it_is_or_refused(front: Front, account: str, value: bytes) -> None:
    reply = ask(front.port, post(f"/{account}/deposit", DEPOSIT, ("Idempotency-Key", value)))
    if reply.status == 200:
        assert reply.json["command_id"].encode("latin-1", "replace") in value
        front.hear(account, reply.json["command_id"], reply)
    else:
        assert reply.status in {400, 422}, reply
        assert reply.is_problem


VERSIONS = {
    "nothing": b"",
    "empty": b'""',
    "bare": b"abc",
    "a word": b'"abc"',
    "minus one": b'"-1"',
    "plus one": b'"+1"',
    "a fraction": b'"1.0"',
    "an exponent": b'"1e0"',
    "underscores": b'"1_0"',
    "white space": b'" 1"',
    "2**63": f'"{2**63}"'.encode(),
    "enormous": b'"' + b"9" * 5_000 + b'"',
    "Arabic digits": '"\u0661"'.encode(),
    "superscript": b'"\xb9"',
    "a list": b'"1", "2"',
    "weak": b'W/"1"',
}


@pytest.mark.parametrize("value", [pytest.param(value, id=name) for name, value in VERSIONS.items()])
def test_an_expected_version_that_is_none_is_refused(front: Front, account: str, value: bytes) -> None:
    key = new_name("key")
    reply = front.send(f"/{account}/deposit", DEPOSIT, ("If-Match", value), stream=account, key=key)
    assert reply.status in {400, 412, 422}, reply
    assert reply.is_problem


PREFERENCES = [
    "wait=-1",
    "wait=1e999",
    "wait=99999999999999999999",
    "wait=abc",
    "wait",
    "wait=\xb2",
    "=",
    ";;,,",
    "x" * 5_000,
]


@pytest.mark.parametrize("value", PREFERENCES)
def test_a_preference_that_is_none_is_passed_over(front: Front, account: str, value: str) -> None:
    """RFC 7240, section 2: preferences that are not understood are ignored."""
    key = new_name("key")
    reply = front.send(f"/{account}/deposit", DEPOSIT, ("Prefer", value.encode("latin-1")), stream=account, key=key)
    assert reply.status == 200, reply


TWICE = {
    "Idempotency-Key": ('"a"', '"b"'),
    "If-Match": ('"1"', '"2"'),
    "Content-Type": ("application/json", "text/plain"),
    "Content-Length": ("34", "2"),
    "Transfer-Encoding": ("chunked", "identity"),
}


@pytest.mark.parametrize("name", TWICE)
@pytest.mark.parametrize("equal", [False, True], ids=["different", "equal"])
def test_a_header_twice_is_never_a_matter_of_taste(front: Front, account: str, name: str, equal: bool) -> None:
    first, second = TWICE[name]
    headers = {"Content-Type": "application/json", "Content-Length": str(len(DEPOSIT))}
    headers.pop(name, None)
    twice = [(name, first), (name, first if equal else second)]
    reply = ask(front.port, head("POST", f"/{account}/deposit", [*headers.items(), *twice]) + DEPOSIT)
    if equal and reply.status == 200:
        front.hear(account, reply.json["command_id"], reply)
    else:
        assert reply.status in {400, 415, 422}, reply


def test_a_length_and_chunks_at_once_are_refused(front: Front, account: str) -> None:
    """Two readers of such a request, a proxy and this server, could see two different requests (RFC 9112, section 6.3)."""
    headers = [("Content-Type", "application/json"), ("Content-Length", "34"), ("Transfer-Encoding", "chunked")]
    body = b"22\r\n" + DEPOSIT + b"\r\n0\r\n\r\n"
    assert ask(front.port, head("POST", f"/{account}/deposit", headers) + body).status == 400


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/xml", "application/x-www-form-urlencoded", "", "a/b/c", "json"]
)
def test_another_media_type_is_refused(front: Front, account: str, kind: str) -> None:
    reply = ask(front.port, post(f"/{account}/deposit", DEPOSIT, content_type=kind))
    assert (reply.status, reply.is_problem) == (415, True)


@pytest.mark.parametrize("coding", ["gzip", "deflate", "br", "identity, gzip", ""])
def test_a_compressed_body_is_refused_before_it_is_read(front: Front, account: str, coding: str) -> None:
    """Nothing here decompresses, so that a body can't be larger than its bytes."""
    bomb = gzip.compress(bytes(10 * MB))
    headers = [("Content-Type", "application/json"), ("Content-Encoding", coding), ("Content-Length", str(len(bomb)))]
    with connection(front.port) as opened:
        opened.sendall(head("POST", f"/{account}/deposit", headers))
        reply = answer(opened)
    assert (reply.status, reply.is_problem, reply.json["code"]) == (415, True, "not-json")


HEADS: dict[str, tuple[str, list[tuple[str, str]]]] = {
    "15,000 headers": ("/views/balances", [("a", "")] * 15_000),
    "100,000 parameters": ("/views/balances?" + "&".join(f"p{n}=1" for n in range(100_000)), []),
    "a URL of a megabyte": ("/views/balances?account=" + "x" * MB, []),
    "deep JSON as a parameter": ("/views/balances?account=" + "%5B" * 20_000, []),
    "deep JSON as a path": ("/views/balances/" + "%7B%22a%22:" * 5_000, []),
    "deep JSON as a cursor": ("/views/balances?cursor=" + "%5B" * 20_000, []),
    "deep JSON as a tag": ("/views/balances", [("If-None-Match", "[" * 60_000)]),
    "20,000 tags": ("/views/balances", [("If-None-Match", '"",' * 20_000)]),
    "tags without an end": ("/views/balances", [("If-None-Match", 'W/"' * 20_000)]),
    "3,000 lines of tags": ("/views/balances", [("If-None-Match", '"a"')] * 3_000),
    "deep JSON as a preference": ("/views/balances", [("Prefer", "[" * 60_000)]),
    "preferences without an end": ("/views/balances", [("Prefer", 'wait="' * 10_000)]),
    "30,000 preferences": ("/views/balances", [("Prefer", "a," * 30_000)]),
    "spaces as a preference": ("/views/balances", [("Prefer", "wait" + " " * 60_000 + "x")]),
    "formats without an end": ("/metrics", [("Accept", "application/openmetrics-text;" * 2_000)]),
    "a trace without an end": ("/views/balances", [("traceparent", "0" * 60_000), ("tracestate", "a=b," * 1_000)]),
}


@pytest.mark.parametrize("name", HEADS)
def test_a_head_that_is_all_it_may_be_is_answered_and_holds_up_no_other_client(front: Front, name: str) -> None:
    target, headers = HEADS[name]
    with connection(front.port) as opened:
        opened.sendall(head("GET", target, headers))
        assert timed(lambda: front.get("/health/live")) < 2
        reply = answer(opened)
    assert reply.status in {200, 400, 404, 422, 431}, reply
    if "100,000" in name or "megabyte" in name:
        assert (reply.status, reply.is_problem) == (431, True)


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "BREW"])
def test_another_method_is_refused(front: Front, account: str, method: str) -> None:
    reply = ask(front.port, head(method, f"/{account}/deposit"))
    assert reply.status in {400, 405}, reply
    assert method == "BREW" or (reply.status, "POST" in reply.headers["allow"]) == (405, True)


# ── floods ──

POURED = 100 * MB
FLAT = 16 * MB
"""What the process may grow by meanwhile: far less than was poured, more than an allocator's whims."""

PIECE = b"x" * 65_536


def body_of(headers: list[tuple[str, str]], parts: Callable[[Iterable[bytes]], Iterable[bytes]]) -> Pieces:
    def pieces(target: str) -> Iterator[bytes]:
        yield head("POST", target, [("Content-Type", "application/json"), *headers])
        yield from parts(repeat(PIECE, POURED // len(PIECE)))

    return pieces


def ending_never(start: bytes, more: bytes) -> Pieces:
    def pieces(target: str) -> Iterator[bytes]:
        yield start.replace(b"TARGET", target.encode())
        yield from repeat(more * (len(PIECE) // len(more)), POURED // len(PIECE))

    return pieces


LINE = b"POST TARGET HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\n"
CHUNKS = LINE + b"Transfer-Encoding: chunked\r\n\r\n"

FLOODS = {
    "a body of 100 MB": body_of([("Content-Length", str(POURED))], iter),
    "a body in chunks, without a length": body_of([("Transfer-Encoding", "chunked")], chunked),
    "a target": ending_never(b"POST TARGET", b"x"),
    "a header": ending_never(LINE + b"X: ", b"x"),
    "a header's name": ending_never(LINE, b"x"),
    "headers": ending_never(LINE, b"X: y\r\n"),
    "a chunk's extension": ending_never(CHUNKS + b"1;", b"x"),
    "trailers": ending_never(CHUNKS + b"1\r\n{\r\n0\r\n", b"X: y\r\n"),
    "empty lines": ending_never(b"", b"\r\n"),
    "tiny chunks": ending_never(CHUNKS, b"1\r\n{\r\n"),
    "requests without a reader": ending_never(b"", head("GET", "/health/live")),
}


class Flood:
    """Pours into a server and looks at the memory of its process."""

    def __init__(self, port: int, pid: int) -> None:
        self.port = port
        self.process = psutil.Process(pid)
        self.grown = 0
        """Bytes, at the worst moment."""

    def pour(self, pieces: Iterable[bytes]) -> tuple[int, Reply | None]:
        before = self._size()

        def watched() -> Iterator[bytes]:
            for number, piece in enumerate(pieces):
                yield piece
                if number % 64 == 0:
                    self.grown = max(self.grown, self._size() - before)

        with connection(self.port) as opened:
            sent, reply = pour(opened, watched())
        self.grown = max(self.grown, self._size() - before)
        return sent, reply

    def _size(self) -> int:
        return int(self.process.memory_info().rss)


@pytest.mark.slow
@pytest.mark.parametrize("name", FLOODS)
def test_a_flood_is_refused_and_memory_stays_flat(front: Front, account: str, name: str) -> None:
    flood = Flood(front.port, front.pid)
    sent, reply = flood.pour(FLOODS[name](f"/{account}/deposit"))
    assert flood.grown < FLAT, f"{sent / MB:.0f} MB made it grow by {flood.grown / MB:.0f} MB"
    if "body" in name:
        assert reply is None or (reply.status, reply.is_problem) == (413, True)
    assert front.command(account, "deposit", DEPOSIT).status == 200, "the next one is served"


def test_the_answer_to_a_body_that_is_too_large_comes_before_its_end(front: Front, account: str) -> None:
    with connection(front.port) as opened:
        opened.sendall(
            head("POST", f"/{account}/deposit", [("Content-Type", "application/json"), ("Content-Length", "1000000")])
        )
        assert answer(opened).status == 413


# ── slow, idle and gone ──

SLOW = 40


def trickle(port: int, start: bytes, meanwhile: Callable[[], Reply], seconds: float = 30) -> set[int]:
    """Slow requests, a byte of each between two requests of another client: the statuses they end with. Raises AssertionError."""
    slow = [socket.create_connection(("127.0.0.1", port), timeout=20) for _ in range(SLOW)]
    try:
        for one in slow:
            one.sendall(start)
        waiting, deadline = list(slow), time.monotonic() + seconds
        while waiting:
            assert time.monotonic() < deadline, f"{len(waiting)} slow requests have no answer"
            assert timed(meanwhile) < 2
            waiting = [one for one in waiting if not has_answer(one)]
            for one in waiting:
                one.sendall(b"x")
        return {answer(one).status for one in slow}
    finally:
        for one in slow:
            one.close()


def slow_body(target: str) -> bytes:
    return head("POST", target, [("Content-Type", "application/json"), ("Content-Length", "100000")])


@pytest.mark.slow
def test_slow_bodies_end_by_a_deadline_and_hold_up_no_other_client(front: Front, account: str) -> None:
    start = slow_body(f"/{account}/deposit")
    assert trickle(front.port, start, lambda: front.command(account, "deposit", DEPOSIT)) == {408}


def test_slow_heads_end_by_a_deadline_and_hold_up_no_other_client(front: Front) -> None:
    start = b"GET /views HTTP/1.1\r\nHost: te"
    assert trickle(front.port, start, lambda: front.get("/health/live")) == {408}


@pytest.mark.slow
def test_slow_readers_hold_up_no_other_client(front: Front, account: str) -> None:
    """They take the answers to a thousand requests byte by byte, or none."""
    server = psutil.Process(front.pid)
    before = server.memory_info().rss
    with ExitStack() as stack:
        slow = [stack.enter_context(socket.socket()) for _ in range(200)]
        for one in slow:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)  # before it is connected
            one.connect(("127.0.0.1", front.port))
            one.settimeout(20)
            one.sendall(90 * head("GET", "/openapi.json"))
        took = []
        for number in range(100):
            took.append(timed(lambda: front.command(account, "deposit", DEPOSIT)))
            for one in slow[number % 2 :: 2]:
                one.recv(1)
        grown = server.memory_info().rss - before
    print(f"{len(slow)} slow readers took {grown / MB:.0f} MB; slowest of 100 commands {max(took):.1f} s")
    assert grown < 400 * MB
    until(lambda: server.num_fds() < OWN_FILES, "the connections are given back")


@pytest.mark.slow
def test_ten_thousand_requests_at_once_have_an_answer_each(front: Front, account: str) -> None:
    """What is too much is refused by 429, and the process stays ready; memory stays flat."""
    server = psutil.Process(front.pid)
    before = server.memory_info().rss
    keys = [new_name("at-once-") for _ in range(5_000)]
    commands = [post(f"/{account}/deposit", DEPOSIT, ("Idempotency-Key", key), ("Connection", "close")) for key in keys]
    reads = [head("GET", f"/views/balances?account={number}", [("Connection", "close")]) for number in range(5_000)]

    async def one(request: bytes) -> Reply:
        reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
        try:
            writer.write(request)
            received = await reader.read()
        finally:
            writer.close()
        top, _, body = received.partition(b"\r\n\r\n")
        return Reply(int(top.split(b" ")[1]), {}, body)

    async def all_of_them() -> list[Reply]:
        async with asyncio.timeout(240):
            return await asyncio.gather(*map(one, commands), *map(one, reads))

    began = time.monotonic()
    with ThreadPoolExecutor(1) as beside:
        replies = beside.submit(asyncio.run, all_of_them())
        waits = [timed(lambda: front.get("/health/ready"))]
        while not replies.done():
            waits.append(timed(lambda: front.get("/health/ready")))
    statuses = Counter(reply.status for reply in replies.result())
    grown = server.memory_info().rss - before
    took = time.monotonic() - began
    print(f"{dict(statuses)} in {took:.0f} s, {grown / MB:.0f} MB; slowest of {len(waits)} probes {max(waits):.1f} s")
    assert statuses.keys() <= {200, 202, 429}
    assert statuses[200] > 2_000
    assert grown < 400 * MB
    for key, reply in zip(keys, replies.result(), strict=False):
        front.hear(account, key, reply)
    front.assert_true()


@pytest.mark.slow
def test_more_idle_connections_than_may_be_open_hold_up_no_other_client(front: Front, account: str) -> None:
    """They say nothing, and those that have done so for longest make room; who has begun to ask must go on."""
    server = psutil.Process(front.pid)
    limit = min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], server.rlimit(psutil.RLIMIT_NOFILE)[0])
    wanted = min(front.settings.api_max_connections, limit - OWN_FILES - front.settings.api_connections)
    more = min(wanted + 2_000, limit - 500)
    before, size = server.num_fds(), server.memory_info().rss
    idle: list[socket.socket] = []
    try:
        for _ in range(more):
            idle.append(socket.create_connection(("127.0.0.1", front.port), timeout=20))  # noqa: PERF401 - closed below
        until(lambda: server.num_fds() >= wanted, "all connections are accepted")
        for one in idle[more - wanted // 2 :: 2]:  # from now on these have a deadline
            one.sendall(f"POST /{account}/deposit HTTP/1.1\r\nHost: te".encode())
        took = [timed(lambda: front.command(account, "deposit", DEPOSIT)) for _ in range(50)]
        each = (server.memory_info().rss - size) / wanted
        print(f"{wanted} idle connections, {each / 1024:.1f} kB each; slowest of 50 commands {max(took) * 1000:.0f} ms")
        assert max(took) < 2
        assert server.num_fds() < wanted + OWN_FILES
        assert each < 64 * 1024
    finally:
        for one in idle:
            one.close()
    until(lambda: server.num_fds() < before + 50, "the connections are given back")


def timed(command: Callable[[], Reply]) -> float:
    """Seconds."""
    began = time.monotonic()
    assert command().status == 200
    return time.monotonic() - began


def test_clients_that_go_away_stop_nothing(front: Front, account: str) -> None:
    """In the midst of the head, of the body, and while they wait; what they asked for whole may happen, and is known by its key."""
    chance = Random(SEED)
    for _ in range(200):
        key = new_name("gone-")
        request = post(f"/{account}/deposit", DEPOSIT, ("Idempotency-Key", f'"{key}"'))
        cut = chance.randint(1, len(request))
        with connection(front.port) as opened:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # ends with a reset
            opened.sendall(request[:cut])
        if cut == len(request):
            front.told.append(Told(account, key, None))
    assert front.command(account, "deposit", DEPOSIT).status == 200
    front.assert_true()


# ── the same key ──

AT_ONCE = 50


def at_once(front: Front, stream: str, key: str) -> list[Reply]:
    with ThreadPoolExecutor(AT_ONCE) as many:
        asked = [many.submit(front.command, stream, "deposit", DEPOSIT, key=key) for _ in range(AT_ONCE)]
        return [one.result() for one in asked]


def assert_one_effect(front: Front, stream: str, replies: list[Reply]) -> None:
    answers = {json.dumps(reply.json | {"position": ""}, sort_keys=True) for reply in replies}
    assert ({reply.status for reply in replies}, len(answers)) == ({200}, 1)
    assert front.get(f"/views/balances/{stream.partition('/')[2]}").json["row"]["cents"] == 100
    front.assert_true()


def test_the_same_key_fifty_times_at_once_is_one_effect_and_fifty_equal_answers(front: Front, account: str) -> None:
    assert_one_effect(front, account, at_once(front, account, new_name("key")))
