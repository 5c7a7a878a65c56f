"""What a long piece of work tells whoever watches."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Is told which stage begins, with how many steps if that is known, and how many are done."""

    def begin(self, stage: str, total: int | None = None) -> None:
        """The stage before has ended."""

    def advance(self, count: int) -> None:
        """So many more."""


class Silent:
    """Nobody watches."""

    def begin(self, stage: str, total: int | None = None) -> None:
        """Nothing to show."""

    def advance(self, count: int) -> None:
        """Nothing to show."""
