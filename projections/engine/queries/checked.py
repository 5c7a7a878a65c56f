"""Checks the SQL of a query against the views that are declared, without a database.

What the parser can't know, such as the type of an expression, PostgreSQL says: `statement.require_types`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from sqlglot import ErrorLevel, TokenType, exp, parse, parse_one, tokenize
from sqlglot.errors import OptimizeError, ParseError, SchemaError, TokenError
from sqlglot.optimizer.normalize_identifiers import normalize_identifiers
from sqlglot.optimizer.qualify import qualify
from sqlglot.optimizer.scope import traverse_scope

from projections.engine.views.columns import Column
from projections.engine.views.indexes import Order, Part
from projections.engine.views.view import View

FUNCTIONS = (
    *("count", "sum", "avg", "min", "max", "bool_and", "bool_or", "every", "string_agg", "array_agg", "jsonb_agg"),
    *("jsonb_object_agg", "stddev", "variance", "percentile_cont", "percentile_disc", "mode"),
    *("row_number", "rank", "dense_rank", "percent_rank", "cume_dist", "ntile", "lag", "lead"),
    *("first_value", "last_value", "nth_value"),
    *("coalesce", "nullif", "greatest", "least", "abs", "ceil", "floor", "round", "trunc", "mod", "div", "sign"),
    *("power", "sqrt", "exp", "ln", "log", "width_bucket"),
    *("lower", "upper", "initcap", "length", "substring", "substr", "left", "right", "trim", "lpad", "rpad"),
    *("concat", "concat_ws", "replace", "regexp_replace", "split_part", "starts_with", "strpos", "md5"),
    *(
        "date_trunc",
        "date_bin",
        "date_part",
        "extract",
        "age",
        "to_char",
        "to_date",
        "make_date",
        "make_interval",
        "now",
    ),
    *("jsonb_array_length", "jsonb_build_object", "jsonb_typeof", "cardinality"),
    *(
        "jsonb_array_elements",
        "jsonb_array_elements_text",
        "jsonb_each",
        "jsonb_each_text",
        "unnest",
        "generate_series",
    ),
)
"""That a query may call. None writes, waits, or reads anything but its arguments and the clock."""
PLACEHOLDER = re.compile(r"%\((\w+)\)s")
_NAMED = re.compile(r"(?:Column '|Unknown column: |Cannot resolve ')([^'.]+)")


class BadSql(Exception):
    """The SQL is refused. Its arguments: the line, from 1 in the text, what is wrong, and a hint."""


def checked(
    text: str, views: Mapping[str, View], parameters: Sequence[Column], columns: Sequence[Column]
) -> tuple[tuple[View, ...], Order, str]:
    """The views that the SQL names, by name, the order of all rows, and what the SQL lacks of it at its end.

    The order is empty where pages can't go on in the order of the SQL.

    Raises BadSql for all but one select over views, with these names.
    """
    tree = _select(text)
    _require_allowed(tree, views)
    _check_parameters(text, tree, parameters)
    named = sorted({table.name for table in tree.find_all(exp.Table)} & {*views})
    _check_columns(tree, views, columns)
    if not named:
        raise BadSql(1, "the SQL names no view.", f"There are: {', '.join(sorted(views))}.")
    order = _order(text, tree, columns)
    rest = ", ".join(f'"{part.column.name}"{" desc" if part.descending else ""}' for part in order)
    begin = "," if tree.args.get("order") else "order by"
    return tuple(views[name] for name in named), order, f"\n{begin} {rest}" if order else ""


def _select(text: str) -> exp.Query:
    try:
        found = [one for one in parse(text, dialect="postgres") if one is not None]
    except (ParseError, TokenError) as error:
        told: dict[str, Any] = next(iter(getattr(error, "errors", ())), {})
        at = f" at `{told['highlight']}`" if told.get("highlight") else ""
        raise BadSql(told.get("line") or 1, f"this is no SQL{at}.", "Correct it, as PostgreSQL has it.") from error
    if len(found) != 1 or ";" in text.rstrip()[-1:] or not isinstance(found[0], exp.Query):
        raise BadSql(1, "the SQL is not one select.", "Write one select, without a semicolon at its end.")
    return normalize_identifiers(found[0], dialect="postgres")


def _require_allowed(tree: exp.Query, views: Mapping[str, View]) -> None:
    known = f"There are: {', '.join(sorted(views))}."
    writing, catalog = (exp.DML, exp.DDL, exp.Command, exp.Into, exp.Lock), (exp.ObjectIdentifier, exp.PseudoType)
    if written := tree.find(*writing):
        hint = "A query writes and locks nothing: no `into`, no `for update`."
        raise BadSql(_line(written), "the SQL is more than a select.", hint)
    tables = [one for scope in traverse_scope(tree) for one in scope.sources.values() if isinstance(one, exp.Table)]
    for node in tree.walk():
        line = _line(node)
        if isinstance(node, exp.CTE) and node.alias_or_name in views:
            raise BadSql(line, f"'{node.alias_or_name}' can't be a name in `with`: a view has it.", "Choose another.")
        if isinstance(node, exp.Table) and not isinstance(node.this, exp.Func):
            if node.db or (node.name not in views and any(node is one for one in tables)):
                name = node.sql(dialect="postgres", comments=False).partition(" AS ")[0]
                raise BadSql(line, f"{name} is not a view.", known)
        elif isinstance(node, exp.Table | exp.Lateral) and isinstance(node.this, exp.Func):
            if isinstance(node, exp.Table) and node.db:
                raise BadSql(line, "a function in `from` has a schema.", "Write its name alone.")
            if bare := [one.name for one in node.this.find_all(exp.Column) if not one.table]:
                what = f"'{bare[0]}' stands in a function of `from` without its view."
                raise BadSql(
                    line, what, "Write it as `view.column`: a name alone may be a whole row, or the session's user."
                )
        elif isinstance(node, exp.Join) and node.method:
            raise BadSql(line, "the SQL has a natural join.", "Name its columns, `using (…)`: a view may get more.")
        elif isinstance(node, exp.Star) and not isinstance(node.parent, exp.Count):
            raise BadSql(line, "the SQL has a `*`.", "Name the columns: a view may get more.")
        elif isinstance(node, exp.Parameter):
            raise BadSql(line, f"{node.sql(dialect='postgres')} has no name.", "Write a parameter as `%(name)s`.")
        elif isinstance(node, catalog) or (isinstance(node, exp.DataType) and node.this is exp.DType.USERDEFINED):
            name = node.sql(dialect="postgres").lower()
            raise BadSql(line, f"the type {name} is not allowed.", "Use a type that a column can have.")
        elif isinstance(node, exp.Func) and not isinstance(node, _functions()[0]):
            name = node.sql(dialect="postgres", comments=False).partition("(")[0].strip('"').lower()
            if not (isinstance(node, exp.Anonymous) and name in _functions()[1]):
                raise BadSql(line, f"the function {name} is not allowed.", f"Use {', '.join(FUNCTIONS)}.")


@cache
def _functions() -> tuple[tuple[type[exp.Expression], ...], frozenset[str]]:
    """As the parser has them: the classes of those it knows, operators among them, and the names of others."""
    made = [parse_one(f"{name}(a, b)", dialect="postgres", error_level=ErrorLevel.IGNORE) for name in FUNCTIONS]
    known = {type(one) for one in made if not isinstance(one, exp.Anonymous)}
    logic = (exp.And, exp.Or, exp.Cast, exp.Case, exp.If, exp.Array, exp.Exists, exp.CurrentDate, exp.Collate, exp.Pow)
    inside = (exp.RegexpLike, exp.RegexpILike, exp.JSONExtract, exp.JSONExtractScalar, exp.ArrayContainsAll, exp.Unnest)
    return (*known, *logic, *inside), frozenset(one.name.lower() for one in made if isinstance(one, exp.Anonymous))


def _check_parameters(text: str, tree: exp.Query, parameters: Sequence[Column]) -> None:
    declared, found = {one.name for one in parameters}, [*tree.find_all(exp.Placeholder)]
    if len(PLACEHOLDER.findall(text)) != len(found) or not all(one.name for one in found):
        raise BadSql(1, "a parameter stands in quotes or in a comment.", "Write `%(name)s` by itself.")
    for one in found:
        if one.name not in declared:
            raise BadSql(
                _line(one), f"Parameters has no '{one.name}'.", f"Add `{one.name}: int` to the class Parameters."
            )
    for name in declared - {one.name for one in found}:
        raise BadSql(1, f"the SQL has no `%({name})s`.", f"Use the parameter, or remove '{name}'.")


def _check_columns(tree: exp.Query, views: Mapping[str, View], columns: Sequence[Column]) -> None:
    """That each column exists, and that the select gives those of the row, in their order."""
    schema: dict[str, object] = {
        name: {one.name: one.type.sql_name for one in view.columns} for name, view in views.items()
    }
    given, declared = tree.named_selects, [column.name for column in columns]
    if given != declared:
        what = f"the select gives {', '.join(given)}, and the row has {', '.join(declared)}."
        raise BadSql(1, what, "Give the columns of the row, in their order: `count(*) as many`.")
    try:
        checked = qualify(tree.copy(), schema=schema, dialect="postgres", expand_stars=False, quote_identifiers=False)
    except (OptimizeError, SchemaError) as error:
        match = _NAMED.search(str(error))
        name = match[1] if match else ""
        lines = [_line(one) for one in tree.find_all(exp.Column) if one.name == name]
        what = f"there is no column '{name}' here, or there are several." if match else f"{error}."
        hint = (
            "Name a column that a view declares, as `view.column`, or a function's, as `jsonb_each(…) e (key, value)`."
        )
        raise BadSql(lines[0] if lines else 1, what, hint) from error
    if whole := checked.find(exp.TableColumn):
        raise BadSql(_line(whole), f"{whole.name} is a whole row.", "Name its columns: a view may get more.")


def _order(text: str, tree: exp.Query, columns: Sequence[Column]) -> Order:
    """The columns that the SQL sorts by, with the others behind them: so they are an order of all rows that are not equal.

    Empty where it sorts by what is no column of the rows, or does not end with `order by`, so that no column can be added.
    """
    by_name, found = {column.name: Part(column) for column in columns}, dict[str, Part]()
    terms = tree.args["order"].expressions if tree.args.get("order") else []
    tokens = [one.token_type for one in tokenize(text, dialect="postgres")]
    sorting = [at for at, kind in enumerate(tokens) if kind is TokenType.ORDER_BY and not _depth(tokens[:at])]
    if isinstance(tree, exp.Subquery) or any(map(tree.args.get, ("limit", "offset"))) or len(sorting) != bool(terms):
        return ()
    if (distinct := tree.args.get("distinct")) and distinct.args.get(
        "on"
    ):  # its columns must stay the first of the order
        return ()
    for term in terms:
        descending, name = bool(term.args.get("desc")), _selected(term.this, tree)
        if name is None or term.args.get("with_fill") or bool(term.args.get("nulls_first")) is not descending:
            return ()
        found.setdefault(name, Part(by_name[name].column, descending))
    return tuple((found | {name: one for name, one in by_name.items() if name not in found}).values())


def _depth(tokens: Sequence[TokenType]) -> int:
    return tokens.count(TokenType.L_PAREN) - tokens.count(TokenType.R_PAREN)


def _selected(term: exp.Expr, tree: exp.Query) -> str | None:
    """The column of the select that an `order by` names: by its name, its number, or as the same expression."""
    term, names = term.unnest(), tree.named_selects
    if isinstance(term, exp.Literal) and term.is_int:
        return next(iter(names[int(term.this) - 1 : int(term.this)]), None)
    if isinstance(term, exp.Column) and not term.table and term.name in names:
        return term.name
    return next((name for name, one in zip(names, tree.selects, strict=True) if one.unalias() == term), None)


def _line(node: exp.Expr) -> int:
    return next((int(line) for one in node.walk() if (line := one.meta.get("line"))), 1)
