"""Views that are stopped: at which event each left its agent, and why."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from infra.database.connect import Connection
from projections.engine.store.positions import STOPPED


@dataclass(frozen=True, slots=True)
class StoppedView:
    """A view that could not take this event. `version` is the view's; its table holds what came before the event."""

    view: str
    version: int
    table: str
    stream: str
    stream_version: int
    partition: int
    offset: int
    code: str
    error: str
    stopped_at: datetime


def stopped_views(connection: Connection) -> list[StoppedView]:
    """By name. Raises psycopg.Error."""
    return [StoppedView(*row) for row in connection.execute(_STOPPED)]


_STOPPED = f"""
select view, version, table_name, stream, stream_version, partition, log_offset, code, error, stopped_at
  from {STOPPED} s order by view
"""  # noqa: S608
