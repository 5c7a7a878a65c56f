"""The two protocols as far as the proxy needs them: where a message ends, and which ones a rule may choose."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple, Protocol

PROTOCOL_3 = 3
KINDS = {0: "produce", 1: "fetch", 26: "COMMIT"}
"""Kafka's requests by their key. The end of a transaction is called as PostgreSQL's is."""


class Frame(NamedTuple):
    """One message, whole. `kind` is None where no rule may choose it; that of an answer ends with `answer`."""

    data: bytes
    kind: str | None


class Wire(Protocol):
    """What is understood of one connection."""

    def requests(self, data: bytes) -> Iterator[Frame]:
        """The frames that these bytes from the client complete."""

    def answers(self, data: bytes) -> Iterator[Frame]:
        """The same for the server's bytes."""


class KafkaWire:
    """One connection of a client to the broker. An answer is known by its request's correlation id."""

    def __init__(self) -> None:
        self._requests, self._answers = bytearray(), bytearray()
        self._asked: dict[int, str] = {}

    def requests(self, data: bytes) -> Iterator[Frame]:
        self._requests += data
        while frame := _first(self._requests, 0, 4):
            key, _version, correlation = struct.unpack_from(">hhi", frame, 4)
            kind = KINDS.get(key)
            if kind:
                self._asked[correlation] = kind
            yield Frame(frame, kind)

    def answers(self, data: bytes) -> Iterator[Frame]:
        self._answers += data
        while frame := _first(self._answers, 0, 4):
            kind = self._asked.pop(struct.unpack_from(">i", frame, 4)[0], None)
            yield Frame(frame, kind and f"{kind} answer")


class PostgresWire:
    """One session. `name` is its application_name; `moves_pointers` whether it has sent what only a switch sends."""

    def __init__(self) -> None:
        self.name = ""
        self.moves_pointers = False
        self._requests, self._answers = bytearray(), bytearray()
        self._started = False
        self._commits: dict[bytes, bool] = {}
        """Prepared statements by name, and whether they are COMMIT: psycopg prepares what it repeats."""

    def requests(self, data: bytes) -> Iterator[Frame]:
        self._requests += data
        while frame := _first(self._requests, int(self._started)):
            kind = "COMMIT" if self._started and self._is_commit(frame) else None
            if not self._started:
                self._start(frame)
            yield Frame(frame, kind)

    def answers(self, data: bytes) -> Iterator[Frame]:
        self._answers += data
        while frame := _first(self._answers, 1):
            yield Frame(frame, "COMMIT answer" if frame[:1] == b"C" and frame[5:] == b"COMMIT\0" else None)

    def _start(self, frame: bytes) -> None:
        """The first message has no type. One that only asks to cancel another session's statement has nothing after it."""
        self._started = True
        if struct.unpack_from(">h", frame, 4)[0] == PROTOCOL_3:
            words = frame[8:].split(b"\0")
            self.name = dict(zip(words[::2], words[1::2], strict=False)).get(b"application_name", b"").decode()

    def _is_commit(self, frame: bytes) -> bool:
        match frame[:1]:
            case b"Q":
                return self._says_commit(frame[5:])
            case b"P":
                name, query, *_ = frame[5:].split(b"\0", 2)
                self._commits[name] = self._says_commit(query)
                return False
            case b"B":
                _portal, statement, *_ = frame[5:].split(b"\0", 2)
                return self._commits.get(statement, False)
            case _:
                return False

    def _says_commit(self, query: bytes) -> bool:
        if b"insert into live" in query:
            self.moves_pointers = True
        return query.rstrip(b"\0; ").upper() == b"COMMIT"


def _first(buffer: bytearray, start: int, more: int = 0) -> bytes:
    """The first frame, taken out of the buffer; none until it is whole. Its length, `more` than it says, counts from `start`."""
    if len(buffer) < start + 4:
        return b""
    end = start + more + struct.unpack_from(">i", buffer, start)[0]
    if len(buffer) < end:
        return b""
    frame = bytes(buffer[:end])
    del buffer[:end]
    return frame
