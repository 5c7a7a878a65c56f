"""What readers ask of a view: rows by key or page by page, with the position and the live table they were read at.

Each query is one statement, so it sees one snapshot: rows and position always belong together. The database makes the JSON of
the rows, and Python passes it on to clients untouched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple, TypeAlias

import msgspec
from psycopg import sql

from domain.engine.personal.tokens import may_hold
from infra.access import BadAccess, Rows
from projections.engine.views.column_types import BadRow
from projections.engine.views.columns import Column, Role
from projections.engine.views.sql_views import STOPPED
from projections.engine.views.token import Token
from projections.engine.views.view import Kind, View

Shape: TypeAlias = tuple[tuple[str, ...], ...]
"""Of `Rows`: the columns, without their values."""
MOST_PARKED = 1_000
"""Parked streams beyond these are not counted, since each read and each health check counts them."""


class Query(NamedTuple):
    """SQL with its parameters. It returns one row with one column, for `found`."""

    text: bytes
    if_stopped: bytes
    """The text that finds the last rows of a stopped view, too."""
    parameters: Sequence[Any]


class Found(NamedTuple):
    """What a query saw, all of it at one moment."""

    version: int
    table: str
    """The live table. If it is not the one that was queried, the rows mean nothing."""
    position: Token
    parked: int | None
    """Number of streams that the table leaves out from some event on, up to MOST_PARKED. With `only`, on a page where a row's key
    is its stream's id, of those streams whose rows are among them; elsewhere None, so that it tells nothing of others."""
    parked_since: Mapping[str, int]
    """Of the streams that were asked for, the parked ones, with the first version that is left out."""
    rows: Sequence[Row]
    """As stored: personal values are sealed."""
    has_personal: bool
    """Whether any row may hold a personal value."""
    stopped: tuple[str, str] | None
    """Where the rows are the last ones of a stopped view: the reason's code, and since when as ISO time."""

    def of(self, number: int, stream: str | None) -> Found:
        """What a query for the key with this number alone would have found; `stream` is its."""
        rows = [Row(1, row.json) for row in self.rows if row.number == number]
        since = {parked: at for parked, at in self.parked_since.items() if parked == stream}
        return self._replace(rows=rows, parked_since=since, has_personal=any(may_hold(bytes(row.json)) for row in rows))


class Row(NamedTuple):
    """A row as JSON, with the number of the key asked for (from 1), or its place in the page."""

    number: int
    json: msgspec.Raw


def by_keys(
    view: View,
    table: str,
    topic: str,
    keys: Sequence[tuple[Any, ...]],
    streams: Sequence[str] = (),
    only: Sequence[Rows] = (),
) -> Query:
    """The rows with these keys, as far as they exist. `streams` are looked up among the parked ones.

    With `only`, one of each key and all of one shape, a key's row exists if it is among those. Raises BadAccess.
    """
    by_column = [list(values) for values in zip(*keys, strict=True)] if keys else [[] for _ in view.key]
    shape = only[0].shape if only else ()
    if only:
        by_column += map(list, zip(*(allowed_values(view, one) for one in only), strict=True))
    return Query(*_by_keys(view, table, shape), [topic, list(streams), *by_column, view.name])


def page(
    view: View,
    table: str,
    topic: str,
    filters: Mapping[str, Any],
    after: tuple[Any, ...] | None,
    most: int,
    only: Rows | None = None,
) -> Query:
    """The first `most` rows by key, after a key, whose columns have these values; None asks for NULL.

    With `only`, no others exist. Raises BadAccess.
    """
    filtered = [column for column in (*view.key, *view.values) if column.name in filters]
    nulls = tuple((column, filters[column.name] is None) for column in filtered)
    values = [filters[column.name] for column, is_null in nulls if not is_null]
    allowed, shape = (allowed_values(view, only), only.shape) if only else ([], ())
    of_parked = allowed if view.tells_stream else []
    return Query(
        *_page(view, table, after is not None, nulls, shape),
        [topic, *of_parked, [], *(after or ()), *values, *allowed, most, view.name],
    )


def allowed_values(view: View, only: Rows) -> list[Any]:
    """The values that columns are compared with, in the order of the shape. Raises BadAccess."""
    columns = {column.name: column for column in view.columns}
    return [_allowed(view, columns.get(name), name, value) for one in only.any_of for name, value in one]


def _allowed(view: View, column: Column | None, name: str, value: Any) -> Any:
    if column is None:
        raise BadAccess(
            f"access.py names column '{name}' of view '{view.name}', which has no such column.",
            f"Its columns are {', '.join(column.name for column in view.columns)}.",
        )
    try:
        exact = column.exact(value)
    except BadRow as error:
        raise BadAccess(f"access.py, view '{view.name}': {error}.", "Give a value of the column's own type.") from None
    if exact is None or exact != value:  # a time is no day, though Python takes it for one
        raise BadAccess(
            f"access.py, view '{view.name}': column '{name}' can't be compared with a {type(value).__name__}.",
            "Give a value of the column's own type.",
        )
    return exact if column.type.to_database is None else column.type.to_database(exact)


def found(value: str) -> Found:
    """What a query returned. Raises msgspec.DecodeError for anything else."""
    version, table, positions, parked, since, rows, stopped = _decode(value)
    position: dict[str, dict[int, int]] = {}
    for topic_id, partition, next_offset in positions or ():
        position.setdefault(topic_id, {})[partition] = next_offset
    return Found(version, table, Token(position), parked, dict(since or ()), rows or (), may_hold(value), stopped)


_At = list[tuple[str, int, int]] | None
_Answer = tuple[int, str, _At, int | None, list[tuple[str, int]] | None, list[Row] | None, tuple[str, str] | None]
_decode: Callable[[str], _Answer] = msgspec.json.Decoder(_Answer).decode

# Aliases that a view's columns could have too begin with an underscore, which no column's name can.
# Arrays are in sub-selects: so the planner expects as many values whatever their number, and keeps one plan. Else it plans each
# read of one row, which takes longer than the read. `offset 0`: else the kept plan scans tables of thousands of rows for ten keys.
_ONE_MOMENT = """
select json_build_array(
  l.version, l.table_name,
  (select json_agg(json_build_array(p.topic_id, p.partition, p.next_offset) order by p.partition)
     from {positions} p where p.agent = l.agent and p.topic = %s),
  {{parked}},
  (select json_agg(json_build_array(k.stream, k.since_version))
     from parked k where k.table_name = l.table_name and k.stream = any((select %s::text[])::text[])),
  (select json_agg(json_build_array(f.number, f.shown) order by f.number) from ({{rows}}) f),
  {stopped})::text
  from {views} l where l.view = %s
"""
_LIVE = sql.SQL(_ONE_MOMENT.format(views="live", positions="positions", stopped="null"))
_LIVE_OR_STOPPED = sql.SQL(
    _ONE_MOMENT.format(
        views="(select *, null as code, null as stopped_at from live union all "  # noqa: S608
        f"select view, agent, version, table_name, code, stopped_at from {STOPPED} s)",
        positions="(select agent, topic, topic_id, partition, next_offset from positions where l.code is null union all "
        "select l.agent, topic, topic_id, partition, next_offset from build_positions o join topics using (topic) "
        "where o.build = (select b.id from builds b where l.code is not null and b.table_name = l.table_name))",
        stopped="case when l.code is not null then json_build_array(l.code, l.stopped_at) end",
    )
)
_PARKED = sql.SQL(
    f"(select count(*) from (select from parked k where k.table_name = l.table_name{{}} order by k.stream limit {MOST_PARKED}) k)"  # noqa: S608
)
_ALL_PARKED, _UNKNOWN = _PARKED.format(sql.SQL("")), sql.SQL("null")
_BY_KEYS = sql.SQL(
    "select u.number, row_to_json(_row) as shown "
    "from unnest({arrays}) with ordinality u({asked}, number), lateral ({select} where {same}{group_by}{having} offset 0) _row"
)
_PAGE = sql.SQL(
    "select row_number() over () as number, row_to_json(_row) as shown "
    "from ({select}{where}{group_by}{having} order by {keys} limit %s) _row"
)


@lru_cache(256)
def _by_keys(view: View, table: str, shape: Shape) -> tuple[bytes, bytes]:
    compared = _compared(view, shape)
    asked = [sql.Identifier(f"k{place}") for place in range(len(view.key) + len(compared))]
    given = [sql.SQL("u.{}").format(name) for name in asked]
    same = [sql.SQL("{} = {}").format(_name(column), key) for column, key in zip(view.key, given, strict=False)]
    where, having = _allowing(view, shape, given[len(view.key) :])
    rows = _BY_KEYS.format(
        arrays=_list(sql.SQL("(select %s::{}[])").format(_type(column)) for column in (*view.key, *compared)),
        asked=_list(asked),
        select=_select(view, table),
        same=sql.SQL(" and ").join([*same, *where]),
        group_by=_group_by(view),
        having=_all_of("having", having),
    )
    return _texts(rows, _UNKNOWN if shape else _ALL_PARKED)


@lru_cache(256)
def _page(
    view: View, table: str, goes_on: bool, filters: tuple[tuple[Column, bool], ...], shape: Shape
) -> tuple[bytes, bytes]:
    """`filters` are the columns that must have a value, the key's first, and whether that is NULL."""
    keys = _list(map(_name, view.key))
    where, having = list[sql.Composed](), list[sql.Composed]()
    if goes_on:
        where.append(sql.SQL("({}) > ({})").format(keys, _list(map(_placeholder, view.key))))
    for column, is_null in filters:
        value = _value(column)
        condition = (
            sql.SQL("{} is null").format(value) if is_null else sql.SQL("{} = {}").format(value, _placeholder(column))
        )
        # a summary's values are there only after grouping
        (having if view.kind is Kind.SUMMARY and not column.is_key else where).append(condition)
    before, after = _allowing(view, shape, list(map(_placeholder, _compared(view, shape))))
    rows = _PAGE.format(
        select=_select(view, table),
        where=_all_of("where", where + before),
        group_by=_group_by(view),
        having=_all_of("having", having + after),
        keys=keys,
    )
    parked = _parked(view, table, before) if view.tells_stream else _UNKNOWN
    return _texts(rows, parked if shape else _ALL_PARKED)


def _texts(rows: sql.Composable, parked: sql.Composable) -> tuple[bytes, bytes]:
    found = _LIVE.format(parked=parked, rows=rows), _LIVE_OR_STOPPED.format(parked=parked, rows=rows)
    return found[0].as_bytes(), found[1].as_bytes()


def _parked(view: View, table: str, allowed: Sequence[sql.Composed]) -> sql.Composed:
    """How many streams are parked, of those whose rows are allowed."""
    [key], start = view.key, sql.Literal(len(f"{view.contexts[0]}/") + 1)
    own = sql.SQL(" and ").join([sql.SQL("{} = substr(k.stream, {})").format(_name(key), start), *allowed])
    return _PARKED.format(sql.SQL(" and exists (select from {} t where {})").format(sql.Identifier(table), own))


def _compared(view: View, shape: Shape) -> list[Column]:
    columns = {column.name: column for column in view.columns}
    return [columns[name] for one in shape for name in one]


def _allowing(
    view: View, shape: Shape, values: Sequence[sql.Composed]
) -> tuple[list[sql.Composed], list[sql.Composed]]:
    """The condition that a row may be shown, with these values; for before the grouping, and for after it."""
    if not shape:
        return [], []
    pairs = iter(zip(_compared(view, shape), values, strict=True))
    either = (
        sql.SQL("({})").format(
            sql.SQL(" and ").join(
                sql.SQL("{} = {}").format(_value(column), value) for column, value in islice(pairs, len(one))
            )
        )
        for one in shape
    )
    condition = [sql.SQL("({})").format(sql.SQL(" or ").join(either))]
    return ([], condition) if view.kind is Kind.SUMMARY else (condition, [])


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


def _placeholder(column: Column) -> sql.Composed:
    return sql.SQL("%s::{}").format(_type(column))


def _list(parts: Iterable[sql.Composable]) -> sql.Composed:
    return sql.SQL(", ").join(parts)
