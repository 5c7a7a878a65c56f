"""The log as a table of Spark: the data source `samefold`, batch and streaming.

    spark.dataSource.register(Samefold)
    spark.read.format("samefold").option("events", "rooms.RoomBooked").load()

`read` says what a row is: `events` (by default), `commits` or `records`. A task reads a range of a partition by the reading rule,
as the fold does, and decodes only what the asked columns need: name the columns by `schema`, or `columns` of `events`.

A task gets no settings: it reads its own environment's, and compares its code and its Kafka with the sender's.
"""

# mypy: disallow-subclassing-any=False
# (PySpark brings no types)
from __future__ import annotations

import dataclasses
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property, partial
from operator import attrgetter
from typing import Any, NamedTuple, get_type_hints

import msgspec
import pyarrow as pa
from msgspec import UNSET
from pyspark.sql import types as spark
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from domain.engine.contexts import contexts
from domain.engine.storable import decoder, encode
from domain.engine.versions import stored_name, stored_type
from infra.archive import marks
from infra.archive.whole_log import read_range
from infra.errors import SamefoldError
from infra.log import topics
from infra.log.partitioner import partition_of
from infra.log.records import Commit, Opening, Record, decode_event, decode_value, typed_decoder
from infra.log.rule import START, Counted, Reading, read
from infra.log.source import NO_PROGRESS_S, LogTrimmed
from infra.processes.code_identity import CODE, CODE_DIGEST, WrongCode, require_code
from infra.processes.memory import folding
from infra.settings import Settings
from projections.engine.fold.as_of import Cut, cuts, parse_as_of
from projections.engine.fold.errors import UnknownEvent, UnreadableEvent
from spark_jobs.engine.columns import BYTES, SMALL, TEXT, TIME, WHOLE, BadColumn, Column, fields_of, struct_of
from spark_jobs.engine.services import require_kafka
from spark_jobs.engine.task import own_settings

GATHERED, GATHERED_BYTES = 10_000, 8_000_000
"""What a batch that goes to Spark has about: so many rows, or bytes."""
LOOK_AGAIN_S = 0.05
"""How long a stream without new records waits before it looks again."""


class BadOption(SamefoldError):
    """An option of the data source has a value that it can't have."""

    exit_code = 2


class UnfitValue(SamefoldError):
    """A value does not fit its column's type in Spark."""


@dataclass(frozen=True, slots=True)
class Range(InputPartition):
    """What a task reads of a partition: the records from offset `begin` up to `end`."""

    partition: int
    begin: int
    end: Cut


@dataclass(frozen=True, slots=True)
class Sender:
    """The planning process, which a task must match."""

    kafka: str
    topic_id: str
    code: Mapping[str, str] = field(default_factory=lambda: CODE)

    def enter(self) -> Settings:
        """This process's own settings. Raises WrongCode, WrongKafka, ExecutorNotConfigured, KafkaUnavailable."""
        require_code(self.code)
        settings = own_settings()
        require_kafka(settings, self.kafka, self.topic_id, NO_PROGRESS_S)
        return settings


# ── what a row is ──


class EventRow(NamedTuple):
    """A counted event. `event` has the fields that are asked for, or is the body as stored; `of` is its class."""

    counted: Counted
    partition: int
    of: type
    version: int
    type: str
    event: Any


class CommitRow(NamedTuple):
    counted: Counted
    partition: int


class RecordRow(NamedTuple):
    record: Record
    entry: Commit | Opening | None
    void: str | None


def _optional(name: str) -> Callable[[Any], Any]:
    return lambda row: None if (value := getattr(row.counted.commit, name)) is UNSET else value


def _correlation(commit: Commit) -> str:
    return commit.command_id if commit.correlation_id is UNSET else commit.correlation_id


def _reason(name: str) -> Callable[[CommitRow], Any]:
    return lambda row: getattr(row.counted.commit.reason, name, None)


_COMMON = (
    Column("stream", TEXT, attrgetter("counted.commit.stream")),
    Column("context", TEXT, lambda row: row.counted.commit.stream.partition("/")[0]),
    Column("id", TEXT, lambda row: row.counted.commit.stream.partition("/")[2]),
    Column("time", TIME, lambda row: row.counted.time_ms * 1_000),
    Column("partition", SMALL, attrgetter("partition")),
    Column("offset", WHOLE, attrgetter("counted.offset")),
    Column("command_id", TEXT, attrgetter("counted.commit.command_id")),
    Column("correlation_id", TEXT, lambda row: _correlation(row.counted.commit)),
    Column("by", TEXT, _optional("by")),
)
EVENTS = (
    *_COMMON[:3],
    Column("version", WHOLE, attrgetter("version")),
    Column("type", TEXT, attrgetter("type")),
    *_COMMON[3:],
)
_TAKEN = {column.name for column in EVENTS}
BODY = Column("body", TEXT, lambda row: bytes(row.event).decode())
COMMITS = (
    *_COMMON[:3],
    Column("version", WHOLE, attrgetter("counted.commit.version")),
    Column("events", SMALL, lambda row: len(row.counted.commit.events)),
    *_COMMON[3:],
    Column("command_offset", WHOLE, attrgetter("counted.commit.command_offset")),
    Column("causation_id", TEXT, _optional("causation_id")),
    Column("outcome", TEXT, attrgetter("counted.commit.outcome")),
    Column("code", TEXT, _reason("code")),
    Column("message", TEXT, _reason("message")),
)
RECORDS = (
    Column("partition", SMALL, attrgetter("record.partition")),
    Column("offset", WHOLE, attrgetter("record.offset")),
    Column("time", TIME, lambda row: row.record.time_ms * 1_000),
    Column("key", BYTES, attrgetter("record.key")),
    Column("value", BYTES, attrgetter("record.value")),
    Column("kind", TEXT, lambda row: row.entry and type(row.entry).__name__.lower()),
    Column("void", TEXT, attrgetter("void")),
)
_OTHERS = {"commits": COMMITS, "records": RECORDS}
_BY_RULE = {"kind", "void"}
"""The columns of a record that the reading rule tells."""


def columns_of(classes: Sequence[type]) -> list[Column]:
    """The columns of events of these classes: what every event has, and their fields. Raises BadColumn."""
    found: dict[str, tuple[Column, str, type]] = {}
    for event in classes:
        for own, column in zip(dataclasses.fields(event), fields_of(event, _TAKEN), strict=True):
            mine = column._replace(get=_field_of(event, column.get))
            known, other, owner = found.setdefault(column.name.lower(), (mine, own.name, event))
            if known is mine:
                continue
            if (other, known.type.spark) != (own.name, mine.type.spark):
                raise BadColumn(
                    f"{owner.__module__}.{owner.__qualname__} has a field '{other}', of {known.type.spark.simpleString()}, and "
                    f"{event.__module__}.{event.__qualname__} '{own.name}', of {mine.type.spark.simpleString()}: one column "
                    f"'{column.name}' can't hold both.",
                    "Read them as two tables, or rename one field.",
                )
            found[column.name.lower()] = known._replace(get=_either(known.get, mine.get)), other, owner
    return [*EVENTS, *(column for column, _, _ in found.values())]


def columns_by_class(classes: Sequence[type]) -> list[Column]:
    """What every event has, and a struct for each class, null in rows of other classes. No field of it is named `day`."""
    taken = {*_TAKEN, "day"}
    own = (Column(name_of(event), struct_of(event, taken), _field_of(event, lambda value: value)) for event in classes)
    return [*EVENTS, *own]


def _field_of(event: type, get: Callable[[Any], Any]) -> Callable[[EventRow], Any]:
    return lambda row: get(row.event) if row.of is event else None


def _either(one: Callable[[Any], Any], other: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def get(row: EventRow) -> Any:
        return other(row) if (value := one(row)) is None else value

    return get


# ── the source ──


class Samefold(DataSource):
    """The data source. Its options:

    read        `events` (by default), `commits` or `records`
    events      of `events`: which, by context and class, `rooms.RoomBooked,rooms.BookingCancelled`; by default all,
                with `body` instead of their fields
    stream      only this one's rows; one partition is read
    since       only rows of this time or later, written as `as_of`
    as_of       of a batch: a time or positions, as `samefold rebuild --as-of` takes it
    tasks       of a batch: how many tasks read it at most, if it is long; by default as many as this machine has cores
    starting    of a stream: `earliest` (by default), `latest`, or positions as `0:123,1:456`
    most        of a stream: about how many records a micro-batch has at most
    """

    @classmethod
    def name(cls) -> str:
        return "samefold"

    def schema(self) -> spark.StructType:
        return self._table.schema

    def reader(self, schema: spark.StructType) -> DataSourceReader:
        return Batch(self.options, self._table.only(schema.fieldNames()))

    def streamReader(self, schema: spark.StructType) -> DataSourceStreamReader:  # noqa: N802
        return Stream(self.options, self._table.only(schema.fieldNames()))

    @cached_property
    def _table(self) -> Table:
        return Table.of(self.options)


def name_of(event: type | str) -> str:
    """`rooms.RoomBooked`, of the class or its name. Raises BadOption for a class that is no event."""
    if isinstance(event, str):
        return event
    for context in contexts().values():
        if event in context.events.values():
            return f"{context.name}.{event.__name__}"
    raise BadOption(f"{event!r} is no event of a context of domain/.", "Name a class of its `Event`.")


def named_events(text: str) -> list[type]:
    """The classes of `rooms.RoomBooked,…`. Raises BadOption."""
    every = {f"{one.name}.{event.__name__}": event for one in contexts().values() for event in one.events.values()}
    names = [name.strip() for name in text.split(",")]
    if unknown := [name for name in names if name not in every]:
        raise BadOption(f"There is no event '{unknown[0]}'.", f"There are: {', '.join(every)}.")
    return [every[name] for name in names]


@dataclass(frozen=True)
class Table:
    """The rows and columns that are read."""

    read: str
    classes: tuple[type, ...]
    columns: tuple[Column, ...]
    stream: str | None = None
    """Rows of this stream only."""
    since_ms: int = 0
    """Rows of this time, in ms since the epoch, or later."""

    @classmethod
    def of(cls, options: Mapping[str, str]) -> Table:
        """Raises BadOption, BadColumn, BadContext."""
        kind, events = options.get("read", "events"), options.get("events")
        now = Pin.parse(options["pin"]).at if "pin" in options else datetime.now(UTC)
        stream, since_ms = options.get("stream"), _since(options.get("since"), now)
        context, _, name = (stream or "").partition("/")
        if stream is not None and not (name and context in contexts()):
            raise BadOption(f"Option 'stream' is '{stream}'.", f"It is context/id of: {', '.join(contexts())}.")
        if events is not None and kind != "events":
            raise BadOption(f"Option 'events' goes with read=events, not with read={kind}.", "Leave it out.")
        if kind == "events":
            classes = () if events is None else tuple(dict.fromkeys(named_events(events)))
            made = columns_by_class if options.get("by") == "class" else columns_of
            return cls(kind, classes, tuple(made(classes)) if classes else (*EVENTS, BODY), stream, since_ms)
        if kind in _OTHERS:
            return cls(kind, (), _OTHERS[kind], stream, since_ms)
        raise BadOption(f"Option 'read' is '{kind}'.", "It is events, commits or records.")

    def only(self, names: Iterable[str]) -> Table:
        """Its columns of these names, in this order. Raises BadOption."""
        names = [names] if isinstance(names, str) else [*map(str, names)]
        by_name = {column.name: column for column in self.columns}
        if unknown := [name for name in names if name not in by_name]:
            raise BadOption(f"There is no column '{unknown[0]}'.", f"There are: {', '.join(by_name)}.")
        return replace(self, columns=tuple(by_name[name] for name in dict.fromkeys(names)))

    @property
    def schema(self) -> spark.StructType:
        return spark.StructType([spark.StructField(column.name, column.type.spark) for column in self.columns])

    @cached_property
    def arrow(self) -> pa.Schema:
        return pa.schema([(column.name, column.type.arrow) for column in self.columns])

    @property
    def names(self) -> set[str]:
        return {column.name for column in self.columns}

    def has(self, record: Record) -> bool:
        """Whether a record is of the table's stream and time."""
        return record.time_ms >= self.since_ms and (self.stream is None or record.key == self.stream.encode())

    @property
    def needs_rule(self) -> bool:
        return self.read != "records" or bool(self.names & _BY_RULE)


_TABLE = {"read", "events", "by", "stream", "since"}
"""The options that say what is read."""


def _since(text: str | None, now: datetime) -> int:
    """Milliseconds since the epoch. Raises BadMoment, BadOption."""
    at = datetime.fromtimestamp(0, UTC) if text is None else parse_as_of(text, now)
    if not isinstance(at, datetime):
        raise BadOption(f"Option 'since' is '{text}'.", "It is a time.")
    return max(int(at.timestamp() * 1_000), 0)


def _require_known(options: Mapping[str, str], known: set[str]) -> None:
    """Raises BadOption."""
    if unknown := sorted(set(options) - known):
        raise BadOption(f"Option '{unknown[0]}' is unknown here.", f"There are: {', '.join(sorted(known))}.")


def _count(options: Mapping[str, str], name: str, default: int) -> int:
    """Raises BadOption."""
    text = options.get(name, str(default))
    if not re.fullmatch("[1-9][0-9]{0,9}", text):
        raise BadOption(f"Option '{name}' is '{text}'.", "It is a whole number, 1 or more.")
    return int(text)


class Batch(DataSourceReader):
    """Plans a scan, and reads a part of it in a task."""

    def __init__(self, options: Mapping[str, str], table: Table) -> None:
        _require_known(options, {*_TABLE, "as_of", "tasks", "pin", "code"})
        if options.get("code", CODE_DIGEST) != CODE_DIGEST:
            raise WrongCode(
                "The Python that Spark starts here has other code than the program that asks.",
                "Give both the same checkout: PYSPARK_PYTHON, PYTHONPATH, spark.executorEnv.PYTHONPATH.",
            )
        self.pin = Pin.parse(options["pin"]) if "pin" in options else pinned(Settings(), options.get("as_of"))
        self.sender = Sender(self.pin.kafka, self.pin.topic_id)
        self.tasks = _count(options, "tasks", os.cpu_count() or 1)
        self.table = table

    def partitions(self) -> Sequence[InputPartition]:
        """Raises TopicChanged, KafkaUnavailable, DatabaseUnavailable."""
        settings, table, pin = Settings(), self.table, self.pin
        topic = topics.describe(settings, settings.events_topic)
        topics.require_same(pin.topic(topic.name), topic)
        mine = [*pin.ends] if table.stream is None else [partition_of(table.stream, len(pin.ends))]
        ends = {partition: pin.ends[partition] for partition in mine}
        begins = {partition: pin.begins.get(partition, 0) for partition in ends}
        if table.since_ms:
            # a millisecond earlier: the broker's index may pass over records of the very time
            later = topics.offsets_at(settings, topic, table.since_ms - 1)
            firsts = {p: later.get(p, topic.end[p]) for p in begins}
            # where Kafka's first record is of that time already, the archive may have others
            begins |= {p: max(begins[p], at) for p, at in firsts.items() if at > topic.first[p]}
        total = sum(max(ends[partition].next_offset - begin, 0) for partition, begin in begins.items())
        share = max(total // self.tasks, marks.EVERY)
        return [
            Range(partition, begin, ends[partition]._replace(next_offset=stop))
            for partition, first in begins.items()
            for begin, stop in _pieces(settings, topic, partition, first, ends[partition], share)
        ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, Range):  # PySpark's own, where there is none to read
            return iter(())
        return batches(self.sender.enter(), self.sender.topic_id, self.table, partition)


def _pieces(
    settings: Settings, topic: topics.Topic, partition: int, begin: int, end: Cut, share: int
) -> Iterator[tuple[int, int]]:
    """From `begin` to `end` in pieces of at least `share` records, cut at marks: there a task can begin at once."""
    stop, until_ms = end
    if until_ms is None and stop - begin >= 2 * share:  # else only the first later record ends it
        for mark in marks.between(settings, topic, partition, begin, stop):
            if mark.next_offset - begin >= share <= stop - mark.next_offset:
                yield begin, mark.next_offset
                begin = mark.next_offset
    if begin < stop:
        yield begin, stop


class Pin(NamedTuple):
    """Where a scan begins and ends, so that it gives the same rows each time."""

    kafka: str
    topic_id: str
    ends: Mapping[int, Cut]
    at: datetime
    """When it was made: times such as `-1d` count from here."""
    begins: Mapping[int, int] = {}
    """Offsets. A partition that is not named is read from its start."""

    @classmethod
    def parse(cls, text: str) -> Pin:
        return msgspec.json.decode(text, type=cls)

    def __str__(self) -> str:
        return msgspec.json.encode(self).decode()

    def topic(self, name: str) -> topics.Topic:
        return topics.Topic(name, self.topic_id, len(self.ends), {}, {})


def pinned(settings: Settings, as_of: datetime | str | None = None) -> Pin:
    """The log's ends now, or as of a time or positions. Raises BadMoment, TopicMissing, KafkaUnavailable."""
    admin, now = topics.Admin(settings), datetime.now(UTC)
    topic = topics.describe(settings, settings.events_topic, admin=admin)
    topic = replace(topic, end=topics.stable_ends(topic, admin))  # nobody can read beyond an open transaction
    end = {} if as_of is None else parse_as_of(str(as_of), now)
    return Pin(settings.kafka, topic.id, cuts(settings, topic, end, now), now)


# ── a task ──


def batches(settings: Settings, topic_id: str, table: Table, part: Range) -> Iterator[pa.RecordBatch]:
    """The rows of a range, in batches. Raises what reading the log raises, UnknownEvent, UnreadableEvent, UnfitValue, MemoryShort.

    Rows become Arrow soon, while they are in the processor's cache; Spark gets fewer and larger batches.
    """
    gathered: list[pa.RecordBatch] = []
    with folding() as check_memory:
        for rows in _rows(settings, topic_id, table, part):
            if rows:
                gathered.append(_batch(table, rows))
            if (
                sum(one.num_rows for one in gathered) >= GATHERED
                or sum(one.nbytes for one in gathered) >= GATHERED_BYTES
            ):
                check_memory()
                yield pa.concat_batches(gathered)
                gathered = []
    if gathered:
        yield pa.concat_batches(gathered)


def _batch(table: Table, rows: Sequence[Any]) -> pa.RecordBatch:
    if not table.columns:  # count(*)
        return pa.RecordBatch.from_struct_array(pa.array([{}] * len(rows), pa.struct([])))
    return pa.RecordBatch.from_arrays([to_arrow(column, rows) for column in table.columns], schema=table.arrow)


def to_arrow(column: Column, rows: Sequence[Any]) -> pa.Array:
    """Raises UnfitValue."""
    try:
        return column.array(rows)
    except (pa.ArrowException, OverflowError, TypeError, ValueError):
        for row in rows:
            try:
                column.array([row])
            except (pa.ArrowException, OverflowError, TypeError, ValueError) as error:
                raise UnfitValue(
                    f"'{column.name}' of {row.counted.commit.stream} (partition {row.partition}, offset {row.counted.offset}) does "
                    f"not fit {column.type.spark.simpleString()}: {error}.",
                    "Leave that column out (`columns`), or take the event's body: events(spark).",
                ) from None
        raise


_reached: dict[tuple[str, int], Reading] = {}
"""Where this process's last task of a partition ended, by topic and partition: a stream's next one begins near it."""


def _begun(settings: Settings, topic_id: str, part: Range) -> tuple[Reading, Iterator[list[Record]]]:
    """A reading state at or before the range's begin, and the records from there on."""
    topic, stop = settings.events_topic, part.end.next_offset
    for known in (_reached.get((topic_id, part.partition), START), START):
        if known.next_offset <= part.begin < known.next_offset + marks.EVERY:
            return known, read_range(settings, topic, part.partition, known.next_offset, stop)
    of = topics.Topic(topic, topic_id, 0, {}, {})
    return marks.read_from(settings, of, part.partition, part.begin, stop)


def _rows(settings: Settings, topic_id: str, table: Table, part: Range) -> Iterator[list[Any]]:
    since_ms, begin = table.since_ms, part.begin
    if not table.needs_rule:
        for records in read_range(settings, settings.events_topic, part.partition, begin, part.end.next_offset):
            taken = part.end.before(records)
            yield [RecordRow(one, None, None) for one in taken if table.has(one)]
            if len(taken) < len(records):
                return
        return
    events = Decoding(table)
    decode = events.decode
    reading, read_on = _begun(settings, topic_id, part)
    for records in read_on:
        taken = part.end.before(records)
        reading, counted, void = read(reading, taken, decode)
        if reading.next_offset > begin:
            mine = (one for one in counted if one.offset >= begin and one.time_ms >= since_ms)
            match table.read:
                case "events":
                    yield events.rows(mine, part.partition)
                case "commits":
                    stream = table.stream
                    yield [CommitRow(one, part.partition) for one in mine if stream in (None, one.commit.stream)]
                case _:
                    why = {one.offset: one.reason for one in void}
                    own = (record for record in taken if record.offset >= begin and table.has(record))
                    yield [RecordRow(one, decode_event(one), why.get(one.offset)) for one in own]
        _reached[topic_id, part.partition] = reading
        if len(taken) < len(records):
            return


class Decoding:
    """Decodes events for a table: those of its classes, and of them only what its columns need."""

    def __init__(self, table: Table) -> None:
        own = {column.name for column in EVENTS}
        self.as_body = not table.classes and "body" in table.names
        self.to_event = table.read == "events" and not self.as_body and bool(table.names - own)
        self.stream = table.stream
        self.types: dict[str, dict[str, tuple[str, type, Callable[[Any], Any] | None] | None]] = {}
        """By context and stored type: the class's name, the class, what makes the row's event of a body. None for other events."""
        kinds: dict[str, Any] = {}
        for context in contexts().values():
            of = self.types[context.name] = {}
            for stored, (event, decode) in context.readers.items():
                name = stored_name(event)
                is_wanted = not table.classes or event in table.classes
                to_body = partial(_body, decode) if self.as_body and stored != stored_type(event) else None
                of[stored] = (name, event, decode if self.to_event else to_body) if is_wanted else None
                at_once = is_wanted and self.to_event and decode is decoder(event) and stored not in kinds
                whole = name_of(event) in table.names
                kinds[stored] = (event if whole else part_of(event, table.names)) if at_once else msgspec.Raw
        self.decode = typed_decoder(kinds) if self.to_event else decode_value

    def rows(self, counted: Iterable[Counted], partition: int) -> list[EventRow]:
        """Raises UnknownEvent, UnreadableEvent."""
        rows: list[EventRow] = []
        append, new = rows.append, tuple.__new__
        for one in counted:
            commit = one.commit
            events = commit.events
            if not events:
                continue
            stream = commit.stream
            context = stream.partition("/")[0]
            types = self.types.get(context)
            if types is None:
                raise UnknownEvent(stream, None, partition=partition, offset=one.offset)
            if self.stream is not None and stream != self.stream:
                continue
            version = commit.version - len(events)
            for record in events:
                version += 1
                try:
                    found = types[record.type]
                except KeyError:
                    raise UnknownEvent(stream, record.type, partition=partition, offset=one.offset) from None
                if found is None:
                    continue
                name, kind, make = found
                event: Any = record.data
                if make is not None and type(event) is msgspec.Raw:
                    try:
                        event = make(event)
                    except MemoryError:
                        raise
                    except Exception as error:
                        raise UnreadableEvent(
                            stream, record.type, error, partition=partition, offset=one.offset
                        ) from error
                append(new(EventRow, (one, partition, kind, version, name, event)))
        return rows


def part_of(event: type, columns: set[str]) -> type:
    """A class with those of the event's fields that are in these columns. It is decoded sooner: the others are passed over."""
    hints = get_type_hints(event, include_extras=True)
    fields = []
    for one, column in zip(dataclasses.fields(event), fields_of(event, _TAKEN), strict=True):
        if column.name in columns:
            given = {"default": one.default, "default_factory": one.default_factory}
            default: Any = {name: value for name, value in given.items() if value is not MISSING}
            fields.append((one.name, hints[one.name], msgspec.field(**default)))
    return msgspec.defstruct(event.__name__, fields, frozen=True, gc=False, kw_only=True)


def _body(decode: Callable[[Any], Any], data: msgspec.Raw) -> bytes:
    return encode(decode(data))


# ── streaming ──


class Stream(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Plans micro-batches by offsets, and reads a part of one in a task.

    An offset of the stream is the topic's id and the next offset of each partition. The reading state there is a matter of the
    records before it: a task finds it from the nearest mark, so a restarted query goes on exactly where it was.
    """

    def __init__(self, options: Mapping[str, str], table: Table) -> None:
        """Raises BadOption, TopicMissing, KafkaUnavailable."""
        _require_known(options, {*_TABLE, "starting", "most"})
        self.starting, self.table = options.get("starting", "earliest"), table
        self.most = _count(options, "most", 0) if "most" in options else None
        settings = Settings()
        self.topic = topics.describe(settings, settings.events_topic)
        self.sender = Sender(settings.kafka, self.topic.id)
        self.positions = self._positions(settings)
        self._last: dict[str, int] | None = None
        self._admin: topics.Admin | None = None

    def _positions(self, settings: Settings) -> Mapping[int, int]:
        if self.starting in ("earliest", "latest"):
            return {}
        now = datetime.now(UTC)
        positions = parse_as_of(self.starting, now)
        if isinstance(positions, datetime):
            raise BadOption(
                f"Option 'starting' is '{self.starting}'.", "It is earliest, latest, or positions as 0:123,1:456."
            )
        cuts(settings, self.topic, positions, now)
        return positions

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        ends = self._ends()
        if self.starting != "latest":
            ends = {partition: self.positions.get(int(partition), 0) for partition in ends}
        return {"topic": self.topic.id, "next": ends}

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        return ReadAllAvailable() if self.most is None else ReadMaxRows(self.most)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._last = self._ends()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """Raises TopicChanged for the checkpoint of another topic, LogTrimmed where it lost its end; KafkaUnavailable."""
        was, ends = start["next"], self._last or self._ends()
        if (start["topic"], set(was)) != (self.topic.id, set(ends)):
            raise topics.TopicChanged(
                f"The checkpoint is of another '{self.topic.name}': of the id {start['topic']}, with {len(was)} partitions.",
                "Restore that topic, or start with a new checkpoint.",
            )
        for partition, end in ends.items():
            if end < was[partition]:
                raise LogTrimmed(
                    f"{self.topic.name}[{partition}] ends at {end}, but the stream continues at {was[partition]}.",
                    "The topic lost records. Restore it, or start with a new checkpoint.",
                )
        behind = {partition: end - was[partition] for partition, end in ends.items() if end > was[partition]}
        if not behind and self._last is None:
            time.sleep(LOOK_AGAIN_S)  # Spark asks again at once
        if isinstance(limit, ReadMaxRows):
            share = max(limit.max_rows // max(len(behind), 1), 1)
            behind = {partition: min(count, share) for partition, count in behind.items()}
        return {**start, "next": {partition: at + behind.get(partition, 0) for partition, at in was.items()}}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        was = start["next"]
        parts = ((int(partition), was[partition], to) for partition, to in end["next"].items())
        return [Range(partition, begin, Cut(to)) for partition, begin, to in parts if to > begin]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, Range)
        return batches(self.sender.enter(), self.topic.id, self.table, partition)

    def _ends(self) -> dict[str, int]:
        """Raises TopicChanged, TopicMissing, KafkaUnavailable."""
        # made here: it can't be sent to tasks, which don't need it
        self._admin = self._admin or topics.Admin(Settings(), NO_PROGRESS_S)
        topics.require_same(self.topic, topics.describe(Settings(), self.topic.name, admin=self._admin))
        return {str(partition): end for partition, end in sorted(topics.stable_ends(self.topic, self._admin).items())}
