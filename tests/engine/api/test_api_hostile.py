"""make test + test-all + prove: a refusal takes milliseconds, a flood a second; ten thousand clients take the whole machine.

Hostile and unlucky input over raw sockets: refused as a problem, without cost to other clients, and with nothing in the log.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import resource
import socket
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from random import Random
from urllib.parse import quote, unquote

import psutil
import pytest

from infra.log.clients import MAX_COMMAND_BYTES
from infra.settings import Settings
from tests.engine.api.front import Front, front_of, new_name
from tests.engine.api.raw_http import HOST, INTERNALS, Header, Reply, answer, ask, connection, head, post, pour
from tools.testing.fixtures import SEED
from tools.testing.waiting import until

MB = 1024 * 1024
ACCOUNT = "accounts/hostile"
DEPOSIT = b'{"cents": 100, "on": "2026-01-02"}'
JSON = ("Content-Type", "application/json")


@pytest.fixture(scope="module")
def front(shared_world: Settings, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    """One for all tests here: whatever they do to it, the next is served, and all of its answers are true in the end."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # inherited by the process
    with front_of(shared_world, tmp_path_factory.mktemp("front")) as front:
        front.open(ACCOUNT)
        yield front
        front.assert_true()


@pytest.fixture
def account(front: Front) -> str:
    return front.open()


def words(text: str) -> list[str]:
    """Cases without a space in them."""
    return text.split()


# ── bodies ──

NOT_JSON = [
    *(b"", b" \n", b"deposit", b"cents=100&on=2026-01-02", DEPOSIT[:-3], DEPOSIT + DEPOSIT, DEPOSIT + b"\0"),
    *(DEPOSIT[:-1] + b",}", DEPOSIT.replace(b'"', b"'"), DEPOSIT.replace(b",", b", /* all of it */")),
    *(DEPOSIT.decode().encode("utf-16"), b"[" * 200_000, DEPOSIT[:-1] + b', "cents": 100}'),
    DEPOSIT[:-1] + b', "details": {"purpose": "rent", "purp\\u006fse": "rent"}}',
    # no UTF-8, an overlong slash, a surrogate
    *(DEPOSIT[:-1] + b', "details": {"purpose": "%s"}}' % text for text in (b"\xff\xfe", b"\xc0\xaf", b"\xed\xa0\x80")),
]
OTHER_JSON = [
    *(b"null", b"100", b'"deposit"', b"{}", b"[" + DEPOSIT + b"]"),
    DEPOSIT[:-1] + b', "overdraft_limit": 1}',
    DEPOSIT[:-1] + b', "__class__": "x", "__proto__": {}}',
    b'{"' + b"x" * 200_000 + b'": 1}',
    b"{" + b",".join(b'"%d":0' % n for n in range(25_000)) + b"}",
    DEPOSIT[:-1] + b', "details": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b'{"details": ' * 15_000 + b"1" + b"}" * 15_000,
]
CENTS = [
    *words("0 -1 -0 1.5 100.0 1e2 1e400 -1e400 NaN Infinity 0100 0x64 1_00 true null"),
    *(f"{10**14 + 1}", f"{2**63}", "9" * 5_000, '"100"', '"\u0661\u0660\u0660"'),  # these digits are Arabic
]
DATES = [
    *words('"0000-01-01" "-0001-01-01" "10000-01-01" "2026-02-30" "2026-02-29" "2026-13-01" "2026-1-1" "2026-W01-1"'),
    *words('"2026-01-02T10:00:00Z" 20260102 1e400 ["2026-01-02"] "tomorrow" "" "2026-01-02\\u0000"'),
    '"\uff12\uff10\uff12\uff16-01-02"',  # full-width digits
]
PURPOSES = [
    # NUL, a line break, the terminal's escape, a C1 control, lone surrogates and two the wrong way round
    *words(r"a\u0000b a\nb \u001b[2J a\u0085b \ud800 \udc00 \udc00\ud800"),
    *("x" * 201, "x" * 200_000),
]


def bodies() -> Iterator[tuple[str, bytes]]:
    """Each with the field that the problem names."""
    yield from (("body", body) for body in NOT_JSON)
    yield from (("", body) for body in OTHER_JSON)
    yield from (("cents", f'{{"cents": {cents}, "on": "2026-01-02"}}'.encode()) for cents in CENTS)
    yield from (("on", f'{{"cents": 100, "on": {date}}}'.encode()) for date in DATES)
    for text in PURPOSES:
        yield "purpose", DEPOSIT[:-1] + f', "details": {{"purpose": "{text}"}}}}'.encode()


def shortly(value: object) -> str:
    """As the name of a case."""
    usual = b" HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\nContent-Length: 34"
    return str(value.replace(usual, b"").rstrip())[2:90] if isinstance(value, bytes) else str(value)


@pytest.mark.parametrize(("field", "body"), [*bodies()], ids=shortly)
def test_a_body_that_does_not_fit_is_refused_by_name(front: Front, field: str, body: bytes) -> None:
    reply = front.command(ACCOUNT, "deposit", body)
    assert (reply.status, reply.is_problem, reply.json["code"]) == (422, True, "invalid"), reply
    places = {one["at"].rpartition(".")[2][:50] for one in reply.json["errors"]}
    assert not field or "body" in places or field in places, "the problem names the field"
    assert len(reply.body) < 20_000, "a problem does not give all of the input back"


def test_a_byte_order_mark_is_passed_over(front: Front, account: str) -> None:
    assert front.command(account, "deposit", b"\xef\xbb\xbf" + DEPOSIT).status == 200


# ── requests ──


def deposit(*headers: Header, to: str = f"/{ACCOUNT}/deposit", body: bytes = DEPOSIT, kind: str = JSON[1]) -> bytes:
    return post(to, body, *headers, content_type=kind)


def deposits(name: str, *values: str | bytes) -> list[bytes]:
    return [deposit((name, value)) for value in values]


def deposit_head(*headers: Header) -> bytes:
    return head("POST", f"/{ACCOUNT}/deposit", [JSON, *headers])


def reads(targets: str) -> list[bytes]:
    return [head("GET", target) for target in words(targets)]


def balances(queries: str, path: str = "/views/balances?") -> list[bytes]:
    return [head("GET", path + query) for query in words(queries)]


def rows(segments: str) -> list[bytes]:
    return balances(segments, "/views/balances/")


def others(segments: str) -> list[bytes]:
    """What is no row, under ids."""
    opening = b'{"overdraft_limit": 0, "on": "2026-01-01"}'
    opened = [deposit(to=f"/accounts/{segment}/open-account", body=opening) for segment in segments.split(" ")]
    return opened + [head("GET", f"/outcomes/accounts/{segment}/k") for segment in segments.split(" ")]


CHUNKED = ("Transfer-Encoding", "chunked")
NO_TEXT = "%FF %C0%AF %ED%A0%80 %F5%80%80%80"
"""Bytes that are no UTF-8, an overlong slash, a surrogate, and what lies beyond Unicode."""
NO_IDS = f"a%0D%0Ab %7F %C2%85 {'x' * (201 - len('accounts/'))} {'%C3%A9' * 200} {'x' * 10_000} {'%2F' * 10_000}"
"""Control characters, and too many bytes."""
BOMB = ("Content-Length", str(len(gzip.compress(bytes(10 * MB)))))
"""Nothing here decompresses, so that a body can't be larger than its bytes."""

REFUSED: dict[tuple[int, str], list[bytes]] = {
    (400, "bad-header"): [
        *deposits(
            "Idempotency-Key", b"", b'""', b'"abc', b'"a", "b"', b"a b", b'"a\tb"', b'"\xe9"', "\N{BANK}".encode()
        ),
        *deposits("Idempotency-Key", f'"{"x" * 201}"', f'"{"x" * 10_000}"'),
        *deposits("If-Match", *words('"" abc 3 * "abc" "-1" "+1" "1.0" "1e0" "1_0" W/"1"'), "", '" 1"', '"1", "2"'),
        *deposits("If-Match", f'"{2**63}"', f'"{"9" * 5_000}"', '"\u0661"'.encode(), b'"\xb9"'),
        *deposits("If-None-Match", '"1"'),
        *deposits("Correlation-Id", b"", b"x" * 201, b"a\xe9", b"a\tb"),
        deposit(("If-Match", '"1"'), ("If-None-Match", "*")),
        # twice
        *(deposit(("Idempotency-Key", '"a"'), ("Idempotency-Key", key)) for key in ('"a"', '"b"')),
        *(deposit(("If-Match", '"1"'), ("If-Match", version)) for version in ('"1"', '"2"')),
        *deposits("Content-Type", "application/json", "text/plain"),
    ],
    (404, "not-found"): [
        *others(" a/b"),
        *(deposit(to=to) for to in words("* http://elsewhere/accounts/a/x //accounts/a/nothing /accounts/a#/nothing")),
        *reads("/nowhere /../../../etc/passwd /outcomes/nothing/nobody/k1 /views/nothing /views/nothing/ada/live"),
        *reads("/views/command_outcomes /views/streams_accounts /views/statement/ada /views/balances/a/b"),
    ],
    (404, "no-row"): rows(f"nobody {NO_IDS}"),
    (405, "method-not-allowed"): [
        head(method, f"/{ACCOUNT}/deposit") for method in words("GET PUT DELETE PATCH OPTIONS TRACE")
    ],
    (409, "other-log"): balances("after=1~abc.0-1"),
    (413, "too-large"): [
        deposit_head(("Content-Length", "1000000")),  # answered before its end
        deposit(body=DEPOSIT.ljust(MAX_COMMAND_BYTES)),  # the body fits, the record of it does not
    ],
    (415, "not-json"): [
        *(deposit(kind=kind) for kind in ("", "json", "a/b/c", "text/plain", "application/xml")),
        *(deposit(kind=kind) for kind in ("application/x-www-form-urlencoded", "application/json; charset=latin-1")),
        *(deposit_head(("Content-Encoding", one), BOMB) for one in ("gzip", "deflate", "br", "identity, gzip", "")),
    ],
    (422, "bad-segment"): others(NO_TEXT) + rows(NO_TEXT),
    (422, "bad-token"): balances(f"after= after=1~ after=1~abc.0- after=1~abc.0-{10**30} after=1~{'a.0-1~' * 2_000}"),
    (422, "bad-cursor"): balances("cursor= cursor=x cursor=AAAA cursor=%00 cursor=%F0%9F%98%80"),
    (422, "invalid"): [
        *others(f"%00 a%00b {NO_IDS}"),
        *rows("%00 ada?aftr=1 ada/live?colour=red"),
        *(deposit(to=f"/{ACCOUNT}/deposit?dry=1"), *reads(f"/outcomes/{ACCOUNT}/k?wait=1 /views?colour=red")),
        *reads("/views/statement/ada/x /views/statement/ada/x/live /views/statement/ada/9223372036854775808"),
        *reads("/views/daily_totals/2026-02-30/deposit"),
        head("GET", "/views/balances/ada/live", [("Last-Event-ID", "x" * 101)]),
        *balances("limit=0 limit=-1 limit=1001 limit=1e3 limit=%EF%BC%91 limit=%D9%A3 limit=1&limit=2"),
        *balances(f"cents=NaN cents=-1e400 cents=1_0 cents={2**63} cents=1&cents=2 account=a&account=b account=%00"),
        *balances("opened_on=2026-02-30 opened_on=0000-01-01 opened_on=infinity password=1"),
        *balances("limit=99999999999999999999 " + "&".join(f"p{n}=1" for n in range(6_000))),
    ],
}


@pytest.mark.parametrize(
    ("status", "code", "request_"), [(*why, one) for why in REFUSED for one in REFUSED[why]], ids=shortly
)
def test_a_request_that_does_not_fit_is_refused_by_its_code(
    front: Front, status: int, code: str, request_: bytes
) -> None:
    """And has done nothing: no command is in the log that has no answer."""
    reply = ask(front.port, request_)
    assert (reply.status, reply.is_problem, reply.json["code"]) == (status, True, code), reply
    assert len(reply.body) < 20_000, "a problem does not give all of the input back"
    assert status != 405 or reply.headers["allow"] == "POST"


NO_HTTP = [
    # two readers of such requests, a proxy and this server, could see two different ones (RFC 9112, section 6.3)
    *deposits("Content-Length", "34", "2"),
    deposit(CHUNKED, body=b"22\r\n" + DEPOSIT + b"\r\n0\r\n\r\n"),
    *(deposit_head(CHUNKED, ("Transfer-Encoding", coding)) for coding in ("chunked", "identity")),
    *(
        deposit(to=target)
        for target in ("accounts/a/deposit", "/accounts/a b/x", "/accounts/a\tb/x", "/accounts/\u00e9/x")
    ),
    *(head("BREW", f"/{ACCOUNT}/deposit"), head("GET", "\x01"), b"nonsense\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n"),
    deposit_head(("Content-Length", "many")),
]


@pytest.mark.parametrize("request_", NO_HTTP, ids=shortly)
def test_what_is_no_http_is_refused_by_the_server_and_reaches_no_code(front: Front, request_: bytes) -> None:
    reply = ask(front.port, request_)
    assert (reply.status, INTERNALS.search(f"{reply.headers} {reply.body!r}")) == (400, None)


SQL = quote("' or 1=1; --", safe="")


@pytest.mark.parametrize("account", ["%FF%FE", "%ED%A0%80", "x" * 10_000, SQL], ids=shortly)
def test_a_question_that_makes_no_sense_finds_nothing_and_costs_nothing(front: Front, account: str) -> None:
    reply = front.get(f"/views/balances?account={account}")
    assert (reply.status, reply.json["items"]) == (200, [])


IDS = [
    *words(
        "a%2Fb b%2fb a%252Fb . .. ... %2E%2E%2F%2E%2E a%20b a+b a%3Fb a%23b a%5Cb a;b=c a%2 %zz outcomes deposit live"
    ),
    *(quote("'; drop table positions; --", safe=""), quote("%s {0} ${x}", safe=""), "x" * (200 - len("accounts/"))),
    # a bank, a flag of two code points, an accent, the last code point
    *words("%F0%9F%8F%A6 %F0%9F%87%A8%F0%9F%87%BF %C3%A9 %F4%8F%BF%BF"),
]


@pytest.mark.parametrize("segment", IDS)
def test_an_id_may_hold_anything_that_can_be_seen_and_comes_back_as_it_was(front: Front, segment: str) -> None:
    stream, key = f"accounts/{unquote(segment)}", new_name("key/")
    body = b'{"overdraft_limit": 0, "on": "2026-01-01"}'
    opened = front.send(f"/accounts/{segment}/open-account", body, stream=stream, key=key)
    assert (opened.status, opened.json["stream"]) == (200, stream)
    assert front.get(f"/outcomes/accounts/{segment}/{quote(key, safe='')}").json["stream"] == stream
    row, page = front.get(f"/views/balances/{segment}"), front.get(f"/views/balances?account={quote(unquote(segment))}")
    assert [row.json["row"]] == page.json["items"]
    assert row.json["row"]["account"] == unquote(segment)


@pytest.mark.parametrize("segment", words("e%CC%81 %E2%80%AEabc %E2%80%8B a%20 a%20%20b"))
def test_an_id_that_looks_like_another_is_refused_by_name(front: Front, segment: str) -> None:
    stream, body = f"accounts/{unquote(segment)}", b'{"overdraft_limit": 0, "on": "2026-01-01"}'
    reply = front.send(f"/accounts/{segment}/open-account", body, stream=stream, key=new_name("key/"))
    assert (reply.status, reply.json["code"]) == (422, "unclear-stream")
    assert reply.json["detail"].startswith("The stream's name ")


def test_a_key_may_look_like_a_number(front: Front, account: str) -> None:
    reply = front.send(f"/{account}/deposit", DEPOSIT, stream=account, key="1.5.3")
    assert (reply.status, reply.json["command_id"]) == (200, "1.5.3")


PREFERENCES = [*words("wait=-1 wait=1e999 wait=99999999999999999999 wait=abc wait wait=\xb2 = ;;,,"), "x" * 5_000]


@pytest.mark.parametrize("value", PREFERENCES)
def test_a_preference_that_is_none_is_passed_over(front: Front, account: str, value: str) -> None:
    """RFC 7240, section 2: preferences that are not understood are ignored."""
    reply = front.command(account, "deposit", DEPOSIT, ("Prefer", value.encode("latin-1")))
    assert reply.status == 200, reply


VIEW = "/views/balances"
HEADS: list[tuple[str, list[Header]]] = [
    (VIEW, [("a", "")] * 15_000),
    (f"{VIEW}?" + "&" * 30_000, []),
    (f"{VIEW}?account=" + "%5B" * 20_000, []),
    (f"{VIEW}?cursor=" + "%5B" * 20_000, []),
    (f"{VIEW}/" + "%7B%22a%22:" * 5_000, []),
    (VIEW, [("If-None-Match", "[" * 60_000)]),
    (VIEW, [("If-None-Match", '"",' * 20_000)]),
    (VIEW, [("If-None-Match", 'W/"' * 20_000)]),
    (VIEW, [("If-None-Match", '"a"')] * 3_000),
    (VIEW, [("Prefer", "[" * 60_000)]),
    (VIEW, [("Prefer", 'wait="' * 10_000)]),
    (VIEW, [("Prefer", "a," * 30_000)]),
    (VIEW, [("Prefer", "wait" + " " * 60_000 + "x")]),
    ("/metrics", [("Accept", "application/openmetrics-text;" * 2_000)]),
    (VIEW, [("traceparent", "0" * 60_000), ("tracestate", "a=b," * 1_000)]),
]


@pytest.mark.parametrize("number", range(len(HEADS)), ids=lambda number: f"{HEADS[number]!s:.80}")
def test_a_head_that_is_all_it_may_be_is_answered_and_holds_up_no_other_client(front: Front, number: int) -> None:
    with connection(front.port) as opened:
        opened.sendall(head("GET", *HEADS[number]))
        assert front.get("/health/live").status == 200
        assert answer(opened).status in {200, 404, 422}


# ── floods ──

POURED = 100 * MB
FLAT = 16 * MB
"""What the process may grow by meanwhile: far less than was poured, more than an allocator's whims."""

CHUNKS = deposit_head(CHUNKED)
FLOODS = {
    "a body of 100 MB": (deposit_head(("Content-Length", str(POURED))), b"x"),
    "a body in chunks, without a length": (CHUNKS, b"10000\r\n" + b"x" * 65_536 + b"\r\n"),
    "a chunk's extension": (CHUNKS + b"1;", b"x"),
    "empty lines": (b"", b"\r\n"),
    "tiny chunks": (CHUNKS, b"1\r\n{\r\n"),
}
"""What each begins with, and what comes over and over."""


@pytest.mark.slow
@pytest.mark.parametrize("name", FLOODS)
def test_a_flood_is_refused_and_memory_stays_flat(front: Front, account: str, name: str) -> None:
    start, more = FLOODS[name]
    piece = more * max(1, 65_536 // len(more))
    memory = psutil.Process(front.pid).memory_info
    sizes = [memory().rss]

    def pieces() -> Iterator[bytes]:
        yield start
        for number in range(POURED // len(piece)):
            yield piece
            if number % 64 == 0:
                sizes.append(memory().rss)

    with connection(front.port) as opened:
        reply = pour(opened, pieces())
    sizes.append(memory().rss)
    assert max(sizes) - sizes[0] < FLAT
    if "body" in name:
        assert reply is None or (reply.status, reply.is_problem) == (413, True)
    assert front.command(account, "deposit", DEPOSIT).status == 200, "the next one is served"


# ── many, and gone ──


async def at_once(front: Front, account: str, number: int) -> Counter[int]:
    """So many commands and reads, half of them each, over connections that are open before: how often each status was answered."""
    statuses: Counter[int] = Counter()
    connecting, together = asyncio.Semaphore(100), asyncio.Barrier(number)

    async def one(request: bytes, key: str | None = None) -> None:
        said = b""
        try:
            async with connecting:
                reader, writer = await asyncio.open_connection(HOST, front.port, limit=2**20)
            await together.wait()
            writer.write(request)
            said = await reader.read()
            writer.close()
            statuses[int(said.split(b" ")[1])] += 1
        finally:
            if key:  # whatever became of it: what nobody was told may have happened
                reply = Reply(int(said.split(b" ")[1]), {}, said.partition(b"\r\n\r\n")[2]) if said else None
                front.hear(account, key, reply)

    close = ("Connection", "close")
    keys = [new_name("at-once-") for _ in range(number // 2)]
    commands = [one(deposit(("Idempotency-Key", key), close, to=f"/{account}/deposit"), key) for key in keys]
    reads = [one(head("GET", f"/views/balances?account={n}", [close])) for n in range(number // 2)]
    await asyncio.gather(*commands, *reads)
    return statuses


@pytest.mark.parametrize(
    "number", [pytest.param(500, marks=pytest.mark.slow), pytest.param(10_000, marks=pytest.mark.prove(part="chaos"))]
)
def test_many_requests_at_once_have_an_answer_each(front: Front, account: str, number: int) -> None:
    """What is too much is refused by 429, and the process finds no fault with its stores; memory stays flat."""
    server = psutil.Process(front.pid)
    before = server.memory_info().rss
    with ThreadPoolExecutor(1) as beside:
        asking = beside.submit(asyncio.run, at_once(front, account, number))
        while not asking.done():
            checks = front.get("/health/ready").json["checks"].values()
            assert {one["code"] for one in checks if not one["ok"]} <= {"blind"}, "which a slow machine is, too"
    statuses = asking.result()
    until(lambda: front.get("/health/ready").status == 200, "it is ready")
    grown = server.memory_info().rss - before
    print(f"{dict(statuses)}, {grown / MB:.0f} MB")
    assert statuses.keys() <= {200, 202, 429}
    assert (statuses.total(), statuses[200] > 0) == (number, True)
    assert grown < 400 * MB
    front.assert_true(account)


def test_clients_that_go_away_stop_nothing(front: Front, account: str) -> None:
    """In the midst of the head, of the body, and while they wait; what they asked for whole may happen, and is known by its key."""
    chance = Random(SEED)
    for _ in range(200):
        key = new_name("gone-")
        request = deposit(("Idempotency-Key", f'"{key}"'), to=f"/{account}/deposit")
        cut = chance.randint(1, len(request))
        with connection(front.port) as opened:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # ends with a reset
            opened.sendall(request[:cut])
        if cut == len(request):
            front.hear(account, key, None)
    assert front.command(account, "deposit", DEPOSIT).status == 200
    front.assert_true(account)


def test_the_same_key_fifty_times_at_once_is_one_effect_and_fifty_equal_answers(front: Front, account: str) -> None:
    key = new_name("key")
    with ThreadPoolExecutor(50) as many:
        replies = list(many.map(lambda _: front.command(account, "deposit", DEPOSIT, key=key), range(50)))
    answers = {json.dumps(reply.json | {"position": ""}, sort_keys=True) for reply in replies}
    assert ({reply.status for reply in replies}, len(answers)) == ({200}, 1)
    assert front.get(f"/views/balances/{account.partition('/')[2]}").json["row"]["cents"] == 100
    front.assert_true(account)
