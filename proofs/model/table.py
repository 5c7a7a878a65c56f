"""Promise → check → mutants killed, as Markdown, from a run made for it."""

from __future__ import annotations

from proofs import traces
from proofs.model.configurations import SMALL
from proofs.model.explore import Found, explore
from proofs.model.liveness import all_runs
from proofs.model.mutants import MUTANTS
from proofs.model.setting import Bounds, Parts
from proofs.model.traces import FILE, replay, search

PROMISES = {
    "A": ("at most one counted commit per (stream, command id)", "each record that reaches a log"),
    "B": ("a counted commit was decided on exactly the fold of those before it", "each record that reaches a log"),
    "C": ("the database's rows are the fold of the counted commits below its position", "each commit of the database"),
    "D": ("an answer never changes", "each commit of the database"),
    "E": (
        "a client that saw an outcome and reads finds that version, until a restore and after it is caught up",
        "each commit of the database",
    ),
    "F": ("every command gets its outcome once faults stop", "the faults stop in every n-th state"),
    "G": ("command offsets never go back", "each record that reaches a log"),
    "H": ("any stored position continues to the same result", "each log from each position; each end of all faults"),
    "4": ("no two writers serve in one epoch", "each writer that begins to serve"),
    "6": ("no live writers fence each other for ever", "all runs without faults; every order of a round"),
    "7": ("a writer is ahead of the read model by a bounded number of commits", "each batch decided"),
    "8": ("commands are needed back to the last that counts, no further", "each writer that begins to serve"),
    "9": ("a writer opens only near the read model, and holds no more than it read up to there", "each opening"),
    "10": ("a writer opens only on the write model of its own version", "each opening"),
}
"""In words, and where it is checked; the mutants of rules 1, 2, 3 and 5 break letters."""


def table() -> tuple[str, bool]:
    """The text, and whether everything was searched and every mutant killed. Raises Found if the product breaks a promise."""
    worlds = {name: explore(bounds, settle_every=10) for name, bounds in SMALL.items()}
    runs = all_runs(Bounds(("fill 1 a", "spend 1 b"), births=2, faults=0))
    killed: dict[str, list[str]] = {promise: [] for promise in PROMISES}
    survivors = 0
    for name, mutant in MUTANTS.items():
        is_killed = _is_killed(name)
        survivors += not is_killed
        killed[mutant.promise].append(f"{mutant.guarantee} (`{name}`)" if is_killed else f"**{name} SURVIVED**")
    lines = ["| promise | checked at | mutants killed |", "|---|---|---|"]
    for promise, (words, check) in PROMISES.items():
        lines.append(f"| **{promise}** {words} | {check} | {'; '.join(killed[promise]) or 'none of its own'} |")
    lines += ["", "| world, searched exhaustively | states | transitions | settled | s |", "|---|---|---|---|---|"]
    for name, w in worlds.items():
        lines.append(f"| {name} | {w.states:,} | {w.transitions:,} | {w.settled:,} | {w.seconds:.1f} |")
    lines += [
        "",
        f"{len(MUTANTS) - survivors} of {len(MUTANTS)} mutants killed by trace and by search; "
        f"{sum(world.states for world in worlds.values()):,} states without a violation. Without faults: {runs.states:,} states "
        f"however often writers may open, at most {runs.openings} openings in any run, {runs.unanswered_ends} of {runs.ends} ends "
        "in vain.",
    ]
    return "\n".join(lines), not survivors and all(world.complete for world in worlds.values())


def _is_killed(name: str) -> bool:
    """The stored trace breaks the promise, the product passes that trace, and a search finds one again."""
    mutant, trace = MUTANTS[name], traces.read(FILE)[name].choices
    broken = replay(mutant, trace, mutant.parts())
    passed = replay(mutant, trace, Parts(names=mutant.parts().names)) is None
    return broken is not None and broken.promise == mutant.promise and passed and isinstance(search(name), Found)
