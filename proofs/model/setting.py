"""What stays the same in all states of one world: its commands and its bounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from commands.intake import Received
from commands.writer import Limits
from proofs.checker import Violation
from proofs.model.history import MAX_BYTES, Judge
from tests.engine.purse import PURSE, Fill, Spend

ACK_TIMEOUT = 30.0

APPEND_FAULTS = frozenset({"copied", "lost", "misreported", "unsaid", "overtaken"})
FAULTS = APPEND_FAULTS | {"away", "restore", "late", "assign", "crash"}


class Era(NamedTuple):
    """The live build of the write model between two switches."""

    generation: str = "g"
    version: int = 1
    bend: int = 0
    """By how many cents its rows differ from the fold by today's code: another version's unit, or a broken build."""


@dataclass(frozen=True)
class Bounds:
    """How large a world is. Everything in it is finite, so an exploration ends."""

    commands: tuple[str, ...]
    """Each as `fill|spend CENTS ID [PURSE] [@EXPECTED]`; the default purse is 1."""
    births: int = 2
    """Writers that come to life: a process that starts, or is given the partition (again). The last one is the assignee."""
    openings: int = 3
    faults: int = 1
    """Faults of any kind together."""
    kinds: frozenset[str] = FAULTS
    """What may happen to an append: copied, lost, misreported (reported as failed, may land all the same), unsaid (never reported),
    overtaken (by a later one), away (an opening that can't be read up to). restore: the database returns to any earlier state.
    late: an acknowledgement outlasts the timeout. assign: the group gives the partition back to a writer that never noticed. crash:
    as good as never scheduled again, but that its reports end with it."""
    run_ahead: int = 8
    batch: int = 2
    """Commands taken at once, at most."""
    split: bool = False
    """Readings of the database are answered in a later step, so anything may happen in between."""
    prompt: bool = True
    """Good news arrives at once. Only its receiver changes, unseen by others, and giving up earlier would lead to
    the same; bad news arrives late, or never."""
    eras: tuple[Era, ...] = (Era(),)
    prologue: int = 0
    """So many of the commands are answered, and shown by the database, before anything else happens."""
    names: bool = False
    """Whether openings tell writers apart. Only an early draft's rule looked at it; without, equal writers are interchangeable."""


class Setting:
    """`alike`: agents, rule and shells are as they should be, so that what a void record holds makes no difference to anything.
    `only`: a rule that is not kept is passed over unless it has this name, where what follows from another one is looked for.
    """

    def __init__(self, bounds: Bounds, only: str = "", *, alike: bool = True) -> None:
        self.only = only
        self.bounds = bounds
        self.alike = alike
        self.commands = [_command(offset, text) for offset, text in enumerate(bounds.commands)]
        self.keys = {(command.stream, command.id) for command in self.commands}
        self.judge = Judge(self.commands, voids_are_alike=alike, names=bounds.names)
        self.limits = Limits(bounds.run_ahead, MAX_BYTES, ACK_TIMEOUT)

    def broken(self, promise: str, what: str) -> None:
        """Raises Violation."""
        if self.only in ("", promise):
            raise Violation(promise, what)


def _command(offset: int, text: str) -> Received:
    kind, cents, id_, *rest = text.split()
    expected = next((int(word[1:]) for word in rest if word.startswith("@")), None)
    purse = next((word for word in rest if not word.startswith("@")), "1")
    command = (Fill if kind == "fill" else Spend)(cents=int(cents))
    return Received(offset, f"purse/{purse}", id_, "f", expected, PURSE, lambda: command)
