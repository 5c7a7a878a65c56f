"""Pages of a view's rows: filtered, sorted, and going on behind the last row of the page before.

A page's order ends with the key, so it is one order of all rows, and the next page begins behind the values that the last row had:
a row that is there all the time and does not move comes exactly once. NULL is the greatest value. Of a text, the first
`PREFIX_CHARS` characters are sorted by, in the order of their code points, as an index has them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from enum import StrEnum
from functools import lru_cache
from itertools import groupby
from typing import Any, LiteralString, NamedTuple, TypeAlias

from psycopg import sql

from infra.access import Rows
from projections.engine.views.column_types import PREFIX_CHARS, Scalar
from projections.engine.views.columns import BadView, Column
from projections.engine.views.indexes import Index, Order, Part, orders_of, rest_of_key, reverse
from projections.engine.views.queries import (
    NULL,
    Query,
    Shape,
    all_of,
    allowed_values,
    allowing,
    compared,
    listed,
    name_of,
    one_moment,
    parked_of,
    shown_of,
    source_of,
    together,
    type_of,
    typed,
)
from projections.engine.views.view import Kind, View

MOST_COUNTED = 10_000
"""Rows beyond these are not counted."""


class Op(StrEnum):
    """How a filter compares a column with its value; the texts are what a parameter's name ends with."""

    EQUAL = ""
    NOT = "not"
    IN = "in"
    GTE = "gte"
    GT = "gt"
    LTE = "lte"
    LT = "lt"
    PREFIX = "prefix"
    NULL = "null"
    """Only in a request: it stands for EQUAL or NOT with None."""


_SYMBOLS: dict[Op, LiteralString] = {Op.GTE: ">=", Op.GT: ">", Op.LTE: "<=", Op.LT: "<"}
_RANGES = (*_SYMBOLS, Op.IN, Op.PREFIX)
"""What an index finds where its column is the first that is not fixed."""
_WITHOUT_ORDER = Scalar.BOOL, Scalar.UUID, Scalar.BYTES


def operators_of(column: Column) -> tuple[Op, ...]:
    """How the column can be compared."""
    if not column.type.is_filterable:
        return (Op.NULL,) if column.optional else ()
    found: tuple[Op, ...] = (Op.EQUAL, Op.NOT) if column.scalar is Scalar.BOOL else (Op.EQUAL, Op.NOT, Op.IN)
    if column.enum is None and column.scalar not in _WITHOUT_ORDER:
        found += (*_SYMBOLS, Op.PREFIX) if column.scalar is Scalar.STR else (*_SYMBOLS,)
    return (*found, Op.NULL) if column.optional else found


class Filter(NamedTuple):
    """Only rows whose column compares so with the value, as the database has it; None is NULL, and IN has a tuple."""

    column: Column
    op: Op
    value: Any


class Page(NamedTuple):
    """The first `most` rows with these filters, in this order, behind the row with these values of the order's columns."""

    filters: tuple[Filter, ...]
    order: Order
    most: int
    after: tuple[Any, ...] | None = None
    shown: tuple[Column, ...] | None = None
    """None: all columns."""
    is_counted: bool = False
    """Whether all rows with these filters are counted, up to MOST_COUNTED + 1."""


def order_of(view: View, sort: Order = ()) -> Order:
    """The order of all rows that begins with these columns, with the key behind them."""
    key, named = tuple(map(Part, view.key)), [part.column for part in sort]
    # behind the whole key there are no two rows
    needed = max((named.index(one) + 1 for one in view.key), default=0) if {*view.key} <= {*named} else len(sort)
    return sort[:needed] + rest_of_key(key, sort) if sort else key


# ── which index serves a page ──


class Missing(NamedTuple):
    """What a page lacks that no index serves."""

    columns: tuple[str, ...] = ()
    """Of the index to declare, where one is missing that can be."""
    sort: str = ""
    """What to sort by, where the page's own order is none that an index could have."""
    why: str = ""
    """Why no index can serve it, where there is neither."""


def missing_index(view: View, page: Page, only: Rows | None) -> Missing | None:
    """What would let an index serve the page; None where one does."""
    fixed = {one.column for one in page.filters if one.op is Op.EQUAL}
    rest = [one for one in page.filters if one.op is not Op.EQUAL]
    columns = {column.name: column for column in view.columns}
    either = [{columns[name] for name in one} for one in only.shape] if only else [set[Column]()]
    indexes = [one for index in (order_of(view), *view.indexes) for one in (index, reverse(index))]
    for allowed in either:
        # rows of several kinds are merged, so their order is none of an index
        order = page.order if len(either) == 1 else ()
        is_one_row = {*view.key} <= fixed | allowed
        if not is_one_row and not any(_serves(index, fixed | allowed, rest, order) for index in indexes):
            return _missing(view, fixed | allowed, rest, order, indexes)
    return None


def _serves(index: Order, fixed: set[Column], rest: Sequence[Filter], order: Order) -> bool:
    """Whether an index finds the rows in this order, by columns that must have one value and by other filters."""
    count = next((place for place, part in enumerate(index) if part.column not in fixed), len(index))
    behind, wanted = index[count:], [part for part in order if part.column not in fixed]
    if any(has != part for has, part in zip(behind, wanted, strict=False)) or not all(
        part.column.is_key for part in wanted[len(behind) :]
    ):
        return False
    if count:  # the rows of one value: few
        return True
    ranged = {one.column for one in rest if one.op in _RANGES}
    return not fixed and all(one.op in _RANGES for one in rest) and ranged <= {index[0].column}


def _missing(view: View, fixed: set[Column], rest: Sequence[Filter], order: Order, indexes: Sequence[Order]) -> Missing:
    columns, why = _wanted(view, fixed, rest, order)
    if columns or fixed or not rest:
        return Missing(columns, why=why)
    ranged = {one.column for one in rest if one.op in _RANGES}
    if len(ranged) != 1 or any(one.op is Op.NOT for one in rest):
        return Missing(
            why="An index serves ranges of one column, and `.not` or `.null=false` only beside a column with one value."
        )
    [column] = ranged
    order = order_of(view, (Part(column),))
    if any(_serves(index, fixed, rest, order) for index in indexes):
        return Missing(sort=column.name)
    columns, why = _wanted(view, fixed, rest, order)
    return Missing(columns, column.name if columns else "", why)


def _wanted(view: View, fixed: set[Column], rest: Sequence[Filter], order: Order) -> tuple[tuple[str, ...], str]:
    """The columns of an index that may be declared and serves this; else none, and why."""
    why, is_summary = "", view.kind is Kind.SUMMARY
    of_one_value = [column for column in view.columns if column in fixed]
    can = [one for one in of_one_value if one.type.index_bytes is not None and (one.is_key or not is_summary)]
    names = [column.name for column in can or of_one_value]
    sort = [part for part in order if part.column not in fixed]
    for parts in ([part for part in sort if not part.column.is_key], sort):
        columns = (*names, *map(str, parts))
        try:
            [index] = orders_of((Index(*columns),), view.name, view.columns, is_summary=is_summary)
        except BadView as error:
            why = why or error.message.removeprefix(f"View '{view.name}': ")
            continue
        if any(_serves(one, fixed, rest, order) for one in (index, reverse(index))):
            return columns, ""
    return (), why


# ── its query ──


_FilterShape: TypeAlias = tuple[Column, Op, bool]
"""A filter without its value: only whether that is NULL."""


def page_query(view: View, table: str, topic: str, page: Page, only: Rows | None = None) -> Query:
    """The page; with `only`, no other rows exist. Raises BadAccess."""
    allowed = allowed_values(view, only) if only else []
    text = _page(
        view,
        table,
        tuple((one.column, one.op, one.value is None) for one in page.filters),
        page.order,
        None if page.after is None else tuple(value is None for value in page.after),
        page.shown or view.columns,
        only.shape if only else (),
        is_counted=page.is_counted,
    )
    values = {"topic": topic, "view": view.name, "streams": [], "most": page.most}
    values |= {f"r{number}": value for number, value in enumerate(allowed)}
    values |= {f"a{number}": value for number, value in enumerate(page.after or ())}
    for number, one in enumerate(page.filters):
        values |= dict(_parameters(f"f{number}", one))
    return Query(*text, values)


def _parameters(name: str, one: Filter) -> Iterator[tuple[str, Any]]:
    yield name, list(one.value) if one.op is Op.IN else one.value
    if one.op is Op.PREFIX:
        start = one.value[:PREFIX_CHARS] if one.column.type.is_cut else one.value
        yield from ((f"{name}_from", start), (f"{name}_to", _behind(start)))
    if one.op is Op.IN and one.column.type.is_cut:
        yield f"{name}_cut", [text[:PREFIX_CHARS] for text in one.value]


def _behind(prefix: str) -> str:
    """The least text that is greater than all with this prefix."""
    start = prefix.rstrip(_LAST)
    if not start:
        return _LAST * 1_000  # longer than what is sorted by
    following = ord(start[-1]) + 1
    return start[:-1] + chr(0xE000 if following == 0xD800 else following)  # there are no surrogates


_LAST = chr(sys.maxunicode)


@lru_cache(256)
def _page(
    view: View,
    table: str,
    filters: tuple[_FilterShape, ...],
    order: Order,
    after: tuple[bool, ...] | None,
    shown: tuple[Column, ...],
    shape: Shape,
    *,
    is_counted: bool,
) -> tuple[bytes, bytes]:
    indexed = {part.column for one in view.indexes for part in one}
    where = [_condition(one, op, f"f{n}", one in indexed, is_null) for n, (one, op, is_null) in enumerate(filters)]
    rules = enumerate(compared(view, shape))
    allowed = allowing(shape, (_condition(one, Op.EQUAL, f"r{n}", one in indexed) for n, one in rules))
    sort = listed(map(_sorted_by, order))
    is_down = all(part.column.is_key for part in order) and any(part.descending for part in order)
    source = source_of(view, table, sort if is_down else None)
    starts = [[]] if after is None else [[start] for start in _behind_values(order, after)]
    parts = [_PART.format(source, all_of([*where, *allowed, *start]), sort) for start in starts]
    if len(parts) > 1:
        either = sql.SQL(" union all ").join(sql.SQL("({})").format(part) for part in parts)
        parts = [_PART.format(sql.SQL("({}) t").format(either), sql.SQL(""), sort)]
    place = (part.column.type.shown(_order_value(part.column)) for part in order)
    rows = _ROWS.format(
        page=parts[0],
        shown=shown_of(shown),
        place=listed(sql.SQL("to_json({}) #>> '{{}}'").format(value) for value in place),
    )
    count = _COUNT.format(source_of(view, table), all_of(where + allowed)) if is_counted else NULL
    return one_moment(parked_of(view, table, allowed), rows, count)


_PART = sql.SQL("select t.* from {}{} order by {} limit %(most)s")
_ROWS = sql.SQL(
    "select row_number() over () as number, row_to_json(_row) as shown, json_build_array({place}) as place "
    "from ({page}) t, lateral (select {shown}) _row"
)
_COUNT = sql.SQL(f"(select count(*) from (select from {{}}{{}} limit {MOST_COUNTED + 1}) c)")  # noqa: S608


def _order_value(column: Column) -> sql.Composed:
    return column.type.ordered(name_of(column))


def _sorted_by(part: Part) -> sql.Composed:
    return sql.SQL("{} desc" if part.descending else "{}").format(_order_value(part.column))


def _condition(column: Column, op: Op, name: str, is_indexed: bool, is_null: bool = False) -> sql.Composed:
    """The filter in SQL. Of a text that an index cuts, also what the index can find."""
    kind = column.type
    place, value = name_of(column), typed(name, column)
    ordered, whole = (
        kind.ordered(place),
        sql.SQL('{} collate "C"').format(place) if kind.is_cut else kind.ordered(place),
    )
    if is_null:
        return sql.SQL("{} is null" if op is Op.EQUAL else "{} is not null").format(ordered)
    if op is Op.NOT:
        return sql.SQL("{} is distinct from {}").format(whole, value)
    if op is Op.PREFIX:
        first, end = sql.Placeholder(f"{name}_from"), sql.Placeholder(f"{name}_to")
        begins = sql.SQL("({0} >= {1}::text and {0} < {2}::text and starts_with({3}, {4}))")
        return begins.format(ordered, first, end, place, value)
    if op is Op.IN:
        found = sql.SQL("{} = any({}::{}[])").format(whole, sql.Placeholder(name), type_of(column))
        cut = sql.SQL("{} = any({}::text[])").format(ordered, sql.Placeholder(f"{name}_cut"))
    else:
        symbol = _SYMBOLS.get(op, "=")
        found = sql.SQL("{} {} {}").format(whole, sql.SQL(symbol), value)
        of_cut = sql.SQL({Op.GT: ">=", Op.LT: "<="}.get(op, symbol))
        cut = sql.SQL("{} {} left({}, {})").format(ordered, of_cut, value, sql.Literal(PREFIX_CHARS))
    return together([found, cut]) if kind.is_cut and is_indexed else found


def _behind_values(order: Order, is_null: Sequence[bool]) -> Iterator[sql.Composed]:
    """Conditions of which a row behind the one with these values fulfils exactly one: each is one range of an index."""
    same: list[sql.Composed] = []
    for run in _runs(order):
        columns = [order[number].column for number in run]
        places, values = (
            listed(map(_order_value, columns)),
            listed(typed(f"a{number}", order[number].column) for number in run),
        )
        descending = order[run[0]].descending
        if not is_null[run[0]]:
            symbol = sql.SQL("<" if descending else ">")
            yield together([*same, sql.SQL("({}) {} ({})").format(places, symbol, values)])
        if columns[0].optional and descending is is_null[run[0]]:
            yield together([*same, sql.SQL("{} is not null" if descending else "{} is null").format(places)])
        equal = (
            sql.SQL("{} is null").format(places) if is_null[run[0]] else sql.SQL("({}) = ({})").format(places, values)
        )
        same.append(equal)


def _runs(order: Order) -> Iterator[list[int]]:
    """The numbers of parts that PostgreSQL compares at once: of one direction, and never NULL. A part that can be is alone."""
    numbered = groupby(
        range(len(order)), lambda number: (number if order[number].column.optional else -1, order[number].descending)
    )
    return (list(run) for _, run in numbered)
