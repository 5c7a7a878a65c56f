"""Views over the sample bank as later or faulty code would have them, and what tables hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from textwrap import dedent
from typing import Any

from psycopg import sql

from domain.engine.contexts import contexts
from infra.database.connect import connect
from infra.log import topics
from infra.log.partitioner import partition_of
from infra.settings import Settings
from projections.engine.fold.errors import PoisonEvent
from projections.engine.fold.plan import Plan
from projections.engine.live.stopping import stop_view
from projections.engine.rebuild.catch_up import Tail
from projections.engine.store.commit import BatchResult, Committer
from projections.engine.store.positions import read_positions
from projections.engine.views.core_views import agent_views, all_views
from projections.engine.views.view import View
from tests.engine.bookkeeper import _ends, start
from tests.engine.projections import viewkit
from tests.engine.projections.viewkit import make_tables
from tests.engine.spine import scalar

__all__ = ["make_tables"]

ACCOUNTS = [str(number) for number in range(20)]

IMPORTS = """
from domain.accounts import AccountOpened, FeeCharged, MoneyDeposited, MoneyWithdrawn, State, change
"""

BALANCES_2 = """
    VERSION = 3

    class Balance(NamedTuple):
        account: Key[str]
        cents: int
        fees: int

    def evolve(row: Balance | None, event: AccountOpened | MoneyDeposited | MoneyWithdrawn | FeeCharged, at: At) -> Balance | None:
        if isinstance(event, AccountOpened):
            return Balance(at.id, 0, 0)
        assert row is not None
        fee = event.cents if isinstance(event, FeeCharged) else 0
        return Balance(at.id, row.cents + change(event), row.fees + fee)
"""
"""A new shape of the sample view `balances`."""

BROKEN = """
def fail(event):
    if isinstance(event, MoneyDeposited) and event.details.purpose in ("poison", "worse"):
        raise ValueError("can't take this")
"""
STILL_BROKEN = """
def fail(event):
    if isinstance(event, MoneyDeposited) and event.details.purpose == "worse":
        raise ValueError("can't take this either")
"""
CORRECTED = """
def fail(event):
    pass
"""

SUMS = """
    ON_POISON = "park"

    class Own(NamedTuple):
        account: Key[str]
        cents: int
        moves: int

    def evolve(row: Own | None, event: MoneyDeposited | MoneyWithdrawn, at: At) -> Own | None:
        fail(event)
        return Own(at.id, change(event) + (row.cents if row else 0), 1 + (row.moves if row else 0))
"""
MOVES = """
    ON_POISON = "park"

    class Move(NamedTuple):
        account: Key[str]
        line: Key[int]
        cents: int
        balance: int

    def rows(event: MoneyDeposited | MoneyWithdrawn, after: State, at: At) -> Iterable[Move]:
        fail(event)
        yield Move(at.id, at.version, change(event), after.balance)
"""
TOTALS = """
    ON_POISON = "park"

    class Total(NamedTuple):
        kind: Key[str]
        count: Sum[int]
        cents: Sum[int]
        largest: Max[int]
        account: Latest[str]
        began: First[date]
        purpose: Latest[str | None]

    def delta(event: MoneyDeposited | MoneyWithdrawn, at: At) -> Iterable[Total]:
        fail(event)
        purpose = event.details.purpose or None
        yield Total(type(event).__name__, 1, change(event), event.cents, f"{at.id} {at.version}", event.on, purpose)
"""
PARKING = {"sums": SUMS, "moves": MOVES, "totals": TOTALS}
"""A view of each kind that parks what `fail` refuses."""


def view(source: str, name: str, before: str = "") -> View:
    """The view that this text would declare as `projections/<name>.py`."""
    return viewkit.view(IMPORTS + before + dedent(source), name, tuple(contexts().values()))


def parking(fail: str) -> dict[str, View]:
    """The sample views, and one of each kind that parks, whose common `fail` is this."""
    return with_views({name: view(source, name, fail) for name, source in PARKING.items()})


def stopping(fail: str) -> dict[str, View]:
    """The same, and they stop at what `fail` refuses."""
    found = parking(fail)
    return found | {name: replace(found[name], on_poison="stop") for name in PARKING}


def with_views(more: Mapping[str, View], *without: str) -> dict[str, View]:
    """The sample code's views, with others added or in their place, in name order."""
    found = {**agent_views("core"), **more}
    return {name: found[name] for name in sorted(found) if name not in without}


def start_over(world: Settings, views: Mapping[str, View]) -> None:
    """The first start with other views than this code's."""
    make_tables(world, views)
    with connect(world, "test") as db:
        for table in ("positions", "live", "builds"):
            db.execute(f"delete from {table}".encode())
    start(world, views)


def behind(world: Settings) -> int:
    """How many records the agent `core` has not folded."""
    end = topics.describe(world, world.events_topic).end
    return sum(end.values()) - int(scalar(world, "select sum(next_offset) from positions where agent = 'core'"))


def a_batch_around(world: Settings, views: Mapping[str, View], act: Callable[[], object]) -> BatchResult:
    """An agent reads positions and one more record of each partition that has one; only after the act it commits them."""
    with connect(world, "frozen agent") as db:
        positions = read_positions(db, "core", world.events_topic)
        assert positions is not None
        end = topics.describe(world, world.events_topic).end
        to = {p: min(at.next_offset + 1, end[p]) for p, at in positions.readings.items()}
        committer = Committer(Plan(views), positions)
        with Tail(world, world.events_topic, positions.readings) as tail:
            batches = tail.towards(positions.readings, _ends(positions.readings, to), 100)
        assert batches
        act()
        return committer.apply(db, batches)


def stop_as_older_code_would(world: Settings, name: str, why: str = "[red]x[/red]") -> None:
    """Stop a view where its agent is, at an event of account 3."""
    with connect(world, "older code") as db:
        positions = read_positions(db, "core", world.events_topic)
        assert positions is not None
        at = partition_of("accounts/3", len(positions.readings))
        offset = positions.readings[at].next_offset
        cause = ValueError(why)
        stop_view(db, positions, PoisonEvent(name, "accounts/3", 9, partition=at, offset=offset, cause=cause))


def rows(world: Settings, table: str) -> list[tuple[Any, ...]]:
    """Everything in a table, or in a SQL view, in a fixed order."""
    with connect(world, "test") as db:
        query = sql.SQL("select t::text from {} t").format(sql.Identifier(table))
        return sorted(db.execute(query).fetchall())


def live_table(world: Settings, view: str) -> str:
    with connect(world, "test") as db:
        row = db.execute("select table_name from live where view = %s", (view,)).fetchone()
    assert row is not None, f"{view} is not live"
    return str(row[0])


def live_rows(world: Settings) -> dict[str, list[tuple[Any, ...]]]:
    """What readers see of all views."""
    return {name: rows(world, live_table(world, name)) for name in all_views()}


def build_states(world: Settings, view: str) -> dict[str, str]:
    """The states of a view's builds, by table."""
    with connect(world, "test") as db:
        return dict(db.execute("select table_name, state from builds where view = %s", (view,)).fetchall())
