"""What a peer is to do, and what it says when it has done it."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import msgspec

from benchmarks.workload import Order


@dataclass(frozen=True, slots=True)
class Job:
    """Orders for a peer with a log of its own; or a topic, and how many of its commits to apply."""

    database_url: str = ""
    kafka: str = ""
    topic: str = ""
    partitions: int = 0
    count: int = 0
    group: str = ""
    orders: list[Order] = field(default_factory=list)
    options: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Done:
    """`seconds` from the first to the last, `cpu_s` of its own processor time meanwhile.

    `rows` are (version, balance) by account name, where the peer holds them itself. `first_s` is of the same before, where that
    was slower because it was the first. `more` holds other figures, their units in their names.
    """

    count: int
    seconds: float
    cpu_s: float
    rows: dict[str, tuple[int, int]] = field(default_factory=dict)
    first_s: float = 0.0
    more: dict[str, float] = field(default_factory=dict)


class Stopwatch:
    """Runs from its making: of the clock, and of this process on the processors."""

    def __init__(self) -> None:
        self._clock = time.perf_counter()
        self._cpu = time.process_time()

    def done(self, count: int, rows: dict[str, tuple[int, int]] | None = None) -> Done:
        return Done(count, time.perf_counter() - self._clock, time.process_time() - self._cpu, rows or {})


def read_job() -> Job:
    return msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Job)


def write_job(job: Job, file: Path) -> None:
    file.write_bytes(msgspec.json.encode(job))


def tell(done: Done) -> None:
    sys.stdout.write(msgspec.json.encode(asdict(done)).decode() + "\n")
    sys.stdout.flush()


def told(log: str) -> Done:
    return msgspec.json.decode(log.splitlines()[-1], type=Done)
