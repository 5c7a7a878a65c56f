"""An event's place in its stream and in the log."""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec


class At(msgspec.Struct, frozen=True, gc=False):
    """Passed to every view with its event. One is made per event, so rarely needed values are computed on demand."""

    stream: str
    """`<context>/<id>`, e.g. `rooms/12`."""
    version: int = 1
    """The event's in its stream: 1, 2, 3, …"""
    time_ms: int = 0
    """The broker's time of the commit, in ms since 1970."""
    partition: int = 0
    offset: int = 0
    """The commit's in its partition of the log; all events of one commit share it."""

    @property
    def context(self) -> str:
        return self.stream.partition("/")[0]

    @property
    def id(self) -> str:
        """The stream's name without its context: `576`."""
        return self.stream.partition("/")[2]

    @property
    def time(self) -> datetime:
        """The broker's time of the commit, aware, in UTC."""
        return datetime.fromtimestamp(self.time_ms / 1000, UTC)


def place_of(at: At) -> int:
    """The commit's place in the order of the whole log: its time, then 5 digits of its partition, then 19 of its offset."""
    return (at.time_ms * 10**5 + at.partition) * 10**19 + at.offset
