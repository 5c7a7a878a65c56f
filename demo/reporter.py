"""How the demo says what it does while it does it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.markup import escape

from infra.terminal import stdout


@dataclass(slots=True)
class Reporter:
    """`took` is in seconds, by what was done."""

    took: dict[str, float] = field(default_factory=dict)
    ending: bool = False
    """Whether the demo is stopping what it started, in which it should not be disturbed."""

    def done(self, what: str, seconds: float) -> None:
        self.took[what] = seconds
        stdout.print(f"  {escape(what):<64}[dim]{seconds:>8.2f} s[/dim]")

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        started = time.monotonic()
        yield
        self.done(what, time.monotonic() - started)

    @contextmanager
    def until_the_end(self) -> Iterator[None]:
        try:
            yield
        finally:
            self.ending = True
