"""A query of the author's, read from its module in `projections/queries/`: typed parameters, one SQL text over views, typed rows.

An invalid one is refused when queries are discovered, with the line to change.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import projections
from infra.errors import SamefoldError
from projections.engine.queries.checked import BadSql, checked
from projections.engine.views.column_types import BadRow
from projections.engine.views.columns import BadView, Column, Role, columns_of
from projections.engine.views.core_views import all_views
from projections.engine.views.indexes import Order
from projections.engine.views.view import NAME, RESERVED, View

OWN = ("after", "limit", "cursor")
"""Parameters that every query has."""


class BadQuery(SamefoldError):
    """A query of `projections/queries/` is not valid, or its rows are not of the types that it declares."""

    is_defect = True


class QueryFailed(SamefoldError):
    """A query can't be computed with these parameters."""


@dataclass(frozen=True, slots=True, eq=False)
class Query:
    """One query. Parameters and columns are declared like a view's columns."""

    name: str
    question: str
    parameters: tuple[Column, ...]
    defaults: Mapping[str, Any]
    """As the database takes them. A parameter without one must be given."""
    columns: tuple[Column, ...]
    sql: str
    """The author's, and the rest of the order behind it."""
    views: tuple[View, ...]
    """Those that the SQL names."""
    order: Order
    """Of all rows that are not equal; empty where pages can't go on in the order of the SQL."""
    file: str

    @property
    def agents(self) -> frozenset[str]:
        """Those that keep its views."""
        return frozenset(view.agent for view in self.views)


@cache
def discover() -> dict[str, Query]:
    """All queries of `projections/queries/` by name. Raises BadQuery, BadView."""
    folder, views = Path(projections.__path__[0]) / "queries", all_views()
    names = sorted(one.name for one in pkgutil.iter_modules([str(folder)]) if not one.ispkg and one.name[0] != "_")
    return {name: query_of(importlib.import_module(f"projections.queries.{name}"), views) for name in names}


def query_of(module: ModuleType, views: Mapping[str, View]) -> Query:
    """The query over these views that a module declares. Raises BadQuery."""
    name = module.__name__.rpartition(".")[2]
    file = f"projections/queries/{name}.py"
    if not NAME.fullmatch(name) or RESERVED.fullmatch(name) or name in views:
        raise BadQuery(
            f"{file} can't be a query: its name is reserved, a view's, or too long.",
            "Rename the file: at most 40 lower case letters, digits and underscores. `may_read` gets this name.",
        )
    declared = module.__dict__.get("Parameters")
    parameters = _columns(file, name, declared) if declared is not None else ()
    for one in parameters:
        if one.name in OWN or not one.type.is_filterable:
            what = (
                "is a parameter of every query" if one.name in OWN else f"is a {one.scalar}, which no parameter can be"
            )
            raise BadQuery(
                f"{file}: '{one.name}' {what}.", "Give your parameter another name, or a type without parts."
            )
    columns = _columns(file, name, _row(file, module))
    text = module.__dict__.get("SQL")
    if not isinstance(text, str):
        raise BadQuery(f"{file} has no text SQL.", "Write it as docs/queries.md shows.")
    try:
        shown = {view.name: view for view in views.values() if not view.is_system}
        named, order, rest = checked(text, shown, parameters, columns)
    except BadSql as error:
        line, what, hint = error.args
        raise BadQuery(f"{file}, line {_line(module) + line}: {what}", hint) from error
    except RecursionError as error:
        raise BadQuery(f"{file}: the SQL is nested too deeply.", "Write it with fewer parentheses.") from error
    question, defaults = (module.__doc__ or "").strip(), _defaults(file, parameters, declared)
    return Query(name, question, parameters, defaults, columns, text + rest, named, order, file)


def _columns(file: str, name: str, declared: Any) -> tuple[Column, ...]:
    try:
        found = columns_of(declared, name)
    except BadView as error:
        what = error.message.removeprefix(f"View '{name}': ")
        raise BadQuery(f"{file}: {what}", error.hint) from error
    if marked := [column.name for column in found if column.role is not Role.PLAIN]:
        raise BadQuery(f"{file}: '{marked[0]}' has a mark of a view's column.", "Write its type only, such as `int`.")
    return found


def _row(file: str, module: ModuleType) -> type:
    own = {name: one for name, one in vars(module).items() if isinstance(one, type) and hasattr(one, "_fields")}
    found = {name: one for name, one in own.items() if one.__module__ == module.__name__ and name != "Parameters"}
    if "Row" not in found and len(found) != 1:
        what = f"any of {', '.join(found)} could be its row" if found else "no class is its row"
        raise BadQuery(f"{file}: {what}.", "Write one NamedTuple beside Parameters, or call the row's class Row.")
    return found.get("Row") or next(iter(found.values()))


def _defaults(file: str, parameters: Sequence[Column], declared: Any) -> dict[str, Any]:
    found, given = dict[str, Any](), getattr(declared, "_field_defaults", {})
    for one in parameters:
        if one.name in given:
            try:
                exact = one.exact(given[one.name])
            except BadRow as error:
                raise BadQuery(f"{file}: the default of '{one.name}' is wrong: {error}.", "Correct it.") from error
            found[one.name] = exact if exact is None or (to := one.type.to_database) is None else to(exact)
    return found


def _line(module: ModuleType) -> int:
    """The line of the file before the first of the SQL."""
    lines = inspect.getsource(module).splitlines()
    return next((number for number, line in enumerate(lines) if re.match(r"SQL\b", line)), 0)
