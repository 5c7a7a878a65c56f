"""What a run came to, as Markdown."""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median

ONCE_BACK = ("broker, once it answers", "database, once it answers", "API, once the store answers")
RECOVERY_S = 12.0
"""10 s, and the session time-out of the group, which no setting shortens further."""
COMMANDS, SNAPSHOTS = "commands acknowledged, each with exactly one outcome at the end (F)", "snapshots"


@dataclass(slots=True)
class Effects:
    """Faults that took effect, by kind, and seconds to recover, by role. Several threads add to it."""

    by_kind: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def took_effect(self, kind: str) -> None:
        with self._lock:
            self.by_kind[kind] += 1

    @contextmanager
    def recovery(self, role: str, began: float | None = None) -> Iterator[None]:
        """From `began`, or now, to the end of the block, if that comes about. `field.py` decides when a role's work goes on."""
        began = time.monotonic() if began is None else began
        yield
        with self._lock:
            self.seconds[role].append(time.monotonic() - began)

    def add(self, other: Effects) -> None:
        self.by_kind += other.by_kind
        for role, seconds in other.seconds.items():
            self.seconds[role] += seconds

    def told(self) -> list[str]:
        """Rows of a table: a role, its faults, p50, max."""
        some = sorted(self.seconds.items())
        return [f"| {role} | {len(times)} | {median(times):.2f} | {max(times):.2f} |" for role, times in some]


@dataclass(slots=True)
class Result:
    """Of all rounds together. `counts` has numbers by what was counted, in words; `kinds` are those of which some are owed."""

    seed: int
    kinds: list[str]
    effects: Effects = field(default_factory=Effects)
    violations: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    def lacks(self) -> list[str]:
        """Kinds of faults that took effect less often than is owed (one time for each eight minutes of faults), and recoveries that
        took longer than they may once the store is back."""
        least = int(self.seconds // 480)
        few = [f"too few: {kind} ({n})" for kind in self.kinds if (n := self.effects.by_kind[kind]) < least]
        late = [(role, t) for role in ONCE_BACK for t in self.effects.seconds.get(role, []) if t > RECOVERY_S]
        return few + [f"late: {role}, {t:.1f} s" for role, t in late]

    @property
    def holds(self) -> bool:
        return not self.violations and not self.lacks() and self.counts[SNAPSHOTS] > 0

    def as_markdown(self) -> str:
        verdict = "no violation" if self.holds else "**does not hold**"
        kinds = self.effects.by_kind
        killed = sum(times for kind, times in kinds.items() if "kill" in kind)
        lines = [
            "\n| recovery of | faults | p50 | max |\n|---|---:|---:|---:|",
            *self.effects.told(),
            "\n| kind | times |\n|---|---:|",
            *(f"| {kind} | {count} |" for kind, count in sorted(kinds.items())),
            "\nChecked:\n",
            *(f"- {number:,} {what}" for what, number in self.counts.items()),
            f"\nseed {self.seed}: {verdict}. {kinds.total()} faults took effect in {self.seconds / 60:.1f} minutes, {killed} of "
            f"them kills, under a load of {self.counts[COMMANDS] / max(self.seconds, 1):.0f} commands/s.",
            *(f"- {one}" for one in (*self.violations, *self.lacks())),
        ]
        return "\n".join(lines)
