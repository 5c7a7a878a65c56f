"""The correlation id of what the current task is doing: given by whoever asked for it, kept in commits and log lines."""

from __future__ import annotations

from contextvars import ContextVar

current: ContextVar[str | None] = ContextVar("correlation_id", default=None)
"""None where nobody gave one."""
