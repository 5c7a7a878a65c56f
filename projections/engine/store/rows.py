"""Rows between a view's table and the fold: loads those that a batch needs, and makes the statements that write its changes.

Rows are sent sorted by partition and key, so that transactions can't deadlock on them. They are sent as unnested arrays, because
no timeout ends a session that froze inside COPY.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from operator import itemgetter
from typing import Any, NamedTuple

import msgspec
from psycopg import sql

from domain.engine.contexts import Context, unreadable_state
from domain.engine.storable import decoder
from infra.database.connect import Connection
from infra.errors import SamefoldError, in_words
from projections.engine.fold.fold import Changes, Decoded, RowCache, keys_to_load
from projections.engine.fold.plan import Plan
from projections.engine.views import binary_arrays
from projections.engine.views.column_types import Scalar
from projections.engine.views.columns import PARTITION, Column, Role, place_name
from projections.engine.views.core_views import command_key
from projections.engine.views.view import Kind, View

_PARTITION_COLUMN = Column(PARTITION, Scalar.INT)
_encode = msgspec.json.encode


class Statement(NamedTuple):
    """SQL with its parameters."""

    query: bytes
    parameters: Sequence[Any]
    answer: Callable[[Sequence[tuple[Any, ...]]], None] | None = None
    """Called with the rows that it returned, soon after the transaction was committed; not always."""


class Refused(Exception):
    """A view's rows can't be encoded, e.g. a state that is not JSON. The fold has checked all rows of authors' views."""


class StoredValueUnknown(SamefoldError):
    """A table has a value that is none of the column's enum, or JSON of other parts than the column's."""

    def __init__(self, view: View, column: Column, value: object) -> None:
        enum = column.enum.__name__ if column.enum else column.scalar
        super().__init__(
            f"A row of view '{view.name}' has {value!r:.200} in column '{column.name}', but {enum} has no such value.",
            f"Restore that value, or raise VERSION in projections/{view.name}.py and run `samefold rebuild`.",
        )


def ask_for_missing(
    connection: Connection,
    plan: Plan,
    tables: Mapping[str, str],
    batch: Sequence[Decoded],
    held: Mapping[int, RowCache],
) -> Callable[[], None]:
    """Query the rows that the fold needs and `held` lacks, of the views in `tables`.

    The result is to be called when the answers have come, in a pipeline after its `sync`. It caches the rows that were found, and
    that the others are absent.
    """
    asked = []
    for one in batch:
        cache = held[one.partition]
        for name, keys in keys_to_load(plan, one, cache).items():
            if name in tables:
                view = plan.views[name]
                by_column = [keys] if view.key_function is None else list(zip(*keys, strict=True))
                packed = [column.type.pack(values) for column, values in zip(view.key, by_column, strict=True)]
                cursor = connection.execute(_select(view, tables[name]), packed)
                asked.append((cache, name, keys, cursor))

    def hold() -> None:
        for cache, name, keys, cursor in asked:
            found = _loaded(plan.views[name], plan.states.get(name), cursor.fetchall())
            cache.rows[name].update(dict.fromkeys(keys) | found)

    return hold


def _loaded(view: View, context: Context | None, records: Iterable[tuple[Any, ...]]) -> dict[Any, Any]:
    """The rows that were found, by the fold's key. A snapshot view has a context."""
    if context is not None:
        return {stream: (version, _state(context.state, stream, text)) for stream, version, text in records}
    rows = list(map(_row_maker(view), records))
    return dict(zip(map(view.key_of, rows), rows, strict=True))


def _state(kind: type, stream: str, text: str) -> Any:
    try:
        return decoder(kind)(text)
    except (msgspec.DecodeError, ValueError, TypeError) as error:
        raise unreadable_state(stream, error) from error


def _row_maker(view: View) -> Callable[[tuple[Any, ...]], Any]:
    """Makes a view's row from its stored columns, in the order of `view.columns`."""
    make: Callable[[Iterable[Any]], Any] = partial(tuple.__new__, view.row)  # like _make(), but faster
    converters = [(i, c) for i, column in enumerate(view.columns) if (c := column.type.from_database) is not None]
    if not converters:
        return make

    def convert_and_make(record: tuple[Any, ...]) -> Any:
        values = list(record)
        for index, convert in converters:
            if values[index] is not None:
                try:
                    values[index] = convert(values[index])
                except ValueError as error:
                    raise StoredValueUnknown(view, view.columns[index], values[index]) from error
        return make(values)

    return convert_and_make


def writes(view: View, table: str, batches: Sequence[Changes]) -> list[Statement]:
    """The statements that write the changes of batches, which are of different partitions. Raises Refused."""
    try:
        match view.kind:
            case Kind.ENTITY:
                return _write_entities(view, table, batches)
            case Kind.JOURNAL:
                lines = [(batch.partition, list(batch.added[view.name])) for batch in batches]
                return _statement(_plain_insert(view, table), view.columns, lines)
            case Kind.SUMMARY:
                sums = [(b.partition, [(*key, *values) for key, values in b.sums[view.name].items()]) for b in batches]
                return _statement(_add(view, table), [*view.key, *view.values], sums)
            case Kind.SNAPSHOT:
                states = [
                    (
                        b.partition,
                        [(key, version, _encode(state)) for key, (version, state) in b.states[view.name].items()],
                    )
                    for b in batches
                ]
                return _statement(_upsert(view, table), view.columns, states)
            case Kind.OUTCOMES:
                return _write_outcomes(view, table, batches)
            case Kind.POLICY:
                assert view.write is not None, "a policy writes into the outbox"
                return view.write(batches)
    except MemoryError:
        raise
    except Exception as error:
        raise Refused(in_words(error)) from error


def _write_entities(view: View, table: str, batches: Sequence[Changes]) -> list[Statement]:
    stored, deleted = _Rows(), _Rows()
    for batch in batches:
        changed = batch.rows[view.name]
        rows = [row for row in changed.values() if row is not None]
        stored.append((batch.partition, rows))
        if len(rows) < len(changed):
            absent = [key for key, row in changed.items() if row is None]
            deleted.append((batch.partition, [(key,) for key in absent] if view.key_function is None else absent))
    return [
        *_statement(_delete(view, table), view.key, deleted),
        *_statement(_upsert(view, table), view.columns, stored),
    ]


def _write_outcomes(view: View, table: str, batches: Sequence[Changes]) -> list[Statement]:
    answered = [
        (command_key(commit.stream, commit.command_id), commit, time_ms, b.partition)
        for b in batches
        for _, time_ms, commit in b.counted
    ]
    if not answered:
        return []
    answered.sort(key=itemgetter(0))
    keys, commits, times_ms, partitions = zip(*answered, strict=True)
    reasons = [commit.reason for commit in commits]
    return [
        Statement(
            _plain_insert(view, table),
            [
                binary_arrays.uuids(keys),
                binary_arrays.uuids([commit.fingerprint for commit in commits]),
                binary_arrays.bigints([commit.version for commit in commits]),
                binary_arrays.times_of_ms(times_ms),
                binary_arrays.texts([reason.code if reason else None for reason in reasons]),
                binary_arrays.texts([reason.message if reason else None for reason in reasons]),
                binary_arrays.texts([commit.by or None for commit in commits]),
                binary_arrays.smallints(partitions),
            ],
        )
    ]


_Rows = list[tuple[int, list[tuple[Any, ...]]]]
"""By partition, the rows of a statement."""


def _statement(query: bytes, columns: Sequence[Column], rows: _Rows) -> list[Statement]:
    """The statement for rows of these columns, if there are any: packed by column, sorted by partition and key."""
    rows = [part for part in rows if part[1]]
    if not rows:
        return []
    places = [place for place, column in enumerate(columns) if column.is_key]
    order: Callable[[Any], Any] = itemgetter(*places)
    if any(columns[place].enum for place in places):  # an enum may have no order, but its stored text has
        stored = [(place, columns[place].type.to_database) for place in places]
        order = lambda row: tuple(row[place] if convert is None else convert(row[place]) for place, convert in stored)  # noqa: E731
    together, partitions = list[tuple[Any, ...]](), list[int]()
    for partition, part in sorted(rows, key=itemgetter(0)):
        together += sorted(part, key=order)
        partitions += [partition] * len(part)
    by_column = zip(columns, zip(*together, strict=True), strict=True)
    packed = [column.type.pack(values) for column, values in by_column]
    return [Statement(query, [*packed, binary_arrays.smallints(partitions)])]


# The statements. Each is composed once per table, as bytes, because psycopg would render a Composed each time. The server
# prepares it after a few uses.


def _names(columns: Iterable[Column]) -> list[sql.Identifier]:
    return [sql.Identifier(column.name) for column in columns]


def _unnest(columns: Iterable[Column]) -> sql.Composed:
    """One placeholder per column; `numeric` is sent as text."""
    return sql.SQL("unnest({})").format(
        sql.SQL(", ").join(sql.SQL("%s::numeric[]" if column.type.sent_as_text else "%s") for column in columns)
    )


@lru_cache
def _select(view: View, table: str) -> bytes:
    columns = [
        sql.SQL(column.type.loaded).format(sql.SQL("t.{}").format(sql.Identifier(column.name)))
        for column in view.columns
    ]
    keys = _names(view.key)
    if len(keys) == 1:
        unnest = sql.SQL("any(%s::numeric[])" if view.key[0].type.sent_as_text else "any(%s)")
        condition = sql.SQL("from {} t where t.{} = {}").format(sql.Identifier(table), keys[0], unnest)
    else:
        condition = sql.SQL("from {} t join {} k({}) on {}").format(
            sql.Identifier(table),
            _unnest(view.key),
            sql.SQL(", ").join(keys),
            sql.SQL(" and ").join(sql.SQL("t.{0} = k.{0}").format(key) for key in keys),
        )
    return sql.SQL("select {} {}").format(sql.SQL(", ").join(columns), condition).as_bytes()


def _insert_into(table: str, columns: Sequence[Column]) -> sql.Composed:
    return sql.SQL("insert into {} as t ({}, {}) select * from {}").format(
        sql.Identifier(table),
        sql.SQL(", ").join(_names(columns)),
        sql.Identifier(PARTITION),
        _unnest([*columns, _PARTITION_COLUMN]),
    )


@lru_cache
def _plain_insert(view: View, table: str) -> bytes:
    return _insert_into(table, view.columns).as_bytes()


@lru_cache
def _upsert(view: View, table: str) -> bytes:
    # A row of another partition is covered by another position: it becomes a null, which is refused.
    owned = sql.SQL("{0} = case when t.{0} = excluded.{0} then t.{0} end").format(sql.Identifier(PARTITION))
    sets = [sql.SQL("{0} = excluded.{0}").format(name) for name in _names(view.values)]
    upsert = sql.SQL("{} on conflict ({}) do update set {}").format(
        _insert_into(table, view.columns), sql.SQL(", ").join(_names(view.key)), sql.SQL(", ").join([*sets, owned])
    )
    return upsert.as_bytes()


_COMBINED = {
    Role.SUM: sql.SQL("{0} = t.{0} + excluded.{0}"),
    Role.MIN: sql.SQL("{0} = least(t.{0}, excluded.{0})"),
    Role.MAX: sql.SQL("{0} = greatest(t.{0}, excluded.{0})"),
    # of places; null is none, which `greatest` and `least` leave out
    Role.LATEST: sql.SQL(
        "{0} = case when t.{1} > excluded.{1} or excluded.{1} is null then t.{0} else excluded.{0} end"
    ),
    Role.FIRST: sql.SQL(
        "{0} = case when t.{1} <= excluded.{1} or excluded.{1} is null then t.{0} else excluded.{0} end"
    ),
}


@lru_cache
def _add(view: View, table: str) -> bytes:
    upsert = sql.SQL("{} on conflict ({}, {}) do update set {}").format(
        _insert_into(table, [*view.key, *view.values]),
        sql.SQL(", ").join(_names(view.key)),
        sql.Identifier(PARTITION),
        sql.SQL(", ").join(
            _COMBINED[column.role].format(sql.Identifier(column.name), sql.Identifier(place_name(column.name)))
            for column in view.values
        ),
    )
    return upsert.as_bytes()


@lru_cache
def _delete(view: View, table: str) -> bytes:
    keys = [*_names(view.key), sql.Identifier(PARTITION)]
    delete = sql.SQL("delete from {} t using {} k({}) where {}").format(
        sql.Identifier(table),
        _unnest([*view.key, _PARTITION_COLUMN]),
        sql.SQL(", ").join(keys),
        sql.SQL(" and ").join(sql.SQL("t.{0} = k.{0}").format(key) for key in keys),
    )
    return delete.as_bytes()
