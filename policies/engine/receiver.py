"""Receives what another service says: reads the messages of a source's topic, and writes what they lead to into the outbox.

The positions in the topic are rows of the database, and move in the transaction that writes the wishes: by compare-and-set, so that
of two processes one counts. A process receives of the partitions whose numbers it has in the log, as the policy's agent.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from confluent_kafka import KafkaError, TopicPartition
from confluent_kafka import Message as KafkaMessage
from psycopg import errors
from psycopg.types.json import Json

from infra.database.connect import Connection, DatabaseUnavailable, session
from infra.errors import SamefoldError
from infra.log import clients, topics
from infra.log.clients import KafkaUnavailable
from infra.log.contract import require_contract
from infra.log.records import Headers, Record
from infra.log.source import is_not_held, named, read_held
from infra.observability import logs, metrics
from infra.processes.faultpoints import reach
from infra.processes.time_limit import in_main_thread
from infra.settings import Settings
from policies.engine import activations
from policies.engine.activations import REMOVED, Activation, ends_at, in_topic, version_at
from policies.engine.messages import Handled, MessageFailed, Raw, Reception, Result
from policies.engine.outbox import Cause, Wish, write_of_messages
from policies.engine.policy import Policy
from projections.engine.live.worker import ONE_AT_A_TIME, code_of_authors

log = logging.getLogger(__name__)

POLL_S = 0.1
PAUSE_S = 0.5
"""While a store is unavailable."""
CHECK_S = 1.0
"""How often the topic, the activations and the partitions that wait are looked at."""
AGAIN_S, MOST_AGAIN_S = 10.0, 300.0
"""After that a message whose `receive` failed is tried again; it doubles each time."""
SETTLED_S = 30.0
"""After that without an error, a source counts as one that receives."""
WORK_S = 0.1
"""After that, messages in hand wait: the main thread runs the code of all policies."""
MOST_WISHES_AT_ONCE = 10_000
"""With so many, a transaction is full at the end of a message."""
ATTEMPTS = 3
"""So many processes may end at a message."""
MOST_UNSENT = 4_000
"""With so many commands in the outbox that are not sent, no more messages are received."""


class SourceRecreated(SamefoldError):
    """A source's topic is another one than that which was received."""


class SourceTrimmed(SamefoldError):
    """A source's topic does not hold the messages that come next."""


class _Fenced(Exception):
    """Another process moved a position, or the policy was switched."""


class _Place(NamedTuple):
    """Where a partition goes on: `stop` is the offset from which another version receives."""

    offset: int
    activation: int
    stop: int | None


class _Attempt(NamedTuple):
    """What a process received first of a partition, how often in a row, and a hash of the code."""

    first: int
    last: int
    number: int
    code: str


class Receiver:
    """One source of this process. `run` blocks until `stop`, in a thread of its own.

    `own` returns the partitions of the log that the policy's agent has in this process.
    """

    def __init__(self, settings: Settings, policy: Policy, name: str, own: Callable[[], Set[int]]) -> None:
        assert policy.source, "it is a source"
        self.settings = settings
        self.policy = policy
        self.source = policy.source
        self.name = name
        self._own = own
        self._stopping = threading.Event()
        self._status = logs.StatusLog(log, f"source {policy.name}")
        self._places: dict[int, _Place] = {}
        """By partition that is received now."""
        self._waiting: dict[int, float] = {}
        """By partition of this process that is not, when to look where it goes on."""
        self._before: dict[int, _Attempt] = {}
        """By partition, the attempt that was noted when this process looked where to go on."""
        self._code = code_of_authors()
        self._begun: set[int] = set()
        """Partitions of which this process has received what it began with."""
        self._again_s: dict[int, float] = {}
        """By partition that failed at its next message, how long it waited last."""
        self._is_assigned = False
        """Whether `_reader` fetches from `_places`."""
        self._kept: tuple[list[Raw], Mapping[int, int]] = [], {}
        """What it has fetched, and `_receive` has left for later."""

    def stop(self) -> None:
        self._stopping.set()

    def run(self) -> None:
        """Raises NotConfigured, SourceRecreated, ContractBroken, and the errors of Kafka and the database that do not pass."""
        stopped = metrics.SOURCE_STOPPED.labels(self.policy.name, "all")
        while not self._stopping.is_set():
            try:
                who = f"samefold source {self.policy.name} {self.name}"
                with session(self.settings, who, short_transactions=True, by_key=True) as connection:
                    self._serve(connection)
            except (KafkaUnavailable, DatabaseUnavailable) as error:
                stopped.set(1)
                self._status.wrong("stores", error.message, "away")
                self._stopping.wait(PAUSE_S)
            except Exception:
                stopped.set(1)
                raise

    def _serve(self, connection: Connection) -> None:
        self._theirs, name = self.settings.of_source(self.source.name)
        events = require_contract(self.settings, connection)
        if self.settings.source(self.source.name).secrets:
            topics.ensure_inbox(self.settings)
        self._admin = topics.Admin(self._theirs, topics.TRY_S)
        self._topic = topics.describe(self._theirs, name, admin=self._admin)
        self._reception = Reception(self.settings, self.policy, self._topic.id, events.partitions)
        activations.start_new(self.settings, connection, self.policy)
        self._places, self._waiting, self._partitions = {}, {}, events.partitions
        self._settled_at = time.monotonic() + SETTLED_S
        self._reader = clients.agent_consumer(self._theirs, tells_ends=True)
        try:
            check_at = 0.0
            while not self._stopping.is_set():
                self._share()
                if time.monotonic() >= check_at or 0.0 in self._waiting.values():
                    self._check(connection)
                    check_at = time.monotonic() + CHECK_S
                if not self._places or self._is_full(connection):
                    self._stopping.wait(POLL_S)
                else:
                    raws, ends = self._taken()
                    if {raw.partition for raw in raws} <= self._begun:
                        self._receive(connection, raws, ends)
                    else:
                        with ONE_AT_A_TIME:
                            self._attempt(connection, raws, ends)
        finally:
            self._gone([*self._places, *self._waiting])
            self._reader.close()

    # ── where to go on ──

    def _share(self) -> None:
        """Take the partitions that are this process's now, and leave the others."""
        own, has = self._own(), self._places.keys() | self._waiting.keys()
        mine = {number for number in range(self._topic.partitions) if number % self._partitions in own}
        self._gone(has - mine)
        self._waiting |= dict.fromkeys(mine - has, 0.0)

    def _gone(self, partitions: Iterable[int]) -> None:
        for number in partitions:
            self._places.pop(number, None)
            self._waiting.pop(number, None)
            for gauge in (metrics.SOURCE_LAG, metrics.SOURCE_STOPPED):
                with suppress(KeyError):
                    gauge.remove(self.policy.name, str(number))
            self._is_assigned = False

    def _check(self, connection: Connection) -> None:
        """Compare the topic, and look where partitions that wait go on. Raises SourceRecreated."""
        found = topics.describe(self._theirs, self._topic.name, admin=self._admin)
        if found.id != self._topic.id:
            raise KafkaUnavailable(f"Topic '{found.name}' was made anew.")  # starts again, and looks which one counts
        self._topic = found
        now = time.monotonic()
        if due := [number for number, at in self._waiting.items() if at <= now]:
            activations.bring_in(self.settings, connection)
            with connection.transaction():
                # a first position is written before or after a switch, which locks this table, reads them
                connection.execute("lock table activations in row exclusive mode")
                known = activations.activations_of(connection, self.policy.name)
                for number in due:
                    self._look(connection, known, number)
        for number, place in self._places.items():
            metrics.SOURCE_LAG.labels(self.policy.name, str(number)).set(max(found.end[number] - place.offset, 0))
        if now >= self._settled_at:
            metrics.SOURCE_STOPPED.labels(self.policy.name, "all").set(0)
        self._status.well("stores", "Kafka and the database are available again")

    def _look(self, connection: Connection, known: Sequence[Activation], number: int) -> None:
        """Find where the partition goes on, and whether this code may receive there."""
        self._waiting[number] = time.monotonic() + CHECK_S
        here = in_topic(known, self._topic.id, range(self._topic.partitions))
        if not any(one.messages for one in known):
            return  # until now it was a policy that reacts to events; its agent says that it waits for a switch
        if not here or here[-1].number != known[-1].number:
            was = next(one.messages.topic_id for one in reversed(known) if one.messages)
            raise SourceRecreated(
                f"Topic '{self._topic.name}' is not the one that source '{self.policy.name}' has received: its id was {was} and "
                f"is {self._topic.id}.",
                "Restore it; or, if another one counts from now on, run `samefold policies reposition "
                f"{self.policy.name} --to earliest`.",
            )
        if any(one.log_offset is None for one in known):  # a switch that is not in the topic of policies yet
            return
        begin = here[0].positions[number].next_offset
        # of two processes, the second waits here and finds what the first has received
        ours = (self.policy.name, number, self._topic.id, begin, known[-1].number)
        [(at, attempt)] = connection.execute(_BEGIN, ours).fetchall()
        if attempt and number not in self._begun:
            self._before[number] = _Attempt(*attempt)
        while (version := version_at(here, number, at)) == REMOVED:
            starts = [one.positions[number].next_offset for one in here]
            if (after := min((start for start in starts if start > at), default=None)) is None:
                break
            at = after
            connection.execute(
                "update source_positions set next_offset = %s where policy = %s and partition = %s",
                (at, self.policy.name, number),
            )
        first, end = self._topic.first[number], self._topic.end[number]
        if at > end:  # another process may have received what came since the topic was described
            end = topics.describe(self._theirs, self._topic.name, admin=self._admin).end[number]
        if version != self.policy.version:
            what = f"the next messages belong to version {version}, and this code has {self.policy.version}"
            self._status.wrong(
                f"partition {number}", f"{what}: `samefold policies` says what to do", f"version {version}"
            )
        elif not first <= at <= end:
            trimmed = SourceTrimmed(
                f"{self._topic.name}[{number}] holds the offsets {first} to {end}, and source '{self.policy.name}' has received "
                f"it up to {at}: {'what came next was deleted' if at < first else 'it has lost its end'}.",
                "Restore the topic; or, to go on without what is lost, run `samefold policies reposition "
                f"{self.policy.name} --to earliest`.",
            )
            self._stops(number, trimmed)
        else:
            self._places[number] = _Place(at, known[-1].number, ends_at(here, number, at))
            del self._waiting[number]
            self._is_assigned = False

    def _stops(self, number: int, error: SamefoldError, wait_s: float = AGAIN_S) -> None:
        """Receive nothing more of the partition, until it is tried again."""
        self._places.pop(number, None)
        self._waiting[number] = time.monotonic() + wait_s
        self._is_assigned = False
        self._status.wrong(f"partition {number}", f"stops: {error.code}: {error}", error.message, logging.ERROR)
        metrics.SOURCE_STOPPED.labels(self.policy.name, str(number)).set(1)

    def _again(self) -> None:
        """Look for all positions again, when the other process has gone on: two releases have all partitions for a while."""
        self._waiting |= dict.fromkeys(self._places, time.monotonic() + CHECK_S)
        self._places = {}
        self._is_assigned = False

    def _is_full(self, connection: Connection) -> bool:
        """Whether so much is in the outbox that messages wait in their topic."""
        [(unsent,)] = connection.execute(_UNSENT, (self.policy.name, MOST_UNSENT))
        return bool(unsent >= MOST_UNSENT)

    # ── messages ──

    def _taken(self) -> tuple[list[Raw], Mapping[int, int]]:
        """The next messages, and the ends of partitions, beyond what transactions left there. Waits up to POLL_S."""
        name = self._topic.name
        if not self._is_assigned:
            clients.learn_leaders(self._reader, name)
            clients.assign(
                self._reader, [TopicPartition(name, number, at.offset) for number, at in self._places.items()]
            )
            self._is_assigned = True
        elif self._kept[0]:
            return self._kept
        found = self._reader.consume(1, POLL_S)
        if found:
            found += self._reader.consume(self.settings.batch, 0)
        raws: list[Raw] = []
        ends: dict[int, int] = {}
        wrong: dict[int, KafkaError] = {}
        for one in found:
            number, error = one.partition() or 0, one.error()
            if number in wrong:  # its next messages come again
                continue
            if error is None:
                raws.append(_raw(one))
            elif error.code() == KafkaError._PARTITION_EOF:
                ends[number] = one.offset() or 0
            else:
                wrong[number] = error
        for number, error in wrong.items():
            self._is_assigned = False
            if clients.is_denied(error):
                raise named(self._theirs, name, number, 0, error)
            if is_not_held(error):
                self._waiting[number] = time.monotonic() + POLL_S
                self._places.pop(number, None)
            else:
                self._status.wrong("stores", error.str(), error.name())
                self._stopping.wait(POLL_S)
        return raws, ends

    def _attempt(self, connection: Connection, raws: Sequence[Raw], ends: Mapping[int, int]) -> None:
        """Receive what partitions begin with: noted before, so that the next process finds a message that ended this one.

        It then receives those messages one by one, nothing else beside them. A message that ended ATTEMPTS processes is none that
        can be received.
        """
        begins: dict[int, list[Raw]] = {}
        for raw in raws:
            place = self._places.get(raw.partition)
            if place and raw.partition not in self._begun and raw.offset >= place.offset:
                begins.setdefault(raw.partition, []).append(raw)
        known = {number: one for number, one in self._before.items() if one.code == self._code}
        again = [number for number, mine in begins.items() if number in known and known[number].last >= mine[0].offset]
        if again:
            begins = {again[0]: begins[again[0]][:1]}
        tried = set[int]()
        for number, mine in begins.items():
            now = _Attempt(mine[0].offset, mine[-1].offset, 1, self._code)
            if again and known[number][:2] == now[:2]:
                now = now._replace(number=known[number].number + 1)
            if (place_of := (number, now.first)) not in self._reception.ended:
                if now.number > ATTEMPTS:  # the next process tries again: what ended the others may be outside the code
                    self._reception.ended.add(place_of)
                    now = now._replace(number=0)
                else:
                    tried.add(number)
                connection.execute(_TRY, (Json(now), self.policy.name, number))
        if again:
            [[alone]] = begins.values()
            is_written = self._receive(connection, [alone], {})
            self._kept = [raw for raw in raws if raw is not alone], ends
        else:
            self._begun |= begins.keys()
            is_written = self._receive(connection, raws, ends)
        if is_written:
            for number in tried - self._places.keys():  # this process lives: the message failed, and is tried again
                connection.execute(_TRY, (None, self.policy.name, number))

    def _receive(self, connection: Connection, raws: Sequence[Raw], ends: Mapping[int, int]) -> bool:
        """Write what the messages lead to, and move the positions, in one transaction; False if it was fenced."""
        handled, after, failed, rest = in_main_thread(partial(self._handle, raws))
        self._kept = rest, ends
        at_end = set() if rest else ends.keys() & self._places.keys() - failed.keys()
        for number in at_end:
            end, stop = ends[number], self._places[number].stop
            after[number] = max(after.get(number, 0), end if stop is None else min(end, stop))
        moved = {number: at for number, at in after.items() if at > self._places[number].offset}
        if moved:
            try:
                counts = self._write(connection, moved, handled)
            except (_Fenced, errors.DeadlockDetected):
                log.info("source %s: a batch was fenced; reading the positions again", self.policy.name)
                self._again()
                return False
            reach("messages received")
            for result, count in counts.items():
                metrics.SOURCE_MESSAGES.labels(self.policy.name, result).inc(count)
            if counts[Result.OTHER_SOURCE]:
                what = "webhooks are passed over: neither a file of policies/ nor SAMEFOLD_SOURCES has their `samefold-hook`"
                self._status.wrong("other source", what)
        for number in moved.keys() | at_end:
            self._again_s.pop(number, None)
            self._status.well(f"partition {number}", f"receives {self._topic.name}[{number}]")
            metrics.SOURCE_STOPPED.labels(self.policy.name, str(number)).set(0)
        for number, at in moved.items():
            place = self._places[number]
            self._places[number] = place._replace(offset=at)
            if at == place.stop:
                self._waiting[number] = 0.0
                del self._places[number]
                self._is_assigned = False
        for number, failure in failed.items():
            self._again_s[number] = min(2 * self._again_s.get(number, AGAIN_S / 2), MOST_AGAIN_S)
            self._stops(number, failure, self._again_s[number])
        return True

    def _handle(self, raws: Sequence[Raw]) -> tuple[list[Handled], dict[int, int], dict[int, MessageFailed], list[Raw]]:
        """What became of the messages, up to MOST_WISHES_AT_ONCE and for WORK_S, and those that are left.

        By partition, the position after them, and the error that ended them.
        """
        until = time.monotonic() + WORK_S
        after: dict[int, int] = {}
        handled: list[Handled] = []
        failed: dict[int, MessageFailed] = {}
        wishes = 0
        for done, raw in enumerate(raws):
            if wishes >= MOST_WISHES_AT_ONCE or (done and time.monotonic() >= until):
                return handled, after, failed, [*raws[done:]]
            place, number = self._places.get(raw.partition), raw.partition
            if place is None or number in failed or raw.offset < after.get(number, place.offset):
                continue
            if place.stop is not None and raw.offset >= place.stop:
                after[number] = place.stop
                continue
            try:
                handled.append(self._reception.handled(raw))
            except MessageFailed as error:
                failed[number] = error
            else:
                after[number] = raw.offset + 1
                wishes += len(handled[-1].wishes)
        return handled, after, failed, []

    def _write(self, connection: Connection, moved: Mapping[int, int], handled: Sequence[Handled]) -> Counter[Result]:
        """Raises _Fenced."""
        with connection.transaction():
            places = [(number, self._places[number], at) for number, at in sorted(moved.items())]
            columns = zip(*((number, was.offset, was.activation, at) for number, was, at in places), strict=True)
            done = connection.execute(_MOVE, [*map(list, columns), self.policy.name, self._topic.id])
            if done.rowcount != len(moved):
                raise _Fenced
            fresh = _fresh(connection, self.policy.name, handled)
            answers = write_of_messages(connection, self.policy.name, _wishes(fresh))
            reach("messages written")
        for tell in answers:
            tell()
        counts = Counter(one.result for one in fresh)
        counts[Result.REPEATED] += len(handled) - len(fresh)
        return counts


def received_again(
    settings: Settings, connection: Connection, policy: Policy, dead: Iterable[tuple[str, str, int]]
) -> Iterator[str | None]:
    """Receive messages by today's code, whose dead letters have this id, stream and offset. Yields why each can't be, if so.

    Raises the errors of Kafka.
    """
    assert policy.source, "it is a source"
    theirs, name = settings.of_source(policy.source.name)
    topic = topics.describe(theirs, name)
    reception = Reception(settings, policy, topic.id, require_contract(settings, connection).partitions)
    reader = clients.range_consumer(theirs)
    try:
        for ident, stream, offset in dead:
            number, headers = int(stream.rpartition("/")[2]), dict[int, Headers]()
            found: list[Record] = []
            if ident == reception.dead_id(number, offset) and topic.first[number] <= offset < topic.end[number]:
                held = read_held(theirs, name, number, offset, offset + 1, consumer=reader, headers=headers)
                found = [record for batch, _ in held for record in batch]
            if not found:  # made anew, trimmed or compacted
                yield f"{name}[{number}] does not hold it any more"
                continue
            try:
                handled = reception.handled(Raw(name, *found[0], _text(headers.get(offset, ()))))
            except MessageFailed as error:
                yield error.message
                continue
            with connection.transaction():
                if not connection.execute("delete from outbox where id = %s and kind = 'message'", (ident,)).rowcount:
                    yield "it was retried or dropped meanwhile"
                    continue
                answers = write_of_messages(
                    connection, policy.name, _wishes(_fresh(connection, policy.name, [handled]))
                )
            for tell in answers:
                tell()
            yield handled.wishes[0][0].dead if handled.result is Result.DEAD else None
    finally:
        reader.close()


def _wishes(handled: Sequence[Handled]) -> list[tuple[Wish, Cause]]:
    return [wish for one in handled for wish in one.wishes]


def _fresh(connection: Connection, policy: str, handled: Sequence[Handled]) -> list[Handled]:
    """Those whose own id, if it counts, was never received."""
    ids = sorted({one.id for one in handled if one.id is not None})
    new = {ident for (ident,) in connection.execute(_NEW, (policy, ids))} if ids else set()
    fresh = []
    for one in handled:
        if one.id is None or one.id in new:
            fresh.append(one)
            new.discard(one.id)
    return fresh


def _raw(message: KafkaMessage) -> Raw:
    topic, partition, offset = message.topic(), message.partition(), message.offset()
    assert topic is not None, "it came from a broker"
    return Raw(
        topic,
        partition or 0,
        offset or 0,
        message.timestamp()[1],
        message.key(),
        message.value(),
        _text(message.headers() or ()),
    )


def _text(headers: Headers) -> dict[str, str]:
    """The headers whose values are there, by their names in lower case."""
    return {name.lower(): value.decode("utf-8", "backslashreplace") for name, value in headers if value is not None}


_UNSENT = """
select count(*) from (select from outbox where policy = %s and kind = 'send' and sent_at is null and dead is null and due is null
                       limit %s) few
"""
_MOVE = """
update source_positions p set next_offset = u.next_offset
  from unnest(%s::int[], %s::bigint[], %s::int[], %s::bigint[]) u (partition, was, activation, next_offset)
 where p.policy = %s and p.topic_id = %s and p.partition = u.partition and p.next_offset = u.was and p.activation = u.activation
"""
_BEGIN = """
insert into source_positions as p values (%s, %s, %s, %s, %s)
    on conflict (policy, partition) do update set topic_id = excluded.topic_id, activation = excluded.activation,
       next_offset = case when p.topic_id = excluded.topic_id then p.next_offset else excluded.next_offset end,
       attempt = case when p.topic_id = excluded.topic_id then p.attempt end
returning next_offset, attempt
"""
_TRY = "update source_positions set attempt = %s where policy = %s and partition = %s"
_NEW = """
insert into received_messages select %s, id from unnest(%s::bytea[]) id order by id on conflict do nothing returning id
"""
