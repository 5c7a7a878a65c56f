"""The worlds that are searched exhaustively: small ones in `make test-all`, the smallest of them in `make test` too.

Larger ones are searched by `python -m proofs.model`.
"""

from __future__ import annotations

from proofs.model.setting import APPEND_FAULTS, Bounds, Era

ONE = ("fill 1 a",)
TWO = ("fill 1 a", "spend 1 b")
"""What the second does depends on the first."""
TWICE = ("spend 1 a", "spend 1 a")
"""One refusal, asked for twice."""
THREE = ("fill 1 a", "spend 1 b", "spend 1 b")
"""The third is the second, sent again."""
REFUSED_TWICE = ("spend 1 a", "fill 1 b", "spend 1 a")
"""The third would be accepted if the first answer were forgotten."""

SWITCH = (Era("g", 1, 1), Era("h", 2, 0))
"""To another version of the write model."""
REPAIR = (Era("g", 1, 1), Era("h", 1, 0))
"""A build whose rows are a cent off is replaced by one of the same version that is right."""

SMALL: dict[str, Bounds] = {
    "one writer, any two faults": Bounds(TWO, births=1, openings=3, faults=2),
    "one writer, any fault": Bounds(THREE, births=1, openings=3, faults=1),
    "one writer, any fault, slow answers, late news": Bounds(
        REFUSED_TWICE, births=1, openings=2, faults=1, split=True, prompt=False
    ),
    "two writers, no fault": Bounds(TWO, births=2, openings=4, faults=0),
    "two writers, no fault, slow answers": Bounds(TWO, births=2, openings=2, faults=0, split=True),
    "two writers, any fault": Bounds(ONE, births=2, openings=2, faults=1),
    "two writers, a restore": Bounds(TWICE, births=2, openings=2, faults=1, kinds=frozenset({"restore"})),
    "two writers, late news": Bounds(ONE, births=2, openings=3, faults=1, kinds=frozenset({"late"}), prompt=False),
    "two writers, no room": Bounds(TWO, births=2, openings=3, faults=0, run_ahead=1),
    "a switch": Bounds(("fill 1 a", "spend 2 b"), births=2, openings=3, faults=0, eras=SWITCH, prologue=1),
    "a repair and a restore": Bounds(
        ("fill 1 a", "fill 1 b", "spend 3 c"), births=1, openings=3, faults=1, eras=REPAIR, prologue=1
    ),
}

LARGE: dict[str, Bounds] = {
    "two writers, any fault, three openings": Bounds(ONE, births=2, openings=3, faults=1),
    "one writer, any two faults, a command sent again": Bounds(THREE, births=1, openings=3, faults=2),
    "two writers, a command sent again": Bounds(THREE, births=2, openings=4, faults=0),
    "two writers, a refusal sent again, any fault": Bounds(TWICE, births=2, openings=3, faults=1),
    "two writers, any fault, two commands": Bounds(TWO, births=2, openings=3, faults=1),
    "one writer, any three faults": Bounds(THREE, births=1, openings=4, faults=3),
    "one writer, any two faults, late news": Bounds(REFUSED_TWICE, births=1, openings=3, faults=2, prompt=False),
    "two writers, any two faults": Bounds(ONE, births=2, openings=3, faults=2),
    "two writers, slow answers, a restore": Bounds(
        TWO, births=2, openings=2, faults=1, kinds=frozenset({"restore"}), split=True
    ),
    "two writers, two restores": Bounds(TWICE, births=2, openings=2, faults=2, kinds=frozenset({"restore"})),
    "three writers, no fault": Bounds(ONE, births=3, openings=3, faults=0),
    "three writers, two commands": Bounds(TWO, births=3, openings=3, faults=0),
    "three writers, an append goes wrong": Bounds(ONE, births=3, openings=4, faults=1, kinds=APPEND_FAULTS),
}
