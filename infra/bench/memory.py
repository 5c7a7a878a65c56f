"""The most memory that a process and its children held at the same time."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Self

import psutil

EVERY_S = 0.1


class PeakMemory:
    """`with PeakMemory(pid) as peak: …`, then `peak.bytes`: resident, ten looks a second; shared pages count for each."""

    def __init__(self, pid: int) -> None:
        self._main = psutil.Process(pid)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, name="peak-memory", daemon=True)
        self.bytes = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._stop.wait(EVERY_S):
            try:
                family = [self._main, *self._main.children(recursive=True)]
            except psutil.NoSuchProcess:
                return
            total = 0
            for process in family:
                try:
                    total += process.memory_info().rss
                except psutil.NoSuchProcess:
                    continue
            self.bytes = max(self.bytes, total)
