"""What readers ask of a view: rows by key, with the position and the live table they were read at; `pages.py` asks for pages.

Each query is one statement, so it sees one snapshot: rows and position always belong together. The database makes the JSON of
the rows, and Python passes it on to clients untouched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Protocol, TypeAlias

import msgspec
from psycopg import sql

from domain.engine.personal.tokens import may_hold
from infra.access import BadAccess, Rows
from projections.engine.views.column_types import BadRow
from projections.engine.views.columns import AGGREGATES, Column, place_name
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
    parameters: Mapping[str, Any]


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
    counted: int | None
    """Where that was asked for, how many rows there are, up to `pages.MOST_COUNTED` + 1."""

    def of(self, number: int, stream: str | None) -> Found:
        """What a query for the key with this number alone would have found; `stream` is its."""
        rows = [Row(1, row.json) for row in self.rows if row.number == number]
        since = {parked: at for parked, at in self.parked_since.items() if parked == stream}
        return self._replace(rows=rows, parked_since=since, has_personal=any(may_hold(bytes(row.json)) for row in rows))


class Row(NamedTuple):
    """A row as JSON, with the number of the key asked for (from 1), or of the row in the page."""

    number: int
    json: msgspec.Raw
    place: list[str | None] | None = None
    """On a page: the values that it is sorted by, as texts of a URL."""


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
    values = {"topic": topic, "view": view.name, "streams": list(streams)}
    values |= {f"k{place}": column for place, column in enumerate(by_column)}
    return Query(*_by_keys(view, table, shape), values)


class Readable(Protocol):
    """What `access.py` is asked about: a view, or a query."""

    @property
    def name(self) -> str: ...

    @property
    def columns(self) -> tuple[Column, ...]: ...


def allowed_values(view: Readable, only: Rows) -> list[Any]:
    """The values that columns are compared with, in the order of the shape. Raises BadAccess."""
    columns = {column.name: column for column in view.columns}
    return [_allowed(view, columns.get(name), name, value) for one in only.any_of for name, value in one]


def _allowed(view: Readable, column: Column | None, name: str, value: Any) -> Any:
    if column is None:
        raise BadAccess(
            f"access.py names column '{name}' of view '{view.name}', which has no such column.",
            f"Its columns are {', '.join(column.name for column in view.columns)}.",
        )
    try:
        exact = column.exact(value)
    except BadRow as error:
        raise BadAccess(f"access.py, view '{view.name}': {error}.", "Give a value of the column's own type.") from None
    # a time is no day, though Python takes it for one
    if exact is None or exact != value or not column.type.is_filterable:
        raise BadAccess(
            f"access.py, view '{view.name}': column '{name}' can't be compared with a {type(value).__name__}.",
            "Give a value of the column's own type.",
        )
    return exact if column.type.to_database is None else column.type.to_database(exact)


def found(value: str) -> Found:
    """What a query returned. Raises msgspec.DecodeError for anything else."""
    version, table, positions, parked, since, rows, stopped, count = _decode(value)
    at = token_of(positions)
    return Found(version, table, at, parked, dict(since or ()), rows or (), may_hold(value), stopped, count)


Positions: TypeAlias = list[tuple[str, int, int]] | None
"""Of a log's partitions: the topic's id, the partition, the next offset."""


def token_of(positions: Positions) -> Token:
    """The token of positions, as a query returns them."""
    position: dict[str, dict[int, int]] = {}
    for topic_id, partition, next_offset in positions or ():
        position.setdefault(topic_id, {})[partition] = next_offset
    return Token(position)


_Answer = tuple[
    int, str, Positions, int | None, list[tuple[str, int]] | None, list[Row] | None, tuple[str, str] | None, int | None
]
_decode: Callable[[str], _Answer] = msgspec.json.Decoder(_Answer).decode

# Aliases that a view's columns could have too begin with an underscore, which no column's name can.
# Arrays are in sub-selects: so the planner expects as many values whatever their number, and keeps one plan. Else it plans each
# read of one row, which takes longer than the read. `offset 0`: else the kept plan scans tables of thousands of rows for ten keys.
_ONE_MOMENT = """
select json_build_array(
  l.version, l.table_name,
  (select json_agg(json_build_array(p.topic_id, p.partition, p.next_offset) order by p.partition)
     from {positions} p where p.agent = l.agent and p.topic = %(topic)s),
  {{parked}},
  (select json_agg(json_build_array(k.stream, k.since_version))
     from parked k where k.table_name = l.table_name and k.stream = any((select %(streams)s::text[])::text[])),
  (select json_agg(json_build_array(f.number, f.shown, f.place) order by f.number) from ({{rows}}) f),
  {stopped}, {{count}})::text
  from {views} l where l.view = %(view)s
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
_ALL_PARKED, NULL = _PARKED.format(sql.SQL("")), sql.SQL("null")
_BY_KEYS = sql.SQL(
    "select u.number, row_to_json(_row) as shown, null as place "
    "from unnest({arrays}) with ordinality u({asked}, number), lateral (select {shown} from {source}{where} offset 0) _row"
)


@lru_cache(256)
def _by_keys(view: View, table: str, shape: Shape) -> tuple[bytes, bytes]:
    columns = [*view.key, *compared(view, shape)]
    asked = [sql.Identifier(f"k{place}") for place in range(len(columns))]
    same = [sql.SQL("{} = u.{}").format(name_of(one), value) for one, value in zip(columns, asked, strict=True)]
    rows = _BY_KEYS.format(
        arrays=listed(
            sql.SQL("(select {}::{}[])").format(sql.Placeholder(f"k{place}"), type_of(column))
            for place, column in enumerate(columns)
        ),
        asked=listed(asked),
        shown=shown_of(view.columns),
        source=source_of(view, table),
        where=all_of([*same[: len(view.key)], *allowing(shape, same[len(view.key) :])]),
    )
    return one_moment(NULL if shape else _ALL_PARKED, rows)


# ── the parts of a query, which has the view's rows as `t` ──


def one_moment(
    parked: sql.Composable, rows: sql.Composable, count: sql.Composable | None = None
) -> tuple[bytes, bytes]:
    """The texts of a query that finds these, together with the position: for a live view, and for a stopped one, too."""
    both = (text.format(parked=parked, rows=rows, count=count or NULL) for text in (_LIVE, _LIVE_OR_STOPPED))
    live, stopped = (text.as_bytes() for text in both)
    return live, stopped


def source_of(view: View, table: str, sort: sql.Composable | None = None) -> sql.Composed:
    """The view's rows. A summary has a subtotal of each partition: they are added up.

    By itself PostgreSQL adds up in ascending order of the keys: for another one it would add up and sort all of a summary.
    """
    if view.kind is not Kind.SUMMARY:
        return sql.SQL("{} t").format(sql.Identifier(table))
    values = (sql.SQL("{} as {}").format(_added_up(one), sql.Identifier(one.name)) for one in view.columns)
    in_order = sql.SQL(" order by {}").format(sort) if sort else sql.SQL("")
    return sql.SQL("(select {} from {} t group by {}{}) t").format(
        listed(values), sql.Identifier(table), listed(map(name_of, view.key)), in_order
    )


def _added_up(column: Column) -> sql.Composed:
    combined = sql.SQL(AGGREGATES.get(column.role, "{0}"))
    return combined.format(name_of(column), sql.SQL("t.{}").format(sql.Identifier(place_name(column.name))))


def shown_of(columns: Iterable[Column]) -> sql.Composed:
    """The columns as a row's JSON has them."""
    return listed(sql.SQL("{} as {}").format(one.type.shown(name_of(one)), sql.Identifier(one.name)) for one in columns)


def parked_of(view: View, table: str, allowed: Sequence[sql.Composed]) -> sql.Composable:
    """How many streams are parked; of those whose rows are allowed where not all are, as far as that can be known."""
    if not allowed:
        return _ALL_PARKED
    if not view.tells_stream:
        return NULL
    [key], start = view.key, sql.Literal(len(f"{view.contexts[0]}/") + 1)
    own = all_of([sql.SQL("{} = substr(k.stream, {})").format(name_of(key), start), *allowed])
    return _PARKED.format(sql.SQL(" and exists (select from {} t{})").format(sql.Identifier(table), own))


def compared(view: View, shape: Shape) -> list[Column]:
    """The columns of `Rows` of this shape, in the order of `allowed_values`."""
    columns = {column.name: column for column in view.columns}
    return [columns[name] for one in shape for name in one]


def allowing(shape: Shape, conditions: Iterable[sql.Composed]) -> list[sql.Composed]:
    """The condition that a row is among `Rows` of this shape, of one condition for each column; none where all rows are."""
    one_by_one = iter(conditions)
    either = [together(next(one_by_one) for _ in one) for one in shape]
    return [sql.SQL("({})").format(sql.SQL(" or ").join(either))] if either else []


def all_of(conditions: Sequence[sql.Composable]) -> sql.Composable:
    """The clause, if there are conditions."""
    return sql.SQL(" where {}").format(together(conditions)) if conditions else sql.SQL("")


def together(conditions: Iterable[sql.Composable]) -> sql.Composed:
    return sql.SQL("({})").format(sql.SQL(" and ").join(conditions))


def name_of(column: Column) -> sql.Composed:
    return sql.SQL("t.{}").format(sql.Identifier(column.name))


def type_of(column: Column) -> sql.SQL:
    return sql.SQL(column.type.sql_name)


def typed(name: str, column: Column) -> sql.Composed:
    """The parameter with this name."""
    return sql.SQL("{}::{}").format(sql.Placeholder(name), type_of(column))


def listed(parts: Iterable[sql.Composable]) -> sql.Composed:
    return sql.SQL(", ").join(parts)
