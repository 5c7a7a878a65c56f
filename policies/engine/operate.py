"""What `samefold policies`, `outbox` and `processes` do: what is live, the wishes on their way, and what policies wait for."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any, NamedTuple

from psycopg.rows import class_row, dict_row

from infra.database.connect import Connection, session
from infra.errors import SamefoldError
from infra.log import topics
from infra.settings import Settings
from policies.engine import policy as declared
from policies.engine import posts
from policies.engine.activations import REMOVED, Activation, activations_of, held_policies, version_at
from policies.engine.dead_letters import DeadReason
from policies.engine.outbox import CHANNEL, STATE, again
from policies.engine.policy import Policy, agent_of
from policies.engine.receiver import received_again
from projections.engine.live.lag import OUTBOX
from projections.engine.operate.overview import AgentLag, lag_of
from projections.engine.store.positions import read_positions
from projections.engine.views.view import POLICY


class UnknownPolicy(SamefoldError):
    """No policy has that name."""

    exit_code = 2


class NoSuchWish(SamefoldError):
    """The outbox has no wish with that id."""


class NotDead(SamefoldError):
    """The wish is under way, or can't be sent again."""


@dataclass(frozen=True, slots=True)
class PolicyNow:
    """A policy in this code and as it is live; either version may be None."""

    name: str
    code: int | None
    live: int | None
    since: datetime | None
    """When the newest activation was recorded."""
    state: str
    """live, switching, new, new-database, removed, other-version, old-events or no-code."""
    needs: tuple[int, ...]
    """The versions to which events belong that have not been read."""
    open: int
    dead: int
    parked: int
    lag: AgentLag
    source: SourceNow | None = None
    """Of one that receives messages of another service. `lag` is then behind the outcomes of what it sent."""


@dataclass(frozen=True, slots=True)
class SourceNow:
    """How far a source has received its topic."""

    name: str
    topic: str
    received: dict[int, int]
    """The next offset, by partition."""
    behind: int | None
    """Messages in the topic that were not received; None where `problem` is."""
    problem: str | None


@dataclass(frozen=True, slots=True)
class WishNow:
    """A row of the outbox or a post, without its bodies, which may be confidential."""

    id: str
    policy: str
    state: str
    """unsent, waiting, sent, dead; outcome where the wish has not been read yet; dropped where only its outcome is waited for;
    no-endpoint where SAMEFOLD_WEBHOOKS names endpoints here, but not that one."""
    kind: str | None
    stream: str | None
    version: int | None
    target: str | None
    type: str | None
    due: datetime | None
    wished_at: datetime | None
    sent_at: datetime | None
    attempts: int
    next_attempt: datetime | None
    dead: str | None
    has_follow_up: bool
    """Whether an outcome of it leads to a command."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Which:
    """Wishes that all of this fits: of those that `ids` names any, else dead letters; with `alive`, any."""

    ids: Sequence[str] | None = None
    policy: str | None = None
    endpoint: str | None = None
    reason: str | None = None
    """The code that a dead letter's reason begins with."""
    since: datetime | None = None
    """Wished since then."""
    until: datetime | None = None
    """Wished before that."""
    alive: bool = False


def require_policy(name: str) -> Policy:
    """A policy of this code. Raises UnknownPolicy."""
    policies = declared.discover()
    if name in policies:
        return policies[name]
    known = f"The policies are {', '.join(sorted(policies))}." if policies else "policies/ has none."
    raise UnknownPolicy(f"There is no policy '{name}'.", known)


def require_known(settings: Settings, name: str) -> None:
    """Raises UnknownPolicy for a name that neither this code nor the log has, and DatabaseUnavailable."""
    with session(settings, "samefold policies") as connection:
        if not activations_of(connection, name):
            require_policy(name)


def policies_now(settings: Settings) -> list[PolicyNow]:
    """All policies of this code, and those that are live or have wishes.

    Raises DatabaseUnavailable, KafkaUnavailable, TopicMissing.
    """
    with session(settings, "samefold policies", statement_timeout_ms=0) as connection:
        states = policy_states(connection, settings.events_topic)
        outbox = {policy: (wishes, dead) for policy, wishes, dead, *_ in connection.execute(OUTBOX)}
        parked: dict[str, int] = dict(connection.execute("select view, count(*) from parked group by view").fetchall())
        positions = {name: read_positions(connection, agent_of(name), settings.events_topic) for name in states}
        received: dict[str, dict[int, tuple[str, int]]] = {}
        for name, number, topic_id, offset in connection.execute(_RECEIVED):
            received.setdefault(name, {})[number] = topic_id, offset
    policies = declared.discover()
    topic = topics.describe(settings, settings.events_topic)
    found = []
    for name, now in states.items():
        mine, (wishes, dead) = positions[name], outbox.get(name, (0, 0))
        if now.code is None and now.live is None and not wishes and not dead:  # it was removed
            continue
        lag = lag_of(settings, mine.readings, topic) if mine and now.live else AgentLag(0, 0.0)
        here = parked.get(agent_of(name), 0)
        code = policies.get(name)
        source = _source_now(settings, code.source.name, received.get(name, {})) if code and code.source else None
        found.append(PolicyNow(*(name, *now), wishes, dead, here, lag, source))
    return found


_RECEIVED = "select policy, partition, topic_id, next_offset from source_positions order by policy, partition"


def _source_now(settings: Settings, name: str, at: Mapping[int, tuple[str, int]]) -> SourceNow:
    topic_name, problem, behind = "", None, None
    received = {number: offset for number, (_, offset) in at.items()}
    try:
        theirs, topic_name = settings.of_source(name)
        topic = topics.describe(theirs, topic_name, admin=topics.Admin(theirs, THEIRS_S))
        if {topic_id for topic_id, _ in at.values()} <= {topic.id}:
            comes = {n: received.get(n, first) for n, first in topic.first.items()}
            behind = sum(topic.end[n] - offset for n, offset in comes.items())
            beyond = {n: offset for n, offset in comes.items() if not topic.first[n] <= offset <= topic.end[n]}
            if gaps := [f"{topic_name}[{n}]@{offset}" for n, offset in beyond.items()]:
                problem = f"The topic does not hold what comes next at {', '.join(gaps)}."
        else:
            problem = f"Topic '{topic_name}' was made anew."
    except SamefoldError as error:
        problem = error.message
    return SourceNow(name, topic_name, received, behind, problem)


class PolicyState(NamedTuple):
    """The same without what has to be counted."""

    code: int | None
    live: int | None
    since: datetime | None
    state: str
    needs: tuple[int, ...]


def policy_states(connection: Connection, topic: str) -> dict[str, PolicyState]:
    """By name, all policies of this code, and those that were ever live."""
    policies = declared.discover()
    since: dict[str, datetime] = dict(
        connection.execute("select policy, max(at) from activations group by policy").fetchall()
    )
    held = held_policies(connection)
    positions: dict[str, dict[int, int]] = {}
    for agent, partition, offset in connection.execute(
        "select agent, partition, next_offset from positions where topic = %s", (topic,)
    ):
        positions.setdefault(agent, {})[partition] = offset
    found = {}
    for name in sorted({*policies, *since}):
        code, known = policies.get(name), activations_of(connection, name)
        needs = _needed(known, positions.get(agent_of(name)))
        state = "new-database" if name in held else _state(known, code, needs)
        live = known[-1].version or None if known else None
        found[name] = PolicyState(code.version if code else None, live, since.get(name), state, needs)
    return found


def _needed(known: Sequence[Activation], offsets: Mapping[int, int] | None) -> tuple[int, ...]:
    if offsets is None:
        offsets = {partition: at.next_offset for partition, at in known[0].positions.items()} if known else {}
    return tuple(sorted({version_at(known, partition, at) for partition, at in offsets.items()} - {REMOVED}))


def _state(known: Sequence[Activation], code: Policy | None, needs: Sequence[int]) -> str:
    if not known:
        return "new"
    live = known[-1]
    if live.log_offset is None:
        return "switching"
    if code is None:
        return "no-code"
    if live.version == REMOVED:
        return "removed"
    if live.version != code.version:
        return "other-version"
    return "live" if set(needs) <= {live.version} else "old-events"


THEIRS_S = 4.0
"""For the answer of another service's Kafka."""
STEP = 1_000
"""Wishes that are changed in one transaction."""
COUNTED = 1_000
"""Wishes beyond these are not counted, of either table."""

_STATE_OF_POST = """case when dead is not null then 'dead' when p.endpoint <> all(%(named)s) then 'no-endpoint'
  when next_attempt > now() and not claimed then 'waiting' else 'unsent' end"""
_FITS = """(%(ids)s::text[] is null or id = any(%(ids)s)) and (%(policy)s::text is null or policy = %(policy)s)
  and (%(reason)s::text is null or starts_with(dead || ':', %(reason)s || ':'))
  and (%(since)s::timestamptz is null or wished_at >= %(since)s)
  and (%(until)s::timestamptz is null or wished_at < %(until)s)
  and (%(alive)s or %(ids)s::text[] is not null or dead is not null)"""
_COMMANDS = f"outbox where %(endpoint)s::text is null and {_FITS}"
_POSTS = f"posts where (%(endpoint)s::text is null or endpoint = %(endpoint)s) and {_FITS}"
_OLDEST = "order by wished_at nulls last, id limit %(limit)s"
_WISHES = f"""
(select id, policy, {STATE} as state, kind, stream, version, target, type, due, wished_at, sent_at, 0 as attempts,
        null as next_attempt, dead, coalesce(then_type, otherwise_type, later_type) is not null as has_follow_up
   from {_COMMANDS} {_OLDEST})
 union all
(select id, p.policy, {_STATE_OF_POST}, 'post', p.stream, version, p.endpoint, null, null, wished_at, null, attempts,
        next_attempt, dead, false
   from (select * from {_POSTS} {_OLDEST.replace(" nulls last", "")}) p left join lanes using (endpoint, policy, stream))
{_OLDEST}""".encode()  # noqa: S608
_COUNT = f"""
select (select count(*) from (select from {_COMMANDS} limit {COUNTED}) c)
     + (select count(*) from (select from {_POSTS} limit {COUNTED}) p)
""".encode()  # noqa: S608
_IN_ORDER = f"""
select id from (select id, policy, stream, version, number from {_COMMANDS}
                 union all select id, policy, stream, version, number from {_POSTS}) w
 order by policy, stream, version, number, id
""".encode()  # noqa: S608
_WISH = f"select {STATE} as state, o.* from outbox o where id = %(id)s".encode()  # noqa: S608
_POST = f"""
select {_STATE_OF_POST} as state, 'post' as kind, p.*, next_attempt
  from posts p left join lanes l using (endpoint, policy, stream) where id = %(id)s
""".encode()  # noqa: S608


def wishes(settings: Settings, which: Which, *, limit: int | None = None) -> tuple[int, list[WishNow]]:
    """How many there are, counted up to COUNTED, and the first of them, the oldest first.

    Raises NoSuchWish for an id that none has, DatabaseUnavailable.
    """
    values = _values(settings, which) | {"limit": limit}
    with session(settings, "samefold outbox", by_key=True) as connection:
        [(count,)] = connection.execute(_COUNT, values)
        found = connection.cursor(row_factory=class_row(WishNow)).execute(_WISHES, values).fetchall()
    if missing := {*(which.ids or ())} - {one.id for one in found}:
        raise _missing(sorted(missing))
    return count, found


def wish(settings: Settings, ident: str) -> dict[str, Any]:
    """A row of the outbox, or a post, with all its columns; bodies as JSON. Raises NoSuchWish, DatabaseUnavailable."""
    values = _values(settings, Which()) | {"id": ident}
    with session(settings, "samefold outbox") as connection:
        cursor = connection.cursor(row_factory=dict_row)
        row = cursor.execute(_WISH, values).fetchone() or cursor.execute(_POST, values).fetchone()
    if row is None:
        raise _missing([ident])
    for name, value in row.items():
        if name.endswith("body") and value is not None:
            with suppress(ValueError):
                row[name] = json.loads(value)
    return row


def retry(
    settings: Settings,
    which: Which,
    advance: Callable[[int], object] = lambda _: None,
    refused: Callable[[str, str], object] = lambda *_: None,
) -> tuple[int, int]:
    """Have dead letters sent again, rejected commands under new ids, in the order of their events: how many are, and can't be.

    STEP of them at once; `advance` gets the number of each step's wishes, `refused` the id of each message that this code can't
    receive, and why. With ids it is all or none of them, unless they change meanwhile. Raises NoSuchWish, NotDead,
    DatabaseUnavailable.
    """
    if which.ids is not None:
        _require_dead(settings, which.ids)
    retried = seen = 0
    for connection, ids in _steps(settings, which):
        retried += _receive_again(settings, connection, ids, refused)
        with connection.transaction():
            retried += posts.revive(connection, ids) + connection.execute(_AGAIN, (ids,)).rowcount
            rejected = [ident for (ident,) in connection.execute(_REJECTED, (ids,))]
            again(connection, rejected)
            retried += len(rejected)
            connection.execute(f"notify {CHANNEL}")
        seen += len(ids)
        advance(len(ids))
    return retried, seen - retried


def _receive_again(
    settings: Settings, connection: Connection, ids: Sequence[str], refused: Callable[[str, str], object]
) -> int:
    """Receive those of these that are messages which could not be received by this code; how many it could."""
    dead: dict[str, list[tuple[str, str, int]]] = {}
    for policy, ident, place, offset in connection.execute(_MESSAGES, (ids,)).fetchall():
        dead.setdefault(policy, []).append((ident, place, offset))
    received, known = 0, declared.discover() if dead else {}
    for policy, found in dead.items():
        code = known.get(policy)
        if code is None or code.source is None:
            whys: Iterable[str | None] = [f"this code has no source '{policy}'"] * len(found)
        else:
            whys = received_again(settings, connection, code, found)
        for (ident, _, _), why in zip(found, whys, strict=True):
            if why is None:
                received += 1
            else:
                refused(ident, why)
    return received


def drop(settings: Settings, which: Which, advance: Callable[[int], object] = lambda _: None) -> int:
    """Remove wishes: how many. What may have been sent stays until its outcome has come, which leads to nothing.

    STEP of them at once; `advance` gets the number of each step's wishes. Raises DatabaseUnavailable.
    """
    dropped = 0
    for connection, ids in _steps(settings, which):
        with connection.transaction():
            dropped += posts.drop(connection, ids)
            dropped += len(connection.execute(_LOCK, (ids,)).fetchall())
            connection.execute(_DROP, (ids,))
            connection.execute(_DISARM, (ids,))
        advance(len(ids))
    return dropped


_MAY_BE_SENT = f"outcome is null and {STATE} in ('unsent', 'sent')"
_LOCK = b"select from outbox where id = any(%s) order by id for update"  # as batches lock them
_DROP = f"delete from outbox where id = any(%s) and not ({_MAY_BE_SENT})".encode()  # noqa: S608
_DISARM = f"""
update outbox set kind = 'dropped', body = null, then_type = null, otherwise_type = null, later_type = null
 where id = any(%s) and {_MAY_BE_SENT}
""".encode()  # noqa: S608
_CAN_BE_SENT = f"kind = 'send' and dead is not null and dead not like '{DeadReason.INVALID_WISH}%%' and outcome is null"
_MESSAGES = (
    "select policy, id, stream, version from outbox where id = any(%s) and kind = 'message' order by stream, version"
)
_REJECTED = f"""
select id from outbox where id = any(%s) and dead like '{DeadReason.REFUSED}: %%' order by id for update
""".encode()  # noqa: S608
_AGAIN = f"update outbox set dead = null where id = any(%s) and {_CAN_BE_SENT}".encode()  # noqa: S608


def _values(settings: Settings, which: Which) -> dict[str, Any]:
    # without any endpoint, this is not the environment of a process that posts
    return {"named": [*settings.webhooks] or None} | asdict(which)


def _steps(settings: Settings, which: Which) -> Iterator[tuple[Connection, list[str]]]:
    """The ids in the order of their events, as they were at the beginning, each with a connection to change them by."""
    with (
        session(settings, "samefold outbox", statement_timeout_ms=0) as reading,
        session(settings, "samefold outbox") as writing,
        reading.cursor("wishes", withhold=True) as cursor,  # in no transaction, which would time out and hold up vacuum
    ):
        cursor.execute(_IN_ORDER, _values(settings, which))
        while found := cursor.fetchmany(STEP):
            yield writing, [ident for (ident,) in found]


def _require_dead(settings: Settings, idents: Sequence[str]) -> None:
    """Raises NoSuchWish; NotDead unless all of them can be sent again."""
    _, found = wishes(settings, Which(ids=idents))
    if others := [f"{one.id} ({one.state})" for one in found if one.state != "dead"]:
        raise NotDead(
            f"{', '.join(others)} {'is' if len(others) == 1 else 'are'} under way; nothing was changed.",
            "This takes dead letters: `samefold outbox list --dead`.",
        )
    for reason, (why, hint) in _NEVER_AGAIN.items():
        if those := [one.id for one in found if (one.dead or "").startswith(reason)]:
            raise NotDead(f"{', '.join(those)} can't be sent again: {why}; nothing was changed.", hint)


_NEVER_AGAIN = {
    DeadReason.INVALID_WISH: (
        "it has no body, because a value was invalid",
        "Send the missing command yourself, then `samefold outbox drop ID`.",
    ),
    DeadReason.ID_REUSED: (  # a handler decides no id twice
        "another command had this id, and was decided",
        "`samefold outbox show ID` shows both; `samefold outbox drop ID` removes it.",
    ),
}


def _missing(idents: Sequence[str]) -> NoSuchWish:
    return NoSuchWish(
        f"The outbox has no {', '.join(idents)}; nothing was changed.",
        "It has ended, or was never wished. `samefold outbox list` shows what is under way.",
    )


@dataclass(frozen=True, slots=True)
class ProcessNow:
    policy: str
    stream: str
    since: datetime | None
    """Of the oldest thing that it waits for."""
    stuck: bool
    """Whether it goes on only when an operator acts."""
    waits: int
    first: list[dict[str, Any]]
    """The first ten things that it waits for, those that need a person before all others, each with `what` (unsent, timer, sent and
    not answered, post, dead, parked), `since`, `id`, `target`, `type`, `until` and `why`.
    """


def processes(settings: Settings, policy: str | None, *, stuck: bool, limit: int) -> list[ProcessNow]:
    """Those that wait, the oldest first. Raises DatabaseUnavailable."""
    with session(settings, "samefold processes", statement_timeout_ms=0) as connection:
        cursor = connection.cursor(row_factory=class_row(ProcessNow))
        return cursor.execute(
            _PROCESSES, {"policy": policy, "stuck": stuck, "limit": limit, "named": [*settings.webhooks] or None}
        ).fetchall()


_PROCESSES = f"""
with waits as not materialized (
  select policy, stream, id, target, type, dead as why, wished_at as since, case when dead is null then due end as until,
         replace({STATE}, 'waiting', 'timer') as what
    from outbox where kind = 'send' and (dead is not null or not %(stuck)s)
   union all
  select policy, stream, id, endpoint, null, coalesce(dead, no_endpoint), wished_at, case when not claimed then next_attempt end,
         case when dead is not null then 'dead' else 'post' end
    from posts left join lanes using (endpoint, policy, stream),
         lateral (select case when endpoint <> all(%(named)s) then 'no-endpoint: SAMEFOLD_WEBHOOKS has no such one' end)
                 n (no_endpoint)
   where coalesce(dead, no_endpoint) is not null or not %(stuck)s
   union all
  select substr(view, {len(POLICY) + 1}), stream, null, null, null, error, parked_at, null, 'parked'
    from parked where starts_with(view, '{POLICY}')),
shown as materialized (
  select policy, stream, min(since) as since, bool_or(why is not null) as stuck, count(*) as waits
    from waits where %(policy)s::text is null or policy = %(policy)s
   group by policy, stream order by min(since) nulls first, policy, stream limit %(limit)s),
placed as (
  select w.*, row_number() over (partition by w.policy, w.stream order by why is null, w.since, id) as place
    from waits w join shown using (policy, stream))
select s.*, array_agg(to_jsonb(p) - array['policy', 'stream', 'place'] order by place) as first
  from shown s join placed p using (policy, stream) where place <= 10
 group by s.policy, s.stream, s.since, s.stuck, s.waits order by s.since nulls first, s.policy, s.stream
""".encode()  # noqa: S608  # only of those that are shown, their things are put in order
