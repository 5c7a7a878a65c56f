"""The posts of policies that no endpoint has taken yet: what a batch writes of them, and what a deliverer claims and records.

A lane is what one policy posts to one endpoint because of one stream. The table `lanes` has a row for each lane with posts (dead
letters apart), which says when the first of them is due. A deliverer claims a lane by a lease: until that ends, no other one does.

Each statement finds its rows by an index, however many there are. A deliverer waits for no row that another transaction has locked:
`claim` passes over it, and what records an attempt raises LockNotAvailable, to be called again in a moment. Times are the
database's, or `now` where a clock is given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from infra.database.connect import Connection
from infra.log.records import time_of
from policies.engine.dead_letters import log_dead_letters
from projections.engine.store.rows import Statement
from projections.engine.views import binary_arrays
from projections.engine.views.binary_arrays import BinaryArray
from projections.engine.views.column_types import ColumnType, Scalar, type_of

if TYPE_CHECKING:
    from policies.engine.outbox import Wish


class Lane(NamedTuple):
    """A lane that this process has claimed."""

    endpoint: str
    policy: str
    stream: str
    lease: datetime
    """When the lease ends. It also identifies the claim: a later claim of the same lane ends later."""


class PendingPost(NamedTuple):
    """A post that is to go out."""

    id: str
    body: str
    attempts: int
    version: int
    number: int


# ── a policy's batch, and commands ──

_TYPES = {
    **dict.fromkeys(("id", "policy", "stream", "endpoint", "body", "dead"), type_of(Scalar.STR)),
    **dict.fromkeys(("version", "number"), type_of(Scalar.INT)),
    "wished_at": type_of(Scalar.DATETIME),
}


def writes(policy: str, wishes: Sequence[Wish]) -> list[Statement]:
    """The statements of a batch that wishes these posts."""
    if not wishes:
        return []
    rows = [
        one._asdict()
        | {"policy": policy, "stream": one.at.stream, "version": one.at.version, "endpoint": one.target}
        | {"wished_at": time_of(one.at.time_ms)}
        for one in sorted(wishes)
    ]
    ids = binary_arrays.texts([one.id for one in wishes])
    dead = [Statement(_BURIED, [ids], log_dead_letters)] if any(one.dead for one in wishes) else []
    return [Statement(_INSERT, packed(_TYPES, rows)), Statement(_OPEN_LANES + b"false", [ids]), *dead]


def packed(types: Mapping[str, ColumnType], rows: Sequence[Mapping[str, Any]]) -> list[BinaryArray]:
    """An array for each of these columns of the rows; what a row lacks is null."""
    return [kind.pack([row.get(column) for row in rows]) for column, kind in types.items()]


def revive(connection: Connection, ids: Sequence[str]) -> int:
    """Let these dead letters begin again with their first attempt; how many. In the caller's transaction."""
    revived = connection.execute(_REVIVE, [ids]).rowcount
    connection.execute(_OPEN_LANES + b"not l.claimed", [ids])
    return revived


def drop(connection: Connection, ids: Sequence[str]) -> int:
    """Delete these posts; how many. In the caller's transaction."""
    lanes = connection.execute(_LOCK_LANES, [ids]).fetchall()
    dropped = connection.execute("delete from posts where id = any(%s)", [ids]).rowcount
    if lanes:
        columns = [list(column) for column in zip(*lanes, strict=True)]
        connection.execute(_CLOSE_LANES, columns)
        connection.execute(_WAKE_LANES, columns)  # a dropped post may have been tried in vain, and the next one never
    return dropped


# no post of an event before the moment that an operator named in a new database: it was made in the old one
_INSERT = f"""
insert into posts ({", ".join(_TYPES)})
select u.* from unnest({", ".join(["%s"] * len(_TYPES))}) u ({", ".join(_TYPES)})
 where (wished_at < (select posts_from from activations a where a.policy = u.policy and number = 1)) is not true
    on conflict (id) do nothing
""".encode()  # noqa: S608

# Found by their ids alone: after an ANALYZE that met dead letters only, PostgreSQL would read all that are alive instead.
_THESE = "with these as materialized (select endpoint, policy, stream, wished_at, dead from posts where id = any(%s))"
# Sorted, so that transactions can't deadlock on them. It locks the row of a lane that is there, even where nothing changes: a
# deliverer deletes the lane only when it can see these posts.
_OPEN_LANES = f"""
{_THESE}
insert into lanes as l (endpoint, policy, stream, next_attempt)
select endpoint, policy, stream, least(min(wished_at), now()) from these where dead is null
 group by endpoint, policy, stream order by endpoint, policy, stream
    on conflict (endpoint, policy, stream) do update set next_attempt = excluded.next_attempt where """.encode()  # noqa: S608
_BURIED = b"select id, stream, dead from posts where id = any(%s) and dead is not null"
_REVIVE = b"update posts set dead = null, attempts = 0 where id = any(%s) and dead is not null and body is not null"
_LOCK_LANES = f"""
{_THESE}
select endpoint, policy, stream from lanes
 where (endpoint, policy, stream) in (select endpoint, policy, stream from these where dead is null)
 order by endpoint, policy, stream for update
""".encode()  # noqa: S608
_CLOSE_LANES = b"""
delete from lanes l using unnest(%s::text[], %s::text[], %s::text[]) of (endpoint, policy, stream)
 where (l.endpoint, l.policy, l.stream) = (of.endpoint, of.policy, of.stream) and not exists (
   select from posts p where (p.endpoint, p.policy, p.stream) = (l.endpoint, l.policy, l.stream) and p.dead is null)"""

_WAKE_LANES = b"""
update lanes l set next_attempt = now() from unnest(%s::text[], %s::text[], %s::text[]) of (endpoint, policy, stream)
 where (l.endpoint, l.policy, l.stream) = (of.endpoint, of.policy, of.stream) and not claimed"""


# ── a deliverer ──


def endpoints(connection: Connection) -> set[str]:
    """The endpoints that posts wait for."""
    return {endpoint for (endpoint,) in connection.execute(_ENDPOINTS)}


def claim(
    connection: Connection, endpoint: str, most: int, lease_s: float, now: datetime | None = None
) -> list[tuple[Lane, PendingPost | None]]:
    """Claim so many lanes that are due, the longest first. Each comes with its first post; None if it has none any more."""
    values = {"endpoint": endpoint, "most": most, "lease": timedelta(seconds=lease_s), "now": now}
    return [(Lane(*row[:4]), _post(row[4:])) for row in connection.execute(_CLAIM, values)]


def delivered(connection: Connection, lane: Lane, post: PendingPost) -> PendingPost | None:
    """Delete a post that its endpoint has taken. Returns the next one, if the lane is still this process's."""
    [found] = connection.execute(_DELIVERED, lane._asdict() | post._asdict())
    return _post(found)


def bury(connection: Connection, lane: Lane, post: PendingPost, dead: str) -> tuple[bool, PendingPost | None]:
    """Make a post a dead letter if the lane is still this process's. Returns whether it is, and the next one."""
    [(is_mine, *found)] = connection.execute(_BURY, lane._asdict() | post._asdict() | {"dead": dead})
    return is_mine, _post(found)


def try_later(
    connection: Connection, lane: Lane, post: PendingPost, delay_s: float, now: datetime | None = None
) -> None:
    """Count a failed attempt and give the lane back until the next one, if it is still this process's."""
    values = {"delay": timedelta(seconds=delay_s), "now": now}
    connection.execute(_LATER, lane._asdict() | post._asdict() | values)


def release(connection: Connection, lane: Lane, now: datetime | None = None) -> None:
    """Give a lane back, or delete it if it has no posts any more."""
    values = lane._asdict() | {"now": now}
    with connection.transaction():
        connection.execute(_HELD.encode(), values)
        connection.execute(_RELEASE, values)  # in a statement of its own, which sees what was written before the lock


def _post(found: Sequence[Any]) -> PendingPost | None:
    return None if found[0] is None else PendingPost(*found)


_ENDPOINTS = b"""
with recursive found (endpoint) as (
  (select endpoint from lanes order by endpoint limit 1)
   union all
  select (select l.endpoint from lanes l where l.endpoint > found.endpoint order by endpoint limit 1)
    from found where found.endpoint is not null)
select endpoint from found where endpoint is not null
"""  # each step is one look into the index, whatever the endpoints before have

_NOW = "coalesce(%(now)s::timestamptz, now())"
_POST = "id, body, attempts, version, number"
_CLAIM = f"""
with due as materialized (
  select endpoint, policy, stream from lanes where endpoint = %(endpoint)s and next_attempt <= {_NOW}
   order by next_attempt limit %(most)s for update skip locked),
claimed as (
  update lanes l set claimed = true, next_attempt = {_NOW} + %(lease)s from due
   where (l.endpoint, l.policy, l.stream) = (due.endpoint, due.policy, due.stream)
  returning l.endpoint, l.policy, l.stream, l.next_attempt)
select c.*, p.* from claimed c left join lateral (
  select {_POST} from posts where (endpoint, policy, stream) = (c.endpoint, c.policy, c.stream) and dead is null
   order by version, number limit 1) p on true
""".encode()  # noqa: S608

_LANE = "endpoint = %(endpoint)s and policy = %(policy)s and stream = %(stream)s"
_MINE = f"{_LANE} and next_attempt = %(lease)s"
_HELD = f"select from lanes where {_MINE} for update nowait"
_NEXT = f"""
(values (1)) one left join lateral (
  select {_POST} from posts where {_LANE} and dead is null and (version, number) > (%(version)s, %(number)s)
      and exists (select from lanes where {_MINE})
   order by version, number limit 1) p on true
"""  # noqa: S608
# even if another process has the lane by now: the endpoint has taken the post
_DELIVERED = f"""
with free as materialized (select id from posts where id = %(id)s for update nowait),
gone as (delete from posts using free where posts.id = free.id)
select p.* from {_NEXT}
""".encode()  # noqa: S608
_BURY = f"""
with held as materialized ({_HELD}),
dead as (update posts set dead = %(dead)s, attempts = attempts + 1 from held where id = %(id)s)
select exists (select from held), p.* from {_NEXT}
""".encode()  # noqa: S608
_LATER = f"""
with held as materialized ({_HELD}),
tried as (update posts set attempts = attempts + 1 from held where id = %(id)s)
update lanes set claimed = false, next_attempt = {_NOW} + %(delay)s from held where {_MINE}
""".encode()  # noqa: S608
_RELEASE = f"""
with rest as materialized (select from posts where {_LANE} and dead is null limit 1),
ended as (delete from lanes where {_MINE} and not exists (select from rest))
update lanes set claimed = false, next_attempt = {_NOW} where {_MINE} and exists (select from rest)
""".encode()  # noqa: S608
