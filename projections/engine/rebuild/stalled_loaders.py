"""Two attempts at one part of a load: Spark makes a second one when it takes the first for lost, or for slow.

The second waits for the first one's transaction, for as long as that comes on. One that copies nothing any more was frozen, or its
machine is gone, and PostgreSQL would keep its session, and the part, for ever: no timeout ends a session inside COPY.
"""

from __future__ import annotations

import time
from uuid import UUID

from infra.database.connect import Connection
from projections.engine.rebuild.build_locks import TERMINATE_MS
from projections.engine.rebuild.builds import loader_name

FROZEN_S = 60.0

_COPIED = """
select coalesce(sum(c.bytes_processed), 0)
  from pg_stat_activity a left join pg_stat_progress_copy c using (pid)
 where a.datname = current_database() and a.application_name = %s
"""
_END = """
select pg_terminate_backend(pid, %s) from pg_stat_activity
 where datname = current_database() and application_name = %s and pid <> pg_backend_pid()
   and wait_event_type is distinct from 'Lock'
"""


class OtherAttempt:
    """Whoever else writes a part. `wait` is called whenever the part was found locked."""

    def __init__(self, build: UUID, part: int) -> None:
        self._name = loader_name(build, part)
        self._copied = -1
        self._since = time.monotonic()

    def wait(self, connection: Connection) -> None:
        """Ends it if it has copied nothing for a minute. Raises psycopg.Error."""
        row = connection.execute(_COPIED, (self._name,)).fetchone()
        copied = int(row[0]) if row else 0
        if copied != self._copied:
            self._copied, self._since = copied, time.monotonic()
        elif time.monotonic() - self._since > FROZEN_S:
            connection.execute(_END, (TERMINATE_MS, self._name))
