"""make test + test-all: what could lose records is quick, what can be seen at once is slow.

The whole log in files, once, readers that do not notice where it ends and Kafka begins, what trim refuses, and processes that are
killed and frozen at each step.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from infra.archive import files, write
from infra.archive.files import Row, decode, encode
from infra.archive.jobs import archive_log, check_archive
from infra.archive.manifest import ArchiveFile, ManifestBroken, end_of
from infra.archive.read import ArchiveDamaged, ArchiveMissing
from infra.archive.store import IDENTITY, ArchiveAway, Store, WrongArchive, adopt
from infra.archive.whole_log import history_of, read_range
from infra.database.connect import connect
from infra.errors import BadSettings
from infra.log import clients, topics
from infra.log.records import Record
from infra.log.rule import START, Reading
from infra.log.source import LogTrimmed
from infra.observability import metrics
from infra.processes.faultpoints import ARCHIVER, TRIMMER
from infra.settings import Settings
from projections.engine.live import exporter
from projections.engine.operate.trim import ArchiveDiffers, plan_trim, trim_log
from projections.engine.operate.verify import verify
from projections.engine.rebuild.builds import abandon_dead, begin, builds_of
from projections.engine.rebuild.claims import release, try_claim
from projections.engine.rebuild.rebuild import rebuild
from projections.engine.views.core_views import all_views, code_set
from spark_jobs.engine.spark import Spark
from tests.engine.bookkeeper import Bookkeeper, fold_all
from tests.engine.infra.archives import (
    ACCOUNTS,
    SHORT,
    archived_records,
    banks,
    delete_all,
    frozen,
    held,
    is_exact,
    manifest,
    on_disk,
    struck,
    trim_all,
)
from tests.engine.projections.bankviews import build_states, rows
from tests.engine.projections.test_agent import agent
from tests.engine.spine import (
    delete,
    deposit,
    handler,
    open_account,
    outcomes,
    project,
    records_of,
    scalar,
    send,
    set_up,
)
from tools import doctor
from tools.testing.fixtures import SEED, Samefold, dev_env
from tools.testing.waiting import DEADLINE_S, until


@pytest.fixture
def bank(world: Settings, tmp_path: Path) -> Iterator[Bookkeeper]:
    with banks(world, tmp_path) as keeper:
        yield keeper


# ── files ──


def test_a_file_gives_back_what_it_was_given_and_the_same_rows_make_the_same_bytes() -> None:
    given: list[Row] = [
        (7, 1_000, None, b"opening", None),
        (8, 1_000, b"accounts/1", b"\x00\xff" * 500, [("traceparent", b"00-1"), ("empty", None)]),
        (11, 2_000, b"", None, None),
    ]
    content = encode(given, {"samefold.topic": "events"})
    assert content == encode(given, {"samefold.topic": "events"})
    assert [record for batch in decode(content, 3) for record in batch] == [Record(3, *row[:4]) for row in given]
    table = pq.read_table(pa.BufferReader(content))
    assert table.schema.equals(files.SCHEMA)
    headers = [{"key": "traceparent", "value": b"00-1"}, {"key": "empty", "value": None}]
    assert table.column("headers").to_pylist()[1] == headers
    assert list(decode(encode([], {}), 0)) == []


def test_any_store_that_fsspec_knows(world: Settings) -> None:
    store = Store(world.model_copy(update={"archive_url": f"memory://{world.events_topic}"}))
    assert store.names("folder") == []
    assert store.put("folder/a", b"content")
    assert store.put("folder/a", b"content"), "the same again"
    assert (store.read("folder/a"), store.names("folder")) == (b"content", ["a"])
    store.remove("folder/a")
    store.remove("folder/a")
    assert store.read("folder/a") is None


def test_a_store_that_is_not_there_is_named(world: Settings, tmp_path: Path) -> None:
    with pytest.raises(ArchiveAway, match="nowhere"):
        Store(world.model_copy(update={"archive_url": "nowhere://bucket"}))
    (tmp_path / "file").touch()
    with pytest.raises(ArchiveAway, match="Not a directory"):
        Store(world.model_copy(update={"archive_url": str(tmp_path / "file")})).put("folder/a", b"")


@pytest.mark.parametrize(
    "url", ["s3://key:p-a-s-s@bucket/log", "simplecache::s3://key:p-a-s-s@b", "az://c/f?sig=p-a-s-s"]
)
def test_credentials_in_the_url_are_refused_and_not_shown(url: str) -> None:
    with pytest.raises(BadSettings, match="credentials") as refused:
        Settings(archive_url=url)
    assert "p-a-s-s" not in str(refused.value)
    assert Settings(archive_url="abfs://log@bank.dfs.core.windows.net/a").archive, "a container with an account is none"


# ── archive, read, trim ──


def test_the_whole_log_is_archived_trimmed_and_read_as_before(bank: Bookkeeper) -> None:
    world = bank.world
    before = records_of(world, world.events_topic)
    tables = {name: rows(world, view.table_name) for name, view in all_views().items()}
    with connect(world, "test") as db:
        assert end_of(db, world.events_topic, 0) == START
        done = archive_log(world)
        positions = db.execute("select next_offset, epoch, seq, command_offset from positions order by partition")
        ends = [Reading(*row) for row in positions]
        assert [end_of(db, world.events_topic, partition) for partition in range(world.partitions)] == ends
    assert sum(one.records for one in done) == len(before)
    is_exact(world, before)
    assert {file.end.next_offset - file.start.next_offset for file in manifest(world)} >= {SHORT}
    assert trim_all(world) == len(before)
    assert held(world) == 0
    assert records_of(world, world.events_topic) == before
    # what comes later stands in Kafka only: the same range reads both, without a seam
    bank.life(ACCOUNTS, 3)
    both = records_of(world, world.events_topic)
    assert len(both) == len(before) + 3 * len(ACCOUNTS)
    assert [record for record in both if record in set(before)] == before
    fold_all(world)
    assert verify(world, all_views()).differences == 0
    tables_now = {name: rows(world, view.table_name) for name, view in all_views().items()}
    assert tables_now != tables
    made = rebuild(world, list(all_views()), all_views())
    assert {name: rows(world, table) for name, table in made.tables.items()} == tables_now
    assert verify(world, all_views()).differences == 0
    assert list(history_of(world, "accounts/3"))


@pytest.mark.slow
def test_again_does_only_what_is_new_and_names_follow_the_ranges(bank: Bookkeeper) -> None:
    world = bank.world
    archive_log(world)
    first = manifest(world)
    assert [one.files for one in archive_log(world)] == [0] * world.partitions
    bank.life(ACCOUNTS, 3)
    assert sum(one.records for one in archive_log(world)) == 3 * len(ACCOUNTS)
    now = manifest(world)
    assert set(first) < set(now)
    for file in now:
        assert f"{file.start.next_offset:020d}-{file.end.next_offset:020d}-{file.sha256[:16]}" in file.path
        assert len(Path(file.path).parts) == 4, "topic, its id, partition, file"
        assert file.start.next_offset // SHORT == (file.end.next_offset - 1) // SHORT, "no file crosses a boundary"
    is_exact(world, records_of(world, world.events_topic))


@pytest.mark.slow
def test_headers_are_kept_and_large_records_make_shorter_files(
    bank: Bookkeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = bank.world
    monkeypatch.setattr(write, "MOST_BYTES", 3_000)
    client = clients.producer(world)
    client.produce(world.events_topic, b"garbage", partition=1, headers=[("traceparent", b"00-1")])
    client.flush(10)
    archive_log(world)
    assert max(file.rows for file in manifest(world)) < 20
    is_exact(world, records_of(world, world.events_topic))
    last = [file for file in manifest(world) if file.partition == 1][-1]
    headers = pq.read_table(Path(world.archive) / last.path).column("headers").to_pylist()
    assert headers[-2:] == [None, [{"key": "traceparent", "value": b"00-1"}]]


@pytest.mark.slow
def test_a_range_may_begin_and_end_anywhere_in_the_archive(bank: Bookkeeper) -> None:
    world = bank.world
    bank.life(ACCOUNTS, 20)
    archive_log(world)
    ends = topics.describe(world, world.events_topic).end
    partition = max(ends, key=lambda partition: ends[partition])
    end = ends[partition]
    assert end > 100
    delete(world, world.events_topic, {partition: 55})
    everything = [record for record in records_of(world, world.events_topic) if record.partition == partition]
    for start, stop in [(0, 1), (0, end), (39, 41), (40, 80), (41, 60), (54, 56), (55, end), (end - 1, end), (3, 3)]:
        found = [record for batch in read_range(world, world.events_topic, partition, start, stop) for record in batch]
        assert found == everything[start:stop], (start, stop)
    with pytest.raises(LogTrimmed, match="ends at"):
        list(read_range(world, world.events_topic, partition, 0, end + 1))


def test_offsets_without_a_record_make_no_hole(world: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control records, for example, after a transaction."""
    monkeypatch.setattr(write, "MOST_RECORDS", SHORT)
    there = [Record(0, offset, 1, None, b"garbage") for offset in (0, 1, 95, 96)]
    monkeypatch.setattr(write, "read_held", lambda *_, **__: iter([(there, 97), ([], 100)]))
    share = write.Share(world, world.events_topic, "/a+b/c", 0, 100, 100)
    ranges = list(write._ranges(share, START))
    assert [(one.start.next_offset, one.end.next_offset, len(one.rows)) for one in ranges] == [(0, 80, 2), (80, 100, 2)]
    assert write._folder(share) == f"{world.events_topic}/_a-b_c/partition=0", "an id with a slash is one folder"


@pytest.mark.slow
def test_archivers_at_once_archive_each_record_once(bank: Bookkeeper) -> None:
    world = bank.world
    records = records_of(world, world.events_topic)
    with ThreadPoolExecutor(4) as pool:
        done = [one for run in pool.map(lambda _: archive_log(world), range(4)) for one in run]
    assert sum(one.records for one in done) == len(records)
    archive_log(world)
    is_exact(world, records)


def test_records_that_no_run_archived_for_a_day_are_a_metric(bank: Bookkeeper, monkeypatch: pytest.MonkeyPatch) -> None:
    world = bank.world

    def overdue(after_s: float) -> float:
        """If records were overdue after so long; a negative time makes all old enough."""
        monkeypatch.setattr(exporter, "OVERDUE_S", after_s)
        exporter.Exporter(world, "test")._look()
        ends = topics.describe(world, world.events_topic).end
        name = "samefold_archive_overdue_records"
        return sum(metrics.REGISTRY.get_sample_value(name, {"partition": str(one)}) or 0 for one in ends)

    metrics.ARCHIVE_OVERDUE.clear()
    assert overdue(-86_400) == 0, "no archive is used"
    archive_log(world)
    assert overdue(-86_400) == 0
    before = sum(topics.describe(world, world.events_topic).end.values())
    bank.life(["late"], 2)
    assert overdue(-86_400) == sum(topics.describe(world, world.events_topic).end.values()) - before
    assert overdue(86_400) == 0


def test_an_archiver_that_was_overtaken_enters_nothing(bank: Bookkeeper) -> None:
    """The chain is the database's: without its constraints, a second file of a range would count."""
    world = bank.world
    archive_log(world)
    stale = manifest(world)[0]
    beyond = Reading(stale.end.next_offset - 1, 0, 0, 0)
    overlapping = ArchiveFile(
        stale.topic, stale.topic_id, 0, "overlapping", 1, 1, "", None, beyond, beyond._replace(next_offset=10_000)
    )
    with connect(world, "test") as db:
        assert not write._enter(db, stale)
        assert not write._enter(db, overlapping)
        db.execute("alter table archive_files drop constraint archive_files_chain")
        assert write._enter(db, overlapping)
    for look in (manifest, archived_records):
        with pytest.raises(ManifestBroken):
            look(world)


@pytest.mark.slow
def test_a_restored_database_archives_the_same_files_again(bank: Bookkeeper) -> None:
    """Also one of before it knew the archive's id."""
    world = bank.world
    archive_log(world)
    identity = Store(world).read(IDENTITY)
    bank.life(ACCOUNTS, 3)
    fold_all(world)
    with connect(world, "test") as db:
        db.execute("create table backup as select * from archive_files")
        archive_log(world)
        later = manifest(world)
        db.execute("truncate archive_files")
        db.execute("insert into archive_files select * from backup order by first_offset")
        db.execute("update topics set archive = null")
    assert manifest(world) != later
    archive_log(world)
    assert manifest(world) == later
    is_exact(world, records_of(world, world.events_topic))
    assert Store(world).read(IDENTITY) == identity == str(scalar(world, "select archive from topics")).encode()


def test_a_log_that_lost_its_beginning_before_it_was_archived_is_refused(bank: Bookkeeper) -> None:
    world = bank.world
    delete(world, world.events_topic, {1: 3})
    with pytest.raises(LogTrimmed, match="does not hold offset 0"):
        archive_log(world)
    with pytest.raises(LogTrimmed, match="no archive"):
        records_of(world, world.events_topic)


# ── damage ──


def test_a_flipped_byte_or_a_missing_file_is_found_by_every_reader(bank: Bookkeeper) -> None:
    world = bank.world
    archive_log(world)
    file = Path(world.archive) / manifest(world)[1].path
    content = file.read_bytes()

    def flipped(place: int) -> bytes:
        return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]

    given = [list(row.values()) for row in pq.read_table(file).to_pylist()]
    given[-1][3] = given[-1][3].replace(b'"cents":', b'"cents":1')
    another_record = encode([tuple(row) for row in given], {})  # a sound file: nothing but the hash can tell
    for wrong in (another_record, flipped(0), flipped(SEED % len(content)), flipped(len(content) - 1)):
        file.write_bytes(wrong)
        with pytest.raises(ArchiveDamaged, match=file.name):
            archived_records(world)
    assert [len(one.wrong) for one in check_archive(world)].count(1) == 1
    with pytest.raises(ArchiveDamaged):
        trim_all(world)
    assert held(world) == len(records_of(world, world.events_topic)), "nothing was trimmed of that partition or after"
    delete_all(world)
    with pytest.raises(ArchiveDamaged):
        verify(world, all_views())
    file.write_bytes(content)
    assert verify(world, all_views()).differences == 0
    file.unlink()
    with pytest.raises(ArchiveMissing, match=file.name):
        archived_records(world)
    assert sum(len(one.wrong) for one in check_archive(world)) == 1


@pytest.mark.slow
def test_a_manifest_that_was_changed_by_hand_is_found(bank: Bookkeeper) -> None:
    world = bank.world
    archive_log(world)
    with connect(world, "test") as db:
        db.execute("update archive_files set end_seq = end_seq + 1 where partition = 2 and first_offset = 0")
        with pytest.raises(ManifestBroken):
            manifest(world)
        db.execute("update archive_files set seq = seq + 1 where partition = 2 and first_offset > 0")
        db.execute("update archive_files set end_seq = end_seq + 1 where partition = 2 and first_offset > 0")
    assert [bool(one.wrong) for one in check_archive(world)] == [False, False, True, False]
    with pytest.raises(ArchiveDamaged):
        trim_all(world)
    assert topics.describe(world, world.events_topic).first[2] == 0


@pytest.mark.slow
def test_a_worker_that_means_another_archive_writes_nothing(bank: Bookkeeper, tmp_path: Path) -> None:
    """Also where it means it by the same URL, and where another archive is there."""
    world = bank.world
    topic = topics.describe(world, world.events_topic)
    with connect(world, "test") as db:
        for _ in range(2):
            adopt(world, db, topic.name, empty=True)
    share = write.shares(world, topic, {})[0]
    elsewhere = world.model_copy(update={"archive_url": str(tmp_path / "elsewhere")})
    with pytest.raises(WrongArchive, match=r"elsewhere.* is missing"):
        write.archive_partition(replace(share, settings=elsewhere))
    Store(elsewhere).put(IDENTITY, b"another")
    with pytest.raises(WrongArchive, match="has another id"):
        write.archive_partition(replace(share, settings=elsewhere))
    assert manifest(world) == []
    assert on_disk(elsewhere) == set()
    archive_log(world)
    identity = Store(world).read(IDENTITY)
    assert identity
    Store(world).put(IDENTITY, identity + b"\n")  # lost, and written by hand
    delete_all(world)
    for use in (archived_records, check_archive, trim_all, lambda world: verify(world, all_views())):
        with pytest.raises(WrongArchive):
            use(elsewhere)
    assert verify(world, all_views()).differences == 0
    with connect(world, "test") as db:
        db.execute("update topics set topic_id = 'another'")
    with pytest.raises(LogTrimmed):
        records_of(world, world.events_topic)


# ── what trim refuses ──


def cut_of(world: Settings, *, before: datetime | None = None, keep: int = 0) -> tuple[int, str]:
    """Up to where partition 0 may be trimmed, and what needs the others."""
    _, cuts = plan_trim(world, before=before, keep=keep)
    return cuts[0].to, cuts[0].held


def test_trim_never_goes_beyond_the_slowest_agent_or_the_archive(bank: Bookkeeper) -> None:
    world = bank.world
    at = topics.describe(world, world.events_topic).end[0]
    assert cut_of(world) == (0, "the archive, which ends there")
    bank.life(ACCOUNTS, 3)
    archive_log(world)
    assert cut_of(world) == (at, "agent 'core', which continues there")
    fold_all(world)
    archived, _ = cut_of(world)
    assert archived > at
    bank.life(ACCOUNTS, 3)
    fold_all(world)
    assert cut_of(world) == (archived, "the archive, which ends there")
    trim_all(world)
    assert topics.describe(world, world.events_topic).first[0] == archived
    assert trim_all(world) == 0, "again there is nothing to do"


def test_trim_cuts_nothing_while_a_build_is_made(bank: Bookkeeper) -> None:
    world = bank.world
    archive_log(world)
    topic, cuts = plan_trim(world)
    with connect(world, "test builder") as db:
        begin(db, [all_views()["balances"]], world.events_topic, code_set(all_views()), "core")
        assert cut_of(world) == (0, "the build balances_v2_r2, which is loading")
        assert trim_log(world, topic, cuts) == [], "a limit that came after the plan counts"
        [build] = [build for build in builds_of(db) if build.state == "loading"]
        assert try_claim(db, str(build.id))
        db.execute("update builds set state = 'past-loading', as_of = '0:1' where state = 'loading'")
        assert cut_of(world) == (0, "the build balances_v2_r2, which is loading")
        db.execute("update builds set state = 'past' where state = 'past-loading'")
        assert cut_of(world)[1] == "", "a table of the past is never moved on"


AS_OF = {"loading": None, "past-loading": "0:1"}


@pytest.mark.parametrize("state", AS_OF)
@pytest.mark.slow
def test_trim_gives_up_what_a_killed_builder_left(bank: Bookkeeper, state: str) -> None:
    world = bank.world
    archive_log(world)
    with connect(world, "killed builder") as db:
        begin(db, [all_views()["balances"]], world.events_topic, code_set(all_views()), "core")
        db.execute("update builds set state = %s, as_of = %s where state = 'loading'", (state, AS_OF[state]))
    assert cut_of(world)[1] == ""
    assert trim_all(world) > 0
    assert held(world) == 0
    assert build_states(world, "balances") == {"balances_v2": "live", "balances_v2_r2": "abandoned"}
    assert scalar(world, "select to_regclass('balances_v2_r2')") is None
    assert rebuild(world, ["balances"], all_views()).tables == {"balances": "balances_v2_r3"}


@pytest.mark.slow
@pytest.mark.parametrize(("state", "done"), [("loading", "ready"), ("past-loading", "past")])
def test_a_build_that_was_finished_since_it_was_seen_is_not_abandoned(bank: Bookkeeper, state: str, done: str) -> None:
    world = bank.world
    with connect(world, "builder") as db, connect(world, "another") as other:
        begin(db, [all_views()["balances"]], world.events_topic, code_set(all_views()), "core")
        db.execute("update builds set state = %s, as_of = %s where state = 'loading'", (state, AS_OF[state]))
        seen = builds_of(other, ["balances"])
        db.execute("update builds set state = %s where state = %s", (done, state))
        release(db, "balances")
        abandon_dead(other, seen)
    assert build_states(world, "balances") == {"balances_v2": "live", "balances_v2_r2": done}
    assert scalar(world, "select to_regclass('balances_v2_r2')") is not None


@pytest.mark.parametrize(
    ("state", "table"), [("ready", "balances_v2_r2"), ("old", "balances_v2")], ids=["ready", "old"]
)
@pytest.mark.slow_but("old")
def test_trim_never_goes_beyond_tables_that_could_catch_up(bank: Bookkeeper, state: str, table: str) -> None:
    world = bank.world
    at = topics.describe(world, world.events_topic).end[0]
    rebuild(world, ["balances"], all_views(), make_live=state == "old")
    bank.life(ACCOUNTS, 3)
    fold_all(world)
    archive_log(world)
    assert cut_of(world) == (at, f"the table {table} ({state}), which would catch up from there")


@pytest.mark.slow
def test_trim_keeps_what_it_is_asked_to_and_what_a_restored_database_would_not_know(bank: Bookkeeper) -> None:
    world = bank.world
    archive_log(world)
    restorable = world.model_copy(update={"archive_restore_days": 30})
    to, why = cut_of(restorable)
    assert to == 0
    assert "restored to 30 days ago" in why
    with connect(world, "test") as db:
        db.execute("update archive_files set at = at - interval '31 days' where first_offset = 0")
    assert cut_of(restorable)[0] == SHORT
    end = topics.describe(world, world.events_topic).end[0]
    assert cut_of(world, keep=5) == (end - 5, "")
    times = {r.offset: r.time_ms for r in records_of(world, world.events_topic) if r.partition == 0}
    middle, _ = cut_of(world, before=datetime.fromtimestamp(times[end // 2] / 1000, UTC))
    assert times[middle - 1] < times[end // 2] <= times[middle]
    assert cut_of(world, before=datetime.now(UTC) + timedelta(days=1))[0] == end


DELETE_RECORDS = """
import os, sys
from confluent_kafka import TopicPartition
from infra.log import clients
from infra.settings import Settings

world = Settings()
admin, before = clients.admin(world), [TopicPartition(world.commands_topic, 0, 0)]
held = sys.getrefcount(before)
for done in clients.delete_records(admin, before).values():
    done.result(10)
print(sys.getrefcount(before) - held, flush=True)
os._exit(0)
"""
"""A process of its own: memory that is freed too soon may end it."""


@pytest.mark.slow
def test_who_has_records_deleted_keeps_what_it_gave(world: Settings) -> None:
    topics.ensure(world)
    command = [sys.executable, "-c", DELETE_RECORDS]
    done = subprocess.run(command, env=os.environ | world.environment(), capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("0\n", 0), done.stderr


OTHERWISE: dict[str, Callable[[Row], list[Row]]] = {
    "value": lambda row: [(*row[:3], b"garbagf", row[4])],
    "key": lambda row: [(*row[:2], b"key", *row[3:])],
    "time": lambda row: [(row[0], row[1] + 1, *row[2:])],
    "headers": lambda row: [(*row[:4], [("trace", b"1")])],
    "missing": lambda row: [],
}


@pytest.mark.parametrize("what", OTHERWISE)
@pytest.mark.slow_but("value")
def test_what_kafka_holds_otherwise_is_not_trimmed(
    bank: Bookkeeper, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """An archive that is whole and sound, but of another log."""
    world, made = bank.world, write._made

    def made_of_another_log(share: write.Share, one: write._Range) -> tuple[ArchiveFile, bytes]:
        rows = [new for row in one.rows for new in (OTHERWISE[what](row) if row[3] == b"garbage" else [row])]
        return made(share, one._replace(rows=rows))

    monkeypatch.setattr(write, "_made", made_of_another_log)
    archive_log(world)
    assert not any(one.wrong for one in check_archive(world)), "it is sound"
    before = held(world)
    with pytest.raises(ArchiveDiffers):
        trim_all(world)
    assert held(world) == before, "partition 0 is the first, and has such a record"


# ── who reads it ──


@pytest.mark.slow
def test_a_handler_takes_over_on_the_archive(world: Settings, tmp_path: Path) -> None:
    """The read model is at the log's beginning, which only the archive holds: the handler still finds the earlier commands."""
    world = world.model_copy(update={"archive_url": str(tmp_path), "archive_restore_days": 0})
    set_up(world)
    send(world, open_account("ada"), deposit("ada", "d1", 100))
    with handler(world):
        until(lambda: len(records_of(world, world.events_topic)) == 2 + world.partitions, "decided")
    archive_log(world)
    delete_all(world)
    with handler(world, "h2"):
        send(world, deposit("ada", "d1", 100), deposit("ada", "d2", 50))
        until(lambda: len(records_of(world, world.events_topic)) == 3 + 2 * world.partitions, "decided")
    project(world)
    assert outcomes(world, [("accounts/ada", "d1")])["accounts/ada", "d1"].outcome == "accepted"
    assert scalar(world, "select cents from balances_v2 where account = 'ada'") == 150
    assert verify(world, all_views()).differences == 0
    archive_log(world)
    trim_all(world)
    assert held(world) == 0
    assert sum(topics.describe(world, world.commands_topic).first.values()) == 0, "commands are never trimmed"


@pytest.mark.slow
def test_an_agent_goes_on_in_the_archive_and_then_in_kafka(bank: Bookkeeper, tmp_path: Path) -> None:
    world = bank.world
    bank.life(ACCOUNTS, 8)
    archive_log(world)
    delete_all(world)
    bank.life(ACCOUNTS, 4)
    end = sum(topics.describe(world, world.events_topic).end.values())

    def position() -> int:
        return int(scalar(world, "select sum(next_offset) from positions where agent = 'core'"))

    assert position() < end - held(world)
    with agent(world, tmp_path) as running:
        until(lambda: position() == end, "it folds both")
        bank.life(ACCOUNTS, 1)
        until(lambda: position() == end + len(ACCOUNTS), "and what comes")
        assert not running.says("Traceback")
    assert verify(world, all_views()).differences == 0


@pytest.mark.slow
@pytest.mark.parametrize("code", ["log-trimmed", "archive-missing"])
def test_an_agent_whose_next_record_is_nowhere_is_refused(bank: Bookkeeper, tmp_path: Path, code: str) -> None:
    """Trimmed without having been archived, or archived in a file that is gone."""
    world = bank.world
    if code == "log-trimmed":
        archive_log(world)
    bank.life(ACCOUNTS, 2)
    if code == "archive-missing":
        archive_log(world)
        shutil.rmtree(Path(world.archive) / world.events_topic)
    delete_all(world)
    with agent(world, tmp_path) as running:
        assert running.ends() == 1
        assert running.says(code)


@pytest.mark.slow
def test_the_commands(bank: Bookkeeper, samefold: Samefold, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside what docs/archive.md shows."""
    world = bank.world
    records = len(records_of(world, world.events_topic))

    def told(*words: str) -> Any:
        done = samefold("archive", *words, "--json", settings=world)
        assert (done.returncode, done.stderr) == (0, "")
        return json.loads(done.stdout)

    assert told()["records"] == records
    assert sum(one["archived"] for one in told("status")["partitions"]) == records
    assert samefold("archive", "trim", settings=world, given="n\n").returncode == 1
    assert held(world) == records
    assert told("trim", "--keep", "5", "--yes")["records"] == records - 5 * world.partitions
    assert "not archived" in samefold("archive", "status", settings=world).stdout
    assert told("check")["wrong"] == []
    gone = Path(world.archive) / manifest(world)[0].path
    gone.unlink()
    checked = samefold("archive", "check", settings=world)
    assert checked.returncode == 1
    assert gone.name in checked.stdout

    def diagnosis() -> doctor.Finding:
        return next(finding for finding in doctor.examine() if finding.name == "archive")

    for name, value in world.environment().items():
        monkeypatch.setenv(name, value)
    assert diagnosis().ok
    bank.life(ACCOUNTS, 2)
    delete_all(world)
    assert not diagnosis().ok
    assert "the archive ends at" in diagnosis().found


@pytest.mark.slow
def test_on_spark_it_is_the_same(bank: Bookkeeper, spark_engine: Spark, spark_place: Path) -> None:
    world = bank.world
    (spark_place / "dev.env").write_text(dev_env(world))
    records = records_of(world, world.events_topic)
    done = archive_log(world, engine_for=lambda _records: spark_engine)
    assert sum(one.records for one in done) == len(records)
    is_exact(world, records)
    assert not any(one.wrong for one in check_archive(world, engine_for=lambda _records: spark_engine))
    delete_all(world)
    assert verify(world, all_views(), engine_for=lambda _records: spark_engine).differences == 0


# ── archivers and trimmers that are killed and frozen ──


def killed(world: Settings, point: str, *arguments: str) -> None:
    """Where it gets to this point for the second time: with one file, or one partition, behind it."""
    nth = 1 if point in ("trim planned", "archive verified") else 2
    assert struck(world, point, nth, "SIGKILL", *arguments).wait(DEADLINE_S) == -signal.SIGKILL, point


@pytest.mark.slow
def test_killed_at_each_step(bank: Bookkeeper) -> None:
    """Of the archiver, then of the trimmer, while the log grows."""
    world = bank.world
    for point in ARCHIVER:
        bank.life(ACCOUNTS, 2)
        killed(world, point, "archive")
        known, there = manifest(world), records_of(world, world.events_topic)
        end = {file.partition: file.end.next_offset for file in known}
        assert archived_records(world) == [one for one in there if one.offset < end.get(one.partition, 0)]
        assert on_disk(world) >= {file.path for file in known}
        if point in ("file written", "file placed"):
            assert on_disk(world) > {file.path for file in known}, "something is left, which a later run has to sweep"
    fold_all(world)
    before, views = records_of(world, world.events_topic), all_views()

    def readable() -> tuple[object, ...]:
        tables = [rows(world, view.table_name) for view in views.values()]
        positions = scalar(world, "select json_agg(p order by partition)::text from positions p")
        return tables, positions, records_of(world, world.events_topic)

    was = readable()
    archive_log(world)
    is_exact(world, before)
    first = 0
    for keep, step in zip((24, 20, 16), TRIMMER, strict=True):
        killed(world, step, "archive", "trim", "--yes", "--keep", str(keep))
        topic = topics.describe(world, world.events_topic)
        assert all(max(0, end - keep) >= topic.first[p] for p, end in topic.end.items()), "no more than was asked for"
        assert sum(topic.first.values()) >= first
        first = sum(topic.first.values())
    assert first > 0
    trim_all(world)
    assert held(world) == 0
    is_exact(world, before)
    assert readable() == was
    assert verify(world, views).differences == 0


@pytest.mark.slow
@pytest.mark.parametrize("point", ["range read", "file written", "file placed", "file entered"])
def test_an_archiver_that_wakes_up_late_harms_nothing(bank: Bookkeeper, point: str) -> None:
    """Others archived more, in files with other ends, swept and trimmed meanwhile."""
    world = bank.world
    with frozen(world, point, "archive"):
        bank.life(ACCOUNTS, 1)
        fold_all(world)
        archive_log(world)
        trim_all(world)
        archived = archived_records(world)
    assert archived_records(world) == archived == records_of(world, world.events_topic)
    archive_log(world)
    is_exact(world, archived)


@pytest.mark.slow
def test_a_trimmer_that_wakes_up_late_cuts_what_it_verified(bank: Bookkeeper) -> None:
    world = bank.world
    archive_log(world)
    before = records_of(world, world.events_topic)
    with frozen(world, "archive verified", "archive", "trim", "--yes", "--keep", "10"):
        trim_all(world)
        assert held(world) == 0
        bank.life(ACCOUNTS, 2)
    assert held(world) == 2 * len(ACCOUNTS)
    assert records_of(world, world.events_topic)[:10] == before[:10]
