"""make test: one process. Each fold of a state gives what the database returns; numbers are read exactly, or refused."""

from __future__ import annotations

import hashlib
import json
from datetime import UTC, timedelta, timezone
from typing import Any
from zoneinfo import ZoneInfo

import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from commands.decision import Versioned, decide
from commands.intake import Intake, Received, Rejected, command_of, fingerprint_of, receive
from commands.overlay import Overlay
from domain.engine.storable import comparable
from infra.log.records import Command, Commit, Record, decode_event, encode
from infra.log.rule import Counted
from projections.engine.fold.fold import RowCache, StreamState, decode, fold, keys_to_load
from projections.engine.fold.plan import Plan
from projections.engine.views.core_views import snapshot_view
from tests.engine.domain.hoard import HOARD, Keep, Kept, Mood, Thing

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


def _received(n: int, kept: Kept) -> Received:
    command = Command(str(n), "hoard/1", "Keep", msgspec.Raw(msgspec.json.encode(Keep(kept=kept))))
    return receive(Record(0, n, 0, b"hoard/1", encode(command)), INTAKE)


def _commits(history: list[Kept]) -> tuple[list[Commit], list[Versioned]]:
    """The commits of commands that keep these, as a handler decides them; and its states after them."""
    commits, states = [], [Versioned(0, HOARD.initial)]
    for n, kept in enumerate(history):
        decided = decide(_received(n, kept), states[-1], epoch=0, seq=1, max_bytes=1_000_000)
        commit = decode_event(Record(0, n, 0, None, decided.value))
        assert isinstance(commit, Commit)
        if commit.reason is None:
            commits.append(commit)
            states.append(decided.after)
        else:
            assert commit.reason.code in ("failed", "malformed"), commit.reason
            assert decided.after is states[-1]
    return commits, states


def _folded(counted: list[Counted], held: RowCache) -> StreamState:
    batch = decode(PLAN, 0, counted)
    for name, keys in keys_to_load(PLAN, batch, held).items():
        held.rows[name].update(dict.fromkeys(keys))
    changes = fold(PLAN, batch, held)
    held.merge(changes)
    return changes.states[VIEW.name]["hoard/1"]


@given(st.lists(KEPT, min_size=1, max_size=3))
def test_every_fold_of_any_history_is_what_its_json_gives_back(history: list[Kept]) -> None:
    """And so what the database does, in which `proofs/test_one_fold.py` stores such states."""
    commits, states = _commits(history)
    assume(commits)
    log = [Counted(n, 0, commit) for n, commit in enumerate(commits)]
    overlay, held = Overlay(), RowCache(PLAN)
    overlay.add_read(log)
    read: Any = msgspec.json.decode(msgspec.json.encode(states[-1].state), type=HOARD.state)
    for how, state in {
        "as it was decided": states[-1].state,
        "as another handler reads it": overlay.state("hoard/1", None, HOARD).state,
        "in one batch, as a rebuild does it": _folded(log, RowCache(PLAN))[1],
        "one by one": [_folded([one], held) for one in log][-1][1],
    }.items():
        assert comparable(state) == comparable(read), how


@pytest.mark.parametrize("number", ["1e400", "-1e400", "NaN", "Infinity", "1" + "0" * 400])
def test_a_number_that_is_not_finite_enters_nowhere(number: str) -> None:
    body = msgspec.json.encode(Keep(kept=Kept(name="x"))).replace(b'"weight":0.0', f'"weight":{number}'.encode())
    command = Command("a", "hoard/1", "Keep", msgspec.Raw(body))
    value = encode(command)
    with pytest.raises(Rejected) as rejected:
        command_of(receive(Record(0, 0, 0, b"hoard/1", value), INTAKE))
    assert rejected.value.reason.code == "malformed"


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


@settings(max_examples=3 * settings().max_examples)
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
