"""make test: nothing but functions. The fold: pure and in order; poison parks; rows held stay as they were.

That batches of any size, and poison anywhere in them, make no difference is what `proofs/test_one_fold.py` shows.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from domain.language import Cents, Text, fact
from infra.log.records import (
    Commit,
    EventRecord,
    Opening,
    Record,
    UnreadableRecord,
    decode_value,
    encode,
    typed_decoder,
)
from infra.log.rule import START, Counted, read
from projections.engine.fold.errors import EngineStop, OutOfStep, PoisonEvent, UnknownEvent, UnreadableEvent
from projections.engine.fold.fold import NOTHING_BLOCKED, Blocked, Changes, RowCache, decode, fold, keys_to_load
from projections.engine.fold.plan import Plan
from projections.engine.views.core_views import snapshot_view
from tests.engine.projections.viewkit import MOVES, PURSES, TOTALS, plan_of, views
from tests.engine.purse import PURSE, Filled, Spent, State

PARK = '\n    ON_POISON = "park"\n'


def filled(cents: int, note: str = "") -> EventRecord:
    return EventRecord("Filled", msgspec.Raw(msgspec.json.encode({"cents": cents, "note": note})))


def spent(cents: int) -> EventRecord:
    return EventRecord("Spent", msgspec.Raw(msgspec.json.encode({"cents": cents})))


def history(*steps: tuple[str, Sequence[EventRecord]]) -> list[Counted]:
    """Commits of purses in order, each of some events; no events: a rejected command."""
    versions: dict[str, int] = {}
    found = []
    for offset, (name, events) in enumerate(steps, 1):
        version = versions[name] = versions.get(name, 0) + len(events)
        stream = f"purse/{name}"
        commit = Commit(stream, version, list(events), f"c{offset}", offset, "", "accepted", None, 0, offset)
        found.append(Counted(offset, offset * 1000, commit))
    return found


def fold_all(plan: Plan, counted: Sequence[Counted], held: RowCache, blocked: Blocked = NOTHING_BLOCKED) -> Changes:
    batch = decode(plan, 3, counted)
    for name, keys in keys_to_load(plan, batch, held).items():
        held.rows[name].update(dict.fromkeys(keys))
    return fold(plan, batch, held, blocked)


def rows_of(changes: Changes) -> dict[str, Any]:
    """What a batch does, by kind of view."""
    return {
        "states": {name: dict(states) for name, states in changes.states.items()},
        "rows": {name: dict(rows) for name, rows in changes.rows.items()},
        "added": {name: list(rows) for name, rows in changes.added.items()},
        "sums": {name: dict(sums) for name, sums in changes.sums.items()},
    }


def test_a_state_that_fails_names_the_context_to_correct() -> None:
    """Not a module of `projections/`, and a state can't be parked."""

    def failing(_state: State, _event: Any) -> State:
        raise ValueError("no")

    context = dataclasses.replace(PURSE, evolve=failing)
    plan = Plan(views(), {PURSE.name: context})
    with pytest.raises(PoisonEvent) as failed:
        fold_all(plan, history(("a", [filled(5)])), RowCache(plan))
    assert "domain/purse.py" in failed.value.hint
    assert "STATE_VERSION" in failed.value.hint
    assert "projections/" not in failed.value.hint
    assert "ON_POISON" not in failed.value.hint


def test_a_view_is_told_of_its_own_contexts_only_and_a_journal_never_a_state_of_the_event_before() -> None:
    """Two contexts with one class of event are refused at the start; a plan that has them all the same keeps them apart."""
    some = views(purses=PURSES, moves=MOVES, totals=TOTALS)
    plan = Plan(some, {"purse": PURSE, "safe": dataclasses.replace(PURSE, name="safe")})
    foreign = Commit("safe/a", 1, [filled(100)], "c", 9, "", "accepted", None, 0, 9)
    changes = fold_all(plan, [*history(("a", [filled(5)])), Counted(9, 9000, foreign)], RowCache(plan))
    assert list(changes.rows["purses"]) == ["a"]
    assert [(m.purse, m.after) for m in changes.added["moves"]] == [("a", 5)]
    assert changes.sums["totals"] == {("Filled",): [1, 5, 5, 5]}
    assert list(changes.states) == ["streams_purse"]


def test_at_tells_where_an_event_stands() -> None:
    plan = plan_of(views(purses=PURSES))
    items = decode(plan, 3, history(("a", [filled(5)]), ("a", [filled(1), spent(2)]))).items
    assert [(i.at.stream, i.at.version, i.at.partition, i.at.offset) for i in items] == [
        ("purse/a", 1, 3, 1),
        ("purse/a", 2, 3, 2),
        ("purse/a", 3, 3, 2),
    ]
    at = items[2].at
    assert (at.context, at.id) == ("purse", "a")
    assert at.time.isoformat() == "1970-01-01T00:00:02+00:00"


def test_a_view_that_does_not_subscribe_is_not_decoded_for() -> None:
    source = PURSES.replace("event: Filled | Spent", "event: Filled")
    some = views(purses=source)
    del some["streams_purse"]
    plan = plan_of(some)
    unreadable = EventRecord("Spent", msgspec.Raw(b'"no such body"'))
    batch = decode(plan, 0, history(("a", [filled(5), unreadable, filled(1)])))
    assert [item.at.version for item in batch.items] == [1, 3]


def test_rows_asked_for_are_those_not_held() -> None:
    plan = plan_of(views(purses=PURSES, moves=MOVES))
    held = RowCache(plan)
    batch = decode(plan, 0, history(("a", [filled(5)]), ("b", [filled(1)])))
    held.rows["purses"]["b"] = None
    wanted = {name: sorted(keys) for name, keys in keys_to_load(plan, batch, held).items()}
    assert wanted == {"streams_purse": ["purse/a", "purse/b"], "purses": ["a"]}


@pytest.mark.parametrize("limit", [1, 1_000])
def test_a_fold_leaves_held_rows_and_their_older_half_as_they_were(limit: int) -> None:
    plan = plan_of(views(purses=PURSES, moves=MOVES, totals=TOTALS))
    held = RowCache(plan, limit=limit)
    counted = history(("a", [filled(5)]), ("a", [spent(2)]))
    held.merge(fold_all(plan, counted[:1], held))
    before = copy.deepcopy((held.rows, held.older))

    first = rows_of(fold_all(plan, counted[1:], held))

    assert limit == 1 or (held.rows, held.older) == before
    assert rows_of(fold_all(plan, counted[1:], held)) == first
    assert first["rows"]["purses"]["a"].cents == 3


def test_a_full_cache_drops_the_rows_that_no_batch_has_needed_for_long() -> None:
    plan = plan_of(views(purses=PURSES))
    held = RowCache(plan, limit=3)
    log = history(("a", [filled(5)]), ("b", [filled(5)]), ("a", [filled(2)]), ("c", [filled(5)]), ("b", [filled(1)]))

    def lacking(one: Counted) -> dict[str, list[Any]]:
        return keys_to_load(plan, decode(plan, 3, [one]), held)

    held.merge(fold_all(plan, log[:2], held))  # too many: now all are the older half
    assert lacking(log[2]) == {}
    changes = fold_all(plan, log[2:3], held)
    assert changes.rows["purses"]["a"].cents == 7
    assert changes.states["streams_purse"] == {"purse/a": (2, State(7))}
    held.merge(changes)
    held.merge(fold_all(plan, log[3:4], held))  # too many again
    assert lacking(log[4]) == {"streams_purse": ["purse/b"], "purses": ["b"]}
    assert lacking(log[2]) == {}
    assert held.rows["purses"]["a"].cents == 7


def test_a_look_into_the_cache_visits_none_of_the_others() -> None:
    class Key(str):
        hashed = 0

        def __hash__(self) -> int:
            Key.hashed += 1
            return super().__hash__()

    held = RowCache(plan_of(views(purses=PURSES)), limit=1)
    held.merge(
        Changes(3, [], {}, {"purses": {Key(n): None for n in range(9)}})
    )  # too many: now they are the older half
    Key.hashed = 0
    assert held.lacking("purses", {"new"}) == ["new"]
    assert Key.hashed == 0


def test_a_cleared_cache_knows_nothing_of_its_older_half_either() -> None:
    plan = plan_of(views(purses=PURSES))
    held = RowCache(plan, limit=1)
    log = history(("a", [filled(5)]))
    held.merge(fold_all(plan, log, held))
    held.clear()
    assert keys_to_load(plan, decode(plan, 3, log), held) == {"streams_purse": ["purse/a"], "purses": ["a"]}


def logged(counted: Sequence[Counted]) -> list[Record]:
    """The records of these commits, after an opening."""
    commits = [Record(3, one.offset, one.time_ms, None, encode(one.commit)) for one in counted]
    return [Record(3, 0, 0, None, encode(Opening("w", "t"))), *commits]


def both_ways(plan: Plan, counted: Sequence[Counted]) -> list[Any]:
    """Events with their places, or the error, as decoded with their commits; checked to be as decoded one by one."""
    found = list[list[Any]]()
    for decoder in (decode_value, plan.decode):
        at, read_, void = read(START, logged(counted), decoder)
        assert (at.seq, len(read_), void) == (len(counted), len(counted), [])
        try:
            found.append([(item.at, item.id, item.event) for item in decode(plan, 3, read_).items])
        except EngineStop as stop:
            found.append([(type(stop), str(stop))])
    assert found[0] == found[1]
    return found[1]


def test_events_decoded_with_their_commit_are_those_decoded_one_by_one() -> None:
    plan = plan_of(views(purses=PURSES, moves=MOVES))
    only_filled = views(purses=PURSES.replace("event: Filled | Spent", "event: Filled"))
    del only_filled["streams_purse"]
    good = ("a", [filled(5, "é"), spent(2)])
    unreadable = ("b", [filled(1), EventRecord("Spent", msgspec.Raw(b'{"cents":"1"}'))])
    assert [event for _, _, event in both_ways(plan, history(good, ("b", [])))] == [
        Filled(cents=5, note="é"),
        Spent(cents=2),
    ]
    assert both_ways(plan, history(good, unreadable))[0][0] is UnreadableEvent
    assert len(both_ways(plan_of(only_filled), history(good, unreadable))) == 2, "what no view takes is not decoded"
    assert both_ways(plan, history(good, ("b", [EventRecord("Stolen", msgspec.Raw(b"{}"))])))[0][0] is UnknownEvent


def test_a_type_that_two_contexts_have_is_decoded_as_that_of_its_own_context() -> None:
    other = dataclasses.replace(PURSE, name="safe", events={"Filled": purse_with_colours()})
    plan = Plan(views(purses=PURSES) | {"streams_safe": snapshot_view(other)}, {"purse": PURSE, "safe": other})
    one = Commit("safe/a", 1, [filled(100)], "c", 2, "", "accepted", None, 0, 2)
    (_, _, mine), (_, _, foreign) = both_ways(plan, [*history(("a", [filled(5)])), Counted(2, 0, one)])
    assert (type(mine), type(foreign)) == (Filled, other.events["Filled"])


@pytest.mark.parametrize("names", [["Filled"], ["Filled", "Spent"]])
def test_an_event_without_a_type_is_unreadable_however_many_types_there_are(names: list[str]) -> None:
    record = logged(history(("a", [filled(5)])))[-1]
    untyped = record._replace(value=(record.value or b"").replace(b'"type":"Filled",', b""))
    for decoder in (decode_value, typed_decoder({name: PURSE.events[name] for name in names})):
        with pytest.raises(UnreadableRecord, match="missing required field `type`"):
            read(START, [untyped], decoder)


def purse_with_colours() -> type:
    """An event with the stored type of the purse's."""

    @fact
    class Filled:
        cents: Cents
        note: Text = ""
        colour: Text = "red"

    return Filled


def test_an_event_that_this_code_does_not_know_stops_everything() -> None:
    plan = plan_of(views(purses=PURSES))
    with pytest.raises(UnknownEvent, match="event 'Stolen'") as stopped:
        decode(plan, 3, history(("a", [filled(1)]), ("a", [EventRecord("Stolen", msgspec.Raw(b"{}"))])))
    assert (stopped.value.partition, stopped.value.offset) == (3, 2)
    known = history(("a", [filled(1)]))[0]
    stranger = Counted(9, 0, msgspec.structs.replace(known.commit, stream="boxes/1"))
    with pytest.raises(UnknownEvent, match="a context"):
        decode(plan, 3, [stranger])


def test_a_state_that_is_not_the_one_before_the_commit_stops_everything() -> None:
    plan = plan_of(views(purses=PURSES))
    held = RowCache(plan)
    held.rows["streams_purse"]["purse/a"] = (4, State(1))
    with pytest.raises(OutOfStep, match="is at version 4"):
        fold_all(plan, history(("a", [filled(1)])), held)


@pytest.mark.parametrize("raised", ["MemoryError", "TooSlow"])
def test_a_key_that_might_be_made_another_time_is_no_absent_row(raised: str) -> None:
    keyed = PURSES + f"\n    def key(event: Filled | Spent, at: At) -> tuple[str]:\n        raise {raised}\n"
    plan = plan_of(
        views(purses=keyed.replace("class Purse(", "from infra.processes.time_limit import TooSlow\n    class Purse("))
    )
    batch = decode(plan, 0, history(("a", [filled(1)])))
    with pytest.raises(PoisonEvent, match="purses"):
        keys_to_load(plan, batch, RowCache(plan))


def test_a_view_that_runs_out_of_memory_parks_nothing() -> None:
    """Where there is more of it, the event may well be folded."""
    plan = plan_of(views(purses=PARK + PURSES.replace('ValueError("can\'t take this")', "MemoryError")))
    with pytest.raises(PoisonEvent, match="MemoryError"):
        fold_all(plan, history(("a", [filled(1)]), ("a", [filled(2, "fail")])), RowCache(plan))
