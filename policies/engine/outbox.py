"""The outbox: the commands that a policy wishes, on their way, and what a batch writes of them. Its posts are in `posts`.

A row has two halves. The wish comes from an event of the policy's subscription, or from a message that its source received; the
outcome from the commit that the wished command got, accepted or rejected. They may be read in either order: from other partitions,
or again after a database was restored. Each half is upserted under the command's id, which puts two processes in order too. When
both halves are there, the row is deleted and its `then` or `otherwise` becomes a row of its own, in the same transaction; when that
has ended too, its `later`. A rejection that is not expected stays as a dead letter. So the outbox is a function of the policy's
positions, but for what the relay and operators write (sent_at, attempts, dead letters that Kafka refused, commands that are sent
again) and the time of a `later`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from typing import Any, NamedTuple

import msgspec
from pydantic import ValidationError

from commands.intake import bad_name, fingerprint_of
from domain.engine.contexts import Context, contexts
from domain.engine.personal.fields import sealed_validator
from domain.engine.storable import Lost, encode, require_same
from domain.engine.versions import outline, stored_type
from domain.language import Refusal
from infra.database.connect import Connection
from infra.errors import MOST_WORDS, printable
from infra.log.partitioner import partition_of
from infra.log.records import Command, Commit, time_of
from infra.settings import ENDPOINT_NAME
from policies.engine import posts
from policies.engine.dead_letters import DeadReason, log_dead_letters
from policies.engine.policy import Policy, Post, Send
from projections.engine.fold.fold import Changes
from projections.engine.store.rows import Statement
from projections.engine.views import binary_arrays
from projections.engine.views.column_types import BadRow, Scalar, type_of
from projections.engine.views.columns import Column, Role
from projections.engine.views.event_context import At
from projections.engine.views.view import Kind, View

MOST_WISHES = 1_000
"""For one event."""
MOST_DEPTH = 50
"""Wishes that lead to one another without a timer or a client in between. A longer chain is a cycle of policies."""
CHANNEL, POSTS = "samefold_outbox", "posts"
"""The channel of PostgreSQL's notifications, and the payload of those that say that posts were wished. Others are of commands."""
ANY = "*"
"""The fingerprint of a wished command that has older versions: where the database was restored to before the release, the wish is
made again, and the command that was decided under its id is one of those.
"""
THEN, OTHERWISE, LATER = "~then", "~otherwise", "~later"
"""What the ids of follow-ups add to the wish's."""
LONGEST = timedelta(days=36_500)
"""Of `after`."""
TICK = timedelta(seconds=1)
"""A timer begins a new chain if it is at least so long: a shorter one would let a cycle run at full speed for ever."""

STATE = """case when dead is not null then 'dead' when kind is null then 'outcome' when kind = 'dropped' then 'dropped'
  when sent_at is not null then 'sent' when due > now() then 'waiting' else 'unsent' end"""
"""Of a row of the outbox, in SQL. The relay sends what is unsent, and what waits for its time when that has come."""

_TEXT, _NUMBER, _MOMENT = map(type_of, (Scalar.STR, Scalar.INT, Scalar.DATETIME))


class BadWish(ValueError):
    """What `react` yielded can't be sent, whatever the event's values are."""


class InvalidWish(ValueError):
    """Because of an event's values, a wish can't be sent. It says what is wrong with it, and holds no value."""


class FollowUp(NamedTuple):
    """A command for the stream that wished. Without a fingerprint its body lacks the refusal, which is filled in."""

    type: str | None = None
    body: str | None = None
    fingerprint: str | None = None


class Wish(NamedTuple):
    """A row's first half, as `react` made it."""

    id: str
    kind: str
    number: int
    at: At
    target: str | None = None
    type: str | None = None
    body: str | None = None
    fingerprint: str | None = None
    due: datetime | None = None
    then: FollowUp = FollowUp()
    otherwise: FollowUp = FollowUp()
    later: FollowUp = FollowUp()
    after_ms: int | None = None
    expected: str | None = None
    """The codes of rejections that need no follow-up, each after a space."""
    dead: str | None = None
    """Why it can't be sent. Then neither target nor body is kept."""


class Cause(NamedTuple):
    """What led to a wish: a command, or a message."""

    id: str
    correlation_id: str
    depth: int
    trace: str | None = None
    """Its `traceparent`. Commits have none here."""


def view_of(policy: Policy, *, with_outcomes: bool = True) -> View:
    """The policy as its agent folds it; without outcomes for a replay of parked events, when all of them have been read."""
    of = [
        context.name for context in contexts().values() if not policy.subscription.isdisjoint(context.events.values())
    ]
    return View(
        name=policy.agent,
        version=policy.version,
        kind=Kind.POLICY,
        row=Wish,
        columns=(Column("id", Scalar.STR, role=Role.KEY),),
        function=partial(_wishes, policy),
        subscription=policy.subscription,
        contexts=tuple(sorted(of)),
        shape="",
        on_poison=policy.on_poison,
        agent=policy.agent,
        write=partial(_writes, policy, with_outcomes),
    )


def id_of(*place: str | int) -> str:
    """A wish's id: the same whenever, wherever and by which version of the policy it is made.

    The place is the policy's name; the event's stream and version, or the message's place; and the wish's number.
    """
    digest = hashlib.blake2b(msgspec.json.encode(place), digest_size=20).digest()
    return f"{place[0]}~{base64.b32encode(digest).decode().lower()}"


# ── the wish ──


def _wishes(policy: Policy, event: Any, _after: Any, at: At) -> Iterator[Wish]:
    return _made_of(lambda: policy.react(event, at), partial(id_of, policy.name, at.stream, at.version), at)


def of_message(
    received: Callable[[], Iterable[Any]], place: Sequence[str | int], at: At, partitions: int
) -> list[Wish]:
    """What `receive` yields for a message. Its commands' ids come from `place`, which begins with the policy's name.

    Each counts as a wish of the stream that it goes to, at the message's offset: that is their order, and there its `then`,
    `otherwise` and `later` go, too. `at` is of what has no stream. Raises BadWish, and whatever `receive` raises.
    """
    return [*_made_of(received, partial(id_of, *place), at, partitions)]


def dead_message(place: Sequence[str | int], at: At, why: str) -> Wish:
    """A dead letter for a message that can't be received: the stream of `at` is its topic and partition, the version its offset."""
    return Wish(id_of_message(place), "message", 0, at, dead=f"{DeadReason.BAD_MESSAGE}: {printable(why)[:MOST_WORDS]}")


def id_of_message(place: Sequence[str | int]) -> str:
    """Of its dead letter."""
    return id_of(*place, "message")


def _made_of(
    yielded: Callable[[], Iterable[Any]], ident: Callable[[int], str], at: At, partitions: int = 0
) -> Iterator[Wish]:
    """Raises BadWish, and whatever `yielded` raises, unless a command's class refuses a value: that is a dead letter."""
    number = -1
    try:
        for number, wish in enumerate(yielded()):
            if number == MOST_WISHES:
                raise BadWish(f"it yields more than {MOST_WISHES} wishes at once")
            here = at
            if partitions:
                if not isinstance(wish, Send):
                    raise BadWish(f"it yields a {type(wish).__name__}, and a message leads to a Send only")
                # such a stream can't be stored, and nothing can follow there
                if problem := bad_name(wish.stream, "id"):
                    yield _dead(ident(number), "send", number, f"{type(wish.command).__name__}: {problem}", at)
                    continue
                if wish.stream.partition("/")[0] not in contexts():  # its name may be a value of the message
                    raise BadWish(f"it sends a {type(wish.command).__name__} to a stream of no context")
                here = msgspec.structs.replace(at, stream=wish.stream, partition=partition_of(wish.stream, partitions))
            yield from _made(wish, ident(number), number, here)
    except ValidationError as error:
        why = f"{error.title}: {outline(error)}. The wishes from this one on are not made"
        yield _dead(ident(number + 1), "send", number + 1, why, at)


def _made(wish: Any, ident: str, number: int, at: At) -> Iterator[Wish]:
    """The wish, or a dead letter and its `otherwise`. Raises BadWish."""
    if not isinstance(wish, Send | Post):
        raise BadWish(f"it yields a {type(wish).__name__}, which is neither a Send nor a Post")
    try:
        yield _send(wish, ident, number, at) if isinstance(wish, Send) else _post(wish, ident, number, at)
    except InvalidWish as why:
        yield _dead(ident, type(wish).__name__.lower(), number, str(why), at)
        if isinstance(wish, Send) and (otherwise := wish.otherwise) is not None:
            ident += OTHERWISE
            try:
                if hasattr(otherwise, "refusal"):
                    otherwise = replace(otherwise, refusal=DeadReason.INVALID_WISH)
            except ValidationError as error:
                yield _dead(ident, "send", number, f"{error.title}: {outline(error)}", at)
            else:
                follows = Send(at.stream, otherwise, ignore=wish.ignore, later=wish.later, after=wish.after)
                yield from _made(follows, ident, number, at)


def _dead(ident: str, kind: str, number: int, why: str, at: At) -> Wish:
    # with a fingerprint that no command has: an outcome under this id, of a restored log, does not end it
    return Wish(
        ident, kind, number, at, fingerprint="", dead=f"{DeadReason.INVALID_WISH}: {printable(why)[:MOST_WORDS]}"
    )


def _post(wish: Post, ident: str, number: int, at: At) -> Wish:
    if not re.fullmatch(ENDPOINT_NAME, str(wish.endpoint)):
        raise InvalidWish("a Post to what can't be an endpoint's name: at most 63 lower case letters, digits, - and _")
    try:
        # not msgspec's `encode`, which makes null of NaN
        body = json.dumps(msgspec.to_builtins(wish.body, str_keys=True), ensure_ascii=False, allow_nan=False)
    except ValueError:
        raise InvalidWish("the body of a Post has a number that JSON can't hold") from None
    return Wish(ident, "post", number, at, target=wish.endpoint, body=body)


def _send(wish: Send, ident: str, number: int, at: At) -> Wish:
    kind, body = _command(wish.stream, wish.command)
    what = f"{type(wish.command).__name__} to '{wish.stream.partition('/')[0]}'"
    if problem := bad_name(wish.stream, ident):
        raise InvalidWish(f"{what}: {problem}")
    if wish.due and wish.due.tzinfo is None:
        raise BadWish(f"`due` of {what} has no time zone. Write a time like `at.time + timedelta(days=1)`")
    if (wish.later is None) != (wish.after is None):
        raise BadWish(f"`later` and `after` of {what} belong together: what to send, and how long after the answer")
    if wish.after is not None and not timedelta() <= wish.after <= LONGEST:
        raise InvalidWish(f"{what}: `after` is negative, or longer than a hundred years")
    ignore: Sequence[object] = wish.ignore
    if others := [one for one in ignore if not (isinstance(one, type) and issubclass(one, Refusal))]:
        raise BadWish(f"`ignore` of {what} takes classes of Refusal, not {others[0]!r}")
    try:
        due = wish.due if wish.due is None else _MOMENT.exact(wish.due)
    except BadRow as bad:
        raise InvalidWish(f"{what}: `due`: {bad}") from bad
    return Wish(
        id=ident,
        kind="send",
        number=number,
        at=at,
        target=wish.stream,
        type=kind,
        body=body.decode(),
        fingerprint=_fingerprint(ident, wish.stream, kind, body),
        due=due,
        then=_follow_up(at.stream, wish.then, ident + THEN),
        otherwise=_follow_up(at.stream, wish.otherwise, ident + OTHERWISE, fills=True),
        later=_follow_up(at.stream, wish.later, ident + LATER),
        after_ms=None if wish.after is None else wish.after // timedelta(milliseconds=1),
        expected="".join(f" {refusal.code}" for refusal in wish.ignore) or None,
    )


def _follow_up(stream: str, command: Any, ident: str, *, fills: bool = False) -> FollowUp:
    if command is None:
        return FollowUp()
    kind, body = _command(stream, command)
    if not (fills and hasattr(command, "refusal")):
        return FollowUp(kind, body.decode(), _fingerprint(ident, stream, kind, body))
    members = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    del members["refusal"]
    return FollowUp(kind, msgspec.json.encode(members).decode())


def _command(stream: str, command: Any) -> tuple[str, bytes]:
    """Stored name and body of a command that its stream's context knows. Raises BadWish, InvalidWish."""
    name = stream.partition("/")[0]
    context: Context | None = contexts().get(name)
    if context is None:
        raise BadWish(f"it sends to {stream}, but no context is called '{name}'")
    of: type = type(command)
    if of not in context.commands.values():
        raise BadWish(f"it sends a {of.__name__} to a stream of '{name}', but that is no command of '{name}'")
    body = encode(command)
    try:
        require_same(command, sealed_validator(of)(body))
    except ValidationError as error:  # without any value: it may be plain text where it must be sealed
        raise InvalidWish(f"{of.__name__}: {outline(error)}") from None
    except Lost:
        raise InvalidWish(f"{of.__name__}: it has a value that JSON does not give back") from None
    return stored_type(of), body


def _fingerprint(ident: str, stream: str, kind: str, body: bytes) -> str:
    return ANY if "/" in kind else fingerprint_of(Command(ident, stream, kind, msgspec.Raw(body)))


# ── what a batch writes ──

_Row = dict[str, Any]

_FOLLOW = tuple(f"{which}_{part}" for which in ("then", "otherwise", "later") for part in FollowUp._fields)
_TYPES = {
    "id": _TEXT,
    **dict.fromkeys(("policy", "kind", "stream", "target", "type", "body", "fingerprint"), _TEXT),
    **dict.fromkeys(("correlation_id", "causation_id", "trace", *_FOLLOW), _TEXT),
    **dict.fromkeys(("expected", "outcome", "refusal", "outcome_fingerprint", "dead"), _TEXT),
    **dict.fromkeys(("partition", "version", "number", "depth", "outcome_depth", "after_ms"), _NUMBER),
    **dict.fromkeys(("due", "wished_at"), _MOMENT),
}
"""Of the columns that a batch writes, the key first."""
_COLUMNS = tuple(_TYPES)


def _writes(policy: Policy, with_outcomes: bool, batches: Sequence[Changes]) -> list[Statement]:
    rows: dict[str, _Row] = {}
    new_posts: list[Wish] = []
    for batch in batches:
        if wishes := batch.added[policy.agent]:
            commits = {offset: commit for offset, _, commit in batch.counted}
            for wish in wishes:
                if wish.kind == "post":
                    new_posts.append(wish)
                else:
                    commit = commits[wish.at.offset]
                    cause = Cause(commit.command_id, commit.conversation, commit.depth or 0)
                    rows.setdefault(wish.id, {}).update(_first_half(wish, cause))
        if with_outcomes:
            prefix = f"{policy.name}~"
            for _, _, commit in batch.counted:
                if commit.command_id.startswith(prefix):
                    rows.setdefault(commit.command_id, {}).update(_second_half(commit))
    statements = posts.writes(policy.name, new_posts)
    if new_posts:
        statements.append(Statement(_NOTIFY_POSTS, []))
    if not rows:
        return statements
    return [*statements, *_upsert(policy.name, rows)]


def write_of_messages(
    connection: Connection, policy: str, wishes: Iterable[tuple[Wish, Cause]]
) -> list[Callable[[], None]]:
    """Write the wishes that messages lead to, in the caller's transaction. Returns what is to be called after it."""
    rows = {wish.id: _first_half(wish, cause) for wish, cause in wishes}
    return _run(connection, _upsert(policy, rows)) if rows else []


def _upsert(policy: str, rows: Mapping[str, _Row]) -> list[Statement]:
    ids, known = sorted(rows), {"policy": policy}
    packed = posts.packed(_TYPES, [rows[ident] | known | {"id": ident} for ident in ids])
    return [Statement(_UPSERT, packed), *_ends(ids)]


def _ends(ids: list[str]) -> list[Statement]:
    """End what has both halves of these, of what may follow, and of what may follow that: outcomes may be there before commands."""
    first = _following(ids)
    chain = [ids, first, _following(first)]
    every = binary_arrays.texts(sorted(one for some in chain for one in some))
    return [
        *(Statement(_MEET, [binary_arrays.texts(some)]) for some in chain),
        Statement(_DIE, [every], log_dead_letters),
        Statement(_NOTIFY, []),
    ]


def _following(ids: Iterable[str]) -> list[str]:
    after = {THEN: (LATER,), OTHERWISE: (LATER,), LATER: ()}
    return sorted(one + suffix for one in ids for suffix in after.get(one[one.rfind("~") :], (THEN, OTHERWISE, LATER)))


def refuse(connection: Connection, ident: str, why: str) -> bool:
    """Kafka does not take this command: its `otherwise` follows, or it is a dead letter. Returns whether it is one."""
    with connection.transaction():
        connection.execute(_REJECT, [DeadReason.REFUSED_BY_KAFKA, ident])
        _join(connection, [ident])
        return connection.execute(_BURY, [f"{DeadReason.REFUSED_BY_KAFKA}: {why}", ident]).rowcount > 0


def again(connection: Connection, idents: Sequence[str]) -> None:
    """Wish rejected commands once more, in the caller's transaction. A handler decides each id once, so they get new ones."""
    new = [_AGAIN.sub(lambda was: f"~again{int(was[2] or 1) + 1}" if was[1] else "~again", one, 1) for one in idents]
    connection.execute(_RENEW, [list(idents), new])
    _join(connection, sorted(new))


def _join(connection: Connection, ids: list[str]) -> None:
    for tell in _run(connection, _ends(ids)):
        tell()


def _run(connection: Connection, statements: Iterable[Statement]) -> list[Callable[[], None]]:
    """Returns what is to be called after the transaction."""
    answers: list[Callable[[], None]] = []
    for query, parameters, answer in statements:
        cursor = connection.execute(query, parameters)
        if answer is not None:
            answers.append(partial(answer, cursor.fetchall()))
    return answers


def _first_half(wish: Wish, cause: Cause) -> _Row:
    at = wish.at
    is_timer = wish.due is not None and wish.due - time_of(at.time_ms) >= TICK
    depth = 0 if is_timer else cause.depth + 1
    return {
        **wish._asdict(),  # also what is no column, and is not written
        **dict(zip(_FOLLOW, (*wish.then, *wish.otherwise, *wish.later), strict=True)),
        "partition": at.partition,
        "stream": at.stream,
        "version": at.version,
        "depth": depth,
        "correlation_id": cause.correlation_id,
        "causation_id": cause.id,
        "trace": cause.trace,
        "wished_at": time_of(at.time_ms),
        "dead": wish.dead or (_TOO_DEEP if depth > MOST_DEPTH else None),
    }


def _second_half(commit: Commit) -> _Row:
    return {
        "outcome": commit.outcome,
        "refusal": commit.reason.code if commit.reason else None,
        "outcome_fingerprint": f"{commit.fingerprint} {commit.stream}",
        "outcome_depth": commit.depth or 0,
    }


_TOO_DEEP = f"{DeadReason.TOO_DEEP}: more than {MOST_DEPTH} commands led to one another; policies may feed each other in a cycle"


def _listed(columns: Iterable[str], form: str = "{0}") -> str:
    return ", ".join(form.format(column) for column in columns)


_UPSERT = f"""
insert into outbox as t ({_listed(_COLUMNS)})
select {_listed(_COLUMNS)} from unnest({_listed(_COLUMNS, "%s")}) u ({_listed(_COLUMNS)})
    on conflict (id) do update set {_listed(_COLUMNS[1:], "{0} = coalesce(t.{0}, excluded.{0})")}
""".encode()  # noqa: S608  # sorted by id, so that transactions can't deadlock on them

_KEPT = (
    *("kind", "stream", "policy", "partition", "version", "number"),
    *("correlation_id", "trace", "wished_at", "expected"),
)
_LATER = ("later_type", "later_body", "later_fingerprint", "after_ms")
_MADE = ("id", *_KEPT, "target", "type", "body", "fingerprint", "due", "depth", "causation_id", "dead", *_LATER)
_BOTH = "kind is not null and outcome is not null"
_SAME = f"""
(kind = 'dropped' or fingerprint is null or fingerprint || ' ' || target = outcome_fingerprint
  or fingerprint = '{ANY}' and substr(outcome_fingerprint, strpos(outcome_fingerprint, ' ') + 1) = target)"""
_EXPECTED = f"""
(kind = 'dropped' or outcome = 'accepted' or otherwise_type is not null
  or expected = '{ANY}' or refusal = any(string_to_array(coalesce(expected, ''), ' ')))"""

_MEET = f"""
with met as (delete from outbox where id = any(%s) and {_BOTH} and {_SAME} and {_EXPECTED} returning *),
following as (
  select met.*, f.*, case when suffix = '{LATER}' and after_ms >= {TICK // timedelta(milliseconds=1)} then 0
                          else outcome_depth + 1 end as steps
    from met, lateral (values
      ('{THEN}', outcome = 'accepted' and then_type is not null, then_type, then_body, then_fingerprint),
      ('{OTHERWISE}', outcome = 'rejected' and otherwise_type is not null,
       otherwise_type, otherwise_body, otherwise_fingerprint),
      ('{LATER}', later_type is not null and case outcome when 'accepted' then then_type else otherwise_type end is null,
       later_type, later_body, later_fingerprint)
    ) f (suffix, is_next, f_type, f_body, f_fingerprint)
   where is_next),
made ({_listed(_MADE)}) as (
  select id || suffix, {_listed(_KEPT)}, stream, f_type,
         case when f_fingerprint is null and suffix = '{OTHERWISE}'
              then '{{"refusal":' || to_json(refusal)::text || case f_body when '{{}}' then '}}' else ',' || substr(f_body, 2) end
              else f_body end,
         f_fingerprint, case suffix when '{LATER}' then now() + after_ms * interval '1 ms' end, steps, id,
         case when steps > {MOST_DEPTH} then '{_TOO_DEEP}' end, {_listed(_LATER, f"case when suffix <> '{LATER}' then {{0}} end")}
    from following)
insert into outbox as t ({_listed(_MADE)}) select {_listed(_MADE)} from made order by id
    on conflict (id) do update set {_listed(_MADE[1:], "{0} = coalesce(t.{0}, excluded.{0})")}
""".encode()  # noqa: S608

_DIE = f"""
update outbox set dead = coalesce(dead, case when {_SAME} then '{DeadReason.REFUSED}: ' || refusal
    else '{DeadReason.ID_REUSED}: another command with this id was decided before, or the policy wishes another one now' end)
 where id = any(%s) and (dead is not null or {_BOTH}) returning id, stream, dead
""".encode()  # noqa: S608

_REJECT = b"""
update outbox set outcome = 'rejected', refusal = %s, outcome_depth = depth, outcome_fingerprint = fingerprint || ' ' || target
 where id = %s and otherwise_type is not null and dead is null and outcome is null
"""
_BURY = b"update outbox set dead = %s where id = %s and dead is null"

_AGAIN = re.compile(r"(~again(\d*))?$")
_WISHED = [
    one for one in _COLUMNS if one not in ("id", "outcome", "refusal", "outcome_depth", "outcome_fingerprint", "dead")
]
_RENEW = f"""
with old as (delete from outbox o using unnest(%s::text[], %s::text[]) u (old, new) where id = old returning *)
insert into outbox as t (id, {_listed(_WISHED)}) select new, {_listed(_WISHED)} from old order by new
    on conflict (id) do update set {_listed(_WISHED, "{0} = coalesce(t.{0}, excluded.{0})")}
""".encode()  # noqa: S608

_NOTIFY = f"notify {CHANNEL}".encode()
_NOTIFY_POSTS = f"notify {CHANNEL}, '{POSTS}'".encode()
