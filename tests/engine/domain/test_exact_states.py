"""make test: one process. Each fold of a state gives what the database returns; numbers are read exactly, or refused."""

from __future__ import annotations

import hashlib
import json
from datetime import UTC, timedelta, timezone
from typing import Any
from zoneinfo import ZoneInfo

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commands.decision import Versioned, decide
from commands.intake import Intake, fingerprint_of, receive
from commands.overlay import Overlay
from infra.database.connect import connect
from infra.domain_model.storable import comparable
from infra.log.records import Command, Commit, Record, decode_event, encode
from infra.log.rule import Counted
from infra.settings import Settings
from projections.engine.fold.fold import Held, StreamState, decode, fold, keys_to_load
from projections.engine.fold.plan import Plan
from projections.engine.store.commit import prepare
from projections.engine.store.rows import loaded, select_rows, writes
from projections.engine.views.core_views import snapshot_view
from tests.engine.domain.hoard import HOARD, Keep, Kept, Mood, Thing
from tests.engine.projections.viewkit import make_tables

VIEW = snapshot_view(HOARD)
PLAN = Plan({VIEW.name: VIEW}, {HOARD.name: HOARD})
INTAKE = Intake("topic", 1, contexts={HOARD.name: HOARD})

FLOATS = st.floats(allow_nan=False, allow_infinity=False)
TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8)
ZONES = st.sampled_from([None, UTC, timezone(timedelta(hours=5, minutes=30)), ZoneInfo("Europe/Berlin")])
KEPT = st.builds(
    Kept,
    careless=st.booleans(),
    count=st.integers() | st.sampled_from([2**63, 2**64, -(2**63) - 1, 10**200]),
    weight=FLOATS,
    size=st.integers() | FLOATS | st.none(),
    name=TEXTS,
    raw=st.binary(max_size=8),
    on=st.dates() | st.none(),
    at=st.datetimes(timezones=ZONES) | st.none(),
    until=st.times() | st.none(),
    took=st.timedeltas(),
    amount=st.decimals(allow_nan=False, allow_infinity=False),
    mark=st.uuids() | st.none(),
    mood=st.sampled_from(Mood),
    side=st.sampled_from(["left", "right", 3]),
    things=st.lists(st.builds(Thing, name=TEXTS, weight=FLOATS | st.none()), max_size=3).map(tuple),
    pair=st.tuples(st.integers(), TEXTS) | st.none(),
    names=st.frozensets(TEXTS, max_size=4),
    counts=st.dictionaries(TEXTS, st.integers(), max_size=3),
    days=st.dictionaries(st.dates(), st.lists(FLOATS, max_size=2).map(tuple), max_size=2),
)


def _drawn(count: int) -> list[list[Kept]]:
    """Histories of a few events."""
    found: list[list[Kept]] = []

    @settings(max_examples=count, deadline=None, database=None)
    @given(st.lists(KEPT, min_size=1, max_size=3))
    def draw(history: list[Kept]) -> None:
        found.append(history)

    draw()
    return found


def _commits(number: int, history: list[Kept]) -> tuple[list[Commit], list[Versioned]]:
    """The commits of commands that keep these, as a handler decides them; and its states after them."""
    commits, states = [], [Versioned(0, HOARD.initial)]
    stream = f"hoard/{number}"
    for n, kept in enumerate(history):
        command = Command(str(n), stream, "Keep", msgspec.Raw(msgspec.json.encode(Keep(kept=kept))))
        received = receive(Record(0, n, 0, stream.encode(), encode(command)), INTAKE)
        decided = decide(received, states[-1], epoch=0, seq=1, max_bytes=1_000_000)
        commit = decode_event(Record(0, n, 0, None, decided.value))
        assert isinstance(commit, Commit)
        if commit.reason is None:
            commits.append(commit)
            states.append(decided.after)
        else:
            assert commit.reason.code in ("failed", "malformed"), commit.reason
            assert decided.after is states[-1]
    return commits, states


def _same(one: Any, other: Any) -> bool:
    return bool(comparable(one) == comparable(other))


def _folded(counted: list[Counted], held: Held) -> dict[str, StreamState]:
    batch = decode(PLAN, 0, counted)
    for name, keys in keys_to_load(batch, held).items():
        held.rows[name].update(dict.fromkeys(keys))
    changes = fold(PLAN, batch, held)
    held.merge(changes)
    return changes.states[VIEW.name]


def test_every_fold_of_any_history_is_what_the_database_gives_back(world: Settings) -> None:
    make_tables(world, {VIEW.name: VIEW})
    histories = _drawn(150)
    assert any(kept.careless for history in histories for kept in history)
    decided: dict[str, Versioned] = {}
    logs: dict[str, list[Counted]] = {}
    for number, history in enumerate(histories):
        commits, states = _commits(number, history)
        if not commits:
            continue
        stream = f"hoard/{number}"
        decided[stream] = states[-1]
        logs[stream] = [Counted(n, 0, commit) for n, commit in enumerate(commits)]
        overlay = Overlay()
        overlay.add_read(logs[stream])
        assert _same(overlay.state(stream, None, HOARD), states[-1])
    assert len(decided) > len(histories) / 2

    with connect(world, "test") as db:
        prepare(db)
        for longest in range(3):  # one event of each stream at a time, from what the database gives back each time
            live = [log[longest] for log in logs.values() if len(log) > longest]
            if not live:
                continue
            query, parameters, _ = select_rows(VIEW, VIEW.table_name, [one.commit.stream for one in live])
            held = Held(PLAN)
            held.rows[VIEW.name].update(loaded(VIEW, HOARD.state, db.execute(query, parameters).fetchall()))
            batch = decode(PLAN, 0, live)
            held.rows[VIEW.name].update(dict.fromkeys(keys_to_load(batch, held).get(VIEW.name, ())))
            for statement in writes(VIEW, VIEW.table_name, [fold(PLAN, batch, held)]):
                db.execute(statement.query, statement.parameters)
        query, parameters, _ = select_rows(VIEW, VIEW.table_name, list(decided))
        stored = loaded(VIEW, HOARD.state, db.execute(query, parameters).fetchall())
        as_the_handler_asks = db.execute(
            b"select json_agg(json_build_array(stream, version, state))::text from " + VIEW.table_name.encode()
        ).fetchone()

    assert set(stored) == set(decided)
    assert as_the_handler_asks is not None
    read: dict[str, Any] = {
        stream: (version, msgspec.json.decode(state, type=HOARD.state))
        for stream, version, state in msgspec.json.decode(
            as_the_handler_asks[0], type=list[tuple[str, int, msgspec.Raw]]
        )
    }
    for stream, state in stored.items():
        of_handler = (decided[stream].version, decided[stream].state)
        assert _same(of_handler, state)
        assert _same(read[stream], state)
        assert _same(_folded(logs[stream], Held(PLAN))[stream], state), "in one batch, as a rebuild does it"
        held = Held(PLAN)
        one_by_one = [_folded([one], held)[stream] for one in logs[stream]]
        assert _same(one_by_one[-1], state)


@pytest.mark.parametrize("number", ["1e400", "-1e400", "NaN", "Infinity", "1" + "0" * 400])
def test_a_number_that_is_not_finite_enters_nowhere(number: str) -> None:
    body = msgspec.json.encode(Keep(kept=Kept(name="x"))).replace(b'"weight":0.0', f'"weight":{number}'.encode())
    command = Command("a", "hoard/1", "Keep", msgspec.Raw(body))
    value = encode(command)
    received = receive(Record(0, 0, 0, b"hoard/1", value), INTAKE)
    assert received.rejection is not None
    assert received.rejection.code == "malformed"


def test_a_state_that_can_not_be_stored_is_a_recorded_answer() -> None:
    commits, states = _commits(1, [Kept(careless=True, weight=1e300), Kept(count=5)])
    assert [commit.version for commit in commits] == [1]
    assert states[-1].state.count == 5
    command = Command(
        "a", "hoard/1", "Keep", msgspec.Raw(msgspec.json.encode(Keep(kept=Kept(careless=True, weight=1e300))))
    )
    received = receive(Record(0, 0, 0, b"hoard/1", encode(command)), INTAKE)
    answer = decide(received, Versioned(0, HOARD.initial), epoch=0, seq=1, max_bytes=1_000_000).commit
    assert answer.reason is not None
    assert answer.reason.code == "failed"
    assert "Lost: State can't be stored: JSON does not give back its value.total (inf)" in answer.reason.message


# Numbers are taken as they are written, or not at all.


def _numbered(number: str) -> Command:
    return Command("a", "purse/1", "Fill", msgspec.Raw(b'{"cents":' + number.encode() + b"}"))


@pytest.mark.parametrize(
    "number",
    [
        "0.1000000000000000055",
        "0.10000000000000001",
        "9007199254740993.0",
        "123456789012345678.12",
        "1e-400",
        "1e400",
        "-1e400",
        "1e-99999999999999999999",
        "0." + "1" * 1_000,
    ],
)
def test_a_number_that_would_be_read_as_another_one_is_refused(number: str) -> None:
    with pytest.raises(msgspec.DecodeError, match="does not fit a float"):
        fingerprint_of(_numbered(number))


@pytest.mark.parametrize(
    "number", ["0.1", "12.50", "1e3", "1E3", "1e22", "-0.0", "5e-324", "1.7976931348623157e308", "0.30000000000000004"]
)
def test_what_a_float_is_written_as_keeps_the_fingerprint_it_had(number: str) -> None:
    body = json.loads(number)
    before = msgspec.json.encode(("Fill", None, {"cents": body}), order="sorted")
    assert fingerprint_of(_numbered(number)) == hashlib.blake2b(before, digest_size=16).hexdigest()


@settings(max_examples=3 * settings().max_examples, deadline=None)
@given(FLOATS)
def test_every_float_as_it_is_written_is_taken(number: float) -> None:
    for text in {repr(number), json.dumps(number), msgspec.json.encode(number).decode(), f"{number!r}"}:
        fingerprint_of(_numbered(text))


@given(st.decimals(allow_nan=False, allow_infinity=False, places=3), st.decimals(allow_nan=False, allow_infinity=False))
def test_two_numbers_never_have_one_fingerprint(one: Any, other: Any) -> None:
    def known(number: Any) -> str | None:
        text = format(number, "f")
        try:
            return fingerprint_of(_numbered(text if "." in text else f"{text}.0"))
        except msgspec.DecodeError:
            return None

    if one != other and known(one) is not None:
        assert known(one) != known(other)
