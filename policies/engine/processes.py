"""What `samefold processes` shows: a process is a policy and the stream whose events it reacts to, while it waits for something."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

import msgspec
from psycopg.rows import class_row

from infra.database.connect import connect, naming
from infra.settings import Settings

SHOWN = 10
"""Of what one process waits for, first what needs a person."""


@dataclass(frozen=True, slots=True)
class Wait:
    """One thing that a process waits for."""

    what: str
    """unsent, timer, sent (and not answered), post, dead or parked."""
    since: datetime | None
    id: str | None
    target: str | None
    type: str | None
    until: datetime | None
    why: str | None
    """Of what is dead or parked."""


@dataclass(frozen=True, slots=True)
class ProcessNow:
    policy: str
    stream: str
    since: datetime | None
    """Of the oldest thing that it waits for."""
    stuck: bool
    """Whether it goes on only when a person does something."""
    waits: int
    first: list[Wait]

    def __post_init__(self) -> None:
        object.__setattr__(self, "first", msgspec.convert(self.first, list[Wait]))


_STUCK = "what in ('dead', 'parked')"
_PROCESSES = f"""
with waits as (
  select policy, stream, id, target, type, dead as why, wished_at as since, case when dead is null then due end as until,
         case when dead is not null then 'dead' when kind = 'post' then 'post' when sent_at is not null then 'sent'
              when due > now() then 'timer' else 'unsent' end as what
    from outbox where kind is not null and (dead is not null or not %(stuck)s)
   union all
  select substr(view, 8), stream, null, null, null, error, parked_at, null, 'parked'
    from parked where starts_with(view, 'policy_'))
select policy, stream, min(since) as since, bool_or({_STUCK}) as stuck, count(*) as waits,
       (array_agg(jsonb_build_object('what', what, 'since', since, 'id', id, 'target', target, 'type', type, 'until', until,
                                     'why', why) order by {_STUCK} desc, since, id))[:{SHOWN}] as first
  from waits where %(policy)s::text is null or policy = %(policy)s
 group by policy, stream order by min(since) nulls first, policy, stream limit %(limit)s
""".encode()  # noqa: S608


def processes(
    settings: Settings, *, policy: str | None = None, stuck: bool = False, limit: int | None = None
) -> list[ProcessNow]:
    """Those that wait, the oldest first. Raises DatabaseUnavailable."""
    with naming(settings), connect(settings, "samefold processes") as connection:
        cursor = connection.cursor(row_factory=class_row(ProcessNow))
        cursor.execute(_PROCESSES, {"policy": policy, "stuck": stuck, "limit": limit})
        return cursor.fetchall()
