"""An append and the wait for its outcome, with their times in metrics and their span in the caller's trace."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import Any

from opentelemetry.trace import Span, SpanKind

from api.appending import Appender, MaybeAppended, NotAppended
from infra.log.records import Command
from infra.log.topics import Topic
from infra.observability import metrics, tracing


def append(
    appender: Appender, outcome: asyncio.Future[Any], command: Command, value: bytes, topic: Topic
) -> asyncio.Future[int]:
    """What `Appender.append` does, timed; and so is `outcome`, from now on. Raises NotAppended."""
    started = time.perf_counter()
    span = tracing.start_here("append", SpanKind.PRODUCER) if tracing.recording() else None
    try:
        future = appender.append(command, value, topic, tracing.carrier(span))
    except NotAppended as error:
        _count(error)
        if span:
            span.end()
        raise
    future.add_done_callback(partial(_appended, started, span))
    outcome.add_done_callback(partial(_answered, started))
    return future


def _appended(started: float, span: Span | None, future: asyncio.Future[int]) -> None:
    error = MaybeAppended() if future.cancelled() else future.exception()
    _count(error)
    if error is None:
        metrics.API_APPEND_SECONDS.observe(time.perf_counter() - started)
    if span:
        span.end()


def _answered(started: float, future: asyncio.Future[Any]) -> None:
    if not future.cancelled() and future.exception() is None:
        metrics.API_OUTCOME_SECONDS.observe(time.perf_counter() - started)


def _count(error: BaseException | None) -> None:
    """By what is known: `no` and `unknown` are what the problem's `appended` says."""
    known = "yes" if error is None else "no" if isinstance(error, NotAppended) else "unknown"
    metrics.API_APPENDS.labels(known).inc()
