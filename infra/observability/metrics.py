"""All metrics, in one place; docs/observability.md says what to make of each.

They are set once a batch or a request, never once an event. No label takes a value from outside: partitions, agents, views and
routes are those of the topics and the code.

The processes of one `samefold run` share a folder that their supervisor made, so that one of them can tell the sums of all. Each
writes to files of its own name, not of its id: started again, it goes on counting where it was.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, values
from prometheus_client.exposition import choose_encoder
from prometheus_client.multiprocess import MultiProcessCollector

from infra.observability.metrics_folder import FOLDER, PROCESS, stem


def _value_class() -> type[values.MutexValue]:
    # taken away: processes that this one starts (Spark's, for one) would write to the same files
    name = os.environ.pop(PROCESS, None)
    if name is None:
        return values.MutexValue
    pid, apart = os.getpid(), stem(name)
    kind: type[values.MutexValue] = values.MultiProcessValue(  # type: ignore[no-untyped-call]
        lambda: apart if os.getpid() == pid else f"{apart}-{os.getpid()}"
    )
    return kind


values.ValueClass = _value_class()
prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]

REGISTRY = CollectorRegistry()

_MS = (0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_COUNTS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 100_000)


def _counter(name: str, told: str, *labels: str) -> Counter:
    return Counter(name, told, labels, namespace="samefold", registry=REGISTRY)


def _seconds(name: str, told: str, *labels: str) -> Histogram:
    return Histogram(name, told, labels, namespace="samefold", unit="seconds", registry=REGISTRY, buckets=_MS)


def _counts(name: str, told: str, *labels: str) -> Histogram:
    return Histogram(name, told, labels, namespace="samefold", registry=REGISTRY, buckets=_COUNTS)


def _sum(name: str, told: str, *labels: str) -> Gauge:
    """Of all processes."""
    return Gauge(name, told, labels, namespace="samefold", registry=REGISTRY, multiprocess_mode="livesum")


def _newest(name: str, told: str, *labels: str) -> Gauge:
    """Of that process which looked last: they all look at the same."""
    return Gauge(name, told, labels, namespace="samefold", registry=REGISTRY, multiprocess_mode="livemostrecent")


# ── the processes ──

PROCESS_STARTS = _counter("process_starts", "Processes that started.", "process")

# ── the API ──

HTTP_REQUESTS = _seconds(
    "http_request", "From a request's arrival to the beginning of its answer.", "method", "route", "status"
)
HTTP_IN_PROGRESS = _sum("http_requests_in_progress", "Requests under way.")
API_APPENDS = _counter("api_appends", "Commands that the API handed to the log, by whether they got there.", "appended")
API_APPEND_SECONDS = _seconds("api_append", "From handing a command to the producer to its acknowledgement.")
API_OUTCOME_SECONDS = _seconds("api_outcome", "From handing a command to the producer to its outcome.")
API_WAITING = _sum("api_waiting", "Requests that wait for an outcome.")

# ── the handlers ──

HANDLER_BATCH_COMMANDS = _counts("handler_batch_commands", "Commands that were decided at once.")
HANDLER_COMMITS = _counter("handler_commits", "Commits appended, by what became of the command.", "outcome")
HANDLER_REJECTIONS = _counter("handler_rejections", "Rejections appended, by why.", "why")
HANDLER_EPOCHS = _counter("handler_epochs", "Epochs opened: partitions that a handler took over, or took anew.")
HANDLER_DOUBTS = _counter("handler_doubts", "Times that a handler gave up its epoch, by why.", "why")

# ── the agents ──

AGENT_BATCHES = _counter("agent_batches", "Batches, by what became of them.", "agent", "fate")
AGENT_BATCH_COMMITS = _counts("agent_batch_commits", "Commits in one applied batch.", "agent")
AGENT_BATCH_SECONDS = _seconds("agent_batch", "Folding and writing one batch, its transaction included.", "agent")
AGENT_COMMITS = _counter("agent_commits", "Commits folded.", "agent")
AGENT_EVENTS = _counter("agent_events", "Events folded.", "agent")
AGENT_ROWS = _counter("agent_rows", "Rows written.", "agent")
AGENT_VOID = _counter("agent_void_records", "Records of the log without any effect, by why.", "agent", "why")
AGENT_RETRIES = _counter("agent_retries", "Transactions that were tried again, by why.", "agent", "why")
AGENT_PARKED = _counter("agent_parked", "Streams that were parked.", "agent", "view")

# ── what an API or an exporter sees ──

LAG_EVENTS = _newest("lag_events", "Records of the log that an agent has not folded.", "agent", "partition")
LAG_SECONDS = _newest("lag_seconds", "How long the first of them has been waiting.", "agent", "partition")
PARKED_STREAMS = _newest("parked_streams", "Streams that a live view leaves out.", "view")
READY = _newest("ready", "Whether a check of /health/ready is passed: 1 or 0.", "check")


def gathered() -> CollectorRegistry:
    """The metrics of all processes that share this one's folder; without one, this process's own."""
    if not values.ValueClass._multiprocess:
        return REGISTRY
    registry = CollectorRegistry()
    MultiProcessCollector(registry, os.environ[FOLDER])  # type: ignore[no-untyped-call]
    return registry


def exposition(accept: str = "") -> tuple[bytes, str]:
    """All metrics in the format that the header `Accept` asks for, and its media type. Reads files: not for an event loop."""
    encode: Callable[[CollectorRegistry], bytes]
    encode, media_type = choose_encoder(accept)
    return encode(gathered()), media_type
