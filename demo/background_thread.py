"""Work in a thread for as long as a block of code runs."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from typing import Self


class BackgroundThread(ABC):
    """`with Something(…) as something: …` does a subclass's `_work` in a thread from the block's first line to its last.

    `_work` returns soon after `_ended` is set. If it raises, the error is in `error`; the block's code checks that.
    """

    def __init__(self, name: str) -> None:
        self.error: BaseException | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._end()

    def _end(self, join_s: float = 60.0) -> None:
        self._ended.set()
        self._thread.join(join_s)

    @abstractmethod
    def _work(self) -> None: ...

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self.error = error
