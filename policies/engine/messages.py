"""A record of another service as a message: its type, its own id, and its fact. Pure; no error holds a value of the record."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import UNSET, Meta, UnsetType
from pydantic import ValidationError

from commands.intake import bad_relation
from domain.engine.versions import summary
from infra.log.records import time_of
from infra.processes.time_limit import limited
from policies.engine.source import Received, Source

HOOK, HOOK_ID = "samefold-hook", "webhook-id"
"""Headers of the inbox: the source that a webhook is for, and the webhook's id."""


class Result(StrEnum):
    """What became of a message: the metric's label."""

    RECEIVED = "received"
    OTHER_TYPE = "other-type"
    TOMBSTONE = "tombstone"
    REPEATED = "repeated"
    DEAD = "dead"


class BadMessage(ValueError):
    """A message can't be read. It says why, without any value."""


class Raw(NamedTuple):
    """A record of a source's topic. Headers that are no text are written as their bytes in Latin-1."""

    topic: str
    partition: int
    offset: int
    time_ms: int
    key: bytes | None
    value: bytes | None
    headers: Mapping[str, str]


class Message(NamedTuple):
    """What `receive` gets, and what its commands carry on."""

    fact: Any
    at: Received
    correlation_id: str | None
    depth: int


class _CloudEvent(msgspec.Struct, gc=False):
    """What counts of CloudEvents 1.0 in structured JSON (https://cloudevents.io), and two extensions of it."""

    id: Annotated[str, Meta(min_length=1)]
    source: Annotated[str, Meta(min_length=1)]
    type: Annotated[str, Meta(min_length=1)]
    data: msgspec.Raw | UnsetType = UNSET
    data_base64: str | UnsetType = UNSET
    correlationid: str | UnsetType = UNSET
    samefolddepth: Annotated[int, Meta(ge=0, le=1_000_000)] | UnsetType = UNSET


class _Typed(msgspec.Struct, gc=False):
    """A body that has its own type, as Standard Webhooks recommends."""

    type: str
    data: msgspec.Raw


_cloud_event = msgspec.json.Decoder(_CloudEvent).decode
_typed = msgspec.json.Decoder(_Typed).decode


def read(source: Source, raw: Raw) -> Message | Result:
    """The message, or why the record is passed over. Raises BadMessage."""
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
        raise BadMessage(f"{error.title}: {summary(error)}") from None
    at = Received(
        source=source.name,
        topic=raw.topic,
        partition=raw.partition,
        offset=raw.offset,
        time=time_of(raw.time_ms),
        key=None if raw.key is None else raw.key.decode(errors="backslashreplace"),
        id=found.id,
        type=found.type,
        headers=raw.headers,
    )
    given = UNSET if found.correlation_id is None else found.correlation_id
    return Message(fact, at, None if bad_relation(given, UNSET) else found.correlation_id, found.depth)


class _Opened(NamedTuple):
    type: str | None
    id: str | None
    body: bytes | msgspec.Raw
    correlation_id: str | None = None
    depth: int = 0


def _opened(source: Source, headers: Mapping[str, str], value: bytes) -> _Opened:
    """Raises BadMessage."""
    try:
        if "ce_specversion" in headers:
            event = msgspec.convert(
                {name[3:]: text for name, text in headers.items() if name.startswith("ce_")}, _CloudEvent, strict=False
            )
            return _of_cloud_event(event, _decoded(source, value))
        if headers.get("content-type", "").startswith("application/cloudevents+json"):
            event = _cloud_event(value)
            if event.data_base64 is not UNSET:
                return _of_cloud_event(event, _decoded(source, base64.b64decode(event.data_base64, validate=True)))
            return _of_cloud_event(event, b"null" if event.data is UNSET else event.data)
        body, ident = _decoded(source, value), headers.get(HOOK_ID) if HOOK in headers else None
        if source.type_header is not None:
            return _Opened(headers.get(source.type_header), ident, body)
        if None in source.types:
            return _Opened(None, ident, body)
        typed = _typed(body)
        return _Opened(typed.type, ident, typed.data)
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


def _is_cloud(headers: Mapping[str, str]) -> bool:
    return "ce_specversion" in headers or headers.get("content-type", "").startswith("application/cloudevents")


def _of_cloud_event(event: _CloudEvent, body: bytes | msgspec.Raw) -> _Opened:
    correlation = None if event.correlationid is UNSET else event.correlationid
    depth = 0 if event.samefolddepth is UNSET else event.samefolddepth
    return _Opened(event.type, f"{event.source} {event.id}", body, correlation, depth)


def _decoded(source: Source, value: bytes) -> bytes:
    """JSON, by the author's `decode` if there is one. Raises BadMessage."""
    if source.decode is None:
        return value
    try:
        return json.dumps(limited(source.decode, value), allow_nan=False).encode()
    except Exception as error:
        raise BadMessage(f"`decode` raised {type(error).__name__}") from None
