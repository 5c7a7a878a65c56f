"""make test: functions without a store.

A value that no column can hold gets no further than its command, or the decision that made it."""

from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Annotated, Any, NamedTuple

import msgspec
import pytest
from hypothesis import find, given, settings
from hypothesis import strategies as st
from pydantic import AfterValidator, AwareDatetime, Field, TypeAdapter, ValidationError, conint

from commands.decision import Versioned, decide
from commands.intake import Intake, receive, validator
from domain.engine.contexts import Context
from domain.engine.storable import require_exact
from domain.engine.value_limits import LARGEST_INT, SMALLEST_INT, within_limits
from domain.language import Moment, fact
from infra.log.records import Command, Reason, Record, encode
from projections.engine.views.core_views import shape_of
from tools.testing.facts import facts

NOON = "2026-12-01T12:00:00Z"
NO_ZONE, TOO_LATE = "2026-12-01T12:00:00", "9999-12-31T23:59:59-12:00"
ZONE, YEARS, BITS, DIGITS = "no time zone", "in UTC it is before", "does not fit into 64 bits", "more than 1000 digits"
OF_DAY = "it has a time zone"

Wide = Annotated[int, Field(ge=-(10**40), le=10**40)]
InUtc = Annotated[datetime, AfterValidator(lambda time: time if time.tzinfo else time.replace(tzinfo=UTC))]


@dataclass(frozen=True, slots=True)
class Plain:
    count: int
    price: Decimal = Decimal(0)


class Pair(NamedTuple):
    many: int
    at: datetime


@fact
class Part:
    at: datetime
    counts: dict[str, int] = field(default_factory=dict)


@fact
class Slot:
    """Of all that may be beyond the limits, one each; `at` and `wide` may not."""

    at: Moment
    wide: Wide = 0
    start: datetime | None = None
    count: int = 0
    above: Annotated[int, Field(ge=0)] = 0
    parts: tuple[Part, ...] = ()
    plain: Plain | None = None
    pair: Pair | None = None
    trio: tuple[int, datetime, str] | None = None
    keyed: dict[int, bool] = field(default_factory=dict)
    price: Decimal | None = None
    given: InUtc | None = None
    opens: time | None = None
    openings: dict[time, tuple[time, ...]] = field(default_factory=dict)
    text: str = ""
    nested: dict[str, tuple[str, ...]] = field(default_factory=dict)


@fact
class Bounded:
    at: Moment
    aware: tuple[AwareDatetime | None, ...] = ()
    hours: Annotated[int, Field(ge=1, lt=24)] = 1
    wide: Wide = 0


@dataclass(frozen=True, slots=True)
class State:
    pass


SLOTS = Context("slots", {"Slot": Slot}, {"Slot": Slot}, State, 1, lambda command, _: [command], lambda state, _: state)
BEYOND: list[tuple[str, Any, str]] = [
    ("start", NO_ZONE, ZONE),
    ("start", TOO_LATE, YEARS),
    ("start", "0001-01-01T00:00:00+01:00", YEARS),
    ("count", 2**63, BITS),
    ("count", -(2**63) - 1, BITS),
    ("above", 2**63, BITS),
    ("parts.0.at", [{"at": NO_ZONE}], ZONE),
    ("parts.1.counts.a", [{"at": NOON}, {"at": NOON, "counts": {"a": 2**64}}], BITS),
    ("plain.count", {"count": 2**63}, BITS),
    ("pair.many", [2**63, NOON], BITS),
    ("trio.1", [1, NO_ZONE, ""], ZONE),
    ("keyed.9223372036854775808", {str(2**63): True}, BITS),
    ("price", "1E+1000", DIGITS),
    ("price", "1E-1001", DIGITS),
    ("opens", "08:00:00Z", OF_DAY),
    ("opens", "08:00:00+01:00", OF_DAY),
    ("openings.08:00:00.1", {"08:00:00": ["09:00:00", "10:00:00-02:00"]}, OF_DAY),
]


def with_value(path: str, value: Any) -> bytes:
    return msgspec.json.encode({"at": NOON, path.partition(".")[0]: value})


def rejection(body: bytes, *events: Slot) -> Reason:
    """What the handler records for this command, of which `decide` makes these events."""
    context = replace(SLOTS, decide=lambda command, state: list(events))
    command = encode(Command("a", "slots/1", "Slot", msgspec.Raw(body)))
    received = receive(Record(0, 0, 0, b"slots/1", command), Intake("topic", 1, contexts={"slots": context}))
    reason = decide(received, Versioned(0, State()), epoch=1, seq=1, max_bytes=100_000).commit.reason
    assert reason is not None
    return reason


@pytest.mark.parametrize(("path", "value", "why"), BEYOND, ids=str)
def test_a_command_with_what_no_column_can_hold_is_refused_by_field(path: str, value: Any, why: str) -> None:
    """At the door, and by the handler, which other writers reach too."""
    body = with_value(path, value)
    with pytest.raises(ValidationError) as refused:
        validator(Slot)(body)
    [problem] = refused.value.errors()
    assert ".".join(map(str, problem["loc"])) == path
    assert why in problem["msg"]
    assert rejection(body) == Reason("malformed", f"{path}: {problem['msg']}")


@pytest.mark.parametrize(("path", "value", "why"), BEYOND, ids=str)
def test_what_decide_makes_beyond_them_is_failed_and_what_the_log_has_of_it_is_read(
    path: str, value: Any, why: str
) -> None:
    old = msgspec.json.decode(with_value(path, value), type=Slot)
    reason = rejection(with_value("count", 1), old)
    assert (reason.code, f"{path}: " in reason.message, why in reason.message) == ("failed", True, True)
    assert SLOTS.readers["Slot"][1](msgspec.json.encode(old)) == old


def test_a_decimal_of_a_plain_dataclass_that_is_no_number_is_failed() -> None:
    reason = rejection(
        with_value("count", 1), Slot(at=datetime(2026, 12, 1, tzinfo=UTC), plain=Plain(1, Decimal("Infinity")))
    )
    assert (reason.code, "plain.price: it is not a finite number" in reason.message) == ("failed", True)


def test_what_a_field_can_not_be_is_told_in_words_of_json() -> None:
    assert rejection(b'{"at":"2026-12-01T12:00:00Z","until":1}').message == "until: There is no such field"


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("text", "a\0"),
        ("nested.a.1", {"a": ["", "\0"]}),
        ("nested", {"\0": []}),
    ],
)
def test_a_nul_is_named_by_its_field(path: str, value: Any) -> None:
    assert rejection(with_value(path, value)).message.startswith(f"{path} holds a NUL")


def test_a_text_with_a_nul_that_decide_makes_is_failed() -> None:
    reason = rejection(with_value("count", 1), Slot(at=datetime(2026, 12, 1, tzinfo=UTC), text="\0"))
    assert (reason.code, "NUL" in reason.message) == ("failed", True)


def test_types_that_exclude_such_values_are_not_checked_at_all() -> None:
    read = TypeAdapter(Bounded).validator.validate_json
    assert within_limits(Bounded, read) is read
    counted: type = fact(type("Counted", (), {"__annotations__": {"minutes": conint(gt=0, le=59)}}))
    assert within_limits(counted, read) is read
    assert validator(Slot)(msgspec.json.encode({"at": NOON, "wide": 10**40})).wide == 10**40


def test_a_moment_is_kept_in_utc_and_refuses_what_is_none() -> None:
    require_exact(Bounded)
    made = validator(Bounded)(b'{"at":"2026-12-01T13:00:00.1234567+01:00","aware":["2026-12-01T13:00:00+01:00",null]}')
    assert repr(made.at) == repr(datetime(2026, 12, 1, 12, 0, 0, 123456, UTC))
    assert repr(made.aware) == repr((datetime(2026, 12, 1, 12, tzinfo=UTC), None))
    assert repr(msgspec.json.decode(msgspec.json.encode(made), type=Bounded)) == repr(made)
    for wrong, why in ((NO_ZONE, ZONE), (TOO_LATE, YEARS)):
        for body in ({"at": wrong}, {"at": NOON, "aware": [wrong]}):
            with pytest.raises(ValidationError, match=why):
                validator(Bounded)(msgspec.json.encode(body))


@settings(deadline=None)
@given(st.data())
def test_generated_commands_are_valid_and_have_times_of_every_zone(data: st.DataObject) -> None:
    made = data.draw(facts(Bounded))
    assert validator(Bounded)(msgspec.json.encode(made)) == made
    assert made.at.utcoffset() == timedelta(0)
    plain = data.draw(facts(Pair))
    assert SMALLEST_INT <= plain.many <= LARGEST_INT


@dataclass(frozen=True, slots=True)
class Kept:
    at: Moment | None = None
    price: Annotated[Decimal, Field(ge=0, le=10_000, decimal_places=2)] = Decimal(0)


def test_the_shape_of_a_state_is_the_same_in_every_process() -> None:
    assert " at 0x" not in shape_of(Kept)


@fact
class Priced:
    price: Annotated[Decimal, Field(ge=0, le=10_000, decimal_places=2)]
    other: Annotated[Decimal, Field(gt=0, lt=5)]
    dozens: Annotated[int, Field(ge=0, le=10**24, multiple_of=12)]
    on: Annotated[date, Field(ge=date(2020, 1, 1), le=date(2020, 1, 2))]
    until: Moment
    unit: str = "what no chance makes"


@fact
class Measured:
    """Each field by itself is found by chance in vain, and all together never."""

    width: Annotated[float, Field(ge=0, le=1000)]
    height: Annotated[float, Field(gt=0, lt=1e-3)]
    share: Annotated[float, Field(ge=0.5, le=10, multiple_of=0.5)]
    steps: Annotated[Decimal, Field(ge=1, le=3, multiple_of=Decimal("0.25"))]
    digest: Annotated[bytes, Field(min_length=32, max_length=32)]
    takes: Annotated[timedelta, Field(ge=timedelta(0), le=timedelta(hours=1))]
    opens: Annotated[time, Field(ge=time(8), lt=time(8, 1))]


@settings(deadline=None)
@given(facts(Measured))
def test_generated_values_keep_to_narrow_bounds_of_every_type(made: Measured) -> None:
    assert validator(Measured)(msgspec.json.encode(made)) == made


def test_generated_values_keep_to_bounds_of_every_kind_and_reach_them() -> None:
    assert find(facts(Priced), lambda one: one.dozens > 10**23).price <= 10_000
    assert find(facts(Priced), lambda one: one.until == datetime.min.replace(tzinfo=UTC))
    assert find(facts(Priced), lambda one: one.until == datetime.max.replace(tzinfo=UTC))


def test_generated_facts_leave_out_what_has_a_default() -> None:
    assert find(facts(Priced), lambda one: one.unit == "what no chance makes")
