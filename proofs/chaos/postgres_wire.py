"""PostgreSQL's protocol as far as the proxy needs it: whose session it is, where COMMIT goes out and where it is answered."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from proofs.chaos.proxy import Frame

PROTOCOL_3 = 3


class PostgresWire:
    """One session. `name` is its application_name; `moves_pointers` whether it has sent what only a switch sends."""

    def __init__(self) -> None:
        self.name = ""
        self.moves_pointers = False
        self._requests = bytearray()
        self._answers = bytearray()
        self._started = False
        self._commits: dict[bytes, bool] = {}
        """Prepared statements by name, and whether they are COMMIT: psycopg prepares what it repeats."""

    def requests(self, data: bytes) -> Iterator[Frame]:
        buffer = self._requests
        buffer += data
        while len(buffer) >= 5:
            start = 1 if self._started else 0
            end = start + struct.unpack_from(">i", buffer, start)[0]
            if len(buffer) < end:
                return
            frame = bytes(buffer[:end])
            del buffer[:end]
            if not self._started:
                self._start(frame)
            yield Frame(frame, "COMMIT" if start and self._is_commit(frame) else None)

    def answers(self, data: bytes) -> Iterator[Frame]:
        buffer = self._answers
        buffer += data
        while len(buffer) >= 5:
            end = 1 + struct.unpack_from(">i", buffer, 1)[0]
            if len(buffer) < end:
                return
            frame = bytes(buffer[:end])
            del buffer[:end]
            yield Frame(frame, "COMMIT answer" if frame[:1] == b"C" and frame[5:] == b"COMMIT\0" else None)

    def _start(self, frame: bytes) -> None:
        """The first message has no type. One that only asks to cancel another session's statement has nothing after it."""
        self._started = True
        if struct.unpack_from(">h", frame, 4)[0] == PROTOCOL_3:
            words = frame[8:].split(b"\0")
            given = dict(zip(words[::2], words[1::2], strict=False))
            self.name = given.get(b"application_name", b"").decode()

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
