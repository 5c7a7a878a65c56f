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
    """What counts of CloudEvents 1.0 in JSON (https://cloudevents.io), and three extensions of it."""

    id: Annotated[str, Meta(min_length=1)]
    source: Annotated[str, Meta(min_length=1)]
    type: Annotated[str, Meta(min_length=1)]
    data: msgspec.Raw = msgspec.Raw(b"null")
    data_base64: str | UnsetType = UNSET
    correlationid: str = ""
    traceparent: str = ""
    samefolddepth: Annotated[int, Meta(ge=0, le=1_000_000)] = 0


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
    kind, body, event = _opened(source, raw.headers, raw.value)
    adapter = source.types.get(kind) or source.types.get(None)
    if adapter is None:
        if kind is None:
            raise BadMessage("it has no type, and the source has no class for messages without one")
        return Result.OTHER_TYPE
    try:
        fact = adapter.validate_json(bytes(body))
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
        id=raw.headers.get(ID) if HOOK in raw.headers else f"{event.source} {event.id}" if event else None,
        type=kind,
        headers=raw.headers,
    )
    correlation, depth, trace = (event.correlationid, event.samefolddepth, event.traceparent) if event else ("", 0, "")
    trace = trace or raw.headers.get("traceparent", "")
    correlation_id = None if bad_relation(correlation, UNSET) else correlation
    return Message(fact, at, correlation_id, depth, trace if _TRACE(trace) else None)


def _opened(
    source: Source, headers: Mapping[str, str], value: bytes
) -> tuple[str | None, bytes | msgspec.Raw, _CloudEvent | None]:
    """A message's type and body, and the CloudEvent that it is, if it is one. Raises BadMessage."""
    content_type = headers.get("content-type", "").lower()
    try:
        if "ce_specversion" in headers and HOOK not in headers:  # nobody signed them
            given = {name[3:]: text for name, text in headers.items() if name.startswith("ce_")}
            event = msgspec.convert(given, _CloudEvent, strict=False)
            return event.type, _decoded(source, value), event
        if not content_type.startswith("application/cloudevents+json"):
            value = _decoded(source, value)
            if source.type_header is not None:
                return headers.get(source.type_header), value, None
            if None in source.types:
                return None, value, None
            typed = _typed(value)
            if typed.specversion is UNSET:  # else it is a CloudEvent without its content-type
                return typed.type, typed.data, None
        event = _cloud_event(value)
        if event.data_base64 is UNSET:
            return event.type, event.data, event
        return event.type, _decoded(source, base64.b64decode(event.data_base64, validate=True)), event
    except (msgspec.DecodeError, RecursionError) as error:
        is_cloud = "ce_specversion" in headers or content_type.startswith("application/cloudevents")
        raise BadMessage(f"it is no {'CloudEvent' if is_cloud else 'JSON with type and data'}: {error}") from None
    except UnicodeDecodeError:
        raise BadMessage("it is not text in UTF-8") from None
    except BadMessage:
        raise
    except ValueError:
        raise BadMessage("its data_base64 is not base64") from None


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

    @watched(lambda local: f"receiving message {local['raw'].offset} of {local['raw'].topic}/{local['raw'].partition}")
    def handled(self, raw: Raw) -> Handled:
        """What became of a message. Raises MessageFailed."""
        raw = raw._replace(time_ms=min(max(raw.time_ms, 0), LAST_MS))
        at = At(f"{raw.topic}/{raw.partition}", raw.offset, raw.time_ms, raw.partition, raw.offset)
        here = place = self._place(raw.partition, raw.offset)
        cause = Cause(where := f"{self._source.name}/{raw.partition}@{raw.offset}", where, 0)
        message: Message | Result | None = None
        ident: bytes | None = None
        try:
            if (raw.partition, raw.offset) in self.ended:
                raise EndedProcesses
            message = read(self._source, raw)
            if isinstance(message, Result):
                is_known = raw.headers.get(HOOK, self._source.name) in self._known
                return Handled(message if is_known else Result.OTHER_SOURCE)
            if self._by_id:
                if message.at.id is None:
                    raise BadMessage("it has no id of its own, and DEDUP says that this counts")
                place = self._policy.name, "id", message.at.id
                ident = hashlib.blake2b(message.at.id.encode(), digest_size=20).digest()
            known = message.at.id if message.at.id and not bad_relation(UNSET, message.at.id) else where
            cause = Cause(known, message.correlation_id or known, message.depth, message.trace)
            wishes = of_message(partial(self._source.receive, message.fact, message.at), place, at, self._partitions)
            return Handled(Result.RECEIVED, [(one, cause) for one in wishes], ident)
        except BadMessage as error:
            why = str(error)
        except FAULTS as error:
            # what fails before `receive` is never parked
            if message is None or self._policy.on_poison != "park" or isinstance(error, TooSlow):
                raise self._failed(at, error) from None
            why = f"`receive` failed: {self._in_words(error)}"
        # its own id does not count: a repeat may be received, or this one again
        return Handled(Result.DEAD, [(dead_message(here, at, why), cause)])

    def _failed(self, at: At, error: BaseException) -> MessageFailed:
        hint = f"Nothing was skipped. Correct policies/{self._policy.name}.py and start again"
        if not isinstance(error, TooSlow | EndedProcesses):
            hint += '; or let such messages become dead letters: ON_POISON = "park"'
        what = f"Source '{self._policy.name}' can't receive {at.stream}@{at.offset}: {self._in_words(error)}."
        return MessageFailed(what, f"{hint}.")

    def _in_words(self, error: BaseException) -> str:
        """What was raised, and the line of the source's file. An author's text may hold a value."""
        if isinstance(error, EndedProcesses):
            return "it ended one process after the other; their logs or exit codes say how"
        what = in_words(error) if isinstance(error, TooSlow | BadWish) else type(error).__name__
        file = self._source.receive.__code__.co_filename
        lines = [line for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == file]
        return f"{what} at policies/{self._policy.name}.py:{lines[-1]}" if lines else what
