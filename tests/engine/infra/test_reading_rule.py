"""The reading rule: which records count, and that nothing else decides it."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.log.records import Record, UnreadableRecord
from infra.log.rule import START, Counted, Reading, Void, read
from tests.engine.log import commit, opening, records


def counted(values: Sequence[bytes | None]) -> list[int]:
    """Offsets of the commits that count."""
    return [entry.offset for entry in read(START, records(values))[1]]


def void(values: Sequence[bytes | None]) -> list[tuple[int, str]]:
    """Offsets and reasons of the void records."""
    return [(offset, reason) for offset, reason in read(START, records(values))[2]]


def test_a_writers_commits_count_in_the_order_of_their_seq() -> None:
    values = [opening(), commit(0, 1, command_offset=7), commit(0, 2, command_offset=9)]
    assert counted(values) == [1, 2]
    assert read(START, records(values))[0] == Reading(next_offset=3, epoch=0, seq=2, command_offset=9)


def test_an_opening_without_commits_moves_the_epoch_and_keeps_the_command_offset() -> None:
    values = [opening(), commit(0, 1, command_offset=7), opening()]
    assert read(START, records(values))[0] == Reading(next_offset=3, epoch=2, seq=0, command_offset=7)


def test_a_commit_before_any_opening_is_void() -> None:
    assert void([commit(-1, 1), commit(0, 1)]) == [(0, "epoch"), (1, "epoch")]


def test_a_zombies_late_commit_is_void() -> None:
    values = [opening("old"), commit(0, 1), opening("new"), commit(0, 2), commit(2, 1)]
    assert counted(values) == [1, 4]
    assert void(values) == [(3, "epoch")]


def test_a_resent_commit_is_void() -> None:
    values = [opening(), commit(0, 1), commit(0, 1), commit(0, 2)]
    assert counted(values) == [1, 3]
    assert void(values) == [(2, "seq")]


def test_everything_after_a_lost_commit_is_void_until_the_next_opening() -> None:
    values = [opening(), commit(0, 1), commit(0, 3), commit(0, 4), opening(), commit(4, 1)]
    assert counted(values) == [1, 5]
    assert void(values) == [(2, "seq"), (3, "seq")]


def test_a_lost_commit_that_arrives_late_counts_and_those_that_overtook_it_do_not() -> None:
    assert counted([opening(), commit(0, 2), commit(0, 1), commit(0, 2)]) == [2, 3]


def test_a_late_duplicate_of_an_opening_does_not_revive_the_old_writer() -> None:
    # an earlier draft named the epoch after the writer: w0's late commit would have counted beside w1's, for one command
    values = [opening("w0"), opening("w1"), commit(1, 1, command_id="a"), opening("w0"), commit(0, 1, command_id="a")]
    assert counted(values) == [2]
    assert void(values) == [(4, "epoch")]


@pytest.mark.parametrize(
    "garbage",
    [None, b"", b"\xff\x00", b"null", b"[]", b'{"id":1}', b'"samefold"', b' {"samefold":"commit/1"}', b'{"samefold"'],
)
def test_a_record_without_our_envelope_is_void_and_changes_nothing(garbage: bytes | None) -> None:
    values = [opening(), commit(0, 1), garbage, commit(0, 2)]
    assert counted(values) == [1, 3]
    assert void(values) == [(2, "garbage")]


@pytest.mark.parametrize(
    "unreadable",
    [
        b'{"samefold":"commit/2","stream":"purse/1"}',
        b'{"samefold":"opening/2"}',
        b'{"samefold":"command/1","id":"a","stream":"purse/1","type":"Fill","data":{}}',
        b'{"samefold":"',
        b'{"samefold":"commit/1"}',
        b'{"samefold":"opening/1","writer":7,"commands_topic_id":"t"}',
        commit(0, 2)[:-1],
        commit(0, 2) + b"}",
        commit(0, 2).replace(b'"purse/1"', b'"\xff"'),
        commit(0, 2).replace(b'"seq":2', b'"seq":"2"'),
        commit(0, 2).replace(b'"accepted"', b'"perhaps"'),
    ],
)
def test_our_envelope_with_anything_unreadable_stops_the_reader(unreadable: bytes) -> None:
    with pytest.raises(UnreadableRecord, match=r"events\[0\] offset 2 ") as caught:
        read(START, records([opening(), commit(0, 1), unreadable, commit(0, 2)]))
    assert caught.value.code == "unreadable-record"
    assert "Nothing was skipped" in caught.value.hint


def test_what_counts_is_delivered_with_its_place_and_the_brokers_time() -> None:
    [entry] = read(START, records([opening(), commit(0, 1, command_id="a")]))[1]
    assert (entry.offset, entry.time_ms, entry.commit.command_id) == (1, 1000, "a")


def test_records_before_the_position_are_passed_over() -> None:
    values = records([opening(), commit(0, 1), commit(0, 2)])
    reading, first, _ = read(START, values[:2])
    again, second, void_records = read(reading, values)
    assert ([c.offset for c in first], [c.offset for c in second], void_records) == ([1], [2], [])
    assert read(again, values) == (again, [], [])


# Any history: an alphabet small enough that records often almost fit together.
values = st.lists(
    st.one_of(
        st.just(opening("w0")),
        st.just(None),
        st.builds(commit, st.integers(-1, 8), st.integers(0, 4), command_offset=st.integers(0, 9)),
    ),
    max_size=30,
)


@given(values, st.data())
def test_where_a_batch_ends_makes_no_difference(history: list[bytes | None], data: st.DataObject) -> None:
    whole = records(history)
    cuts = data.draw(st.lists(st.integers(0, len(whole)), max_size=6).map(sorted))
    reading = START
    counted_in_parts: list[Counted] = []
    void_in_parts: list[Void] = []
    for start, stop in zip([0, *cuts], [*cuts, len(whole)], strict=True):
        # a stored position is the five numbers and nothing else
        reading, some, others = read(Reading(*tuple(reading)), whole[start:stop])
        counted_in_parts += some
        void_in_parts += others
    assert (reading, counted_in_parts, void_in_parts) == read(START, whole)


@given(values)
def test_each_record_is_an_opening_or_counts_or_is_void_for_a_reason(history: list[bytes | None]) -> None:
    whole = records(history)
    reading, some, others = read(START, whole)
    openings = {record.offset for record in whole if record.value == opening("w0")}
    offsets = sorted([*openings, *(c.offset for c in some), *(v.offset for v in others)])
    assert offsets == [record.offset for record in whole]
    assert reading.next_offset == len(whole)
    assert {v.reason for v in others} <= {"garbage", "epoch", "seq"}
    for entry in some:
        last_opening = max(o for o in openings if o < entry.offset)
        before = [c.commit.seq for c in some if last_opening < c.offset < entry.offset]
        assert entry.commit.epoch == last_opening
        assert entry.commit.seq == len(before) + 1


def test_a_partitions_records_are_read_by_their_own_offsets() -> None:
    later = [Record(3, 100, 0, None, opening()), Record(3, 101, 0, None, commit(100, 1))]
    reading, some, _ = read(Reading(100, 40, 7, 12), later)
    assert (reading, [c.offset for c in some]) == (Reading(102, 100, 1, 0), [101])
