"""`python -m proofs.model_read [--minutes N] [--seed S] [--table] [--traces]`: the long run, the table, the traces."""

from __future__ import annotations

import argparse
import json
import random
import sys
import time

from proofs.model_read import traces
from proofs.model_read.explore import find, shrink
from proofs.model_read.long_run import long_run
from proofs.model_read.mutants import MUTANTS
from proofs.model_read.scenarios import SCENARIOS
from proofs.model_read.table import table


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m proofs.model_read", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    parser.add_argument("--table", action="store_true", help="what is promised, checked and switched off; then as JSON")
    parser.add_argument("--traces", action="store_true", help="find every mutant's shortest trace anew")
    arguments = parser.parse_args()
    if arguments.table:
        rows = table()
        print("| Promise | Checked by | Guarantees switched off, and noticed |\n|---|---|---|")
        for row in rows:
            print(f"| {row.promise} | {row.check} | {'; '.join(row.killed)} |")
        print(json.dumps([row._asdict() for row in rows], indent=2))
        return 0
    if arguments.traces:
        return _find_traces(arguments.seed)
    return long_run(arguments.seed, 60 * arguments.minutes)


def _find_traces(seed: int) -> int:
    found = []
    for mutant in MUTANTS.values():
        if mutant.harmless:
            continue
        began = time.monotonic()
        scenario = SCENARIOS[mutant.scenario]
        broken = find(scenario, seed, mutant.switch_off).broken
        if broken is None or broken.violation is None:
            print(f"SURVIVED  {mutant.name}", flush=True)
            return 1
        short = shrink(scenario, broken, mutant.switch_off)
        found.append(traces.Trace(mutant.name, scenario.name, broken.violation.promise, short.choices))
        print(f"{time.monotonic() - began:5.1f} s  {mutant.name}: {traces.folded(short.choices)}", flush=True)
    traces.write(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
