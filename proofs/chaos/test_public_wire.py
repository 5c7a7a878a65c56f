"""make test-all + prove: the cut that leaves the outcome open is the one that matters.

A publisher's connection that breaks in a transaction: a new producer goes on, and each event is public once."""

from __future__ import annotations

from pathlib import Path

import pytest

from proofs.chaos.ground import Ground
from tests.engine.policies.publishers import Log, publisher, reader
from tools.testing.waiting import until


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("COMMIT answer", marks=pytest.mark.slow),
        *(
            pytest.param(kind, marks=pytest.mark.prove(part="chaos"))
            for kind in ("produce", "produce answer", "COMMIT")
        ),
    ],
)
def test_a_new_producer_goes_on(ground: Ground, tmp_path: Path, kind: str) -> None:
    world = ground.world()
    world = world.model_copy(update={"public_topic": f"{world.events_topic}-public"})
    log = Log(world)
    log.deposit("a", count=2)
    with reader(world) as public, publisher(ground.fronted(world), tmp_path) as one:
        public.wait(log.accepted)
        cut = ground.kafka.rule(kind, "cut")
        log.deposit("a", count=2)
        until(cut.struck.is_set, f"the connection is cut at the {kind}")
        until(lambda: one.says("a new producer"), "a new producer goes on")
        log.deposit("a", count=2)
        public.wait(log.accepted)
        public.require_exactly(log.accepted)
