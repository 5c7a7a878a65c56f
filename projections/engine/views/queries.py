"""What readers ask of a view: rows by key or page by page, with the position and the live table they were read at.

Each query is one statement, so it sees one snapshot: rows and position always belong together. The database makes the JSON of
the rows, and Python passes it on to clients untouched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec
from psycopg import sql

from infra.personal.tokens import may_hold
from projections.engine.views.columns import Column, Role
from projections.engine.views.token import Token
from projections.engine.views.view import Kind, View


class Query(NamedTuple):
    """SQL with its parameters. It returns one row with one column, for `found`."""

    text: bytes
    parameters: Sequence[Any]


class Found(NamedTuple):
    """What a query saw, all of it at one moment."""

    version: int
    table: str
    """The live table. If it is not the one that was queried, the rows mean nothing."""
    position: Token
    parked: int
    """Number of streams that the table leaves out from some event on."""
    parked_since: Mapping[str, int]
    """Of the streams that were asked for, the parked ones, with the first version that is left out."""
    rows: Sequence[Row]
    """As stored: personal values are sealed."""
    has_personal: bool
    """Whether any row may hold a personal value."""


class Row(NamedTuple):
    """A row as JSON, with the number of the key asked for (from 1), or its place in the page."""

    number: int
    json: msgspec.Raw


def by_keys(view: View, table: str, topic: str, keys: Sequence[tuple[Any, ...]], streams: Sequence[str] = ()) -> Query:
    """The rows with these keys, as far as they exist. `streams` are looked up among the parked ones."""
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
    # a summary's values are there only after grouping
    late = {column.name for column in view.columns if view.kind is Kind.SUMMARY and not column.is_key}
    in_order = [(column.name, filters[column.name]) for column in view.columns if column.name in filters]
    where = [(name, value) for name, value in in_order if name not in late]
    having = [(name, value) for name, value in in_order if name in late]
    return Query(
        _page(view, table, _nulls(where), _nulls(having), after is not None),
        [topic, [], *_values(where), *(after or ()), *_values(having), most, view.name],
    )


def found(value: str) -> Found:
    """What a query returned. Raises msgspec.DecodeError for anything else."""
    version, table, positions, parked, since, rows = _decode(value)
    position: dict[str, dict[int, int]] = {}
    for topic_id, partition, next_offset in positions or ():
        position.setdefault(topic_id, {})[partition] = next_offset
    return Found(version, table, Token(position), parked, dict(since or ()), rows or (), may_hold(value))


_Answer = tuple[int, str, list[tuple[str, int, int]] | None, int, list[tuple[str, int]] | None, list[Row] | None]
_decode: Callable[[str], _Answer] = msgspec.json.Decoder(_Answer).decode

# Aliases that a view's columns could have too begin with an underscore, which no column's name can.
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
_BY_KEYS = sql.SQL(
    "select u.number, row_to_json(_row) as shown "
    "from unnest({arrays}) with ordinality u({asked}, number), lateral ({select} where {same}{group_by}) _row"
)
_PAGE = sql.SQL(
    "select row_number() over () as number, row_to_json(_row) as shown "
    "from ({select}{where}{group_by}{having} order by {keys} limit %s) _row"
)


@lru_cache(256)
def _by_keys(view: View, table: str) -> bytes:
    asked = [sql.Identifier(f"k{place}") for place, _ in enumerate(view.key)]
    same = (sql.SQL("{} = u.{}").format(_name(column), key) for column, key in zip(view.key, asked, strict=True))
    rows = _BY_KEYS.format(
        arrays=_list(sql.SQL("%s::{}[]").format(_type(column)) for column in view.key),
        asked=_list(asked),
        select=_select(view, table),
        same=sql.SQL(" and ").join(same),
        group_by=_group_by(view),
    )
    return _ONE_MOMENT.format(rows).as_bytes()


@lru_cache(256)
def _page(
    view: View, table: str, where: tuple[tuple[str, bool], ...], having: tuple[tuple[str, bool], ...], goes_on: bool
) -> bytes:
    keys = _list(map(_name, view.key))
    before = _conditions(view, where)
    if goes_on:
        places = _list(sql.SQL("%s::{}").format(_type(column)) for column in view.key)
        before.append(sql.SQL("({}) > ({})").format(keys, places))
    rows = _PAGE.format(
        select=_select(view, table),
        where=_all_of("where", before),
        group_by=_group_by(view),
        having=_all_of("having", _conditions(view, having)),
        keys=keys,
    )
    return _ONE_MOMENT.format(rows).as_bytes()


def _nulls(filters: Iterable[tuple[str, Any]]) -> tuple[tuple[str, bool], ...]:
    return tuple((name, value is None) for name, value in filters)


def _values(filters: Iterable[tuple[str, Any]]) -> list[Any]:
    return [value for _, value in filters if value is not None]


def _conditions(view: View, filters: Sequence[tuple[str, bool]]) -> list[sql.Composed]:
    columns = {column.name: column for column in view.columns}
    return [
        sql.SQL("{} is null").format(_value(columns[name]))
        if is_null
        else sql.SQL("{} = %s::{}").format(_value(columns[name]), _type(columns[name]))
        for name, is_null in filters
    ]


def _all_of(word: str, conditions: Sequence[sql.Composable]) -> sql.Composable:
    return sql.SQL(" {} {}").format(sql.SQL(word), sql.SQL(" and ").join(conditions)) if conditions else sql.SQL("")


def _select(view: View, table: str) -> sql.Composed:
    shown = (
        sql.SQL("{} as {}").format(column.type.shown(_value(column)), sql.Identifier(column.name))
        for column in view.columns
    )
    return sql.SQL("select {} from {} t").format(_list(shown), sql.Identifier(table))


def _group_by(view: View) -> sql.Composable:
    """Adds up a summary's subtotals, one of each partition."""
    if view.kind is not Kind.SUMMARY:
        return sql.SQL("")
    return sql.SQL(" group by {}").format(_list(map(_name, view.key)))


def _value(column: Column) -> sql.Composed:
    if column.role in (Role.SUM, Role.MIN, Role.MAX):
        return sql.SQL("{}({})").format(sql.SQL(column.role), _name(column))
    return _name(column)


def _name(column: Column) -> sql.Composed:
    return sql.SQL("t.{}").format(sql.Identifier(column.name))


def _type(column: Column) -> sql.SQL:
    return sql.SQL(column.type.sql_name)


def _list(parts: Iterable[sql.Composable]) -> sql.Composed:
    return sql.SQL(", ").join(parts)
