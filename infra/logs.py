"""Logging of the long-running processes: one line an event, on standard error."""

from __future__ import annotations

import logging
import sys


class _OneLine(logging.Formatter):
    """Input must not be able to forge a line of its own."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  # the library's name
        return super().formatMessage(record).replace("\r", "\\r").replace("\n", "\\n")


def configure(level: str) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_OneLine("%(asctime)s %(levelname)-7s %(message)s"))
    logging.basicConfig(level=level, handlers=[handler], force=True)


class Said:
    """What a process complained of, by subject: one line a change, not one a try."""

    def __init__(self, log: logging.Logger, who: str) -> None:
        self._log = log
        self._who = who
        self._now: dict[str, str] = {}

    def wrong(self, subject: str, what: str) -> None:
        if self._now.get(subject) != what:
            self._now[subject] = what
            self._log.warning("%s: %s", self._who, what)

    def well(self, subject: str, what: str) -> None:
        """What was complained of is over."""
        if self._now.pop(subject, None) is not None:
            self._log.info("%s: %s", self._who, what)
