"""make test: nothing but declarations.

A view is read from its module, and what does not fit is refused with the line to change.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import Enum
from textwrap import dedent
from typing import Any, Literal

import pytest

from infra.database import schema
from infra.domain_model.contexts import Context
from projections.engine.views.columns import BadView
from projections.engine.views.core_views import OUTCOMES, agent_views, all_views, shape_of, snapshot_view
from projections.engine.views.view import Kind
from proofs.one_fold.values import REFUSED_COLUMNS
from tests.engine.projections.viewkit import MOVES, PURSES, TOTALS, view
from tests.engine.purse import PURSE, Filled, Spent

ROW = """
    class Row(NamedTuple):
        purse: Key[str]
        cents: int
"""
EVOLVE = """
    def evolve(row: Row | None, event: Filled, at: At) -> Row | None:
        return row
"""


def test_the_annotations_say_everything() -> None:
    entity, journal, summary = view(PURSES), view(MOVES, "moves"), view(TOTALS, "totals")

    assert [entity.kind, journal.kind, summary.kind] == [Kind.ENTITY, Kind.JOURNAL, Kind.SUMMARY]
    assert entity.subscription == journal.subscription == summary.subscription == {Filled, Spent}
    assert entity.row.__name__ == "Purse"
    assert [column.name for column in journal.key] == ["purse", "move"]
    assert entity.contexts == ("purse",)
    assert entity.table_name == "purses_v1"
    assert (entity.on_poison, entity.agent) == ("stop", "core")


def _with_more(count: int, kind: str) -> str:
    return ROW + "".join(f"        c{number}: {kind}\n" for number in range(count)) + EVOLVE


BAD = {
    "no version": ("\n    VERSION = None" + ROW + EVOLVE, "no VERSION"),
    "no function": (ROW, "exactly one of evolve, rows and delta"),
    "two functions": (
        ROW + EVOLVE + "    def delta(event: Filled, at: At) -> Iterable[Row]:\n        return []",
        "has evolve and delta",
    ),
    "other parameters": (ROW + "    def evolve(row: Row | None, event: Filled) -> Row | None: ...", "other parameters"),
    "no event annotation": (ROW + "    def evolve(row: Row | None, event, at: At) -> Row | None: ...", "subscription"),
    "event is Any": (ROW + "    def evolve(row: Row | None, event: Any, at: At) -> Row | None: ...", "subscription"),
    "no row annotation": (ROW + "    def evolve(row, event: Filled, at: At): ...", "which row it makes"),
    "journal returns a row": (
        ROW + "    def rows(event: Filled, after: State, at: At) -> Row: ...",
        "which row it makes",
    ),
    "annotation not imported": (
        ROW + "    def evolve(row: Row | None, event: Nowhere, at: At) -> Row | None: ...",
        "can't be resolved",
    ),
    "row's annotation not imported": (ROW.replace("cents: int", "cents: Nowhere") + EVOLVE, "annotation of Row"),
    "version zero": ("\n    VERSION = 0" + ROW + EVOLVE, "VERSION = 0"),
    "event of no context": (
        ROW + "    def evolve(row: Row | None, event: Filled | Row, at: At) -> Row | None: ...",
        "subscribes to Row",
    ),
    "row a dataclass": (
        "import dataclasses\n@dataclasses.dataclass(frozen=True, slots=True)\nclass Row:\n    purse: Key[str]\n"
        + EVOLVE.replace("\n    ", "\n"),
        "not a NamedTuple",
    ),
    "row any class": (ROW.replace("(NamedTuple)", "") + EVOLVE, "not a NamedTuple"),
    "row without types": (
        "\n    import collections\n    Row = collections.namedtuple('Row', 'purse')" + EVOLVE,
        "not a NamedTuple",
    ),
    "row derived from another": (
        ROW + "\n    class More(Row):\n        more: int\n" + EVOLVE.replace("Row", "More"),
        "not a NamedTuple",
    ),
    "row a plain tuple": (EVOLVE.replace("Row", "tuple"), "not a NamedTuple"),
    **{
        f"a column of {kind}": (
            "from proofs.one_fold.values import Level, Mixed\n"
            + dedent(ROW.replace("cents: int", f"cents: {kind}") + EVOLVE),
            "column 'cents' has the type",
        )
        for kind in REFUSED_COLUMNS
    },
    "enum that can't be stored": (
        '\n    class Odd(Enum):\n        NUL = "a\\0"\n' + ROW.replace("cents: int", "cents: Odd") + EVOLVE,
        "'cents'",
    ),
    "more columns of a key than PostgreSQL has room for": (_with_more(32, "Key[int]"), "too many columns"),
    "more columns than PostgreSQL has room for": (_with_more(251, "int"), "too many columns"),
    "column in capitals": (ROW.replace("cents: int", "Cents: int") + EVOLVE, "can't be the name of a column"),
    "column that PostgreSQL has itself": (ROW.replace("cents: int", "xmin: int") + EVOLVE, "can't be the name"),
    "column that PostgreSQL would cut": (ROW.replace("cents: int", f"{'ä' * 32}: int") + EVOLVE, "can't be the name"),
    "nullable key": (ROW.replace("Key[str]", "Key[str | None]") + EVOLVE, "can't be None"),
    "no key": (ROW.replace("Key[str]", "str") + EVOLVE, "has no key"),
    "key that is no id": (ROW.replace("Key[str]", "Key[int]") + EVOLVE, "can't be the stream's id"),
    "two keys without key()": (ROW.replace("cents: int", "cents: Key[str]") + EVOLVE, "can't be the stream's id"),
    "key() with other parameters": (ROW + EVOLVE + "    def key(at): ...", "`key` has other parameters"),
    "sum in an entity": (ROW.replace("cents: int", "cents: Sum[int]") + EVOLVE, "only a summary"),
    "plain column in a summary": (
        ROW + "    def delta(event: Filled, at: At) -> Iterable[Row]: ...",
        "how it combines",
    ),
    "summary of nothing": (
        ROW.replace("cents: int", "cents: Key[int]") + "    def delta(event: Filled, at: At) -> Iterable[Row]: ...",
        "sums up nothing",
    ),
    "sum of text": (
        ROW.replace("cents: int", "cents: Sum[str]") + "    def delta(event: Filled, at: At) -> Iterable[Row]: ...",
        "is a sum of str",
    ),
    "journal after something else": (
        ROW + "    def rows(event: Filled, after: int, at: At) -> Iterable[Row]: ...",
        "not the state",
    ),
    "journal of another agent": (
        '\n    AGENT = "slow"' + ROW + "    def rows(event: Filled, after: State, at: At) -> Iterable[Row]: ...",
        "only 'core' keeps the states",
    ),
    "unknown poison policy": ('\n    ON_POISON = "ignore"' + ROW + EVOLVE, "ON_POISON"),
    "agent with a strange name": ('\n    AGENT = "The Agent"' + ROW + EVOLVE, "AGENT"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_declaration_is_refused_with_its_cure(case: str) -> None:
    source, expected = BAD[case]
    with pytest.raises(BadView) as refused:
        view(source)
    assert expected in refused.value.message
    assert refused.value.hint


@pytest.mark.parametrize(
    "name", [*schema.metadata.tables, "streams_purse", "command_outcomes", "purses_v2", "Purses", "a" * 41]
)
def test_a_name_that_the_engine_needs_is_refused(name: str) -> None:
    with pytest.raises(BadView, match="reserved"):
        view(PURSES, name)


def test_a_view_of_two_contexts_says_its_key() -> None:
    @dataclass(frozen=True, slots=True)
    class Opened:
        pass

    box = dataclasses.replace(PURSE, name="box", events={"Opened": Opened})
    source = ROW + "    def evolve(row: Row | None, event: Filled | Opened, at: At) -> Row | None: ...\n"
    key = "    def key(event: Any, at: At) -> tuple[str]: return (at.stream,)\n"

    def of_both(text: str) -> Any:
        return view(f"Opened = __import__('sys').modules['{__name__}'].OPENED\n" + text, known=(PURSE, box))

    globals()["OPENED"] = Opened
    with pytest.raises(BadView, match="several contexts"):
        of_both(source.replace("\n    ", "\n"))
    assert of_both((source + key).replace("\n    ", "\n")).contexts == ("box", "purse")


def test_shapes_tell_columns_and_keys_apart() -> None:
    shapes = {
        view(ROW + EVOLVE).shape,
        view(ROW.replace("cents: int", "cents: int | None") + EVOLVE).shape,
        view(ROW.replace("cents: int", "cents: str") + EVOLVE).shape,
        view(ROW.replace("cents: int", "pence: int") + EVOLVE).shape,
    }
    assert len(shapes) == 4
    assert view(ROW + EVOLVE).shape == view(ROW + EVOLVE).shape


class Colour(Enum):
    RED = 1


class Paint(Enum):
    RED = 2


@dataclass
class Inner:
    a: int = 0


@dataclass
class Optional:
    a: int | None = 0


STATES: list[list[tuple[str, Any, Any]]] = [
    [("n", int, 0)],
    [("n", int, 1)],
    [("m", int, 0)],
    [("n", int | None, 0)],
    [("n", Literal["a", "b"], "a")],
    [("n", Literal["a", "c"], "a")],
    [("n", Colour, None)],
    [("n", Paint, None)],
    [("n", tuple[Inner, ...], ())],
    [("n", tuple[Optional, ...], ())],
]


def test_a_changed_state_has_another_shape_however_deep_the_change() -> None:
    shapes = [shape_of(dataclasses.make_dataclass("State", fields)) for fields in STATES]
    assert len(set(shapes)) == len(STATES)
    assert shapes == [shape_of(dataclasses.make_dataclass("Renamed", fields)) for fields in STATES]


def test_the_snapshots_of_a_context_are_a_view_whose_version_is_the_states() -> None:
    raised: Context = dataclasses.replace(PURSE, state_version=7)
    snapshots = snapshot_view(raised)
    assert (snapshots.name, snapshots.version, snapshots.table_name) == ("streams_purse", 7, "streams_purse_v7")
    assert snapshots.shape == snapshot_view(PURSE).shape


def test_the_samples_are_views() -> None:
    assert {"balances", "statement", "daily_totals", "streams_accounts", OUTCOMES} <= all_views().keys()
    assert all_views().keys() == agent_views("core").keys()
    with pytest.raises(BadView, match="There is no agent"):
        agent_views("nobody")
