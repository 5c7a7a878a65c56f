"""make test: pure. Of a type that is not refused by name, JSON gives each value back exactly, or the value is refused."""

import math
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, make_dataclass
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum, IntEnum, StrEnum
from functools import cached_property
from typing import Any, Literal, NamedTuple, NewType, get_args, get_origin
from uuid import UUID
from zoneinfo import ZoneInfo

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from domain.engine.storable import Lost, NotExact, comparable, giving_exactly, require_exact, through_json
from tools.testing.waiting import DEADLINE_S

BERLIN = ZoneInfo("Europe/Berlin")
NAIVE = datetime.fromisoformat("2026-01-01")


class Mood(Enum):
    UP = "up"
    DOWN = "down"


class Word(StrEnum):
    ONE = "one"


class Size(IntEnum):
    SMALL = 1
    LARGE = 2


Huge = Enum("Huge", {"NUMBER": 2**70})
Odd = Enum("Odd", {"TEXT": "a", "NUMBER": 1})
Halves = Enum("Halves", {"HALF": 0.5})
Cents = NewType("Cents", int)


class Pair(NamedTuple):
    name: str
    weight: float = 0.0


Leaf: Any = make_dataclass("Leaf", [("at", datetime), ("weight", float | None)], frozen=True)
Other: Any = make_dataclass("Other", [("at", datetime)], frozen=True)


@dataclass(frozen=True)
class Checked:
    """What __post_init__ does is done again each time it is read."""

    cents: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "cents", abs(self.cents))


@dataclass(frozen=True)
class Growing:
    cents: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "cents", self.cents + 1)


def record(kind: Any) -> type:
    return make_dataclass("State", [("it", kind)], frozen=True)


# What is refused, and where it says it is.


@dataclass(frozen=True)
class Tree:
    below: "tuple[Tree, ...]" = ()


Changeable = make_dataclass("Changeable", [("cents", int)])
Incomparable = make_dataclass("Incomparable", [("cents", int)], frozen=True, eq=False)
Late = make_dataclass("Late", [("cents", int, field(init=False, default=0))], frozen=True)


@dataclass(frozen=True)
class Keeping:
    cents: int

    @cached_property
    def euros(self) -> int:
        return self.cents // 100


class Plain:
    """Of which nothing is known."""


@pytest.mark.parametrize(
    ("kind", "where"),
    [
        (Any, "State.it"),
        (object, "State.it"),
        (Plain, "State.it"),
        (complex, "State.it"),
        (bytearray, "State.it"),
        (Leaf | Other, "State.it"),
        (str | date, "State.it"),
        (list[int] | tuple[int, ...], "State.it"),
        (Odd, "State.it"),
        (Halves, "State.it"),
        (list, "State.it"),
        (tuple, "State.it"),
        (dict, "State.it"),
        (dict[str | int, int], "State.it"),
        (dict[tuple[int, int], int], "State.it"),
        (dict[bool, int], "State.it"),
        (dict[Literal["a", 1], int], "State.it"),
        (dict[str, tuple[Any, ...]], r"State.it\[\]\[\]"),
        (tuple[int, list[Plain]], r"State.it\[1\]\[\]"),
        (Tree, r"State.it.below\[\]"),
        (Changeable, "State.it"),
        (Incomparable, "State.it"),
        (Keeping, "State.it.euros"),
        (Late, "State.it.cents"),
        (Callable[[], int], "State.it"),
        (Huge, "State.it"),
        (Literal[1, 2**70], "State.it"),
    ],
    ids=str,
)
def test_a_type_that_json_does_not_give_back_is_refused_with_its_place_and_what_to_write(kind: Any, where: str) -> None:
    with pytest.raises(NotExact, match=rf"^{where} .*\.$") as refused:
        require_exact(record(kind))
    assert refused.value.hint


# What is replaced by what JSON makes of it, and what is lost there.


@pytest.mark.parametrize(
    ("kind", "value", "stored"),
    [
        (float, 3, 3.0),
        (float, Size.LARGE, 2.0),
        (int, Size.LARGE, 2),
        (str, Word.ONE, "one"),
        (tuple[int, ...], [1, 2], (1, 2)),
        (list[float], (1, 2), [1.0, 2.0]),
        (Sequence[int], (1, 2), [1, 2]),
        (frozenset[int], {1}, frozenset({1})),
        (Mapping[str, float], {"a": 1}, {"a": 1.0}),
        (Pair, ("a", 1), Pair("a", 1.0)),
        (datetime, datetime(2026, 1, 1, tzinfo=BERLIN), datetime(2026, 1, 1, tzinfo=timezone(timedelta(hours=1)))),
        (
            datetime,
            datetime(2026, 10, 25, 2, 30, tzinfo=BERLIN, fold=1),
            datetime(2026, 10, 25, 2, 30, tzinfo=timezone(timedelta(hours=1))),
        ),
        (datetime, datetime(2026, 1, 1, tzinfo=timezone(timedelta(0), "Z")), datetime(2026, 1, 1, tzinfo=UTC)),
        (datetime, NAIVE.replace(fold=1), NAIVE),
        (Checked, Checked(-5), Checked(5)),
        (dict[Decimal, int], {Decimal("-0"): 1}, {Decimal(0): 1}),
    ],
    ids=str,
)
def test_a_state_that_is_folded_on_is_what_the_database_would_give_back(kind: Any, value: Any, stored: Any) -> None:
    state = record(kind)
    given = giving_exactly(state, lambda state, event: event)(None, state(value))
    assert repr(given) == repr(state(stored))
    assert repr(given) == repr(msgspec.json.decode(msgspec.json.encode(given), type=state))


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (float, math.inf),
        (float, math.nan),
        (float | None, math.inf),
        (tuple[float | None, ...], (1.0, math.nan)),
        (Leaf, Leaf(NAIVE, -math.inf)),
        (float, 2**63 + 1),
        (float, 10**400),
        (int, True),
        (int, 1.0),
        (int, None),
        (str, b"a"),
        (str, Mood.UP),
        (Literal["a", "b"], "c"),
        (Mood, "sideways"),
        (date, NAIVE),
        (dict[str, int], {"1": 1, 1: 2}),
        (datetime, datetime(1850, 1, 1, tzinfo=BERLIN)),
        (Leaf, Other(NAIVE)),
        (Growing, Growing(1)),
        (str, "\ud800"),
        (tuple[int, int], (1, 2, 3)),
        (dict[Decimal, int], {Decimal("NaN123"): 1}),
    ],
    ids=str,
)
def test_what_json_would_make_another_value_of_is_refused(kind: Any, value: Any) -> None:
    state = record(kind)
    with pytest.raises(Lost, match="State can't be stored"):
        through_json(state, state(value))
    if value != "\ud800":  # checking each text for it is too slow; the first attempt to write it fails
        with pytest.raises(Lost, match="State can't be stored"):
            giving_exactly(state, lambda state, event: event)(None, state(value))


def test_a_state_of_another_class_is_refused() -> None:
    for other in (None, 5, {"it": "a"}, Other(NAIVE)):
        with pytest.raises(Lost):
            giving_exactly(record(int), lambda state, event: event)(None, other)


def test_an_exact_state_is_not_copied() -> None:
    state = record(tuple[float, ...])((1.0, 2.0))
    assert giving_exactly(type(state), lambda state, event: state)(state, None) is state


# Any type at all: refused by name, or each value comes back exactly.

ZONES = st.sampled_from(
    [None, UTC, BERLIN, timezone(timedelta(hours=-3, minutes=30)), timezone(timedelta(seconds=-30))]
)
LEAVES: dict[Any, st.SearchStrategy[Any]] = {
    bool: st.booleans(),
    int: st.integers() | st.sampled_from([2**63, -(2**63) - 1, 2**64, 10**400]),
    float: st.floats(),
    str: st.text() | st.just("\0"),
    bytes: st.binary(),
    date: st.dates(),
    datetime: st.datetimes(timezones=ZONES),
    time: st.times(timezones=st.sampled_from([None, UTC, timezone(timedelta(hours=2))])),
    timedelta: st.timedeltas(),
    Decimal: st.decimals(allow_nan=False),
    UUID: st.uuids(),
    Mood: st.sampled_from(Mood),
    Word: st.sampled_from(Word),
    Size: st.sampled_from(Size),
    Odd: st.sampled_from(Odd),
    Literal["a", "b"]: st.sampled_from(["a", "b"]),
    Literal["a", 1, None]: st.sampled_from(["a", 1, None]),
    None: st.none(),
    Cents: st.integers(),
    Leaf: st.builds(Leaf, st.datetimes(timezones=ZONES), st.none() | st.floats()),
    Other: st.builds(Other, st.datetimes()),
    Checked: st.builds(Checked, st.integers()),
    Pair: st.builds(Pair, st.text(), st.floats()),
    Plain: st.builds(Plain),
    Any: st.tuples(st.integers()),
}
HASHABLE = st.sampled_from(
    [bool, int, float, str, bytes, date, datetime, time, timedelta, Decimal, UUID, Mood, Size, Literal["a", "b"]]
)
TYPES = st.recursive(
    st.sampled_from(list(LEAVES)),
    lambda inner: st.one_of(
        inner.map(lambda one: list[one]),  # type: ignore[valid-type]
        inner.map(lambda one: tuple[one, ...]),  # type: ignore[valid-type]
        st.tuples(inner, inner).map(lambda two: tuple[two]),  # type: ignore[valid-type]
        HASHABLE.map(lambda one: frozenset[one]),  # type: ignore[valid-type]
        HASHABLE.map(lambda one: set[one]),  # type: ignore[valid-type]
        st.tuples(HASHABLE, inner).map(lambda two: dict[two]),  # type: ignore[valid-type,misc]
        st.tuples(inner, inner).map(lambda two: two[0] | two[1] if None not in two else two[0] or two[1]),
        inner.map(record),
    ),
    max_leaves=4,
)


def values(kind: Any) -> st.SearchStrategy[Any]:
    """Values of a type, some of them of a subclass or a like type, as evolve may well make them."""
    if kind in LEAVES:
        own = LEAVES[kind]
        return own | st.integers() | st.sampled_from(Size) if kind is float else own
    origin: Any = get_origin(kind)
    arguments: tuple[Any, ...] = get_args(kind)
    if origin is list:
        return st.lists(values(arguments[0]), max_size=3) | st.lists(values(arguments[0]), max_size=3).map(tuple)
    if origin is tuple and arguments[1:] == (...,):
        return st.lists(values(arguments[0]), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*map(values, arguments))
    if origin in (set, frozenset):
        return st.sets(values(arguments[0]), max_size=3).map(origin)
    if origin is dict:
        return st.dictionaries(values(arguments[0]), values(arguments[1]), max_size=3)
    if arguments:
        return st.one_of(*map(values, arguments))
    return st.builds(kind, values(kind.__annotations__["it"]))


@given(st.data())
def test_a_type_is_refused_by_name_or_each_of_its_values_comes_back_exactly_or_is_refused(data: st.DataObject) -> None:
    state = record(data.draw(TYPES))
    try:
        fold = giving_exactly(state, lambda state, event: event)
    except NotExact:
        return
    for value in data.draw(st.lists(st.builds(state, values(state.__annotations__["it"])), max_size=3)):
        try:
            folded = fold(None, value)
            text = msgspec.json.encode(folded)
        except (Lost, UnicodeEncodeError):
            continue
        back: Any = msgspec.json.decode(text, type=state)
        assert comparable(back) == comparable(folded)
        assert back == folded
        assert fold(None, folded) == folded


# Comparing what was stored by two processes.


def test_sets_have_no_order_and_all_else_is_told_apart() -> None:
    names = [f"n{n}" for n in range(50)]
    state = record(frozenset[str])
    assert comparable(state(frozenset(names))) == comparable(state(frozenset(reversed(names))))
    apart = [1, 1.0, True, "1", Decimal(1), Decimal("1.0"), None, -0.0, 0.0, {"a": 1, "b": 2}, {"b": 2, "a": 1}]
    apart += [(1, 2), (2, 1), frozenset({1}), frozenset({1.0}), datetime(2026, 1, 1, tzinfo=UTC), NAIVE]
    for n, one in enumerate(apart):
        for m, other in enumerate(apart):
            assert (comparable(one) == comparable(other)) is (n == m), (one, other)


def test_threads_may_make_the_decoders_of_one_class_at_once() -> None:
    """Without a lock msgspec ends the process, so another one does it."""
    done = subprocess.run(
        [sys.executable, "-c", AT_ONCE], check=False, capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


AT_ONCE = """
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import make_dataclass
from datetime import date
from threading import Barrier
from typing import Annotated
from msgspec import Meta
from domain.engine.storable import decoder

def make(kind):
    together.wait()
    decoder(kind)(value)

sys.setswitchinterval(1e-6)
together, value = Barrier(4), b'{"a": {"b": 1}, "c": "2026-01-01", "d": 1}'
fields = [("a", dict[str, Annotated[int, Meta(ge=0)]]), ("c", date), ("d", Annotated[int, Meta(ge=0)])]
with ThreadPoolExecutor(4) as threads:
    for number in range(300):
        kind = make_dataclass(f"Kind{number}", fields, frozen=True)
        list(threads.map(make, [kind] * 4))
print("done")
"""
