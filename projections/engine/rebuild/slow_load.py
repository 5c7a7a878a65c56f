"""Filling a build slowly: where the quick way met rows that can't be stored, to find the stream they come from.

The same fold, but written batch by batch with the keys in place, as an agent writes, so that a refused row is refused at
once and its stream is parked or named.
"""

from __future__ import annotations

from psycopg import sql

from infra.database.connect import Connection
from infra.log.rule import START, Reading
from infra.settings import Settings
from projections.engine.fold.fold import Held, decode
from projections.engine.fold.plan import Plan
from projections.engine.rebuild.builds import Build, Pin, index, with_lock_retry
from projections.engine.rebuild.folded import blocking
from projections.engine.rebuild.load import counted_to
from projections.engine.rebuild.workers import Advance
from projections.engine.store.commit import prepare
from projections.engine.store.parking import insert_parked
from projections.engine.store.writing import fold_and_write
from projections.engine.views.view import View


def load_slowly(
    settings: Settings, connection: Connection, build: Build, view: View, pin: Pin, advance: Advance
) -> tuple[int, dict[int, Reading]]:
    """Empty the build's table, make its keys, and fold the log into it up to the pin; the number of rows, and how far.

    Raises PoisonEvent where the view does not park, and what folding raises.
    """
    prepare(connection)
    table = sql.Identifier(build.table)

    def empty() -> None:
        connection.execute(sql.SQL("truncate {}").format(table))
        connection.execute("delete from build_parts where build = %s", (build.id,))
        connection.execute("delete from parked where table_name = %s", (build.table,))

    with_lock_retry(connection, empty)
    index(connection, build, view)
    plan = Plan({view.name: view})
    reached = dict.fromkeys(pin.ends, START)
    for partition, end in sorted(pin.ends.items()):
        held, blocked = Held(plan), pin.skips
        for batch in counted_to(settings, settings.events_topic, partition, end):
            decoded = [decode(plan, partition, batch.counted)]
            with connection.transaction():
                changes, parked = fold_and_write(
                    connection, plan, {view.name: build.table}, decoded, held={partition: held}, blocked=blocked
                )
                insert_parked(connection, build.table, parked)
            held.merge(changes[0])
            blocked = blocking(blocked, parked)
            reached[partition] = batch.next
            advance(batch.next.next_offset - batch.was.next_offset)
        connection.execute(
            sql.SQL(
                "insert into build_parts (build, partition, rows) select %s, %s, count(*) from {} where _partition = %s"
            ).format(table),
            (build.id, partition, partition),
        )
    row = connection.execute(sql.SQL("select count(*) from {}").format(table)).fetchone()
    return int(row[0]) if row else 0, reached
