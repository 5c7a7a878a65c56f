"""What must come of generated histories: their functions called event by event, with rows and states as PostgreSQL and JSON give
them back, in plain Python and without a line of the engine."""

from __future__ import annotations

import base64
import json
import math
from collections import Counter, namedtuple
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, make_dataclass
from datetime import UTC, date, datetime, time, timedelta
from decimal import Context, Decimal
from functools import reduce
from types import SimpleNamespace
from typing import Any, NamedTuple
from uuid import UUID

from proofs.bank_oracle import EPOCH, At, Entry, Place, Reader, outcome_row
from proofs.one_fold import made
from proofs.one_fold.generate import HistorySpec, ViewSpec, all_columns, context_name, view_name
from proofs.one_fold.values import PLACED, STATES, Inner, Level, Line, Mood, Parcel, Tone, parcel

EXACT = Context(prec=200_000)
LONGEST_KEY = 2_000
"""Bytes of a key's texts, bytes and numbers together."""
LINE = "str", "int", "Decimal", "datetime | None"
"""The types of a line's fields."""
MOST_JSON = 2**20
"""Bytes of a value with parts."""
MOST_DIGITS = 1_000
"""Of a number, before the point and behind it; sums may have more."""


class Skip(NamedTuple):
    """Events that a view leaves out on record: of a stream, from one version to another, both included."""

    view: str
    stream: str
    first: int
    last: int


class Parked(NamedTuple):
    """A stream that a view leaves out, as the `parked` table has it."""

    view: str
    stream: str
    partition: int
    offset: int
    version: int


class Said(NamedTuple):
    """Where a summary's row was made, in the log's order: in a commit, by an event, as its first or a later row."""

    time: datetime
    partition: int
    offset: int
    version: int
    number: int

    @property
    def digits(self) -> int:
        """Of the commit, as tables have it: 13 digits of its time, 5 of the partition, 19 of the offset."""
        return int(f"{(self.time - EPOCH) // timedelta(milliseconds=1):013}{self.partition:05}{self.offset:019}")


class Refused(Exception):
    """A value that a column does not take, or a row that its table does not."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Where a view that does not park stands still."""

    stream: str
    version: int
    offset: int


@dataclass(slots=True)
class Result:
    """Rows are texts, by view, as tables hold them; so are differences. `stops` is by view and partition."""

    places: list[Place]
    rows: dict[str, list[tuple[str, ...]]]
    parked: set[Parked]
    stops: dict[tuple[str, int], Stop]
    reached: Counter[str]
    read: dict[str, list[tuple[str, ...]]]
    """Of summaries, what readers see: rows of all partitions combined."""


@dataclass(slots=True)
class Found:
    """What came of a run; differences are (history, step, text), with None for a history that is not known."""

    histories: int = 0
    events: int = 0
    folded: int = 0
    """Histories in which no view left anything out."""
    reached: Counter[str] = field(default_factory=Counter)
    differences: list[tuple[int | None, str, str]] = field(default_factory=list)

    def add(self, other: Found) -> None:
        self.histories += other.histories
        self.events += other.events
        self.folded += other.folded
        self.reached += other.reached
        self.differences += other.differences


def canonical(kind: str, role: str, value: Any) -> Any:
    """The value as the database gives it back, in the row's class. Raises Refused."""
    match kind:
        case "int" if isinstance(value, int) and (
            abs(value) < 10**MOST_DIGITS if role == "Sum" else -(2**63) <= value < 2**63
        ):
            return int(value)
        case "str" | 'Literal["x", "y"]' if isinstance(value, str):
            return _text(value)
        case "date" if isinstance(value, datetime):
            return value.date()
        case "date" if isinstance(value, date):
            return date(value.year, value.month, value.day)
        case "datetime" if isinstance(value, datetime) and value.tzinfo is not None:
            try:
                utc = value.astimezone(UTC)
            except OverflowError:
                raise Refused(value) from None
            return datetime(utc.year, utc.month, utc.day, utc.hour, utc.minute, utc.second, utc.microsecond, UTC)
        case "Decimal" if isinstance(value, int | Decimal):
            return _number(Decimal(value), role)
        case "UUID" if isinstance(value, UUID):
            return UUID(int=value.int)
        case "bytes" if isinstance(value, bytes):
            return b"".join([value])
        case "bool" | "Mood" | "Tone" if type(value).__name__ == kind:
            return value
        case "time" if isinstance(value, time) and value.tzinfo is None:
            return value.replace(fold=0)
        case "timedelta" if isinstance(value, timedelta):
            return timedelta(value.days, value.seconds, value.microseconds)
        case "float" if isinstance(value, float | int) and abs(value) < 10**309 and math.isfinite(value):
            if float(value) != value:
                raise Refused(value)
            return float(value) + 0.0
        case "list[int]" | "list[str]" | "list[Line]" if isinstance(value, list):
            return _small([canonical(kind[5:-1], "", one) for one in value])
        case "tuple[str | None, ...]" | "tuple[Line, ...]" if isinstance(value, tuple):
            return _small(tuple(canonical(kind[6:-6], "", one) for one in value))
        case "dict[str, Decimal]" | "dict[str, list[str]]" if isinstance(value, dict):
            return {canonical("str", "", name): canonical(kind[10:-1], "", one) for name, one in value.items()}
        case "Line" if type(value) is Line:
            if len(value) != len(LINE):
                raise Refused("a line of another length")
            return Line(*(canonical(of, "", one) for of, one in zip(LINE, value, strict=True)))
        case "Parcel" if type(value) is Parcel:
            kinds = Parcel.__annotations__
            return parcel(**{name: canonical(of, "", getattr(value, name)) for name, of in kinds.items()})
        case str() if kind.endswith(" | None"):
            return None if value is None else canonical(kind.removesuffix(" | None"), role, value)
        case _:
            raise Refused(f"{value!r} is no {kind}")


def copied(value: Any) -> Any:
    """A row, or a value in it, that may be changed in place; dicts are sorted, as no order of theirs is stored."""
    match value:
        case list():
            return list(map(copied, value))
        case tuple():
            return tuple.__new__(type(value), map(copied, value))
        case dict():
            return {name: copied(one) for name, one in sorted(value.items())}
        case Parcel():
            return parcel(**{name: copied(getattr(value, name)) for name in Parcel.__annotations__})
        case _:
            return value


def _small(value: Any) -> Any:
    if len(json.dumps(_plain(value), ensure_ascii=False).encode()) > MOST_JSON:
        raise Refused("too much JSON")
    return value


def _plain(value: Any) -> Any:
    """A value with parts, as its JSON has it. Numbers are texts: psycopg reads a large float as a whole number."""
    match value:
        case Line():
            return {name: _plain(one) for name, one in value._asdict().items()}
        case Parcel():
            return {name: _plain(getattr(value, name)) for name in Parcel.__annotations__}
        case list() | tuple():
            return list(map(_plain, value))
        case dict():
            return {name: _plain(one) for name, one in sorted(value.items())}
        case Decimal():
            return f"{value:f}"
        case datetime():
            return value.isoformat().replace("+00:00", "Z")
        case date() | time():
            return value.isoformat()
        case timedelta():
            days, rest = divmod(abs(value), timedelta(1))
            seconds = Decimal(rest // timedelta(microseconds=1)).scaleb(-6).normalize()
            sign = "-P" if value < timedelta(0) else "P"
            return f"{sign}{f'{days}D' if days or not rest else ''}{f'T{seconds:f}S' if rest else ''}"
        case bytes():
            return base64.b64encode(value).decode()
        case UUID():
            return str(value)
        case Mood():
            return value.value
        case float() | int() if not isinstance(value, bool):
            return str(Decimal(repr(value)).normalize())
        case _:
            return value


def _text(value: str) -> str:
    try:
        stored = value.encode()
    except UnicodeEncodeError as error:
        raise Refused(value) from error
    if "\0" in value:
        raise Refused(value)
    return stored.decode()


def _number(value: Decimal, role: str) -> Decimal:
    """As `numeric`: no exponent, no sign of nothing. In a key, no zeros behind the point's last digit."""
    if not value.is_finite() or value.adjusted() >= MOST_DIGITS or int(value.as_tuple().exponent) < -MOST_DIGITS:
        raise Refused(value)
    sign, digits, exponent = value.as_tuple()
    exponent = int(exponent)
    if role == "Key":
        while exponent < 0 and digits[-1] == 0 and any(digits):
            digits, exponent = digits[:-1], exponent + 1
    if exponent > 0:
        digits, exponent = (*digits, *[0] * exponent), 0
    if not any(digits):
        sign, digits, exponent = 0, (0,), 0 if role == "Key" else exponent
    return Decimal((sign, digits, exponent))


def require_short(key: Sequence[Any]) -> None:
    size = 0
    for value in key:
        match value:
            case Mood() | Tone():
                size += max(len(member.value.encode()) for member in type(value))
            case str():
                size += len(value.encode())
            case bytes():
                size += len(value)
            case Decimal():
                size += len(str(value))
            case _:
                pass
    if size > LONGEST_KEY:
        raise Refused(f"a key of {size} bytes")


def _inner(at: datetime | None, share: float) -> Inner:
    return Inner(None if at is None else datetime.fromisoformat(at.isoformat()), float(share))


KEPT: dict[str, Callable[[Any], Any]] = {
    "int": int,
    "float": float,
    "str": str,
    "datetime": lambda value: datetime.fromisoformat(value.isoformat()),
    "tuple[int, ...]": lambda value: tuple(map(int, value)),
    "frozenset[str]": frozenset,
    "dict[str, float]": lambda value: {name: float(share) for name, share in value.items()},
    "Inner": lambda value: _inner(value.at, value.share),
}
"""A field of a state as its JSON gives it back, by its type: any other as it is."""
FROM_JSON: dict[str, Callable[[Any], Any]] = KEPT | {
    "date": date.fromisoformat,
    "datetime": datetime.fromisoformat,
    "Decimal": Decimal,
    "UUID": UUID,
    "bytes": base64.b64decode,
    "Mood": Mood,
    "Level": Level,
    "Inner": lambda value: _inner(value["at"] and datetime.fromisoformat(value["at"]), value["share"]),
}


def _read(types: Mapping[str, Callable[[Any], Any]], kind: str, value: Any) -> Any:
    return types[kind](value) if kind in types else value


def shown(value: Any) -> str:
    """A stored value in words; those that psycopg loads and those that are folded here look alike."""
    if isinstance(value, bytes) and value[:1] == b"\1":  # `jsonb` as it is sent, which no generated bytes look like
        value = json.loads(value[1:])
    if isinstance(value, list | dict | tuple | Parcel):
        return json.dumps(_plain(value), sort_keys=True)
    if isinstance(value, datetime):
        value = value.astimezone(UTC).isoformat()
    if isinstance(value, memoryview | bytearray):
        value = bytes(value)
    if isinstance(value, Mood | Tone):
        value = value.value
    if isinstance(value, Decimal | int) and not isinstance(value, bool):
        return str(value)
    return repr(value)


@dataclass(slots=True)
class _View:
    number: int
    spec: ViewSpec
    skips: set[tuple[str, int]]
    row: Any = field(init=False)
    fields: made.Fields = field(init=False)
    rows: dict[tuple[Any, ...], Any] = field(default_factory=dict)
    """By key: partition and row."""
    said: dict[tuple[Any, ...], list[tuple[Said, Any]]] = field(default_factory=dict)
    """Of a summary, by key: all rows that were ever made, with where."""
    parked: dict[str, Parked] = field(default_factory=dict)
    stops: dict[int, Stop] = field(default_factory=dict)
    reached: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        columns = all_columns(self.spec)
        self.row = namedtuple("Row", [column.name for column in columns])  # type: ignore[misc]
        optional = [column.name for column in self.spec.columns if column.optional]
        self.fields = made.Fields({column.name: column.type for column in self.spec.columns}, optional)

    @property
    def name(self) -> str:
        return view_name(self.number, self.spec)

    def take(self, at: At, event: Any, after: Any) -> None:
        if event.noted and not self.spec.noted:
            return
        if at.stream in self.parked or at.partition in self.stops:
            return
        if (at.stream, at.version) in self.skips:
            self.reached["skipped"] += 1
            return
        try:
            self._apply(at, event, after)
        except Exception as error:
            what = "value refused" if isinstance(error, Refused) else type(error).__name__
            self.reached[f"{'parked' if self.spec.parks else 'stopped'}: {what}"] += 1
            if self.spec.parks:
                self.parked[at.stream] = Parked(self.name, at.stream, at.partition, at.offset, at.version)
            else:
                self.stops[at.partition] = Stop(at.stream, at.version, at.offset)
        else:
            self.reached[f"{self.spec.letter} {event.act}"] += 1
            self.reached.update(f"kept {column.annotation}" for column in (*self.spec.keys, *self.spec.columns))

    def _apply(self, at: At, event: Any, after: Any) -> None:
        keys = made.keys([column.type for column in self.spec.keys], event)
        match self.spec.letter:
            case "e" | "k":
                self._entity(at, event, (made.owner(at.account, event), *keys))
            case "j":
                self._add(at, made.rows(self.row, self.fields, (at.account, at.version), event, after))
            case "d":
                self._add(at, made.rows(self.row, self.fields, (at.account, *keys), event, after))
            case "s":
                self._sum(at, made.increments(self.row, self.fields, keys, event))
            case other:
                raise AssertionError(other)

    def _entity(self, at: At, event: Any, raw: tuple[Any, ...]) -> None:
        columns = [column for column in all_columns(self.spec) if column.role == "Key"]
        key = tuple(canonical(c.kind, c.role, value) for c, value in zip(columns, raw, strict=True))
        require_short(key)
        before = copied(self.rows[key][1]) if key in self.rows else None
        row = made.entity(self.row, self.fields, raw, before, event)
        if row is None:
            self.reached["deleted"] += before is not None
            self.rows.pop(key, None)
            return
        row = self._canonical(row)
        if row[: len(key)] != key or key[0] != at.account:
            raise Refused(f"{row[: len(key)]} is not {key} of {at.account}")
        self.rows[key] = (at.partition, row)

    def _add(self, at: At, rows: Any) -> None:
        size = sum(column.role == "Key" for column in all_columns(self.spec))
        more: dict[tuple[Any, ...], Any] = {}
        for one in list(rows):
            row = self._canonical(one)
            if row[:size] in self.rows or row[:size] in more or row[0] != at.account:
                raise Refused(f"{row[:size]} is there, or not of {at.account}")
            more[row[:size]] = (at.partition, row)
        self.rows |= more

    def _sum(self, at: At, rows: Any) -> None:
        for number, row in enumerate([self._canonical(one) for one in list(rows)]):
            said = Said(at.time, at.partition, at.offset, at.version, number)
            self.said.setdefault(row[: len(self.spec.keys)], []).append((said, row))

    def told(self) -> list[tuple[str, ...]]:
        """The rows of the table."""
        found = [(*map(shown, row), shown(partition)) for partition, row in self.rows.values()]
        for said in self.said.values():
            for partition in sorted({place.partition for place, _ in said}):
                values, places = self._combined([one for one in said if one[0].partition == partition])
                found.append((*map(shown, [*values, *places]), shown(partition)))
        return found

    def read(self) -> list[tuple[str, ...]]:
        """The rows that readers of a summary see."""
        return [tuple(map(shown, self._combined(said)[0])) for said in self.said.values()]

    def _combined(self, said: Sequence[tuple[Said, Any]]) -> tuple[list[Any], list[Any]]:
        """A row of these, and the places of its Latest and First values, as digits."""
        values, places = list[Any](), list[Any]()
        for number, column in enumerate(all_columns(self.spec)):
            some = [(place, row[number]) for place, row in said if row[number] is not None]
            if column.role in PLACED:
                place, value = (max if column.role == "Latest" else min)(some, key=_place, default=(None, None))
                places.append(place and place.digits)
            else:
                value = _combine(column.role, [value for _, value in some])
            values.append(value)
        return values, places

    def _canonical(self, row: Any) -> Any:
        if type(row) is not self.row:
            raise Refused("another class")
        found = self.row(
            *(
                None if value is None and column.optional else canonical(column.kind, column.role, value)
                for column, value in zip(all_columns(self.spec), row, strict=True)
            )
        )
        require_short(
            [value for column, value in zip(all_columns(self.spec), found, strict=True) if column.role == "Key"]
        )
        return found


def _place(one: tuple[Said, Any]) -> Said:
    return one[0]


def _combine(role: str, values: Sequence[Any]) -> Any:
    match role:
        case "Sum":
            return sum(values) if isinstance(values[0], int) else reduce(EXACT.add, values)
        case "Min":
            return min(values)
        case "Max":
            return max(values)
        case _:
            return values[0]


@dataclass(slots=True)
class _Context:
    """`cls` is the state's."""

    number: int
    spec: HistorySpec
    views: list[_View]
    cls: Any = field(init=False)
    fields: made.Fields = field(init=False)
    states: dict[str, tuple[int, int, Any]] = field(default_factory=dict)
    """By stream: version, partition, state."""

    def __post_init__(self) -> None:
        self.cls = make_dataclass("State", [*(name for name, _ in self.spec.state), made.SEEN])
        self.fields = made.Fields({name: STATES[kind] for name, kind in self.spec.state})

    def initial(self) -> Any:
        return self.cls(*(STATES[kind].good[0] for _, kind in self.spec.state), "")

    def take(self, partition: int, offset: int, time: datetime, stream: str, record: Mapping[str, Any]) -> None:
        version, _, before = self.states.get(stream, (0, 0, None)) if stream in self.states else (0, 0, self.initial())
        event = SimpleNamespace(**record["data"], noted=record["type"] == "Noted")
        state = made.state(self.fields, before, event)
        after = self.cls(*(_read(KEPT, kind, getattr(state, name)) for name, kind in self.spec.state), state.seen)
        self.states[stream] = (version + 1, partition, after)
        at = At(stream, version + 1, partition, offset, time)
        for view in self.views:
            view.take(at, event, after)


def expect(
    logs: Sequence[Sequence[Entry]],
    specs: Mapping[int, HistorySpec],
    skips: Sequence[Any] = (),
    ends: Mapping[int, int] | None = None,
) -> Result:
    """Fold the log of these histories, up to these offsets."""
    left_out = {(one.view, one.stream, version) for one in skips for version in range(one.first, one.last + 1)}
    contexts = {}
    for number, spec in specs.items():
        views = []
        for view in spec.views:
            name = view_name(number, view)
            views.append(_View(number, view, {(stream, version) for of, stream, version in left_out if of == name}))
        contexts[context_name(number)] = _Context(number, spec, views)
    readers = [Reader() for _ in logs]
    outcomes: list[tuple[str, ...]] = []
    for partition, log in enumerate(logs):
        for offset, entry in enumerate(log[: None if ends is None else ends[partition]]):
            commit = readers[partition].read(offset, entry.value)
            if commit is None:
                continue
            time = EPOCH + timedelta(milliseconds=entry.time_ms)
            stream = commit["stream"]
            outcomes.append(tuple(map(shown, outcome_row(commit, time, partition))))
            for record in commit["events"]:
                contexts[stream.partition("/")[0]].take(partition, offset, time, stream, record)
    rows, read = {"command_outcomes": outcomes}, dict[str, list[tuple[str, ...]]]()
    reached: Counter[str] = Counter()
    parked: set[Parked] = set()
    stops: dict[tuple[str, int], Stop] = {}
    for context in contexts.values():
        rows[f"streams_{context_name(context.number)}"] = [
            (shown(stream), shown(version), made.tell(state), made.tell(state.seen), shown(partition))
            for stream, (version, partition, state) in context.states.items()
        ]
        for one in context.views:
            rows[one.name] = one.told()
            if one.spec.letter == "s":
                read[one.name] = one.read()
            reached += one.reached
            parked |= set(one.parked.values())
            stops |= {(one.name, partition): stop for partition, stop in one.stops.items()}
    return Result([reader.place for reader in readers], rows, parked, stops, reached, read)


def found_rows(spec: HistorySpec | None, view: str, rows: Sequence[Sequence[Any]]) -> list[tuple[str, ...]]:
    """A table's rows, in the oracle's words. `spec` is the view's history, where it has one."""
    if spec is None or not view.startswith("streams_"):
        return [tuple(map(shown, row)) for row in rows]
    cls = make_dataclass("State", [*(name for name, _ in spec.state), made.SEEN])
    found: list[tuple[str, ...]] = []
    for stream, version, text, partition in rows:
        data = json.loads(text) if isinstance(text, str | bytes) else text
        state = cls(*(_read(FROM_JSON, kind, data[name]) for name, kind in spec.state), data["seen"])
        found.append((shown(stream), shown(version), made.tell(state), made.tell(state.seen), shown(partition)))
    return found


def differences(view: str, wanted: Sequence[tuple[str, ...]], found: Sequence[tuple[str, ...]]) -> list[str]:
    missing, extra = Counter(wanted) - Counter(found), Counter(found) - Counter(wanted)
    return [
        *(f"{view}: missing {row}" for row in missing.elements()),
        *(f"{view}: too many {row}" for row in extra.elements()),
    ]
