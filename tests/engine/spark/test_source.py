"""make test + test-all: what a task reads is quick in this process, and Spark where it runs anyway; errors through it are slow.

The log as tables: rows are those of the reading rule, whatever is pushed down, and what can't be read is named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from pyspark.errors import PySparkException
from pyspark.sql.types import StructType

from domain.accounts import AccountOpened, Details, MoneyDeposited, MoneyWithdrawn
from domain.engine.contexts import contexts
from infra.archive.whole_log import read_range
from infra.log import topics
from infra.log.partitioner import partition_of
from infra.log.records import Commit, EventRecord, Opening, Record, UnreadableRecord, decode_event, encode, time_of
from infra.log.rule import START, Counted, read
from infra.processes.code_identity import CODE, WrongCode
from infra.settings import Settings
from projections.engine.fold.as_of import BadMoment, Cut
from projections.engine.fold.errors import UnknownEvent, UnreadableEvent
from spark_jobs.engine import source, tables
from spark_jobs.engine.services import WrongKafka
from spark_jobs.engine.source import BadOption, Batch, Pin, Samefold, pinned
from spark_jobs.engine.tables import Log, commits, events, records, register
from tests.engine.bookkeeper import DAY, Bookkeeper
from tests.engine.infra.archives import banks, delete_all, held
from tests.engine.spark.shapes import EVERY, SHAPES, WithShapes, in_column
from tests.engine.spine import set_up
from tools.testing.fixtures import dev_env
from tools.testing.waiting import until

if TYPE_CHECKING:
    from spark_jobs.engine.spark import Spark

ACCOUNTS = [str(number) for number in range(8)]
Row = dict[str, Any]
Scan = Callable[..., list[Row]]


@pytest.fixture
def scan(world: Settings, monkeypatch: pytest.MonkeyPatch) -> Scan:
    """The rows that Spark would get: it calls the source like this, in processes that have these settings."""
    for name, value in world.environment().items():
        monkeypatch.setenv(name, value)

    def rows(columns: Sequence[str] = (), **options: str) -> list[Row]:
        batch = batch_of(columns, **options)
        return [row for part in batch.partitions() for found in batch.read(part) for row in found.to_pylist()]

    return rows


def batch_of(columns: Sequence[str] = (), **options: str) -> Batch:
    made = Samefold(options)
    every = made.schema()
    batch = made.reader(StructType([every[name] for name in columns]) if columns else every)
    assert isinstance(batch, Batch)
    return batch


@pytest.fixture
def keeper(world: Settings) -> Bookkeeper:
    """A log with void records of each kind between those that count."""
    set_up(world)
    keeper = Bookkeeper(world)
    keeper.life(ACCOUNTS, 6)
    for partition in range(world.partitions):
        keeper.garbage(partition)
        keeper.garbage(partition, encode(late(partition)))
        keeper.open(partition)
    keeper.commit("0", MoneyDeposited(cents=1, on=DAY), seq=77)
    keeper.flush()
    keeper._seq[partition_of("accounts/0", world.partitions)] -= 1
    keeper.life(ACCOUNTS, 3)
    return keeper


def late(number: int) -> Commit:
    """Of a writer that was fenced before."""
    event = EventRecord("MoneyDeposited", msgspec.Raw(b'{"cents": 5, "on": "2026-01-01"}'))
    return Commit(f"accounts/{number}", 9, [event], "late", 1, "f" * 32, "accepted", None, epoch=99, seq=1)


WholeLog = tuple[list[tuple[int, Counted]], list[Record], dict[tuple[int, int], str]]


def whole(world: Settings) -> WholeLog:
    """By the reading rule, from the log itself: commits that count with their partitions, all records, and why some are void."""
    counted: list[tuple[int, Counted]] = []
    void: dict[tuple[int, int], str] = {}
    every: list[Record] = []
    for partition, end in topics.describe(world, world.events_topic).end.items():
        mine = [one for batch in read_range(world, world.events_topic, partition, 0, end) for one in batch]
        _, found, voids = read(START, mine)
        counted += [(partition, one) for one in found]
        void |= {(partition, one.offset): one.reason for one in voids}
        every += mine
    return counted, every, void


def event_rows(world: Settings) -> Iterator[tuple[Row, EventRecord]]:
    """What every event has, and its body."""
    for partition, (offset, time_ms, commit) in whole(world)[0]:
        context, _, name = commit.stream.partition("/")
        for number, event in enumerate(commit.events, 1):
            yield (
                {
                    "stream": commit.stream,
                    "context": context,
                    "id": name,
                    "type": event.type,
                    "time": time_of(time_ms),
                    "version": commit.version - len(commit.events) + number,
                    "partition": partition,
                    "offset": offset,
                    "command_id": commit.command_id,
                    "correlation_id": commit.command_id,
                    "by": None if commit.by is msgspec.UNSET else commit.by,
                },
                event,
            )


def in_order(rows: list[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: (row["partition"], row["offset"], row.get("version", 0)))


# ── rows ──


def test_all_events_with_bodies(keeper: Bookkeeper, scan: Scan) -> None:
    expected = [row | {"body": bytes(event.data).decode()} for row, event in event_rows(keeper.world)]
    assert len(expected) > 60
    assert in_order(scan()) == in_order(expected)
    assert "late" not in {row["command_id"] for row in expected}
    types = scan(columns=["type"])
    assert sorted(row["type"] for row in types) == sorted(row["type"] for row in expected)


def test_typed_events_of_several_classes(keeper: Bookkeeper, scan: Scan) -> None:
    """The fields of all, null where a class lacks one."""
    classes = {"AccountOpened": AccountOpened, "MoneyWithdrawn": MoneyWithdrawn}
    expected: list[Row] = []
    for row, stored in event_rows(keeper.world):
        if stored.type in classes:
            event: Any = msgspec.json.decode(stored.data, type=classes[stored.type])
            names = ("overdraft_limit", "on", "owner", "cents", "details", "hold")
            fields = {name: getattr(event, name, None) for name in names}
            if isinstance(fields["details"], Details):
                fields["details"] = asdict(event.details)
            expected.append(row | fields)
    assert in_order(scan(events="accounts.AccountOpened, accounts.MoneyWithdrawn")) == in_order(expected)


@pytest.mark.parametrize(
    "read", [{}, {"events": "accounts.AccountOpened,accounts.MoneyWithdrawn"}, {"read": "commits"}]
)
def test_a_column_alone_holds_what_it_holds_among_all(keeper: Bookkeeper, scan: Scan, read: dict[str, str]) -> None:
    """A task decodes only what the asked columns need."""
    more: Row = {"by": "ada", "correlation_id": "their own", "causation_id": "an order"}
    keeper.commit("0", MoneyWithdrawn(cents=1, on=DAY), **more)
    keeper.flush()
    every = scan(**read)
    assert {row["correlation_id"] for row in every} > {"their own"}
    for name in every[0]:
        assert scan([name], **read) == [{name: row[name]} for row in every]


def test_commits_with_what_became_of_them(keeper: Bookkeeper, scan: Scan) -> None:
    rows = in_order(scan(read="commits"))
    counted = whole(keeper.world)[0]
    assert [(row["partition"], row["offset"], row["stream"], row["version"]) for row in rows] == [
        (partition, one.offset, one.commit.stream, one.commit.version) for partition, one in counted
    ]
    assert sum(row["events"] for row in rows) == sum(len(one.commit.events) for _, one in counted)
    refused = [(row["code"], row["message"], row["events"]) for row in rows if row["outcome"] == "rejected"]
    assert set(refused) == {("insufficient-funds", "No.", 0)}
    assert len(refused) + sum(row["outcome"] == "accepted" and row["code"] is None for row in rows) == len(rows)


def test_every_record_with_why_it_has_no_effect(keeper: Bookkeeper, scan: Scan) -> None:
    _, every, void = whole(keeper.world)
    assert set(void.values()) == {"garbage", "epoch", "seq"}
    kinds = {Commit: "commit", Opening: "opening", type(None): None}
    expected = [
        {
            "partition": one.partition,
            "offset": one.offset,
            "time": time_of(one.time_ms),
            "key": one.key,
            "value": one.value,
            "kind": kinds[type(decode_event(one))],
            "void": void.get((one.partition, one.offset)),
        }
        for one in every
    ]
    assert scan(read="records") == expected
    without = [{name: row[name] for name in ("partition", "offset")} for row in expected]
    assert scan(read="records", columns=["partition", "offset"]) == without, "the rule is not asked"


def test_a_log_without_events(world: Settings, scan: Scan) -> None:
    topics.ensure(world)
    assert scan() == scan(read="commits") == scan(read="records") == []
    assert list(batch_of().read(None)) == [], "which is what PySpark hands to a task where there is no partition"


def live_on(keeper: Bookkeeper, scan: Scan) -> None:
    """Until later half and earlier half have different times."""

    def differ() -> bool:
        keeper.life(ACCOUNTS, 1)
        found = [sorted(row["time"] for row in rows) for rows in (scan(), scan(read="records"))]
        return all(bool(times[0] < times[len(times) // 2] < times[-1]) for times in found)

    until(differ, "the clock moves")


def test_as_of_positions_and_times(keeper: Bookkeeper, scan: Scan) -> None:
    live_on(keeper, scan)
    every = scan(read="records")
    cut = scan(read="records", as_of="1:5")
    assert cut == [row for row in every if row["partition"] != 1 or row["offset"] < 5]
    middle = sorted(row["time"] for row in every)[len(every) // 2]
    moment = middle.isoformat(timespec="milliseconds")
    before = scan(read="records", as_of=moment)
    assert before == [row for row in every if row["time"] <= middle]
    assert len(scan(["offset"], read="records", as_of=moment)) == len(before)
    assert 0 < len(before) < len(every)
    pin = pinned(keeper.world)
    ends = {partition: Cut(end.next_offset, int(middle.timestamp() * 1_000)) for partition, end in pin.ends.items()}
    beyond = {"read": "records", "pin": str(pin._replace(ends=ends))}
    assert scan(**beyond) == before, "Kafka's index of times is only a bound"
    assert len(scan(columns=["offset"], **beyond)) == len(before), "also without the rule"
    assert {row["offset"] for row in scan(as_of="1:5") if row["partition"] == 1} <= set(range(5))
    for wrong in ("never", "1:999999", "2099-01-01T00:00:00Z"):
        with pytest.raises(BadMoment):
            scan(as_of=wrong)


def test_a_scan_ends_where_the_log_ended_when_it_was_made(keeper: Bookkeeper, scan: Scan) -> None:
    pin = pinned(keeper.world)
    assert Pin.parse(str(pin)) == pin
    before = scan()
    keeper.life(ACCOUNTS, 2)
    assert in_order(scan(pin=str(pin))) == in_order(before)
    assert len(scan()) > len(before)


def test_archive_and_tail(world: Settings, scan: Scan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from infra.archive.jobs import archive_log

    with banks(world, tmp_path) as bank:
        for name, value in bank.world.environment().items():
            monkeypatch.setenv(name, value)
        before = scan(), scan(read="records")
        archive_log(bank.world)
        delete_all(bank.world)
        assert (scan(), scan(read="records")) == before
        bank.life(ACCOUNTS, 1)
        assert 0 < held(bank.world) < len(before[1])
        assert len(scan(read="records")) == len(before[1]) + len(ACCOUNTS)
        middle = sorted(row["time"] for row in before[0])[len(before[0]) // 2]
        late = [row for row in scan() if row["time"] >= middle]
        assert in_order(scan(since=middle.isoformat())) == in_order(late)
        assert len(late) > len(ACCOUNTS), "most of them are in the archive"


# ── a part of the log ──


def test_a_stream_and_a_time(keeper: Bookkeeper, scan: Scan) -> None:
    live_on(keeper, scan)
    for given in ({}, {"events": "accounts.MoneyWithdrawn,accounts.FeeCharged"}, {"read": "commits"}):
        every = scan(**given)
        middle = sorted(row["time"] for row in every)[len(every) // 2]
        mine = [row for row in every if row["stream"] == "accounts/3"]
        assert scan(**given, stream="accounts/3") == mine != []
        assert scan(**given, stream="accounts/none") == []
        late = [row for row in every if row["time"] >= middle]
        assert scan(**given, since=middle.isoformat()) == late
        pin = pinned(keeper.world)._replace(at=middle + timedelta(hours=1))
        assert scan(**given, pin=str(pin), since="-1h") == late, "from when the table was made"
        assert 0 < len(late) < len(every) or given
        assert scan(**given, since="1970-01-01T00:00:00Z") == scan(**given, since="1901-01-01T00:00:00Z") == every
        assert scan(**given, since="2999-01-01T00:00:00Z") == []
    records = scan(read="records", stream="accounts/3")
    assert {row["key"] for row in records} == {b"accounts/3"}
    assert len(scan(["offset"], read="records", stream="accounts/3")) == len(records)
    assert len(batch_of().partitions()) == 4
    assert len(batch_of(stream="accounts/3").partitions()) == 1, "the others are not read"
    with pytest.raises(BadOption, match="since"):
        scan(since="0:1")


def test_a_table_of_a_topic_that_was_made_anew(keeper: Bookkeeper, scan: Scan) -> None:
    pin = str(pinned(keeper.world)._replace(topic_id="another"))
    with pytest.raises(topics.TopicChanged):
        scan(pin=pin)


# ── versions, and bodies that are hard to read ──


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(contexts(), SHAPES.name, SHAPES)


def put(keeper: Bookkeeper, *bodies: tuple[str, bytes], stream: str = "shapes/1") -> None:
    for version, (kind, body) in enumerate(bodies, 1):
        keeper.commit("x", stream=stream, version=version, events=[EventRecord(kind, msgspec.Raw(body))])
    keeper.flush()


@pytest.mark.usefixtures("shapes")
def test_older_versions_are_led_to_todays(keeper: Bookkeeper, scan: Scan) -> None:
    put(keeper, ("Grown", b'{"size":5}'), ("Grown/2", b'{"height":6,"on":"2026-05-05"}'))
    typed = scan(events="shapes.Grown", columns=["type", "height", "on"])
    assert [(row["type"], row["height"], row["on"].month) for row in typed] == [("Grown", 5, 1), ("Grown", 6, 5)]
    bodies = [row["body"] for row in scan(["context", "body"]) if row["context"] == "shapes"]
    assert bodies == ['{"height":5,"on":"2026-01-01"}', '{"height":6,"on":"2026-05-05"}']


@pytest.mark.usefixtures("shapes")
def test_a_long_body_and_a_field_with_the_name_of_another_column(keeper: Bookkeeper, scan: Scan) -> None:
    text = "ä" * 450_000
    put(keeper, ("Wide", msgspec.json.encode({"body": text, "offset": 7})), *[("Wide", b"{}")] * 3)
    [first, *_] = scan(events="shapes.Wide")
    assert (first["body"], first["event_offset"]) == (text, 7)
    assert len(scan(events="shapes.Wide", columns=["body"])) == 4
    [long, *_] = [row["body"] for row in scan() if row["context"] == "shapes"]
    assert msgspec.json.decode(long)["body"] == text


def test_an_event_that_this_code_does_not_know(keeper: Bookkeeper, scan: Scan) -> None:
    """In any table of events: skipped, it would be missing in a sum."""
    put(keeper, ("Renamed", b"{}"), stream="accounts/x")
    for options in ({}, {"events": "accounts.FeeCharged"}):
        with pytest.raises(UnknownEvent, match=r"accounts/x has an event 'Renamed'"):
            scan(**options)
    assert scan(read="commits")[-1]["partition"] == 3


def test_events_of_a_context_that_this_code_does_not_know(keeper: Bookkeeper, scan: Scan) -> None:
    put(keeper, ("X", b"{}"), stream="nowhere/1")
    with pytest.raises(UnknownEvent, match="nowhere/1 has events of a context"):
        scan(columns=["type"])


def test_a_body_that_its_class_can_not_hold(keeper: Bookkeeper, scan: Scan) -> None:
    put(keeper, ("FeeCharged", b'{"cents":"much","on":"2026-01-01"}'), stream="accounts/x")
    with pytest.raises(UnreadableEvent, match="FeeCharged of accounts/x can't be read"):
        scan(events="accounts.FeeCharged")
    assert scan(stream="accounts/x")[-1]["type"], "its text can be read"
    assert scan(events="accounts.AccountOpened"), "and other events"


def test_a_record_of_another_format(keeper: Bookkeeper, scan: Scan) -> None:
    keeper.garbage(2, b'{"samefold":"commit/2"}')
    keeper.flush()
    for read_as in ("events", "commits", "records"):
        with pytest.raises(UnreadableRecord, match=r"\[2\]"):
            scan(read=read_as)


# ── options, and who reads ──


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"events": "accounts.Nothing"}, "no event 'accounts.Nothing'"),
        ({"events": "nowhere.MoneyDeposited"}, "no event 'nowhere.MoneyDeposited'"),
        ({"events": "MoneyDeposited"}, "no event 'MoneyDeposited'"),
        ({"read": "rows"}, "Option 'read' is 'rows'"),
        ({"read": "commits", "events": "accounts.MoneyDeposited"}, "goes with read=events"),
        ({"events": ""}, "no event ''"),
        ({"stream": "7"}, "Option 'stream' is '7'. It is context/id of: accounts"),
        ({"stream": "acounts/7"}, "Option 'stream' is 'acounts/7'"),
        ({"stream": "accounts/"}, "Option 'stream' is 'accounts/'"),
    ],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, str], why: str) -> None:
    with pytest.raises(BadOption, match=why):
        Samefold(options).schema()


def test_classes_and_columns_that_there_are_not_are_refused(world: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    topics.ensure(world)
    monkeypatch.setattr(tables, "register", lambda _spark: None)
    log = Log(None, settings=world)
    with pytest.raises(BadOption, match="no event of a context"):
        log.events(Details)
    for nothing in ((), ""):
        with pytest.raises(BadOption, match="no event ''"):
            log.events(nothing)
    with pytest.raises(BadOption, match="no column 'cents'"):
        log.commits(columns=(name for name in ["cents"]))  # type: ignore[arg-type]
    with pytest.raises(BadOption, match="Option 'stream' is ''"):
        log.events(stream="")
    for table in (log.commits, log.records, log.events):
        with pytest.raises(BadOption, match="no column 'cents'"):
            table(columns=["cents"])
    with pytest.raises(BadMoment):
        Log(None, "yesterday", world)
    naive = datetime(2026, 11, 21, 14, 30)  # noqa: DTZ001
    for made in (lambda: Log(None, naive, world), lambda: log.events(since=naive)):
        with pytest.raises(BadMoment, match="has no time zone"):
            made()
    for made in (lambda: Log(None, "", world), lambda: Log(None, {}, world), lambda: log.events(since="")):
        with pytest.raises(BadMoment, match="neither a time nor positions"):
            made()


def test_a_task_with_another_kafka_or_other_code_reads_nothing(
    keeper: Bookkeeper, scan: Scan, empty_world: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert scan(columns=["type"])
    batch = batch_of()
    [*parts] = batch.partitions()
    with monkeypatch.context() as patch:
        patch.setenv("SAMEFOLD_EVENTS_TOPIC", empty_world.events_topic)
        with pytest.raises(WrongKafka, match="is none, not"):
            batch.read(parts[0])
    with pytest.raises(WrongCode, match="than the program that asks"):
        batch_of(code="0")
    monkeypatch.setattr(source, "CODE", {**CODE, "domain/new.py": "0"})
    with pytest.raises(WrongCode, match=r"domain/new\.py"):
        batch_of().read(parts[0])


# ── on Spark ──


@pytest.mark.usefixtures("shapes")
def test_spark_holds_all_types_and_counts_what_counts(
    world: Settings, spark_engine: Spark, monkeypatch: pytest.MonkeyPatch
) -> None:
    spark = spark_engine.session
    register(spark)
    monkeypatch.setattr(tables, "register", lambda spark: spark.dataSource.register(WithShapes))
    set_up(world)
    keeper = Bookkeeper(world)
    assert Log(spark, settings=world).events().count() == 0
    put(keeper, *((event.__name__, body) for event, bodies in EVERY for body in bodies))
    keeper.life(ACCOUNTS, 4)
    log = Log(spark, settings=world)
    rows = log.events([event for event, _ in EVERY]).toArrow().to_pylist()
    stored = [(event, body) for event, bodies in EVERY for body in bodies]
    assert len(rows) == len(stored)
    for (event, body), row in zip(stored, sorted(rows, key=lambda row: row["version"]), strict=True):
        for column in source.columns_of([one for one, _ in EVERY])[len(source.EVENTS) :]:
            field = event.__annotations__.get(column.name)
            value = getattr(msgspec.json.decode(body, type=event), column.name) if field else None
            assert row[column.name] == (in_column(field, value) if field else None), column.name
    one = log.events(MoneyDeposited, stream="accounts/3")
    assert one.rdd.getNumPartitions() == 1, "of four"
    assert {row["stream"] for row in one.collect()} == {"accounts/3"}
    spark.dataSource.register(Samefold)


@pytest.mark.slow
def test_a_named_error_comes_through_spark_without_java(
    world: Settings, keeper: Bookkeeper, spark_engine: Spark, spark_place: Path, empty_world: Settings
) -> None:
    spark = spark_engine.session
    table = Log(spark, settings=world).events(MoneyDeposited)
    put(keeper, ("Renamed", b"{}"), stream="accounts/x")
    deposits = sum(event.type == "MoneyDeposited" for _, event in event_rows(world))
    assert table.count() == deposits, "it ends where the log ended"
    unknown = Log(spark, settings=world).events(MoneyDeposited)
    for executors, wrong, why in (
        (world, unknown, "UnknownEvent: accounts/x has"),
        (empty_world, table, "WrongKafka: Kafka at"),
    ):
        (spark_place / "dev.env").write_text(dev_env(executors))
        with pytest.raises(PySparkException) as raised:
            wrong.collect()
        assert why in str(raised.value)
        assert len(str(raised.value).splitlines()) < 25
        assert "\tat " not in str(raised.value)


@pytest.mark.slow
def test_with_a_session_and_an_environment_of_ones_own(
    keeper: Bookkeeper, spark_engine: Spark, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in keeper.world.environment().items():
        monkeypatch.setenv(name, value)
    spark, count = spark_engine.session, len(list(event_rows(keeper.world)))
    table = events(spark)
    assert table.where("variant:cents::int is not null or type = 'AccountOpened'").count() == count
    assert commits(spark, columns=["code"]).count() == len(whole(keeper.world)[0])
    assert records(spark, columns=["void"], as_of="0:1,1:1,2:1,3:1").collect() == [(None,)] * 4
    assert events(spark, MoneyDeposited | MoneyWithdrawn, columns=["cents"]).columns == ["cents"]
    one = table.where("stream = 'accounts/1'")
    assert one.count() < table.count() == count == table.union(one).count() - one.count(), (
        "a filter is that query's alone"
    )
    spark.sql("create temporary view moved using samefold options (events 'accounts.MoneyDeposited')")
    [total] = spark.sql("select sum(cents) from moved").collect()
    assert total[0] == sum(
        msgspec.json.decode(event.data)["cents"]
        for _, event in event_rows(keeper.world)
        if event.type == "MoneyDeposited"
    )
    spark.sql("drop view moved")
    spark.createDataFrame([], "none int")  # the active one, as where this thread has started it
    assert events(spark.newSession()).count() == count, "each session has its own sources"
