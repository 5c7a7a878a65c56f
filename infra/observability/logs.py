"""Logging of the long-running processes: one event a line, on standard error, as text or as JSON.

Input can't forge an event: what is not printable (line breaks of every kind, terminal sequences) is escaped, and the lines of a
traceback are indented, in text; in JSON an event is an object on a line of its own. The trace and the correlation id of what the
process was doing go with it.
"""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec
from opentelemetry import trace

from infra.observability import correlation

Format = Literal["text", "json"]


def configure(level: str, form: Format = "text") -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Json() if form == "json" else OneLine("%(asctime)s %(levelname)-7s %(message)s"))
    logging.basicConfig(level=level, handlers=[handler], force=True)


class OneLine(logging.Formatter):
    """Lines of text; those of a traceback begin with a bar."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  # the library's name
        # quoted: an id that holds a space could pass for another id
        ids = "".join(f" {name}={_encode(value)}" for name, value in _ids().items())
        return _printable(super().formatMessage(record) + ids)

    def formatException(self, ei: Any) -> str:  # noqa: N802
        return _barred(super().formatException(ei))

    def formatStack(self, stack_info: str) -> str:  # noqa: N802
        return _barred(super().formatStack(stack_info))


class Json(logging.Formatter):
    """An object a line: time (RFC 3339, UTC), level, logger and message, and trace_id, correlation_id, exception where known."""

    def format(self, record: logging.LogRecord) -> str:
        told: dict[str, str] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": _module(record),
            "message": record.getMessage(),
        }
        told |= _ids()
        if record.exc_info:
            told["exception"] = self.formatException(record.exc_info)
        return _encode(told)


def _encode(told: str | dict[str, str]) -> str:
    try:
        text = msgspec.json.encode(told).decode()
    except UnicodeEncodeError:  # half of a surrogate pair
        plain = _printable(told) if isinstance(told, str) else {name: _printable(text) for name, text in told.items()}
        text = msgspec.json.encode(plain).decode()
    # some readers of lines take these for the end of one, and JSON need not escape them
    return text.translate({0x85: "\\u0085", 0x2028: "\\u2028", 0x2029: "\\u2029"})


def _module(record: logging.LogRecord) -> str:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return str(spec.name) if record.name == "__main__" and spec else record.name


def _ids() -> dict[str, str]:
    span = trace.get_current_span().get_span_context()
    traced = {"trace_id": trace.format_trace_id(span.trace_id)} if span.is_valid else {}
    given = correlation.current.get()
    return traced | ({"correlation_id": given} if given else {})


def _printable(text: str) -> str:
    """The text with everything escaped that is not to be printed as it is."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _barred(text: str) -> str:
    return "\n".join(f"  | {_printable(line)}" for line in text.split("\n"))


class Said:
    """What a process complained of, by subject: one line a change, not one a try."""

    def __init__(self, log: logging.Logger, who: str) -> None:
        self._log = log
        self._who = who
        self._now: dict[str, str] = {}

    def wrong(self, subject: str, what: str, kind: str = "") -> None:
        """`kind` tells a change where `what` is a driver's words, which differ from try to try."""
        kind = kind or what
        if self._now.get(subject) != kind:
            self._now[subject] = kind
            self._log.warning("%s: %s", self._who, what)

    def well(self, subject: str, what: str) -> None:
        """What was complained of is over."""
        if self._now.pop(subject, None) is not None:
            self._log.info("%s: %s", self._who, what)
