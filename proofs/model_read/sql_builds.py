"""Statements about builds: made, loaded, caught up, abandoned; parked streams and skips."""

from __future__ import annotations

from typing import Any

from psycopg import errors

from projections.engine.rebuild.build_locks import TERMINATE_MS
from proofs.model_read.catalogue import reads, shape, writes
from proofs.model_read.postgres import Key, Lock, Result, Row, Session, Statement, Steps
from proofs.model_read.sql_positions import READING, reading_of
from proofs.model_read.sql_rows import key_columns

_BUILDS = """
select b.id, b.view, b.version, b.agent, b.table_name, b.state, b.shape, b.created_at, b.as_of,
       (select json_agg(json_build_array(p.partition, p.next_offset, p.epoch, p.seq, p.command_offset))
          from build_positions p where p.build = b.id)
  from builds b
"""


def _builds(statement: Statement, rows: list[Row]) -> Result:
    found = []
    for row in rows:
        at = [[p["partition"], *reading_of(p)] for p in statement.where("build_positions", build=row["id"])]
        names = ("id", "view", "version", "agent", "table_name", "state", "shape", "created_at", "as_of")
        found.append((*(row[name] for name in names), at or None))
    return Result(found, len(found))


@reads(_BUILDS + "where b.view = any(%s) order by b.view, b.created_at, b.table_name")
def builds_of(statement: Statement, parameters: Any) -> Result:
    rows = [row for row in statement.where("builds") if row["view"] in parameters[0]]
    return _builds(statement, sorted(rows, key=lambda row: (row["view"], row["created_at"], row["table_name"])))


@reads(_BUILDS + "where b.id = any(%s) order by b.view, b.id")
def by_id(statement: Statement, parameters: Any) -> Result:
    rows = [row for row in statement.where("builds") if row["id"] in parameters[0]]
    return _builds(statement, sorted(rows, key=lambda row: (row["view"], row["id"])))


@writes("select from builds where id = any(%s) order by view, id for update")
def lock_builds(statement: Statement, parameters: Any) -> Steps:
    yield from statement.use("builds", Lock.WRITE)
    rows = [row for row in statement.where("builds") if row["id"] in parameters[0]]
    for row in sorted(rows, key=lambda row: (row["view"], row["id"])):
        yield from statement.lock(("builds", (row["id"],)), Lock.UPDATE)
    return Result([() for _ in rows], len(rows))


@reads("select state from builds where id = %s")
def state(statement: Statement, parameters: Any) -> Result:
    row = statement.one("builds", (parameters[0],))
    return Result([(row["state"],)] if row else [], int(row is not None))


@reads("select table_name from builds where view = %s")
def tables_of(statement: Statement, parameters: Any) -> Result:
    return Result([(row["table_name"],) for row in statement.where("builds", view=parameters[0])])


@writes(
    "insert into builds (id, view, version, agent, table_name, state, code_set, shape) "
    "values (%s, %s, %s, %s, %s, 'loading', %s, %s)"
)
def new_build(statement: Statement, parameters: Any) -> Steps:
    names = ("id", "view", "version", "agent", "table_name", "code_set", "shape")
    row = dict(zip(names, parameters, strict=True))
    made = {"state": "loading", "created_at": statement.database.now(), "as_of": None}
    yield from statement.insert("builds", (row["id"],), {**row, **made})
    return Result(count=1)


def _to_state(new: str, *wanted: str) -> Any:
    def steps(statement: Statement, parameters: Any) -> Steps:
        ids = parameters[0] if isinstance(parameters[0], list) else [parameters[0]]
        count = yield from statement.update(
            "builds", lambda row: row["id"] in ids and (not wanted or row["state"] in wanted), {"state": new}
        )
        return Result(count=count)

    return steps


writes("update builds set state = 'ready' where id = %s and state = 'loading'")(_to_state("ready", "loading"))
writes("update builds set state = 'old' where id = %s")(_to_state("old"))
writes("update builds set state = 'live' where id = %s")(_to_state("live"))
writes("update builds set state = 'abandoned' where id = any(%s)")(_to_state("abandoned"))
writes("update builds set state = 'abandoned' where id = %s and state in ('loading', 'ready')")(
    _to_state("abandoned", "loading", "ready")
)
writes("update builds set state = 'abandoned' where id = %s and state in ('past-loading', 'past')")(
    _to_state("abandoned", "past-loading", "past")
)


@writes(
    "insert into build_positions (build, topic, partition, next_offset, epoch, seq, command_offset) "
    "select %s, %s, * from unnest(%s::int[], %s::bigint[], %s::bigint[], %s::bigint[], %s::bigint[]) "
    "on conflict (build, topic, partition) do update set next_offset = excluded.next_offset, "
    "epoch = excluded.epoch, seq = excluded.seq, command_offset = excluded.command_offset"
)
def write_positions(statement: Statement, parameters: Any) -> Steps:
    build, topic, *columns = parameters
    yield from statement.lock(("builds", (build,)), Lock.KEY_SHARE)
    for partition, *reading in zip(*columns, strict=True):
        row: Row = {
            "build": build,
            "topic": topic,
            "partition": partition,
            **dict(zip(READING, reading, strict=True)),
        }
        yield from statement.upsert("build_positions", (build, topic, partition), row)
    return Result()


@writes("update builds set table_name = %s where id = %s")
def rename(statement: Statement, parameters: Any) -> Steps:
    """Only a mutant does that."""
    count = yield from statement.update("builds", lambda row: row["id"] == parameters[1], {"table_name": parameters[0]})
    return Result(count=count)


# ── parts ──


@writes("insert into build_parts (build, partition, rows) values (%s, %s, 0) on conflict do nothing")
def enter_part(statement: Statement, parameters: Any) -> Steps:
    build, partition = parameters
    row = {"build": build, "partition": partition, "rows": 0}
    written = yield from statement.insert("build_parts", (build, partition), row, lambda _there: None)
    if written:
        yield from statement.lock(("builds", (build,)), Lock.KEY_SHARE)
    return Result(count=int(written))


@reads("select rows from build_parts where build = %s and partition = %s")
def rows_of_part(statement: Statement, parameters: Any) -> Result:
    row = statement.one("build_parts", tuple(parameters))
    return Result([(row["rows"],)] if row else [])


@writes("update build_parts set rows = %s where build = %s and partition = %s")
def count_part(statement: Statement, parameters: Any) -> Steps:
    rows, *key = parameters
    count = yield from statement.update(
        "build_parts", lambda row: [row["build"], row["partition"]] == key, {"rows": rows}
    )
    return Result(count=count)


@reads("select count(*) from build_parts where build = %s")
def count_parts(statement: Statement, parameters: Any) -> Result:
    return Result([(len(statement.where("build_parts", build=parameters[0])),)])


# ── claims and loaders ──


@reads("select pg_try_advisory_lock(hashtextextended(%s, 0))")
def claim(statement: Statement, parameters: Any) -> Result:
    statement.session.footprint.locked.add(("claims", tuple(parameters)))
    return Result([(statement.database.claim(statement.session, parameters[0]),)])


_HOLDER = (
    "from pg_locks l join pg_stat_activity a on a.pid = l.pid "
    "where l.locktype = 'advisory' and l.granted and l.objsubid = 1 and l.pid <> pg_backend_pid() "
    "and l.database = (select oid from pg_database where datname = current_database()) "
    "and (l.classid::bigint << 32 | l.objid::bigint) = hashtextextended(%s, 0)"
)


@reads(f"select pg_terminate_backend(a.pid, {TERMINATE_MS}) {_HOLDER}")
def end_holder(statement: Statement, parameters: Any) -> Result:
    holder = statement.database.holder(parameters[0])
    return _end(statement, [] if holder is None or holder is statement.session else [holder])


@reads(f"select a.application_name, host(a.client_addr), a.backend_start, a.pid {_HOLDER}")
def holder(_statement: Statement, _parameters: Any) -> Result:
    return Result([])  # for people


@reads("select pg_postmaster_start_time()", local=True)
def server(_statement: Statement, _parameters: Any) -> Result:
    return Result([(0,)])


@reads("select pg_advisory_unlock(hashtextextended(%s, 0))")
def unclaim(statement: Statement, parameters: Any) -> Result:
    statement.session.footprint.locked.add(("claims", tuple(parameters)))
    statement.database.unclaim(statement.session, parameters[0])
    return Result([(True,)])


@reads(
    "select pg_terminate_backend(pid, %s) from pg_stat_activity "
    "where datname = current_database() and starts_with(application_name, %s)"
)
def end_loaders(statement: Statement, parameters: Any) -> Result:
    return _end(statement, list(statement.database.named(parameters[1])))


@reads(
    "select pg_terminate_backend(pid, %s) from pg_stat_activity where datname = current_database() "
    "and application_name = %s and pid <> pg_backend_pid() and wait_event_type is distinct from 'Lock'"
)
def end_stalled_loader(statement: Statement, parameters: Any) -> Result:
    others = [one for one in statement.database.named(parameters[1]) if one is not statement.session]
    return _end(statement, [one for one in others if one.name == parameters[1] and one.waits_for is None])


@reads(
    "select coalesce(sum(c.bytes_processed), 0) from pg_stat_activity a left join pg_stat_progress_copy c using (pid) "
    "where a.datname = current_database() and a.application_name = %s",
    local=True,
)
def bytes_copied(_statement: Statement, _parameters: Any) -> Result:
    """The model copies in one step, so a loader is never seen on its way."""
    return Result([(0,)])


def _end(statement: Statement, sessions: list[Session]) -> Result:
    statement.session.footprint.everything = True
    for session in sessions:
        session.end(errors.AdminShutdown("terminating connection due to administrator command"))
    return Result([(True,) for _ in sessions])


# ── parked streams and skips ──


@writes(
    "insert into parked (table_name, stream, view, partition, since_offset, since_version, error) "
    "values (%s, %s, %s, %s, %s, %s, %s) on conflict (table_name, stream) do nothing"
)
def park(statement: Statement, parameters: Any) -> Steps:
    names = ("table_name", "stream", "view", "partition", "since_offset", "since_version", "error")
    row = dict(zip(names, parameters, strict=True))
    written = yield from statement.insert("parked", (row["table_name"], row["stream"]), row, lambda _there: None)
    return Result(count=int(written))


@reads("select view, stream, since_version from parked where table_name = any(%s)")
def parked_in(statement: Statement, parameters: Any) -> Result:
    rows = [row for row in statement.where("parked") if row["table_name"] in parameters[0]]
    return Result([(row["view"], row["stream"], row["since_version"]) for row in rows])


@reads(
    "select p.view, p.table_name, p.stream, p.partition, p.since_offset, p.since_version, p.error, p.parked_at, "
    "l.view is not null from parked p left join live l using (table_name) "
    "where l.view is not null or not %s order by p.view, p.table_name, p.stream"
)
def parked_streams(statement: Statement, _parameters: Any) -> Result:
    live = {row["table_name"] for row in statement.where("live")}
    names = ("view", "table_name", "stream", "partition", "since_offset", "since_version", "error")
    return Result(
        [
            (*(row[name] for name in names), statement.database.now(), row["table_name"] in live)
            for row in statement.where("parked")
        ]
    )


@writes("delete from parked where table_name = %s and stream = %s")
def unpark(statement: Statement, parameters: Any) -> Steps:
    key = tuple(parameters)
    count = yield from statement.delete("parked", lambda row: (row["table_name"], row["stream"]) == key)
    return Result(count=count)


@writes("delete from parked where table_name = %s")
def unpark_all(statement: Statement, parameters: Any) -> Steps:
    count = yield from statement.delete("parked", lambda row: row["table_name"] == parameters[0])
    return Result(count=count)


@writes("update parked set since_offset = %s, since_version = %s, error = %s where table_name = %s and stream = %s")
def park_later(statement: Statement, parameters: Any) -> Steps:
    offset, version, error, *key = parameters
    count = yield from statement.update(
        "parked",
        lambda row: [row["table_name"], row["stream"]] == key,
        {"since_offset": offset, "since_version": version, "error": error},
    )
    return Result(count=count)


@reads("select view, stream, version, through from skips where view = any(%s)")
def skips(statement: Statement, parameters: Any) -> Result:
    rows = [row for row in statement.where("skips") if row["view"] in parameters[0]]
    return Result([(row["view"], row["stream"], row["version"], row["through"]) for row in rows])


@writes("insert into skips (view, stream, version, through, partition, reason) values (%s, %s, %s, %s, %s, %s)")
def skip(statement: Statement, parameters: Any) -> Steps:
    row = dict(zip(("view", "stream", "version", "through", "partition", "reason"), parameters, strict=True))
    yield from statement.insert("skips", (row["view"], row["stream"], row["version"]), row)
    return Result(count=1)


# ── tables ──


@reads("select to_regclass(quote_ident(%s)) is not null", "select to_regclass(quote_ident(%s))")
def exists(statement: Statement, parameters: Any) -> Result:
    statement.session.footprint.read.add((parameters[0], None))
    own, _ = statement.transaction.own((parameters[0], None))
    there = parameters[0] in statement.snapshot or own
    return Result([(parameters[0] if there else None,)])


@reads("select reloptions from pg_class where oid = to_regclass(quote_ident(%s))")
def options(statement: Statement, parameters: Any) -> Result:
    statement.session.footprint.read.add((parameters[0], None))
    return Result([(None,)] if parameters[0] in statement.snapshot else [])


@shape(r'create table "(\w+)" \(like "(\w+)" including all\) ?')
def create_like(statement: Statement, _parameters: Any, table: str, like: str) -> Steps:
    yield from statement.use(like)
    yield from statement.use(table, Lock.EXCLUSIVE)
    if table in statement.database.committed:
        raise errors.DuplicateTable(f'relation "{table}" already exists')
    statement.create(table)
    return Result()


@shape(r'comment on table "\w+" is .+', local=True)
def comment(_statement: Statement, _parameters: Any) -> Steps:
    return Result()
    yield


@reads(
    "select conname from pg_constraint where conrelid = to_regclass(quote_ident(%s)) and contype in ('p', 'u')",
    "select c.relname from pg_index i join pg_class c on c.oid = i.indexrelid "
    "where i.indrelid = to_regclass(quote_ident(%s))",
    local=True,
)
def keys_and_indexes(_statement: Statement, _parameters: Any) -> Result:
    """The model's tables have a key where rows were not copied in, and lose it by being copied to."""
    return Result()


@shape(
    r"alter table (\w+) add constraint .*primary key .*|ALTER TABLE (\w+) ADD (?:CONSTRAINT \w+ )?PRIMARY KEY \(.+\)"
)
def add_key(statement: Statement, _parameters: Any, lower: str | None, upper: str | None) -> Steps:
    """Raises UniqueViolation."""
    table = lower or upper
    assert table is not None
    yield from statement.use(table, Lock.EXCLUSIVE)
    names = key_columns(statement, table)
    rows = statement.newest_rows(table)
    found: dict[Key, Row] = {}
    for row in rows.values():
        if (key := tuple(row[name] for name in names)) in found:
            raise errors.UniqueViolation(f"could not create unique index of {table}: {key} is there twice")
        found[key] = row
    for key in rows.keys() - found.keys():
        statement.put(table, key, None)
    for key, row in found.items():
        statement.put(table, key, row)
    return Result()


@shape(r'analyze "\w+"', local=True)
def analyze(_statement: Statement, _parameters: Any) -> Steps:
    return Result()
    yield


@shape(r'(truncate|drop table) "(\w+)"')
def remove(statement: Statement, _parameters: Any, how: str, table: str) -> Steps:
    yield from statement.use(table, Lock.EXCLUSIVE)
    if table not in statement.database.committed:
        raise errors.UndefinedTable(f'table "{table}" does not exist')
    if how == "truncate":
        for key in statement.newest_rows(table):
            statement.put(table, key, None)
    else:
        statement.drop(table)
    return Result()
