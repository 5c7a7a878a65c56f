"""make test: agents note reading states, readers begin at them after a check, and a wrong one changes no result."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from infra.archive import marks, write
from infra.archive.jobs import archive_log
from infra.archive.marks import between, read_from
from infra.archive.whole_log import read_range
from infra.database.connect import connect
from infra.log import source, topics
from infra.log.records import Commit
from infra.log.rule import START, Counted, Reading, read
from infra.log.topics import Topic
from infra.processes.engines import Local
from infra.settings import Settings
from projections.engine.rebuild.rebuild import rebuild
from projections.engine.store.commit import Batch
from projections.engine.views.core_views import all_views
from tests.engine.bookkeeper import Bookkeeper, fold_all
from tests.engine.infra.archives import trim_all
from tests.engine.spine import in_a_transaction, set_up

ACCOUNTS = [str(number) for number in range(6)]
EVERY = 20
PARTITION = 0


@pytest.fixture
def log(world: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bookkeeper:
    """Some life in two epochs of a writer, with void records and holes between, folded in small batches."""
    monkeypatch.setattr(marks, "EVERY", EVERY)
    world = world.model_copy(update={"archive_url": str(tmp_path / "archive"), "archive_restore_days": 0})
    set_up(world)
    keeper = Bookkeeper(world)
    keeper.life(ACCOUNTS, 30)
    for partition in range(world.partitions):
        keeper.garbage(partition)
        in_a_transaction(world, world.events_topic, partition, None, b"foreign")
        keeper.open(partition)
    keeper.life(ACCOUNTS, 15)
    in_a_transaction(world, world.events_topic, PARTITION, None, b"foreign")
    keeper.life(ACCOUNTS, 15)
    fold_all(world, most=15)
    return keeper


def topic_of(keeper: Bookkeeper) -> Topic:
    return topics.describe(keeper.world, keeper.world.events_topic)


def nearest(settings: Settings, topic: Topic, partition: int, offset: int) -> Reading:
    return max(between(settings, topic, partition, 0, offset + 1), default=START)


def states(keeper: Bookkeeper, partition: int) -> dict[int, Reading]:
    """The state at each offset, read from the log's start."""
    found, reading = {0: START}, START
    end = topic_of(keeper).end[partition]
    for batch in read_range(keeper.world, keeper.world.events_topic, partition, 0, end):
        for record in batch:
            found |= {
                offset: reading._replace(next_offset=offset) for offset in range(max(found) + 1, record.offset + 1)
            }
            reading, _, _ = read(reading, [record])
            found[reading.next_offset] = reading
    return found | {offset: reading._replace(next_offset=offset) for offset in range(max(found) + 1, end + 1)}


def written(keeper: Bookkeeper) -> list[tuple[int, Reading]]:
    with connect(keeper.world, "test") as db:
        rows = db.execute(
            "select partition, next_offset, epoch, seq, command_offset from log_marks order by 1, 2"
        ).fetchall()
    return [(partition, Reading(*reading)) for partition, *reading in rows]


def test_an_agent_marks_each_multiple_once_with_the_state_there(log: Bookkeeper) -> None:
    before = written(log)
    for partition in range(log.world.partitions):
        right = states(log, partition)
        mine = [mark for place, mark in before if place == partition]
        numbers = [mark.next_offset // EVERY for mark in mine]
        assert numbers == sorted(set(numbers))
        assert 0 not in numbers, "only where a multiple is crossed"
        assert len(numbers) >= topic_of(log).end[partition] // EVERY - 1, "one batch may end with a void record"
        assert all(right[mark.next_offset] == mark for mark in mine)
        assert between(log.world, topic_of(log), partition, mine[0].next_offset, mine[-1].next_offset) == mine[1:-1]
    partition, mark = before[0]
    with connect(log.world, "test") as db:  # another agent, or this one after a restore, at another batch's end
        marks.write(db, log.world.events_topic, topic_of(log).id, [(partition, mark._replace(seq=mark.seq + 1))])
    assert written(log) == before


def test_a_rebuild_marks_an_old_log(log: Bookkeeper, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "BATCH", 15)
    with connect(log.world, "test") as db:
        db.execute("delete from log_marks")
    rebuild(log.world, ["balances"], all_views(), engine_for=lambda _: Local(1), tasks=2 * log.world.partitions)
    found = written(log)
    assert {partition for partition, _ in found} == {*range(log.world.partitions)}
    for partition in range(log.world.partitions):
        right = states(log, partition)
        assert all(right[mark.next_offset] == mark for place, mark in found if place == partition)


def test_a_mark_is_behind_a_commit_that_counts_or_it_could_not_be_checked() -> None:
    commit = Commit("a/1", 1, [], "c", 7, "f", "accepted", None, 0, 5)
    was, now = Reading(marks.EVERY - 2, 0, 4, 6), Reading(marks.EVERY + 1, 0, 5, 7)
    for offset, has_mark in ((now.next_offset - 1, True), (now.next_offset - 2, False)):
        assert Batch(0, was, now, [Counted(offset, 1, commit)]).has_mark(was) is has_mark
    assert not Batch(0, was, now, []).has_mark(was)
    assert not Batch(0, was, now, [Counted(now.next_offset - 1, 1, commit)]).has_mark(now)


def test_a_reader_finds_the_state_at_any_offset_and_what_follows(
    log: Bookkeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic, right = topic_of(log), states(log, PARTITION)
    end, begun = topic.end[PARTITION], []

    def spied(settings: Settings, name: str, partition: int, start: int, stop: int, **how: Any) -> Any:
        begun.append(start)
        return read_range(settings, name, partition, start, stop, **how)

    whole = [one for batch in read_range(log.world, topic.name, PARTITION, 0, end) for one in batch]
    monkeypatch.setattr(marks, "read_range", spied)
    for start in {*range(0, end, 5), end, *(offset for offset in right if offset % EVERY < 2)}:
        mark = nearest(log.world, topic, PARTITION, start)
        reading, batches = read_from(log.world, topic, PARTITION, start, end)
        assert reading == right[start]
        assert [one for batch in batches for one in batch] == [one for one in whole if one.offset >= start]
        assert begun.pop() == max(mark.next_offset - 1, 0), "it reads one record before the mark"
        assert not begun
    assert read_from(log.world, topic, PARTITION, end, end)[0] == right[end]


def test_the_archives_states_are_marks_too(log: Bookkeeper, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write, "MOST_RECORDS", 30)
    archive_log(log.world)
    assert trim_all(log.world)
    with connect(log.world, "test") as db:
        db.execute("delete from log_marks")
    topic, right = topic_of(log), states(log, PARTITION)
    end = topic.end[PARTITION]
    assert [one.next_offset for one in between(log.world, topic, PARTITION, 0, end)] == [*range(30, end, 30)]
    for start in (0, 1, 29, 30, 31, 59, 60, end):
        reading, batches = read_from(log.world, topic, PARTITION, start, end)
        assert reading == right[start]
        assert all(one.offset >= start for batch in batches for one in batch)


LIES = {
    "another offset": "next_offset = next_offset + 1",
    "another epoch": "epoch = epoch + 1",
    "another seq": "seq = seq - 1",
    "another command": "command_offset = command_offset + 1",
}


@pytest.mark.parametrize("lie", LIES)
def test_a_mark_that_lies_is_told_and_not_used(log: Bookkeeper, lie: str, caplog: pytest.LogCaptureFixture) -> None:
    topic, right = topic_of(log), states(log, PARTITION)
    newest, before = ([mark for place, mark in written(log) if place == PARTITION])[:-3:-1]
    with connect(log.world, "test") as db:
        db.execute(f"update log_marks set {LIES[lie]} where next_offset = %s", [newest.next_offset])
    start = newest.next_offset + 1
    assert nearest(log.world, topic, PARTITION, start) != newest
    assert read_from(log.world, topic, PARTITION, start, start)[0] == right[start]
    assert f"the mark {tuple(nearest(log.world, topic, PARTITION, start))}" in caplog.text
    assert f"{tuple(before)}" not in caplog.text

    caplog.clear()
    with connect(log.world, "test") as db:
        db.execute(f"update log_marks set {LIES[lie]} where next_offset < %s", [newest.next_offset])
    reading, batches = read_from(log.world, topic, PARTITION, start, topic.end[PARTITION])
    assert reading == right[start]
    assert len(caplog.records) == marks.TRIES
    for batch in batches:
        reading, _, _ = read(reading, batch)
    assert reading == right[reading.next_offset]


def test_a_mark_in_a_hole_of_the_log_is_none(log: Bookkeeper) -> None:
    """The record that is read first there lies behind it."""
    topic, right = topic_of(log), states(log, PARTITION)
    end = topic.end[PARTITION]
    records = [one for batch in read_range(log.world, topic.name, PARTITION, 0, end) for one in batch]
    held = {one.offset for one in records}
    beyond = next(one for one in range(end - 1, 0, -1) if one in held and one - 1 not in held)
    assert right[beyond + 1].seq == right[beyond].seq + 1, "a commit that counts"
    with connect(log.world, "test") as db:
        db.execute("delete from log_marks")
        marks.write(db, topic.name, topic.id, [(PARTITION, right[beyond + 1]._replace(next_offset=beyond))])
    reading, batches = read_from(log.world, topic, PARTITION, beyond, end)
    assert reading == right[beyond]
    assert next(batches)[0].offset == beyond


def test_marks_of_another_topic_and_a_reader_without_a_database(log: Bookkeeper) -> None:
    topic, right = topic_of(log), states(log, PARTITION)
    end = topic.end[PARTITION]
    recreated = replace(topic, id="another")
    assert nearest(log.world, topic, PARTITION, end) != START
    assert nearest(log.world, recreated, PARTITION, end) == START
    assert between(log.world, recreated, PARTITION, 0, end) == []
    without = log.world.model_copy(update={"database_url": None})
    assert nearest(without, topic, PARTITION, end) == START
    assert read_from(without, topic, PARTITION, end, end)[0] == right[end]
