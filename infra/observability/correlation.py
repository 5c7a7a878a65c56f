"""The correlation id of the current task: given by the client, kept in commits and log lines."""

from contextvars import ContextVar

current: ContextVar[str | None] = ContextVar("correlation_id", default=None)
"""None if the client gave none."""
