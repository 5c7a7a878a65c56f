"""A whole service with personal fields: the name is nowhere but at the edges, and not even there once its person is forgotten.

It is looked for in all files of Kafka and PostgreSQL, of the archive and of the logs, and by reading all topics, tables and
archived files, since files may be compressed. That it would be found there is shown by a word next to it that is not personal.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
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

from infra.dev.stack import Stack
from infra.personal.masters import new_line
from infra.personal.tokens import FALLBACK, PREFIX
from tests.engine.api.front import free_port
from tests.engine.pages.pages import is_ready
from tests.engine.policies.test_webhooks import SECRET, Receiver, receiver  # noqa: F401  # a fixture
from tests.engine.spine import until
from tests.engine.tools.service_trees import SAMEFOLD, Tree

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.integration, pytest.mark.xdist_group("services")]

NAME, EMAIL = "Zephyrine Quillfeather-Ödland", "zephyrine@quillfeather.example"
OTHER = "Bartholomew Nightshade"
NEEDLES = ("Quillfeather", "quillfeather", "Zephyrine", "zephyrine", "Nightshade", "Bartholomew")
CONTROL = "kestrelcontrol"
SOMEONE = "a former guest"

FILES = {
    "domain/guests.py": '''
"""Guests of a hotel: who they are, and how many nights they have booked."""

from dataclasses import dataclass, replace
from typing import Annotated, TypeAlias, assert_never

from pydantic import Field

from domain.language import Personal, PersonalText, Refusal, Text, fact

Nights = Annotated[int, Field(ge=1, le=1000)]
Name = Annotated[Text, PersonalText("a former guest")]


@fact
class GuestRegistered:
    name: Name
    email: Personal[Text]
    source: Text


@fact
class NightsBooked:
    nights: Nights


Event: TypeAlias = GuestRegistered | NightsBooked


@fact
class Register:
    name: Name
    email: Personal[Text] = ""
    source: Text = ""


@fact
class Book:
    nights: Nights


Command: TypeAlias = Register | Book


class AlreadyRegistered(Refusal):
    """The guest is known already."""


STATE_VERSION = 2


@dataclass(frozen=True, slots=True)
class State:
    name: str = ""
    nights: int = 0


def decide(command: Command, state: State) -> list[Event]:
    match command:
        case Register(name=name, email=email, source=source):
            if state.name:
                raise AlreadyRegistered
            return [GuestRegistered(name=name, email=email, source=source)]
        case Book(nights=nights):
            return [NightsBooked(nights=nights)]
        case _:
            assert_never(command)


def evolve(state: State, event: Event) -> State:
    match event:
        case GuestRegistered(name=name):
            return replace(state, name=name)
        case NightsBooked(nights=nights):
            return replace(state, nights=state.nights + nights)
        case _:
            assert_never(event)
''',
    "domain/letters.py": '''
"""Letters to guests."""

from dataclasses import dataclass
from typing import TypeAlias

from domain.language import Personal, Refusal, Text, fact


@fact
class LetterWritten:
    to: Personal[Text]
    salutation: str


Event: TypeAlias = LetterWritten


@fact
class WriteLetter:
    to: Personal[Text]


Command: TypeAlias = WriteLetter


class OneIsEnough(Refusal):
    """The guest has a letter."""


STATE_VERSION = 1


@dataclass(frozen=True, slots=True)
class State:
    written: int = 0


def decide(command: Command, state: State) -> list[Event]:
    if state.written:
        raise OneIsEnough
    return [LetterWritten(to=command.to, salutation=f"Dear {command.to},")]


def evolve(state: State, event: Event) -> State:
    return State(state.written + 1)
''',
    "policies/welcome.py": '''
"""A guest gets a letter, now and next year; two other systems are told."""

from collections.abc import Iterable
from datetime import timedelta

from domain.guests import GuestRegistered
from domain.letters import WriteLetter
from policies.engine import At, Post, Send

VERSION = 1


def react(event: GuestRegistered, at: At) -> Iterable[Send | Post]:
    yield Send(f"letters/{at.id}", WriteLetter(to=event.name))
    yield Send(f"letters/{at.id}-again", WriteLetter(to=event.name), due=at.time + timedelta(days=365))
    body = {"guest": at.id, "name": event.name, "text": f"{event.name} <{event.email}>", "source": event.source}
    yield Post("crm", body)
    yield Post("later", body)
''',
    "policies/public.py": '''
"""What other teams may read: that a guest came, with a name that they can only compare."""

from collections.abc import Iterable

from domain.guests import GuestRegistered
from domain.language import Personal, Text, fact
from policies.engine import At, Public

VERSION = 1


@fact
class Came:
    """A guest came."""

    guest: str
    name: Personal[Text]
    source: str


TYPES = {"guest-came.v1": Came}


def publish(event: GuestRegistered, at: At) -> Iterable[Public]:
    yield Public("guest-came.v1", Came(guest=at.id, name=event.name, source=event.source))
''',
    "projections/guest_names.py": '''
"""Who are the guests? One row per guest."""

from typing import NamedTuple

from domain.guests import Event, GuestRegistered, NightsBooked
from projections.engine import At, Key

VERSION = 2  # the first one came with the service


class GuestName(NamedTuple):
    guest: Key[str]
    name: str
    email: str
    source: str
    nights: int


def evolve(row: GuestName | None, event: Event, at: At) -> GuestName | None:
    row = row or GuestName(at.id, "", "", "", 0)
    match event:
        case GuestRegistered(name=name, email=email, source=source):
            return row._replace(name=name, email=email, source=source)
        case NightsBooked(nights=nights):
            return row._replace(nights=row.nights + nights)
''',
    "projections/badges.py": '''
"""What is written on a guest's badge? One row per guest; none stays for 13 nights."""

from typing import NamedTuple

from domain.guests import Event, GuestRegistered, NightsBooked
from projections.engine import At, Key

VERSION = 1
ON_POISON = "park"


class Badge(NamedTuple):
    guest: Key[str]
    text: str


def evolve(row: Badge | None, event: Event, at: At) -> Badge | None:
    match event:
        case GuestRegistered(name=name):
            return Badge(at.id, f"{name} ({at.id})")
        case NightsBooked(nights=13) if row:
            raise ValueError(f"13 nights for {row.text}")
        case _:
            return row
''',
    "projections/letter_list.py": '''
"""Which letters are written? One row per letter."""

from typing import NamedTuple

from domain.letters import LetterWritten
from projections.engine import At, Key

VERSION = 1


class Letter(NamedTuple):
    letter: Key[str]
    to: str
    salutation: str


def evolve(row: Letter | None, event: LetterWritten, at: At) -> Letter | None:
    return Letter(at.id, event.to, event.salutation)
''',
}


class Hotel:
    """The service, its stack's folder, and what it is asked."""

    def __init__(self, tree: Tree, folder: Path, receiver: Receiver) -> None:  # noqa: F811
        self.tree = tree
        self.folder = folder
        self.receiver = receiver
        self.stack = Stack(folder)
        self.client = httpx.Client(timeout=60)

    def json(self, *arguments: str, code: int | None = 0) -> Any:
        return json.loads(self.tree.samefold(*arguments, "--json", code=code).stdout)

    def post(self, path: str, key: str, **body: Any) -> httpx.Response:
        return self.client.post(path, json=body, headers={"Idempotency-Key": f'"{key}"'})

    def row(self, view: str, key: str) -> Any:
        answer = self.client.get(f"/views/{view}/{quote(key)}")
        return answer.json().get("row") or answer.json()["code"]

    @contextmanager
    def up(self) -> Iterator[None]:
        """Kafka and PostgreSQL alone."""
        self.stack.up()
        try:
            yield
        finally:
            self.stack.down()

    @contextmanager
    def running(self, **webhooks: str) -> Iterator[None]:
        """What `make run` runs, with webhooks to these endpoints."""
        port = free_port()
        self.tree.use(self.folder, port)
        endpoints = {name: {"url": self.receiver.url(path), "secret": SECRET} for name, path in webhooks.items()}
        self.tree.environment["SAMEFOLD_WEBHOOKS"] = json.dumps(endpoints)
        self.client.base_url = httpx.URL(f"http://127.0.0.1:{port}")
        with (self.folder / "run.log").open("ab") as log:
            command = [sys.executable, "-c", SAMEFOLD, "dev", "run"]
            process = subprocess.Popen(command, cwd=self.tree.folder, env=self.tree.environment, stdout=log, stderr=log)
        try:
            until(lambda: process.poll() is not None or is_ready(self.client), "the service is ready", seconds=120)
            assert process.poll() is None, (self.folder / "run.log").read_text()[-5_000:]
            yield
        except AssertionError:
            print((self.folder / "run.log").read_text()[-8_000:])
            raise
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0, (self.folder / "run.log").read_text()[-5_000:]

    def execute(self, statement: str, database: str = "samefold") -> list[tuple[Any, ...]]:
        with psycopg.connect(self.stack.postgres.url(database), autocommit=True) as connection:
            cursor = connection.execute(statement.encode())
            return cursor.fetchall() if cursor.description else []

    # ── where a word is ──

    def places(self, *words: str) -> set[str]:
        """Where any of these words is, as it is or as base64 or hex would write it."""
        forms = {form for word in words for form in _forms(word)}
        self.execute("checkpoint")
        return {*self._files(forms), *self._topics(forms), *self._tables(forms), *self._archived(forms)}

    def _files(self, forms: set[bytes]) -> Iterator[str]:
        for folder in (self.folder, self.tree.folder / "domain"):
            for file in folder.rglob("*"):
                if file.is_file() and not file.is_symlink() and _holds(_content(file), forms):
                    yield f"file {file.relative_to(folder).parts[0]}"

    def _topics(self, forms: set[bytes]) -> Iterator[str]:
        consumer = Consumer(
            {"bootstrap.servers": self.stack.kafka.bootstrap, "group.id": "search", "enable.partition.eof": True}
            | {"auto.offset.reset": "earliest", "isolation.level": "read_uncommitted"}
        )
        known = consumer.list_topics(timeout=30).topics
        left = [TopicPartition(name, number, 0) for name, topic in known.items() for number in topic.partitions]
        consumer.assign(left)
        open_ones = {(one.topic, one.partition) for one in left}
        while open_ones:
            message = consumer.poll(30)
            assert message is not None, f"not read to the end: {open_ones}"
            error, topic = message.error(), str(message.topic())
            if error is not None:
                assert error.code() == KafkaError._PARTITION_EOF, error
                open_ones.discard((topic, message.partition()))
            elif _holds(b"\n".join(_bytes(message)), forms):
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
                if any(_holds(row.encode(), forms) for (row,) in rows):
                    yield f"table {table}"

    def _archived(self, forms: set[bytes]) -> Iterator[str]:
        for file in (self.folder / "archive").rglob("*.parquet"):
            rows = pyarrow.parquet.read_table(file).to_pylist()
            if any(_holds(_flat(row), forms) for row in rows):
                yield "archive"

    # ── what is shown ──

    def shown(self) -> dict[str, Any]:
        """What each edge shows of ada."""
        waiting = self.json("outbox", "list")["wishes"]
        ids = {one["state"]: one["id"] for one in waiting if one["stream"] == "guests/ada"}
        assert ids.keys() == {"dead", "waiting"}
        history = [
            json.loads(line) for line in self.tree.samefold("history", "guests/ada", "--json").stdout.splitlines()
        ]
        letter = [
            json.loads(line) for line in self.tree.samefold("history", "letters/ada", "--json").stdout.splitlines()
        ]
        parked = self.json("parked", "show", "badges", "guests/ada")
        [listed] = [row for row in self.client.get("/views/guest_names").json()["items"] if row["guest"] == "ada"]
        return {
            "row": self.row("guest_names", "ada"),
            "page": listed,
            "letter": self.row("letter_list", "ada"),
            "history": history[0]["events"][0]["data"],
            "letter's history": letter[0]["events"][0]["data"],
            "dead letter": self.json("outbox", "show", ids["dead"])["body"],
            "timer": self.json("outbox", "show", ids["waiting"])["body"],
            "parked": parked["error"],
        }

    def require_clean(self) -> None:
        found = self.json("verify")
        assert (found["differences"], found["commits"] > 0) == (0, True), found


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


def _bytes(message: Any) -> list[bytes]:
    headers = [value for _, value in message.headers() or [] if value]
    return [part for part in (message.key(), message.value(), *headers) if part]


def _flat(row: Any) -> bytes:
    match row:
        case dict():
            return b"\n".join(_flat(one) for one in row.values())
        case list() | tuple():
            return b"\n".join(map(_flat, row))
        case bytes():
            return row
        case _:
            return str(row).encode()


@pytest.fixture
def hotel(source: Tree, home: Path, data: Path, tmp_path: Path, receiver: Receiver) -> Iterator[Hotel]:  # noqa: F811
    folder = tmp_path / "hotel"
    source.samefold("new", str(folder), "--context", "guests")
    for name, text in FILES.items():
        (folder / name).write_text(text.lstrip())
    tree = Tree(folder, home)
    tree.use(data)
    master = tmp_path / "master.keys"
    master.write_text(new_line("first") + "\n")
    master.chmod(0o600)
    tree.environment["SAMEFOLD_MASTER_KEY_FILE"] = str(master)
    made = Hotel(tree, data, receiver)
    try:
        with made.up():
            tree.samefold("db", "upgrade")
            tree.samefold("db", "revision", "-m", "guests")
        yield made
    finally:
        made.client.close()
        made.stack.down()


def test_a_name_is_nowhere_but_at_the_edges_and_then_not_there_either(hotel: Hotel, tmp_path: Path) -> None:
    with hotel.running(crm="crm/ok"):
        _live(hotel, tmp_path)
        before = hotel.shown()
        assert before["row"] == {"guest": "ada", "name": NAME, "email": EMAIL, "source": CONTROL, "nights": 16}
        assert before["page"] == before["row"]
        _require_shown(before, NAME, EMAIL, NAME)
        [told] = [request for request in hotel.receiver.got("crm") if request["body"]["guest"] == "ada"]
        assert told["verified"]
        assert (told["body"]["name"], told["body"]["text"]) == (NAME, f"{NAME} <{EMAIL}>")
        _require_nowhere(hotel, _made_again(hotel))
        hotel.require_clean()
    with hotel.up():
        hotel.execute('create database "before" template samefold', "postgres")
    with hotel.running(crm="crm/ok"):
        numbers = hotel.client.get("/views/guest_names?limit=10").json()
        verifying = subprocess.Popen(
            [sys.executable, "-c", SAMEFOLD, "verify", "--json"],
            cwd=hotel.tree.folder, env=hotel.tree.environment, stdout=subprocess.PIPE,
        )  # fmt: skip
        tag = hotel.client.get("/views/guest_names/ada").headers["ETag"]
        forgotten = hotel.json("forget", "guests/ada", "--yes")
        assert forgotten["keys"] == 1
        again = hotel.client.get("/views/guest_names/ada", headers={"If-None-Match": tag})
        assert (again.status_code, again.json()["row"]["name"]) == (200, SOMEONE)
        assert json.loads(verifying.communicate(timeout=120)[0])["differences"] == 0
        _require_forgotten(hotel, before)
        assert hotel.client.get("/views/guest_names?limit=10").json()["items"] == [
            row if row["guest"] != "ada" else row | {"name": SOMEONE, "email": FALLBACK} for row in numbers["items"]
        ]
        hotel.json("rebuild", "guest_names", "--engine", "local")
        assert hotel.row("guest_names", "ada") == before["row"] | {"name": SOMEONE, "email": FALLBACK}
        hotel.require_clean()
        assert hotel.places(*NEEDLES) == set()
        refused = hotel.post("/guests/ada/register", "late", name=NAME)
        assert (refused.status_code, refused.json()["code"]) == (410, "subject-forgotten")
        assert hotel.post("/guests/ada/book", "four", nights=4).status_code == 200
        assert hotel.row("guest_names", "ada")["nights"] == 20
    _require_restored_forgets(hotel)


def _live(hotel: Hotel, tmp_path: Path) -> None:
    """All that can happen to a personal value, up to what each process makes of it."""
    registered = hotel.post("/guests/ada/register", "r1", name=NAME, email=EMAIL, source=CONTROL)
    assert registered.status_code == 200, registered.text
    repeated = hotel.post("/guests/ada/register", "r1", name=NAME, email=EMAIL, source=CONTROL)
    assert (repeated.status_code, repeated.json()) == (200, registered.json())
    assert hotel.post("/guests/ada/register", "r1", name=OTHER, email=EMAIL, source=CONTROL).status_code == 422
    assert hotel.post("/guests/ada/register", "r2", name=NAME).json()["code"] == "already-registered"
    assert hotel.post("/guests/ada/register", "r3", name=NAME * 20).status_code == 422
    assert hotel.post("/guests/ada/register", "r4", name=NAME, nick=NAME).status_code == 422
    for nights in (3, 13):
        assert hotel.post("/guests/ada/book", f"b{nights}", nights=nights).status_code == 200
    token = hotel.execute("select name from guest_names")[0][0]
    assert token.startswith(PREFIX)
    stolen = hotel.post("/guests/eve/register", "r5", name="Eve", source=token)
    assert stolen.status_code == 422, "a sealed value of another's would be opened for who sends it"
    lines = tmp_path / "commands.jsonl"
    one = {"stream": "guests/bob", "id": "b1", "type": "Register", "data": {"name": OTHER, "email": "", "source": ""}}
    lines.write_text(json.dumps(one))
    assert hotel.json("send", str(lines), "--wait")["accepted"] == 1
    until(lambda: len(hotel.receiver.got("crm")) == 2, "the webhooks arrive", 60)
    for guest in ("ada", "bob"):
        until(lambda guest=guest: hotel.row("letter_list", guest) != "no-row", "the letters are written", 60)  # type: ignore[misc]
    until(lambda: hotel.row("badges", "ada") == "parked", "a stream is parked")
    until(lambda: len(hotel.json("outbox", "list", "--dead")["wishes"]) == 2, "the other webhooks are dead letters", 60)


def _made_again(hotel: Hotel) -> set[str]:
    """Archive the log, rebuild with both engines, and build a table of the past; the tables of guests."""
    hotel.json("archive")
    made = hotel.json("rebuild", "guest_names", "letter_list", "--engine", "local")
    assert made["switch"], made
    hotel.json("rebuild", "guest_names", "letter_list", "--engine", "spark", "--master", "local[2]")
    now = datetime.now(UTC).isoformat()
    hotel.json("rebuild", "guest_names", "--as-of", now, "--no-switch", "--engine", "local")
    return {name for (name,) in hotel.execute("select tablename from pg_tables where tablename like 'guest_names_v2%'")}


def _require_shown(shown: dict[str, Any], name: str, email: str, letters: str) -> None:
    """`letters`: what letters show, whose command got the value from a policy, with its fallback."""
    assert (shown["row"]["name"], shown["row"]["email"]) == (name, email)
    assert shown["letter"] == {"letter": "ada", "to": letters, "salutation": f"Dear {letters},"}
    assert (shown["history"]["name"], shown["history"]["email"]) == (name, email)
    assert shown["letter's history"] == {"to": letters, "salutation": f"Dear {letters},"}
    body = {"guest": "ada", "name": name, "text": f"{name} <{email}>", "source": CONTROL}
    assert shown["dead letter"] == body
    assert shown["timer"] == {"to": letters}
    assert f"13 nights for {name} (ada)" in shown["parked"]
    assert PREFIX not in json.dumps(shown)


def _require_forgotten(hotel: Hotel, before: dict[str, Any]) -> None:
    after = hotel.shown()
    assert after["row"] == before["row"] | {"name": SOMEONE, "email": FALLBACK}
    assert not any(needle in json.dumps(after, ensure_ascii=False) for needle in NEEDLES)
    _require_shown(after, SOMEONE, FALLBACK, SOMEONE)
    assert hotel.row("guest_names", "bob")["name"] == OTHER, "nobody else is forgotten"


def _require_nowhere(hotel: Hotel, tables: set[str]) -> None:
    service = hotel.tree.folder.name
    found = hotel.places(CONTROL)
    topics = {f"topic {service}.{name}" for name in ("commands", "events", "public")}
    assert topics | {"file kafka", "file postgres", "archive", "table outbox"} <= found
    assert {f"table {name}" for name in tables} <= found
    assert len(tables) >= 3, "a first one, one rebuilt, one of the past"
    assert hotel.places(*NEEDLES) == set()
    assert _holds(hotel.receiver.journal.read_bytes(), _forms(NEEDLES[0])), "what a webhook's receiver has is found"


def _require_restored_forgets(hotel: Hotel) -> None:
    """A database from before the forgetting, in which the key still is, forgets again; a dead letter leaves without the name."""
    with hotel.up():
        hotel.execute("drop database samefold", "postgres")
        hotel.execute('alter database "before" rename to samefold', "postgres")
        assert hotel.execute("select count(*) from personal_keys where wrapped is not null") == [(2,)]
    with hotel.running(crm="crm/ok", later="later/ok"):
        seen: list[Any] = []  # rows, or why there is none yet

        def has_caught_up() -> bool:
            seen.append(hotel.row("guest_names", "ada"))
            return isinstance(seen[-1], dict) and bool(seen[-1]["nights"] == 20)

        until(has_caught_up, "it has caught up", 60)
        assert seen[-1]["name"] == SOMEONE
        assert NAME not in repr(seen), "it is not shown before the keys are caught up either"
        assert hotel.execute("select count(*) from personal_keys where wrapped is not null") == [(1,)]
        dead = [one["id"] for one in hotel.json("outbox", "list", "--dead")["wishes"]]
        hotel.json("outbox", "retry", *dead)
        until(lambda: len(hotel.receiver.got("later")) == 2, "they are delivered", 60)
        bodies = {request["body"]["guest"]: request["body"] for request in hotel.receiver.got("later")}
        assert (bodies["ada"]["name"], bodies["ada"]["text"]) == (SOMEONE, f"{SOMEONE} <{FALLBACK}>")
        assert bodies["bob"]["name"] == OTHER
        hotel.require_clean()
        assert hotel.places(*NEEDLES) == set()
