"""make test + test-all + prove: the smallest worlds take seconds, larger ones minutes. No promise of a source is broken in
any state of small worlds."""

from __future__ import annotations

import pytest

from proofs.explore import explore
from proofs.model_source.checks import LARGE, SMALL

SMALLEST = "two receivers", "a repeated id, an aborted transaction and a restore", "a switch and a restore"


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in SMALLEST else pytest.mark.slow) for name in SMALL]
    + [pytest.param(name, marks=pytest.mark.prove(part="models")) for name in LARGE],
)
def test_every_state_keeps_every_promise(name: str) -> None:
    explored = explore(name, (SMALL | LARGE)[name], settle_every=10)
    print(f"{name}: {explored}")
    assert explored.complete
    assert explored.settled > 0
