"""The statement that answers a query: rows, position and live tables, all of one snapshot.

The author's text stands in it unchanged, with the rest of its order at the end. Each view is a common table expression of its name
over the table that was live a moment ago; the answer counts only if the same statement finds this table live.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Annotated, Any, NamedTuple

import msgspec
import psycopg
from psycopg import sql
from psycopg.types import TypesRegistry

from domain.engine.personal.tokens import may_hold
from domain.engine.value_limits import LARGEST_INT, SMALLEST_INT
from infra.access import Rows
from projections.engine.queries.checked import PLACEHOLDER
from projections.engine.queries.query import BadQuery, Query
from projections.engine.views.column_types import BadRow, Scalar
from projections.engine.views.columns import Column
from projections.engine.views.indexes import Order
from projections.engine.views.nested_types import Nested
from projections.engine.views.queries import (
    MOST_PARKED,
    Positions,
    Shape,
    all_of,
    allowed_values,
    allowing,
    listed,
    name_of,
    source_of,
    token_of,
    typed,
)
from projections.engine.views.token import Token

_STATEMENT = sql.SQL("""
with {views}, _live as (select agent, view, version, table_name from live where view = any(%(_views)s::text[]))
select json_build_array(
  (select json_agg(json_build_array(view, version, table_name)) from _live),
  (select json_agg(json_build_array(topic_id, partition, next_offset)) from (
     select topic_id, partition, min(next_offset) as next_offset from positions
      where topic = %(_topic)s and agent in (select agent from _live) group by topic_id, partition
     having count(*) = (select count(distinct agent) from _live)) p),
  case when %(_all)s then (select count(*) from (
    select distinct stream from parked where table_name in (select table_name from _live) limit {most_parked}) k) end,
  (select json_agg(json_build_array(f.number, f.shown, f.place, f.repeats) order by f.number) from (
     select row_number() over () as number, row_to_json(_row) as shown, json_build_array({place}) as place, {repeats} as repeats
       from (select q.* from {source} limit %(_most)s) q, lateral (select {shown}) _row) f))::text
""")
"""A partition's position is the one that all agents of its views have reached."""
_BEHIND = sql.SQL(
    "(select q.*, row_number() over () as _number from {source}) q "
    "where _number > %(_equal)s or ({places}) is distinct from ({values})"
)
_DESCRIBED = sql.SQL("with {views} select * from ({sql}) q limit 0")


class Behind(NamedTuple):
    """Rows behind one with these values of the query's order, and behind so many that are equal to it."""

    values: tuple[str | None, ...]
    """As PostgreSQL writes them."""
    equal: int


class Answer(NamedTuple):
    """What the statement saw, all of it at one moment."""

    live: dict[str, tuple[int, str]]
    """Version and table of each view that is live. If they are not those that were queried, the rows mean nothing."""
    position: Token
    parked: int | None
    """Number of streams that a view leaves out, up to MOST_PARKED; None where not all rows are the caller's."""
    rows: list[msgspec.Raw]
    """As stored: personal values are sealed."""
    places: list[tuple[str | None, ...]]
    """Of each row, the values of the query's order."""
    repeats: list[bool]
    """Of each row, whether it is equal to the one before: PostgreSQL's 1.0 is 1.00."""
    has_personal: bool
    """Whether any row may hold a personal value."""
    stopped: None = None


def statement(
    query: Query,
    tables: Mapping[str, str],
    topic: str,
    values: Mapping[str, Any],
    most: int,
    only: Rows | None = None,
    behind: Behind | None = None,
) -> tuple[bytes, dict[str, Any]]:
    """The statement over these tables, by view, and its parameters. With `only`, no other rows exist. Raises BadAccess."""
    own = {"_views": list(tables), "_topic": topic, "_most": most, "_all": only is None}
    own |= {f"_{place}": value for place, value in enumerate(allowed_values(query, only) if only else ())}
    is_null: tuple[bool, ...] = ()
    if behind is not None:
        is_null = tuple(value is None for value in behind.values)
        own |= {f"_after{place}": value for place, value in enumerate(behind.values)} | {"_equal": behind.equal}
    return _statement(query, tuple(tables.items()), only.shape if only else (), is_null), {**values, **own}


def described(query: Query, tables: Mapping[str, str]) -> tuple[bytes, dict[str, None]]:
    """A statement without rows, whose description `require_types` checks, and its parameters."""
    text = _DESCRIBED.format(views=_views(query, tuple(tables.items())), sql=_sql(query))
    return text.as_bytes(), {one.name: None for one in query.parameters}


_ALSO = {"int8": ("int2", "int4", "numeric"), "numeric": ("int2", "int4", "int8"), "text": ("varchar",)}
"""Whole numbers may also be sums, which are numeric."""


def require_types(query: Query, found: Sequence[psycopg.Column] | None, types: TypesRegistry) -> None:
    """`found` is the description of what `described` returned. Raises BadQuery."""
    for one, column in zip(found or (), query.columns, strict=True):
        known = types.get(one.type_code)
        # the types of arrays are known by the same entry
        sql_type = known.name if known and known.oid == one.type_code else "an array, or another type"
        wanted = column.type.sql_name
        if sql_type not in (wanted, *_ALSO.get(wanted, ())):
            what = f"column '{column.name}' is declared as {column.scalar}, and the SQL gives {sql_type}."
            raise BadQuery(f"{query.file}: {what}", f"Cast it to {wanted}, or declare its type in the row.")


def answer(query: Query, value: str) -> Answer:
    """What the statement returned. Raises BadQuery where a value is not of its declared type: none is rounded."""
    live, positions, parked, rows = _decode(value)
    shown = [row for _, row, *_ in rows or ()]
    places, repeats = [place for *_, place, _ in rows or ()], [one for *_, one in rows or ()]
    decode, nested = _row_decoder(query)
    try:
        for row in shown:
            values = decode(row)
            for column in nested:
                _require_exact(column, bytes(getattr(values, column.name)).decode())
    except (msgspec.ValidationError, BadRow) as error:
        hint = "Declare the type that the SQL gives, or `… | None`, or round the value in the SQL."
        raise BadQuery(f"{query.file}: a value is not of its declared type: {error}.", hint) from None
    at = {view: (version, table) for view, version, table in live or ()}
    return Answer(at, token_of(positions), parked, shown, places, repeats, may_hold(value))


_Row = tuple[int, msgspec.Raw, tuple[str | None, ...], bool]
_Found = tuple[list[tuple[str, int, str]] | None, Positions, int | None, list[_Row] | None]
_decode: Callable[[str], _Found] = msgspec.json.Decoder(_Found).decode


@lru_cache(256)
def _statement(query: Query, tables: tuple[tuple[str, str], ...], shape: Shape, is_null: tuple[bool, ...]) -> bytes:
    columns = {one.name: one for one in query.columns}
    rules = enumerate(columns[name] for names in shape for name in names)
    where = allowing(shape, (sql.SQL("{} = {}").format(_name(one.name), typed(f"_{n}", one)) for n, one in rules))
    source = sql.SQL("({}) q{}").format(
        _sql(query), all_of([*where, *(_not_before(query.order, is_null) if is_null else ())])
    )
    columns_of_order = [part.column for part in query.order]
    places, values = [_name(one.name) for one in columns_of_order], _after(query.order)
    before, repeats = [sql.SQL("lag({}) over ()").format(place) for place in places], sql.SQL("false").format()
    if is_null:  # those that are equal come first
        source = _BEHIND.format(source=source, places=listed(places), values=listed(values))
        pairs = zip(places, values, strict=True)
        before = [sql.SQL("lag({}, 1, {}) over ()").format(place, value) for place, value in pairs]
    if places:
        repeats = sql.SQL("({}) is not distinct from ({})").format(listed(places), listed(before))
    place = (sql.SQL("{}::text").format(_place(one)) for one in columns_of_order)
    shown = (sql.SQL("{} as {}").format(_shown(one), sql.Identifier(one.name)) for one in query.columns)
    text = _STATEMENT.format(
        views=_views(query, tables),
        most_parked=sql.Literal(MOST_PARKED),
        place=listed(place),
        repeats=repeats,
        shown=listed(shown),
        source=source,
    )
    return text.as_bytes()


def _not_before(order: Order, is_null: Sequence[bool]) -> list[sql.Composed]:
    """That a row is not before the one with these values. NULL is the greatest value."""
    rest, places = sql.SQL("true").format(), [_name(part.column.name) for part in order]
    values = _after(order)
    for place, value, part, null in [*zip(places, values, order, is_null, strict=True)][::-1]:
        after = ("{0} is not null" if null else "{0} < {1}") if part.descending else "false" if null else "{0} > {1}"
        if part.column.optional and not part.descending and not null:
            after += " or {0} is null"
        same = "{0} is null" if null else "{0} = {1}"
        rest = sql.SQL(f"({after} or {same} and {{2}})").format(place, value, rest)
    first = "{0} <= {1}" if order[0].descending else "{0} >= {1}"
    # follows from the rest, and an index can serve it
    return [rest] if order[0].column.optional else [rest, sql.SQL(first).format(places[0], values[0])]


def _after(order: Order) -> list[sql.Composed]:
    return [typed(f"_after{number}", part.column) for number, part in enumerate(order)]


def _views(query: Query, tables: tuple[tuple[str, str], ...]) -> sql.Composed:
    """Not materialized: so conditions reach the indexes, as if the table were named."""
    text, by_name = sql.SQL("{} as not materialized (select {} from {})"), dict(tables)
    return listed(
        text.format(sql.Identifier(one.name), listed(map(name_of, one.columns)), source_of(one, by_name[one.name]))
        for one in query.views
    )


def _sql(query: Query) -> sql.Composed:
    """The author's text, its parameters typed. A comment may end it, so a line ends after it."""
    columns, parts = {one.name: one for one in query.parameters}, enumerate(PLACEHOLDER.split(query.sql))
    return sql.Composed(
        [
            *(typed(one, columns[one]) if at % 2 else sql.SQL(one.replace("%", "%%")) for at, one in parts),
            sql.SQL("\n"),
        ]
    )


def _place(column: Column) -> sql.Composed:
    """5.00 is whole, and a fraction is left for `answer` to find."""
    value = _name(column.name)
    return sql.SQL("trim_scale({}::numeric)").format(value) if column.scalar is Scalar.INT else value


def _shown(column: Column) -> sql.Composed:
    value = _place(column)
    if column.scalar is Scalar.INT:
        return value
    shown = column.type.shown(sql.SQL("{}::{}").format(value, sql.SQL(column.type.sql_name)))
    if column.scalar is Scalar.TIMEDELTA:  # so are months, whose lengths differ
        return sql.SQL("case when date_trunc('month', {0}) = '0' then {1} else {0}::text end").format(value, shown)
    return shown


def _name(column: str) -> sql.Composed:
    return sql.SQL("q.{}").format(sql.Identifier(column))


@lru_cache(256)
def _row_decoder(query: Query) -> tuple[Callable[[msgspec.Raw], Any], list[Column]]:
    """What decodes a row as JSON, and the columns whose values it leaves as JSON."""
    nested = [one for one in query.columns if one.type.sql_name == "jsonb"]
    kinds = ((one, _JSON.get(one.scalar, one.type.python)) for one in query.columns)
    of_scalars = [(one.name, kind | None if one.optional else kind) for one, kind in kinds if one not in nested]
    fields = [*of_scalars, *((one.name, msgspec.Raw) for one in nested)]
    return msgspec.json.Decoder(msgspec.defstruct("Row", fields)).decode, nested


def _require_exact(column: Column, text: str) -> None:
    """That this JSON is what a view's column would show of its value. Raises BadRow, ValidationError."""
    assert isinstance(column.type, Nested), "its type is jsonb"
    column.exact(None if text == "null" else column.type.from_database(text))
    if text != "null" and column.type.as_stored(text)[:1] != b"\1":
        raise BadRow(f"column '{column.name}' has JSON of another form: a Decimal is a text there")


_JSON: dict[Scalar, Any] = {
    Scalar.INT: Annotated[int, msgspec.Meta(ge=SMALLEST_INT, le=LARGEST_INT)],
    Scalar.DECIMAL: Annotated[str, msgspec.Meta(pattern=r"^-?[0-9]+(\.[0-9]+)?$")],
    Scalar.BYTES: str,
}
"""Where JSON's type is not the column's."""
