"""What a run came to, as Markdown."""

from __future__ import annotations

import platform
import subprocess
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from statistics import median

from infra.dev.jars import FOLDER
from infra.dev.postgres import VERSION
from proofs.patches import ROOT

ONCE_BACK = ("broker, once it answers", "database, once it answers", "API, once the store answers")
RECOVERY_S = 12.0
"""10 s, and the session time-out of the group, which no setting shortens further."""
COMMANDS, SNAPSHOTS = "commands acknowledged, each with exactly one outcome at the end (F)", "snapshots"
CHECKED = f"""
Each of the {SNAPSHOTS} of all rows and positions was equal to an independent fold of the log to exactly there, outbox and
activations to exactly the policies' positions. No command counts twice (A); each was decided on the fold of those before it,
without a gap in versions (B); command offsets rise (G). No transfer has a second debit, credit or end; at the end of each round
all had ended, and all money was there (P). No position went back, no epoch fell. `samefold verify` at the end of each round
found no difference.

## Time to recover, seconds

From the fault taking effect until the work that it stopped goes on. A handler's: a commit counts in a new epoch in each partition
that was its own. An agent's, and that of agents during a rebuild: all positions move beyond the log's end of then. That of
policies: the same, and then a command of theirs counts. The broker's, the database's and that of its ended sessions: commands
acknowledged since have their outcomes, the restart included.
"""


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
        lines = [
            f"# Chaos, seed {self.seed}: {verdict}\n",
            f"{self.effects.by_kind.total()} faults took effect in {self.seconds / 60:.1f} minutes, under a load of "
            f"{self.counts[COMMANDS] / max(self.seconds, 1):.0f} commands/s. Violations: {len(self.violations)}.\n",
            *(f"- {one}" for one in (*self.violations, *self.lacks())),
            "\n## What was checked\n",
            *(f"- {number:,} {what}" for what, number in self.counts.items()),
            CHECKED,
            "| of | faults | p50 | max |\n|---|---:|---:|---:|",
            *self.effects.told(),
            "\n## Faults that took effect\n\n| kind | times |\n|---|---:|",
            *(f"| {kind} | {count} |" for kind, count in sorted(self.effects.by_kind.items())),
            "\n## With\n",
            *(f"- {name} {number}" for name, number in versions().items()),
        ]
        return "\n".join(lines) + "\n"


def versions() -> dict[str, str]:
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    kafka = next((jar.stem.rpartition("-")[2] for jar in FOLDER.glob("kafka-clients-*.jar")), "?")
    libraries = {name: version(name) for name in ("confluent-kafka", "aiokafka", "faust-streaming", "psycopg")}
    told = {"Samefold": commit.stdout.strip() or "?", "Python": platform.python_version(), "Kafka": kafka}
    return told | {"PostgreSQL": str(VERSION)} | libraries
