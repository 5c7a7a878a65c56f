"""make test-all + prove: the cut that leaves the outcome open is the one that matters.

A publisher's connection that breaks in a transaction: a new producer goes on, and each event is public once."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.testing.waiting import until
from proofs.chaos.ground import Ground
from proofs.chaos.kafka_wire import KafkaWire
from proofs.chaos.proxy import Frame, Kind
from tests.engine.policies.publishers import Log, publisher, reader

END_TRANSACTION = 26


class Transactions(KafkaWire):
    """Requests to end a transaction are a COMMIT."""

    def __init__(self) -> None:
        super().__init__()
        self._ends: set[int] = set()

    def requests(self, data: bytes) -> Iterator[Frame]:
        for frame in super().requests(data):
            key, _version, correlation = struct.unpack_from(">hhi", frame.data, 4)
            if key == END_TRANSACTION:
                self._ends.add(correlation)
            yield Frame(frame.data, "COMMIT") if key == END_TRANSACTION else frame

    def answers(self, data: bytes) -> Iterator[Frame]:
        for frame in super().answers(data):
            (correlation,) = struct.unpack_from(">i", frame.data, 4)
            yield Frame(frame.data, "COMMIT answer") if correlation in self._ends else frame
            self._ends.discard(correlation)


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
def test_a_new_producer_goes_on(ground: Ground, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind) -> None:
    monkeypatch.setattr(ground.kafka, "wire", Transactions)
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
