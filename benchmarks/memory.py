"""The most memory that a process and its children held at the same time."""

from __future__ import annotations

import psutil

from infra.processes.beside import Beside

EVERY_S = 0.1


class PeakMemory(Beside):
    """`with PeakMemory(pid) as peak: …`, then `peak.bytes`: resident, ten looks a second; shared pages count for each."""

    def __init__(self, pid: int) -> None:
        super().__init__("peak-memory")
        self._main = psutil.Process(pid)
        self.bytes = 0

    def _work(self) -> None:
        while not self._ended.wait(EVERY_S):
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
