"""Activations: which version of a policy reacts to which events.

A policy is made live at a moment: a position in every partition. The topic of policies records it, so that a restored database
can't move it. The table `activations` is a copy: a row without `log_offset` is not in the topic yet, and the policy's workers wait.

The first record of a policy's number counts, later ones with that number are void. Version 0 means that the policy was removed.

A database that has neither made the policy live nor its positions is new to it: the events that it reacted to would lead to the
same posts again. There the policy is held until an operator says of which events posts are made (`resume`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from datetime import datetime
from typing import LiteralString, NamedTuple

import msgspec

from infra.archive.whole_log import read_range
from infra.database.connect import Connection, session
from infra.errors import SamefoldError
from infra.log import clients, topics
from infra.log.contract import Contract, check_contract, require_contract
from infra.log.records import ENVELOPE, time_of, unreadable
from infra.log.rule import START, Reading, read
from infra.processes.engines import Progress, Silent
from infra.processes.faultpoints import reach
from infra.settings import EPOCH, Settings
from policies.engine.policy import LowerVersion, Policy, agent_of, discover
from policies.engine.source import Source
from projections.engine.fold.as_of import BadMoment
from projections.engine.store.positions import lock_positions, read_positions, set_generation
from projections.engine.views.view import CORE

REMOVED = 0
EVER = "-infinity"
APPEND_S = 4.0
"""Shorter than PostgreSQL lets a session be idle in a transaction. Other processes wait for its locks."""
_SEE = "`samefold policies` shows what is live."


class AlreadyLive(SamefoldError):
    """The policy is live in this version."""


class NeverLive(SamefoldError):
    """The policy is not live in any version."""


class OldEventsLeft(SamefoldError):
    """Events that belong to an older version of the policy have not been read."""


class WishesOpen(SamefoldError):
    """The policy has wishes under way."""


class NewDatabase(SamefoldError):
    """The policy reacted to events in another database, and is held in this one."""

    def __init__(self, policy: str) -> None:
        super().__init__(
            f"Policy '{policy}' is held: it reacted to events in another database, and this one is new to it.",
            f"`samefold policies resume {policy} --posts-from now` lets it go on, without posts of old events; a time just "
            "before the other database was lost repeats those since then (docs/operating.md).",
        )


class SourceLostItsEnd(SamefoldError):
    """A source's topic ends before messages that were received from it."""


class SourceRenamed(SamefoldError):
    """The topic of a new source was received by a policy that is live, and that this code does not have."""


class NotHeld(SamefoldError):
    """The policy is live in this database: it waits for no decision."""


class SwitchLost(SamefoldError):
    """Another switch of the policy was recorded first."""


class Messages(msgspec.Struct, frozen=True):
    """A place in a source's topic: its next offset in each partition."""

    topic_id: str
    offsets: dict[int, int]


class Activation(NamedTuple):
    """From `positions` on, `version` of the policy reacts."""

    policy: str
    number: int
    version: int
    positions: dict[int, Reading]
    log_offset: int | None
    """Offset of its record in the topic of policies; None before it is there."""
    messages: Messages | None = None
    """Of a source: from here on the version receives. `positions` is for the outcomes of what it sends."""

    @property
    def begin(self) -> dict[int, int]:
        """The next offset in each partition, of a source in its topic."""
        at = {number: reading.next_offset for number, reading in self.positions.items()}
        return dict(sorted((self.messages.offsets if self.messages else at).items()))


class ActivationRecord(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="samefold", tag="activation/1"):
    """A record of the topic of policies."""

    policy: str
    number: int
    version: int
    positions: dict[int, Reading]
    events_topic_id: str
    """Positions are valid in this topic only."""
    messages: Messages | None = None


_decoder = msgspec.json.Decoder(ActivationRecord)


def activations_of(connection: Connection, policy: str) -> list[Activation]:
    """The policy's activations in the table, by number."""
    return _select(connection, "where policy = %s order by number", policy)


def _select(connection: Connection, which: LiteralString, *values: str) -> list[Activation]:
    found = connection.execute(
        f"select policy, number, version, positions, log_offset, messages from activations {which}",  # noqa: S608
        values,
    )
    return [
        Activation(
            *(policy, number, version, {int(p): Reading(*at) for p, at in positions.items()}, log_offset),
            messages and msgspec.convert(messages, Messages, strict=False),
        )
        for policy, number, version, positions, log_offset, messages in found
    ]


def in_topic(activations: Sequence[Activation], topic_id: str, partitions: Iterable[int]) -> list[Activation]:
    """A source's activations in this topic, with its positions there. A partition that came later is received from its begin on."""
    found = [(one, one.messages.offsets) for one in activations if one.messages and one.messages.topic_id == topic_id]
    return [
        one._replace(positions={number: START._replace(next_offset=offsets.get(number, 0)) for number in partitions})
        for one, offsets in found
    ]


def version_at(activations: Sequence[Activation], partition: int, offset: int) -> int:
    """The version in force for a record at this offset, 0 if none is."""
    versions = [one.version for one in activations if one.positions[partition].next_offset <= offset]
    return versions[-1] if versions else REMOVED


def ends_at(activations: Sequence[Activation], partition: int, offset: int) -> int | None:
    """The offset from which another version is in force than at this one, None if none is.

    An activation may have no place in a partition: a version that was switched back before anything came.
    """
    version = version_at(activations, partition, offset)
    starts = sorted({one.positions[partition].next_offset for one in activations})
    later = (start for start in starts if start > offset)
    return next((start for start in later if version_at(activations, partition, start) != version), None)


def bring_in(settings: Settings, connection: Connection, admin: topics.Admin | None = None) -> None:
    """Make the table equal to the topic, and append the rows that a killed process left out of it.

    Several processes may do so at once. The connection must not be in a transaction. Raises KafkaUnavailable, TopicUnfit,
    TopicMissing, TopicChanged, ContractBroken, UnreadableRecord, psycopg.Error.
    """
    [(known, unrecorded)] = connection.execute(
        "select max(log_offset) + 1, count(*) filter (where log_offset is null) from activations"
    ).fetchall()
    position, admin = known or 0, admin or topics.Admin(settings)
    if known is None:
        topics.ensure_policies(settings, admin)
    while True:
        end = _end(settings, admin, position)
        if end > position:
            _copy(settings, connection, admin, position, end)
            position = end
        elif not unrecorded:
            return
        events = require_contract(settings, connection)
        with connection.transaction():
            # a second process waits here, and then finds the records of the first one
            found = _select(connection, "where log_offset is null order by policy, number for update")
            if not found:
                return
            if _end(settings, topics.Admin(settings, APPEND_S), position) == position:
                records = [ActivationRecord(*one[:4], events.id, one.messages) for one in found]
                bodies = [(one.policy.encode(), msgspec.json.encode(one)) for one in records]
                clients.append_all(settings, clients.producer(settings), settings.policies_topic, bodies, APPEND_S)


def ensure_positions(connection: Connection, topic: str, policy: str) -> None:
    """Give the policy's agent its first positions, and move those that are where no version reacts to the next activation."""
    agent = agent_of(policy)
    with connection.transaction():
        # of two processes, the second waits here and then finds the first one's positions
        connection.execute("select from activations where policy = %s and number = 1 for update", (policy,))
        known = [one for one in activations_of(connection, policy) if one.log_offset is not None]
        if not known:
            return
        was = lock_positions(connection, [agent], topic).get(agent, {})
        at = {**(was or known[0].positions)}
        for partition, reading in at.items():
            offset = reading.next_offset
            while version_at(known, partition, offset) == REMOVED and (after := _following(known, partition, offset)):
                at[partition] = after.positions[partition]
                offset = at[partition].next_offset
        if at != was:
            set_generation(connection, topic, {agent: at}, "activation")


def held_policies(connection: Connection) -> list[str]:
    """The policies that this database is new to, without those that were removed."""
    found = connection.execute(
        "select policy from activations group by policy having bool_or(number = 1 and posts_from is null) "
        "and (array_agg(version order by number desc))[1] > 0 order by policy"
    )
    return [policy for (policy,) in found]


def resume(
    settings: Settings, policy: str | None, posts_from: datetime | str, *, also_live: bool = False
) -> tuple[list[str], str]:
    """Let a policy that is held react, or all. Posts are made of events that the broker got at `posts_from` or later, or `EVER`.

    With `also_live` the policy need not be held. Returns the policies, and the database's user. Raises NeverLive, NotHeld, and what
    `bring_in` raises.
    """
    with session(settings, "samefold policies", short_transactions=True) as connection:
        bring_in(settings, connection)
        found = held = held_policies(connection)
        if policy is not None:
            if not activations_of(connection, policy):
                raise NeverLive(f"Policy '{policy}' was never live.", _SEE)
            found = [policy] if policy in held or also_live else []
        if not found:
            raise NotHeld(
                f"{'No policy' if policy is None else f'Policy {policy!r}'} waits for a decision.",
                f"{_SEE} With a name and --yes, that policy also makes no posts of older events that it has not read yet or "
                "that are parked.",
            )
        [(user,)] = connection.execute(
            "with done as (update activations set posts_from = %s where policy = any(%s)) select current_user",
            (posts_from, found),
        )
    return found, user


def start_all(settings: Settings) -> None:
    """Make this code's policies live before the service is asked anything; sources begin when they first run.

    Raises BadPolicy, and what `bring_in` raises.
    """
    if found := [policy for policy in discover().values() if not policy.source]:
        with session(settings, "samefold policies", short_transactions=True) as connection:
            for policy in found:
                if start_new(settings, connection, policy):
                    # trimming of the log spares what is behind the positions
                    ensure_positions(connection, settings.events_topic, policy.name)


def start_new(settings: Settings, connection: Connection, policy: Policy) -> bool:
    """Make a policy live that never was, if the service has never been asked anything. Returns whether it is live now.

    A policy of a service with history waits for `samefold policies switch`. A source begins where its setting says. Raises
    SourceRenamed, what `bring_in` raises, and what `begin_of` raises.
    """
    bring_in(settings, connection)
    if activations_of(connection, policy.name):
        return True
    events = require_contract(settings, connection)
    if policy.source:
        begin, end = begin_of(settings, policy.source), _end_of_events(settings, connection, events, Silent())
        _require_own(connection, policy.name, begin)
        _insert(connection, policy.name, 1, policy.version, end, begin)
        bring_in(settings, connection)
        return True
    commands = topics.describe(settings, settings.commands_topic)
    answered = connection.execute(
        "select 1 from positions where topic = %s and command_offset >= 0 limit 1", (events.name,)
    ).fetchone()
    if answered or any(commands.end.values()):
        return False
    _insert(connection, policy.name, 1, policy.version, dict.fromkeys(range(events.partitions), START))
    bring_in(settings, connection)
    return True


def switch(settings: Settings, policy: Policy, *, lower: bool = False, progress: Progress | None = None) -> Activation:
    """Make this code's version of the policy live, from where the policy's agent is; a new one begins at the end of `events`.

    `lower` lets an older version take over. A switch that was killed is completed by the next one, or by any worker.
    Raises AlreadyLive, LowerVersion, OldEventsLeft, SwitchLost, LogTrimmed, and what `bring_in` raises.
    """

    def require(_: Connection, live: int) -> None:
        if live == policy.version:
            raise AlreadyLive(
                f"Policy '{policy.name}' is live as version {live}, which is this code's.",
                f"If it has changed, raise VERSION in policies/{policy.name}.py, then switch.",
            )
        if live > policy.version and not lower:
            raise LowerVersion(
                f"Policy '{policy.name}' is live as version {live}, and this code's is the older version {policy.version}.",
                "Run the command with the newer code; or with --yes, if the older version is to react from now on.",
            )

    return _activate(settings, policy.name, policy.version, require, progress or Silent(), policy.source)


def reposition(settings: Settings, policy: Policy, to: str | datetime) -> Activation:
    """Let a source go on from a later place in its topic, or in one that was made anew: earliest, end, or a time.

    What it has not received before that place, it never will. Raises NeverLive, SourceLostItsEnd, and what `switch` raises.
    """
    assert policy.source, "only a source has a place in a topic"

    def require(_: Connection, live: int) -> None:
        if live != policy.version:
            raise NeverLive(
                f"Version {policy.version} of source '{policy.name}' is not live.",
                f"{_SEE} Run the command with the code of the live version.",
            )

    return _activate(settings, policy.name, policy.version, require, Silent(), policy.source, to)


def remove(settings: Settings, name: str) -> Activation:
    """Let no version of the policy react from its positions on.

    Raises NeverLive, OldEventsLeft, WishesOpen, SwitchLost, and what `bring_in` raises.
    """

    def require(connection: Connection, live: int) -> None:
        if live == REMOVED:
            raise NeverLive(f"Policy '{name}' is not live.", _SEE)
        [(wishes, parked)] = connection.execute(
            "select (select count(*) from outbox where policy = %(policy)s and kind = 'send')"
            " + (select count(*) from posts where policy = %(policy)s),"
            " (select count(*) from parked where table_name = %(agent)s)",
            {"policy": name, "agent": agent_of(name)},
        ).fetchall()
        if wishes:
            raise WishesOpen(
                f"Policy '{name}' has {wishes:,} wishes under way, which no process would complete.",
                f"`samefold outbox list --policy {name}` shows them. Let its code run until they have ended, and drop "
                "the others: dead letters, timers, waiting posts.",
            )
        if parked:
            raise WishesOpen(
                f"Policy '{name}' has {parked:,} parked streams, whose events it has not reacted to.",
                "`samefold parked list` shows them. Replay or drop them first.",
            )

    return _activate(settings, name, REMOVED, require, Silent())


def _activate(
    settings: Settings,
    policy: str,
    version: int,
    require: Callable[[Connection, int], None],
    progress: Progress,
    source: Source | None = None,
    to: str | datetime | None = None,
) -> Activation:
    """Let this version react from the policy's positions on. `require` gets the live version, and raises where it may not.

    A source goes on where it is in its topic, unless an operator moves it `to` another place.
    """
    with session(settings, "samefold policies", short_transactions=True) as connection:
        topic = require_contract(settings, connection)
        unfinished = [one.number for one in activations_of(connection, policy) if one.log_offset is None]
        bring_in(settings, connection)
        if policy in held_policies(connection):
            raise NewDatabase(policy)
        ensure_positions(connection, topic.name, policy)
        known = activations_of(connection, policy)
        is_new = version != REMOVED and (not known or known[-1].version == REMOVED)
        end = _end_of_events(settings, connection, topic, progress) if is_new else {}
        has_begun = not is_new and any(one.messages for one in known)
        received = _received(connection, policy, known)
        move = _place_in(settings, source, to, received) if source and to else None
        if begin := begin_of(settings, source) if source and not has_begun and not move else None:
            _require_own(connection, policy, begin)
        with connection.transaction():
            at, known = _locked(connection, topic, policy, end)
            # of a switch that was killed
            if known and known[-1].version == version and known[-1].number in unfinished and not move:
                return known[-1]
            require(connection, known[-1].version if known else REMOVED)
            number = known[-1].number + 1 if known else 1
            messages = _messages_at(connection, policy, known, begin, move)
            if move:  # no version receives what lies between, in a restored database either
                _insert(connection, policy, number, REMOVED, at, _received(connection, policy, known))
                number += 1
            _insert(connection, policy, number, version, at, messages)
            if messages:
                is_other = received is not None and received.topic_id != messages.topic_id
                _set_messages(connection, policy, number, messages, moves=is_other or move is not None)
            # fence the batches of the version before
            set_generation(connection, topic.name, {agent_of(policy): at}, "switch")
        reach("activation written")
        bring_in(settings, connection)
        made = next(one for one in activations_of(connection, policy) if one.number == number)
    if made.version != version:
        raise SwitchLost(
            f"Policy '{policy}' was switched to version {made.version} at the same time, from another database.",
            f"{_SEE} Only one database may belong to a log.",
        )
    return made


def _end_of_events(
    settings: Settings, connection: Connection, topic: topics.Topic, progress: Progress
) -> dict[int, Reading]:
    """The position at the topic's end, found by reading what the core agent has not read, which may be much."""
    core = read_positions(connection, CORE, topic.name)
    end = dict(core.readings) if core else dict.fromkeys(range(topic.partitions), START)
    progress.begin("events", sum(topic.end.values()) - sum(at.next_offset for at in end.values()))
    for partition in end:
        at, stop = end[partition].next_offset, topic.end[partition]
        for records in read_range(settings, topic.name, partition, at, stop):
            end[partition], _, _ = read(end[partition], records)
            progress.advance(len(records))
    return end


def _locked(
    connection: Connection, topic: topics.Topic, policy: str, end: Mapping[int, Reading]
) -> tuple[dict[int, Reading], list[Activation]]:
    """Where the next activation begins, not before `end`, and the known ones; the positions are locked. Raises OldEventsLeft."""
    agent = agent_of(policy)
    connection.execute("lock table activations in share row exclusive mode")  # of two switches, the second waits here
    locked = lock_positions(connection, [agent], topic.name)
    known = activations_of(connection, policy)
    if not known:
        return {**end}, known
    if known[-1].version != REMOVED:  # another one was made live meanwhile: its events stay its own
        end = {}
    mine = locked.get(agent) or {**known[0].positions}
    if left := [partition for partition, at in mine.items() if _following(known, partition, at.next_offset)]:
        version = version_at(known, left[0], mine[left[0]].next_offset)
        raise OldEventsLeft(
            f"Policy '{policy}' has not read all events that belong to its version {version}, in "
            f"{'partition' if len(left) == 1 else 'partitions'} {', '.join(map(str, left))}.",
            f"Run the code with version {version} until it has read them, then this code.",
        )
    return {partition: max(at, end.get(partition, at)) for partition, at in mine.items()}, known


def _insert(
    connection: Connection,
    policy: str,
    number: int,
    version: int,
    positions: Mapping[int, Reading],
    messages: Messages | None = None,
) -> None:
    connection.execute(
        "insert into activations (policy, number, version, positions, messages) values (%s, %s, %s, %s, %s) "
        "on conflict do nothing",
        (policy, number, version, json.dumps(positions), _json(messages)),
    )


def _json(messages: Messages | None) -> str | None:
    return None if messages is None else msgspec.json.encode(messages).decode()


# ── of a source, in its topic ──


class Move(NamedTuple):
    """An operator moves a source to this place. `lost`: partitions that end before what was received."""

    to: Messages
    lost: Set[int]


def begin_of(settings: Settings, source: Source) -> Messages:
    """Where a source begins, as its setting says. Raises NotConfigured, TopicMissing, KafkaUnavailable, KafkaRefused."""
    return _place_in(settings, source, settings.source(source.name).begin).to


def _require_own(connection: Connection, policy: str, begin: Messages) -> None:
    """Raises SourceRenamed."""
    newest = {one.policy: one for one in _select(connection, "order by policy, number")}.values()
    of = [one.policy for one in newest if one.version and one.messages and one.messages.topic_id == begin.topic_id]
    if gone := {*of} - {policy} - discover().keys():
        old = min(gone)
        raise SourceRenamed(
            f"Source '{policy}' would receive again what '{old}' has received, which is live and not in this code.",
            f"If it was renamed, give the file its old name back: policies/{old}.py. If it is another source, run first "
            f"`samefold policies remove {old}`.",
        )


def _place_in(settings: Settings, source: Source, where: str | datetime, received: Messages | None = None) -> Move:
    """`received` was read before: of a topic with traffic, what is received now is behind the ends that are asked for here.

    Raises BadMoment, SourceLostItsEnd.
    """
    if isinstance(where, datetime) and where < EPOCH:  # Kafka takes -1 ms for the topic's end
        raise BadMoment(f"{where} is before 1970.", "Write a later time, or earliest.")
    theirs, name = settings.of_source(source.name)
    topic = topics.describe(theirs, name)
    offsets = topic.first if where == "earliest" else topic.end
    if isinstance(where, datetime):
        offsets = offsets | topics.offsets_at(theirs, topic, int(where.timestamp() * 1000))
    at = received.offsets if received and received.topic_id == topic.id else {}
    lost = {number for number, end in topic.end.items() if at.get(number, 0) > end}
    if lost and not source.goes_by_id(settings):
        raise SourceLostItsEnd(
            f"Topic '{name}' has lost messages that were received: new ones get offsets that stand for those.",
            'They would be taken for repeats. Name another topic in SAMEFOLD_SOURCES, or count messages\' own ids: DEDUP = "id".',
        )
    return Move(Messages(topic.id, offsets), lost)


def _received(connection: Connection, policy: str, known: Sequence[Activation]) -> Messages | None:
    """How far a source has received its topic, its positions locked; None where it has not begun."""
    if (was := next((one.messages for one in reversed(known) if one.messages), None)) is None:
        return None
    rows = connection.execute(
        "select partition, next_offset from source_positions where policy = %s and topic_id = %s order by partition for update",
        (policy, was.topic_id),
    ).fetchall()
    return Messages(was.topic_id, was.offsets | dict(rows))


def _messages_at(
    connection: Connection, policy: str, known: Sequence[Activation], begin: Messages | None, move: Move | None
) -> Messages | None:
    """Where a source's next activation begins, its positions locked; None of another policy.

    It never goes back in a topic, nor in one to which it returns: what it receives again would wait for outcomes that were read
    before. Raises OldEventsLeft.
    """
    to, received = move.to if move else begin, _received(connection, policy, known)
    if received is None:
        return to
    if to and to.topic_id != received.topic_id:
        before = [one.messages.offsets for one in known if one.messages and one.messages.topic_id == to.topic_id]
        return Messages(
            to.topic_id, {p: max(at, *(was.get(p, 0) for was in before), 0) for p, at in to.offsets.items()}
        )
    at, newest = received.offsets, known[-1]
    begins = {} if move or newest.version == REMOVED or not newest.messages else newest.messages.offsets
    if left := [number for number, since in begins.items() if at[number] < since]:
        raise OldEventsLeft(
            f"Source '{policy}' has not received all messages that belong to an older version, in "
            f"{'partition' if len(left) == 1 else 'partitions'} {', '.join(map(str, left))} of its topic.",
            "Run the code with that version until it has received them, then this code.",
        )
    if to is None:
        return received
    lost = move.lost if move else set()
    return Messages(to.topic_id, {p: max(offset, 0 if p in lost else at.get(p, 0)) for p, offset in to.offsets.items()})


def _set_messages(connection: Connection, policy: str, number: int, messages: Messages, *, moves: bool) -> None:
    """Fence what receives under an earlier activation. `moves`: it goes on from this one's begin."""
    if moves:
        connection.execute("delete from source_positions where policy = %s", (policy,))
        for partition, offset in sorted(messages.offsets.items()):
            connection.execute(
                "insert into source_positions values (%s, %s, %s, %s, %s)",
                (policy, partition, messages.topic_id, offset, number),
            )
    connection.execute("update source_positions set activation = %s where policy = %s", (number, policy))


def _following(activations: Sequence[Activation], partition: int, offset: int) -> Activation | None:
    """The first activation that begins behind this offset."""
    return next((one for one in activations if one.positions[partition].next_offset > offset), None)


def _end(settings: Settings, admin: topics.Admin, position: int) -> int:
    """The topic's end. Raises TopicChanged if it lacks records that were read."""
    end = topics.describe(settings, settings.policies_topic, admin=admin).end[0]
    if end < position:
        raise topics.TopicChanged(
            f"Topic '{settings.policies_topic}' ends at {end}, but records up to {position} were read from it.",
            "It was recreated or lost records. Restore it.",
        )
    return end


def _copy(settings: Settings, connection: Connection, admin: topics.Admin, position: int, end: int) -> None:
    """Write the records of [position, end) into the table, in one transaction."""
    topic = topics.ensure_policies(settings, admin)
    check_contract(connection, Contract.of(topic))
    events = require_contract(settings, connection)
    found = [one for batch in read_range(settings, topic.name, 0, position, end) for one in batch]
    with connection.transaction():
        for record in found:
            if record.value is None or not record.value.startswith(ENVELOPE):
                continue
            try:
                one = _decoder.decode(record.value)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise unreadable(topic.name, record, error) from error
            if one.events_topic_id != events.id:
                raise topics.TopicChanged(
                    f"Topic '{topic.name}' was written for a topic '{events.name}' with the id {one.events_topic_id}; "
                    f"now it is {events.id}.",
                    "Restore that topic; or, for a new log, name a new topic in SAMEFOLD_POLICIES_TOPIC.",
                )
            connection.execute(
                "insert into activations as a (policy, number, version, positions, log_offset, at, messages, posts_from) "
                "values (%(policy)s, %(number)s, %(version)s, %(positions)s, %(offset)s, %(at)s, %(messages)s, "
                "case when %(messages)s::jsonb is not null or exists (select from positions where agent = %(agent)s) "
                "then '-infinity'::timestamptz end) "  # a source makes no posts
                "on conflict (policy, number) do update set version = excluded.version, "
                "positions = excluded.positions, log_offset = excluded.log_offset, at = excluded.at, "
                "messages = excluded.messages where a.log_offset is null",
                msgspec.structs.asdict(one)
                | {"positions": json.dumps(one.positions), "agent": agent_of(one.policy)}
                | {"messages": _json(one.messages)}
                | {"offset": record.offset, "at": time_of(record.time_ms)},
            )
