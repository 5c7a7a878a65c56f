"""An assigned partition of `commands`: its writer, the commands that wait for it, and what is to be done with it later."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

from msgspec import UNSET, UnsetType

from commands.intake import Received
from commands.writer import Action, Phase, Writer

BEHIND_RETRY_S = 0.02
_offset = attrgetter("offset")


class Attempt(NamedTuple):
    """The `number`th attempt at the commands of these offsets at once (ADR 19)."""

    number: int = 0
    first: int = -1
    last: int = -1


@dataclass(slots=True, eq=False)
class Partition:
    """From its assignment to this process until it is revoked."""

    number: int
    writer: Writer
    next_offset: int = 0
    """Of the next command to fetch, while the writer serves."""
    waiting: list[Received] = field(default_factory=list)
    """Fetched and not decided, in order."""
    decide_at: float = 0.0
    """They wait until then."""
    is_paused: bool = True
    """No commands are fetched: those that wait come first. This is back-pressure, not memory."""
    gap: tuple[int, int] | None = None
    """The offset expected and the one received. Received twice, the gap is the topic's own."""
    is_refused: bool = False
    """Its reads fail, which was logged."""
    attempt: Attempt | None = None
    """The one before, while the next commands are an attempt."""
    doubt: str | UnsetType = UNSET
    """Why its writer gave up its last epoch, which the next opening tells."""
    reported: int = -1
    """The offset of the next command to decide, as it was last committed to the group."""
    _timer: tuple[float, Callable[[], Action | None]] | None = None

    @property
    def is_serving(self) -> bool:
        return self.writer.phase is Phase.SERVING

    @property
    def undecided(self) -> int:
        """The offset of the next command to decide."""
        return self.waiting[0].offset if self.waiting else self.next_offset

    def serve(self, offset: int, attempt: Attempt) -> None:
        """A new epoch: its commands are those from this offset on."""
        self.next_offset, self.gap, self.attempt, self.reported = offset, None, attempt, -1

    def next_batch(self, now: float) -> list[Received] | None:
        """The commands to decide now: as many as the writer has room for, perhaps none; None if there is nothing to do."""
        if not self.waiting or now < self.decide_at or not self.is_serving:
            return None
        batch = self.waiting[: max(self.writer.room, 0)]
        if len(batch) < len(self.waiting):
            self.decide_at = now + BEHIND_RETRY_S
        if batch and self.attempt and batch[0].offset <= self.attempt.last:
            batch = batch[:1]  # one of these ended the handler before
        return batch

    def drop_decided(self) -> None:
        """Drop the commands that have their outcome."""
        del self.waiting[: bisect_right(self.waiting, self.writer.last_command, key=_offset)]

    def later(self, seconds: float, then: Callable[[], Action | None]) -> None:
        """Set the partition's only timer. The action that `then` returns is carried out."""
        self._timer = time.monotonic() + seconds, then

    def is_due(self, now: float) -> bool:
        return self._timer is not None and now >= self._timer[0]

    def due(self, now: float) -> Callable[[], Action | None] | None:
        """What is to be done now, once."""
        if self._timer is None or now < self._timer[0]:
            return None
        (_, then), self._timer = self._timer, None
        return then
