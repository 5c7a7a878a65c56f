"""Copies and fingerprints of a writer, whatever fields it has: what a search makes hundreds of thousands of."""

from __future__ import annotations

from collections import deque
from typing import Any

from commands.writer import Writer

_SAME = {"partition", "commands_topic_id", "limits", "openings", "overlay"}
"""Of a writer, equal in all states of a world, or only compared with what is thrown away as soon as it differs; and what has
fields of its own."""


def clone_writer(writer: Writer) -> Writer:
    """A writer that goes on from here on its own."""
    new = object.__new__(Writer)
    new.__dict__.update(writer.__dict__)
    new.overlay = object.__new__(type(writer.overlay))
    fields = new.overlay.__dict__
    for name, value in writer.overlay.__dict__.items():
        fields[name] = value.copy() if isinstance(value, (deque, set, dict, list)) else value
    fields["_streams"] = {name: _clone_stream(stream) for name, stream in writer.overlay._streams.items()}
    return new


def _clone_stream(stream: Any) -> Any:
    new = object.__new__(type(stream))
    for name in stream.__slots__:
        value = getattr(stream, name)
        setattr(new, name, value.copy() if isinstance(value, list) else value)
    return new


def fingerprint(writer: Writer) -> tuple[object, ...]:
    """Hashable; equal for writers that will behave alike, given the same log."""
    fields = [value for name, value in writer.__dict__.items() if name not in _SAME]
    return (*fields, *[_hashable(name, value) for name, value in writer.overlay.__dict__.items()])


def _hashable(name: str, value: Any) -> object:
    if name == "_streams":
        # unfolded events stand in the log under the stream's versions
        return frozenset(
            (stream, parts.entries, parts.state, tuple(version for version, _ in parts.unfolded))
            for stream, parts in value.items()
        )
    if isinstance(value, set):
        return frozenset(value)
    return tuple(value) if isinstance(value, (deque, list)) else value
