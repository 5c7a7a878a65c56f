"""How the demo says what it does while it does it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Telling:
    """Where the demo tells what it does: `said` gets a line for what is done, `showed` a change of code, `bar` makes a bar."""

    said: Callable[[str, float], None]
    showed: Callable[[str], None]
    bar: Callable[[str, int], Any]
    took: dict[str, float] = field(default_factory=dict)
    ending: bool = False
    """Whether the demo is stopping what it started, in which it should not be disturbed."""

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        started = time.monotonic()
        yield
        self.took[what] = time.monotonic() - started
        self.said(what, self.took[what])

    @contextmanager
    def until_the_end(self) -> Iterator[None]:
        try:
            yield
        finally:
            self.ending = True
