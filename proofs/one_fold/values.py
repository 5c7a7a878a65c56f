"""What generated views put into their columns, and generated contexts into their states: by type, values that fit and values that
don't, the plain ones first, then those at the edges and those of a class that is derived from the declared one."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum, IntEnum, StrEnum
from typing import Any, NamedTuple
from uuid import UUID
from zoneinfo import ZoneInfo

from domain.language import fact


class Mood(Enum):
    UP = "above nothing"
    DOWN = "below nothing"


class Tone(StrEnum):
    SOFT = "soft"
    LOUD = "loud"


class Level(IntEnum):
    LOW = 1
    HIGH = 2


class Mixed(Enum):
    ONE = 1
    TWO = "two"


class Word(str):
    __slots__ = ()


class Number(int):
    pass


class Money(Decimal):
    pass


class Day(date):
    pass


class Moment(datetime):
    pass


class Mark(UUID):
    pass


class Blob(bytes):
    pass


@dataclass(frozen=True, slots=True)
class Inner:
    at: datetime | None = None
    share: float = 0.0


class Span(timedelta):
    pass


class Share(float):
    pass


class Line(NamedTuple):
    product: str
    pieces: int
    price: Decimal
    at: datetime | None = None


class Other(NamedTuple):
    """Like a line, but none."""

    product: str
    pieces: int
    price: Decimal
    at: datetime | None = None


@fact
class Parcel:
    lines: tuple[Line, ...] = ()
    notes: dict[str, list[str]] = field(default_factory=dict)
    mood: Mood | None = None
    weight: float = 0.0
    label: bytes = b""
    mark: UUID | None = None
    sent: date | None = None
    until: time | None = None
    takes: timedelta = timedelta(0)


@fact
class Loop:
    """A type that is as deep as memory."""

    within: list[Loop]


def parcel(**values: Any) -> Parcel:
    """With values that the class would refuse, too."""
    made = object.__new__(Parcel)
    for one in fields(Parcel):
        default = {} if one.name == "notes" else one.default
        object.__setattr__(made, one.name, values.get(one.name, default))
    return made


class Type(NamedTuple):
    """`name` is the annotation."""

    name: str
    good: Sequence[Any]
    bad: Sequence[Any]


BERLIN = ZoneInfo("Europe/Berlin")
WEST = timezone(timedelta(hours=-11, minutes=-30))
EAST = timezone(timedelta(hours=14))
RANDOM = "".join(hashlib.sha256(bytes([n])).hexdigest() for n in range(150))
"""9,600 characters that can't be compressed into the page of an index."""

_INTS = (0, 1, -7, 2**63 - 1, -(2**63), True, Level.HIGH, Number(5))
_NO_INTS = (2**63, -(2**63) - 1, 1.0, Decimal(1), "1", Tone.SOFT)
_DECIMALS = (
    Decimal(0),
    Decimal("1.10"),
    Decimal("1.1"),
    Decimal("-1.1"),
    Decimal("1E+2"),
    Decimal("-0.0"),
    Decimal("123456789012345678901234567890.123456789"),
    Decimal("0.0000000000000000000000000000000000000001"),
    Money("2.50"),
    Decimal("9E+900"),
)
_NO_DECIMALS = (
    1.5,
    Decimal("NaN"),
    Decimal("Infinity"),
    Decimal("sNaN"),
    Decimal("1E+200000"),
    Decimal("1E-20000"),
    "1.5",
)
_DATES = (
    date(2026, 1, 1),
    date(2024, 2, 29),
    date.min,
    date.max,
    datetime(2026, 1, 2, 23, 30, tzinfo=WEST),
    Day(2026, 3, 1),
)
_NO_DATES = ("2026-01-01", 5)
_TIMES = (
    datetime(2026, 1, 1, tzinfo=UTC),
    datetime(2026, 1, 1, 23, 30, tzinfo=WEST),
    datetime(2026, 1, 1, 0, 30, tzinfo=BERLIN),
    datetime(2026, 10, 25, 2, 30, tzinfo=BERLIN),
    datetime(2026, 10, 25, 2, 30, fold=1, tzinfo=BERLIN),
    datetime.min.replace(tzinfo=UTC),
    datetime.max.replace(tzinfo=UTC),
    Moment(2026, 3, 1, 12, tzinfo=EAST),
)
_NO_TIMES = (
    _TIMES[0].replace(tzinfo=None),
    datetime.min.replace(tzinfo=EAST),
    datetime.max.replace(tzinfo=WEST),
    date(2026, 1, 1),
)

_SPANS = (
    timedelta(0),
    timedelta(days=1, seconds=5, microseconds=7),
    -timedelta(microseconds=1),
    timedelta.max,
    timedelta.min,
    Span(days=-3, hours=5),
)
_FLOATS = (0.0, 0.1, -0.0, 1, True, 1e300, -5e-324, 1.7976931348623157e308, 1e22, float(2**53), Share(2.5), Level.HIGH)
_NO_FLOATS = (float("nan"), float("inf"), -float("inf"), 2**53 + 1, 10**400, Decimal(1), "1")
_LINES = (
    Line("", 0, Decimal("1.10"), None),
    Line("Zürich 🏦\\u0000", -(2**63), Decimal("0.000000000000000000000000000000000000001"), _TIMES[1]),
    Line(Word("word"), True, 5, _TIMES[4]),  # type: ignore[arg-type]
    Line(product="a", pieces=2**63 - 1, price=Decimal("1E+2"), at=_TIMES[5]),
)
_NO_LINES = (
    Line("\0", 1, Decimal(1)),
    Line("a", 2**63, Decimal(1)),
    Line("a", 1, Decimal("NaN")),
    Line("a", 1, Decimal(1), _NO_TIMES[0]),
    Other("a", 1, Decimal(1)),
    ("a", 1, Decimal(1), None),
    tuple.__new__(Line, ("a", 1)),
    None,
)
_PARCELS = (
    Parcel(),
    parcel(lines=_LINES, notes={"b": ["é", "1"], "aa": [], "": [""]}, mood=Mood.UP, weight=-0.0, label=b"\0\xff"),
    parcel(
        mark=Mark(int=7), sent=Day(2026, 3, 1), until=time(23, 59, 59, 999_999, fold=1), takes=_SPANS[2], weight=1e300
    ),
)

COLUMNS = {
    one.name: one
    for one in (
        Type("int", _INTS, _NO_INTS),
        Type("str", ("", "a", "Zürich 🏦", "x" * 2_000, Word("word"), Tone.SOFT), ("\0", "\ud800", b"a", 1, Mood.UP)),
        Type("bool", (False, True), ("yes", 2)),
        Type("date", _DATES, _NO_DATES),
        Type("datetime", _TIMES, _NO_TIMES),
        Type("Decimal", _DECIMALS, _NO_DECIMALS),
        Type("UUID", (UUID(int=0), UUID(int=2**128 - 1), Mark(int=7)), ("7", 7)),
        Type("bytes", (b"", b"\0\xff", Blob(b"blob")), ("blob", 7)),
        Type("Mood", (Mood.UP, Mood.DOWN), ("above nothing", Tone.SOFT, "nowhere")),
        Type("Tone", (Tone.SOFT, Tone.LOUD), ("hard", Mood.UP)),
        Type('Literal["x", "y"]', ("x", "y", Word("x")), (5, "\0")),
        Type(
            "time",
            (time(0), time(23, 59, 59, 999_999), time(2, 30, fold=1)),
            (time(1, tzinfo=UTC), "01:00:00", _TIMES[0], timedelta(1)),
        ),
        Type("timedelta", _SPANS, (5, "P1D", time(1))),
    )
}
KEYS = {
    **COLUMNS,
    "str": Type("str", ("", "a", "k" * 200, Word("a"), "Zürich 🏦", Tone.SOFT), (RANDOM, "\0", "\ud800", 1)),
    "bytes": Type("bytes", (b"", b"\0\xff", Blob(b"")), (RANDOM.encode(), "blob")),
    "Decimal": Type("Decimal", tuple(value for value in _DECIMALS if abs(value) < 10**100), _NO_DECIMALS),
}
COLUMNS |= {
    one.name: one
    for one in (
        Type("float", _FLOATS, _NO_FLOATS),
        Type("list[int]", ([], [1, 2**63 - 1], [3, True, Number(5)]), ([2**63], [None], [1.0], (1,), {1: 1}, "1")),
        Type(
            "tuple[str | None, ...]",
            ((), ("é", None, "\\u0000", '"\\'), ("x" * 9_000, Word("b"))),
            (("\0",), ("a", "\ud800"), (1,), ["a"], ("x" * 2**20,)),
        ),
        Type(
            "dict[str, Decimal]",
            (
                {},
                {"b": Decimal("1.10"), "aa": Decimal("1E+2"), "a": Decimal("-0.0")},
                {Word("z"): 5, "é": _DECIMALS[7]},
            ),
            ({"a": 1.5}, {"\0": Decimal(1)}, {"\ud800": Decimal(1)}, {1: Decimal(1)}, {None: Decimal(1)}, []),
        ),
        Type(
            "list[Line]",
            ([], [_LINES[0]], list(_LINES)),
            ([_LINES[0], _NO_LINES[0]], *([one] for one in _NO_LINES[1:])),
        ),
        Type(
            "Parcel",
            _PARCELS,
            (
                parcel(lines=(_LINES[0], _NO_LINES[2])),
                parcel(notes={"a": ["b", "\0"]}),
                parcel(weight=float("nan")),
                parcel(mood="above nothing"),
                parcel(takes=None),
                Inner(),
            ),
        ),
    )
}
"""By name: what a column may be declared to be. The ones that are added here can't be keys."""
SUMS = {
    "int": Type("int", (0, 1, -1, 2**63, 10**30, True, Level.HIGH, 9 * 10**900), (1.0, "1", 10**4_300)),
    "Decimal": Type("Decimal", _DECIMALS, _NO_DECIMALS),
}
EXTREMES = {name: COLUMNS[name] for name in ("int", "Decimal", "date", "datetime")}
PLACED = ("Latest", "First")
"""The roles whose values come from one place in the log."""
WHOLE = {name: one for name, one in COLUMNS.items() if not isinstance(one.good[0], (list, tuple, dict, Parcel))}
"""Without parts."""
TYPES = {"": COLUMNS, "Key": KEYS, "Sum": SUMS, "Min": EXTREMES, "Max": EXTREMES, **dict.fromkeys(PLACED, WHOLE)}
"""By a column's role and its type's name."""

STATES = {
    one.name: one
    for one in (
        Type("int", (0, 1, Level.HIGH, 2**63 - 1, 2**64 + 1), ()),
        Type("float", (0.0, 0, 1, 0.1, 1e300, -0.0), ()),
        Type("str", ("", "é", Tone.SOFT, "\0"), ()),
        Type("bool", (False, True), ()),
        Type("date", (date(2026, 1, 1), date.min, date.max), ()),
        Type("datetime", _TIMES[:7], ()),
        Type("Decimal", (*_DECIMALS[:8], Decimal("1E+200000")), ()),
        Type("UUID", (UUID(int=0), UUID(int=2**128 - 1)), ()),
        Type("bytes", (b"", b"\0\xff"), ()),
        Type("Mood", (Mood.UP, Mood.DOWN), ()),
        Type("Level", (Level.LOW, Level.HIGH), ()),
        Type("tuple[int, ...]", ((), (1, 2**63), [1, Level.HIGH]), ()),
        Type("frozenset[str]", (frozenset(), frozenset("abcdefgh"), {"b", "a"}), ()),
        Type("dict[str, float]", ({}, {"b": 1, "a": 0}, {"a": 0.0, "b": 1.0}), ()),
        Type("Inner", (Inner(), Inner(_TIMES[1], 1), Inner(None, 0)), ()),
    )
}

REFUSED_COLUMNS = (
    *(
        "int | str",
        "Level",
        "Mixed",
        "Literal[1, 2]",
        "list",
        "list[int | str]",
        "list[list[Level]]",
        "set[int]",
        "tuple[int, str]",
    ),
    *("dict[int, str]", "dict[str, complex]", "dict[Mood, int]", "Loop", "complex"),
)
"""What no column may be declared to be."""
