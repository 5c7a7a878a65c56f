"""Decides a received command on its stream's state: the result is always a commit, which records events or a rejection."""

from __future__ import annotations

from typing import Any

import msgspec

from commands.intake import Received, hidden_difference, holds_nul, reason
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


@watched(lambda local: local["received"].named)
def decide(received: Received, before: Versioned, *, epoch: int, seq: int, max_bytes: int) -> Decided:
    """Decide a command on the state of its stream. Pure; raises nothing that depends on the command or the domain's code.

    A refusal, a version conflict, a defect of the domain's code, a decision that does not end in time and a commit of more than
    `max_bytes` become rejections.
    """
    if received.rejection is not None:
        return _rejection(received, before, received.rejection, epoch, seq)
    if before.version == 0 and (problem := hidden_difference(received.stream)):
        return _rejection(received, before, reason("unclear-stream", problem), epoch, seq)
    if received.expected_version is not None and received.expected_version != before.version:
        conflict = f"the stream is at version {before.version}, not {received.expected_version}"
        return _rejection(received, before, reason("version-conflict", conflict), epoch, seq)
    context = received.context
    assert context is not None  # a command without a rejection has its context
    try:
        state = before.state
        events = context.decide(received.command, state)
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
                return _rejection(received, before, _too_large(max_bytes), epoch, seq)
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
    except Refusal as refusal:
        return _rejection(received, before, reason(refusal.code, refusal.message), epoch, seq)
    except TooSlow as slow:
        return _rejection(received, before, reason("failed", str(slow)), epoch, seq)
    except MemoryError:  # perhaps another handler has more
        raise
    except FAULTS as error:  # a defect of the domain's code: it would repeat on every attempt and block the partition
        return _rejection(received, before, reason("failed", in_words(error)), epoch, seq)
    if len(value) > max_bytes:
        return _rejection(received, before, _too_large(max_bytes), epoch, seq)
    return Decided(commit, value, after)


def is_slow(why: Reason) -> bool:
    """Whether a decision, or a command's own check, was ended."""
    return why.code == "failed" and why.message.startswith(SLOW)


def _too_large(most: int) -> Reason:
    return reason("too-large", f"its events take more than {most} bytes")


def _rejection(received: Received, before: Versioned, why: Reason, epoch: int, seq: int) -> Decided:
    commit = _commit(received, before.version, [], why, epoch, seq)
    return Decided(commit, encode(commit), before)


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
