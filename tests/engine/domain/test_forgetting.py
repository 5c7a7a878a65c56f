"""The keys of personal values on a real Kafka and PostgreSQL: one key per subject, and forgotten for good."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import threading
from base64 import b64encode
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest
from psycopg_pool import AsyncConnectionPool
from pydantic import TypeAdapter

from commands.client import send_all
from commands.intake import bad_name
from demo import tree
from demo.crew import Crew
from domain.language import SubjectId, fact
from infra.database.connect import Connection, connect
from infra.log import clients, topics
from infra.log.records import UnreadableRecord
from infra.log.topics import TopicChanged, TopicUnfit
from infra.personal import tokens
from infra.personal.keys import (
    BadSubject,
    DataKey,
    KeyRecord,
    Keys,
    KeysNotRead,
    SubjectForgotten,
    _encode,
    _name,
    require_subject,
)
from infra.personal.masters import MasterKeyUnusable, Masters, masters, new_line
from infra.processes import faultpoints
from infra.processes.faultpoints import Point
from infra.settings import Settings
from infra.testing.fixtures import ROOT, Samefold
from tests.engine.api.front import free_port, is_ready
from tests.engine.spine import command, commits, produce, records_of, until

ADA, BOB = "customers/ada", "customers/bob"
TABLES = ("personal_keys", "forgotten_subjects", "keys_position")
EMPTY: dict[str, list[Any]] = {table: [] for table in TABLES}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "master-key"
    path.touch(0o600)
    path.write_text(new_line("first") + "\n")
    return path


@pytest.fixture
def place(world: Settings, file: Path) -> Settings:
    found = world.model_copy(update={"master_key_file": file})
    topics.ensure_keys(found)
    return found


@pytest.fixture
def keys(place: Settings) -> Keys:
    return Keys(place)


@pytest.fixture
def db(place: Settings) -> Iterator[Connection]:
    with connect(place, "test") as connection:
        yield connection


class Killed(BaseException):
    """The process ends here."""


def killed_at(point: Point, monkeypatch: pytest.MonkeyPatch) -> None:
    def kill(reached: Point) -> None:
        if reached == point:
            faultpoints.hook = None
            raise Killed

    monkeypatch.setattr(faultpoints, "hook", kill)


def copied(db: Connection) -> dict[str, list[Any]]:
    return {table: db.execute(f"select * from {table} order by 1").fetchall() for table in TABLES}


def put_back(db: Connection, was: dict[str, list[Any]]) -> None:
    """The three tables as a backup has them."""
    with db.transaction():
        for table, rows in was.items():
            db.execute(f"delete from {table}")
            for row in rows:
                places = ", ".join(["%s"] * len(row))
                db.execute(f"insert into {table} values ({places})", row)


def opens(place: Settings, db: Connection, key: DataKey) -> bytes | None:
    """The key by its id, as a process has it that starts now."""
    keys = Keys(place)
    keys.start(db)
    return keys.keys_for(db, [key.id])[key.id]


def wrapped_in(place: Settings) -> set[str]:
    """Ids of the keys that are in the topic once compaction has been there."""
    last = {record.key: record.value for record in records_of(place, place.keys_topic)}
    return {json.loads(key or b"")[1] for key, value in last.items() if value and b'"key/1"' in value}


def late(place: Settings, subject: str, key_id: str = "00000000000000aa", **more: Any) -> None:
    """A record of a key that a process made long ago, and that gets to the topic now."""
    known = masters(place)
    record = KeyRecord(subject, key_id, known.first, known.wrap(bytes(32), subject, key_id), **more)
    produce(place, place.keys_topic, 0, _name(subject, key_id), _encode(record))


def test_a_subject_has_one_key(keys: Keys, place: Settings, db: Connection) -> None:
    made = keys.key_for(db, ADA)
    assert len(made.key) == 32
    assert keys.key_for(db, ADA) == made == Keys(place).key_for(db, ADA)
    assert keys.key_for(db, BOB) not in (made, DataKey(made.id, made.key))
    assert opens(place, db, made) == made.key
    assert made.key.hex() not in repr(made)
    stored = [record.value or b"" for record in records_of(place, place.keys_topic)]
    assert not any(made.key in value for value in stored)


def test_several_processes_that_make_a_key_at_once_use_one(place: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    count = 6
    barrier = threading.Barrier(count)

    def all_together(point: Point) -> None:
        if point == "key made":
            barrier.wait(60)

    def made(_: int) -> DataKey:
        with connect(place, "test") as connection:
            return Keys(place).key_for(connection, ADA)

    monkeypatch.setattr(faultpoints, "hook", all_together)
    with ThreadPoolExecutor(count) as pool:
        found = set(pool.map(made, range(count)))
    assert len(found) == 1
    assert len(wrapped_in(place)) == count


def test_two_keys_made_at_once_are_one_to_all_who_read_the_topic(
    keys: Keys, place: Settings, db: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second is in the topic before the first process has read its own."""
    won: list[DataKey] = []

    def overtaken(point: Point) -> None:
        if point == "key made" and not won:
            won.append(DataKey("", b""))
            with connect(place, "test") as other:
                won[0] = Keys(place).key_for(other, ADA)

    monkeypatch.setattr(faultpoints, "hook", overtaken)
    assert keys.key_for(db, ADA) == won[0]
    assert len(wrapped_in(place)) == 2


def test_another_process_may_copy_between_any_two_steps(
    keys: Keys, place: Settings, db: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys.catch_up(db)
    describe = topics.describe

    def overtaken(*arguments: Any, **options: Any) -> topics.Topic:
        found = describe(*arguments, **options)
        monkeypatch.setattr(topics, "describe", describe)
        with connect(place, "test") as other:
            Keys(place).key_for(other, BOB)
        return found

    monkeypatch.setattr(topics, "describe", overtaken)
    assert keys.key_for(db, ADA) == Keys(place).key_for(db, ADA)


def test_a_killed_process_leaves_a_key_that_the_next_one_uses(
    keys: Keys, place: Settings, db: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys.catch_up(db)
    killed_at("keys destroyed", monkeypatch)
    with pytest.raises(Killed):
        keys.key_for(db, ADA)
    [made] = wrapped_in(place)
    assert Keys(place).key_for(db, ADA).id == made


def test_forgetting_is_seen_at_once_by_all(keys: Keys, place: Settings, db: Connection) -> None:
    made, bobs = keys.key_for(db, ADA), keys.key_for(db, BOB)
    other = Keys(place)
    other.start(db)
    assert other.keys_for(db, [made.id]) == {made.id: made.key}
    assert keys.forget(db, ADA) == (ADA, 1, False)
    assert other.keys_for(db, [made.id, bobs.id]) == {made.id: None, bobs.id: bobs.key}
    for who in (keys, other):
        with pytest.raises(SubjectForgotten, match=ADA):
            who.key_for(db, ADA)
    token = tokens.sealed("Ada", *made, command_id="1", number=0)
    assert tokens.opened_text(token, other.keys_for(db, [made.id])) == "(forgotten)"
    assert wrapped_in(place) == {bobs.id}
    assert db.execute("select id from personal_keys where wrapped is not null").fetchall() == [(bobs.id,)]


def test_forgetting_again_and_forgetting_a_stranger_do_no_harm(keys: Keys, db: Connection) -> None:
    keys.key_for(db, ADA)
    assert [keys.forget(db, ADA) for _ in range(2)] == [(ADA, 1, False), (ADA, 0, True)]
    assert keys.forget(db, "customers/nobody") == ("customers/nobody", 0, False)
    with pytest.raises(SubjectForgotten):
        keys.key_for(db, "customers/nobody")


@pytest.mark.parametrize(
    "name", ["👨\u200d👩\u200d👧", "a\u00a0b", "\u202ea", "\ue000", 'O\'Brien "Q"', " ", "x" * 200, "--yes"]
)
def test_whoever_has_a_key_can_be_forgotten(name: str) -> None:
    @fact
    class About:
        whom: SubjectId

    require_subject(TypeAdapter(About).validate_json(json.dumps({"whom": name})).whom)
    stream = f"customers/{name}"[:200]
    assert bad_name(stream, "c") is None
    require_subject(stream)


@pytest.mark.parametrize("name", ["", "x" * 201, "a\nb", "\x00", "a\x85", "\udcff"])
def test_what_names_nobody_is_no_subject(name: str) -> None:
    with pytest.raises(BadSubject):
        require_subject(name)


def test_a_restored_database_forgets_again_and_gets_newer_keys_back(
    keys: Keys, place: Settings, db: Connection
) -> None:
    made = keys.key_for(db, ADA)
    backup = copied(db)
    keys.forget(db, ADA)
    newer = keys.key_for(db, BOB)
    now = copied(db)
    put_back(db, backup)
    assert opens(place, db, newer) == newer.key
    assert opens(place, db, made) is None
    assert copied(db)["personal_keys"] == now["personal_keys"]
    with pytest.raises(SubjectForgotten):
        Keys(place).key_for(db, ADA)


def test_an_empty_database_gets_all_keys_and_nobody_back(keys: Keys, place: Settings, db: Connection) -> None:
    made, bobs = keys.key_for(db, ADA), keys.key_for(db, BOB)
    keys.forget(db, ADA)
    put_back(db, EMPTY)
    assert (opens(place, db, made), opens(place, db, bobs)) == (None, bobs.key)


def test_a_database_that_is_restored_beneath_a_process_brings_nobody_back(
    keys: Keys, place: Settings, db: Connection
) -> None:
    made = keys.key_for(db, ADA)
    backup = copied(db)
    keys.start(db)
    keys.forget(db, ADA)

    async def shown() -> dict[str, bytes | None]:
        async with await psycopg.AsyncConnection.connect(place.database, autocommit=True) as connection:
            return await keys.keys_for_async(connection, [made.id])

    for was in (backup, EMPTY):
        put_back(db, was)
        with pytest.raises(KeysNotRead):
            asyncio.run(shown())
        assert keys.keys_for(db, [made.id]) == {made.id: None}
        assert asyncio.run(shown()) == {made.id: None}


def test_a_page_that_is_read_while_keys_are_made_is_no_older_database(
    keys: Keys, place: Settings, db: Connection
) -> None:
    made = keys.key_for(db, ADA)
    keys.start(db)

    class Overtaken:
        """A connection whose rows arrive after another request's key was copied."""

        def __init__(self, connection: psycopg.AsyncConnection[Any]) -> None:
            self._connection = connection

        async def execute(self, *arguments: Any) -> Any:
            found = await self._connection.execute(*arguments)
            keys.key_for(db, BOB)
            return found

    async def shown() -> dict[str, bytes | None]:
        async with await psycopg.AsyncConnection.connect(place.database, autocommit=True) as connection:
            overtaken: Any = Overtaken(connection)
            return await keys.keys_for_async(overtaken, [made.id])

    assert asyncio.run(shown()) == {made.id: made.key}


def test_many_subjects_get_their_keys_at_once(keys: Keys, place: Settings, db: Connection) -> None:
    """Each by itself would take some requests to Kafka, one after the other."""
    keys.forget(db, BOB)
    names = {f"customers/{number}" for number in range(2_000)}
    before = topics.ensure_keys(place).end[0]
    made = keys.keys_of(db, names | {BOB})
    assert made.pop(BOB) is None
    assert len({one.id for one in made.values() if one}) == len(made) == len(names)
    assert keys.keys_of(db, names) == made == Keys(place).keys_of(db, names)
    assert topics.ensure_keys(place).end[0] == before + len(names)


def test_requests_that_need_new_keys_at_once_ask_kafka_together(
    keys: Keys, place: Settings, db: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys.start(db)
    keys.forget(db, BOB)
    asked: list[int] = []
    keys_of = keys.keys_of

    def counted(connection: Connection, subjects: Any) -> Any:
        asked.append(len(subjects))
        return keys_of(connection, subjects)

    monkeypatch.setattr(keys, "keys_of", counted)
    names = [f"customers/{number}" for number in range(40)]

    async def all_at_once() -> list[Any]:
        async with AsyncConnectionPool(place.database, kwargs={"autocommit": True}, max_size=4) as pool:
            wanted = (keys.key_for_async(pool, name) for name in [*names, names[0], BOB])
            return await asyncio.gather(*wanted, return_exceptions=True)

    *found, again, bobs = asyncio.run(all_at_once())
    assert found[0] == again
    assert found == [Keys(place).key_for(db, name) for name in names]
    assert isinstance(bobs, SubjectForgotten)
    assert len(asked) < 10


def test_no_key_is_given_out_before_the_topic_was_read(keys: Keys, place: Settings, db: Connection) -> None:
    made = keys.key_for(db, ADA)
    with pytest.raises(KeysNotRead):
        Keys(place).keys_for(db, [made.id])


def test_a_key_that_the_table_lacks_is_looked_for_in_the_topic(keys: Keys, place: Settings, db: Connection) -> None:
    keys.start(db)
    backup = copied(db)
    made = keys.key_for(db, ADA)
    put_back(db, backup)
    until(lambda: keys.keys_for(db, [made.id]) == {made.id: made.key}, "it is there")
    assert keys.keys_for(db, ["00000000000000bb"]) == {"00000000000000bb": None}


def test_a_late_key_of_a_forgotten_subject_is_void_and_destroyed(keys: Keys, place: Settings, db: Connection) -> None:
    keys.forget(db, ADA)
    late(place, ADA)
    assert opens(place, db, DataKey("00000000000000aa", b"")) is None
    assert wrapped_in(place) == set()
    with pytest.raises(SubjectForgotten):
        keys.key_for(db, ADA)


def test_a_killed_process_leaves_no_key_of_a_forgotten_subject(
    keys: Keys, place: Settings, db: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    points: tuple[Point, ...] = ("forgetting recorded", "keys destroyed")
    for number, point in enumerate(points):
        subject = f"{ADA}{number}"
        keys.key_for(db, subject)
        killed_at(point, monkeypatch)
        with pytest.raises(Killed):
            keys.forget(db, subject)
        Keys(place).catch_up(db)
        assert wrapped_in(place) == set()
        with pytest.raises(SubjectForgotten):
            Keys(place).key_for(db, subject)


def test_a_key_made_beside_forgetting_is_not_used(
    keys: Keys, place: Settings, db: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forgotten_first(point: Point) -> None:
        if point == "key made":
            with connect(place, "test") as other:
                Keys(place).forget(other, ADA)

    monkeypatch.setattr(faultpoints, "hook", forgotten_first)
    with pytest.raises(SubjectForgotten):
        keys.key_for(db, ADA)
    assert wrapped_in(place) == set()


def test_rotation_leaves_every_key_as_it_was(keys: Keys, place: Settings, db: Connection, file: Path) -> None:
    late(place, ADA, "00000000000000a1")
    late(place, ADA, "00000000000000a0")
    made = [keys.key_for(db, subject) for subject in (ADA, BOB)]
    assert made[0].id == "00000000000000a1"
    old = file.read_text()
    file.write_text(f"{new_line('second')}\n{old}")
    progress: list[int] = []
    assert keys.rotate(db, progress.append) == 3
    assert progress == [3]
    assert keys.rotate(db, progress.append) == 0
    file.write_text(file.read_text().splitlines()[0])
    for one in made:
        assert opens(place, db, one) == one.key
    put_back(db, EMPTY)
    assert [Keys(place).key_for(db, subject) for subject in (ADA, BOB)] == made


def test_a_rotation_that_is_killed_half_way_puts_no_key_before_another(
    keys: Keys, place: Settings, db: Connection
) -> None:
    """Compaction removed the first key's first record, and its next one stands behind the second key's."""
    produce(place, place.keys_topic, 0, b"[]", b"removed")
    late(place, ADA, "00000000000000a0")
    late(place, ADA, "00000000000000a1", at=0)
    assert keys.key_for(db, ADA).id == "00000000000000a1"


def test_a_rotation_beside_forgetting_brings_nobody_back(
    keys: Keys, place: Settings, db: Connection, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, bobs = keys.key_for(db, ADA), keys.key_for(db, BOB)
    file.write_text(f"{new_line('second')}\n{file.read_text()}")

    def forgotten_first(point: Point) -> None:
        if point == "keys wrapped again":
            with connect(place, "test") as other:
                Keys(place).forget(other, ADA)

    monkeypatch.setattr(faultpoints, "hook", forgotten_first)
    assert keys.rotate(db, lambda _: None) == 2
    assert (opens(place, db, made), opens(place, db, bobs)) == (None, bobs.key)
    assert wrapped_in(place) == {bobs.id}
    put_back(db, EMPTY)
    assert (opens(place, db, made), opens(place, db, bobs)) == (None, bobs.key)


FIRST = f"first {b64encode(bytes(32)).decode()}"


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        (None, "can't be read"),
        ("", "has no key"),
        ("# nothing\n\n", "has no key"),
        ("first", "Line 1"),
        ("first AAAA", "Line 1"),
        (f"{FIRST}\n{FIRST}", "Line 2"),
        ("first not-base64!", "Line 1"),
    ],
)
def test_a_missing_or_malformed_master_key_is_refused(
    place: Settings, file: Path, text: str | None, wrong: str
) -> None:
    if text is None:
        file.unlink()
    else:
        file.write_text(text)
    with pytest.raises(MasterKeyUnusable, match=wrong) as refusal:
        Keys(place)
    assert refusal.value.exit_code == 2
    with pytest.raises(MasterKeyUnusable, match="names no file"):
        Keys(place.model_copy(update={"master_key_file": None}))


def test_a_wrong_master_key_is_refused_and_nothing_is_shown(
    keys: Keys, place: Settings, db: Connection, file: Path
) -> None:
    made = keys.key_for(db, ADA)
    keys.start(db)
    for text, wrong in ((new_line("other"), "master key 'first'"), (new_line("first"), "'first' is not the one")):
        file.write_text(text)
        for fails in (lambda: Keys(place).start(db), lambda: keys.keys_for(db, [made.id])):
            with pytest.raises(MasterKeyUnusable, match=wrong) as refusal:
                fails()
            assert text.split()[1] not in str(refusal.value)


def test_a_file_that_is_wrong_for_a_while_wraps_no_key(keys: Keys, place: Settings, db: Connection, file: Path) -> None:
    """Nobody could unwrap it once the file is right again: two keys in a file can't have one name."""
    right = file.read_text()
    keys.start(db)
    made = keys.key_for(db, ADA)
    for wrong in (new_line("first"), new_line("other")):
        file.write_text(wrong)
        with pytest.raises(MasterKeyUnusable, match="'first'"):
            keys.key_for(db, BOB)
    file.write_text(right + new_line("second"))
    assert keys.key_for(db, BOB).id in wrapped_in(place)
    file.write_text(new_line("second"))
    with pytest.raises(MasterKeyUnusable, match="'first'"):
        keys.rotate(db, lambda _: None)
    file.write_text(right)
    assert opens(place, db, made) == made.key


def test_two_files_with_another_key_under_one_name_do_not_wrap_side_by_side(
    keys: Keys, place: Settings, db: Connection
) -> None:
    """No file could open all of it: two keys in a file can't have one name."""
    keys.start(db)  # there is nothing to check yet
    wrapped = Masters({"first": bytes(32)}).wrap(bytes(32), ADA, "00000000000000aa")
    record = KeyRecord(ADA, "00000000000000aa", "first", wrapped)
    produce(place, place.keys_topic, 0, _name(ADA, record.id), _encode(record))
    with pytest.raises(MasterKeyUnusable, match="'first'"):
        keys.key_for(db, BOB)


def test_a_wrapped_key_belongs_to_its_subject() -> None:
    known = Masters({"first": bytes(32)})
    wrapped = known.wrap(bytes(range(32)), ADA, "1")
    assert known.unwrap(wrapped, "first", ADA, "1") == bytes(range(32))
    for other in ((BOB, "1"), (ADA, "2")):
        with pytest.raises(MasterKeyUnusable):
            known.unwrap(wrapped, "first", *other)


def test_a_recreated_topic_is_refused(keys: Keys, place: Settings, db: Connection) -> None:
    made = keys.key_for(db, ADA)
    admin = clients.admin(place)
    admin.delete_topics([place.keys_topic])[place.keys_topic].result(30)
    until(lambda: place.keys_topic not in admin.list_topics(timeout=10).topics, "it is gone")
    with pytest.raises(TopicChanged, match="was recreated"):
        Keys(place).start(db)
    assert keys.key_for(db, ADA) == made


def test_a_restored_topic_is_taken_when_the_position_is_deleted(keys: Keys, place: Settings, db: Connection) -> None:
    made = keys.key_for(db, ADA)
    keys.key_for(db, BOB)
    keys.forget(db, BOB)
    backup = records_of(place, place.keys_topic)
    admin = clients.admin(place)
    admin.delete_topics([place.keys_topic])[place.keys_topic].result(30)
    until(lambda: place.keys_topic not in admin.list_topics(timeout=10).topics, "it is gone")
    topics.ensure_keys(place)
    for record in backup:
        produce(place, place.keys_topic, 0, record.key or b"", record.value)
    with pytest.raises(TopicChanged, match="was recreated"):
        Keys(place).start(db)
    db.execute("delete from keys_position")
    assert opens(place, db, made) == made.key
    with pytest.raises(SubjectForgotten):
        Keys(place).key_for(db, BOB)


def test_foreign_records_change_nothing_and_an_unknown_format_stops(
    keys: Keys, place: Settings, db: Connection
) -> None:
    made = keys.key_for(db, ADA)
    for key, value in ((None, b"hello"), (b"[]", b'{"subject":"x"}'), (b"key", None), (b"[1,2]", None)):
        produce_any(place, key, value)
    assert opens(place, db, made) == made.key
    produce_any(place, b"[]", b'{"samefold":"key/2"}')
    with pytest.raises(UnreadableRecord, match="offset 5"):
        keys.catch_up(db)


def produce_any(place: Settings, key: bytes | None, value: bytes | None) -> None:
    produce(place, place.keys_topic, 0, key or b"x", value)


def test_an_id_that_two_subjects_drew_stays_the_firsts(keys: Keys, place: Settings, db: Connection) -> None:
    made = keys.key_for(db, ADA)
    late(place, BOB, made.id)
    assert opens(place, db, made) == made.key
    assert keys.key_for(db, BOB).id != made.id


def test_the_topic_is_compacted_soon_and_is_checked(place: Settings) -> None:
    topic = topics.ensure_keys(place)
    assert (topic.partitions, topics.ensure_keys(place).id) == (1, topic.id)
    for other, wrong in ((place.events_topic, "cleanup.policy"), (place.commands_topic, "cleanup.policy")):
        topics.ensure(place)
        with pytest.raises(TopicUnfit, match=wrong):
            topics.ensure_keys(place.model_copy(update={"keys_topic": other}))


def test_forget_and_rotate_on_the_command_line(
    samefold: Samefold, keys: Keys, place: Settings, db: Connection, file: Path
) -> None:
    made = keys.key_for(db, ADA)
    asked = samefold("forget", ADA, settings=place, given="n\n")
    assert (asked.returncode, opens(place, db, made)) == (1, made.key)
    done = samefold("forget", ADA, "--yes", "--json", settings=place)
    assert json.loads(done.stdout) == {"subject": ADA, "keys": 1, "before": False}
    assert "forgotten before" in samefold("forget", ADA, "--yes", settings=place).stdout
    assert "Nothing was found" in samefold("forget", "customers/x", "--yes", settings=place).stdout
    assert samefold("forget", "a\nb", "--yes", settings=place).stderr.startswith("bad-subject")
    line = samefold("keys", "new", "--name", "second").stdout
    bobs = keys.key_for(db, BOB)
    file.write_text(line + file.read_text())
    told = json.loads(samefold("keys", "rotate", "--json", settings=place).stdout)
    assert told == {"master": "second", "wrapped": 1, "left": 0}
    file.write_text(line)
    assert opens(place, db, bobs) == bobs.key
    file.write_text(new_line("third"))
    refused = samefold("keys", "rotate", settings=place)
    assert refused.returncode == 2
    assert "'second'" in refused.stderr


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tree with a context that has personal fields."""
    folder = tmp_path_factory.mktemp("code")
    for package in tree.PACKAGES:
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    text = (ROOT / "tests/engine/domain/customers.py").read_text()
    (folder / "domain" / "customers.py").write_text(
        text.partition("CUSTOMERS = ")[0]
        .replace("from infra.domain_model.contexts import context_of\n", "")
        .replace("import sys\n", "")
    )
    return folder


def run(code: Path, place: Settings, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """`samefold` with that code."""
    return subprocess.run(
        [sys.executable, "-c", "from infra.cli import main; main()", *arguments],
        env=os.environ | tree.environment(code) | place.environment(),
        cwd=code,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        **options,
    )


@pytest.fixture
def service(place: Settings, code: Path, tmp_path: Path) -> Iterator[httpx.Client]:
    """Of a handler, an agent and an API."""
    run(code, place, "db", "revision", "-m", "customers")
    upgraded = run(code, place, "db", "upgrade")
    assert upgraded.returncode == 0, upgraded.stderr
    topics.ensure(place)
    port = free_port()
    with Crew(
        place,
        tmp_path / "logs",
        handler_count=1,
        agent_count=1,
        policies_count=0,
        api_port=port,
        environment=tree.environment(code),
    ):
        url = f"http://127.0.0.1:{port}"
        until(lambda: is_ready(url), "the API is ready", seconds=60)
        with httpx.Client(base_url=url, timeout=20) as client:
            yield client


def post(client: httpx.Client, path: str, body: Any, key: str) -> httpx.Response:
    return client.post(path, json=body, headers={"Idempotency-Key": f'"{key}"'})


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_service_seals_and_forgets(
    service: httpx.Client, place: Settings, code: Path, db: Connection, tmp_path: Path
) -> None:
    body: dict[str, Any] = {"name": "Quillfeather", "addresses": [{"street": "Quill Lane"}], "notes": {"a": "Quill"}}
    first = post(service, "/customers/q/register", body, "1")
    assert first.status_code == 200, first.text
    # again, and once more in another order: the first answer, not `key-reused`
    for again in (body, dict(reversed(body.items()))):
        assert post(service, "/customers/q/register", again, "1").json() == first.json()
    assert post(service, "/customers/q/register", body | {"name": "Nightshade"}, "1").json()["code"] == "key-reused"

    wrong = post(service, "/customers/q/register", body | {"name": "Quill\n"}, "2")
    assert (wrong.status_code, wrong.json()["errors"][0]["at"]) == (422, "name")
    [sealed] = [one for one in commits(place) if one.command_id == "1"]
    stolen = json.loads(bytes(sealed.events[0].data))["name"]
    for field in ({"name": stolen}, {"addresses": [{"street": "x", "country": stolen}]}):
        refused = post(service, "/customers/r/register", body | field, "3")
        assert (refused.status_code, refused.json()["code"]) == (422, "invalid")

    # plain text that gets past the edges
    send_all(place, [command("customers/q", "4", "Register", **body)], lambda _: None)
    until(lambda: any(one.command_id == "4" for one in commits(place)), "it is decided")
    [plain] = [one for one in commits(place) if one.command_id == "4"]
    assert plain.reason is not None
    assert plain.reason.code == "malformed"

    file = tmp_path / "letters.jsonl"
    line = {"stream": "customers/l", "id": "5", "type": "WriteLetter", "data": {"customer": "q2", "text": "Dear Quill"}}
    file.write_text(json.dumps(line))
    for before in (0, 1):
        sent = json.loads(run(code, place, "send", str(file), "--wait", "--json").stdout)
        assert (sent["accepted"], sent["answered_before"], sent["other_body"]) == (1, before, 0)
    leaked = post(service, "/customers/l/write-letter", {"customer": "q2", "text": "Quill", "leak": True}, "6")
    assert (leaked.status_code, leaked.json()["code"]) == (500, "failed")

    logged = b"".join(record.value or b"" for record in records_of(place, place.events_topic))
    assert b"Quill" not in logged
    assert "Quill" not in "".join(log.read_text() for log in (tmp_path / "logs").iterdir())
    assert db.execute("select count(*) from streams_customers_v1 where state::text like '%%Quill%%'").fetchone() == (0,)

    told = run(code, place, "forget", "customers/q", "--yes", "--json")
    assert json.loads(told.stdout)["keys"] == 1
    gone = post(service, "/customers/q/register", body, "7")
    assert (gone.status_code, gone.json()["code"]) == (410, "subject-forgotten")
    assert run(code, place, "send", str(file)).returncode == 0, "another subject's"
    theirs = {"stream": "customers/q", "id": "8", "type": "Register", "data": {"name": "Quill"}}
    file.write_text(json.dumps(line | {"id": "9"}) + "\n" + json.dumps(theirs))
    told = run(code, place, "send", str(file))
    assert told.returncode == 1
    assert f"subject-forgotten: {file}, line 2: 'customers/q'" in told.stderr
    assert "Nothing was sent." in told.stderr


@pytest.mark.slow
def test_a_command_that_can_not_be_appended_asks_for_no_key(
    place: Settings, code: Path, db: Connection, tmp_path: Path
) -> None:
    """While Kafka is away, requests would wait for it, one after the other."""
    run(code, place, "db", "upgrade")
    topics.ensure(place)
    port = free_port()
    alone: dict[str, Any] = {
        "handler_count": 0,
        "agent_count": 0,
        "policies_count": 0,
        "environment": tree.environment(code),
    }
    with (
        Crew(place, tmp_path / "logs", api_port=port, **alone),
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=20) as client,
    ):

        def refused() -> bool:
            with suppress(httpx.TransportError):
                found = post(client, "/customers/q/register", {"name": "Quillfeather"}, "1")
                return (found.json()["code"], found.json().get("appended")) == ("read-model-not-set-up", "no")
            return False

        until(refused, "the API answers", seconds=60)
    assert copied(db)["personal_keys"] == []


@pytest.mark.slow
def test_an_api_without_its_master_key_refuses_to_start(
    place: Settings, code: Path, file: Path, db: Connection
) -> None:
    def started(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments],
            env=os.environ | tree.environment(code) | place.environment(),
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )

    Keys(place).key_for(db, ADA)
    line = file.read_text()
    for text, wrong in ((line.replace("first", "other"), "'first'"), (new_line("first"), "'first' is not the one")):
        file.write_text(text)
        refused = started("-m", "api", "--port", "0")
        assert (refused.returncode, wrong in refused.stderr) == (2, True), refused.stderr
    file.unlink()
    for command_ in (("-m", "api", "--port", "0"), ("-c", "from infra.cli import main; main()", "run", "api")):
        refused = started(*command_)
        assert refused.returncode == 2, refused.stderr
        assert "SAMEFOLD_MASTER_KEY_FILE" in refused.stderr
