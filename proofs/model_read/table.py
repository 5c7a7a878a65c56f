"""What is promised, how that is checked, and which guarantees were switched off and noticed: from a run made for it."""

from __future__ import annotations

from typing import NamedTuple

from proofs.model_read import traces
from proofs.model_read.explore import Replay
from proofs.model_read.mutants import MUTANTS
from proofs.model_read.oracle import LOST, POSITIONS, READER, ROWS, SET, STOPPED
from proofs.model_read.reader_mutants import READERS, maker
from proofs.model_read.reader_world import ReaderBroken, reader_walks
from proofs.model_read.run import run
from proofs.model_read.scenarios import SCENARIOS

RECORDS = "no record of the log is passed over, whatever fetches and answers do"
CHECKS = {
    ROWS: "after each commit each table that is live, ready or old, and each loaded part, equals the story folded to its positions",
    POSITIONS: "each commit's positions are not before the last ones (but for a restore), and are readings of the log",
    SET: "each commit of an agent that moves positions finds its own set live",
    READER: "each answer holds all that any answer before held, for the readers' own statement and the SQL view for people",
    LOST: "agents that believe to be at the end are; one more alone reaches it, and all tables are right there",
    STOPPED: "no process ends with an error that the schedule does not explain",
    RECORDS: "what passes the compare-and-set is all that the log holds there; the end is reached once faults stop",
}


class Row(NamedTuple):
    """One line of the table."""

    promise: str
    check: str
    killed: list[str]


def table() -> list[Row]:
    """Runs every stored trace against its mutant and the real code."""
    killed: dict[str, list[str]] = {promise: [] for promise in CHECKS}
    for trace in traces.read().values():
        scenario, mutant = SCENARIOS[trace.scenario], MUTANTS[trace.mutant]
        real = run(scenario, Replay(trace.choices)).violation
        broken = run(scenario, Replay(trace.choices), mutant.switch_off).violation
        if real is None and broken is not None:
            killed[broken.promise].append(trace.mutant)
    for kind in READERS:
        try:
            reader_walks("table", 3_000, maker(kind))
        except ReaderBroken:
            killed[RECORDS].append(kind.__name__)
    return [Row(promise, check, killed[promise]) for promise, check in CHECKS.items()]
