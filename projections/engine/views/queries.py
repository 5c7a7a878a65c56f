"""What readers ask of a view: rows by key, or page by page, with the position and the pointer they were read at.

All of it is one statement, which sees one snapshot by itself: rows and a position from two could be of different moments. Rows come
out as JSON made by the database, which no Python touches on their way to a client.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec
from psycopg import sql

from projections.engine.views.columns import Column, Role
from projections.engine.views.token import Token
from projections.engine.views.view import Kind, View


class Query(NamedTuple):
    """SQL with its parameters. Its one row has one column, for `found`."""

    text: bytes
    parameters: Sequence[Any]


class Found(NamedTuple):
    """What a query saw, all of it in one moment."""

    version: int
    table: str
    """The one that was live; the rows mean nothing if it is not the one that was asked."""
    position: Token
    parked: int
    """Streams that the table leaves out from some event on."""
    parked_since: Mapping[str, int]
    """Of the streams that were asked for, those that are parked, with the first version that is left out."""
    rows: Sequence[Row]


class Row(NamedTuple):
    """A row as JSON, and which of the keys asked for it has; in a page, its place."""

    number: int
    json: msgspec.Raw


def by_keys(view: View, table: str, topic: str, keys: Sequence[tuple[Any, ...]], streams: Sequence[str] = ()) -> Query:
    """The rows with these keys, which are values of `view.key`, those that there are. `streams` are looked up among the parked."""
    by_column = [list(values) for values in zip(*keys, strict=True)] if keys else [[] for _ in view.key]
    return Query(_by_keys(view, table), [topic, list(streams), *by_column, view.name])


def page(
    view: View,
    table: str,
    topic: str,
    filters: Mapping[str, Any],
    after: tuple[Any, ...] | None,
    most: int,
) -> Query:
    """The first `most` rows by key, after a key, whose columns have these values; None asks for NULL."""
    where, having = _split(view, filters)
    text = _page(view, table, _nulls(filters, where), _nulls(filters, having), after is not None)
    return Query(
        text, [topic, [], *_values(filters, where), *(after or ()), *_values(filters, having), most, view.name]
    )


def found(value: str) -> Found:
    """What came of a query. Raises msgspec.DecodeError where it is no answer to one."""
    version, table, positions, parked, since, rows = _decode(value)
    position: dict[str, dict[int, int]] = {}
    for topic_id, partition, next_offset in positions or ():
        position.setdefault(topic_id, {})[partition] = next_offset
    return Found(version, table, Token(position), parked, dict(since or ()), rows or ())


_Answer = tuple[int, str, list[tuple[str, int, int]] | None, int, list[tuple[str, int]] | None, list[Row] | None]
_decode: Callable[[str], _Answer] = msgspec.json.Decoder(_Answer).decode

_ONE_MOMENT = sql.SQL("""
select json_build_array(
  l.version, l.table_name,
  (select json_agg(json_build_array(p.topic_id, p.partition, p.next_offset) order by p.partition)
     from positions p where p.agent = l.agent and p.topic = %s),
  (select count(*) from parked k where k.table_name = l.table_name),
  (select json_agg(json_build_array(k.stream, k.since_version))
     from parked k where k.table_name = l.table_name and k.stream = any(%s::text[])),
  (select json_agg(json_build_array(f.number, f.shown) order by f.number) from ({}) f))::text
  from live l where l.view = %s
""")


@lru_cache(256)
def _by_keys(view: View, table: str) -> bytes:
    asked = [sql.Identifier(f"k{place}") for place, _ in enumerate(view.key)]
    same = (
        sql.SQL("t.{} = u.{}").format(sql.Identifier(column.name), name)
        for column, name in zip(view.key, asked, strict=True)
    )
    rows = sql.SQL(
        "select u.number, row_to_json(r) as shown from unnest({}) with ordinality u({}, number), lateral ({} where {}{}) r"
    ).format(
        sql.SQL(", ").join(sql.SQL("%s::{}[]").format(sql.SQL(column.type.sql_name)) for column in view.key),
        sql.SQL(", ").join(asked),
        _select(view, table),
        sql.SQL(" and ").join(same),
        _group_by(view),
    )
    return _ONE_MOMENT.format(rows).as_bytes()


@lru_cache(256)
def _page(
    view: View, table: str, where: tuple[tuple[str, bool], ...], having: tuple[tuple[str, bool], ...], goes_on: bool
) -> bytes:
    keys = sql.SQL(", ").join(sql.SQL("t.{}").format(sql.Identifier(column.name)) for column in view.key)
    before = _conditions(view, where)
    if goes_on:
        places = sql.SQL(", ").join(sql.SQL("%s::{}").format(sql.SQL(column.type.sql_name)) for column in view.key)
        before.append(sql.SQL("({}) > ({})").format(keys, places))
    rows = sql.SQL(
        "select row_number() over () as number, row_to_json(r) as shown from ({}{}{}{} order by {} limit %s) r"
    ).format(
        _select(view, table),
        _all_of("where", before),
        _group_by(view),
        _all_of("having", _conditions(view, having)),
        keys,
    )
    return _ONE_MOMENT.format(rows).as_bytes()


def _split(view: View, filters: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """The columns to compare before grouping and after it, in a fixed order."""
    names = [column.name for column in view.columns if column.name in filters]
    keys = {column.name for column in view.key}
    late = [name for name in names if _groups(view) and name not in keys]
    return [name for name in names if name not in late], late


def _nulls(filters: Mapping[str, Any], names: Sequence[str]) -> tuple[tuple[str, bool], ...]:
    return tuple((name, filters[name] is None) for name in names)


def _values(filters: Mapping[str, Any], names: Sequence[str]) -> list[Any]:
    return [filters[name] for name in names if filters[name] is not None]


def _conditions(view: View, filters: Sequence[tuple[str, bool]]) -> list[sql.Composed]:
    columns = {column.name: column for column in view.columns}
    return [_is(columns[name], null) for name, null in filters]


def _groups(view: View) -> bool:
    return view.kind is Kind.SUMMARY


def _select(view: View, table: str) -> sql.Composed:
    shown = (
        sql.SQL("{} as {}").format(column.type.shown(_value(column)), sql.Identifier(column.name))
        for column in view.columns
    )
    return sql.SQL("select {} from {} t").format(sql.SQL(", ").join(shown), sql.Identifier(table))


def _group_by(view: View) -> sql.Composable:
    """A summary's shares, one a partition, are added up."""
    if not _groups(view):
        return sql.SQL("")
    return sql.SQL(" group by {}").format(
        sql.SQL(", ").join(sql.SQL("t.{}").format(sql.Identifier(column.name)) for column in view.key)
    )


def _all_of(word: str, conditions: Sequence[sql.Composable]) -> sql.Composable:
    return sql.SQL(" {} {}").format(sql.SQL(word), sql.SQL(" and ").join(conditions)) if conditions else sql.SQL("")


def _value(column: Column) -> sql.Composed:
    name = sql.SQL("t.{}").format(sql.Identifier(column.name))
    return sql.SQL("{}({})").format(sql.SQL(column.role), name) if column.role in _COMBINED else sql.Composed([name])


def _is(column: Column, null: bool) -> sql.Composed:
    if null:
        return sql.SQL("{} is null").format(_value(column))
    return sql.SQL("{} = %s::{}").format(_value(column), sql.SQL(column.type.sql_name))


_COMBINED = (Role.SUM, Role.MIN, Role.MAX)
