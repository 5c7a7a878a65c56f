"""What stays the same in all states of one world: its commands, its bounds, and the parts that a mutant may replace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple
from unittest.mock import patch

from commands.intake import Received
from commands.writer import Limits, Writer
from infra.log.rule import read
from proofs.model.history import MAX_BYTES, Fold, Judge, Rule, View, Violation
from tests.engine.purse import PURSE, Fill, Spend

if TYPE_CHECKING:
    from proofs.model.handler import Handler

ACK_TIMEOUT = 30.0

APPEND_FAULTS = frozenset({"copied", "lost", "doubtful", "unsaid", "overtaken"})
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
    """What may happen to an append: copied, lost, doubtful (reported as failed, may land all the same), unsaid (never reported),
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


@dataclass(frozen=True)
class Parts:
    """What a mutant replaces."""

    writer: type[Writer] = Writer
    handler: type[Handler] | None = None
    rule: Rule = read
    fold: Fold = View.after
    names: bool = False
    """Whether openings tell writers apart. Only an early draft's rule looked at it; without, equal writers are interchangeable."""

    @property
    def read_by_the_rule(self) -> bool:
        return self.rule is read and self.fold is View.after

    @contextmanager
    def in_force(self) -> Iterator[None]:
        with patch("commands.writer.read", self.rule):
            yield


class Setting:
    def __init__(self, bounds: Bounds, parts: Parts | None = None, only: str = "") -> None:
        self.only = only
        self.bounds = bounds
        self.parts = parts or Parts()
        self.commands = [_command(offset, text) for offset, text in enumerate(bounds.commands)]
        self.keys = {(command.stream, command.id) for command in self.commands}
        self.judge = Judge(
            self.commands, self.parts.rule, voids_are_alike=self.parts.read_by_the_rule, names=self.parts.names
        )
        self.limits = Limits(bounds.run_ahead, MAX_BYTES, ACK_TIMEOUT)

    def broken(self, what: str) -> None:
        """A rule is not kept. Raises Violation, unless what follows from another one is looked for."""
        violation = Violation(what)
        if self.only in ("", violation.promise):
            raise violation


def _command(offset: int, text: str) -> Received:
    kind, cents, id_, *rest = text.split()
    expected = next((int(word[1:]) for word in rest if word.startswith("@")), None)
    purse = next((word for word in rest if not word.startswith("@")), "1")
    command = (Fill if kind == "fill" else Spend)(cents=int(cents))
    return Received(offset, f"purse/{purse}", id_, "f", expected, PURSE, command)
