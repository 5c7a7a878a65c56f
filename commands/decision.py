"""Decides a received command on its stream's state: the result is always a commit, which records events or a rejection."""

from __future__ import annotations

from typing import Any

import msgspec

from commands.intake import Received, Rejected, command_of, hidden_difference, holds_nul, reason
from domain.engine.storable import encode as encode_value
from domain.engine.storable import require_same
from domain.language import Refusal
from infra.errors import in_words
from infra.log.records import Commit, EventRecord, Reason, encode
from infra.processes.time_limit import FAULTS, SLOW, TooSlow, watched


class Versioned(msgspec.Struct, frozen=True):
    """A stream's state after its first `version` events."""

    version: int
    state: Any


class Decided(msgspec.Struct, frozen=True):
    """A commit, its bytes in the log, and the stream after it."""

    commit: Commit
    value: bytes
    after: Versioned


@watched(
    lambda local: f"command {type(local['command']).__name__} {local['received'].id} of {local['received'].stream}"
)
def decide(received: Received, before: Versioned, *, epoch: int, seq: int, max_bytes: int) -> Decided:
    """Decide a command on the state of its stream. Pure; raises nothing that depends on the command or the author's code.

    A command whose own checks fail, a refusal, a version conflict, a defect of the author's code, a decision that does not end in
    time and a commit of more than `max_bytes` become rejections.
    """
    try:
        command = command_of(received)
        if before.version == 0 and (problem := hidden_difference(received.stream)):
            raise Rejected(reason("unclear-stream", problem))
        if received.expected_version is not None and received.expected_version != before.version:
            conflict = f"the stream is at version {before.version}, not {received.expected_version}"
            raise Rejected(reason("version-conflict", conflict))
        context = received.context
        assert context is not None  # a command without a rejection has its context
        state = before.state
        events = context.decide(command, state)
        records = []
        size = 0
        for event in events:
            stored = context.stored.get(type(event))
            if stored is None:
                name = type(event).__name__
                raise TypeError(f"decide returned a {name}, which is not in the context's Event union")
            name, decode = stored
            body = encode_value(event)
            if (size := size + len(body)) > max_bytes:  # it may yield events for ever
                raise Rejected(_too_large(max_bytes))
            data = msgspec.Raw(body)
            # decoded as every reader does: an event that can't be decoded would stop them all
            read = decode(data)
            if read != event:
                require_same(event, read)
            state = context.fold(state, read)
            records.append(EventRecord(name, data))
        if records:
            encode_value(state)  # a state that can't be encoded would stop the agents
        after = Versioned(before.version + len(events), state)
        commit = _commit(received, after.version, records, None, epoch, seq)
        value = encode(commit)
        if b"\\u0000" in value and holds_nul(value):
            raise ValueError("decide returned a text with a NUL character, which PostgreSQL can't store")
        if len(value) > max_bytes:
            raise Rejected(_too_large(max_bytes))
        return Decided(commit, value, after)
    except Rejected as rejected:
        why = rejected.reason
    except Refusal as refusal:
        why = reason(refusal.code, refusal.message)
    except TooSlow as slow:
        why = reason("failed", str(slow))
    except MemoryError:  # perhaps another handler has more
        raise
    except FAULTS as error:  # a defect of the author's code: it would repeat on every attempt and block the partition
        why = reason("failed", in_words(error))
    commit = _commit(received, before.version, [], why, epoch, seq)
    return Decided(commit, encode(commit), before)


def is_slow(why: Reason) -> bool:
    """Whether a decision, or a command's own check, was ended."""
    return why.code == "failed" and why.message.startswith(SLOW)


def _too_large(most: int) -> Reason:
    return reason("too-large", f"its events take more than {most} bytes")


def _commit(
    received: Received, version: int, events: list[EventRecord], why: Reason | None, epoch: int, seq: int
) -> Commit:
    return Commit(
        stream=received.stream,
        version=version,
        events=events,
        command_id=received.id,
        command_offset=received.offset,
        fingerprint=received.fingerprint,
        outcome="rejected" if why else "accepted",
        reason=why,
        epoch=epoch,
        seq=seq,
        correlation_id=received.correlation_id,
        causation_id=received.causation_id,
        depth=received.depth,
        by=received.by,
    )
