"""Every state of small worlds: no promise of docs/protocol.md is broken in any of them."""

import pytest

from proofs.model.configurations import SMALL
from proofs.model.explore import explore

SMALLEST = ("one writer, any fault", "two writers, no room", "a switch")


@pytest.mark.timeout(600)  # each takes a few seconds of the processor, however many others want it
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SMALLEST else pytest.mark.slow) for name in SMALL]
)
def test_every_state_keeps_every_promise(name: str) -> None:
    explored = explore(SMALL[name], settle_every=10)
    assert explored.complete
    assert explored.settled > 0
    print(f"{name}: {explored}")
