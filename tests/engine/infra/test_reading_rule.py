"""make test: pure. The reading rule: which records count, and that nothing else decides it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.log.records import Record, UnreadableRecord
from infra.log.rule import START, Counted, Reading, Void, read
from tests.engine.log import commit, opening, records

Case = tuple[list[bytes | None], list[int], list[tuple[int, str]]]
"""Records, the offsets of the commits that count, offsets and reasons of the void records."""
CASES: dict[str, Case] = {
    "a writer's commits count in the order of their seq": ([opening(), commit(0, 1), commit(0, 2)], [1, 2], []),
    "a commit before any opening is void": ([commit(-1, 1), commit(0, 1)], [], [(0, "epoch"), (1, "epoch")]),
    "a zombie's late commit is void": (
        [opening("old"), commit(0, 1), opening("new"), commit(0, 2), commit(2, 1)],
        [1, 4],
        [(3, "epoch")],
    ),
    "a resent commit is void": ([opening(), commit(0, 1), commit(0, 1), commit(0, 2)], [1, 3], [(2, "seq")]),
    "everything after a lost commit is void until the next opening": (
        [opening(), commit(0, 1), commit(0, 3), commit(0, 4), opening(), commit(4, 1)],
        [1, 5],
        [(2, "seq"), (3, "seq")],
    ),
    "a lost commit that arrives late counts, and those that overtook it do not": (
        [opening(), commit(0, 2), commit(0, 1), commit(0, 2)],
        [2, 3],
        [(1, "seq")],
    ),
    # an earlier draft named the epoch after the writer: w0's late commit would have counted beside w1's, for one command
    "a late duplicate of an opening does not revive the old writer": (
        [opening("w0"), opening("w1"), commit(1, 1, command_id="a"), opening("w0"), commit(0, 1, command_id="a")],
        [2],
        [(4, "epoch")],
    ),
    **{
        f"a record without our envelope is void and changes nothing: {garbage!r}": (
            [opening(), commit(0, 1), garbage, commit(0, 2)],
            [1, 3],
            [(2, "garbage")],
        )
        for garbage in (
            *(None, b"", b"\xff\x00", b"null", b"[]", b'{"id":1}', b'"samefold"'),
            *(b' {"samefold":"commit/1"}', b'{"samefold"'),
        )
    },
}


@pytest.mark.parametrize("case", CASES)
def test_what_counts_and_what_is_void(case: str) -> None:
    values, counted, void = CASES[case]
    _, found, others = read(START, records(values))
    assert ([entry.offset for entry in found], [tuple(one) for one in others]) == (counted, void)


def test_a_position_holds_the_epoch_and_the_seq_and_the_command_of_the_last_commit() -> None:
    values = [opening(), commit(0, 1, command_offset=7), commit(0, 2, command_offset=9)]
    assert read(START, records(values))[0] == Reading(next_offset=3, epoch=0, seq=2, command_offset=9)
    assert read(START, records([*values, opening()]))[0] == Reading(next_offset=4, epoch=3, seq=0, command_offset=9)


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
