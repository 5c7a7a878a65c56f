"""What the commands `samefold policies` and `samefold outbox` do: what is live, and the wishes on their way."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from psycopg.rows import class_row, dict_row

from infra.database.connect import Connection, connect, naming
from infra.errors import SamefoldError
from infra.log import topics
from infra.settings import Settings
from policies.engine.activations import REMOVED, Activation, activations_of, held_policies, version_at
from policies.engine.outbox import CHANNEL, INVALID, again
from policies.engine.policy import Policy, agent_of
from projections.engine.live.lag import OUTBOX
from projections.engine.operate.overview import AgentLag, lag_of
from projections.engine.store.positions import Positions, read_positions


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


@dataclass(frozen=True, slots=True)
class WishNow:
    """A row of the outbox without its bodies, which may be confidential."""

    id: str
    policy: str
    state: str
    """unsent, waiting, sent, dead, or outcome where the wish has not been read yet."""
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


def policy_named(name: str, policies: Mapping[str, Policy]) -> Policy:
    """A policy of this code. Raises UnknownPolicy."""
    if name in policies:
        return policies[name]
    known = f"The policies are {', '.join(sorted(policies))}." if policies else "policies/ has none."
    raise UnknownPolicy(f"There is no policy '{name}'.", known)


def require_known(settings: Settings, name: str, policies: Mapping[str, Policy]) -> None:
    """Raises UnknownPolicy for a name that neither this code nor the log has, and DatabaseUnavailable."""
    with naming(settings), connect(settings, "samefold policies") as connection:
        if not activations_of(connection, name):
            policy_named(name, policies)


def policies_now(settings: Settings, policies: Mapping[str, Policy]) -> list[PolicyNow]:
    """All policies of this code, and those that are live or have wishes.

    Raises DatabaseUnavailable, KafkaUnavailable, TopicMissing.
    """
    with naming(settings), connect(settings, "samefold policies") as connection:
        since: dict[str, datetime] = dict(
            connection.execute("select policy, max(at) from activations group by policy").fetchall()
        )
        outbox = {policy: (wishes, dead) for policy, wishes, dead, _ in connection.execute(OUTBOX)}
        parked: dict[str, int] = dict(connection.execute("select view, count(*) from parked group by view").fetchall())
        names = sorted({*policies, *since})
        known = {name: activations_of(connection, name) for name in names}
        held = held_policies(connection)
        positions = {name: read_positions(connection, agent_of(name), settings.events_topic) for name in names}
    topic = topics.describe(settings, settings.events_topic)
    found = []
    for name in names:
        code, at = policies.get(name), positions[name]
        live = known[name][-1].version if known[name] else None
        needs = _needed(known[name], at)
        wishes, dead = outbox.get(name, (0, 0))
        if code is None and live == REMOVED and not wishes and not dead:
            continue
        lag = lag_of(settings, at.readings, topic) if at and live else AgentLag(0, 0.0)
        state = "new-database" if name in held else _state(known[name], code, needs)
        version = code.version if code else None
        here = parked.get(agent_of(name), 0)
        found.append(PolicyNow(name, version, live or None, since.get(name), state, needs, wishes, dead, here, lag))
    return found


def _needed(known: Sequence[Activation], positions: Positions | None) -> tuple[int, ...]:
    readings = (positions.readings if positions else known[0].positions if known else {}).items()
    return tuple(sorted({version_at(known, partition, at.next_offset) for partition, at in readings} - {REMOVED}))


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


_STATE = """case when dead is not null then 'dead' when kind is null then 'outcome' when sent_at is not null then 'sent'
  when due > now() or next_attempt > now() then 'waiting' else 'unsent' end"""
_WISHES = f"""
select id, policy, {_STATE} as state, kind, stream, version, target, type, due, wished_at, sent_at, attempts, next_attempt, dead,
       coalesce(then_type, otherwise_type, later_type) is not null as has_follow_up
  from outbox"""  # noqa: S608
_WISH = f"select {_STATE} as state, o.* from outbox o where id = %s".encode()  # noqa: S608


def wishes(
    settings: Settings, *, policy: str | None = None, dead: bool = False, limit: int | None = None
) -> tuple[int, list[WishNow]]:
    """How many there are, and the first of them, the oldest first. Raises DatabaseUnavailable."""
    which = " where (%(policy)s::text is null or policy = %(policy)s) and (dead is not null or not %(dead)s)"
    values = {"policy": policy, "dead": dead, "limit": limit}
    with naming(settings), connect(settings, "samefold outbox") as connection:
        row = connection.execute(f"select count(*) from outbox{which}".encode(), values).fetchone()  # noqa: S608
        cursor = connection.cursor(row_factory=class_row(WishNow))
        cursor.execute(f"{_WISHES}{which} order by wished_at nulls last, id limit %(limit)s".encode(), values)
        return row[0] if row else 0, cursor.fetchall()


def wish(settings: Settings, ident: str) -> dict[str, Any]:
    """A row of the outbox with all its columns; bodies as JSON. Raises NoSuchWish, DatabaseUnavailable."""
    with naming(settings), connect(settings, "samefold outbox") as connection:
        cursor = connection.cursor(row_factory=dict_row)
        row = cursor.execute(_WISH, (ident,)).fetchone()
    if row is None:
        raise _missing([ident])
    for name, value in row.items():
        if name.endswith("body") and value is not None:
            with suppress(ValueError):
                row[name] = json.loads(value)
    return row


def to_drop(settings: Settings, idents: Sequence[str]) -> list[WishNow]:
    """These rows, if `drop` takes them. Raises NoSuchWish, NotDead, DatabaseUnavailable."""
    with naming(settings), connect(settings, "samefold outbox") as connection:
        return _locked(connection, idents, *_DROPPED)


def retry(settings: Settings, idents: Sequence[str]) -> None:
    """Have these dead letters sent again, all or none; rejected commands under new ids.

    Raises NoSuchWish, NotDead, DatabaseUnavailable.
    """
    with naming(settings), connect(settings, "samefold outbox") as connection, connection.transaction():
        if invalid := [one.id for one in _locked(connection, idents, "dead") if (one.dead or "").startswith(INVALID)]:
            raise NotDead(
                f"{', '.join(invalid)} can't be sent: no body was kept, as a value did not fit; nothing was changed.",
                "Send yourself what is missing, then `samefold outbox drop ID`.",
            )
        rejected = connection.execute("select id from outbox where id = any(%s) and dead like 'refused: %%'", (idents,))
        again(connection, [ident for (ident,) in rejected])
        # the handler decided another command with this id, and decides none twice
        met = connection.execute(
            "select id from outbox where id = any(%s) and outcome is not null", (idents,)
        ).fetchall()
        if met:
            raise NotDead(
                f"{', '.join(ident for (ident,) in met)} can't be sent again: another command had this id, and was decided.",
                "`samefold outbox show ID` shows both; `samefold outbox drop ID` removes it.",
            )
        connection.execute(
            "update outbox set dead = null, attempts = 0, next_attempt = null where id = any(%s)", (idents,)
        )
        connection.execute(f"notify {CHANNEL}")


def drop(settings: Settings, idents: Sequence[str]) -> None:
    """Remove these dead letters, timers, posts that are tried again later, wishes without an outcome and the reverse; all or none.

    Raises NoSuchWish, NotDead, DatabaseUnavailable.
    """
    with naming(settings), connect(settings, "samefold outbox") as connection, connection.transaction():
        _locked(connection, idents, *_DROPPED)
        connection.execute("delete from outbox where id = any(%s)", (idents,))


_DROPPED = ("dead", "waiting", "sent", "outcome")
"""The states of what is not about to be sent."""


def _locked(connection: Connection, idents: Sequence[str], *states: str) -> list[WishNow]:
    """These rows, locked, all in one of these states. Raises NoSuchWish, NotDead."""
    cursor = connection.cursor(row_factory=class_row(WishNow))
    found = cursor.execute(f"{_WISHES} where id = any(%s) order by id for update".encode(), (idents,)).fetchall()
    if missing := sorted({*idents} - {one.id for one in found}):
        raise _missing(missing)
    if others := [f"{one.id} ({one.state})" for one in found if one.state not in states]:
        raise NotDead(
            f"{', '.join(others)} {'is' if len(others) == 1 else 'are'} under way; nothing was changed.",
            f"This takes wishes in the state {' or '.join(states)}: `samefold outbox list`.",
        )
    return found


def _missing(idents: Sequence[str]) -> NoSuchWish:
    return NoSuchWish(
        f"The outbox has no {', '.join(idents)}; nothing was changed.",
        "It has ended, or was never wished. `samefold outbox list` shows what is under way.",
    )
