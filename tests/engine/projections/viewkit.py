"""Views for a test, written as their authors write them: the text of a module over the purse (`tests/engine/purse.py`)."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from itertools import count
from textwrap import dedent
from types import ModuleType

import sqlalchemy as sa
from sqlalchemy.pool import NullPool

from domain.engine.contexts import Context
from infra.database import schema
from infra.database.connect import Connection, connect
from infra.settings import Settings
from projections.engine.fold.plan import Plan
from projections.engine.views.core_views import outcomes_view, snapshot_view
from projections.engine.views.sql_views import ensure_sql_views
from projections.engine.views.tables import table_of
from projections.engine.views.view import View, view_of
from tests.engine.purse import PURSE

HEAD = """
from __future__ import annotations
from collections.abc import Iterable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from typing import Any, Literal, NamedTuple
from uuid import UUID
from projections.engine import At, First, Index, Key, Latest, Max, Min, Sum
from tests.engine.purse import Filled, Spent, State
VERSION = 1
"""

PURSES = """
    class Purse(NamedTuple):
        purse: Key[str]
        cents: int
        note: str

    def evolve(row: Purse | None, event: Filled | Spent, at: At) -> Purse | None:
        cents = row.cents if row else 0
        if isinstance(event, Spent):
            return Purse(at.id, cents - event.cents, row.note if row else "") if cents != event.cents else None
        if event.note == "fail":
            raise ValueError("can't take this")
        if event.note == "another key":
            return Purse("somebody else's", 1, "")
        return Purse(at.id, cents + event.cents * (10**17 if event.note == "too large" else 1), event.note)
"""
"""An entity view with an appetite for trouble: notes make it fail, or make rows that the database refuses."""

MOVES = """
    class Move(NamedTuple):
        purse: Key[str]
        move: Key[int]
        cents: int
        after: int

    def rows(event: Filled | Spent, after: State, at: At) -> Iterable[Move]:
        cents = event.cents if isinstance(event, Filled) else -event.cents
        yield Move(at.id, 1 if getattr(event, "note", "") == "again" else at.version, cents, after.cents)
"""

TOTALS = """
    class Total(NamedTuple):
        kind: Key[str]
        count: Sum[int]
        cents: Sum[int]
        largest: Max[int]
        smallest: Min[int]

    def delta(event: Filled | Spent, at: At) -> Iterable[Total]:
        cents = event.cents * (10**20 if getattr(event, "note", "") == "too large" else 1)
        yield Total(type(event).__name__, 1, cents, cents, cents)
        if getattr(event, "note", "") == "fail":
            raise ValueError("can't take this")
"""

_numbers = count(1)


def view(source: str, name: str = "purses", known: Sequence[Context] = (PURSE,)) -> View:
    """The view that this text would declare as `projections/<name>.py`. Raises BadView."""
    module = ModuleType(f"view{next(_numbers)}.{name}")
    sys.modules[module.__name__] = module  # where annotations are looked up
    exec(HEAD + dedent(source), module.__dict__)
    return view_of(module, known)


def views(**sources: str) -> dict[str, View]:
    """Views by name, with the purse's snapshots and the outcomes."""
    found = [snapshot_view(PURSE), outcomes_view(), *(view(source, name) for name, source in sources.items())]
    return {one.name: one for one in sorted(found, key=lambda one: one.name)}


def plan_of(some: Mapping[str, View]) -> Plan:
    return Plan(some, {PURSE.name: PURSE})


def make_tables(settings: Settings, some: Mapping[str, View]) -> None:
    """What migrations would make."""
    metadata = sa.MetaData()
    for one in some.values():
        table_of(one, metadata=metadata)
    engine = sa.create_engine("postgresql+psycopg://", creator=lambda: _plain(settings), poolclass=NullPool)
    schema.metadata.create_all(engine)
    metadata.create_all(engine)
    engine.dispose()
    with connect(settings, "test tables") as db:
        ensure_sql_views(db, {one.name: one.table_name for one in some.values()})


def _plain(settings: Settings) -> Connection:
    connection = connect(settings, "test tables")
    connection.autocommit = False
    return connection


def open_connection(settings: Settings) -> Connection:
    return connect(settings, "test")
