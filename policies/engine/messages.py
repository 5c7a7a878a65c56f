"""A record of another service as a message: its type, its own id, its fact, and the wishes that it leads to. Pure.

No error that may be logged or kept holds a value of the record.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import traceback
from collections.abc import Mapping, Sequence
from enum import StrEnum
from functools import partial
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import UNSET, Meta, UnsetType
from pydantic import ValidationError

from commands.intake import bad_relation
from domain.engine.versions import outline
from infra.errors import SamefoldError, in_words
from infra.log.records import time_of
from infra.processes.time_limit import FAULTS, TooSlow, watched
from infra.settings import Settings
from policies.engine.inbox import HOOK, ID
from policies.engine.outbox import BadWish, Cause, Wish, dead_message, id_of_message, of_message
from policies.engine.policy import Policy, discover
from policies.engine.source import Received, Source
from projections.engine.views.event_context import At


class Result(StrEnum):
    """What became of a message: the metric's label."""

    RECEIVED = "received"
    OTHER_TYPE = "other-type"
    OTHER_SOURCE = "other-source"
    """Of a webhook whose name neither a file of this code nor a setting has."""
    TOMBSTONE = "tombstone"
    REPEATED = "repeated"
    DEAD = "dead"


class BadMessage(ValueError):
    """A message can't be read. It says why, without any value."""


class EndedProcesses(Exception):
    """What a message is said to have done."""


class MessageFailed(SamefoldError):
    """`receive` failed at a message, and the source stops there."""


class Raw(NamedTuple):
    """A record of a source's topic."""

    topic: str
    partition: int
    offset: int
    time_ms: int
    """By whichever clock: it may be any number."""
    key: bytes | None
    value: bytes | None
    headers: Mapping[str, str]


class Message(NamedTuple):
    """What `receive` gets, and what its commands carry on."""

    fact: Any
    at: Received
    correlation_id: str | None
    depth: int
    trace: str | None


class _CloudEvent(msgspec.Struct, gc=False):
    """What counts of CloudEvents 1.0 in structured JSON (https://cloudevents.io), and three extensions of it."""

    id: Annotated[str, Meta(min_length=1)]
    source: Annotated[str, Meta(min_length=1)]
    type: Annotated[str, Meta(min_length=1)]
    data: msgspec.Raw | UnsetType = UNSET
    data_base64: str | UnsetType = UNSET
    correlationid: str | UnsetType = UNSET
    traceparent: str | UnsetType = UNSET
    samefolddepth: Annotated[int, Meta(ge=0, le=1_000_000)] | UnsetType = UNSET


class _Typed(msgspec.Struct, gc=False):
    """A body that has its own type, as Standard Webhooks recommends; a CloudEvent has its version, too."""

    type: str
    data: msgspec.Raw = msgspec.Raw(b"null")
    specversion: str | UnsetType = UNSET


LAST_MS = 253_402_300_799_999
"""The end of the year 9999. A record's time is of 1970 at the earliest here, and of then at the latest."""
_TRACE = re.compile("[0-9a-f]{2}(-[0-9a-f]+){3}").fullmatch
_cloud_event = msgspec.json.Decoder(_CloudEvent).decode
_typed = msgspec.json.Decoder(_Typed).decode


def read(source: Source, raw: Raw) -> Message | Result:
    """The message, or why the record is passed over. Raises BadMessage, and TooSlow of the author's functions."""
    if raw.headers.get(HOOK, source.name) != source.name:
        return Result.OTHER_TYPE
    if raw.value is None:
        return Result.TOMBSTONE
    found = _opened(source, raw.headers, raw.value)
    adapter = source.types.get(found.type) or source.types.get(None)
    if adapter is None:
        if found.type is None:
            raise BadMessage("it has no type, and the source has no class for messages without one")
        return Result.OTHER_TYPE
    try:
        fact = adapter.validate_json(bytes(found.body))
    except ValidationError as error:
        raise BadMessage(f"{error.title}: {outline(error)}") from None
    except Exception as error:  # of a check that the author wrote
        raise BadMessage(f"a check of its class raised {type(error).__name__}") from None
    at = Received(
        source=source.name,
        topic=raw.topic,
        partition=raw.partition,
        offset=raw.offset,
        time=time_of(raw.time_ms),
        key=None if raw.key is None else raw.key.decode(errors="backslashreplace"),
        id=raw.headers.get(ID) if HOOK in raw.headers else found.id,
        type=found.type,
        headers=raw.headers,
    )
    given = UNSET if found.correlation_id is None else found.correlation_id
    correlation_id = None if bad_relation(given, UNSET) else found.correlation_id
    trace = found.trace or raw.headers.get("traceparent", "")
    return Message(fact, at, correlation_id, found.depth, trace if _TRACE(trace) else None)


class _Opened(NamedTuple):
    type: str | None
    body: bytes | msgspec.Raw
    id: str | None = None
    correlation_id: str | None = None
    depth: int = 0
    trace: str | None = None


def _opened(source: Source, headers: Mapping[str, str], value: bytes) -> _Opened:
    """Raises BadMessage."""
    try:
        if "ce_specversion" in headers and HOOK not in headers:  # nobody signed them
            event = msgspec.convert(
                {name[3:]: text for name, text in headers.items() if name.startswith("ce_")}, _CloudEvent, strict=False
            )
            return _of_cloud_event(event, _decoded(source, value))
        if headers.get("content-type", "").lower().startswith("application/cloudevents+json"):
            return _structured(source, value)
        body = _decoded(source, value)
        if source.type_header is not None:
            return _Opened(headers.get(source.type_header), body)
        if None in source.types:
            return _Opened(None, body)
        typed = _typed(body)
        if typed.specversion is not UNSET:  # its producer gives no content-type
            return _structured(source, body)
        return _Opened(typed.type, typed.data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadMessage(
            f"it is no {'CloudEvent' if _is_cloud(headers) else 'JSON with type and data'}: {error}"
        ) from None
    except UnicodeDecodeError:
        raise BadMessage("it is not text in UTF-8") from None
    except ValueError as error:
        if isinstance(error, BadMessage):
            raise
        raise BadMessage("its data_base64 is not base64") from None


def _structured(source: Source, value: bytes) -> _Opened:
    event = _cloud_event(value)
    if event.data_base64 is not UNSET:
        return _of_cloud_event(event, _decoded(source, base64.b64decode(event.data_base64, validate=True)))
    return _of_cloud_event(event, b"null" if event.data is UNSET else event.data)


def _is_cloud(headers: Mapping[str, str]) -> bool:
    return "ce_specversion" in headers or headers.get("content-type", "").startswith("application/cloudevents")


def _of_cloud_event(event: _CloudEvent, body: bytes | msgspec.Raw) -> _Opened:
    correlation = None if event.correlationid is UNSET else event.correlationid
    depth = 0 if event.samefolddepth is UNSET else event.samefolddepth
    trace = None if event.traceparent is UNSET else event.traceparent
    return _Opened(event.type, body, f"{event.source} {event.id}", correlation, depth, trace)


def _decoded(source: Source, value: bytes) -> bytes:
    """JSON, by the author's `decode` if there is one. Raises BadMessage."""
    if source.decode is None:
        return value
    try:
        return json.dumps(source.decode(value), allow_nan=False).encode()
    except Exception as error:
        raise BadMessage(f"`decode` raised {type(error).__name__}") from None


class Handled(NamedTuple):
    """What became of a message: its wishes with their cause, and its own id if that counts."""

    result: Result
    wishes: Sequence[tuple[Wish, Cause]] = ()
    id: bytes | None = None


class Reception:
    """Receives messages of one topic by this code's version of a source."""

    def __init__(self, settings: Settings, policy: Policy, topic_id: str, partitions: int) -> None:
        assert policy.source, "it is a source"
        self._policy = policy
        self._source = policy.source
        self._topic_id = topic_id
        self._partitions = partitions
        """Of the log."""
        self._by_id = self._source.goes_by_id(settings)
        self.ended = set[tuple[int, int]]()
        """Partitions and offsets of messages that ended processes: this one does not receive them."""
        files = (one.source.name for one in discover().values() if one.source)
        self._known = {self._source.name, *settings.sources, *files}

    def dead_id(self, partition: int, offset: int) -> str:
        """The id of the dead letter that a message there becomes."""
        return id_of_message(self._place(partition, offset))

    def _place(self, partition: int, offset: int) -> tuple[str | int, ...]:
        return self._policy.name, self._topic_id, partition, offset

    def handled(self, raw: Raw) -> Handled:
        """What became of a message. Raises MessageFailed."""
        raw = raw._replace(time_ms=min(max(raw.time_ms, 0), LAST_MS))
        at = At(f"{raw.topic}/{raw.partition}", raw.offset, raw.time_ms, raw.partition, raw.offset)
        here = self._place(raw.partition, raw.offset)
        cause = Cause(where := f"{self._source.name}/{raw.partition}@{raw.offset}", where, 0)
        ident: bytes | None = None
        try:
            if (raw.partition, raw.offset) in self.ended:
                raise self._failed(at, EndedProcesses())
            message = self._read(raw, at)
            if isinstance(message, Result):
                is_known = raw.headers.get(HOOK, self._source.name) in self._known
                return Handled(message if is_known else Result.OTHER_SOURCE)
            place: tuple[str | int, ...] = here
            if self._by_id:
                if message.at.id is None:
                    raise BadMessage("it has no id of its own, and DEDUP says that this counts")
                place = self._policy.name, "id", message.at.id
                ident = hashlib.blake2b(message.at.id.encode(), digest_size=20).digest()
            known = message.at.id if message.at.id and not bad_relation(UNSET, message.at.id) else where
            cause = Cause(known, message.correlation_id or known, message.depth, message.trace)
            return Handled(Result.RECEIVED, [(one, cause) for one in self._wishes(message, place, at)], ident)
        except BadMessage as why:
            # its own id does not count: a repeat may be received, or this one again
            return Handled(Result.DEAD, [(dead_message(here, at, str(why)), cause)])

    @watched(lambda local: f"reading message {local['at'].offset} of {local['at'].stream}")
    def _read(self, raw: Raw, at: At) -> Message | Result:
        """Raises BadMessage, MessageFailed."""
        try:
            return read(self._source, raw)
        except BadMessage:
            raise
        except FAULTS as error:
            raise self._failed(at, error) from None

    @watched(lambda local: f"receiving message {local['at'].offset} of {local['at'].stream}")
    def _wishes(self, message: Message, place: Sequence[str | int], at: At) -> list[Wish]:
        """Raises MessageFailed, BadMessage."""
        try:
            return of_message(partial(self._source.receive, message.fact, message.at), place, at, self._partitions)
        except FAULTS as error:
            if self._policy.on_poison == "park" and not isinstance(error, TooSlow):
                raise BadMessage(f"`receive` failed: {self._in_words(error)}") from None
            raise self._failed(at, error) from None

    def _failed(self, at: At, error: BaseException) -> MessageFailed:
        parks = (
            ""
            if isinstance(error, TooSlow | EndedProcesses)
            else '; or let such messages become dead letters: ON_POISON = "park"'
        )
        return MessageFailed(
            f"Source '{self._policy.name}' can't receive {at.stream}@{at.offset}: {self._in_words(error)}.",
            f"Nothing was skipped. Correct policies/{self._policy.name}.py and start again{parks}.",
        )

    def _in_words(self, error: BaseException) -> str:
        """What was raised, and the line of the source's file. An author's text may hold a value."""
        if isinstance(error, EndedProcesses):
            return "it ended one process after the other; their logs or exit codes say how"
        what = in_words(error) if isinstance(error, TooSlow | BadWish) else type(error).__name__
        file = self._source.receive.__code__.co_filename
        lines = [line for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == file]
        return f"{what} at policies/{self._policy.name}.py:{lines[-1]}" if lines else what
