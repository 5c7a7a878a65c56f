"""make test + test-all + prove: what needs Spark anyway; processes of their own take longer; a small disk takes root to mount.

The lake: its tables are the fold of the log, whole at any moment for readers that know nothing of Samefold, whatever is killed.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from datetime import UTC, date, datetime
from itertools import chain
from pathlib import Path
from threading import Event as Flag
from types import SimpleNamespace
from typing import Any, ClassVar

import duckdb
import msgspec
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

import spark_jobs
from domain.accounts import MoneyDeposited
from domain.engine.contexts import context_of, contexts
from domain.language import fact
from infra.archive.whole_log import read_range
from infra.database.connect import DatabaseUnavailable, session
from infra.errors import NotConfigured, SamefoldError
from infra.log.records import EventRecord
from infra.log.rule import START, read
from infra.log.topics import TopicChanged
from infra.processes import faultpoints
from infra.processes.faultpoints import LAKE, Point
from infra.settings import Settings
from projections.engine.fold.errors import UnknownEvent
from projections.engine.rebuild import claims
from spark_jobs.engine import datasets as of_lake
from spark_jobs.engine import lake, lake_files
from spark_jobs.engine.datasets import BadDataset, DatasetFailed, Rows, datasets
from spark_jobs.engine.lake import DatasetChanged, LakeBusy, lake_session, update, verify
from spark_jobs.engine.lake_files import DATA, HIDDEN, Lake, LakeUnavailable
from spark_jobs.engine.source import Pin
from spark_jobs.engine.tables import Log
from tests.engine.bookkeeper import DAY, Bookkeeper
from tests.engine.infra.archives import struck
from tests.engine.spine import beside, set_up
from tests.engine.tools.service_trees import Tree, copy_of_this_tree
from tools.testing.fixtures import Samefold, dev_env
from tools.testing.given_log import GivenLog
from tools.testing.waiting import DEADLINE_S

DEPOSITS, OPENINGS, TURNOVER = "events/accounts.MoneyDeposited", "events/accounts.AccountOpened", "monthly_turnover"
ACCOUNTS = [str(number) for number in range(6)]


@pytest.fixture
def bank(world: Settings, spark_place: Path, tmp_path: Path) -> Bookkeeper:
    """A bank whose lake is a folder."""
    world = world.model_copy(update={"lake_url": str(tmp_path / "lake")})
    (spark_place / "dev.env").write_text(dev_env(world))
    set_up(world)
    return Bookkeeper(world)


def by_duckdb(world: Settings, name: str, columns: str) -> list[Any]:
    found = duckdb.sql(f"select {columns} from '{world.lake}/{name}/**/*.parquet' order by all")
    assert found is not None
    return found.fetchall()


def by_pandas(world: Settings, name: str) -> pd.DataFrame:
    return pd.read_parquet(Path(world.lake) / name)


def deposits_of_the_log(world: Settings, ends: dict[int, int]) -> list[tuple[Any, ...]]:
    """By a fold of its own: where each deposit that counts is, and how much it was."""
    return sorted(
        (partition, counted.offset, json.loads(bytes(event.data))["cents"])
        for partition, end in ends.items()
        for counted in read(START, chain(*read_range(world, world.events_topic, partition, 0, end)))[1]
        for event in counted.commit.events
        if event.type == "MoneyDeposited"
    )


def is_exact(world: Settings) -> int:
    """Both readers see the deposits of the log up to the manifest's positions, each once; how many."""
    manifest = Lake(world).manifest(DEPOSITS)
    assert manifest is not None
    expected = deposits_of_the_log(world, {**manifest.ends})
    assert by_duckdb(world, DEPOSITS, 'partition, "offset", cents') == expected
    table = by_pandas(world, DEPOSITS)
    assert sorted(zip(table.partition, table.offset, table.cents, strict=True)) == expected
    return len(expected)


class Killed(BaseException):
    """Where a process would have died."""


@contextmanager
def killed_at(point: Point, nth: int = 1) -> Iterator[None]:
    left = nth

    def hook(at: Point) -> None:
        nonlocal left
        left -= at == point
        if at == point and not left:
            raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(faultpoints, "hook", hook)
        try:
            yield
        except Killed:
            return
    pytest.fail(f"'{point}' was not reached")


def test_killed_at_each_step_beside_live_traffic_readers_see_each_event_once(
    bank: Bookkeeper, spark: SparkSession
) -> None:
    world, over, some = bank.world, Flag(), [DEPOSITS, TURNOVER]

    def live() -> None:
        while not over.wait(0.05):
            bank.life(ACCOUNTS, 5)
            bank.garbage(1)
            bank.commit("1", MoneyDeposited(cents=1_000_000, on=DAY), epoch=9)  # void, and so are those behind it
            bank.life(["1"], 2)
            for partition in range(world.partitions):
                bank.open(partition)

    bank.life(ACCOUNTS, 5)
    with beside(live, over.set):
        update(world, spark, some)
        seen = is_exact(world)
        for point in LAKE:
            with killed_at(point):
                update(world, spark, some)
            if point == "dataset committed":
                assert is_exact(world) > seen
            else:
                assert is_exact(world) == seen
                assert len(list(Path(world.lake, HIDDEN, DEPOSITS, DATA).rglob("*.parquet"))) > len(
                    list(Path(world.lake, DEPOSITS).rglob("*.parquet"))
                )
            update(world, spark, some)
            assert is_exact(world) > seen
            seen = is_exact(world)
    update(world, spark, some)
    is_exact(world)
    assert [one["differs"] for one in verify(world, spark, some)] == [False, False]
    moved = by_duckdb(world, DEPOSITS, "count(*)")[0][0]
    assert by_pandas(world, TURNOVER).movements.sum() > moved
    Lake(world).sweep(DEPOSITS)
    left = {path.name for path in Path(world.lake, HIDDEN, DEPOSITS).rglob("*.parquet")}
    assert left == {path.name for path in Path(world.lake, DEPOSITS).rglob("*.parquet")}


@pytest.mark.slow
def test_all_tables_are_there_without_any_file_and_an_update_writes_only_what_is_new(
    bank: Bookkeeper, spark: SparkSession, samefold: Samefold, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lake, "MANY", 2)
    world = bank.world
    assert {one["rows"] for one in update(world, spark)} == {0}, "a log of no commits"
    bank.life(ACCOUNTS, 5)
    done = {one["name"]: (one["what"], one["rows"]) for one in update(world, spark)}
    assert done.keys() == datasets().keys()
    assert done[DEPOSITS] == ("added", 18)
    bank.commit("1", MoneyDeposited(cents=7, on=DAY), by="ada")
    bank.flush()
    done = {one["name"]: (one["what"], one["rows"]) for one in update(world, spark)}
    assert (done[DEPOSITS], done[OPENINGS], done[TURNOVER]) == (("added", 1), ("added", 0), ("made", 6))
    assert {one["what"] for one in update(world, spark)} == {"unchanged"}
    assert not any(one["differs"] for one in verify(world, spark))
    assert is_exact(world) == 19
    assert len(list(Path(world.lake, DEPOSITS).rglob("*.parquet"))) == 1, "compacted"
    [columns] = by_duckdb(world, DEPOSITS, 'stream, id, "by", type, cents, details.purpose, day = "time"::date')[-1:]
    assert columns == ("accounts/5", "5", None, "MoneyDeposited", 15, "rent", True)
    told = json.loads(samefold("lake", "status", "--json", settings=world).stdout)["datasets"]
    assert {(one["state"], one["behind"]) for one in told} == {("ready", 0)}
    assert "monthly_turnover" in samefold("lake", "status", settings=world).stdout
    asked = samefold("lake", "drop", TURNOVER, settings=world, given="")
    assert (asked.returncode, "add --yes" in asked.stderr, TURNOVER in Lake(world).datasets()) == (1, True, True)
    Path(world.lake, TURNOVER).unlink()  # as a removal does first, which was killed then
    assert samefold("lake", "drop", TURNOVER, "--yes", settings=world).returncode == 0
    assert not Path(world.lake, HIDDEN, TURNOVER).exists()
    Lake(world).commit("former", lake_files.Manifest("1", "", "", {}, "", (), False, (), datetime.now(UTC)))
    told = samefold("lake", "status", settings=world).stdout
    assert "missing: `samefold lake update`\ngone: `samefold lake drop former`\n" in told
    asked = samefold("lake", "drop", TURNOVER, settings=world, given="")
    assert (asked.returncode, "There is no dataset 'monthly_turnover'" in asked.stderr) == (2, True)


@fact
class Reopened:
    stored_as: ClassVar[str] = "Opened"
    day: date
    event_day: int = 1
    id: int = 2
    event_id: int = 3
    On: int = 4
    on: int = 5


@fact
class Nothing:
    pass


RENAMED = context_of(
    SimpleNamespace(  # type: ignore[arg-type]
        __name__="domain.renamed",
        Command=Nothing,
        Event=Reopened | Nothing,
        State=Nothing,
        STATE_VERSION=1,
        decide=list,
        evolve=max,
    )
)


def test_a_renamed_class_has_its_rows_and_each_field_a_column_whatever_its_name(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(contexts(), RENAMED.name, RENAMED)
    log = GivenLog(
        spark, [("renamed/1", Reopened(day=DAY)), ("renamed/2", Reopened(day=DAY)), ("renamed/3", Nothing())]
    )
    monkeypatch.setattr(of_lake, "Log", lambda *_, **__: log)
    asked = {name: one for name, one in datasets().items() if "renamed" in name}
    rows = Rows(spark, asked, dict.fromkeys(asked, Pin("", "", {}, datetime.now(UTC))))
    without, with_fields = (rows.of(one)[0].collect() for one in asked.values())
    assert [(row.type, row.day) for row in without] == [("Nothing", date(1970, 1, 1))]
    own = ("event_event_day", "event_day", "event_event_id", "event_id", "On", "event_on")
    expected = ("Opened", date(1970, 1, 1), DAY, 1, 2, 3, 4, 5)
    assert [tuple(row[name] for name in ("type", "day", *own)) for row in with_fields] == [expected] * 2
    assert [rows.of(one)[1] for one in asked.values()] == [1, 2]
    rows.close()


@pytest.mark.slow
def test_a_log_without_any_record_gives_tables_without_rows(
    world: Settings, spark: SparkSession, spark_place: Path, tmp_path: Path
) -> None:
    world = world.model_copy(update={"lake_url": str(tmp_path / "lake")})
    (spark_place / "dev.env").write_text(dev_env(world))
    set_up(world)
    some = [DEPOSITS, TURNOVER]
    assert [(one["what"], one["rows"]) for one in update(world, spark, some)] == [("made", 0)] * 2
    assert [one["differs"] for one in verify(world, spark, some)] == [False] * 2
    Bookkeeper(world).life(ACCOUNTS, 5)
    assert [one["rows"] for one in update(world, spark, some)] == [18, 6]
    assert is_exact(world) == 18


@pytest.mark.slow
def test_an_event_that_the_code_does_not_know_is_named(
    bank: Bookkeeper, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    bank.commit("1", MoneyDeposited(cents=1, on=DAY), events=[EventRecord("Renamed", msgspec.Raw(b"{}"))])
    bank.flush()
    begun, table = [], Log.table

    def counted(log: Log, *args: Any, **options: str) -> Any:
        begun.append(options)
        return table(log, *args, **options)

    monkeypatch.setattr(Log, "table", counted)
    with pytest.raises(UnknownEvent, match=f"{OPENINGS}.*Renamed.*These failed, too: {DEPOSITS}"):
        update(bank.world, spark, [DEPOSITS, OPENINGS])
    assert len(begun) == 1, "the log is not read again for each table"
    assert Lake(bank.world).datasets() == []


@pytest.mark.slow
def test_only_what_a_run_wrote_counts_and_what_no_run_needs_leaves_with_its_folders(
    bank: Bookkeeper, spark: SparkSession
) -> None:
    bank.life(ACCOUNTS, 1)
    update(bank.world, spark, [DEPOSITS])
    files = Lake(bank.world)
    manifest, data = files.manifest(DEPOSITS), Path(bank.world.lake, HIDDEN, DEPOSITS, DATA)
    assert manifest is not None
    [written] = manifest.files
    run, _, place = written.path.partition("/")
    late = data / run / "_temporary" / "0" / place  # of a task that Spark gave up
    late.parent.mkdir(parents=True)
    late.write_bytes((data / written.path).read_bytes())
    (data / "killed" / "day=2026-01-01").mkdir(parents=True)
    assert files.files(DEPOSITS, run) == [written]
    files.sweep(DEPOSITS)
    assert not late.exists()
    assert [one.name for one in data.iterdir()] == [run]

    (at := Path(bank.world.lake, DEPOSITS, lake_files.MANIFEST)).write_text("{}")  # as a later release may write it
    files.sweep(DEPOSITS)
    assert (data / written.path).exists(), "readers of an object store have this file only"
    at.unlink()
    files.sweep(DEPOSITS)
    assert [*data.iterdir()] == []


@pytest.mark.slow
def test_an_event_that_can_be_no_row_keeps_back_the_table_of_its_class_alone(
    bank: Bookkeeper, spark: SparkSession
) -> None:
    body = b'{"cents": 36893488147419103232, "on": "2026-01-01"}'
    bank.life(ACCOUNTS, 5)
    bank.commit("1", MoneyDeposited(cents=1, on=DAY), events=[EventRecord("MoneyDeposited", msgspec.Raw(body))])
    bank.flush()
    with pytest.raises(SamefoldError, match=f"Dataset '{DEPOSITS}' could not be made: .*accounts/1.*{TURNOVER}"):
        update(bank.world, spark, ["events", TURNOVER])
    assert {*Lake(bank.world).datasets()} == {name for name in datasets() if name.startswith("events/")} - {DEPOSITS}
    assert len(by_pandas(bank.world, OPENINGS)) == 6


@pytest.mark.slow
def test_verify_finds_a_row_that_is_missing_and_one_that_is_there_twice(bank: Bookkeeper, spark: SparkSession) -> None:
    world = bank.world
    bank.life(ACCOUNTS, 5)
    update(world, spark, [DEPOSITS])
    [file] = Path(world.lake, DEPOSITS).rglob("*.parquet")
    for checksum in Path(world.lake, HIDDEN).rglob("*.crc"):  # Hadoop's own
        checksum.unlink()
    table = pq.read_table(file, partitioning=None)
    cents = table.schema.get_field_index("cents")
    other = table.set_column(cents, table.schema.field(cents), [[*table["cents"].to_pylist()[:-1], 1]])
    for changed in (table[1:], pa.concat_tables([table, table[:1]]), other):
        pq.write_table(changed, file)
        assert [one["differs"] for one in verify(world, spark, [DEPOSITS])] == [True]


class Remote(Lake):
    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.is_local = False


@pytest.mark.slow
def test_where_there_are_no_links_the_manifest_says_which_files_count(
    bank: Bookkeeper, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lake, "Lake", Remote)
    world, some = bank.world, [DEPOSITS, TURNOVER]
    for name in some:
        Path(world.lake, name).mkdir(parents=True)  # an object store has no folders
    for _ in range(2):
        bank.life(ACCOUNTS, 5)
        update(world, spark, some)
        with killed_at("dataset written"):
            bank.life(ACCOUNTS, 5)
            update(world, spark, some)
        assert [one["differs"] for one in verify(world, spark, some)] == [False, False]
        listed = next(one for one in lake.status(world) if one["name"] == DEPOSITS)
        found = duckdb.read_parquet([url.removeprefix("file://") for url in listed["files"]])
        assert len(found) == len(deposits_of_the_log(world, listed["positions"])) == listed["rows"]
    lake.drop(world, some)
    assert Lake(world).datasets() == []


def test_a_second_run_is_refused_and_says_by_whom(bank: Bookkeeper, spark: SparkSession) -> None:
    for work in (update, verify):  # whose files an update would move
        with lake.opened(bank.world, "update"), pytest.raises(LakeBusy, match="samefold lake update, pid"):
            work(bank.world, spark)


def test_a_run_that_ended_just_now_is_not_named(bank: Bookkeeper, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "who", lambda *_: "")
    with lake.opened(bank.world, "update"), pytest.raises(LakeBusy, match=r"works on the lake\. "):
        lake.drop(bank.world, [])


def test_the_lake_is_free_when_a_run_has_ended_though_its_session_ends_later(
    bank: Bookkeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    with session(bank.world, "test") as kept:
        with monkeypatch.context() as patch:
            patch.setattr(lake, "session", lambda *_: nullcontext(kept))
            with lake.opened(bank.world, "update"):
                pass
        with lake.opened(bank.world, "verify"):
            pass


@pytest.mark.slow
def test_a_run_that_lost_its_lock_changes_nothing(
    bank: Bookkeeper, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    bank.life(ACCOUNTS, 5)
    monkeypatch.setattr(faultpoints, "hook", lambda _: end_sessions(bank.world))
    with pytest.raises(DatabaseUnavailable):
        update(bank.world, spark, [DEPOSITS])
    assert Lake(bank.world).datasets() == []


def end_sessions(world: Settings) -> None:
    import psycopg

    with psycopg.connect(world.database, autocommit=True) as db:
        db.execute(
            "select pg_terminate_backend(pid, 5000) from pg_stat_activity "
            "where datname = current_database() and application_name like 'samefold lake%'"
        )


@pytest.mark.slow
def test_a_recreated_topic_is_refused(bank: Bookkeeper, spark: SparkSession) -> None:
    world = bank.world
    bank.life(ACCOUNTS, 1)
    update(world, spark, [DEPOSITS])
    manifest = Lake(world).manifest(DEPOSITS)
    assert manifest is not None
    file = Path(world.lake, DEPOSITS, lake_files.MANIFEST)
    file.write_text(file.read_text().replace(manifest.topic_id, "another"))
    with pytest.raises(TopicChanged, match="drop"):
        update(world, spark, [DEPOSITS])
    assert {one["state"] for one in lake.status(world) if one["name"] == DEPOSITS} == {"of another topic"}


# ── the author's datasets ──


@pytest.fixture
def author(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Writes a file of spark_jobs/, and forgets the one before."""
    folder = tmp_path / "spark_jobs"
    folder.mkdir()
    monkeypatch.setattr(spark_jobs, "__path__", [*spark_jobs.__path__, str(folder)])

    def write(text: str, name: str = "mine") -> None:
        sys.modules.pop(f"spark_jobs.{name}", None)
        shutil.rmtree(folder / "__pycache__", ignore_errors=True)
        (folder / f"{name}.py").write_text(text)

    yield write
    sys.modules.pop("spark_jobs.mine", None)
    vars(spark_jobs).pop("mine", None)


HEAD = """
from pyspark.sql import functions as F
from domain.accounts import MoneyDeposited
VERSION = 1
"""


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("VERSION = 1", "no function `table"),
        ("VERSION = 1\ndef table(): ...", "no function `table"),
        ("def table(log): ...", "has no VERSION"),
        ("VERSION = 1\nPARTITIONED_BY = 'day'\ndef table(log): ...", "PARTITIONED_BY = 'day'"),
        ("VERSION = 1\nPARTITIONED_BY = ('_day',)\ndef table(log): ...", "do not begin with _"),
        ("VERSION = 1\nINCREMENTAL = 1\ndef table(log): ...", "INCREMENTAL = 1"),
        ("import not_there", "No module named 'not_there'"),
        ("def", "SyntaxError"),
    ],
)
def test_a_file_that_is_no_dataset_is_named(author: Callable[..., None], text: str, told: str) -> None:
    author(text)
    with pytest.raises(BadDataset, match=f"spark_jobs/mine.py.*{told}"):
        datasets()


@pytest.mark.parametrize("name", ["", "events", "events/"])
def test_a_name_of_no_dataset_is_refused(name: str) -> None:
    with pytest.raises(BadDataset, match=f"no dataset '{name}'"):
        lake.chosen([name], ["mine"])


@pytest.mark.parametrize("name", ["my-dataset", "events", "Über", "a.b"])
def test_a_name_that_is_none_is_refused(author: Callable[..., None], name: str) -> None:
    author("VERSION = 1\ndef table(log): ...", name)
    with pytest.raises(BadDataset, match=f"{name}.py can't be a dataset"):
        datasets()


@pytest.mark.slow
def test_a_dataset_that_fails_is_named(bank: Bookkeeper, spark: SparkSession, author: Callable[..., None]) -> None:
    bank.life(ACCOUNTS, 1)
    for body, told in [
        ("raise ValueError('no idea')", "'mine' could not be made: ValueError: no idea"),
        ("return None", "returned NoneType"),
        ("return log.events(MoneyDeposited).select('nowhere')",
         "'mine' could not be made: AnalysisException: .*nowhere.* Mend the cause in spark_jobs/mine.py"),
        ("return log.events(MoneyDeposited).select(F.raise_error(F.lit('odd')))", "'mine' could not be made: .*odd"),
        ("return log.events(MoneyDeposited).select(F.udf(lambda _: 1 / 0, 'double', useArrow=False)('id'))",
         "'mine' could not be made: ZeroDivisionError: division by zero"),
        ("return log.events(MoneyDeposited).select('id', 'id')", "'mine' could not be made: .*id"),
    ]:  # fmt: skip
        author(f"{HEAD}\ndef table(log):\n    {body}\n")
        with pytest.raises(DatasetFailed, match=told) as error:
            update(bank.world, spark, ["mine"])
        assert len(error.value.message) < 300
        assert not re.search(r"Project|\+-|SQLSTATE|\n", error.value.message)
    author(f"{HEAD}PARTITIONED_BY = ('month',)\ndef table(log):\n    return log.events(MoneyDeposited)\n")
    with pytest.raises(DatasetFailed, match="without 'month'"):
        update(bank.world, spark, ["mine"])
    assert Lake(bank.world).datasets() == []
    with pytest.raises(BadDataset, match="no dataset 'yours'"):
        update(bank.world, spark, ["yours"])


@pytest.mark.slow
def test_columns_change_with_the_version_only(
    bank: Bookkeeper, spark: SparkSession, author: Callable[..., None]
) -> None:
    table = "def table(log):\n    return log.events(MoneyDeposited, columns=['id', 'cents'])"
    author(f"{HEAD}{table}")
    bank.life(ACCOUNTS, 5)
    update(bank.world, spark, ["mine"])
    for change in (".withColumnRenamed('cents', 'amount')", ".withColumn('cents', F.col('cents').cast('int'))"):
        author(f"{HEAD}{table}{change}")
        bank.life(ACCOUNTS, 5)
        with pytest.raises(DatasetChanged, match="Raise its VERSION"):
            update(bank.world, spark, ["mine"])
        assert by_duckdb(bank.world, "mine", "count(*), sum(cents)") == [(18, 225)]
    author(f"{HEAD}VERSION = 2\n{table}{change}")
    update(bank.world, spark, ["mine"])
    assert by_duckdb(bank.world, "mine", "count(*), typeof(any_value(cents))") == [(18 * 3, "INTEGER")]
    author(f"{HEAD}{table}")
    bank.life(ACCOUNTS, 5)
    with pytest.raises(DatasetChanged, match=r"'mine' was made in VERSION 2, and this code has 1\. .*lake drop mine"):
        update(bank.world, spark, [DEPOSITS, "mine"])
    assert by_duckdb(bank.world, "mine", "count(*)") == [(18 * 3,)]
    states = {one["name"]: one["state"] for one in lake.status(bank.world)}
    assert (states["mine"], states[DEPOSITS], states[TURNOVER]) == ("newer", "ready", "missing")


@pytest.mark.slow
def test_an_incremental_dataset_gets_only_what_is_new(
    bank: Bookkeeper, spark: SparkSession, author: Callable[..., None]
) -> None:
    author(f"{HEAD}INCREMENTAL = True\ndef table(log):\n    return log.events(MoneyDeposited).select('id', 'cents')")
    for rounds in (1, 2):
        bank.life(ACCOUNTS, 5)
        assert [one["rows"] for one in update(bank.world, spark, ["mine"])] == [18]
        assert by_duckdb(bank.world, "mine", "count(*)") == [(18 * rounds,)]
    assert [one["differs"] for one in verify(bank.world, spark, ["mine"])] == [False]
    author(
        f"{HEAD}INCREMENTAL = True\ndef table(log):\n    return log.events(MoneyDeposited).groupBy('id').count()",
        "mine",
    )
    author(
        f"{HEAD}VERSION = 2\nINCREMENTAL = True\ndef table(log):\n    return log.events(MoneyDeposited).groupBy('id').count()"
    )
    for _ in range(2):
        bank.life(ACCOUNTS, 5)
        update(bank.world, spark, ["mine"])
    assert [one["differs"] for one in verify(bank.world, spark, ["mine"])] == [True], "its pieces are not the whole"


@pytest.mark.slow
def test_verify_compares_the_others_where_one_fails_and_values_of_any_type(
    bank: Bookkeeper, spark: SparkSession, author: Callable[..., None]
) -> None:
    bank.life(ACCOUNTS, 1)
    author(f"{HEAD}def table(log):\n    return log.events()", "variants")
    author(f"{HEAD}def table(log):\n    return log.events(MoneyDeposited)")
    update(bank.world, spark, ["mine", "variants", DEPOSITS])
    assert [one["differs"] for one in verify(bank.world, spark, ["variants"])] == [False]
    odd = 'log.events(MoneyDeposited).select(F.col("id").alias("my größe"), F.col("cents").alias("a.b`c"))'
    author(f'{HEAD}PARTITIONED_BY = ("my größe",)\ndef table(log):\n    return {odd}', "odd")
    update(bank.world, spark, ["odd"])
    assert [one["differs"] for one in verify(bank.world, spark, ["odd"])] == [False]
    for name in ("mine", "variants"):
        author(f"{HEAD}def table(log):\n    raise ValueError('by mistake')", name)
    with pytest.raises(DatasetFailed, match=r"'mine' could not be made: .*by mistake.*These failed, too: variants"):
        verify(bank.world, spark)


# ── stores ──


@pytest.mark.prove(part="chaos")
def test_a_full_disk_is_named_and_readers_keep_what_they_had(
    bank: Bookkeeper, spark: SparkSession, tmp_path: Path
) -> None:
    """It takes the right to mount a small file system."""
    place = tmp_path / "small"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", place], check=True)
    world = bank.world.model_copy(update={"lake_url": str(place / "lake")})
    try:
        bank.life(ACCOUNTS, 5)
        update(world, spark, [DEPOSITS])
        with (place / "filling").open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(4096))
        bank.life(ACCOUNTS, 400)
        with pytest.raises(DatasetFailed, match="no space is left"):
            update(world, spark, [DEPOSITS])
        assert is_exact(world) == 18
    finally:
        subprocess.run(["umount", "--lazy", place], check=True)  # Spark still has files open


@pytest.mark.slow
def test_what_the_store_refuses_is_not_blamed_on_the_dataset(
    bank: Bookkeeper, spark: SparkSession, author: Callable[..., None]
) -> None:
    bank.life(ACCOUNTS, 1)
    author(
        f"{HEAD}PARTITIONED_BY = ('id',)\ndef table(log):\n"
        "    return log.events(MoneyDeposited).selectExpr('cents', \"repeat('x', 300) as id\")"
    )
    with pytest.raises(DatasetFailed, match="'mine' was not written") as refused:
        update(bank.world, spark, ["mine"])
    assert refused.value.hint
    assert "LAKE_URL" in refused.value.hint


@pytest.mark.parametrize("url", ["nowhere://lake", "/proc/lake"])
def test_a_store_that_is_not_there_is_named(world: Settings, url: str) -> None:
    world = world.model_copy(update={"lake_url": url})
    with pytest.raises(LakeUnavailable, match=url):
        Lake(world).commit("mine", lake_files.Manifest("1", "", "", {}, "", (), False, (), datetime.now(UTC)))


@pytest.mark.parametrize("url", ["s3://user:secret@lake", "https://lake/?signature=1"])
def test_credentials_in_the_url_are_refused_and_not_shown(url: str) -> None:
    with pytest.raises(SamefoldError, match="lake_url holds credentials") as error:
        Settings(lake_url=url)
    assert "secret" not in str(error.value)


def test_a_cluster_needs_a_url(world: Settings) -> None:
    with pytest.raises(NotConfigured, match="SAMEFOLD_LAKE_URL is not set"), lake_session(world, "spark://master:7077"):
        pass


# ── processes of their own ──


@pytest.mark.prove(part="chaos")
def test_a_killed_process_leaves_nothing_that_a_reader_sees(bank: Bookkeeper, spark: SparkSession) -> None:
    world = bank.world
    bank.life(ACCOUNTS, 5)
    update(world, spark, [DEPOSITS])
    bank.life(ACCOUNTS, 5)
    process = struck(world, "dataset assembled", 1, "SIGKILL", "lake", "update", DEPOSITS, "--master", "local[2]")
    assert process.wait(DEADLINE_S) == -9
    assert is_exact(world) == 18
    update(world, spark, [DEPOSITS])
    assert is_exact(world) == 36


@pytest.mark.slow
def test_a_table_grows_with_its_events_version(
    bank: Bookkeeper, spark: SparkSession, home: Path, tmp_path: Path
) -> None:
    """Old events get what the upcaster makes of them: the table is made anew."""
    world = bank.world
    bank.life(ACCOUNTS, 5)
    update(world, spark, [OPENINGS, DEPOSITS])
    tree = Tree(copy_of_this_tree(tmp_path / "tree", without=("demo", "benchmarks", "proofs")), home)
    tree.environment |= world.environment()
    tree.write(
        "domain/accounts.py",
        "@fact\nclass AccountOpened:\n    overdraft_limit: CentsOrZero\n    on: date\n    owner: Text = \"\"\n",
        "@fact\nclass AccountOpened:\n    VERSION: ClassVar[int] = 2\n    overdraft_limit: CentsOrZero\n    on: date\n"
        "    branch: Text\n    owner: Text = \"\"\n\n\n"
        "@upcaster(AccountOpened, 1)\ndef account_opened_1(body: Body) -> Body:\n    return {\"branch\": \"old\", **body}\n",
    )  # fmt: skip
    told = json.loads(tree.samefold("lake", "update", OPENINGS, DEPOSITS, "--json", "--master", "local[2]").stdout)
    assert [(one["what"], one["rows"]) for one in told["datasets"]] == [("made", 6), ("unchanged", 0)]
    assert by_duckdb(world, OPENINGS, "any_value(branch), count(*)") == [("old", 6)]
    assert set(by_pandas(world, OPENINGS).branch) == {"old"}


@pytest.mark.slow
def test_a_query_that_is_wrong_is_told_in_two_lines(bank: Bookkeeper, home: Path, tmp_path: Path) -> None:
    tree = Tree(copy_of_this_tree(tmp_path / "tree", without=("demo", "benchmarks", "proofs")), home)
    tree.environment |= bank.world.environment()
    (tree.folder / "spark_jobs/mine.py").write_text(
        f"{HEAD}def table(log):\n    return log.events(MoneyDeposited).select('no')"
    )
    told = tree.samefold("lake", "update", "mine", "--json", "--master", "local[2]", code=1).stderr
    error, hint = told.splitlines()
    assert error.startswith("dataset-failed: Dataset 'mine' could not be made: AnalysisException: [UNRESOLVED_COLUMN")
    assert hint == "  → Mend the cause in spark_jobs/mine.py, then run `samefold lake update mine`."
