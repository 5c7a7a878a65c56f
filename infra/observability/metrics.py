"""All metrics, in one place; docs/observability.md explains each.

They are set once a batch or a request, never once an event. No label takes a value from outside: partitions, agents, views and
routes are those of the topics and the code. Each process exposes its own, and Prometheus adds them up.
"""

import logging
import socket
import sys
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer, ThreadingMixIn
from typing import Any

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.exposition import choose_encoder

from infra.errors import PartEnded, SamefoldError
from infra.settings import Settings

log = logging.getLogger(__name__)

prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]

SCRAPE_S = 10.0
"""How long a connection to the port of a process's metrics may last."""
MAX_SCRAPERS = 20
"""Connections at once; a further one ends the oldest."""

REGISTRY = CollectorRegistry()
ProcessCollector(registry=REGISTRY)

_MS = (0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_COUNTS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 100_000)


def _counter(name: str, text: str, *labels: str) -> Counter:
    return Counter(name, text, labels, namespace="samefold", registry=REGISTRY)


def _seconds(name: str, text: str, *labels: str) -> Histogram:
    return Histogram(name, text, labels, namespace="samefold", unit="seconds", registry=REGISTRY, buckets=_MS)


def _counts(name: str, text: str, *labels: str) -> Histogram:
    return Histogram(name, text, labels, namespace="samefold", registry=REGISTRY, buckets=_COUNTS)


def _gauge(name: str, text: str, *labels: str) -> Gauge:
    return Gauge(name, text, labels, namespace="samefold", registry=REGISTRY)


# ── whoever has the topic ──

TOPIC_UNFIT = _gauge("topic_unfit", "1 where a topic has a setting with which it may lose history.", "topic")

# ── the API ──

HTTP_REQUESTS = _seconds(
    "http_request", "From a request's arrival to the beginning of its answer.", "method", "route", "status"
)
HTTP_IN_PROGRESS = _gauge("http_requests_in_progress", "Requests under way.")
API_APPENDS = _counter(
    "api_appends", "Commands and webhooks' messages handed to Kafka, by whether they got there.", "appended"
)
API_APPEND_SECONDS = _seconds("api_append", "From handing a command to the producer to its acknowledgement.")
API_OUTCOME_SECONDS = _seconds("api_outcome", "From handing a command to the producer to its outcome.")
API_WAITING = _gauge("api_waiting", "Requests that wait for an outcome.")

# ── the handlers ──

HANDLER_BATCH_COMMANDS = _counts("handler_batch_commands", "Commands that were decided at once.")
HANDLER_COMMITS = _counter("handler_commits", "Commits appended, by what became of the command.", "outcome")
HANDLER_REJECTIONS = _counter("handler_rejections", "Rejections appended, by why.", "why")
HANDLER_EPOCHS = _counter("handler_epochs", "Epochs opened: partitions that a handler took over, or reopened.")
HANDLER_REOPENINGS = _counter(
    "handler_reopenings", "Times that a handler gave up its epoch to open again, by why.", "why"
)

# ── the agents ──

AGENT_BATCHES = _counter("agent_batches", "Batches, by what became of them.", "agent", "result")
AGENT_BATCH_COMMITS = _counts("agent_batch_commits", "Commits in one applied batch.", "agent")
AGENT_BATCH_SECONDS = _seconds("agent_batch", "Folding and writing one batch, its transaction included.", "agent")
AGENT_COMMITS = _counter("agent_commits", "Commits folded.", "agent")
AGENT_EVENTS = _counter("agent_events", "Events folded.", "agent")
AGENT_ROWS = _counter("agent_rows", "Rows written.", "agent")
AGENT_VOID = _counter("agent_void_records", "Records of the log without any effect, by why.", "agent", "why")
AGENT_RETRIES = _counter("agent_retries", "Transactions that were tried again, by why.", "agent", "why")
AGENT_PARKED = _counter("agent_parked", "Streams that were parked.", "agent", "view")

# ── the policies ──

WEBHOOK_ATTEMPTS = _counter("webhook_attempts", "Posts that were tried, by what came of it.", "endpoint", "result")
WEBHOOK_ENDPOINT_UNKNOWN = _gauge(
    "webhook_endpoint_unknown",
    "1 where posts wait for an endpoint that this process's settings do not name.",
    "endpoint",
)


# ── the publishers ──

PUBLISHER_RECORDS = _counter("publisher_records", "Public events committed.")
PUBLISHER_TRANSACTIONS = _counter("publisher_transactions", "Transactions, by what became of them.", "result")
PUBLISHER_LAG = _gauge("publisher_lag_events", "Records of the log that were not published yet.", "partition")
PUBLISHER_STOPPED = _gauge("publisher_stopped", "1 where an event can't be published.", "partition")
PUBLISHER_STILL = _gauge(
    "publisher_stable_still_seconds",
    "How long an open transaction has held up readers of the public topic.",
    "partition",
)

# ── sources ──

SOURCE_MESSAGES = _counter(
    "source_messages", "Messages of another service, by what became of them.", "policy", "result"
)
SOURCE_LAG = _gauge("source_lag_messages", "Messages that were not received yet.", "policy", "partition")
SOURCE_STOPPED = _gauge("source_stopped", "1 where a message can't be received.", "policy", "partition")

# ── the API or the exporter ──

LAG_EVENTS = _gauge("lag_events", "Records of the log that an agent has not folded.", "agent", "partition")
LAG_SECONDS = _gauge("lag_seconds", "How long the first of them has been waiting.", "agent", "partition")
LAG_STILL_SECONDS = _gauge(
    "lag_still_seconds", "How long the agent has not moved although there are records.", "agent", "partition"
)
PARKED_STREAMS = _gauge("parked_streams", "Streams that a live view or a policy leaves out.", "view")
VIEW_STOPPED = _gauge("view_stopped", "1 where a view has stopped at an event that it can't fold.", "view")
OUTBOX_OPEN = _gauge("outbox_open", "Wishes of a policy that have not ended, without dead letters.", "policy")
OUTBOX_DEAD = _gauge("outbox_dead", "Dead letters of a policy.", "policy")
OUTBOX_UNSENT_SECONDS = _gauge(
    "outbox_unsent_seconds", "How long the oldest due wish of a kind has not been sent.", "policy", "kind"
)
PROCESSES_STUCK = _gauge(
    "processes_stuck", "Streams with a dead letter of a policy, or that it parked: they need an operator.", "policy"
)
ARCHIVE_OVERDUE = _gauge(
    "archive_overdue_records", "Records that are older than a day and not archived, where some are.", "partition"
)
CERTIFICATE_EXPIRES = _gauge(
    "certificate_expires_timestamp_seconds", "When these certificates expire, in Unix time.", "of"
)
EXPORTER_READ = _gauge(
    "exporter_read_timestamp_seconds",
    "When the exporter last read this without an error, or started, in Unix time.",
    "subject",
)
READY = _gauge("ready", "Whether a check of /health/ready is passed: 1 or 0.", "check")


class PortTaken(SamefoldError):
    """Another process listens on the port."""


def serve(settings: Settings) -> None:
    """Serve this process's metrics at `/metrics` of its port, if it has one. Raises PortTaken."""
    if settings.metrics_port is None:
        return
    try:
        server = _Server(settings.metrics_host, settings.metrics_port)
    except OSError as error:
        raise PortTaken(
            f"Port {settings.metrics_port} can't be listened on: {error.strerror}.",
            "Give another --metrics-port or SAMEFOLD_METRICS_PORT.",
        ) from error
    log.info("metrics are at http://%s:%d/metrics", settings.metrics_host, server.server_address[1])

    def must_not_end() -> None:
        server.serve_forever()
        raise PartEnded("The server of this process's metrics has ended.")  # which ends the process

    threading.Thread(target=must_not_end, name="metrics' server", daemon=True).start()


class _Server(ThreadingMixIn, TCPServer):
    """prometheus_client's own sends Python's version, and gives any number of clients a thread each, without a time limit."""

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 128

    def __init__(self, host: str, port: int) -> None:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family, address = found[0][0], found[0][4]
        self._open: dict[Any, float] = {}
        """Each connection, and since when, oldest first."""
        super().__init__(address[:2], _Scrape)  # type: ignore[arg-type]

    def process_request(self, request: Any, client_address: Any) -> None:
        if len(self._open) >= MAX_SCRAPERS:
            self._cut(next(iter(self._open)))
        self._open[request] = time.monotonic()
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        for request, since in list(self._open.items()):
            if time.monotonic() - since > SCRAPE_S:
                self._cut(request)

    def _cut(self, request: Any) -> None:
        """End a connection, whose thread then reads or writes in vain."""
        self._open.pop(request, None)
        with suppress(OSError):
            request.shutdown(socket.SHUT_RDWR)

    def shutdown_request(self, request: Any) -> None:
        self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002
        if not isinstance(sys.exception(), OSError):  # that is a client that went away
            log.exception("an answer to /metrics failed")


class _Scrape(BaseHTTPRequestHandler):
    error_content_type = "text/plain"
    error_message_format = "%(code)d"

    def do_GET(self) -> None:
        body, media_type = exposition(self.headers.get("Accept", ""))
        self.send_response(200)
        self.send_header("Content-Type", media_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def send_response(self, code: int, message: str | None = None) -> None:
        """Without the header Server."""
        self.send_response_only(code, message)
        self.send_header("X-Content-Type-Options", "nosniff")

    def log_message(self, *_: Any) -> None:
        """Scrapes are not logged."""


def exposition(accept: str = "") -> tuple[bytes, str]:
    """This process's metrics in the format that the header `Accept` asks for, and its media type."""
    encode, media_type = choose_encoder(accept)
    return encode(REGISTRY), media_type
