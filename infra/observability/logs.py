"""Logging of the long-running processes: one event a line, on standard error, as text or as JSON.

Input can't forge an event: what is not printable (line breaks of every kind, terminal sequences) is escaped, and the lines of a
traceback are indented, in text; in JSON an event is an object on a line of its own. The trace and the correlation id of what the
process was doing go with it.
"""

import json
import logging
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Literal, TypeAlias

from infra.errors import printable
from infra.observability import correlation, tracing

Format = Literal["text", "json"]
Event: TypeAlias = dict[str, str]


def configure(level: str, form: Format = "text") -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(EventFormatter(form))
    logging.basicConfig(level=level, handlers=[handler], force=True)


class EventFormatter(logging.Formatter):
    def __init__(self, form: Format) -> None:
        super().__init__()
        self._render: Callable[[Event], str] = json.dumps if form == "json" else _text

    def format(self, record: logging.LogRecord) -> str:
        """Time (RFC 3339, UTC), level, logger and message, and trace_id, correlation_id, exception where known."""
        spec = getattr(sys.modules["__main__"], "__spec__", None)
        event = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": spec.name if record.name == "__main__" and spec else record.name,
            "message": record.getMessage(),
        }
        ids = {
            "trace_id": tracing.trace_id(),
            "correlation_id": correlation.current.get(),
            "exception": self.formatException(record.exc_info) if record.exc_info and record.exc_info[0] else None,
        }
        return self._render(event | {name: value for name, value in ids.items() if value is not None})


def _text(event: Event) -> str:
    """A line of text; those of a traceback begin with a bar."""
    # quoted: an id that holds a space could pass for another id
    ids = [f" {name}={event[name]!r}" for name in ("trace_id", "correlation_id") if name in event]
    line = printable(f"{event['time']} {event['level']:<7} {event['message']}{''.join(ids)}")
    trace = event["exception"].split("\n") if "exception" in event else ()
    return "\n".join([line, *(f"  | {printable(one)}" for one in trace)])


class Sparing(logging.Filter):
    """Lets so many warnings a second through, of those that any client can cause; the next one says how many were left out."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most
        self._second = 0
        self._let = 0
        self._kept_back = 0

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno > logging.WARNING:
            return True
        if (second := int(time.monotonic())) != self._second:
            self._second, self._let = second, 0
        self._let += 1
        if self._let > self._most:
            self._kept_back += 1
            return False
        if self._kept_back:
            record.msg, record.args = f"{record.getMessage()} ({self._kept_back} others before it were not logged)", ()
            self._kept_back = 0
        return True


class StatusLog:
    """Logs problems by subject: one line per change, not one per try."""

    def __init__(self, log: logging.Logger, who: str) -> None:
        self._log = log
        self._who = who
        self._now: dict[str, str] = {}

    def wrong(self, subject: str, what: str, kind: str = "", level: int = logging.WARNING) -> None:
        """`kind` identifies the problem if the text `what` differs from try to try."""
        kind = kind or what
        if self._now.get(subject) != kind:
            self._now[subject] = kind
            self._log.log(level, "%s: %s", self._who, what)

    def well(self, subject: str, what: str) -> None:
        """Log that the subject's problem is over."""
        if self._now.pop(subject, None) is not None:
            self._log.info("%s: %s", self._who, what)
