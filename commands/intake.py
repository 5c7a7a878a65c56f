"""From the bytes of a record in `commands` to something that can be decided, or to a rejection that can be recorded.

Nothing that arrives may stop a partition: whatever fails here fails again on every try, so it becomes a recorded rejection, under
its own stream and id where it has usable ones, else under a reserved stream and an id derived from where it stands.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation, localcontext
from functools import cache
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import TypeAdapter, ValidationError

from infra.domain_model.contexts import Context, contexts
from infra.errors import in_words
from infra.log.partitioner import partition_of
from infra.log.records import Command, Headers, Reason, Record, decode_command
from projections.engine.store.command_types import CommandType

MAX_ID_BYTES = 200
MAX_MESSAGE = 500

_ID = re.compile(r"[^\x00-\x1f\x7f-\x9f]+").fullmatch
_STREAM = re.compile(r"[a-z][a-z0-9_]*/[^\x00-\x1f\x7f-\x9f]+").fullmatch
_NUL = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")


@dataclass(frozen=True, slots=True)
class Intake:
    """What the command records of one topic are checked against."""

    topic_id: str
    partitions: int
    max_bytes: int = 262_144
    """Of a command's record; larger ones are rejected as too-large."""
    contexts: Mapping[str, Context] = field(default_factory=contexts)


class Received(msgspec.Struct, frozen=True):
    """A command as the writer takes it: either `command` is there, or `rejection` says why not. `context` is None if unknown."""

    offset: int
    stream: str
    id: str
    fingerprint: str
    expected_version: int | None = None
    context: Context | None = None
    command: Any = None
    rejection: Reason | None = None
    unknown: CommandType | None = None
    """What this code does not know; another release may."""
    correlation_id: str | UnsetType = UNSET
    causation_id: str | UnsetType = UNSET
    headers: Headers | None = None
    """The trace's, for the record of its commit."""


def receive(record: Record, intake: Intake) -> Received:
    """Check everything about a record that does not need the stream's state. Never raises for what a record may hold."""
    try:
        envelope = decode_command(record.value or b"")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return _under_derived_id(record, intake, "malformed", f"not a command record: {error}")
    stream = envelope.stream
    if problem := bad_name(stream, envelope.id):
        return _under_derived_id(record, intake, "malformed", problem)
    if partition_of(stream, intake.partitions) != record.partition:
        return _under_derived_id(
            record, intake, "misrouted", "the stream lives in another partition: produce with the murmur2 partitioner"
        )
    if record.key != stream.encode():
        return _under_derived_id(record, intake, "misrouted", "the record's key is not its stream")
    if envelope.correlation_id is UNSET and envelope.causation_id is UNSET:
        return _validated(record, envelope, intake)
    return _related(_validated(record, envelope, intake), envelope)


def _related(received: Received, envelope: Command) -> Received:
    if wrong := bad_relation(envelope.correlation_id, envelope.causation_id):
        return msgspec.structs.replace(received, command=None, rejection=reason("malformed", wrong))
    return msgspec.structs.replace(received, correlation_id=envelope.correlation_id, causation_id=envelope.causation_id)


def bad_name(stream: str, command_id: str) -> str | None:
    """What is wrong with a stream's name or a command's id, or None. Both end up as keys in the log and the database."""
    plain = stream.isascii() and command_id.isascii() and command_id.isprintable()
    if plain and len(stream) <= MAX_ID_BYTES and 0 < len(command_id) <= MAX_ID_BYTES and _STREAM(stream):
        return None  # as almost all are, and told in half the time
    for name, value, pattern in (("stream", stream, _STREAM), ("id", command_id, _ID)):
        if len(value) > MAX_ID_BYTES or len(value.encode(errors="replace")) > MAX_ID_BYTES:
            return f"the {name} is longer than {MAX_ID_BYTES} bytes"
        if not pattern(value):
            form = "'<context>/<id>'" if name == "stream" else "at least one character"
            return f"the {name} must be {form}, without control characters"
    return None


def bad_relation(correlation_id: str | UnsetType, causation_id: str | UnsetType) -> str | None:
    """What is wrong with a command's correlation or causation id, or None. Both stay in the log."""
    for name, value in (("correlation_id", correlation_id), ("causation_id", causation_id)):
        if value is UNSET:
            continue
        if len(value.encode(errors="replace")) > MAX_ID_BYTES:
            return f"the {name} is longer than {MAX_ID_BYTES} bytes"
        if not _ID(value):
            return f"the {name} must be at least one character, without control characters"
    return None


def fingerprint_of(command: Command) -> str:
    """Tells whether a repeated id came with the same command: type, body (order of members apart) and expected version.

    Raises msgspec.DecodeError, UnicodeError, RecursionError where the body can't be read as what it says.
    """
    return _hash(_encode_sorted((command.type, command.expected_version, _decode_any(command.data))))


def _as_written(text: str) -> float:
    """A number with a fraction or an exponent. Raises ValueError where a float would be another number than what is written.

    pydantic reads such a number as a float, also for a Decimal: two that become one float would be one command, and neither
    what was sent. Accepted is what a float is written as, in its shortest form: 0.1 is, 0.1000000000000000055 is not.
    """
    number = float(text)
    with localcontext() as context:
        context.traps[InvalidOperation] = False
        if repr(number) == text or (math.isfinite(number) and Decimal(text) == Decimal(repr(number))):
            return number
    raise ValueError(
        f"the number {text[:40]} does not fit a float, which has about 16 digits and ends at 1.8e308: send a text"
    )


_decode_any = msgspec.json.Decoder(float_hook=_as_written).decode
_encode_sorted = msgspec.json.Encoder(order="sorted").encode


def _hash(value: bytes) -> str:
    return hashlib.blake2b(value, digest_size=16).hexdigest()


def _validated(record: Record, envelope: Command, intake: Intake) -> Received:
    name = envelope.stream.partition("/")[0]
    # found first, and given to every rejection: without it the stream's state would be taken for nothing
    context = intake.contexts.get(name)
    try:
        fingerprint = fingerprint_of(envelope)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        return _rejected(
            record, envelope, _hash(bytes(envelope.data)), "malformed", f"the body can't be read: {error}", context
        )
    size = len(record.value or b"")
    if size > intake.max_bytes:
        problem = f"the command takes {size} bytes, more than {intake.max_bytes}"
        return _rejected(record, envelope, fingerprint, "too-large", problem, context)
    if context is None:
        problem = f"no context is called '{name}'"
        return _rejected(record, envelope, fingerprint, "malformed", problem, unknown=CommandType(name, ""))
    kind = context.commands.get(envelope.type)
    if kind is None:
        problem = f"'{name}' knows no command '{envelope.type}'"
        unknown = CommandType(name, envelope.type)
        return _rejected(record, envelope, fingerprint, "malformed", problem, context, unknown=unknown)
    body = bytes(envelope.data)
    if b"\\u0000" in body and holds_nul(body):  # asked twice: a call costs every command more than this does
        problem = "the body holds a NUL character, which PostgreSQL can't store"
        return _rejected(record, envelope, fingerprint, "malformed", problem, context)
    try:
        command = validator(kind)(body)
    except ValidationError as error:
        return _rejected(record, envelope, fingerprint, "malformed", _summary(error), context)
    except Exception as error:  # a defect in a command's own checks; it would repeat on every try
        return _rejected(record, envelope, fingerprint, "failed", in_words(error), context)
    return Received(
        record.offset, envelope.stream, envelope.id, fingerprint, envelope.expected_version, context, command
    )


@cache
def validator(kind: type) -> Callable[[bytes], Any]:
    """From the JSON of a command to the command. Raises pydantic.ValidationError, and what a command's own checks may raise."""
    return TypeAdapter(kind).validator.validate_json


def holds_nul(body: bytes) -> bool:
    """Whether the JSON of a command has a NUL character in some text, which PostgreSQL can't store."""
    return b"\\u0000" in body and _NUL.search(body) is not None


def _summary(error: ValidationError) -> str:
    """Where and what, never the value itself: it may be long, or nobody else's business."""
    return "; ".join(
        f"{'.'.join(map(str, problem['loc'])) or 'body'}: {problem['msg']}"
        for problem in error.errors(include_url=False, include_context=False, include_input=False)
    )


def reason(code: str, message: str) -> Reason:
    """A reason that any log, database and terminal can hold, whatever the input put into it."""
    return Reason(code, "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in message[:MAX_MESSAGE]))


def _rejected(
    record: Record,
    envelope: Command,
    fingerprint: str,
    code: str,
    message: str,
    context: Context | None = None,
    unknown: CommandType | None = None,
) -> Received:
    why = reason(code, message)
    return Received(
        record.offset, envelope.stream, envelope.id, fingerprint, context=context, rejection=why, unknown=unknown
    )


def _under_derived_id(record: Record, intake: Intake, code: str, message: str) -> Received:
    return Received(
        offset=record.offset,
        stream=reserved_stream(record.partition),
        id=f"{intake.topic_id}:{record.partition}:{record.offset}",
        fingerprint=_hash(record.value or b""),
        rejection=reason(code, message),
    )


def reserved_stream(partition: int) -> str:
    """Where rejections stand whose record names no usable stream. No command can name it: contexts begin with a letter."""
    return f"-/{partition}"
