"""What `samefold processes` shows: a process is a policy and the stream whose events it reacts to, while it waits for something."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from psycopg.rows import class_row

from infra.database.connect import connect, named_errors
from infra.settings import Settings
from projections.engine.views.view import POLICY


@dataclass(frozen=True, slots=True)
class ProcessNow:
    policy: str
    stream: str
    since: datetime | None
    """Of the oldest thing that it waits for."""
    stuck: bool
    """Whether it goes on only when a person does something."""
    waits: int
    first: list[dict[str, Any]]
    """The first ten things that it waits for, those that need a person before all others, each with `what` (unsent, timer, sent and
    not answered, post, dead, parked), `since`, `id`, `target`, `type`, `until` and `why`.
    """


_PROCESSES = f"""
with waits as not materialized (
  select policy, stream, id, target, type, dead as why, wished_at as since, case when dead is null then due end as until,
         case when dead is not null then 'dead' when sent_at is not null then 'sent' when due > now() then 'timer'
              else 'unsent' end as what
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


def processes(settings: Settings, policy: str | None, *, stuck: bool, limit: int) -> list[ProcessNow]:
    """Those that wait, the oldest first. Raises DatabaseUnavailable."""
    with named_errors(settings), connect(settings, "samefold processes", statement_timeout_ms=0) as connection:
        cursor = connection.cursor(row_factory=class_row(ProcessNow))
        return cursor.execute(
            _PROCESSES, {"policy": policy, "stuck": stuck, "limit": limit, "named": [*settings.webhooks] or None}
        ).fetchall()
