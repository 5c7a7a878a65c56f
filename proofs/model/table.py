"""Promise → check → mutants killed, from a run made now."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from proofs.model.configurations import SMALL
from proofs.model.explore import Explored, Found, explore
from proofs.model.liveness import Graph, all_runs
from proofs.model.mutants import MUTANTS
from proofs.model.setting import Bounds, Parts
from proofs.model.traces import replay, search, stored

PROMISES = {
    "A": ("at most one counted commit per (stream, command id)", "each record that reaches a log"),
    "B": ("a counted commit was decided on exactly the fold of those before it", "each record that reaches a log"),
    "C": ("the database's rows are the fold of the counted commits below its position", "each commit of the database"),
    "D": ("an answer never changes", "each commit of the database"),
    "E": (
        "who saw an outcome and reads finds that version, until a restore and after it is caught up",
        "each commit of the database",
    ),
    "F": ("every command gets its outcome once faults stop", "the faults stop in every n-th state"),
    "G": ("command offsets never go back", "each record that reaches a log"),
    "H": ("any stored position continues to the same result", "each log from each position; each end of all faults"),
    "4": ("no two writers serve in one epoch", "each writer that begins to serve"),
    "6": ("no live writers depose each other for ever", "all runs without faults; every order of a round"),
    "7": ("a writer is ahead of the read model by a bounded number of commits", "each batch decided"),
    "8": ("commands are needed back to the last that counts, no further", "each writer that begins to serve"),
    "9": ("a writer opens only near the read model, and holds no more than it read up to there", "each opening"),
    "10": ("a writer opens only on the write model of its own version", "each opening"),
}
"""In words, and where it is checked; the mutants of rules 1, 2, 3 and 5 break letters."""


@dataclass
class Killed:
    name: str
    guarantee: str
    promise: str
    choices: int
    """Length of its shortest trace."""
    by_trace: bool
    """The stored trace breaks the promise, and the product passes that very trace."""
    by_search: bool
    states: int
    seconds: float


@dataclass
class Result:
    worlds: dict[str, Explored]
    runs: Graph
    mutants: list[Killed]

    @property
    def good(self) -> bool:
        return all(world.complete for world in self.worlds.values()) and all(
            m.by_trace and m.by_search for m in self.mutants
        )

    def markdown(self) -> str:
        lines = ["| promise | checked at | mutants killed, with the choices of the shortest trace |", "|---|---|---|"]
        for promise, (words, check) in PROMISES.items():
            killed = [f"{m.guarantee} (`{m.name}`, {m.choices})" for m in self.mutants if m.promise == promise]
            alive = [
                f"**{m.name} SURVIVED**"
                for m in self.mutants
                if m.promise == promise and not (m.by_trace and m.by_search)
            ]
            lines.append(f"| **{promise}** {words} | {check} | {'; '.join(alive + killed) or 'none of its own'} |")
        states = sum(world.states for world in self.worlds.values())
        lines += ["", "| world, searched exhaustively | states | transitions | settled | s |", "|---|---|---|---|---|"]
        for name, w in self.worlds.items():
            lines.append(f"| {name} | {w.states:,} | {w.transitions:,} | {w.settled:,} | {w.seconds:.1f} |")
        lines += [
            "",
            f"{len(self.mutants)} mutants, {sum(m.by_trace and m.by_search for m in self.mutants)} killed by trace and by search; "
            f"{states:,} states without a violation. Without faults: {self.runs.states:,} states however often writers may open, "
            f"at most {self.runs.openings} openings in any run, {self.runs.unanswered_ends} of {self.runs.ends} ends in vain.",
        ]
        return "\n".join(lines)

    def write(self, path: Path) -> None:
        path.write_text(json.dumps({"promises": PROMISES} | asdict(self), indent=1) + "\n")


def run() -> Result:
    """Everything that the table tells. Raises Found if the product breaks a promise."""
    worlds = {name: explore(bounds, settle_every=10) for name, bounds in SMALL.items()}
    runs = all_runs(Bounds(("fill 1 a", "spend 1 b"), births=2, faults=0))
    return Result(worlds, runs, [_killed(name) for name in MUTANTS])


def _killed(name: str) -> Killed:
    mutant, trace = MUTANTS[name], stored(name)
    broken = replay(mutant, trace, mutant.parts())
    passed = replay(mutant, trace, Parts(names=mutant.parts().names)) is None
    begin = time.process_time()
    found = search(name)
    return Killed(
        name,
        mutant.guarantee,
        mutant.promise,
        len(trace),
        broken is not None and broken.promise == mutant.promise and passed,
        isinstance(found, Found),
        found.states,
        time.process_time() - begin,
    )
