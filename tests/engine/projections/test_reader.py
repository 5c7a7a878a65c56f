"""make test: facts in, actions out. The agent's reading of the log, without Kafka and PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from uuid import UUID

import pytest

from infra.errors import SamefoldError
from infra.log.records import Record
from infra.log.rule import START
from infra.processes.gathering import Window
from projections.engine.fold.errors import EngineStop, PoisonEvent, UnknownEvent
from projections.engine.fold.fold import NOTHING_BLOCKED
from projections.engine.live import reader as reader_module
from projections.engine.live.reader import (
    AGAIN,
    NEWER_S,
    Action,
    Apply,
    Reader,
    ReadPositions,
    Seek,
    Stop,
    Wait,
    WaitForNewerCode,
)
from projections.engine.store.commit import BatchResult, CommitStatus
from projections.engine.store.positions import Live, Positions

CODE = {"purses": 1}


def positions_at(offsets: Mapping[int, int], live: Mapping[str, int] = CODE) -> Positions:
    return Positions(
        agent="core",
        topic="events",
        topic_id="t",
        generation=UUID(int=1),
        readings={p: START._replace(next_offset=offset) for p, offset in offsets.items()},
        live={name: Live(version, f"{name}_v{version}") for name, version in live.items()},
        blocked=NOTHING_BLOCKED,
    )


def some(partition: int, offsets: Iterable[int], size: int = 1) -> list[Record]:
    return [Record(partition, offset, 0, None, b"x" * size) for offset in offsets]


def reading(offsets: Mapping[int, int], *, batch: int = 10, longest_s: float = 0.0, lanes: int = 1) -> Reader:
    """A reader that has its partitions and positions."""
    machine = Reader(CODE, batch=batch, window=Window(longest_s), lanes=lanes)
    (ask,) = machine.assigned(list(offsets))
    assert isinstance(ask, ReadPositions)
    seeks = machine.positions(ask.turn, positions_at(offsets))
    assert seeks == [Seek(partition, offset) for partition, offset in offsets.items()]
    return machine


def taken(actions: list[Action]) -> dict[int, list[int]]:
    """Offsets of the one batch that is to be applied, by partition."""
    (apply,) = actions
    assert isinstance(apply, Apply)
    return {partition: [record.offset for record in records] for partition, (_, records) in apply.takes.items()}


def applied(offsets: Mapping[int, int]) -> BatchResult:
    return BatchResult(
        CommitStatus.APPLIED, {partition: START._replace(next_offset=offset) for partition, offset in offsets.items()}
    )


def test_what_is_there_is_applied_at_once_and_what_comes_meanwhile_afterwards() -> None:
    machine = reading({0: 5, 1: 0})
    assert not machine.under_way
    assert taken(machine.records(0, some(0, [5, 6]), 7, 0)) == {0: [5, 6]}
    assert machine.under_way
    assert machine.records(0, some(0, [7]), 8, 0) == []
    assert machine.records(1, some(1, [0, 1]), 2, 0) == []
    actions = machine.done(machine.turn, applied({0: 7}), 0)
    assert taken(actions) == {0: [7], 1: [0, 1]}
    assert isinstance(actions[0], Apply)
    assert actions[0].takes[0][0].next_offset == 7
    assert machine.done(machine.turn, applied({0: 8, 1: 2}), 0) == []
    assert not machine.under_way


@pytest.mark.parametrize("offsets", [[8, 9], [5, 6, 7]], ids=["the log's own", "a fetch that was lost"])
def test_a_hole_right_after_a_seek_is_believed_when_it_is_there_again(offsets: list[int]) -> None:
    machine = reading({0: 5})
    assert machine.records(0, some(0, [8, 9]), 10, 0) == [Seek(0, 5)]
    assert taken(machine.records(0, some(0, offsets), 10, 0)) == {0: offsets}


def test_another_live_set_holds_until_it_is_this_ones() -> None:
    machine = Reader(CODE, batch=10, window=Window(0))
    machine.assigned([0])
    hold, again = machine.positions(machine.turn, positions_at({0: 0}, {"purses": 2}))
    assert isinstance(hold, Wait)
    assert "purses is live as v2, this code has v1" in hold.why
    assert isinstance(again, ReadPositions)
    assert again.after > 0
    assert machine.fetching == []
    assert machine.positions(again.turn, positions_at({0: 0})) == [Seek(0, 0)]


def test_an_event_of_newer_code_holds_its_partition_until_newer_code_has_folded_it() -> None:
    machine = reading({0: 5, 1: 3})
    machine.records(0, some(0, [5, 6]), 7, 0)
    unknown = UnknownEvent("purses/a", "Stolen", partition=0, offset=6)
    newer, ask = machine.done(machine.turn, replace(applied({0: 6}), stop=unknown), 0)
    assert newer == WaitForNewerCode(unknown)
    assert ask == ReadPositions(machine.turn, 0)
    assert machine.positions(machine.turn, positions_at({0: 6, 1: 3})) == [Seek(1, 3)]
    assert taken(machine.records(1, some(1, [3]), 4, 0)) == {1: [3]}
    assert machine.done(machine.turn, applied({1: 4}), 0) == []
    assert machine.tick(NEWER_S / 2) == []
    assert machine.tick(NEWER_S) == [ReadPositions(machine.turn, 0)]
    assert machine.positions(machine.turn, positions_at({0: 6, 1: 4})) == [Seek(1, 4)]
    machine.assigned([0, 1])
    assert machine.positions(machine.turn, positions_at({0: 8, 1: 4})) == [Seek(1, 4)], (
        "it does not look at each reading"
    )
    assert machine.tick(NEWER_S * 2) == [ReadPositions(machine.turn, 0)]
    assert machine.positions(machine.turn, positions_at({0: 8, 1: 4})) == [Seek(0, 8), Seek(1, 4)]
    assert machine.tick(NEWER_S * 9) == []


def test_an_event_that_a_policy_could_not_take_is_tried_again_after_a_while() -> None:
    machine = Reader(CODE, batch=10, window=Window(0.0), waits=EngineStop)
    machine.assigned([0])
    machine.positions(machine.turn, positions_at({0: 5}))
    machine.records(0, some(0, [5]), 6, 0)
    poison = PoisonEvent("policy_saving", "accounts/1", 1, partition=0, offset=5, cause="no")
    machine.done(machine.turn, replace(applied({}), stop=poison), 0)
    assert machine.positions(machine.turn, positions_at({0: 5})) == []
    seeks = []
    for number in range(1, AGAIN + 1):
        assert machine.tick(NEWER_S * number) == [ReadPositions(machine.turn, 0)]
        seeks.append(machine.positions(machine.turn, positions_at({0: 5})))
    assert seeks == [[]] * (AGAIN - 1) + [[Seek(0, 5)]]


def test_what_another_partitions_newer_event_cut_short_is_read_again() -> None:
    machine = reading({0: 5, 1: 3})
    machine.records(0, some(0, [5]), 6, 0)
    machine.records(1, some(1, [3, 4]), 6, 0)
    machine.done(machine.turn, applied({0: 6}), 0)
    machine.records(1, some(1, [5]), 6, 0)
    # both partitions of the batch end before such an event, but only one is reported
    unknown = UnknownEvent("purses/a", "Stolen", partition=0, offset=6)
    machine.done(machine.turn, replace(applied({0: 6, 1: 4}), stop=unknown), 0)
    assert machine.records(1, some(1, [6]), 7, 0) == []
    assert machine.positions(machine.turn, positions_at({0: 6, 1: 4})) == [Seek(1, 4)]
    assert taken(machine.records(1, some(1, [4, 5, 6]), 7, 0)) == {1: [4, 5, 6]}


def test_a_database_restored_to_before_an_event_of_newer_code_is_folded_up_to_it() -> None:
    machine = reading({0: 5})
    machine.records(0, some(0, [5]), 6, 0)
    unknown = UnknownEvent("purses/a", "Stolen", partition=0, offset=5)
    machine.done(machine.turn, BatchResult(CommitStatus.APPLIED, stop=unknown), 0)
    machine.tick(NEWER_S)
    assert machine.positions(machine.turn, positions_at({0: 2})) == [Seek(0, 2)]


def test_an_agent_that_has_never_run_holds() -> None:
    machine = Reader(CODE, batch=10, window=Window(0))
    machine.assigned([0])
    hold, _ = machine.positions(machine.turn, None)
    assert isinstance(hold, Wait)


def test_two_that_fence_each_other_ask_less_and_less_often() -> None:
    machine = reading({0: 0})
    pauses = []
    for _ in range(8):
        machine.records(0, some(0, [0]), 1, 0)
        (ask,) = machine.done(machine.turn, BatchResult(CommitStatus.FENCED), 0)
        assert isinstance(ask, ReadPositions)
        pauses.append(ask.after)
        machine.positions(ask.turn, positions_at({0: 0}))
    assert pauses[0] == 0
    assert pauses[1] > 0
    assert reader_module.BACKOFF_S[1] / 2 <= pauses[-1] <= reader_module.BACKOFF_S[1]
    for _ in range(3):  # views that stop one after another keep the others waiting for none of them
        machine.records(0, some(0, [0]), 1, 0)
        stop = PoisonEvent("balances", "accounts/1", 1, partition=0, offset=0, cause="no")
        assert machine.done(machine.turn, BatchResult(CommitStatus.FENCED, stop=stop), 0) == [
            ReadPositions(machine.turn)
        ]
        machine.positions(machine.turn, positions_at({0: 0}))


def test_a_batch_waits_for_more_only_while_more_is_known_to_come_and_only_so_long() -> None:
    machine = reading({0: 0}, batch=10, longest_s=0.05)
    assert machine.records(0, some(0, [0, 1]), 100, 7.0) == []
    assert machine.due == pytest.approx(7.05)
    assert machine.tick(7.04) == []
    assert taken(machine.tick(7.05)) == {0: [0, 1]}

    machine = reading({0: 0}, batch=10, longest_s=0.05)
    assert taken(machine.records(0, some(0, [0, 1]), 2, 7.0)) == {0: [0, 1]}

    machine = reading({0: 0}, batch=10, longest_s=0.05)
    machine.records(0, some(0, [0, 1]), 100, 7.0)
    assert taken(machine.records(0, some(0, range(2, 12)), 100, 7.0)) == {0: list(range(10))}


def test_after_a_batch_of_many_the_next_gathers_and_only_so_long() -> None:
    machine = reading({0: 0}, batch=1_000, longest_s=0.05)
    assert taken(machine.records(0, some(0, range(2)), 2, 7.0)) == {0: [0, 1]}
    assert machine.done(machine.turn, applied({0: 2}), 7.5) == []
    assert machine.records(0, some(0, [2]), 3, 8.0) == []
    assert machine.due == pytest.approx(8.05)
    assert taken(machine.tick(8.05)) == {0: [2]}
    assert machine.done(machine.turn, applied({0: 3}), 8.5) == []
    assert taken(machine.records(0, some(0, [3]), 4, 9.0)) == {0: [3]}


def test_a_batch_that_is_as_large_as_the_one_before_waits_for_nothing() -> None:
    """Four clients that wait for their answers send no fifth command meanwhile."""
    machine = reading({0: 0}, batch=1_000, longest_s=0.05)
    for number in range(0, 12, 4):
        assert taken(machine.records(0, some(0, range(number, number + 4)), number + 4, 7.0 + number)) == {
            0: [*range(number, number + 4)]
        }
        assert machine.done(machine.turn, applied({0: number + 4}), 7.01 + number) == []


def test_a_batch_gathers_for_about_as_long_as_the_ones_before_took() -> None:
    machine = reading({0: 0}, batch=1_000, longest_s=0.05)
    for number in range(0, 40, 2):
        now = 10.0 + number
        machine.records(0, some(0, range(number, number + 2)), number + 2, now)
        if machine.due is not None:
            now = machine.due
            machine.tick(now)
        machine.done(machine.turn, applied({0: number + 2}), now + 0.004)
    machine.records(0, some(0, [40]), 41, 100.0)
    assert machine.due == pytest.approx(100.008, abs=0.002)


def test_a_batch_is_bounded_in_records_and_of_few_partitions_in_turn() -> None:
    machine = reading({0: 0, 1: 0}, batch=10)
    machine.records(0, some(0, [0]), 1, 0)
    machine.records(0, some(0, range(1, 13)), 13, 1)
    machine.records(1, some(1, range(40)), 40, 2)
    assert taken(machine.done(machine.turn, applied({0: 1}), 3)) == {1: list(range(10))}
    assert taken(machine.done(machine.turn, applied({1: 10}), 4)) == {0: list(range(1, 11))}
    assert taken(machine.done(machine.turn, applied({0: 11}), 5)) == {1: list(range(10, 20))}
    assert taken(machine.done(machine.turn, applied({1: 20}), 6)) == {0: [11, 12], 1: list(range(20, 28))}


def test_a_batch_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_module, "BATCH_BYTES", 100)
    machine = reading({0: 0}, batch=1000)
    assert taken(machine.records(0, some(0, range(10), size=40), 10, 0)) == {0: [0, 1, 2]}
    assert machine.fetching == []
    assert taken(machine.done(machine.turn, applied({0: 3}), 0)) == {0: [3, 4, 5]}


def test_what_is_fetched_ahead_is_bounded() -> None:
    machine = reading({0: 0, 1: 0}, batch=10)
    machine.records(0, some(0, [0]), 100, 0)
    machine.records(0, some(0, range(1, 40)), 100, 0)
    assert set(machine.fetching) == {0, 1}
    machine.records(1, some(1, [0]), 100, 0)
    assert machine.fetching == []


def test_an_error_stops_after_what_could_be_applied() -> None:
    machine = reading({0: 0})
    machine.records(0, some(0, [0, 1]), 2, 0)
    error = SamefoldError("poison")
    assert machine.done(
        machine.turn, BatchResult(CommitStatus.APPLIED, {0: START._replace(next_offset=1)}, error), 0
    ) == [Stop(error)]


def test_lanes_have_one_batch_each_under_way_and_share_no_partition() -> None:
    machine = reading({2: 0, 4: 0, 6: 0}, lanes=2)
    (first,) = machine.records(2, some(2, [0]), 1, 0)
    (second,) = machine.records(4, some(4, [0, 1]), 2, 0)
    assert isinstance(first, Apply)
    assert isinstance(second, Apply)
    assert [(one.lane, set(one.takes)) for one in (first, second)] == [(0, {2}), (1, {4})]
    assert machine.records(6, some(6, [0]), 1, 0) == []  # both are busy
    assert machine.records(4, some(4, [2]), 3, 0) == []
    assert taken(machine.done(machine.turn, applied({2: 1}), 0, 0)) == {6: [0]}
    assert machine.records(2, some(2, [1]), 2, 0) == []
    assert taken(machine.done(machine.turn, applied({4: 2}), 0, 1)) == {
        2: [1],
        4: [2],
    }  # whichever is free takes what waits
