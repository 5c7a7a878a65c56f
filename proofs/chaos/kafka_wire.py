"""Kafka's protocol as far as the proxy needs it: frames by length, produce requests and the answers that belong to them."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from proofs.chaos.proxy import Frame

PRODUCE = 0


class KafkaWire:
    """One connection of a client to the broker."""

    def __init__(self) -> None:
        self._requests = bytearray()
        self._answers = bytearray()
        self._produces: set[int] = set()
        """Correlation ids whose answers are still to come."""

    def requests(self, data: bytes) -> Iterator[Frame]:
        for frame in _frames(self._requests, data):
            key, _version, correlation = struct.unpack_from(">hhi", frame, 4)
            if key == PRODUCE:
                self._produces.add(correlation)
            yield Frame(frame, "produce" if key == PRODUCE else None)

    def answers(self, data: bytes) -> Iterator[Frame]:
        for frame in _frames(self._answers, data):
            (correlation,) = struct.unpack_from(">i", frame, 4)
            is_produce = correlation in self._produces
            self._produces.discard(correlation)
            yield Frame(frame, "produce answer" if is_produce else None)


def _frames(buffer: bytearray, data: bytes) -> Iterator[bytes]:
    buffer += data
    while len(buffer) >= 4:
        end = 4 + struct.unpack_from(">i", buffer)[0]
        if len(buffer) < end:
            return
        yield bytes(buffer[:end])
        del buffer[:end]
