"""Which statements the model understands: those that the product sends, word for word, or by a shape for names of tables.

A statement that is not here is an error, so whoever changes the product's SQL is told to look at the model as well.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from psycopg import sql

from proofs.model_read.postgres import Call, Result, Statement, Steps

Reads = Callable[[Statement, Any], Result]
Writes = Callable[..., Steps]

_exact: dict[str, tuple[Writes, bool]] = {}
_shapes: list[tuple[re.Pattern[str], Writes, bool]] = []


class UnknownStatement(AssertionError):
    """The product sends SQL that the model was never taught."""


def even(text: str) -> str:
    """The text with all white space made even."""
    return " ".join(text.split())


def writes(*texts: str, local: bool = False) -> Callable[[Writes], Writes]:
    """The function, a generator that yields while it waits, carries out these statements."""

    def register(function: Writes) -> Writes:
        for text in texts:
            _exact[even(text)] = (function, local)
        return function

    return register


def reads(*texts: str, local: bool = False) -> Callable[[Reads], Reads]:
    """The same for statements that never wait."""

    def register(function: Reads) -> Reads:
        writes(*texts, local=local)(_never_waits(function))
        return function

    return register


def shape(pattern: str, *, local: bool = False) -> Callable[[Writes], Writes]:
    """The function carries out statements of this pattern; it gets the match's groups too."""

    def register(function: Writes) -> Writes:
        _shapes.append((re.compile(even(pattern)), function, local))
        return function

    return register


def _never_waits(function: Reads) -> Writes:
    def steps(statement: Statement, parameters: Any) -> Generator[None, None, Result]:
        return function(statement, parameters)
        yield

    return steps


def call_of(query: str | bytes | sql.Composable, parameters: Any) -> Call:
    """Raises UnknownStatement."""
    text = _text(query) if not isinstance(query, sql.Composable) else even(query.as_string(None))
    run, local = _find(text)
    return Call(text, parameters, run, local, query)


@cache
def _text(query: str | bytes) -> str:
    return even(query.decode() if isinstance(query, bytes) else query)


@cache
def _find(text: str) -> tuple[Writes, bool]:
    if text in _exact:
        return _exact[text]
    for pattern, function, local in _shapes:
        if match := pattern.fullmatch(text):
            return _with(function, match.groups()), local
    raise UnknownStatement(f"teach proofs/model_read what this does: {text}")


def _with(function: Writes, groups: tuple[str | Any, ...]) -> Writes:
    def steps(statement: Statement, parameters: Any) -> Steps:
        return function(statement, parameters, *groups)

    return steps


@contextmanager
def meaning(text: str, function: Writes) -> Iterator[None]:
    """A statement means something else for a while."""
    old = _exact[even(text)]
    _exact[even(text)] = (function, False)
    _find.cache_clear()
    try:
        yield
    finally:
        _exact[even(text)] = old
        _find.cache_clear()
