"""Decodes and checks the records of `commands`: the result is a command to decide, or a rejection to record.

No record may stop a partition. A failure here would repeat on every attempt, so it becomes a rejection: under the command's
own stream and id if they are valid, else under a reserved stream and an id derived from the record's offset.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation, localcontext
from functools import cache, partial
from typing import Any
from unicodedata import category, is_normalized

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import TypeAdapter, ValidationError

from domain.engine.contexts import Context, contexts
from domain.engine.value_limits import within_limits
from domain.engine.versions import summary
from infra.errors import in_words
from infra.log.partitioner import partition_of
from infra.log.records import Command, Headers, Reason, Record, decode_command
from infra.processes.time_limit import FAULTS, TooSlow, watched
from projections.engine.store.command_types import CommandType

MAX_ID_BYTES = 200
MAX_MESSAGE = 500

_ID = re.compile(r"[^\x00-\x1f\x7f-\x9f]+").fullmatch
_STREAM = re.compile(r"[a-z][a-z0-9_]*/[^\x00-\x1f\x7f-\x9f]+").fullmatch
_OF_POLICY = re.compile(r"[a-z][a-z0-9_]*~").match
_NUL = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")


@dataclass(frozen=True, slots=True)
class Intake:
    """What the records of the `commands` topic are checked against."""

    topic_id: str
    partitions: int
    max_bytes: int = 262_144
    """Larger records are rejected as too-large."""
    contexts: Mapping[str, Context] = field(default_factory=contexts)


class Received(msgspec.Struct, frozen=True):
    """A checked command, for the writer: either `command` or `rejection` is set. `context` is None if unknown."""

    offset: int
    stream: str
    id: str
    fingerprint: str
    expected_version: int | None = None
    context: Context | None = None
    command: Callable[[], Any] | None = None
    """Makes the command of its body, for `command_of`."""
    rejection: Reason | None = None
    unknown: CommandType | None = None
    """Its type if this code does not know it; another release may."""
    correlation_id: str | UnsetType = UNSET
    causation_id: str | UnsetType = UNSET
    depth: int | UnsetType = UNSET
    by: str | UnsetType = UNSET
    headers: Headers | None = None
    """The trace's headers, for the commit's record."""


class Rejected(Exception):
    """The answer to a command is a rejection."""

    def __init__(self, why: Reason, unknown: CommandType | None = None) -> None:
        self.reason = why
        self.unknown = unknown


def receive(record: Record, intake: Intake) -> Received:
    """Check what needs neither the stream's state nor the author's code. Raises nothing, whatever the record holds."""
    try:
        envelope = decode_command(record.value or b"")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return _under_derived_id(record, intake, "malformed", f"not a command record: {error}")
    stream = envelope.stream
    if problem := bad_name(stream, envelope.id):
        return _under_derived_id(record, intake, "malformed", problem)
    if partition_of(stream, intake.partitions) != record.partition:
        return _under_derived_id(
            record, intake, "misrouted", "the stream belongs to another partition: produce with the murmur2 partitioner"
        )
    if record.key != stream.encode():
        return _under_derived_id(record, intake, "misrouted", "the record's key is not its stream")
    # every rejection needs the context: without it the stream's state would be taken for empty
    name = stream.partition("/")[0]
    context = intake.contexts.get(name)
    fingerprint = ""
    command = rejection = unknown = None
    try:
        fingerprint = fingerprint_of(envelope)
        command = _checked(record, envelope, name, context, intake)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        fingerprint = _hash(bytes(envelope.data))
        rejection = reason("malformed", f"the body can't be read: {error}")
    except Rejected as rejected:
        rejection, unknown = rejected.reason, rejected.unknown
    relation = (envelope.correlation_id, envelope.causation_id, envelope.depth, envelope.by)
    if relation != _UNRELATED and (wrong := bad_relation(envelope.correlation_id, envelope.causation_id, envelope.by)):
        command, rejection, relation = None, reason("malformed", wrong), _UNRELATED
    return Received(
        record.offset,
        stream,
        envelope.id,
        fingerprint,
        envelope.expected_version,
        context,
        command,
        rejection,
        unknown,
        *relation,
    )


_UNRELATED = (UNSET, UNSET, UNSET, UNSET)


def _checked(
    record: Record, envelope: Command, name: str, context: Context | None, intake: Intake
) -> Callable[[], Any]:
    """Check a body that can be read; what makes the command of it. Raises Rejected."""
    size = len(record.value or b"")
    if size > intake.max_bytes:
        raise Rejected(reason("too-large", f"the command takes {size} bytes, more than {intake.max_bytes}"))
    if context is None:
        raise Rejected(reason("malformed", f"no context is called '{name}'"), CommandType(name, ""))
    read = context.command_readers.get(envelope.type)
    if read is None:
        unknown = CommandType(name, envelope.type)
        raise Rejected(reason("malformed", f"'{name}' knows no command '{envelope.type}'"), unknown)
    body = bytes(envelope.data)
    if b"\\u0000" in body and holds_nul(body):  # a call costs each command more than the first check
        raise Rejected(reason("malformed", f"{place_of_nul(body)} holds a NUL character, which PostgreSQL can't store"))
    return partial(read, body)


@watched(lambda local: f"a check of command {local['received'].id} of {local['received'].stream}")
def command_of(received: Received) -> Any:
    """The command, which makes its class's own checks. Raises Rejected."""
    if received.rejection is not None:
        raise Rejected(received.rejection)
    assert received.command is not None
    try:
        return received.command()
    except ValidationError as error:
        raise Rejected(reason("malformed", summary(error))) from error
    except msgspec.DecodeError as error:
        raise Rejected(reason("malformed", f"the body is no JSON object: {error}")) from error
    except FAULTS as error:  # a defect in a command's own checks, which would repeat on every attempt
        raise Rejected(reason("failed", str(error) if isinstance(error, TooSlow) else in_words(error))) from error


def bad_name(stream: str, command_id: str) -> str | None:
    """What is wrong with a stream's name or a command's id, or None. Both become keys in the log and the database."""
    plain = stream.isascii() and command_id.isascii() and command_id.isprintable()
    if plain and len(stream) <= MAX_ID_BYTES and 0 < len(command_id) <= MAX_ID_BYTES and _STREAM(stream):
        return None  # almost all are plain, and this check takes half the time
    return _problem("stream", stream, _STREAM, "'<context>/<id>'") or _problem("id", command_id)


def hidden_difference(stream: str) -> str | None:
    """What is invisible in a stream's name, so that it looks like another one; mostly None. No new stream may have it."""
    name = stream.partition("/")[2]
    if name != " ".join(name.split()):
        return "the stream's name may have spaces only inside, one at a time, and only U+0020"
    if hidden := "" if name.isascii() else next((one for one in name if category(one) == "Cf"), ""):
        return f"the stream's name holds an invisible character, U+{ord(hidden):04X}"
    return None if is_normalized("NFC", name) else "the stream's name is not in Unicode's normal form NFC"


def bad_client_name(stream: str, command_id: str) -> str | None:
    """The same for a client's command: ids of the form `<policy>~…` are the policies' own."""
    if _OF_POLICY(command_id):
        return "the id begins like those of policies' commands, with lower case letters and ~"
    return bad_name(stream, command_id)


def bad_relation(
    correlation_id: str | UnsetType, causation_id: str | UnsetType, by: str | UnsetType = UNSET
) -> str | None:
    """What is wrong with a command's correlation id, its causation id or its sender, or None."""
    ids = (("correlation_id", correlation_id), ("causation_id", causation_id), ("sender 'by'", by))
    return next((wrong for name, value in ids if value is not UNSET and (wrong := _problem(name, value))), None)


def _problem(
    name: str, value: str, fits: Callable[[str], object] = _ID, form: str = "at least one character"
) -> str | None:
    if len(value.encode(errors="replace")) > MAX_ID_BYTES:
        return f"the {name} is longer than {MAX_ID_BYTES} bytes"
    return None if fits(value) else f"the {name} must be {form}, without control characters"


def fingerprint_of(command: Command) -> str:
    """A hash of name, body (whatever its members' order) and expected version: the same for a repeated command.

    Not of the type's version: a client that repeats a request may meet a newer release of the API.

    Raises msgspec.DecodeError, UnicodeError, RecursionError where the body can't be decoded exactly.
    """
    name = command.type.partition("/")[0] if "/" in command.type else command.type
    return _hash(_encode_sorted((name, command.expected_version, _decode_any(command.data))))


def require_members_once(body: bytes) -> None:
    """Require that no object in a client's JSON has a member twice: of two, readers take the last. Raises ValueError."""
    _decode_once(body.decode())


def _once(members: list[tuple[str, Any]]) -> None:
    if len(dict(members)) < len(members):
        [(name, _)] = Counter(name for name, _ in members).most_common(1)
        raise ValueError(f"an object has the member '{name[:40]}' twice")


_decode_once = json.JSONDecoder(object_pairs_hook=_once, parse_int=str).decode


def _as_written(text: str) -> float:
    """A number with a fraction or an exponent, as a float. Raises ValueError where the float is another number.

    pydantic reads it as a float, even for a Decimal: two different numbers could become one command. Accepted is the shortest form
    of a float: 0.1, not 0.1000000000000000055.
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


@cache
def validator(kind: type) -> Callable[[bytes], Any]:
    """The function from JSON to a command. It raises pydantic.ValidationError, and whatever the command's own checks raise."""
    return within_limits(kind, TypeAdapter(kind).validator.validate_json)


def holds_nul(body: bytes) -> bool:
    """Whether a text in this JSON has a NUL character, which PostgreSQL can't store."""
    return b"\\u0000" in body and _NUL.search(body) is not None


def place_of_nul(body: bytes) -> str:
    """The path of the first text with a NUL character in this JSON; of a key, that of its object."""
    return next(_places_of_nul(json.loads(body, parse_int=str), ""), "") or "body"


def _places_of_nul(value: Any, path: str) -> Iterator[str]:
    if isinstance(value, str) and "\0" in value:
        yield path
    elif isinstance(value, dict | list):
        for place, one in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _places_of_nul(place, path)
            yield from _places_of_nul(one, f"{path}.{place}".lstrip("."))


def reason(code: str, message: str) -> Reason:
    """A reason without control characters and of bounded length, whatever input the message quotes."""
    return Reason(code, "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in message[:MAX_MESSAGE]))


def _under_derived_id(record: Record, intake: Intake, code: str, message: str) -> Received:
    return Received(
        offset=record.offset,
        stream=reserved_stream(record.partition),
        id=f"{intake.topic_id}:{record.partition}:{record.offset}",
        fingerprint=_hash(record.value or b""),
        rejection=reason(code, message),
    )


def reserved_stream(partition: int) -> str:
    """The stream of rejections whose record has no valid one. No command can name it: contexts begin with a letter."""
    return f"-/{partition}"
