"""Middleware that records each request: its time in a metric, its span in the caller's trace, its correlation id."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from functools import cache

from opentelemetry import context
from opentelemetry.trace import Span, SpanKind
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.problems import STOPPING
from infra.observability import correlation, metrics, tracing

UNMATCHED = "unmatched"
"""The route of requests that have none."""
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
MAX_ID_BYTES = 200
_timer = cache(metrics.HTTP_REQUESTS.labels)


class RequestMetrics:
    """The outermost middleware. Each request sets all context variables that it uses, and resets none."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = time.perf_counter()
        names = {name for name, _ in scope["headers"]}
        given = correlation_id(scope["headers"]) if b"correlation-id" in names else None
        correlation.current.set(given)
        # without one too: a pipelined request starts in the context of the one before
        context.attach(tracing.context_of(scope["headers"] if b"traceparent" in names else ()))
        span: Span | None = None
        answered = False

        async def sent(message: Message) -> None:
            nonlocal answered
            if message["type"] == "http.response.start" and not answered:
                answered = True
                _observe(scope, message["status"], time.perf_counter() - started)
                if given is not None:
                    MutableHeaders(scope=message)["Correlation-Id"] = given
                if span:
                    # the route is known only now, and the path itself would make as many names as there are streams
                    span.update_name(f"{method_of(scope)} {route_of(scope)}")
                    span.set_attribute("http.route", route_of(scope))
                    span.set_attribute("http.response.status_code", message["status"])
            await send(message)

        metrics.HTTP_IN_PROGRESS.inc()
        try:
            if tracing.recording():
                method = method_of(scope)
                with tracing.span(method, SpanKind.SERVER, attributes={"http.request.method": method}) as span:
                    await self.app(scope, receive, sent)
            else:
                await self.app(scope, receive, sent)
        except asyncio.CancelledError:  # uvicorn cancels what still runs at the end of a graceful shutdown
            if answered:
                raise
            await STOPPING(headers={"Connection": "close"}).response()(scope, receive, sent)
        except Exception:
            if not answered:
                _observe(scope, 500, time.perf_counter() - started)
            raise
        finally:
            metrics.HTTP_IN_PROGRESS.dec()


def route_of(scope: Scope) -> str:
    """The template of the request's route: one of the app's, whatever the path holds."""
    return str(getattr(scope.get("route"), "path", UNMATCHED))


def method_of(scope: Scope) -> str:
    return scope["method"] if scope["method"] in METHODS else "other"


def correlation_id(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """The caller's, where it came once and is valid; a route that stores it refuses any other."""
    given = [value.strip(b" \t") for name, value in headers if name == b"correlation-id"]
    if len(given) != 1 or not 0 < len(given[0]) <= MAX_ID_BYTES or not given[0].isascii():
        return None
    text = given[0].decode()
    return text if text.isprintable() else None


def _observe(scope: Scope, status: int, seconds: float) -> None:
    _timer(method_of(scope), route_of(scope), str(status)).observe(seconds)
