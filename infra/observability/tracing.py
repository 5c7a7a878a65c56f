"""W3C trace context, from HTTP through both topics' headers into the agent's transaction.

https://www.w3.org/TR/trace-context/. Only OpenTelemetry's API is used: without an SDK in the process there are no spans, and the
caller's `traceparent` and `tracestate` are handed on as they came. With one (`trace.set_tracer_provider`, or what
`opentelemetry-instrument` sets up), each step of a command's way is a span of the caller's trace.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from opentelemetry import context, trace
from opentelemetry.trace import Link, NonRecordingSpan, Span, SpanContext, SpanKind
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

if TYPE_CHECKING:
    from infra.log.records import Headers

MAX_BYTES = 512
"""Of either header; a longer one is ignored."""

_propagator = TraceContextTextMapPropagator()
_FIELDS = frozenset(_propagator.fields)
_NOWHERE = context.Context()


def recording() -> bool:
    """Whether an SDK is there. Without one, spans need not be made."""
    return not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider | trace.NoOpTracerProvider)


def carrier(span: Span | None = None) -> list[tuple[str, bytes]]:
    """The headers that let a record's reader go on with this trace: the current one, or that of `span`. Empty without a trace."""
    found: dict[str, str] = {}
    _propagator.inject(found, trace.set_span_in_context(span, _NOWHERE) if span else None)
    return [(name, value.encode()) for name, value in found.items()]


def kept(headers: Headers) -> list[tuple[str, bytes]]:
    """Of a record's headers those that are the trace's, for the record that is made of it: no others, and none that is too long."""
    return [(name, value) for name, value in headers if name in _FIELDS and value and len(value) <= MAX_BYTES]


def traceparent(headers: Headers) -> str | None:
    """Of a record's headers, the one that names its trace."""
    return next((value.decode("latin-1") for name, value in kept(headers) if name == "traceparent" and value), None)


def context_of(headers: Iterable[tuple[str | bytes, bytes | None]]) -> context.Context:
    """The trace that headers name, of a Kafka record or an ASGI request; an empty context where they name none, or nonsense."""
    found: dict[str, list[str]] = {}
    for raw, value in headers:
        name = raw.decode("latin-1").lower() if isinstance(raw, bytes) else raw
        if name in _FIELDS and value and len(value) <= MAX_BYTES:
            found.setdefault(name, []).append(value.decode("latin-1"))
    # several are ignored: the standard does not say which one counts
    return _propagator.extract(found, _NOWHERE) if len(found.get("traceparent", ())) == 1 else _NOWHERE


def of_batch(
    name: str, records: Iterable[Headers], attributes: Mapping[str, str | int]
) -> AbstractContextManager[Span]:
    """The current span of work on a batch, linked to that of each record by its headers, and within their trace if it is one."""
    found = (trace.get_current_span(context_of(headers)) for headers in records)
    links = [context for one in found if (context := one.get_span_context()).is_valid]
    within = _NOWHERE
    if len({link.trace_id for link in links}) == 1:
        within = trace.set_span_in_context(NonRecordingSpan(links[-1]), _NOWHERE)
    return span(name, SpanKind.CONSUMER, within=within, links=links, attributes=attributes)


def start(name: str, kind: SpanKind, headers: Headers) -> Span:
    """A span of the trace that a record's headers name, not the current one of any thread; to be ended by the caller."""
    return trace.get_tracer("samefold").start_span(name, context_of(headers), kind)


def start_here(name: str, kind: SpanKind) -> Span:
    """A span within the current one, which stays the current one; to be ended by the caller."""
    return trace.get_tracer("samefold").start_span(name, kind=kind)


def span(
    name: str,
    kind: SpanKind = SpanKind.INTERNAL,
    *,
    within: context.Context | None = None,
    links: Sequence[SpanContext] = (),
    attributes: Mapping[str, str | int] | None = None,
) -> AbstractContextManager[Span]:
    """The current span for as long as the block runs, `within` a context or the current one."""
    tracer = trace.get_tracer("samefold")
    return tracer.start_as_current_span(name, within, kind, attributes, [Link(link) for link in links])


def trace_id() -> str | None:
    """Of the current span, 32 hexadecimal digits."""
    found = trace.get_current_span().get_span_context()
    return trace.format_trace_id(found.trace_id) if found.is_valid else None
