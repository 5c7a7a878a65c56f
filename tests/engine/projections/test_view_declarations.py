"""make test: nothing but declarations.

A view is read from its module, and what does not fit is refused with the line to change.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from textwrap import dedent
from types import ModuleType
from typing import Any, Literal

import pytest

import policies
import projections
from domain.accounts import AccountOpened
from infra.database import schema
from policies.engine.policy import BadPolicy, policy_of
from policies.engine.policy import discover as discover_policies
from projections.engine.views.columns import BadView
from projections.engine.views.core_views import agent_views, shape_of
from projections.engine.views.view import discover as discover_views
from proofs.one_fold.values import REFUSED_COLUMNS
from tests.engine.projections.viewkit import PURSES, view
from tests.engine.purse import PURSE

ROW = """
    class Row(NamedTuple):
        purse: Key[str]
        cents: int
"""
EVOLVE = """
    def evolve(row: Row | None, event: Filled, at: At) -> Row | None:
        return row
"""
DELTA = "    def delta(event: Filled, at: At) -> Iterable[Row]: ..."
ENTITY = ROW + EVOLVE
JOURNAL = ROW + "    def rows(event: Filled, after: State, at: At) -> Iterable[Row]: ..."
SUMMARY = ROW + DELTA


def with_cents(column: str, source: str = ENTITY) -> str:
    """Its second column is this."""
    return source.replace("cents: int", column)


def _with_more(count: int, kind: str) -> str:
    return with_cents("cents: int\n" + "".join(f"        c{number}: {kind}\n" for number in range(count)))


BAD = {
    "no version": ("\n    VERSION = None" + ENTITY, "no VERSION"),
    "no function": (ROW, "exactly one of evolve, rows and delta"),
    "two functions": (ENTITY + DELTA, "has evolve and delta"),
    "other parameters": (ENTITY.replace(", at: At", ""), "other parameters"),
    "no event annotation": (ENTITY.replace("event: Filled", "event"), "subscription"),
    "event is Any": (ENTITY.replace("Filled", "Any"), "subscription"),
    "no row annotation": (ENTITY.replace("row: Row | None", "row").replace(" -> Row | None", ""), "which row it makes"),
    "journal returns a row": (JOURNAL.replace("Iterable[Row]", "Row"), "which row it makes"),
    "annotation not imported": (ENTITY.replace("Filled", "Nowhere"), "can't be resolved"),
    "row's annotation not imported": (with_cents("cents: Nowhere"), "annotation of Row"),
    "version zero": ("\n    VERSION = 0" + ENTITY, "VERSION = 0"),
    "event of no context": (ENTITY.replace("Filled", "Filled | Row"), "subscribes to Row"),
    "row a dataclass": (
        "import dataclasses\n@dataclasses.dataclass(frozen=True, slots=True)\nclass Row:\n    purse: Key[str]\n"
        + dedent(EVOLVE),
        "not a NamedTuple",
    ),
    "row any class": (ENTITY.replace("(NamedTuple)", ""), "not a NamedTuple"),
    "row without types": (
        "\n    import collections\n    Row = collections.namedtuple('Row', 'purse')" + EVOLVE,
        "not a NamedTuple",
    ),
    "row derived from another": (
        f"{ROW}\n    class More(Row):\n        more: int\n{EVOLVE.replace('Row', 'More')}",
        "not a NamedTuple",
    ),
    "row a plain tuple": (EVOLVE.replace("Row", "tuple"), "not a NamedTuple"),
    **{
        f"a column of {kind}": (
            "from proofs.one_fold.values import Level, Loop, Mixed, Mood\n" + dedent(with_cents(f"cents: {kind}")),
            "column 'cents' has the type",
        )
        for kind in REFUSED_COLUMNS
    },
    "enum that can't be stored": (
        '\n    class Odd(Enum):\n        NUL = "a\\0"\n' + with_cents("cents: Odd"),
        "'cents'",
    ),
    "more columns of a key than PostgreSQL has room for": (_with_more(32, "Key[int]"), "too many columns"),
    "more columns than PostgreSQL has room for": (_with_more(251, "int"), "too many columns"),
    "column in capitals": (with_cents("Cents: int"), "can't be the name of a column"),
    "column that PostgreSQL has itself": (with_cents("xmin: int"), "can't be the name"),
    "column that PostgreSQL would cut": (with_cents(f"{'ä' * 32}: int"), "can't be the name"),
    "nullable key": (ENTITY.replace("Key[str]", "Key[str | None]"), "can't be None"),
    "no key": (ENTITY.replace("Key[str]", "str"), "has no key"),
    "key that is no id": (ENTITY.replace("Key[str]", "Key[int]"), "can't be the stream's id"),
    "two keys without key()": (with_cents("cents: Key[str]"), "can't be the stream's id"),
    "key() with other parameters": (ENTITY + "    def key(at): ...", "`key` has other parameters"),
    "sum in an entity": (with_cents("cents: Sum[int]"), "only a summary"),
    "plain column in a summary": (SUMMARY, "how it combines"),
    "summary of nothing": (with_cents("cents: Key[int]", SUMMARY), "sums up nothing"),
    "sum of text": (with_cents("cents: Sum[str]", SUMMARY), "is a sum of str"),
    "latest in an entity": (with_cents("cents: Latest[int]"), "only a summary"),
    "latest of what no column can store": (with_cents("cents: First[int | str]", SUMMARY), "no column can store"),
    "maximum of nothing": (with_cents("cents: Max[int | None]", SUMMARY), "can't be None"),
    "a latest, nullable from without": (
        with_cents("cents: Latest[int] | None", SUMMARY),
        "has the mark of a column",
    ),
    "a sum, nullable from without, in an entity": (with_cents("cents: Sum[int] | None"), "has the mark of a column"),
    "places take room, too": (
        with_cents("\n        ".join(f"c{n}: Latest[int]" for n in range(125)), SUMMARY),
        "too many",
    ),
    "journal after something else": (JOURNAL.replace("State", "int"), "not the state"),
    "journal of another agent": ('\n    AGENT = "slow"' + JOURNAL, "only 'core' keeps the states"),
    "unknown poison policy": ('\n    ON_POISON = "ignore"' + ENTITY, "ON_POISON"),
    "agent with a strange name": ('\n    AGENT = "The Agent"' + ENTITY, "AGENT"),
}


def with_indexes(declared: str, source: str = ENTITY) -> str:
    return f"\n    INDEXES = {declared}\n" + source


BAD |= {
    "indexes without a comma": (with_indexes('(Index("cents"))'), 'has INDEXES = Index("cents")'),
    "indexes a list": (with_indexes('[Index("cents")]'), "has INDEXES = [Index"),
    "indexes of names": (with_indexes('("cents",)'), "has INDEXES = ('cents',)"),
    "index of nothing": (with_indexes("(Index(),)"), "names no column"),
    "index of a column twice": (with_indexes('(Index("cents", "-cents"),)'), "or one twice"),
    "index of no name": (with_indexes("(Index(7),)"), "names no column"),
    "index of a column that is not there": (with_indexes('(Index("day"),)'), "'day', which the view does not have"),
    "index of the partition": (with_indexes('(Index("_partition"),)'), "which the view does not have"),
    "index of bytes": (with_indexes('(Index("cents"),)', with_cents("cents: bytes")), "have no order"),
    "index of a sum": (with_indexes('(Index("cents"),)', with_cents("cents: Sum[int]", SUMMARY)), "readers add up"),
    "index of the key": (with_indexes('(Index("purse"),)'), "its key is the order"),
    "index of the key backwards": (with_indexes('(Index("-purse"),)'), "its key is the order"),
    "two equal indexes": (with_indexes('(Index("cents"), Index("cents", "purse"))'), "twice"),
    "an index and its reverse": (with_indexes('(Index("cents"), Index("-cents"))'), "twice"),
    "index beyond an entry's bytes": (
        with_indexes(f"(Index({', '.join(f'{name!r}' for name in ('c0', 'c1', 'c2'))}),)", _with_more(3, "Decimal")),
        "there is room for 2600",
    ),
    "unique index": (with_indexes('(Index("cents", unique=True),)'), "no unique index"),
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


@pytest.mark.parametrize(
    ("annotation", "version", "expected"),
    [
        ("AccountOpened | Nowhere", 1, "policies/odd.py: an annotation of react can't be resolved"),
        ("object", 1, "policies/odd.py subscribes to object, which no context's `Event` names"),
        ("Any", 1, "policies/odd.py: the parameter `event` has no annotation"),
        ("AccountOpened | None", 1, "policies/odd.py: the annotation of `event` has None"),
        ("AccountOpened | list[int]", 1, "policies/odd.py: the annotation of `event` has list[int]"),
        ("AccountOpened", None, "policies/odd.py has no VERSION"),
        ("AccountOpened", True, "policies/odd.py has VERSION = True"),
    ],
)
def test_a_bad_policy_is_refused_with_its_file(annotation: str, version: Any, expected: str) -> None:
    module = ModuleType("policies.odd")
    module.__dict__.update(VERSION=version, AccountOpened=AccountOpened, Any=Any)
    exec(f"def react(event: '{annotation}', at): ...", module.__dict__)
    with pytest.raises(BadPolicy) as refused:
        policy_of(module)
    assert refused.value.message.startswith(expected)
    assert refused.value.hint


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
    columns = ("cents: int", "cents: int | None", "cents: str", "pence: int")
    assert len({view(with_cents(column)).shape for column in columns}) == 4
    assert view(ENTITY).shape == view(ENTITY).shape


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


def test_a_module_with_an_underscore_first_is_no_view_and_no_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those beside it import it."""
    for package, discover in ((projections, discover_views), (policies, discover_policies)):
        before = discover.__wrapped__().keys()
        folder = tmp_path / package.__name__
        folder.mkdir()
        (folder / "_lines.py").write_text("def total(lines): return sum(lines)\n")
        monkeypatch.setattr(package, "__path__", [*package.__path__, str(folder)])
        assert discover.__wrapped__().keys() == before
        assert importlib.import_module(f"{package.__name__}._lines").total([1, 2]) == 3
        monkeypatch.delitem(sys.modules, f"{package.__name__}._lines")


def test_an_agent_that_no_view_names_is_refused() -> None:
    with pytest.raises(BadView, match="There is no agent"):
        agent_views("nobody")
