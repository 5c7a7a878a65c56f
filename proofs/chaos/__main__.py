"""`python -m proofs.chaos --minutes 10 --seed 7` (in `make prove`): a random mix of all faults, judged, with a report.

The seed decides the load and the order of each lane's faults; at which microsecond one strikes is the machine's.
Exit code 0 when nothing was violated and every kind of fault took effect often enough, 1 otherwise, 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

from infra.settings import PREFIX
from proofs.chaos.field import Field, NotReached
from proofs.chaos.ground import Ground
from proofs.chaos.mix import Mix
from proofs.chaos.report import ROOT, Result, write

ROUND_S = 100.0
"""Then a new database and new topics: the judge compares everything, so the log must stay short."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m proofs.chaos")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    parser.add_argument("--rate", type=int, default=300, help="commands a second")
    parser.add_argument("--report", type=Path, default=ROOT / ".samefold" / "chaos", help="the report's folder")
    arguments = parser.parse_args()
    # a developer's own settings must not decide a run
    for name in [name for name in os.environ if name.startswith(PREFIX)]:
        del os.environ[name]
    result = Result(arguments.seed, arguments.minutes)
    print(
        f"seed {arguments.seed} (the same again: make prove PART=chaos MINUTES={arguments.minutes:g} SEED={arguments.seed})"
    )
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    folder.chmod(0o711)  # where root may not make a user namespace, PostgreSQL runs as nobody and must get in
    interrupted = False
    try:
        os.chdir(folder)
        with Ground(folder / "ground") as ground:
            _fire(ground, folder, result, 60 * arguments.minutes, arguments.rate)
    except KeyboardInterrupt:
        interrupted = True
    finally:
        os.chdir(ROOT)
        kept = arguments.report / "logs"
        if result.violations:
            shutil.copytree(folder, kept, ignore=shutil.ignore_patterns("ground"), dirs_exist_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
    name = f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{arguments.seed}"
    report = write(result, arguments.report, name)
    killed = sum(times for kind, times in result.effects.by_kind.items() if "kill" in kind)
    print(
        f"\n{result.effects.total} faults took effect, {killed} of them kills, {len(result.violations)} violations: {report}"
    )
    for line in [
        *result.violations,
        *(f"too few: {kind} ({n})" for kind, n in result.too_few().items()),
    ]:
        print(f"  {line}")
    return 130 if interrupted else 0 if result.holds else 1


def _fire(ground: Ground, folder: Path, result: Result, seconds: float, rate: int) -> None:
    """Round after round, until the time is over."""
    mix = Mix(result.seed)
    began = time.monotonic()
    while (left := seconds - (time.monotonic() - began)) > 0:
        result.rounds += 1
        seed = result.seed + result.rounds
        with Field(ground, folder / f"round-{result.rounds}", seed, rate=rate) as field:
            # a last round that is too short for anything is part of the one before
            length = left if left < 1.5 * ROUND_S else ROUND_S
            ends = time.monotonic() + length
            fire = mix.on(field)
            try:
                while time.monotonic() < ends and not field.all_violations():
                    time.sleep(1)
                    _tell(result, field, time.monotonic() - began)
                fire.put_out()
                field.finish()
            except NotReached as error:
                # kept by the field too, where it was a violation
                field.violations.append(f"the round did not end well: {error}")
            except KeyboardInterrupt:
                field.abandon()
                fire.put_out()
                raise
            finally:
                result.seconds = time.monotonic() - began
                result.faults_without_effect = mix.without_effect
                _add(result, field)
        if result.violations:
            return


def _add(result: Result, field: Field) -> None:
    result.effects.add(field.effects)
    result.violations += field.all_violations()
    result.commands += len(field.load.acknowledged)
    result.commits += len(field.judge.ledger.answers)
    result.void_records += field.tail.void()
    result.snapshots += field.judge.seen.snapshots
    result.snapshots_missed += field.judge.seen.missed
    result.rows_compared += field.judge.seen.rows
    result.outbox_rows += field.judge.policies.rows
    result.transfers += len(field.judge.ledger.ends)
    result.looks_at_positions += field.progress.looks


def _tell(result: Result, field: Field, seconds: float) -> None:
    """The live line; without a terminal, every ten seconds."""
    if not sys.stdout.isatty() and int(seconds) % 10:
        return
    kinds: Counter[str] = Counter()
    for of in (result.effects, field.effects):
        for kind, times in of.by_kind.items():
            kinds[kind.partition(":")[0]] += times
    commands = result.commands + len(field.load.acknowledged)
    recovery = "  ".join(
        f"{role} {field.effects.p50(role):.1f}/{field.effects.longest(role):.1f}"
        for role in field.effects.seconds
        if "," not in role
    )
    line = (
        f"{seconds // 60:.0f}:{seconds % 60:02.0f}  {kinds.total()} faults ("
        + ", ".join(f"{kind} {times}" for kind, times in kinds.most_common())
        + f")  {len(field.all_violations())} violations  {commands / max(seconds, 1):.0f} commands/s  p50/max s: {recovery}"
    )
    print(f"\r\x1b[2K{line}" if sys.stdout.isatty() else line, end="" if sys.stdout.isatty() else "\n", flush=True)


if __name__ == "__main__":
    sys.exit(main())
