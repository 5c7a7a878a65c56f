"""make test: batches take milliseconds.

They are applied exactly once and as a whole, whichever worker tries; errors name what can't be applied.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any
from uuid import UUID, uuid4

import msgspec
import pytest
from psycopg import sql

from infra.database.connect import Connection
from infra.log.contract import Contract
from infra.log.records import Commit, EventRecord, Opening, Reason, Record, encode
from infra.log.rule import START, Counted, Reading
from infra.settings import Settings
from projections.engine.fold.errors import PoisonEvent
from projections.engine.live.startup import ensure_started
from projections.engine.live.worker import Worker
from projections.engine.store.commit import Batch, BatchResult, CommitStatus, Committer
from projections.engine.store.positions import Positions, read_positions
from projections.engine.views.core_views import command_key
from projections.engine.views.view import View
from tests.engine.projections.test_fold import PARK, filled, spent
from tests.engine.projections.viewkit import MOVES, PURSES, TOTALS, make_tables, open_connection, plan_of, views
from tools.testing.waiting import DEADLINE_S, until

PARTITIONS = 3


class Bench:
    """A started agent on an empty database, and histories to feed it with."""

    def __init__(self, settings: Settings, some: Mapping[str, View]) -> None:
        self.settings = settings
        self.views = some
        self.plan = plan_of(some)
        make_tables(settings, some)
        self.db = open_connection(settings)
        self.contract = Contract(settings.events_topic, "topic-1", PARTITIONS, "murmur2")
        ensure_started(self.db, "core", some, self.contract)
        self.committer = self.fresh_committer()
        self.versions: dict[str, int] = defaultdict(int)
        self.at = dict.fromkeys(range(PARTITIONS), START)

    def positions(self) -> Positions:
        found = read_positions(self.db, "core", self.settings.events_topic)
        assert found is not None
        return found

    def fresh_committer(self) -> Committer:
        self.committer = Committer(self.plan, self.positions())
        return self.committer

    def batch(self, partition: int, *steps: tuple[str, Sequence[EventRecord]]) -> Batch:
        """The next commits of a partition, one per step: a purse's name and its events; no events: a rejection."""
        was = self.at[partition]
        _, epoch, seq, _ = was
        offset = was.next_offset
        if epoch < 0:
            epoch, offset = offset, offset + 1
        counted = []
        for name, events in steps:
            seq += 1
            self.versions[name] += len(events)
            reason = None if events else Reason("too-little", "There is less in the purse.")
            commit = Commit(
                f"purse/{name}", self.versions[name], list(events), f"c{partition}-{offset}", offset, "f" * 32,
                "accepted" if events else "rejected", reason, epoch, seq,
            )  # fmt: skip
            counted.append(Counted(offset, 1_700_000_000_000 + offset, commit))
            offset += 1
        last = counted[-1].commit.command_offset if counted else was.command_offset
        self.at[partition] = Reading(offset, epoch, seq, last)
        return Batch(partition, was, self.at[partition], counted)

    def apply(self, *batches: Batch) -> Any:
        return self.committer.apply(self.db, batches)

    def rows(self, name: str, columns: str = "*") -> list[Any]:
        query = sql.SQL("select {} from {} t order by t::text").format(
            sql.SQL(columns), sql.Identifier(self.views[name].table_name)
        )
        return self.db.execute(query).fetchall()

    def everything(self) -> dict[str, Any]:
        """All rows, positions and parked streams."""
        tables = {name: self.rows(name) for name in self.views}
        positions = self.db.execute("select * from positions order by partition").fetchall()
        return tables | {"positions": positions, "parked": self.db.execute("select * from parked").fetchall()}


@pytest.fixture
def bench(world: Settings) -> Iterator[Bench]:
    with_all = Bench(world, views(purses=PURSES, moves=MOVES, totals=TOTALS))
    yield with_all
    with_all.db.close()


def test_a_batch_writes_rows_outcomes_and_positions_together(bench: Bench) -> None:
    batches = [
        bench.batch(0, ("a", [filled(5, "first"), spent(2)]), ("a", [])),
        bench.batch(2, ("b", [filled(7)]), ("b", [spent(7)]), ("c", [filled(1)])),
    ]
    assert bench.apply(*batches) == BatchResult(CommitStatus.APPLIED)

    assert bench.rows("streams_purse", "stream, version, state->>'cents', _partition") == [
        ("purse/a", 2, "3", 0),
        ("purse/b", 2, "0", 2),
        ("purse/c", 1, "1", 2),
    ]
    assert bench.rows("purses") == [("a", 3, "first", 0), ("c", 1, "", 2)]
    outcomes = bench.rows("command_outcomes", "command, code, version, extract(epoch from at)::bigint")
    assert sorted(outcomes) == sorted(
        (UUID(command_key(f"purse/{name}", ident)), code, version, 1_700_000_000)
        for name, ident, code, version in (
            ("a", "c0-1", None, 2),
            ("a", "c0-2", "too-little", 2),
            ("b", "c2-1", None, 1),
            ("b", "c2-2", None, 2),
            ("c", "c2-3", None, 1),
        )
    )
    assert bench.positions().readings == bench.at


def test_each_batch_delivered_twice_is_applied_once_and_takes_others_with_it(bench: Bench) -> None:
    other = bench.batch(0, ("c", [filled(1)]))
    for _ in range(3):
        batch = bench.batch(1, ("a", [filled(2)]), ("b", [filled(3), spent(1)]))
        assert bench.apply(batch) == BatchResult(CommitStatus.APPLIED)
        before = bench.everything()
        for batches in ([batch], [batch, other]):
            assert bench.apply(*batches) == BatchResult(CommitStatus.FENCED)
            assert bench.everything() == before
            bench.fresh_committer()


@pytest.mark.parametrize("changed", ["epoch", "seq", "next_offset", "generation"])
def test_every_part_of_the_position_and_another_generation_fence(bench: Bench, changed: str) -> None:
    bench.apply(bench.batch(0, ("a", [filled(1)])))
    batch = other = bench.batch(0, ("a", [filled(1)]))
    if changed == "generation":
        bench.db.execute("update positions set generation = %s", [uuid4()])
    else:
        other = batch._replace(was=batch.was._replace(**{changed: getattr(batch.was, changed) + 1}))
    before = bench.everything()
    assert bench.apply(other) == BatchResult(CommitStatus.FENCED)
    assert bench.everything() == before
    bench.fresh_committer()
    assert bench.apply(batch) == BatchResult(CommitStatus.APPLIED)


def _waits(db: Connection) -> bool:
    query = "select count(*) from pg_stat_activity where wait_event_type = 'Lock' and datname = current_database()"
    row = db.execute(query).fetchone()
    return row is not None and row[0] > 0


def test_a_lock_timeout_is_tried_again(bench: Bench) -> None:
    bench.db.execute("set lock_timeout = '50ms'")
    with open_connection(bench.settings) as other:
        other.execute("begin")
        other.execute("select 1 from positions for update")
        pauses = []

        def release(seconds: float) -> None:
            pauses.append(seconds)
            if len(pauses) == 2:
                other.execute("commit")

        bench.committer.pause = release
        assert bench.apply(bench.batch(0, ("a", [filled(1)]))) == BatchResult(CommitStatus.APPLIED)
    assert len(pauses) == 2
    assert bench.rows("purses") == [("a", 1, "", 0)]


def test_a_deadlock_is_tried_again(bench: Bench) -> None:
    bench.apply(bench.batch(0, ("a", [filled(1)]), ("b", [filled(1)])))
    bench.db.execute("set deadlock_timeout = '1s'")  # it looks once: by then the other one waits for a
    tries: list[float] = []
    bench.committer.pause = tries.append
    with open_connection(bench.settings) as other, ThreadPoolExecutor(1) as pool:
        other.execute("set deadlock_timeout = '1min'")
        with other.transaction():
            other.execute("update purses_v1 set note = 'x' where purse = 'b'")
            ours = pool.submit(bench.apply, bench.batch(0, ("a", [filled(1)]), ("b", [filled(1)])))
            with open_connection(bench.settings) as watch:
                until(lambda: _waits(watch), "the batch waits for b")
            other.execute("update purses_v1 set note = 'x' where purse = 'a'")
        assert ours.result(DEADLINE_S) == BatchResult(CommitStatus.APPLIED)
    assert bench.rows("purses", "purse, cents") == [("a", 2), ("b", 2)]
    assert tries


# ── poison ──


@pytest.mark.parametrize("event", [filled(1, "fail"), filled(99, "too large"), filled(1, "another key")])
def test_poison_stops_with_nothing_written(bench: Bench, event: EventRecord) -> None:
    before = bench.everything()
    with pytest.raises(PoisonEvent, match="View 'purses' can't fold event 1 of purse/b"):
        bench.apply(bench.batch(0, ("a", [filled(1)]), ("b", [event]), ("c", [filled(1)])))
    assert bench.everything() == before


TROUBLES = {
    "a number beyond 64 bits": (PURSES, "purses", filled(99, "too large")),
    "a row under another key": (PURSES, "purses", filled(1, "another key")),
    "text that the database can't hold": (
        PURSES.replace("event.note)", 'event.note + ("\\0" if at.id == "m" else ""))'),
        "purses",
        filled(1),
    ),
    "a line that is there already": (MOVES, "moves", filled(1, "again")),
    "a line of another stream": (
        MOVES.replace("Move(at.id", 'Move("b" if getattr(event, "note", "") == "stray" else at.id'),
        "moves",
        filled(1, "stray"),
    ),
    "a largest beyond 64 bits": (TOTALS, "totals", filled(1, "too large")),
}


@pytest.mark.parametrize("fingerprint", ["", "f" * 31, "f" * 31 + "x", "f" * 30 + "  "])
def test_a_commit_that_no_release_can_have_written_is_named_with_what_to_do(bench: Bench, fingerprint: str) -> None:
    before, batch = bench.everything(), bench.batch(0, ("a", [filled(1)]), ("m", [filled(2)]))
    first, foreign = batch.counted
    commit = msgspec.structs.replace(foreign.commit, fingerprint=fingerprint)

    with pytest.raises(PoisonEvent, match=r"fingerprint is not 32 hexadecimal digits.*other programs") as stopped:
        bench.apply(batch._replace(counted=[first, foreign._replace(commit=commit)]))

    assert (stopped.value.stream, stopped.value.offset) == ("purse/m", foreign.offset)
    assert bench.everything() == before


@pytest.mark.parametrize("trouble", TROUBLES)
def test_a_view_that_parks_goes_on_without_the_stream(world: Settings, trouble: str) -> None:
    source, name, event = TROUBLES[trouble]
    bench = Bench(world, views(**{name: PARK + source}))
    before = 1 if trouble.startswith("a line") else 0
    if before:
        bench.apply(bench.batch(0, ("m", [filled(1)])))

    outcome = bench.apply(
        bench.batch(0, ("a", [filled(2)]), ("m", [filled(4), event]), ("b", [filled(3)])),
        bench.batch(1, ("z", [filled(5)])),
    )

    # the very event; where each of the purse's events makes such a row, the first one
    since_version = before + (2 if b'"note":""' not in bytes(event.data) else 1)
    assert [(one.view, one.stream, one.version) for one in outcome.parked] == [(name, "purse/m", since_version)]
    parked = bench.db.execute("select table_name, view, stream, partition, since_offset, since_version from parked")
    since = bench.at[0].next_offset - 2
    assert parked.fetchall() == [(f"{name}_v1", name, "purse/m", 0, since, since_version)]
    assert bench.positions().readings == bench.at
    assert len(bench.rows("streams_purse")) == 4

    rows = bench.everything()[name]
    for committer in (bench.committer, bench.fresh_committer()):  # it stays parked, in both and in the database
        assert committer.apply(bench.db, [bench.batch(0, ("m", [filled(8)]))]) == BatchResult(CommitStatus.APPLIED)
    assert bench.everything()[name] == rows
    bench.db.close()


@pytest.mark.parametrize("words", ["'\\0'", "'\\ud800'", "'x' * 10**6", "Speechless()"])
def test_a_stream_is_parked_whatever_the_error_says(world: Settings, words: str) -> None:
    speechless = """
    class Speechless:
        def __str__(self) -> str:
            raise IndexError
    """
    source = speechless + PURSES.replace('"can\'t take this"', words)
    bench = Bench(world, views(purses=PARK + source))
    outcome = bench.apply(bench.batch(0, ("m", [filled(1)]), ("m", [filled(2, "fail")])))
    assert [(one.stream, one.version) for one in outcome.parked] == [("purse/m", 2)]
    ((error,),) = bench.db.execute("select error from parked").fetchall()
    assert error.startswith("ValueError")
    assert len(error) < 1_000
    bench.db.close()


def test_a_row_belongs_to_one_partition(world: Settings) -> None:
    """No fold makes such a row, because a key has its stream's id: the row was changed by hand."""
    bench = Bench(world, views(purses=PURSES))
    assert bench.apply(bench.batch(0, ("a", [filled(1)]))) == BatchResult(CommitStatus.APPLIED)
    bench.db.execute("update purses_v1 set _partition = 1")
    bench.fresh_committer()
    with pytest.raises(PoisonEvent, match="a row of another partition"):
        bench.apply(bench.batch(0, ("a", [filled(1)])))
    assert bench.rows("purses") == [("a", 1, "", 1)]
    bench.db.close()


# ── the work of an agent ──


def log_of(batch: Batch) -> list[Record]:
    opening = [Record(batch.partition, batch.was.next_offset, 0, None, encode(Opening("w", "t")))]
    commits = [Record(batch.partition, c.offset, c.time_ms, None, encode(c.commit)) for c in batch.counted]
    return opening + commits


@pytest.fixture
def work(bench: Bench) -> Iterator[Worker]:
    some = {**bench.views, "purses": replace(bench.views["purses"], on_poison="stop-agent")}
    doing = Worker(bench.settings, "core", some, "test", plan_of(some))
    doing.positions()
    yield doing
    doing.close()


def test_work_goes_as_far_as_it_can_and_says_why_it_stops(bench: Bench, work: Worker) -> None:
    bad = bench.batch(0, ("a", [filled(1)]), ("b", [filled(2)]), ("c", [filled(1, "fail")]), ("d", [filled(4)]))
    good = bench.batch(1, ("e", [filled(5)]))

    done = work.apply({0: (START, log_of(bad)), 1: (START, log_of(good))})

    assert isinstance(done.stop, PoisonEvent)
    assert done.status is CommitStatus.APPLIED
    assert bench.rows("purses", "purse") == [("a",), ("b",), ("e",)]
    at = bench.positions().readings
    assert at[0] == Reading(3, 0, 2, bad.counted[1].commit.command_offset)
    assert at[1] == good.next
    again = work.apply({0: (at[0], log_of(bad)[3:])})
    assert isinstance(again.stop, PoisonEvent)
    assert bench.positions().readings == at


def test_a_record_that_cannot_be_read_stops_behind_what_can(bench: Bench, work: Worker) -> None:
    batch = bench.batch(0, ("a", [filled(1)]), ("b", [filled(2)]))
    log = log_of(batch)
    log[2] = log[2]._replace(value=b'{"samefold":"commit/9"}')

    done = work.apply({0: (START, log)})

    assert done.stop is not None
    assert done.stop.code == "unreadable-record"
    assert bench.rows("purses", "purse") == [("a",)]
    assert bench.positions().readings[0].next_offset == 2


def test_garbage_is_void_and_warned_of(bench: Bench, work: Worker, caplog: pytest.LogCaptureFixture) -> None:
    batch = bench.batch(0, ("a", [filled(1)]))
    garbage = [Record(0, 2 + n, 0, None, value) for n, value in enumerate([b"junk", None, b"{}"])]
    done = work.apply({0: (START, log_of(batch) + garbage)})
    assert done.stop is None
    assert bench.positions().readings[0].next_offset == 5
    assert "ignored 3 foreign records, the first at offset 2" in caplog.text


def test_a_batch_that_waited_while_the_positions_were_read_anew_is_fenced(bench: Bench, work: Worker) -> None:
    """It was taken from the log for the positions of then; those of now may be of other views, with tables of other shapes."""
    batch = bench.batch(0, ("a", [filled(1)]))
    assert work.positions(turn=2) is not None
    assert work.apply({0: (START, log_of(batch))}, turn=1).status is CommitStatus.FENCED
    assert bench.rows("purses", "purse") == []
    assert work.apply({0: (START, log_of(batch))}, turn=2).status is CommitStatus.APPLIED


def test_a_batch_notifies_of_the_positions_it_moved(bench: Bench) -> None:
    with open_connection(bench.settings) as listener:
        listener.execute("listen samefold_core")
        bench.apply(bench.batch(0, ("a", [filled(1)])), bench.batch(2, ("b", [filled(1)])))
        (heard,) = listener.notifies(timeout=DEADLINE_S, stop_after=1)
    assert heard.payload == "0:2,2:2"
