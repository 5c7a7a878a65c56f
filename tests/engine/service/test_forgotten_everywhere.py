"""make prove: a whole service, and all its files are searched.

A name is nowhere but at the edges, and not even there once its person is forgotten.

It is looked for in all files of Kafka and PostgreSQL, of the archive and of the logs, and by reading all topics, tables and
archived files, since files may be compressed. That it would be found there is shown by a word next to it that is not personal.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import psycopg
import pyarrow.parquet
import pytest
from confluent_kafka import Consumer, KafkaError, TopicPartition
from psycopg import sql

from domain.engine.personal.tokens import FALLBACK, PREFIX
from tests.engine.pages.pages import Author, author  # noqa: F401  # a fixture
from tests.engine.policies.test_webhooks import SECRET, Receiver, receiver  # noqa: F401  # a fixture
from tools.dev.stack import Stack
from tools.testing.fixtures import ROOT
from tools.testing.waiting import DEADLINE_S, until

pytestmark = [pytest.mark.prove(part="new-services"), pytest.mark.integration, pytest.mark.xdist_group("services")]

NAME, MAIL = "Zephyrine Quillfeather-Ödland", "zephyrine@quillfeather.example"
OTHER = "Bartholomew Nightshade"
NEEDLES = ("Quillfeather", "quillfeather", "Zephyrine", "zephyrine", "Nightshade", "Bartholomew")
CONTROL = "kestrelcontrol"
SOMEONE = "a former customer"

CUSTOMERS = (ROOT / "tests/engine/domain/customers.py").read_text().partition("CUSTOMERS = ")[0]
FILES = {
    "domain/customers.py": CUSTOMERS.replace("import sys\n", "").replace(
        "from domain.engine.contexts import context_of\n", ""
    ),
    "policies/welcome.py": '''
"""A customer gets a letter, now and next year; two other systems are told."""

from collections.abc import Iterable
from datetime import timedelta

from domain.customers import CustomerRegistered, WriteLetter
from policies.engine import At, Post, Send

VERSION = 1


def react(event: CustomerRegistered, at: At) -> Iterable[Send | Post]:
    letter = WriteLetter(customer=f"customers/{at.id}", text=event.name)
    yield Send(f"customers/{at.id}-letter", letter)
    yield Send(f"customers/{at.id}-later", letter, due=at.time + timedelta(days=365))
    body = {"customer": at.id, "text": f"{event.name} <{event.mail}>", "country": event.addresses[0].country}
    yield Post("crm", body)
    yield Post("later", body)
''',
    "policies/public.py": '''
"""What other teams may read: that a customer came, with a name that they can only compare."""

from collections.abc import Iterable

from domain.customers import CustomerRegistered
from domain.language import Personal, Text, fact
from policies.engine import At, Public

VERSION = 1


@fact
class Came:
    """A customer came."""

    name: Personal[Text]
    country: str


TYPES = {"customer-came.v1": Came}


def publish(event: CustomerRegistered, at: At) -> Iterable[Public]:
    yield Public("customer-came.v1", Came(name=event.name, country=event.addresses[0].country))
''',
    "projections/names.py": '''
"""Who are the customers, and how much was written? One row per stream."""

from typing import NamedTuple

from domain.customers import CustomerRegistered, Event, LetterWritten
from projections.engine import At, Key

VERSION = 1


class Name(NamedTuple):
    stream: Key[str]
    name: str
    country: str
    pages: int


def evolve(row: Name | None, event: Event, at: At) -> Name | None:
    row = row or Name(at.id, "", "", 0)
    match event:
        case CustomerRegistered(name=name, mail=mail, addresses=addresses):
            return row._replace(name=f"{name} <{mail}>", country=addresses[0].country)
        case LetterWritten(pages=pages):
            return row._replace(pages=row.pages + pages)
''',
    "projections/letters.py": '''
"""What was written last? One row per stream; nobody writes 13 pages."""

from typing import NamedTuple

from domain.customers import LetterWritten
from projections.engine import At, Key

VERSION = 1
ON_POISON = "park"


class Letter(NamedTuple):
    stream: Key[str]
    text: str
    subject: str


def evolve(row: Letter | None, event: LetterWritten, at: At) -> Letter | None:
    if event.pages == 13:
        raise ValueError(f"13 pages {event.subject}")
    return Letter(at.id, event.text, event.subject)
''',
}


class Shop:
    """The service, what it is asked, and all that it keeps."""

    def __init__(self, author: Author, folder: Path, receiver: Receiver) -> None:  # noqa: F811
        self.author = author
        self.folder = folder
        self.receiver = receiver
        self.stack = Stack(folder)
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{author.port}", timeout=DEADLINE_S)

    def samefold(self, *arguments: str, code: int | None = 0) -> str:
        return self.author.service.samefold(*arguments, code=code).stdout

    def json(self, *arguments: str) -> Any:
        return json.loads(self.samefold(*arguments, "--json"))

    def post(self, path: str, key: str, **body: Any) -> tuple[int, Any]:
        answer = self.client.post(f"/customers/{path}", json=body, headers={"Idempotency-Key": f'"{key}"'})
        return answer.status_code, answer.json().get("code")

    def row(self, view: str, key: str) -> Any:
        answer = self.client.get(f"/views/{view}/{quote(key)}").json()
        return answer.get("row") or answer["code"]

    def run(self) -> None:
        """What `make run` runs, with an endpoint for `crm` and none for `later`."""
        endpoints = {"crm": {"url": self.receiver.url("crm/ok"), "secret": SECRET}}
        self.author.service.environment["SAMEFOLD_WEBHOOKS"] = json.dumps(endpoints)
        self.author.restart()

    def execute(self, statement: str) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.stack.postgres.url(), autocommit=True) as connection:
            cursor = connection.execute(statement.encode())
            return cursor.fetchall() if cursor.description else []

    def posts(self) -> list[str]:
        """Ids of the posts that no endpoint takes."""
        return [id_ for (id_,) in self.execute("select id from posts")]

    def shown(self) -> dict[str, Any]:
        """What edges show of ada."""
        left = (
            "select 'waiting', id from outbox where stream = 'customers/ada'"
            " union all select 'post', id from posts where stream = 'customers/ada'"
        )
        bodies = {state: self.json("outbox", "show", wish)["body"] for state, wish in self.execute(left)}
        first = json.loads(self.samefold("history", "customers/ada", "--json").splitlines()[0])
        return bodies | {
            "row": self.row("names", "ada"),
            "letter": self.row("letters", "ada-letter"),
            "parked": self.json("parked", "show", "letters", "customers/ada")["error"],
            "history": first["events"][0]["data"]["addresses"],
        }

    # ── where a word is ──

    def places(self, *words: str) -> set[str]:
        """Where any of these words is, as it is or as base64 or hex would write it."""
        forms = {form for word in words for form in _forms(word)}
        self.execute("checkpoint")
        return {*self._files(forms), *self._topics(forms), *self._tables(forms), *self._archived(forms)}

    def _files(self, forms: set[bytes]) -> Iterator[str]:
        for file in self.folder.rglob("*"):
            if file.is_file() and not file.is_symlink() and _holds(_content(file), forms):
                yield f"file {file.relative_to(self.folder).parts[0]}"

    def _topics(self, forms: set[bytes]) -> Iterator[str]:
        consumer = Consumer(
            {"bootstrap.servers": self.stack.kafka.bootstrap, "group.id": "search", "enable.partition.eof": True}
            | {"auto.offset.reset": "earliest", "isolation.level": "read_uncommitted"}
        )
        known = consumer.list_topics(timeout=DEADLINE_S).topics
        left = [TopicPartition(name, number, 0) for name, topic in known.items() for number in topic.partitions]
        consumer.assign(left)
        open_ones = {(one.topic, one.partition) for one in left}
        while open_ones:
            message = consumer.poll(DEADLINE_S)
            assert message is not None, f"not read to the end: {open_ones}"
            error, topic = message.error(), str(message.topic())
            if error is not None:
                assert error.code() == KafkaError._PARTITION_EOF, error
                open_ones.discard((topic, message.partition()))
            elif _holds(_flat([message.key(), message.value(), message.headers()]), forms):
                yield f"topic {topic}"
        consumer.close()

    def _tables(self, forms: set[bytes]) -> Iterator[str]:
        with psycopg.connect(self.stack.postgres.url(), autocommit=True) as connection:
            tables = connection.execute(
                "select schemaname, tablename from pg_tables where schemaname not in ('pg_catalog', 'information_schema')"
            ).fetchall()
            assert len(tables) > 10
            for schema, table in tables:
                rows = connection.execute(sql.SQL("select t::text from {} t").format(sql.Identifier(schema, table)))
                if _holds(_flat(rows.fetchall()), forms):
                    yield f"table {table}"

    def _archived(self, forms: set[bytes]) -> Iterator[str]:
        for file in (self.folder / "archive").rglob("*.parquet"):
            if _holds(_flat(pyarrow.parquet.read_table(file).to_pylist()), forms):
                yield "archive"

    def require_right_and_nowhere(self) -> None:
        found = self.json("verify", "--engine", "local")
        assert (found["differences"], found["commits"] > 0) == (0, True), found
        assert self.places(*NEEDLES) == set()


def _forms(word: str) -> set[bytes]:
    plain = word.encode()
    found = {plain, plain.hex().encode()}
    for shift in range(3):  # base64 of it within something longer: the first and last letters depend on the neighbours
        found.add(b64encode(b"\0" * shift + plain)[4 if shift else 0 :][:-4])
    return found


def _holds(content: bytes, forms: set[bytes]) -> bool:
    return any(form in content for form in forms)


def _content(file: Path) -> bytes:
    try:
        return file.read_bytes().rstrip(b"\0")  # most of an index of Kafka's is not written yet
    except FileNotFoundError:  # Kafka and PostgreSQL are running
        return b""


def _flat(value: Any) -> bytes:
    match value:
        case dict():
            return _flat(list(value.values()))
        case list() | tuple():
            return b"\n".join(map(_flat, value))
        case bytes():
            return value
        case _:
            return str(value).encode()


def expected(name: str, mail: str, letter: str) -> dict[str, Any]:
    """What edges show of ada. `letter`: what a letter shows that the policy did not write."""
    return {
        "row": {"stream": "ada", "name": f"{name} <{mail}>", "country": CONTROL, "pages": 14},
        "letter": {"stream": "ada-letter", "text": name, "subject": f"Re: {name}"},
        "history": [{"street": letter if letter == FALLBACK else "Quillfeather Lane", "country": CONTROL}],
        "post": {"customer": "ada", "text": f"{name} <{mail}>", "country": CONTROL},
        "waiting": {"customer": "customers/ada", "text": name, "pages": 1, "leak": False},
        "parked": f"ValueError: 13 pages Re: {letter}",
    }


@pytest.fixture
def shop(author: Author, data: Path, receiver: Receiver) -> Iterator[Shop]:  # noqa: F811
    for name, text in FILES.items():
        (author.service.folder / name).write_text(text.lstrip())
    made = Shop(author, data, receiver)
    made.samefold("dev", "up")
    made.samefold("db", "upgrade")
    made.samefold("db", "revision", "-m", "customers")
    yield made
    made.client.close()


SPARK = pytest.param(("spark", "--master", "local[2]"), id="spark")
"""It has files of its own."""


@pytest.mark.parametrize("engine", [pytest.param(("local",), id="local"), SPARK])
def test_a_name_is_nowhere_but_at_the_edges_and_then_not_there_either(
    shop: Shop, tmp_path: Path, engine: Sequence[str]
) -> None:
    shop.run()
    _live(shop, tmp_path / "commands.jsonl")
    assert shop.shown() == expected(NAME, MAIL, NAME)
    [told] = [request["body"] for request in shop.receiver.got("crm") if request["body"]["customer"] == "ada"]
    assert told == expected(NAME, MAIL, NAME)["post"]
    _make_again(shop, *engine)
    _require_search_finds(shop)
    assert shop.places(*NEEDLES) == set()
    assert shop.json("forget", "customers/ada", "--yes")["keys"] == 1
    gone = expected(SOMEONE, FALLBACK, FALLBACK)
    assert shop.shown() == gone
    assert shop.row("names", "bob")["name"] == f"{OTHER} <>", "nobody else is forgotten"
    shop.json("rebuild", "names", "--engine", "local")
    assert shop.row("names", "ada") == gone["row"]
    assert shop.post("ada/register", "late", name=NAME) == (410, "subject-forgotten")
    assert shop.post("ada/write-letter", "four", customer="customers/bob", text=OTHER, pages=4)[0] == 200
    assert shop.row("names", "ada") == gone["row"] | {"pages": 18}
    shop.require_right_and_nowhere()
    shop.author.stop()
    shop.samefold("dev", "status", code=1)


def _live(shop: Shop, file: Path) -> None:
    """All that can happen to a personal value, up to what each process makes of it."""
    body: dict[str, Any] = {
        "name": NAME,
        "mail": MAIL,
        "addresses": [{"street": "Quillfeather Lane", "country": CONTROL}],
    }
    for again in (body, dict(reversed(body.items()))):
        assert shop.post("ada/register", "r1", **again) == (200, None)
    assert shop.post("ada/register", "r1", **body | {"name": OTHER}) == (422, "key-reused")
    for wrong in ({"name": NAME * 20}, {"name": f"{NAME}\n"}, {"nick": NAME}):
        assert shop.post("ada/register", "r2", **body | wrong) == (422, "invalid")
    [(token,)] = shop.execute("select name from names where stream = 'ada'")
    assert token.startswith(PREFIX)
    for stolen in ({"name": token}, {"addresses": [{"street": "x", "country": token}]}):
        assert shop.post("eve/register", "r3", **body | stolen) == (422, "invalid"), (
            "it would be opened for who sends it"
        )
    letter = {"customer": "customers/ada", "text": NAME}
    assert shop.post("ada/write-letter", "w1", **letter) == (200, None)
    assert shop.post("ada/write-letter", "w2", **letter, pages=13) == (200, None)
    assert shop.post("ada/write-letter", "w3", **letter, leak=True) == (500, "failed")
    bob = {"name": OTHER, "addresses": [{"street": "", "country": ""}]}
    file.write_text(json.dumps({"stream": "customers/bob", "id": "b1", "type": "Register", "data": bob}))
    for before in (0, 1):
        sent = shop.json("send", str(file), "--wait")
        assert (sent["accepted"], sent["answered_before"], sent["other_body"]) == (1, before, 0)
    until(lambda: len(shop.receiver.got("crm")) == 2, "the webhooks arrive")
    for customer in ("ada", "bob"):
        until(lambda who=customer: shop.row("letters", f"{who}-letter") != "no-row", "letters are written")  # type: ignore[misc]
    until(lambda: shop.row("letters", "ada") == "parked", "a stream is parked")
    until(lambda: len(shop.posts()) == 2, "the other webhooks wait for an endpoint")


def _make_again(shop: Shop, *engine: str) -> None:
    """Archive the log, rebuild, and build a table of the past."""
    shop.json("archive")
    assert shop.json("rebuild", "names", "letters", "--engine", *engine)["switch"]
    shop.json("rebuild", "names", "--as-of", datetime.now(UTC).isoformat(), "--no-switch", "--engine", "local")


def _require_search_finds(shop: Shop) -> None:
    found, service = shop.places(CONTROL), shop.author.service.folder.name
    topics = {f"topic {service}.{name}" for name in ("commands", "events", "public")}
    assert topics | {"file kafka", "file postgres", "archive", "table posts"} <= found
    tables = {
        f"table {name}" for (name,) in shop.execute("select tablename from pg_tables where tablename like 'names_v1%'")
    }
    assert tables <= found
    assert len(tables) >= 3, "a first one, one rebuilt, one of the past"
    assert _holds(shop.receiver.journal.read_bytes(), _forms(NEEDLES[0])), "what a webhook's receiver has is found"
