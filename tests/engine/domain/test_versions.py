"""make test + test-all: a zip file takes processes. Bodies of older versions are led to the class of today by upcasters."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar
from uuid import UUID

import msgspec
import pytest
from pydantic import AfterValidator

from commands.intake import Intake, Received, Rejected, command_of, fingerprint_of, receive
from domain.engine.contexts import BadContext, Context, UnknownEvent, UnreadableEvent, context_of, decode_event
from domain.engine.storable import comparable
from domain.engine.versions import stored_type
from domain.language import Body, Cents, Text, fact, upcaster
from infra.log.partitioner import partition_of
from infra.log.records import Command, EventRecord, Record, encode
from infra.log.rule import START, Counted, read
from infra.settings import Settings
from projections.engine.fold import errors
from projections.engine.fold.fold import RowCache, decode, fold
from projections.engine.fold.plan import Plan
from projections.engine.views.core_views import snapshot_view
from tests.engine import purse
from tests.engine.domain.test_contexts import module
from tests.engine.log import commit, opening, records
from tests.engine.purse import Spend, Spent, State, TooLittle
from tests.engine.spine import produce, set_up
from tools.testing.fixtures import ROOT, Samefold


@fact
class Filled:
    """Version 1 had `cents` and `note`, version 2 a currency, and in version 3 `cents` became `amount`."""

    VERSION: ClassVar[int] = 3
    amount: Cents
    currency: Text
    on: date = date(2020, 1, 1)


@upcaster(Filled, 1)
def with_currency(body: Body) -> Body:
    body.pop("note", None)
    return {**body, "currency": "CZK"}


@upcaster(Filled, 2)
def amount(body: Body) -> Body:
    return {"amount": body.pop("cents"), **body}


@fact
class Fill:
    VERSION: ClassVar[int] = 2
    amount: Cents


@upcaster(Fill, 1)
def fill_amount(body: Body) -> Body:
    return {"amount": body["cents"]}


def decide(command: Fill | Spend, state: State) -> list[Filled | Spent]:
    match command:
        case Fill(amount=amount):
            return [Filled(amount=amount, currency="CZK")]
        case Spend(cents=cents):
            if cents > state.cents:
                raise TooLittle
            return [Spent(cents=cents)]


def evolve(state: State, event: Filled | Spent) -> State:
    match event:
        case Filled(amount=amount):
            return State(state.cents + amount)
        case Spent(cents=cents):
            return State(state.cents - cents)


def later(**other: object) -> Context:
    """The purse of a later release."""
    names = vars(purse) | {"Event": Filled | Spent, "Command": Fill | Spend, "decide": decide, "evolve": evolve}
    steps = {"with_currency": with_currency, "amount": amount, "fill_amount": fill_amount}
    return context_of(module(**(names | steps | other)))


def measured(step: Callable[[Body], Body] = lambda body: body, **fields: Any) -> tuple[Any, Callable[..., object]]:
    """An event with these fields, at version 2, to which this step leads; and what reads stored ones."""
    kind: Any = fact(type("Measured", (), {"__annotations__": {"VERSION": ClassVar[int], **fields}, "VERSION": 2}))

    def to_2(body: Body) -> Body:
        return step(body)

    context = later(Event=kind, step=upcaster(kind, 1)(to_2), amount=None, with_currency=None)
    return kind, partial(decode_event, context)


LATER = later()
NOW = Filled(amount=5, currency="CZK")


def received(kind: str, body: bytes, context: Context = LATER) -> Received:
    command = Command("c1", "made/1", kind, msgspec.Raw(body))
    record = Record(0, 0, 0, b"made/1", encode(command))
    assert partition_of("made/1", 1) == 0
    return receive(record, Intake("topic", 1, contexts={"made": context}))


# what is read


@pytest.mark.parametrize(
    ("stored", "body"),
    [
        ("Filled", b'{"cents":5}'),
        ("Filled", b'{"cents":5,"note":"found"}'),
        ("Filled/2", b'{"cents":5,"currency":"CZK"}'),
        ("Filled/3", b'{"amount":5,"currency":"CZK"}'),
    ],
)
def test_a_body_of_each_version_becomes_the_class_of_today(stored: str, body: bytes) -> None:
    assert decode_event(LATER, stored, body) == NOW
    assert decode_event(LATER, stored, msgspec.Raw(body)) == NOW


def test_the_version_decides_where_two_versions_have_the_same_fields() -> None:
    """Version 1 was in kilograms."""
    kind, read = measured(lambda body: {"grams": 1_000 * body["grams"]}, grams=int)
    assert read("Measured", b'{"grams":5}') == kind(grams=5_000)
    assert read("Measured/2", b'{"grams":5}') == kind(grams=5)


def test_new_events_are_stored_under_the_class_s_version() -> None:
    assert stored_type(Filled) == "Filled/3"
    assert stored_type(Spent) == "Spent"
    assert LATER.stored[Filled][0] == "Filled/3"


@pytest.mark.parametrize("stored", ["Filled/4", "Filled/1", "Filled/0", "Filled/03", "Filled/", "Filled/x", "filled"])
def test_a_type_that_no_release_before_this_one_has_written_is_unknown(stored: str) -> None:
    with pytest.raises(UnknownEvent, match=rf"'made\.{stored}'"):
        decode_event(LATER, stored, b'{"cents":5}')


def test_numbers_survive_an_upcaster_exactly() -> None:
    kind, read = measured(whole=int, real=float, text=str)
    body = b'{"whole":123456789012345678901234567890,"real":0.1,"text":"\\u0041\xc3\xa4"}'
    assert read("Measured", body) == kind(whole=123456789012345678901234567890, real=0.1, text="Aä")


def test_what_an_upcaster_leads_to_is_the_very_same_as_what_was_stored_so() -> None:
    """Times in their zone and decimals with their digits, too: rows and states are made of them."""
    kind, read = measured(at=datetime, length=timedelta, price=Decimal, ident=UUID, parts=tuple[Text, ...])
    at = datetime(2020, 1, 1, 12, tzinfo=UTC)
    event = kind(at=at, length=timedelta(minutes=5), price=Decimal("1.50"), ident=UUID(int=5), parts=("a", "b"))
    older, newer = (read(stored, msgspec.json.encode(event)) for stored in ("Measured", "Measured/2"))
    assert comparable(older) == comparable(newer) == comparable(event)


def test_the_fold_reads_all_versions_in_one_batch() -> None:
    view = snapshot_view(LATER)
    plan = Plan({view.name: view}, {"made": LATER})
    events = [("Filled", b'{"cents":5}'), ("Filled/2", b'{"cents":7,"currency":"CZK"}'), ("Spent", b'{"cents":1}')]
    batch = decode(plan, 0, [_counted(*[EventRecord(kind, msgspec.Raw(body)) for kind, body in events])])
    assert fold(plan, batch, RowCache(plan)).states[view.name] == {"made/1": (3, State(11))}


def _counted(*events: EventRecord) -> Counted:
    value = commit(0, 1, stream="made/1", version=len(events), events=list(events), command_offset=1)
    _, [one], _ = read(START, records([opening(), value]))
    return one


# what can't be read


def _none(_body: Body) -> Any:
    return None


@pytest.mark.parametrize(
    ("step", "why"),
    [
        (lambda body: {"cents": body["missing"]}, r"upcasters from version 1 of Filled failed: KeyError: 'missing'"),
        (lambda _: sys.exit(1), r"upcasters from version 1 of Filled failed: SystemExit"),
        (_none, r"upcasters from version 1 of Filled failed: TypeError: `_none` returned a NoneType, not a dict"),
        (lambda body: {"cents": object()}, r"upcasters from version 1 of Filled failed: TypeError"),
        (
            lambda body: {"cents": -5, "currency": "CZK"},
            r"upcasters from version 1 return no Filled: amount: Input should be greater than or equal to 1",
        ),
    ],
)
def test_an_upcaster_that_fails_stops_the_readers_by_name_with_the_version(
    step: Callable[[Body], Body], why: str
) -> None:
    def wrong(body: Body) -> Body:
        return step(body)

    wrong.__name__ = step.__name__
    context = later(with_currency=upcaster(Filled, 1)(wrong))
    with pytest.raises(UnreadableEvent, match=why) as stopped:
        decode_event(context, "Filled", b'{"cents":5}')
    assert "Correct the upcaster" in stopped.value.hint
    view = snapshot_view(context)
    record = EventRecord("Filled", msgspec.Raw(b'{"cents":5}'))
    with pytest.raises(errors.UnreadableEvent, match=why):
        decode(Plan({view.name: view}, {"made": context}), 0, [_counted(record)])


def test_a_body_that_is_no_object_stops_the_readers() -> None:
    for body in (b"[]", b"null", b"{", b'"\xff"'):
        with pytest.raises(UnreadableEvent):
            decode_event(LATER, "Filled", body)


def test_history_shows_the_events_of_today_and_as_the_log_has_them(
    world: Settings, samefold: Samefold, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What can't be read is shown as it is stored."""
    monkeypatch.setattr("tools.cli.history.contexts", lambda: {"made": LATER})
    set_up(world)
    written = [("Filled", {"cents": 5, "note": "found"}), ("Filled/3", {"amount": 7, "currency": "EUR"})]
    written += [("Spent", {"cents": 1}), ("Filled/4", {"much": 1}), ("Filled", {"dollars": 5})]
    events = [EventRecord(kind, msgspec.Raw(msgspec.json.encode(data))) for kind, data in written]
    for value in (opening(), commit(0, 1, stream="made/1", version=5, events=events, command_offset=1)):
        produce(world, world.events_topic, partition_of("made/1", world.partitions), b"made/1", value)

    def shown(*options: str) -> Any:
        return json.loads(samefold("history", "made/1", "--json", *options, settings=world).stdout)["events"]

    stored = [{"type": kind, "data": data} for kind, data in written]
    assert shown("--stored") == stored
    today = {"amount": 5, "currency": "CZK", "on": "2020-01-01"}
    *readable, unreadable = shown()
    assert readable == [{"type": "Filled/3", "data": today, "stored": "Filled"}, *stored[1:4]]
    assert "KeyError: 'cents'" in unreadable.pop("unreadable")
    assert unreadable == stored[4]
    assert "Filled/3, stored as Filled" in samefold("history", "made/1", settings=world).stdout
    assert "unreadable for this code" in samefold("history", "made/1", settings=world).stdout
    assert "stored as" not in samefold("history", "made/1", "--stored", settings=world).stdout


# commands in flight


def test_a_command_in_flight_is_led_to_the_class_of_today() -> None:
    both = received("Fill", b'{"cents":5}'), received("Fill/2", b'{"amount":5}')
    assert [command_of(one) for one in both] == [Fill(amount=5)] * 2


@pytest.mark.parametrize(
    ("kind", "body", "code", "why"),
    [
        ("Fill", b'{"cents":0}', "malformed", "amount: Input should be greater"),
        ("Fill", b"[]", "malformed", "the body is no JSON object"),
        ("Fill", b"{}", "failed", "KeyError: 'cents'"),
        ("Fill/3", b'{"amount":5}', "malformed", "knows no command 'Fill/3'"),
    ],
)
def test_a_command_in_flight_that_can_not_be_led_there_is_rejected(kind: str, body: bytes, code: str, why: str) -> None:
    with pytest.raises(Rejected) as rejected:
        command_of(received(kind, body))
    assert rejected.value.reason.code == code
    assert why in rejected.value.reason.message


def test_a_repeated_command_has_the_fingerprint_that_it_had_before_the_release() -> None:
    """The client sends the same request again, and meets a newer API."""
    before, after = (Command("c1", "made/1", kind, msgspec.Raw(b'{"cents":5}')) for kind in ("Fill", "Fill/2"))
    assert fingerprint_of(before) == fingerprint_of(after)
    assert fingerprint_of(before) != fingerprint_of(Command("c1", "made/1", "Fill", msgspec.Raw(b'{"cents":6}')))


# what is refused at the start


def test_a_gap_is_refused_with_the_lines_to_write() -> None:
    with pytest.raises(BadContext, match="nothing leads from version 2 to 3") as refused:
        later(amount=None)
    assert "@upcaster(Filled, 2)\ndef filled_2(body: Body) -> Body:" in refused.value.hint


@pytest.mark.parametrize(
    ("kind", "version", "why"),
    [
        # so that steps can't lead in a circle
        *((Filled, n, f"`more` starts from version {n} of Filled, which is at version 3") for n in (0, 3, 4)),
        (Filled, 1, "both start from version 1 of Filled"),
        (Fill, 1, "`more` is for Fill, which is no event or command of this context"),
    ],
)
def test_a_step_too_many_is_refused(kind: type, version: int, why: str) -> None:
    def more(body: Body) -> Body:
        return body

    others = {"Command": Spend, "fill_amount": None} if kind is Fill else {}
    with pytest.raises(BadContext, match=why):
        later(more=upcaster(kind, version)(more), **others)


def test_an_upcaster_may_be_imported_under_another_name() -> None:
    assert decode_event(later(again=with_currency), "Filled", b'{"cents":5}') == NOW


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        *(("VERSION", version, "has VERSION = ") for version in (0, -1, 1.0, "2", None, True, 1_000)),
        *(("stored_as", stored, "is stored as") for stored in ("Filled/2", "", "a b", "2nd")),
    ],
)
def test_a_version_is_a_whole_number_from_1_on_and_a_stored_name_has_none_in_it(
    name: str, value: Any, why: str
) -> None:
    odd: type = fact(type("Odd", (), {"__annotations__": {name: ClassVar[Any], "cents": int}, name: value}))
    with pytest.raises(BadContext, match=why):
        later(Event=odd, amount=None, with_currency=None)


# what an upcaster may be and do


def test_one_function_may_be_the_step_of_several_classes() -> None:
    @fact
    class Lent:
        VERSION: ClassVar[int] = 2
        cents: Cents
        currency: Text

    @fact
    class Repaid(Lent):
        VERSION: ClassVar[int] = 2

    @upcaster(Lent, 1)
    @upcaster(Repaid, 1)
    def in_crowns(body: Body) -> Body:
        return {**body, "currency": "CZK"}

    context = later(Event=Lent | Repaid, in_crowns=in_crowns, amount=None, with_currency=None)
    for kind in (Lent, Repaid):
        assert decode_event(context, kind.__name__, b'{"cents":5}') == kind(cents=5, currency="CZK")


def test_a_number_that_json_has_not_does_not_become_a_null() -> None:
    kind, read = measured(lambda body: {"real": body["real"] and body["real"] * 1e308}, real=float | None)
    assert read("Measured", b'{"real":null}') == kind(real=None)
    with pytest.raises(UnreadableEvent, match=r"upcasters from version 1 of Measured failed: Lost: .*real.*\(inf\)"):
        read("Measured", b'{"real":10.0}')


def test_a_class_s_own_check_that_fails_stops_the_readers_by_name_too() -> None:
    _, read = measured(currency=Annotated[str, AfterValidator({"CZK": "CZK"}.__getitem__)])
    with pytest.raises(UnreadableEvent, match="the upcasters from version 1 return no Measured: KeyError: 'EUR'"):
        read("Measured", b'{"currency":"EUR"}')


@pytest.mark.slow
def test_the_record_of_releases_is_read_in_a_zip_file_too(tmp_path: Path) -> None:
    """As executors may have the code. Whether upcasters lead what was released to today's classes is tested at each start."""
    checkout = tmp_path / "checkout"
    for package in ("domain", "infra", "projections", "commands", "tools"):
        shutil.copytree(ROOT / package, checkout / package, ignore=shutil.ignore_patterns("__pycache__"))
    accounts = checkout / "domain/accounts.py"
    step = "@upcaster(MoneyDeposited, 1)\ndef same(body: Body) -> Body:\n    return {}body\n\n\n"
    text = accounts.read_text().replace(
        "class MoneyDeposited:\n", "class MoneyDeposited:\n    VERSION: ClassVar[int] = 2\n"
    )
    imports = "from typing import ClassVar\nfrom domain.language import Body, upcaster\nfrom domain.language import "

    def started(step: str) -> subprocess.CompletedProcess[str]:
        changed = text.replace("from domain.language import ", imports, 1)
        accounts.write_text(changed.replace("Movement: TypeAlias", step + "Movement: TypeAlias", 1))
        zipped = shutil.make_archive(str(tmp_path / "zipped"), "zip", checkout)
        program = "from domain.engine.contexts import contexts; print(*contexts()['accounts'].readers)"
        run = [sys.executable, "-P", "-c", program]
        return subprocess.run(run, env=os.environ | {"PYTHONPATH": zipped}, capture_output=True, text=True, check=False)

    assert "MoneyDeposited/2" in started(step.format("")).stdout
    assert "a body that was released as MoneyDeposited can't be read" in started(step.format("not ")).stderr
