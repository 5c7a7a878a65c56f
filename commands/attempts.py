"""Finds the command that ends its handlers: one whose decision takes all memory, or crashes in native code.

What a handler decides first after a takeover is an *attempt*: before it begins, the group keeps its offsets beside the partition's
own. If the next handler finds them undecided, it attempts them one by one. A command that was attempted alone `MOST` times is
rejected. No other command costs a write.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from commands.intake import Received, reason

MOST = 3


class Attempt(NamedTuple):
    """The `number`th one at deciding the commands of these offsets at once."""

    number: int = 0
    first: int = -1
    last: int = -1

    def after(self, first: int, last: int) -> Attempt:
        """The one at these commands, after this one."""
        return Attempt(self.number + 1 if self[1:] == (first, last) else 1, first, last)


def ended(command: Received) -> Received:
    """The command, to be rejected."""
    why = reason("failed", f"ended-the-handler: its decision ended {MOST} handlers, whose logs or exit codes say how")
    return msgspec.structs.replace(command, command=None, rejection=why)
