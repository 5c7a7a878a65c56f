"""The keys of subjects: a topic, and its copy in PostgreSQL, which processes query (docs/personal-data.md).

A subject's key is made when a value of theirs is sealed for the first time. Of several, made at once, the one that stands first in
the topic is used by all. A subject is forgotten by a record that compaction keeps for ever, so that a restored database meets it
too. It is stronger than every key of the subject, later ones included: they are void, and each copy of the record destroys them.
"""

import asyncio
import json
import logging
import re
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence, Set
from typing import Any, NamedTuple

import msgspec
import psycopg
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer
from msgspec import UNSET, UnsetType
from psycopg_pool import AsyncConnectionPool

from domain.engine.personal.masters import Masters, masters
from infra.archive.whole_log import read_range
from infra.database.connect import Connection, is_transient, session
from infra.errors import SamefoldError
from infra.log import clients, topics
from infra.log.records import ENVELOPE, Record, unreadable
from infra.observability.logs import StatusLog
from infra.processes.faultpoints import reach
from infra.settings import Settings

log = logging.getLogger(__name__)

_SUBJECT = re.compile(r"[^\x00-\x1f\x7f-\x9f\ud800-\udfff]{1,200}").fullmatch
"""Names of streams and SubjectIds: characters that can't be seen included (emojis have some), or they could not be forgotten."""

APPEND_S = 10.0
AGAIN_S = 1.0
"""How often the topic is asked for what is new."""
BEAT_S = 6 * 3600.0
PAGE = 5_000


class SubjectForgotten(SamefoldError):
    """The subject was forgotten, which is final."""

    is_public = True


class KeysNotRead(SamefoldError):
    """This process has not read the keys of personal values yet."""

    is_public = True


class BadSubject(SamefoldError):
    """The text can't be the name of a subject."""


def require_subject(subject: str) -> None:
    """Raises BadSubject."""
    if not _SUBJECT(subject):
        raise BadSubject(
            "A subject's name has 1 to 200 characters, none of them a control character.",
            "Without a SubjectId in the command, it is the stream's name: `<context>/<id>`.",
        )


class DataKey(NamedTuple):
    """What a subject's values are sealed with."""

    id: str
    key: bytes

    def __repr__(self) -> str:
        return f"DataKey({self.id})"


class Forgotten(NamedTuple):
    """What `forget` did."""

    subject: str
    keys: int
    """How many keys were destroyed."""
    before: bool
    """Whether the subject had been forgotten before."""


class KeyRecord(msgspec.Struct, frozen=True, tag_field="samefold", tag="key/1"):
    """A key, wrapped."""

    subject: str
    id: str
    master: str
    wrapped: bytes
    at: int | UnsetType = UNSET
    """Offset of its first record, where this is not it: wrapping a key again does not move it behind others."""


class ForgottenRecord(msgspec.Struct, frozen=True, tag_field="samefold", tag="forgotten/1"):
    """A subject is forgotten."""

    subject: str


class BeatRecord(msgspec.Struct, frozen=True, tag_field="samefold", tag="beat/1"):
    """Says nothing. The broker closes a file, and compacts it later, only when it gets another record."""


_decode = msgspec.json.Decoder(KeyRecord | ForgottenRecord | BeatRecord).decode
_encode = msgspec.json.encode


class Keys:
    """The keys, for one process. Its constructor raises MasterKeyUnusable, NotConfigured.

    Its connections are in autocommit mode and not in a transaction. Methods may raise KafkaUnavailable, TopicMissing, TopicUnfit,
    TopicChanged, UnreadableRecord, MasterKeyUnusable, psycopg.Error.
    """

    def __init__(self, settings: Settings) -> None:
        masters(settings)
        self.is_started = False
        self._right: Masters | None = None
        """The master keys that were checked last."""
        self._settings = settings
        self._lock = threading.RLock()
        """Held while the clients of Kafka are used."""
        self._admin = topics.Admin(settings)
        self._topic: topics.Topic | None = None
        self._consumer: Consumer | None = None
        self._producer: Producer | None = None
        self._asked_at = float("-inf")
        self._seen = 0
        self._turn = asyncio.Lock()
        self._next: tuple[set[str], asyncio.Future[dict[str, DataKey | None]]] | None = None
        """Subjects that wait for the turn."""

    def start(self, connection: Connection) -> None:
        """Copy what the topic holds, and check that the master keys unwrap it. Before it no key is given out."""
        self.catch_up(connection)
        self._checked(connection)
        self.is_started = True

    def _checked(self, connection: Connection) -> Masters:
        """The master keys, which unwrap what there is. What a wrong file wraps could not be read with the right one."""
        known, used = masters(self._settings), set[str]()
        if known is not self._right:  # the file has changed
            some = connection.execute(
                "select distinct on (master) master, wrapped, subject, id from personal_keys "
                "where wrapped is not null order by master"
            )
            for master, wrapped, subject, key_id in some:
                known.unwrap(wrapped, master, subject, key_id)
                used.add(master)
            if known.first in used:  # else another process may use it first, with another file
                self._right = known
        return known

    def keys_for(self, connection: Connection, ids: Collection[str]) -> dict[str, bytes | None]:
        """Keys by id; None: it was destroyed, or there is none. The topic is asked at most once a second."""
        seen = self._require_started()
        rows = connection.execute(_KEYS, [list(ids)]).fetchall()
        if self._is_older(rows, seen) or time.monotonic() - self._asked_at > AGAIN_S:
            self.catch_up(connection)
            rows = connection.execute(_KEYS, [list(ids)]).fetchall()
        return self._unwrapped(ids, rows)

    async def keys_for_async(
        self, connection: psycopg.AsyncConnection[Any], ids: Collection[str]
    ) -> dict[str, bytes | None]:
        """The same, in a process where `keep_copying` runs. Raises KeysNotRead too where the database was just restored."""
        seen = self._require_started()
        rows = await (await connection.execute(_KEYS, [list(ids)])).fetchall()
        if self._is_older(rows, seen):
            raise KeysNotRead("The database was restored, and does not know yet who is forgotten.", _SOON)
        return self._unwrapped(ids, rows)

    async def key_for_async(self, pool: AsyncConnectionPool[Any], subject: str) -> DataKey:
        """As `key_for`."""
        self._require_started()
        async with pool.connection() as connection:
            found = self._first_of(await (await connection.execute(_FIRST_KEYS, [[subject]])).fetchall())
        if subject not in found:
            if self._next is None:  # all that come while another turn lasts ask Kafka once
                subjects = set[str]()
                self._next = subjects, (turn := asyncio.ensure_future(self._in_turn(subjects)))
                # asyncio would log an error that no request waits for any more
                turn.add_done_callback(lambda done: done.cancelled() or done.exception())
            subjects, made = self._next
            subjects.add(subject)
            try:
                found = await asyncio.wait_for(asyncio.shield(made), APPEND_S)
            except TimeoutError:  # it goes on, for whoever asks again
                raise clients.away(self._settings, KafkaError(KafkaError._TIMED_OUT)) from None
        return not_forgotten(found, subject)

    async def _in_turn(self, subjects: Set[str]) -> dict[str, DataKey | None]:
        async with self._turn:
            self._next = None
            return await asyncio.to_thread(self._alone, subjects)

    def _alone(self, subjects: Set[str]) -> dict[str, DataKey | None]:
        with session(self._settings, "samefold keys") as connection:
            return self.keys_of(connection, subjects)

    def key_for(self, connection: Connection, subject: str) -> DataKey:
        """The key that seals what concerns the subject; it is made if there is none. Raises SubjectForgotten."""
        return not_forgotten(self.keys_of(connection, {subject}), subject)

    def keys_of(self, connection: Connection, subjects: Set[str]) -> dict[str, DataKey | None]:
        """By subject the same; None: forgotten."""
        found = self._known(connection, subjects)
        if subjects - found.keys():
            self.catch_up(connection)
            found = self._known(connection, subjects)
        if lacking := sorted(subjects - found.keys()):
            known, records = self._checked(connection), []
            for subject in lacking:
                key_id = secrets.token_hex(8)
                wrapped = known.wrap(secrets.token_bytes(32), subject, key_id)
                records.append((_name(subject, key_id), _encode(KeyRecord(subject, key_id, known.first, wrapped))))
            reach("key made")
            self.catch_up(connection, self._append(records)[-1] + 1)
            found = self._known(connection, subjects)
        return found

    def forget(self, connection: Connection, subject: str) -> Forgotten:
        """Destroy the subject's keys for good, wherever they are. Nothing personal of theirs can be read or written after it."""
        self.catch_up(connection)
        [(before, count)] = connection.execute(
            "select exists(select from forgotten_subjects where subject = %(subject)s), "
            "(select count(*) from personal_keys where subject = %(subject)s and wrapped is not null)",
            {"subject": subject},
        ).fetchall()
        if not before:
            [offset] = self._append([(_name(subject), _encode(ForgottenRecord(subject)))])
            reach("forgetting recorded")
            self.catch_up(connection, offset + 1)
        return Forgotten(subject, count, before)

    def rotate(self, connection: Connection, progress: Callable[[int], None]) -> int:
        """Wrap every key with the first master key; how many were wrapped with another. Safe to run again and beside anything.

        A key that is destroyed meanwhile stays so: a record of it that comes later is void, and is destroyed too.
        """
        self.catch_up(connection)
        count, last, known = 0, -1, self._checked(connection)
        while rows := connection.execute(
            "select subject, id, wrapped, master, at_offset from personal_keys "
            "where wrapped is not null and master <> %s and at_offset > %s order by at_offset limit %s",
            (known.first, last, PAGE),
        ).fetchall():
            records = []
            for subject, key_id, wrapped, master, at in rows:
                again = known.wrap(known.unwrap(wrapped, master, subject, key_id), subject, key_id)
                records.append((_name(subject, key_id), _encode(KeyRecord(subject, key_id, known.first, again, at))))
            reach("keys wrapped again")
            self.catch_up(connection, self._append(records)[-1] + 1)
            count, last = count + len(rows), rows[-1][4]
            progress(len(rows))
        return count

    def open_count(self, connection: Connection) -> int:
        """How many keys the first master key does not wrap."""
        row = connection.execute(
            "select count(*) from personal_keys where wrapped is not null and master <> %s",
            [masters(self._settings).first],
        ).fetchone()
        return int(row[0]) if row else 0

    def catch_up(self, connection: Connection, least: int = 0) -> None:
        """Copy the topic into the tables up to its end, or to `least` if that is later. Several processes may do so at once."""
        deadline = time.monotonic() + topics.TIMEOUT_S
        with self._lock:
            self._topic = self._topic or topics.ensure_keys(self._settings, self._admin)
            while True:
                known = connection.execute("select topic_id, next_offset from keys_position").fetchone()
                # after the position, so that its end is never before it
                topic = topics.describe(self._settings, self._topic.name, admin=self._admin)
                if known is None:
                    connection.execute("insert into keys_position values (%s, 0) on conflict do nothing", [topic.id])
                    continue
                position = _require_same(topic, *known)
                if position < topic.end[0]:
                    self._copy(connection, topic, position)
                elif position >= least:
                    self._asked_at, self._seen = time.monotonic(), position
                    return
                elif time.monotonic() > deadline:  # its leader changed, and the new one lacks what is acknowledged
                    raise clients.away(self._settings, KafkaError(KafkaError._TIMED_OUT))

    def keep_copying(self, closing: threading.Event) -> None:
        """Start, and catch up each second until the process closes. Raises what does not pass by itself."""
        status, beat_at = StatusLog(log, "keys"), float("-inf")
        while not closing.is_set():
            try:
                with session(self._settings, "samefold keys") as connection:
                    while not closing.wait(AGAIN_S if self.is_started else 0):
                        (self.catch_up if self.is_started else self.start)(connection)
                        status.well("topic", "keys are copied again")
                        if time.monotonic() > beat_at:
                            self._beat(connection)
                            beat_at = time.monotonic() + BEAT_S
            except (SamefoldError, KafkaException) as error:
                if not (is_transient(error) or isinstance(error, clients.KafkaUnavailable | KafkaException)):
                    raise
                status.wrong("topic", f"keys are not copied: {error}")
                closing.wait(AGAIN_S)

    def _beat(self, connection: Connection) -> None:
        if connection.execute("select from forgotten_subjects limit 1").fetchone():
            self._append([(_name(), _encode(BeatRecord()))])

    def unready(self) -> KeysNotRead | None:
        """Why no key is given out yet."""
        if self.is_started:
            return None
        return KeysNotRead("This process has just started, and has not read the keys yet.", _SOON)

    def _require_started(self) -> int:
        """The position of the tables when they were read last: a query that begins now finds no earlier one."""
        if error := self.unready():
            raise error
        return self._seen

    def _is_older(self, rows: Sequence[Any], seen: int) -> bool:
        """Whether the tables are older than that: then they lack who was forgotten since."""
        position = rows[0][0] if rows else -1
        self._seen = max(position, self._seen)
        return bool(position < seen)

    def _unwrapped(self, ids: Collection[str], rows: Iterable[Any]) -> dict[str, bytes | None]:
        found: dict[str, bytes | None] = dict.fromkeys(ids)
        known = masters(self._settings)
        for _, key_id, wrapped, master, subject in rows:
            if wrapped:
                found[key_id] = known.unwrap(wrapped, master, subject, key_id)
        return found

    def _known(self, connection: Connection, subjects: Set[str]) -> dict[str, DataKey | None]:
        return self._first_of(connection.execute(_FIRST_KEYS, [list(subjects)]).fetchall())

    def _first_of(self, rows: Iterable[Any]) -> dict[str, DataKey | None]:
        known = masters(self._settings)
        return {
            subject: None if gone else DataKey(key_id, known.unwrap(wrapped, master, subject, key_id))
            for subject, gone, key_id, wrapped, master in rows
        }

    def _copy(self, connection: Connection, topic: topics.Topic, position: int) -> None:
        """Copy the records from the position on, batch by batch, until another process is found to have copied some."""
        end = topic.end[0]
        self._consumer = self._consumer or clients.range_consumer(self._settings)
        try:
            for batch in read_range(self._settings, topic.name, 0, position, end, consumer=self._consumer):
                after = min(end, batch[-1].offset + 1)
                if not self._apply(connection, topic, position, after, batch):
                    return
                position = after
        except BaseException:
            self._consumer.close()
            self._consumer = None
            raise
        if position < end:  # compaction removed the last ones
            self._apply(connection, topic, position, end, [])

    def _apply(
        self, connection: Connection, topic: topics.Topic, position: int, after: int, batch: Sequence[Record]
    ) -> bool:
        """Copy a batch in one transaction, unless another process has done so."""
        changes = [(record.offset, found) for record in batch if (found := _change_of(topic, record))]
        with connection.transaction():
            moved = connection.execute(
                "update keys_position set next_offset = %s where topic_id = %s and next_offset = %s",
                (after, topic.id, position),
            )
            if not moved.rowcount:
                return False
            with connection.pipeline():
                for offset, change in changes:
                    values = {"at": offset} | msgspec.to_builtins(change, builtin_types=(bytes,))
                    connection.execute(_STATEMENTS[type(change)], values)
            gone = connection.execute(_DESTROY, [list({change.subject for _, change in changes})]).fetchall()
            if gone:  # before the position moves: a process that is killed in between would leave them there
                self._append([(_name(*key), None) for key in gone])
            reach("keys destroyed")
        return True

    def _append(self, records: Sequence[tuple[bytes, bytes | None]]) -> list[int]:
        """Append to the topic; the offsets. A record that is not acknowledged may still get there, which does no harm."""
        with self._lock:
            producer, self._producer = self._producer or clients.producer(self._settings), None
            offsets = clients.append_all(self._settings, producer, self._settings.keys_topic, records, APPEND_S)
            self._producer = producer
            return offsets


def not_forgotten(found: dict[str, DataKey | None], subject: str) -> DataKey:
    """Raises SubjectForgotten."""
    if key := found[subject]:
        return key
    raise SubjectForgotten(
        f"'{subject}' was forgotten: nothing personal can be written about them any more.",
        "Forgetting is final. A person who comes back gets a new id.",
    )


def _require_same(topic: topics.Topic, topic_id: str, position: int) -> int:
    """The position, if it is one in this topic. Raises TopicChanged."""
    if topic_id != topic.id:
        raise topics.TopicChanged(
            f"Topic '{topic.name}' was recreated: its id is {topic.id}, but the database's keys are of {topic_id}.",
            "Restore that topic: it records who is forgotten, and has keys that no database may have yet. A restored "
            "one has another id: docs/personal-data.md, Backups, says what to do.",
        )
    if topic.end[0] < position:
        raise topics.TopicChanged(
            f"Topic '{topic.name}' ends at {topic.end[0]}, but keys up to {position} were read from it.",
            "It lost records: restore it. A restored database would not know who was forgotten in them.",
        )
    return position


def _change_of(topic: topics.Topic, record: Record) -> KeyRecord | ForgottenRecord | None:
    """None for a record that changes nothing. Raises UnreadableRecord."""
    if record.value is None or not record.value.startswith(ENVELOPE):  # a tombstone, or another's record
        return None
    try:
        found = _decode(record.value)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise unreadable(topic.name, record, error) from error
    return None if isinstance(found, BeatRecord) else found


def _name(*parts: str) -> bytes:
    """A record's key: compaction keeps the last record of each."""
    return json.dumps(parts, ensure_ascii=False, separators=(",", ":")).encode()


_SOON = "Try again in a moment."

_KEYS = """
select p.next_offset, k.id, k.wrapped, k.master, k.subject
  from keys_position p left join personal_keys k on k.id = any(%s)
"""

_FIRST_KEYS = """
select s.subject, f.subject is not null, k.id, k.wrapped, k.master
  from unnest(%s::text[]) s (subject)
  left join forgotten_subjects f using (subject)
  left join lateral (select id, wrapped, master from personal_keys
     where subject = s.subject and wrapped is not null order by at_offset, id limit 1) k on true
 where f.subject is not null or k.id is not null
"""

_STATEMENTS: dict[type, str] = {
    # an id that another subject has is not taken over
    KeyRecord: """
insert into personal_keys as p (id, subject, master, wrapped, at_offset)
values (%(id)s, %(subject)s, %(master)s, %(wrapped)s, %(at)s)
    on conflict (id) do update set master = excluded.master, wrapped = excluded.wrapped where p.subject = excluded.subject
""",
    ForgottenRecord: "insert into forgotten_subjects (subject, at_offset) values (%(subject)s, %(at)s) on conflict do nothing",
}

_DESTROY = """
update personal_keys k set wrapped = null from forgotten_subjects f
 where f.subject = k.subject and k.wrapped is not null and k.subject = any(%s) returning k.subject, k.id
"""
"""Whichever of the two came first."""
