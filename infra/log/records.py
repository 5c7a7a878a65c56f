"""The records of the topics: commands, and in `events` commits and openings (docs/protocol.md).

Each is a JSON object whose first member is `"samefold": "<kind>/<format>"`. That prefix is the envelope: a record without it is
foreign (garbage, void for every reader); one with it must decode, or the reader stops. A reader that skipped a record that it can't
decode would disagree with one that can.
"""

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import reduce
from operator import or_
from typing import Annotated, Literal, NamedTuple, Self, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

from infra.errors import SamefoldError

ENVELOPE = b'{"samefold":"'


Headers: TypeAlias = Sequence[tuple[str, bytes | None]]
"""Of a Kafka record. They hold the trace only (`infra/observability/tracing.py`)."""


class UnreadableRecord(SamefoldError):
    """A record has Samefold's envelope, but a kind, format or body that this code does not know."""


class Record(NamedTuple):
    """A Kafka record. `time_ms` is the broker's time (LogAppendTime), in ms since the epoch."""

    partition: int
    offset: int
    time_ms: int
    key: bytes | None
    value: bytes | None


class Traced(Record):
    """A record whose trace is known, as readers hand it on while an SDK records."""

    headers: Headers = ()

    @classmethod
    def of(cls, record: Record, headers: Headers) -> Self:
        traced = cls._make(record)
        traced.headers = headers
        return traced


class EventRecord(msgspec.Struct, frozen=True, gc=False):
    """An event in a commit: its stored name and its body, not decoded."""

    type: str
    data: msgspec.Raw


class Reason(msgspec.Struct, frozen=True, gc=False):
    """Why a command was rejected: a stable code and a message."""

    code: str
    message: str


class Commit(msgspec.Struct, frozen=True, gc=False, tag_field="samefold", tag="commit/1"):
    """The result of one command: one record, and therefore atomic."""

    stream: str
    version: int
    """The stream's version after this commit: the number of its events."""
    events: list[EventRecord]
    command_id: str
    command_offset: int
    fingerprint: str
    outcome: Literal["accepted", "rejected"]
    reason: Reason | None
    epoch: int
    seq: int
    correlation_id: str | UnsetType = UNSET
    causation_id: str | UnsetType = UNSET
    """The command's own (see `Command`); the cause of the events is the command."""
    depth: int | UnsetType = UNSET
    """The command's own."""
    by: str | UnsetType = UNSET
    """The command's own."""

    @property
    def conversation(self) -> str:
        """The correlation id: the command's own id where it was given none."""
        return self.command_id if self.correlation_id is UNSET else self.correlation_id


class Head(msgspec.Struct, frozen=True, gc=False, tag_field="samefold", tag="commit/1"):
    """What the reading rule needs of a commit, and whose it is. It is decoded in half the time."""

    stream: str
    command_offset: int
    epoch: int
    seq: int


class Opening(msgspec.Struct, frozen=True, tag_field="samefold", tag="opening/1"):
    """A writer takes over a partition. The record's offset is the writer's epoch."""

    writer: str
    commands_topic_id: str
    why: str | UnsetType = UNSET
    """Why its writer had given up its epoch before. Not stored where it takes over. For people: no reader depends on it."""


class Command(msgspec.Struct, frozen=True, tag_field="samefold", tag="command/1"):
    """A record of the `commands` topic. The body is not yet validated."""

    id: str
    stream: str
    type: str
    data: msgspec.Raw
    expected_version: int | None = None
    correlation_id: str | UnsetType = UNSET
    """Shared by all commands of one request or conversation. Not stored if the client gives none; then it is the command's id."""
    causation_id: str | UnsetType = UNSET
    """Id of the message that caused this command."""
    depth: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] | UnsetType = UNSET
    """How many commands of policies led to this one since the last timer or client. Not stored for a client's command."""
    by: str | UnsetType = UNSET
    """Who sent it: the subject that the API authenticated, `policy:NAME` or `operator:NAME`. For audits: no decision and no fold
    depends on it."""


_events_decoder = msgspec.json.Decoder(Commit | Opening)
_command_decoder = msgspec.json.Decoder(Command)
_encoder = msgspec.json.Encoder()


def decode_event(record: Record) -> Commit | Opening | None:
    """The commit or opening in a record of `events`; None for garbage.

    Raises UnreadableRecord for an envelope with an unknown kind or format, or with a body that does not decode.
    """
    value = record.value
    if value is None or not value.startswith(ENVELOPE):
        return None
    try:
        return decode_value(value)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise unreadable("events", record, error) from error


def unreadable(topic: str, record: Record, error: Exception) -> UnreadableRecord:
    return UnreadableRecord(
        f"{topic}[{record.partition}] offset {record.offset} has Samefold's envelope but can't be decoded: {error}",
        "Nothing was skipped. Run the release that wrote it. If no release did, check which other programs write to the topic.",
    )


decode_value: Callable[[bytes], Commit | Opening] = _events_decoder.decode
"""The commit or opening in a value that has the envelope. Raises msgspec.DecodeError, UnicodeDecodeError."""


decode_head: Callable[[bytes], Head | Opening] = msgspec.json.Decoder(Head | Opening).decode
"""Like `decode_value`, but it neither decodes nor checks the rest of a commit."""


def typed_decoder(events: Mapping[str, type]) -> Callable[[bytes], Commit | Opening]:
    """Like `decode_value`, but each event's `data` is of the class that is given for its stored type, decoded in one go.

    It also fails for a commit with another type, or a body that does not fit; `read` then takes `decode_value`.
    """
    kinds = [
        msgspec.defstruct(
            "Event", [("data", kind)], tag_field="type", tag=name, namespace={"type": name}, frozen=True, gc=False
        )
        for name, kind in events.items()
    ]
    if len(kinds) < 2:  # msgspec accepts an event without a type where there is only one
        return decode_value
    events_type = list[reduce(or_, kinds)]  # type: ignore[misc, valid-type]
    commit = msgspec.defstruct(
        "TypedCommit", [("events", events_type)], bases=(Commit,), tag="commit/1", frozen=True, gc=False
    )
    return msgspec.json.Decoder(commit | Opening).decode


def decode_command(value: bytes) -> Command:
    """The command in a value.

    Raises msgspec.DecodeError, UnicodeDecodeError or RecursionError: the handler records those as rejections.
    """
    if not value.startswith(ENVELOPE):  # msgspec accepts a record without a tag
        raise msgspec.DecodeError(f"it does not begin with {ENVELOPE.decode()}command/1")
    return _command_decoder.decode(value)


def encode(record: Commit | Opening | Command) -> bytes:
    """The record's value, its envelope first."""
    return _encoder.encode(record)


def time_of(time_ms: int) -> datetime:
    """A broker's time as an aware datetime in UTC."""
    return datetime.fromtimestamp(time_ms / 1000, UTC)
