"""Examples of events and commands for the record of releases: the same class gives the same one."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import HypothesisException

from infra.domain_model.storable import encode
from infra.errors import SamefoldError
from infra.testing.facts import facts

EXAMPLES = 50
MOST_BYTES = 600


class NoExample(SamefoldError):
    """Too few of the values that the fields' types allow make an event or command."""


def golden(fact: type) -> Any:
    """An example in which as many fields as possible have a value of their own: of several, the longest of a readable size.

    Raises NoExample.
    """
    found: list[Any] = []

    @seed(14)
    @settings(
        max_examples=EXAMPLES,
        database=None,
        phases=[Phase.generate],
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(facts(fact))
    def draw(example: Any) -> None:
        found.append(example)

    try:
        draw()
    except HypothesisException as error:
        raise NoExample(
            f"No example of {fact.__name__} could be made: {error}.",
            "Write types and bounds that Hypothesis knows into its fields, or a validator that takes more of them.",
        ) from error
    readable = [one for one in found if len(encode(one)) <= MOST_BYTES and encode(one).isascii()] or found
    return max(readable, key=lambda one: len(encode(one)))
