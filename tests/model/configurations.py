"""The worlds that are searched exhaustively: small ones in `make test`, larger ones by `python -m tests.model`."""

from __future__ import annotations

from tests.model.setting import Bounds

FILL_SPEND_TWICE = ("fill 1 a", "spend 1 b", "spend 1 b")
"""What the second does depends on the first; the third is the second, sent again."""
REFUSED_TWICE = ("spend 1 a", "fill 1 b", "spend 1 a")
"""A refusal is an answer too: the third would be accepted if the first were forgotten."""

SMALL: dict[str, Bounds] = {
    "two writers, no faults": Bounds(FILL_SPEND_TWICE[:2], births=2, openings=3, faults=0),
    "one writer, two faults": Bounds(FILL_SPEND_TWICE, births=1, openings=3, faults=2),
}
