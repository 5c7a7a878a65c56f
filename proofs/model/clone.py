"""Copies and fingerprints of a writer, whatever fields it has: what a search makes hundreds of thousands of."""

from __future__ import annotations

from collections import deque
from typing import Any

from commands.overlay import Overlay
from commands.writer import Writer

_SAME = {"partition", "commands_topic_id", "limits"}
"""Of a writer, equal in all states of a world."""
_NUMBERS = {"openings"}
"""Of a writer, only compared with what is thrown away as soon as it differs."""


def clone_writer(writer: Writer) -> Writer:
    """A writer that goes on from here on its own."""
    new = object.__new__(type(writer))
    new.__dict__.update(writer.__dict__)
    new.overlay = _clone_overlay(writer.overlay)
    return new


def _clone_overlay(overlay: Overlay) -> Overlay:
    new = object.__new__(type(overlay))
    fields = new.__dict__
    for name, value in overlay.__dict__.items():
        fields[name] = value.copy() if isinstance(value, (deque, set, dict, list)) else value
    fields["_streams"] = {name: _clone_stream(stream) for name, stream in overlay._streams.items()}
    return new


def _clone_stream(stream: Any) -> Any:
    new = object.__new__(type(stream))
    for name in stream.__slots__:
        value = getattr(stream, name)
        setattr(new, name, value.copy() if isinstance(value, list) else value)
    return new


def fingerprint(writer: Writer) -> tuple[object, ...]:
    """Hashable; equal for writers that will behave alike, given the same log."""
    fields = [
        value
        for name, value in writer.__dict__.items()
        if name not in _SAME and name not in _NUMBERS and name != "overlay"
    ]
    return (*fields, *[_hashable(name, value) for name, value in writer.overlay.__dict__.items()])


def _hashable(name: str, value: Any) -> object:
    if name == "_streams":
        return frozenset((stream, _stream(parts)) for stream, parts in value.items())
    if isinstance(value, set):
        return frozenset(value)
    return tuple(value) if isinstance(value, (deque, list)) else value


def _stream(parts: Any) -> tuple[object, ...]:
    # unfolded events stand in the log under the stream's versions
    return (parts.entries, parts.state, tuple(version for version, _ in parts.unfolded))
