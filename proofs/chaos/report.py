"""What a run came to, as JSON and as Markdown."""

from __future__ import annotations

import json
import platform
import subprocess
from dataclasses import dataclass, field, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any, get_args

from infra.dev.jars import FOLDER
from infra.dev.postgres import VERSION
from proofs.chaos.catalogue import KINDS
from proofs.chaos.effects import Effects, Role

ONCE_BACK: tuple[Role, ...] = ("broker, once it answers", "database, once it answers", "API, once the store answers")
RECOVERY_S = 12.0
"""10 s, and the session time-out of the group, which no setting shortens further."""
ROOT = Path(__file__).parent.parent.parent


@dataclass(slots=True)
class Result:
    """Of all rounds together."""

    seed: int
    minutes: float
    effects: Effects = field(default_factory=Effects)
    violations: list[str] = field(default_factory=list)
    rounds: int = 0
    seconds: float = 0.0
    faults_without_effect: int = 0
    commands: int = 0
    commits: int = 0
    void_records: int = 0
    snapshots: int = 0
    snapshots_missed: int = 0
    rows_compared: int = 0
    outbox_rows: int = 0
    transfers: int = 0
    looks_at_positions: int = 0

    def too_few(self) -> dict[str, int]:
        """Kinds of faults that took effect less often than is owed: one time for each eight minutes of faults."""
        least = int(self.seconds // 480)
        return {kind: n for kind in KINDS if (n := self.effects.by_kind[kind]) < least}

    def late(self) -> list[str]:
        """Recoveries that took longer than they may once the store is back, in seconds."""
        late = {role: [t for t in self.effects.seconds.get(role, []) if t > RECOVERY_S] for role in ONCE_BACK}
        return [f"{role}: {', '.join(f'{t:.1f}' for t in times)}" for role, times in late.items() if times]

    @property
    def holds(self) -> bool:
        return not self.violations and not self.late() and not self.too_few() and self.snapshots > 0

    def as_dict(self) -> dict[str, Any]:
        found = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "effects"}
        recovery = {
            role: {"n": len(times), "p50": round(self.effects.p50(role), 2), "max": round(max(times), 2)}
            for role, times in self._times()
        }
        return found | {
            "holds": self.holds,
            "versions": versions(),
            "faults": self.effects.total,
            "faults_by_kind": dict(sorted(self.effects.by_kind.items())),
            "too_few": self.too_few(),
            "late": self.late(),
            "recovery_s": recovery,
        }

    def _times(self) -> list[tuple[Role, list[float]]]:
        roles: tuple[Role, ...] = get_args(Role)
        return [(role, self.effects.seconds[role]) for role in roles if self.effects.seconds.get(role)]

    def as_markdown(self) -> str:
        verdict = "no violation" if self.holds else "**does not hold**"
        few = "".join(f"- too few: {kind} ({n})\n" for kind, n in self.too_few().items())
        lines = [
            f"# Chaos, seed {self.seed}: {verdict}\n",
            f"{self.effects.total} faults took effect in {self.seconds / 60:.1f} minutes and {self.rounds} rounds, under a load of "
            f"{self.commands / max(self.seconds, 1):.0f} commands/s; {self.faults_without_effect} more found nothing to hit.\n",
            f"Violations: {len(self.violations)}.\n",
            *(f"- {violation}" for violation in self.violations),
            few,
            "".join(f"- late, {late} s\n" for late in self.late()),
            "## What was checked\n",
            f"- {self.snapshots} snapshots of all rows and positions ({self.rows_compared:,} rows), each equal to an "
            f"independent fold of the log to exactly there; {self.snapshots_missed} more found no database",
            f"- {self.commits:,} commits that count: no command twice (A), each decided on the fold of those before it and "
            "without a gap in versions (B), command offsets rising (G)",
            f"- outbox and activations in each of them ({self.outbox_rows:,} rows), equal to an independent fold of the log to "
            "exactly the policies' positions; no transfer with a second debit, credit or end; at the end of each round each of "
            f"{self.transfers:,} transfers had ended, and all money was there (P)",
            f"- {self.commands:,} commands acknowledged, each with exactly one outcome at the end (F); "
            f"{self.void_records:,} records of the log were void",
            f"- {self.looks_at_positions:,} reads of positions: none went back, no epoch fell",
            "- `samefold verify` at the end of each round: no difference\n",
            "## Time to recover, seconds\n",
            "From the fault taking effect until the work that it stopped goes on. A handler's: a commit counts in a new epoch in "
            "each partition that was its own. An agent's, and that of agents during a rebuild: all positions move beyond the "
            "log's end of then. That of policies: the same, and then a command of theirs counts. The broker's, the database's and "
            "that of its ended sessions: commands acknowledged since have "
            "their outcomes, the restart included.\n",
            "| of | faults | p50 | max |",
            "|---|---:|---:|---:|",
            *(
                f"| {role} | {len(times)} | {self.effects.p50(role):.2f} | {max(times):.2f} |"
                for role, times in self._times()
            ),
            "\n## Faults that took effect\n",
            "| kind | times |",
            "|---|---:|",
            *(f"| {kind} | {count} |" for kind, count in sorted(self.effects.by_kind.items())),
            "\n## With\n",
            *(f"- {name} {number}" for name, number in versions().items()),
        ]
        return "\n".join(lines) + "\n"


def write(result: Result, folder: Path, name: str) -> Path:
    """Both forms; the Markdown's path."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(result.as_dict(), indent=2) + "\n")
    markdown = folder / f"{name}.md"
    markdown.write_text(result.as_markdown())
    return markdown


def versions() -> dict[str, str]:
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    kafka = next((jar.stem.rpartition("-")[2] for jar in FOLDER.glob("kafka-clients-*.jar")), "?")
    libraries = {name: version(name) for name in ("confluent-kafka", "aiokafka", "faust-streaming", "psycopg")}
    return {
        "Samefold": commit.stdout.strip() or "?",
        "Python": platform.python_version(),
        "Kafka": kafka,
        "PostgreSQL": str(VERSION),
        **libraries,
    }
