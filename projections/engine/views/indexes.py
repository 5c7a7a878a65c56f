"""The indexes that a view's file declares: `INDEXES = (Index("owner"), Index("day", "-cents"))`.

They are no part of the view's version. The key's columns follow those of an index, where there is room for them: then it has all
rows in one order, in which pages go on, forwards and backwards. NULL is the greatest value, as PostgreSQL has it.

An index entry has 2,704 bytes for everything, and no row may fail because of an index. So of a text it has the first 100
characters, in the order of their code points, and pages sort texts by these.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

from projections.engine.views.column_types import MOST_KEY_BYTES
from projections.engine.views.columns import BadView, Column

MOST_ENTRY_BYTES = 2_600
"""Of an index entry: what PostgreSQL allows, without its own header and paddings."""
_STREAM_BYTES = 256
"""Of a stream's name, with its context's."""
_FIXED_BYTES = 16
"""Room for any other value, and of the rest for its head and padding."""
_READABLE_BYTES = 54
"""Of an index's name, which has 63: the rest is for its digest."""


class Index:
    """Of these columns, each ascending, or descending with a minus: `Index("day", "-cents")`."""

    __slots__ = ("columns",)

    columns: tuple[Any, ...]

    def __init__(self, *columns: str, unique: bool = False) -> None:
        if unique:
            raise BadView(
                "A view has no unique index: a row that violates it would stop the view, after its event was accepted.",
                "Keep values unique where commands are decided: docs/unique.md.",
            )
        self.columns = columns

    def __repr__(self) -> str:
        return f"Index({', '.join(map(quoted, self.columns))})"


class Part(NamedTuple):
    """A column of an order."""

    column: Column
    descending: bool = False

    def __str__(self) -> str:
        return f"-{self.column.name}" if self.descending else self.column.name


Order: TypeAlias = tuple[Part, ...]
"""Of rows, by one column after the other."""


def reverse(order: Order) -> Order:
    return tuple(Part(column, not descending) for column, descending in order)


def line_for(columns: Sequence[str]) -> str:
    """The line in a view's file that declares an index of these columns."""
    return f"INDEXES = (Index({', '.join(map(quoted, columns))}),)"


def orders_of(declared: Any, view: str, columns: Sequence[Column], *, is_summary: bool) -> tuple[Order, ...]:
    """The indexes that a view declares as INDEXES, each with the key behind its own columns. Raises BadView."""
    if not (isinstance(declared, tuple) and all(isinstance(one, Index) for one in declared)):
        raise BadView(f"View '{view}' has INDEXES = {declared!r}.", f"Write, with the comma, `{line_for(['owner'])}`.")
    by_name = {column.name: column for column in columns}
    key = tuple(Part(column) for column in columns if column.is_key)
    found: list[Order] = []
    for index in declared:
        own = tuple(_parts(index, view, by_name, is_summary=is_summary))
        if key[: len(own)] in (own, reverse(own)):
            raise BadView(f"View '{view}': its key is the order of {index} already.", "Remove that index.")
        rest = rest_of_key(key, own)
        if (size := _bytes(own, is_summary=is_summary)) > MOST_ENTRY_BYTES:
            raise BadView(
                f"View '{view}': an entry of {index} could take {size} bytes, and there is room for {MOST_ENTRY_BYTES}.",
                "Let it have fewer columns of texts and decimals.",
            )
        order = own + rest if _bytes(own + rest, is_summary=is_summary) <= MOST_ENTRY_BYTES else own
        if order in found or reverse(order) in found:
            raise BadView(f"View '{view}' has {index} twice.", "Remove one of them.")
        found.append(order)
    return tuple(found)


def rest_of_key(key: Sequence[Part], own: Order) -> Order:
    """The key's columns that follow these in an order, in the direction of the last: so the reverse of an order is one, too."""
    named = {part.column for part in own}
    return tuple(Part(part.column, own[-1].descending) for part in key if part.column not in named)


def _parts(index: Index, view: str, columns: dict[str, Column], *, is_summary: bool) -> Iterator[Part]:
    names = [name.removeprefix("-") for name in index.columns if isinstance(name, str)]
    if not names or len({*names}) < len(index.columns):
        raise BadView(
            f"View '{view}': {index} names no column, or one twice.", 'Name columns: `Index("owner", "-cents")`.'
        )
    for name, given in zip(names, index.columns, strict=True):
        if (column := columns.get(name)) is None:
            raise BadView(
                f"View '{view}': {index} is of a column '{name}', which the view does not have.",
                f"Its columns are {', '.join(columns)}.",
            )
        if column.type.index_bytes is None:
            raise BadView(
                f"View '{view}': {index} is of column '{name}', whose values have no order that pages could have.",
                "Remove it from the index.",
            )
        if is_summary and not column.is_key:
            raise BadView(
                f"View '{view}': {index} is of '{name}', which readers add up, so that no stored value has its order.",
                "A summary's indexes are of its key's columns only.",
            )
        yield Part(column, given.startswith("-"))


def _bytes(order: Order, *, is_summary: bool) -> int:
    """Most bytes that an entry can take."""
    columns = [part.column for part in order]
    of_key = [column for column in columns if column.is_key and column.type.index_bytes != 0]
    # other views' keys begin with the stream's id
    key = MOST_KEY_BYTES if is_summary or len(of_key) > 1 else _STREAM_BYTES
    own = sum(column.type.index_bytes or 0 for column in columns if not column.is_key)
    return _FIXED_BYTES * len(order) + own + (key if of_key else 0)


def index_name(table: str, order: Order) -> str:
    """The name of the index of this order. Its digest is of the order alone, so it is the same for all tables of a version."""
    digest = hashlib.sha256(", ".join(map(str, order)).encode()).hexdigest()[:8]
    return f"{_readable(table, *(part.column.name for part in order))}_{digest}"


def digest_in(table: str, name: str) -> str | None:
    """The digest in such a name; None of an index that was made by hand."""
    found = re.fullmatch(rf"{re.escape(_readable(table, ''))}.*_([0-9a-f]{{8}})", name)
    return found and found[1]


def _readable(table: str, *columns: str) -> str:
    return f"{table}_by_{'_'.join(columns)}".encode()[:_READABLE_BYTES].decode(errors="ignore")


def quoted(name: object) -> str:
    return f'"{name}"' if isinstance(name, str) else repr(name)
