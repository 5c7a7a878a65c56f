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
