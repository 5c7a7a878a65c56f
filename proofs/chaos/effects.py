"""What took effect, and how long it was until things went on."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

Role = Literal[
    "handler",
    "agent",
    "policies",
    "builder",
    "broker",
    "broker, once it answers",
    "database",
    "database, once it answers",
    "ended sessions",
    "API, once the store answers",
    "job, run again",
]
"""The process whose work stops; `field.py` decides when it goes on. A builder's is that of the agents that run meanwhile."""


@dataclass(slots=True)
class Effects:
    """Faults that took effect, by kind, and seconds to recover, by role. Several threads add to it."""

    by_kind: Counter[str] = field(default_factory=Counter)
    seconds: dict[Role, list[float]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def total(self) -> int:
        return self.by_kind.total()

    def took_effect(self, kind: str) -> None:
        with self._lock:
            self.by_kind[kind] += 1

    @contextmanager
    def recovery(self, role: Role, began: float | None = None) -> Iterator[None]:
        """From `began`, or now, to the end of the block, if that comes about."""
        began = time.monotonic() if began is None else began
        yield
        with self._lock:
            self.seconds.setdefault(role, []).append(time.monotonic() - began)

    def add(self, other: Effects) -> None:
        self.by_kind += other.by_kind
        for role, seconds in other.seconds.items():
            self.seconds.setdefault(role, []).extend(seconds)

    def p50(self, role: Role) -> float:
        return median(self.seconds[role])

    def longest(self, role: Role) -> float:
        return max(self.seconds[role])
