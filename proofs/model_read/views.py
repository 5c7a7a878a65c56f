"""The views of the runs, of a first and a second version of the code. Their rows tell each event's place: none can be lost,
doubled or swapped without a trace."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from domain.engine.contexts import contexts
from projections.engine.views.core_views import outcomes_view, snapshot_view
from projections.engine.views.view import View
from tests.engine.projections.bankviews import view

FAILS = """
def fail(event):
    if event.details.purpose == "poison":
        raise ValueError("can't take this")
"""
TAKES = """
def fail(event):
    pass
"""

BALANCES = """
    VERSION = {version}
    ON_POISON = "{on_poison}"

    class Balance(NamedTuple):
        account: Key[str]
        trail: str

    def evolve(row: Balance | None, event: MoneyDeposited, at: At) -> Balance | None:
        fail(event)
        return Balance(at.id, (row.trail if row else "v{version}") + f" {{event.cents}}")
"""

TOTALS = """
    class Total(NamedTuple):
        kind: Key[str]
        count: Sum[int]
        cents: Sum[int]
        last: Latest[str]
        first: First[str]
        odd: Latest[int | None]

    def delta(event: MoneyDeposited, at: At) -> Iterable[Total]:
        it = f"{at.stream} {at.version}"
        yield Total("all", 1, event.cents, it, it, event.cents if event.cents % 2 else None)
"""

MOVES = """
    class Move(NamedTuple):
        account: Key[str]
        line: Key[int]
        balance: int

    def rows(event: MoneyDeposited, after: State, at: At) -> Iterable[Move]:
        yield Move(at.id, at.version, after.balance)
"""


@cache
def _balances(version: int, fails: bool, on_poison: str) -> View:
    return view(BALANCES.format(version=version, on_poison=on_poison), "balances", FAILS if fails else TAKES)


@cache
def _system() -> Mapping[str, View]:
    return {one.name: one for one in (snapshot_view(contexts()["accounts"]), outcomes_view())}


@cache
def _more() -> Mapping[str, View]:
    return {"moves": view(MOVES, "moves"), "totals": view(TOTALS, "totals")}


@cache
def code(
    version: int, *, fails: bool = False, stops: bool = False, more: bool = False, system: bool = True
) -> dict[str, View]:
    """All views of the code whose `balances` has this version, by name.

    With `fails`, it can't take a poisonous event: it parks the stream, or with `stops`, leaves its agent.
    """
    found = {
        "balances": _balances(version, fails, "stop" if stops else "park"),
        **(_system() if system else {}),
        **(_more() if more else {}),
    }
    return {name: found[name] for name in sorted(found)}
