"""Finds the command that ends its handlers: one whose decision takes all memory, or crashes in native code.

Before a handler decides what was there when it took the partition over, it keeps their offsets with the group's offset, and how
often that was tried. If the next handler finds them undecided, the one before ended on the way: it tries them one by one. A command
that was tried alone `MOST` times is rejected. What comes later is decided without any of this, as it was read by no handler before.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from commands.intake import Received, reason

log = logging.getLogger(__name__)

MOST = 3
_KEPT = re.compile(r"deciding (\d+) to (\d+), attempt (\d+)").fullmatch


class Attempt(NamedTuple):
    """Commands that a handler began to decide at once. `str` of it is kept by the group."""

    first: int
    last: int
    number: int

    def __str__(self) -> str:
        return f"deciding {self.first} to {self.last}, attempt {self.number}"


class Attempts:
    """Those at one partition's commands from `offset` on; `end` is the first one that no handler can have read.

    `kept` is what the group has.
    """

    def __init__(self, kept: str = "", offset: int = 0, end: int = 0) -> None:
        found = _KEPT(kept)
        before = Attempt(*map(int, found.groups())) if found else None
        self._before = before if before and before.last >= offset else None
        self._end = end
        if self._before:
            log.warning("a handler ended while it was %s", self._before)

    def most(self, commands: Sequence[Received], room: int) -> int:
        """How many of these commands may be decided at once, where there is room for so many."""
        is_suspect = self._before is not None and commands[0].offset <= self._before.last
        return min(room, 1) if is_suspect else room

    def begin(self, commands: Sequence[Received]) -> tuple[Sequence[Received], Attempt | None]:
        """The commands to decide, perhaps with one rejected, and the attempt to keep before."""
        if not commands or commands[0].offset >= self._end:
            return commands, None
        first, last, number = commands[0].offset, commands[-1].offset, 1
        if self._before is not None and self._before[:2] == (first, last):
            number += self._before.number
        if number <= MOST:
            return commands, Attempt(first, last, number)
        ended = reason(
            "failed", f"ended-the-handler: its decision ended {MOST} handlers; their logs or exit codes say how"
        )
        log.error("command %s of %s is rejected: %s", commands[0].id, commands[0].stream, ended.message)
        return [msgspec.structs.replace(one, command=None, rejection=ended) for one in commands], None
