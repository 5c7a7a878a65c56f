"""`python -m proofs.model_read [--minutes N] [--seed S] [--table] [--traces]`: the long run, the table, the traces."""

from __future__ import annotations

import argparse
import random
import sys
import time
from itertools import cycle

from proofs import traces
from proofs.model_read.explore import Found, Replay, find, shrink, wander
from proofs.model_read.mutants import FILE, MUTANTS
from proofs.model_read.oracle import LOST, POSITIONS, READER, ROWS, SET, STOPPED
from proofs.model_read.policy_oracle import COPY, ONCE, ORDER, OUTBOX
from proofs.model_read.reader_mutants import READERS, maker
from proofs.model_read.reader_world import ReaderBroken, reader_walks
from proofs.model_read.run import run
from proofs.model_read.scenarios import SCENARIOS, Scenario

TURN_S = 5.0
"""Of the long run, for one scenario."""
RECORDS = "no record of the log is passed over, whatever fetches and answers do"
CHECKS = {
    ROWS: "after each commit each table that is live, ready or old, and each loaded part, equals the story folded to its positions",
    POSITIONS: "each commit's positions are not before the last ones (but for a restore), and are readings of the log",
    SET: "each commit of an agent that moves positions finds its own set live",
    READER: "each answer holds all that any answer before held, for the readers' own statement and the SQL view for people",
    LOST: "agents that believe to be at the end are; one more alone reaches it, and all tables are right there",
    STOPPED: "no process ends with an error that the schedule does not explain",
    OUTBOX: "after each commit the table `outbox` equals the bank's facts folded to the positions, but for marks of the relay",
    COPY: "after each commit each activation that is said to be in the topic is there, as it is",
    ONCE: "at the end each wish was decided once, as the version in force means it, and the follow-up of its outcome once",
    ORDER: "at the end the first appearances of commands from one stream to another are in the order of their events",
    RECORDS: "what passes the compare-and-set is all that the log holds there; the end is reached once faults stop",
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m proofs.model_read", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    parser.add_argument("--table", action="store_true", help="what is promised, checked and switched off")
    parser.add_argument("--traces", action="store_true", help="search for every mutant's shortest trace and store it")
    arguments = parser.parse_args()
    if arguments.table:
        return table()
    if arguments.traces:
        return store_traces(arguments.seed)
    return long_run(arguments.seed, 60 * arguments.minutes)


def long_run(seed: int, seconds: float) -> int:
    """Random schedules of all scenarios in turn. The exit code: 1 where a promise was broken, after its shortest schedule."""
    print(f"seed {seed}; {len(SCENARIOS)} scenarios, {seconds:.0f} s", flush=True)
    began = time.monotonic()
    total, walks = Found(), 0
    for number, scenario in enumerate(cycle(SCENARIOS.values())):
        passed = time.monotonic() - began
        if passed >= seconds:
            break
        found = wander(scenario, seed + number, seconds=min(TURN_S, seconds - passed, seconds / len(SCENARIOS)))
        if found.broken is not None:
            short = shrink(scenario, found.broken)
            print(f"\nBROKEN in {scenario.name}: {short.violation}")
            print(*(f"  {who:<10} {what}" for who, what in short.story), sep="\n")
            print(f"by {traces.folded(short.choices)}")
            return 1
        try:
            walks += reader_walks(f"{seed} {number}", 300)
        except ReaderBroken as broken:
            print(f"\n{broken}")
            return 1
        total.schedules, total.steps = total.schedules + found.schedules, total.steps + found.steps
        total.commits += found.commits
        line = f"{passed:5.0f} s  {_counts(total)}  {scenario.name}"
        is_live = sys.stdout.isatty()
        print(f"\r{line:<110}" if is_live else line, end="" if is_live else "\n", flush=True)
    print(f"\n{_counts(total)}, {walks} walks of a reader: every promise kept")
    return 0


def _counts(found: Found) -> str:
    return f"{found.schedules} schedules, {found.steps} steps, {found.commits} states checked"


def table() -> int:
    """Print what is promised, how it is checked, and which mutants a stored trace kills, each of which the real code passes."""
    killed: dict[str, list[str]] = {promise: [] for promise in CHECKS}
    survivors = []
    for name, trace in traces.read(FILE).items():
        mutant = MUTANTS[name]
        scenario = SCENARIOS[mutant.scenario]
        real = run(scenario, Replay(trace.choices)).violation
        broken = run(scenario, Replay(trace.choices), mutant.switch_off).violation
        if real is None and broken is not None:
            killed[broken.promise].append(name)
        else:
            survivors.append(name)
    for kind in READERS:
        try:
            reader_walks("table", 3_000, maker(kind))
            survivors.append(kind.__name__)
        except ReaderBroken:
            killed[RECORDS].append(kind.__name__)
    print("| Promise | Checked by | Guarantees switched off, and noticed |\n|---|---|---|")
    for promise, check in CHECKS.items():
        print(f"| {promise} | {check} | {'; '.join(killed[promise])} |")
    print(*(f"SURVIVED: {name}" for name in survivors), sep="\n")
    return int(bool(survivors))


def store_traces(seed: int) -> int:
    found = {}
    for name, mutant in MUTANTS.items():
        if mutant.harmless:
            continue
        began = time.monotonic()
        scenario: Scenario = SCENARIOS[mutant.scenario]
        broken = find(scenario, seed, mutant.switch_off).broken
        if broken is None:
            print(f"SURVIVED  {name}", flush=True)
            return 1
        short = shrink(scenario, broken, mutant.switch_off)
        assert short.violation is not None
        found[name] = traces.Trace(short.violation.promise, short.choices)
        print(f"{time.monotonic() - began:5.1f} s  {name}: {traces.folded(short.choices)}", flush=True)
    traces.write(FILE, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
