"""`python -m proofs.chaos --minutes 10 --seed 7` (in `make prove`): a random mix of all faults, judged, with a report.

The seed decides the load and the order of each lane's faults; at which microsecond one strikes is the machine's.
Exit code 0 when nothing was violated and every kind of fault took effect often enough, 1 otherwise, 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import time
from pathlib import Path

from proofs.chaos.armed import STUMBLING
from proofs.chaos.field import Field, NotReached
from proofs.chaos.ground import Ground, ground_in
from proofs.chaos.mix import KINDS, Mix
from proofs.chaos.report import COMMANDS, Result
from proofs.patches import ROOT

ROUND_S = 100.0
"""Then a new database and new topics: the judge compares everything, so the log must stay short."""
LOGS = ROOT / ".samefold" / "chaos"
"""The processes' own, after a violation."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m proofs.chaos")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    asked = parser.parse_args()
    result = Result(asked.seed, KINDS)
    print(f"seed {asked.seed} (the same again: make prove PART=chaos MINUTES={asked.minutes:g} SEED={asked.seed})")
    interrupted = False
    with ground_in() as (ground, folder):
        try:
            _fire(ground, folder, result, 60 * asked.minutes)
        except KeyboardInterrupt:
            interrupted = True
        if result.violations:
            shutil.copytree(folder, LOGS, ignore=shutil.ignore_patterns("ground"), dirs_exist_ok=True)
    print(result.as_markdown())
    return 130 if interrupted else 0 if result.holds else 1


def _fire(ground: Ground, folder: Path, result: Result, seconds: float) -> None:
    """Round after round, until the time is over."""
    mix, number = Mix(result.seed), 0
    began = time.monotonic()
    while (left := seconds - (time.monotonic() - began)) > 0 and not result.violations:
        number += 1
        with Field(ground, folder / f"round-{number}", result.seed + number, lacking=STUMBLING) as field:
            # a last round that is too short for anything is part of the one before
            ends = time.monotonic() + (left if left < 1.5 * ROUND_S else ROUND_S)
            try:
                with mix.on(field):
                    while time.monotonic() < ends and not field.all_violations():
                        time.sleep(1)
                        _tell(result, field, time.monotonic() - began)
                field.finish()
            except NotReached as error:
                # kept by the field too, where it was a violation
                field.violations.append(f"the round did not end well: {error}")
            finally:
                result.seconds = time.monotonic() - began
                result.effects.add(field.effects)
                result.violations += field.all_violations()
                result.counts.update(field.counts())
    result.counts["faults more found nothing to hit"] = mix.without_effect


def _tell(result: Result, field: Field, seconds: float) -> None:
    """A line every ten seconds."""
    if int(seconds) % 10:
        return
    faults = result.effects.by_kind.total() + field.effects.by_kind.total()
    commands = result.counts[COMMANDS] + len(field.load.acknowledged)
    print(
        f"{seconds // 60:.0f}:{seconds % 60:02.0f}  {faults} faults, {len(field.all_violations())} violations, "
        f"{commands / max(seconds, 1):.0f} commands/s",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
