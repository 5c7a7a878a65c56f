"""make test: one API shows it all.

A caller's trace goes through both topics into the agent's transaction; spans are made only where an SDK records them.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from opentelemetry import context, trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from api.services import Services
from infra.log.records import Headers
from infra.log.source import read_held
from infra.log.topics import describe
from infra.observability import tracing
from infra.settings import Settings
from tests.engine.api.api import Api, Producer, ready, serving
from tools.testing.waiting import DEADLINE_S, until

TRACE = "0af7651916cd43dd8448eb211c80319c"
CALLER = "b7ad6b7169203331"
PARENT = f"00-{TRACE}-{CALLER}-01"
STATE = "congo=t61rcWkgMzE"
OPEN = {"overdraft_limit": 0, "on": "2026-01-01"}


def headers_of(world: Settings, topic_name: str) -> dict[bytes, dict[str, bytes | None]]:
    """By key, the headers of the newest record with it."""
    topic = describe(world, topic_name)
    found: dict[bytes, dict[str, bytes | None]] = {}
    for partition in range(topic.partitions):
        told: dict[int, Headers] = {}
        for records, _ in read_held(world, topic_name, partition, 0, topic.end[partition], headers=told):
            found |= {record.key: dict(told.get(record.offset, ())) for record in records if record.key}
    return found


def opened(api: Api, name: str, headers: Mapping[str, str]) -> str:
    answer = api.client.post(f"/accounts/{name}/open-account", json=OPEN, headers=headers)
    assert answer.status_code == 200, answer.text
    return f"accounts/{name}"


@contextmanager
def recording(patch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """An SDK in this process, for as long as the block runs. OpenTelemetry's own provider can be set once only."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    patch.setattr(trace, "get_tracer_provider", lambda: provider)
    try:
        yield exporter
    finally:
        provider.shutdown()


@pytest.mark.parametrize("given", [{"traceparent": PARENT, "tracestate": STATE}, {}], ids=["traced", "untraced"])
def test_without_an_sdk_the_trace_is_handed_on_as_it_came(
    api: Api, shared_world: Settings, given: dict[str, str]
) -> None:
    stream = opened(api, f"handed-on-{len(given)}", given).encode()
    for topic in (shared_world.commands_topic, shared_world.events_topic):
        assert headers_of(shared_world, topic)[stream] == {name: value.encode() for name, value in given.items()}


def test_a_pipelined_request_does_not_take_over_the_trace_and_the_id_of_the_one_before(
    api: Api, shared_world: Settings
) -> None:
    body = json.dumps(OPEN).encode()

    def request(name: str, *headers: str) -> bytes:
        head = [f"POST /accounts/{name}/open-account HTTP/1.1", "Host: here", "Content-Type: application/json"]
        return "\r\n".join([*head, f"Content-Length: {len(body)}", *headers, "", ""]).encode() + body

    with socket.create_connection(("127.0.0.1", httpx.URL(api.url).port or 0), timeout=DEADLINE_S) as connection:
        first = request("first", f"traceparent: {PARENT}", "Correlation-Id: mine")
        connection.sendall(first + request("second", "Connection: close"))
        answers = b"".join(iter(lambda: connection.recv(65_536), b""))
    assert answers.count(b"HTTP/1.1 200") == 2
    assert answers.lower().count(b"correlation-id: mine") == 1
    found = headers_of(shared_world, shared_world.events_topic)
    assert found[b"accounts/first"] == {"traceparent": PARENT.encode()}
    assert found[b"accounts/second"] == {}


def test_appends_that_are_gathered_have_each_its_own_trace(
    api: Api, shared_world: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    produced: dict[bytes, Headers] = {}

    class Silent(Producer):
        def produce(self, _topic: str, _value: bytes, *, key: bytes, headers: Headers, **_: Any) -> None:
            produced[key] = headers

    monkeypatch.setattr(Services, "gather_s", lambda _: 0.5)
    other = PARENT.replace(TRACE, "1" * 32)
    traces = {"first": None, "second": PARENT, "third": None, "fourth": other}
    with serving(shared_world.model_copy(update={"api_wait_s": 1})) as gathering, ThreadPoolExecutor(4) as clients:
        ready(gathering)
        appender = gathering.services.appender
        appender._producer.now = Silent()
        for number, (name, traceparent) in enumerate(traces.items(), 1):
            url, headers = f"{gathering.url}/accounts/{name}/open-account", {"traceparent": traceparent or ""}
            clients.submit(httpx.post, url, json=OPEN, headers=headers)
            until(lambda: len(produced) + len(appender._gathered) == number, "it is there")  # noqa: B023
        until(lambda: len(produced) == 4, "all were produced")
    found = {
        key.decode().removeprefix("accounts/"): (dict(sent).get("traceparent") or b"").decode()
        for key, sent in produced.items()
    }
    assert found == {name: traceparent or "" for name, traceparent in traces.items()}


def test_with_an_sdk_one_trace_leads_from_the_request_to_the_rows(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not tracing.recording()
    with recording(monkeypatch) as exporter:
        assert tracing.recording()
        opened(api, "traced", {"traceparent": PARENT})

        def spans() -> dict[str, ReadableSpan]:
            return {span.name: span for span in exporter.get_finished_spans()}

        names = ["POST /accounts/{stream_id}/open-account", "append", "decide", "fold"]
        until(lambda: set(names) <= spans().keys(), "all spans have ended")
        found = spans()
        told = [span.name for span in exporter.get_finished_spans()]
    assert told.count(names[0]) == 1
    post, append, decide, fold = (found[name] for name in names)
    assert {trace_id(span) for span in (post, append, decide, fold)} == {TRACE}
    parents = [CALLER, span_id(post), span_id(append), span_id(decide)]
    assert [parent(span) for span in (post, append, decide, fold)] == parents
    assert [trace.format_span_id(link.context.span_id) for link in fold.links] == [span_id(decide)]
    assert post.attributes is not None
    assert post.attributes["http.response.status_code"] == 200


def test_a_batch_of_several_traces_has_one_of_its_own_and_links_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    other = PARENT.replace(TRACE, "1" * 32)
    records = [[("traceparent", parent.encode())] for parent in (PARENT, other, "nonsense")] + [[]]
    with recording(monkeypatch) as exporter:
        with tracing.of_batch("fold", records, {}):
            pass
        (fold,) = exporter.get_finished_spans()
    assert fold.parent is None
    assert {trace.format_trace_id(link.context.trace_id) for link in fold.links} == {TRACE, "1" * 32}


@pytest.mark.parametrize(
    "headers",
    [
        [("traceparent", b"nonsense")],
        [("traceparent", PARENT.encode()), ("traceparent", PARENT.encode())],
        [("traceparent", PARENT.encode() + b"-" + b"x" * 600)],
        [("traceparent", b"\xff" * 55)],
        [("traceparent", f"00-{'0' * 32}-{CALLER}-01".encode())],
        [("traceparent", None)],
        [("x-request-id", b"1")],
        [],
    ],
)
def test_headers_that_name_no_trace_are_as_good_as_none(headers: Headers) -> None:
    token = context.attach(tracing.context_of(headers))
    try:
        assert tracing.carrier() == []
    finally:
        context.detach(token)


def test_of_a_record_nothing_but_the_trace_is_handed_on() -> None:
    parent, state = ("traceparent", PARENT.encode()), ("tracestate", STATE.encode())
    long = ("tracestate", b"a=" + b"x" * 600)
    assert tracing.kept([("password", b"secret"), parent, state]) == [parent, state]
    assert tracing.kept([parent, long]) == [parent]


def trace_id(span: ReadableSpan) -> str:
    return trace.format_trace_id(span.context.trace_id)


def span_id(span: ReadableSpan) -> str:
    return trace.format_span_id(span.context.span_id)


def parent(span: ReadableSpan) -> str | None:
    return trace.format_span_id(span.parent.span_id) if span.parent else None
