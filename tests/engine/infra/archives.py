"""A bank whose log is archived in short files, what must hold of an archive, and processes that are killed while they make one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from infra.archive import write
from infra.archive.jobs import check_archive
from infra.archive.manifest import ArchiveFile, files_of
from infra.archive.read import read_archived
from infra.archive.store import IDENTITY
from infra.database.connect import connect
from infra.log import topics
from infra.log.records import Record
from infra.log.topics import describe
from infra.settings import Settings
from projections.engine.operate.trim import plan_trim, trim_log
from tests.engine.bookkeeper import Bookkeeper, fold_all
from tests.engine.spine import delete, set_up
from tools.testing.fixtures import ROOT
from tools.testing.waiting import DEADLINE_S, until

ACCOUNTS = [str(number) for number in range(12)]
SHORT = 40
"""Offsets of one file, at most."""


@contextmanager
def banks(world: Settings, folder: Path) -> Iterator[Bookkeeper]:
    """Some life on 12 accounts with void records between, all folded; a file of the archive holds 40 offsets."""
    world = world.model_copy(update={"archive_url": str(folder / "archive"), "archive_restore_days": 0})
    set_up(world)
    keeper = Bookkeeper(world)
    keeper.life(ACCOUNTS, 14)
    for partition in range(world.partitions):
        keeper.garbage(partition)
        keeper.open(partition)
    keeper.life(ACCOUNTS, 4)
    fold_all(world)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(write, "MOST_RECORDS", SHORT)
        yield keeper


def manifest(world: Settings) -> list[ArchiveFile]:
    with connect(world, "test") as db:
        return files_of(db, world.events_topic)


def archived_records(world: Settings) -> list[Record]:
    partitions = range(world.partitions)
    read = (batch for p in partitions for batch, _ in read_archived(world, world.events_topic, p, 0))
    return [record for batch in read for record in batch]


def is_exact(world: Settings, records: list[Record]) -> None:
    """The archive holds these records and no other, its files are those of the manifest, and each is what it was."""
    files = manifest(world)
    assert archived_records(world) == records
    assert sum(file.rows for file in files) == len(records)
    assert on_disk(world) == {file.path for file in files}, on_disk(world) ^ {file.path for file in files}
    assert [one.wrong for one in check_archive(world)] == [[]] * world.partitions


def on_disk(world: Settings) -> set[str]:
    """Paths of files with records below the archive's folder."""
    folder = Path(world.archive)
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    return files - {IDENTITY}


def trim_all(world: Settings) -> int:
    topic, cuts = plan_trim(world)
    return sum(cut.records for cut in trim_log(world, topic, cuts))


def delete_all(world: Settings) -> None:
    delete(world, world.events_topic, topics.describe(world, world.events_topic).end)


def held(world: Settings) -> int:
    """How many records Kafka holds."""
    topic = describe(world, world.events_topic)
    return sum(topic.end.values()) - sum(topic.first.values())


_STRUCK = f"""
import os, signal, sys
from infra.processes import faultpoints
from infra.archive import write
write.MOST_RECORDS = {SHORT}
point, left, action = sys.argv[1], int(sys.argv[2]), getattr(signal, sys.argv[3])
def hook(at):
    global left
    left -= at == point
    if at == point and left == 0:
        os.kill(os.getpid(), action)
faultpoints.hook = hook
sys.argv = ["samefold", *sys.argv[4:]]
from tools.cli import main
main()
"""


def struck(world: Settings, point: str, nth: int, action: str, *arguments: str) -> subprocess.Popen[bytes]:
    """`samefold ARGUMENTS` in a process that gets a signal where it reaches the point for the nth time."""
    return subprocess.Popen(
        [sys.executable, "-c", _STRUCK, point, str(nth), action, *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT)} | world.environment(),
        stdout=subprocess.DEVNULL,
    )


@contextmanager
def frozen(world: Settings, point: str, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """Such a process, frozen at the point; it goes on when the `with` ends, and must then end well."""
    process = struck(world, point, 1, "SIGSTOP", *arguments)
    try:
        seen = psutil.Process(process.pid)
        until(lambda: seen.status() == psutil.STATUS_STOPPED, f"it is frozen at '{point}'")
        yield process
        seen.resume()
        assert process.wait(DEADLINE_S) == 0
    finally:
        process.kill()
        process.wait()
