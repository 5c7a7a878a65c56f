"""make test + test-all: main ways first. The keys of personal values: one for each subject, and forgotten for good."""

from __future__ import annotations

import asyncio
import json
from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg_pool import AsyncConnectionPool
from pydantic import TypeAdapter

from commands.intake import bad_name
from domain.engine.personal.keys import (
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
from domain.engine.personal.masters import MasterKeyUnusable, Masters, masters, new_line
from domain.language import SubjectId
from infra.database.connect import Connection, connect
from infra.log import clients, topics
from infra.log.records import UnreadableRecord
from infra.log.topics import TopicChanged, TopicUnfit
from infra.processes import faultpoints
from infra.processes.faultpoints import Point
from infra.settings import Settings
from tests.engine.spine import produce, records_of
from tools.testing.fixtures import Samefold
from tools.testing.waiting import DEADLINE_S, until

ADA, BOB = "customers/ada", "customers/bob"
TABLES = ("personal_keys", "forgotten_subjects", "keys_position")
EMPTY: dict[str, list[Any]] = {table: [] for table in TABLES}


class Killed(BaseException):
    """The process ends here."""


class Vault:
    """A topic of keys, its tables, the file of the master key, and a process that uses them."""

    def __init__(self, settings: Settings, db: Connection, file: Path, patch: pytest.MonkeyPatch) -> None:
        self.settings = settings
        self.db = db
        self.file = file
        self.patch = patch
        topics.ensure_keys(settings)
        self.keys = Keys(settings)

    def key(self, subject: str) -> DataKey:
        return self.keys.key_for(self.db, subject)

    def forget(self, subject: str = ADA) -> None:
        self.keys.forget(self.db, subject)

    def started(self) -> Keys:
        """A process that starts now."""
        keys = Keys(self.settings)
        keys.start(self.db)
        return keys

    def opens(self, key: DataKey) -> bytes | None:
        """The key by its id, as a process has it that starts now."""
        return self.started().keys_for(self.db, [key.id])[key.id]

    def shown(self, keys: Keys, key: DataKey, meanwhile: Callable[[], object] = lambda: None) -> bytes | None:
        """The same as the API has it, where something happens before the rows arrive."""

        async def ask() -> bytes | None:
            async with await psycopg.AsyncConnection.connect(self.settings.database, autocommit=True) as connection:
                execute = connection.execute

                async def executed(*arguments: Any) -> Any:
                    found = await execute(*arguments)
                    meanwhile()
                    return found

                self.patch.setattr(connection, "execute", executed)
                return (await keys.keys_for_async(connection, [key.id]))[key.id]

        return asyncio.run(ask())

    def another(self, does: Callable[[Keys, Connection], object]) -> None:
        """What another process does."""
        with connect(self.settings, "test") as other:
            does(Keys(self.settings), other)

    def at(self, point: Point, does: Callable[[], object]) -> None:
        """It happens when the process reaches the point for the first time."""

        def reached(now: Point) -> None:
            if now == point:
                self.patch.setattr(faultpoints, "hook", None)
                does()

        self.patch.setattr(faultpoints, "hook", reached)

    def killed_at(self, point: Point, does: Callable[[str], object]) -> None:
        def kill() -> None:
            raise Killed

        self.at(point, kill)
        with pytest.raises(Killed):
            does(ADA)

    def tables(self) -> dict[str, list[Any]]:
        return {table: self.db.execute(f"select * from {table} order by 1").fetchall() for table in TABLES}

    def put_back(self, was: dict[str, list[Any]]) -> None:
        """The three tables as a backup has them."""
        with self.db.transaction():
            for table, rows in was.items():
                self.db.execute(f"delete from {table}")
                for row in rows:
                    self.db.execute(f"insert into {table} values ({', '.join(['%s'] * len(row))})", row)

    def wrapped(self) -> set[str]:
        """Ids of the keys that are in the topic once compaction has been there."""
        last = {record.key: record.value for record in records_of(self.settings, self.settings.keys_topic)}
        return {json.loads(key or b"")[1] for key, value in last.items() if value and b'"key/1"' in value}

    def produce(self, key: bytes, value: bytes | None) -> None:
        produce(self.settings, self.settings.keys_topic, 0, key, value)

    def late(self, subject: str, key_id: str, known: Masters | None = None, **more: Any) -> DataKey:
        """A key that a process made long ago, whose record gets to the topic now."""
        known = known or masters(self.settings)
        record = KeyRecord(subject, key_id, known.first, known.wrap(bytes(32), subject, key_id), **more)
        self.produce(_name(subject, key_id), _encode(record))
        return DataKey(key_id, bytes(32))

    def put_master_first(self) -> str:
        """A new master key before the others; its line."""
        line = new_line("second")
        self.file.write_text(f"{line}\n{self.file.read_text()}")
        return line


@pytest.fixture
def vault(world: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Vault]:
    (file := tmp_path / "master-key").touch(0o600)
    file.write_text(new_line("first") + "\n")
    with connect(world, "test") as db:
        yield Vault(world.model_copy(update={"master_key_file": file}), db, file, monkeypatch)


# ── forgotten for good ──


def _restored(vault: Vault) -> None:
    backup = vault.tables()
    vault.forget()
    vault.put_back(backup)


def _late_key(vault: Vault) -> None:
    vault.forget()
    vault.late(ADA, "00000000000000aa")


def _rotation_beside(vault: Vault) -> None:
    vault.put_master_first()
    vault.at("keys wrapped again", lambda: vault.another(lambda keys, db: keys.forget(db, ADA)))
    assert vault.keys.rotate(vault.db, lambda _: None) == 2


WAYS: dict[str, Callable[[Vault], object]] = {
    "at_once": Vault.forget,
    "restored": _restored,
    "late_key": _late_key,
    "killed_when_recorded": lambda vault: vault.killed_at("forgetting recorded", vault.forget),
    "killed_when_destroyed": lambda vault: vault.killed_at("keys destroyed", vault.forget),
    "rotation_beside": _rotation_beside,
}


@pytest.mark.slow_but("at_once", "late_key")
@pytest.mark.parametrize("way", WAYS)
def test_who_is_forgotten_stays_so_to_all_and_nobody_else_is(vault: Vault, way: str) -> None:
    adas, bobs = vault.key(ADA), vault.key(BOB)
    both, left = dict([adas, bobs]), {adas.id: None, bobs.id: bobs.key}
    running = vault.started()
    assert running.keys_for(vault.db, both) == both
    WAYS[way](vault)
    for _ in range(2):
        for keys in (vault.started(), running):
            assert keys.keys_for(vault.db, both) == left
            assert {key.id: vault.shown(keys, key) for key in (adas, bobs)} == left
            with pytest.raises(SubjectForgotten, match=ADA):
                keys.key_for(vault.db, ADA)
            assert keys.key_for(vault.db, BOB) == bobs
            assert keys.forget(vault.db, ADA) == (ADA, 0, True)
        assert vault.wrapped() == {bobs.id}
        assert vault.db.execute("select id from personal_keys where wrapped is not null").fetchall() == [(bobs.id,)]
        vault.put_back(EMPTY)


def test_a_key_made_beside_forgetting_is_not_used(vault: Vault) -> None:
    vault.at("key made", lambda: vault.another(lambda keys, db: keys.forget(db, ADA)))
    with pytest.raises(SubjectForgotten):
        vault.key(ADA)
    assert vault.wrapped() == set()


def test_a_database_that_is_restored_beneath_a_process_brings_nobody_back(vault: Vault) -> None:
    made = vault.key(ADA)
    backup = vault.tables()
    vault.keys.start(vault.db)
    vault.forget()
    for was in (backup, EMPTY):
        vault.put_back(was)
        with pytest.raises(KeysNotRead):
            vault.shown(vault.keys, made)
        assert vault.keys.keys_for(vault.db, [made.id]) == {made.id: None}
        assert vault.shown(vault.keys, made) is None


def test_a_page_that_is_read_while_keys_are_made_is_no_older_database(vault: Vault) -> None:
    made = vault.key(ADA)
    vault.keys.start(vault.db)
    assert vault.shown(vault.keys, made, lambda: vault.key(BOB)) == made.key


@pytest.mark.parametrize(
    "name", ["👨\u200d👩\u200d👧", "a\u00a0b", "\u202ea", "\ue000", 'O\'Brien "Q"', " ", "x" * 200, "--yes"]
)
def test_whoever_has_a_key_can_be_forgotten(name: str) -> None:
    stream = f"customers/{name}"[:200]
    assert bad_name(stream, "c") is None
    for subject in (stream, TypeAdapter(SubjectId).validate_json(json.dumps(name))):
        require_subject(subject)


@pytest.mark.parametrize("name", ["", "x" * 201, "a\nb", "\x00", "a\x85", "\udcff"])
def test_what_names_nobody_is_no_subject(name: str) -> None:
    with pytest.raises(BadSubject):
        require_subject(name)


# ── one key for each subject ──


def _made_twice_at_once(vault: Vault) -> DataKey:
    """The other's is in the topic before the first process has read its own."""
    won: list[DataKey] = []
    vault.at("key made", lambda: vault.another(lambda keys, db: won.append(keys.key_for(db, ADA))))
    assert vault.key(ADA) == won[0]
    assert len(vault.wrapped()) == 2
    return won[0]


def _copied_between_two_steps(vault: Vault) -> DataKey:
    vault.keys.catch_up(vault.db)
    describe = topics.describe

    def overtaken(*arguments: Any, **options: Any) -> topics.Topic:
        found = describe(*arguments, **options)
        vault.patch.setattr(topics, "describe", describe)
        vault.another(lambda keys, db: keys.key_for(db, BOB))
        return found

    vault.patch.setattr(topics, "describe", overtaken)
    return vault.key(ADA)


def _made_by_one_that_was_killed(vault: Vault) -> DataKey:
    vault.keys.catch_up(vault.db)
    vault.killed_at("keys destroyed", vault.key)
    [made] = vault.wrapped()
    return DataKey(made, vault.key(ADA).key)


def _made_after_the_backup(vault: Vault) -> DataKey:
    vault.forget(BOB)
    backup = vault.tables()
    made = vault.key(ADA)
    vault.put_back(backup)
    return made


def _with_an_id_that_another_drew_too(vault: Vault) -> DataKey:
    made = vault.key(ADA)
    vault.late(BOB, made.id)
    vault.started()
    assert vault.key(BOB).id != made.id
    return made


def _rotated(vault: Vault) -> DataKey:
    first = vault.late(ADA, "00000000000000a1")
    vault.late(ADA, "00000000000000a0")
    assert vault.key(ADA) == first
    bobs = vault.key(BOB)
    line = vault.put_master_first()
    progress: list[int] = []
    assert [vault.keys.rotate(vault.db, progress.append) for _ in range(2)] == [3, 0]
    assert progress == [3]
    vault.file.write_text(line)
    assert vault.opens(bobs) == bobs.key
    return first


def _rotated_half_way(vault: Vault) -> DataKey:
    """Compaction removed the first key's first record, and its next one stands behind the second key's."""
    vault.produce(b"[]", b"removed")
    vault.late(ADA, "00000000000000a0")
    return vault.late(ADA, "00000000000000a1", at=0)


KEYS: dict[str, Callable[[Vault], DataKey]] = {
    "made": lambda vault: vault.key(ADA),
    "made_twice_at_once": _made_twice_at_once,
    "copied_between_two_steps": _copied_between_two_steps,
    "made_by_one_that_was_killed": _made_by_one_that_was_killed,
    "made_after_the_backup": _made_after_the_backup,
    "with_an_id_that_another_drew_too": _with_an_id_that_another_drew_too,
    "rotated_half_way": _rotated_half_way,
}


def require_the_same(vault: Vault, made: DataKey) -> None:
    for _ in range(2):
        assert (vault.started().key_for(vault.db, ADA), vault.key(ADA)) == (made, made)
        assert vault.opens(made) == made.key
        vault.put_back(EMPTY)


@pytest.mark.slow_but("made", "made_twice_at_once")
@pytest.mark.parametrize("way", KEYS)
def test_a_subject_has_one_key_to_all_and_to_an_empty_database(vault: Vault, way: str) -> None:
    require_the_same(vault, KEYS[way](vault))


def test_rotation_leaves_every_key_as_it_was(vault: Vault) -> None:
    require_the_same(vault, _rotated(vault))


def test_keys_differ_and_are_wrapped_in_the_topic_and_not_shown(vault: Vault) -> None:
    adas, bobs = vault.key(ADA), vault.key(BOB)
    assert len({adas.id, bobs.id}) == len({adas.key, bobs.key}) == 2
    assert len(adas.key) == 32
    assert adas.key.hex() not in repr(adas)
    stored = [record.value or b"" for record in records_of(vault.settings, vault.settings.keys_topic)]
    assert not any(adas.key in value for value in stored)


def test_requests_that_need_new_keys_at_once_ask_kafka_together(vault: Vault) -> None:
    vault.keys.start(vault.db)
    vault.forget(BOB)
    asked: list[int] = []
    keys_of = vault.keys.keys_of

    def counted(connection: Connection, subjects: Any) -> Any:
        asked.append(len(subjects))
        return keys_of(connection, subjects)

    vault.patch.setattr(vault.keys, "keys_of", counted)
    names = [f"customers/{number}" for number in range(40)]

    async def all_at_once() -> list[Any]:
        async with AsyncConnectionPool(vault.settings.database, kwargs={"autocommit": True}, max_size=4) as pool:
            wanted = (vault.keys.key_for_async(pool, name) for name in [*names, names[0], BOB])
            return await asyncio.gather(*wanted, return_exceptions=True)

    *found, again, bobs = asyncio.run(all_at_once())
    assert len(asked) < 10
    assert found == [vault.key(name) for name in names]
    assert again == found[0]
    assert isinstance(bobs, SubjectForgotten)


def test_no_key_is_given_out_before_the_topic_was_read(vault: Vault) -> None:
    made = vault.key(ADA)
    with pytest.raises(KeysNotRead):
        Keys(vault.settings).keys_for(vault.db, [made.id])


def test_a_key_that_the_table_lacks_is_looked_for_in_the_topic(vault: Vault) -> None:
    vault.keys.start(vault.db)
    made = _made_after_the_backup(vault)
    until(lambda: vault.keys.keys_for(vault.db, [made.id]) == dict([made]), "it is there")
    assert vault.keys.keys_for(vault.db, ["00000000000000bb"]) == {"00000000000000bb": None}


# ── the master key ──

FIRST = f"first {b64encode(bytes(32)).decode()}"


@pytest.mark.slow_but("none", "other_key")
@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        (None, "can't be read"),
        ("# nothing\n\n", "has no key"),
        ("first", "Line 1"),
        ("first AAAA", "Line 1"),
        ("first not-base64!", "Line 1"),
        (f"{FIRST}\n{FIRST}", "Line 2"),
        (new_line("other"), "master key 'first'"),
        (new_line("first"), "'first' is not the one"),
    ],
    ids=["none", "empty", "no_key", "short", "no_base64", "twice", "other_name", "other_key"],
)
def test_a_file_that_is_wrong_for_a_while_starts_shows_and_wraps_nothing(
    vault: Vault, text: str | None, wrong: str
) -> None:
    """What it wrapped nobody could unwrap once the file is right again: two keys in a file can't have one name."""
    right, made, running = vault.file.read_text(), vault.key(ADA), vault.started()
    if text is None:
        vault.file.unlink()
    else:
        vault.file.write_text(text)
    uses: Sequence[Callable[[], object]] = (
        vault.started,
        lambda: running.keys_for(vault.db, [made.id]),
        lambda: running.key_for(vault.db, BOB),
        lambda: running.rotate(vault.db, lambda _: None),
    )
    for use in uses:
        with pytest.raises(MasterKeyUnusable, match=wrong) as refusal:
            use()
        assert refusal.value.exit_code == 2
        assert not text or text.split()[-1] not in str(refusal.value)
    vault.file.write_text(right + new_line("second"))
    assert vault.opens(made) == made.key
    assert vault.wrapped() == {made.id}
    assert running.key_for(vault.db, BOB).id in vault.wrapped()


def test_two_files_with_another_key_under_one_name_do_not_wrap_side_by_side(vault: Vault) -> None:
    """No file could open all of it."""
    vault.keys.start(vault.db)  # there is nothing to check yet
    vault.late(ADA, "00000000000000aa", Masters({"first": bytes(32)}))
    with pytest.raises(MasterKeyUnusable, match="'first'"):
        vault.key(BOB)


def test_a_wrapped_key_belongs_to_its_subject() -> None:
    known = Masters({"first": bytes(32)})
    wrapped = known.wrap(bytes(range(32)), ADA, "1")
    assert known.unwrap(wrapped, "first", ADA, "1") == bytes(range(32))
    for other in ((BOB, "1"), (ADA, "2")):
        with pytest.raises(MasterKeyUnusable):
            known.unwrap(wrapped, "first", *other)


# ── the topic ──


@pytest.mark.slow
def test_a_recreated_topic_is_refused_and_taken_when_the_position_is_deleted(vault: Vault) -> None:
    made = vault.key(ADA)
    vault.key(BOB)
    vault.forget(BOB)
    name, backup = vault.settings.keys_topic, records_of(vault.settings, vault.settings.keys_topic)
    admin = clients.admin(vault.settings)
    admin.delete_topics([name])[name].result(DEADLINE_S)
    until(lambda: name not in admin.list_topics(timeout=DEADLINE_S).topics, "it is gone")
    topics.ensure_keys(vault.settings)
    for record in backup:
        vault.produce(record.key or b"", record.value)
    with pytest.raises(TopicChanged, match="was recreated"):
        vault.started()
    assert vault.key(ADA) == made
    vault.db.execute("delete from keys_position")
    assert vault.opens(made) == made.key
    with pytest.raises(SubjectForgotten):
        vault.started().key_for(vault.db, BOB)
    vault.db.execute("update keys_position set next_offset = next_offset + 1")
    with pytest.raises(TopicChanged, match="lost records"):
        vault.started()


@pytest.mark.slow
def test_foreign_records_change_nothing_and_an_unknown_format_stops(vault: Vault) -> None:
    made = vault.key(ADA)
    for key, value in ((b"x", b"hello"), (b"[]", b'{"subject":"x"}'), (b"key", None), (b"[1,2]", None)):
        vault.produce(key, value)
    assert vault.opens(made) == made.key
    vault.produce(b"[]", b'{"samefold":"key/2"}')
    with pytest.raises(UnreadableRecord, match="offset 5"):
        vault.keys.catch_up(vault.db)


def test_the_topic_is_compacted_soon_and_is_checked(world: Settings) -> None:
    topic = topics.ensure_keys(world)
    assert (topic.partitions, topics.ensure_keys(world).id) == (1, topic.id)
    topics.ensure(world)
    for other in (world.events_topic, world.commands_topic):
        with pytest.raises(TopicUnfit, match=r"cleanup\.policy"):
            topics.ensure_keys(world.model_copy(update={"keys_topic": other}))


# ── the command line ──


def test_forget_and_rotate_on_the_command_line(samefold: Samefold, vault: Vault) -> None:
    made, file, place = vault.key(ADA), vault.file, vault.settings
    asked = samefold("forget", ADA, settings=place, given="n\n")
    assert (asked.returncode, vault.opens(made)) == (1, made.key)
    done = samefold("forget", ADA, "--yes", "--json", settings=place)
    assert json.loads(done.stdout) == {"subject": ADA, "keys": 1, "before": False}
    assert "forgotten before" in samefold("forget", ADA, "--yes", settings=place).stdout
    assert "Nothing was found" in samefold("forget", "customers/x", "--yes", settings=place).stdout
    assert samefold("forget", "a\nb", "--yes", settings=place).stderr.startswith("bad-subject")
    line = samefold("keys", "new", "--name", "second").stdout
    bobs = vault.key(BOB)
    file.write_text(line + file.read_text())
    told = json.loads(samefold("keys", "rotate", "--json", settings=place).stdout)
    assert told == {"master": "second", "wrapped": 1, "left": 0}
    file.write_text(line)
    assert vault.opens(bobs) == bobs.key
    file.write_text(new_line("third"))
    refused = samefold("keys", "rotate", settings=place)
    assert refused.returncode == 2
    assert "'second'" in refused.stderr
