"""make test: needs no store. Log lines: one an event, whatever the input holds, in text and in JSON."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator

import pytest
from opentelemetry import context

from infra.observability import correlation, logs, tracing

HOSTILE = "accounts/a\n2026-01-01 00:00:00,000 ERROR   all is lost\r\x1b[2J\x85\u2028\u2029\x0b\x0c\x00\ud800"
TRACE = "0af7651916cd43dd8448eb211c80319c"

Told = Callable[[], list[str]]
"""The lines that were logged since."""


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Iterator[Told]:
    before = logging.root.handlers[:], logging.root.level
    # split where any reader of lines may, not where this one does
    yield lambda: capsys.readouterr().err.removesuffix("\n").splitlines()
    logging.root.handlers[:], logging.root.level = before


def test_input_can_not_forge_a_line(told: Told) -> None:
    """Neither in a message nor in what an exception says."""
    logs.configure("INFO")
    logging.getLogger("x").info("stream %s", HOSTILE)
    (line,) = told()
    assert line.isprintable()
    fails()
    first, *others = told()
    assert first.endswith("ERROR   it failed")
    assert [line for line in others if not line.startswith("  | ")] == []
    assert "all is lost" in "".join(others)


def fails() -> None:
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        logging.getLogger("x").exception("it failed")


def test_in_json_an_event_is_an_object_on_a_line(told: Told) -> None:
    logs.configure("INFO", "json")
    logging.getLogger("x").debug("below its level")
    logging.getLogger("some.where").warning("stream %s", HOSTILE)
    fails()
    stream, failure = map(json.loads, told())
    assert stream.keys() == {"time", "level", "logger", "message"}
    assert (stream["level"], stream["logger"]) == ("WARNING", "some.where")
    assert stream["message"].startswith("stream accounts/a")
    assert "ValueError" in failure["exception"]


@pytest.mark.parametrize("form", ["text", "json"])
def test_lines_of_a_request_have_its_ids(told: Told, form: logs.Format) -> None:
    logs.configure("INFO", form)
    parent = f"00-{TRACE}-b7ad6b7169203331-01".encode()
    token = context.attach(tracing.context_of([("traceparent", parent)]))
    given = correlation.current.set('a" trace_id=0')
    try:
        logging.getLogger("x").info("it happens")
    finally:
        correlation.current.reset(given)
        context.detach(token)
    (line,) = told()
    if form == "json":
        assert json.loads(line)["trace_id"] == TRACE
        assert json.loads(line)["correlation_id"] == 'a" trace_id=0'
    else:
        assert line.endswith(f"it happens trace_id='{TRACE}' correlation_id='a\" trace_id=0'")


def test_what_goes_on_is_said_once_however_the_driver_words_it(caplog: pytest.LogCaptureFixture) -> None:
    said = logs.StatusLog(logging.getLogger("said"), "api a")
    caplog.set_level(logging.INFO, "said")
    said.wrong("kafka", "Kafka does not answer (timed out).", "away")
    said.wrong("kafka", "Kafka does not answer (refused).", "away")
    said.wrong("views", "a is live as v1")
    said.wrong("views", "a is live as v2")
    said.well("kafka", "Kafka answers again")
    said.wrong("kafka", "Kafka does not answer (refused).", "away")
    assert [record.getMessage().removeprefix("api a: ") for record in caplog.records] == [
        "Kafka does not answer (timed out).",
        "a is live as v1",
        "a is live as v2",
        "Kafka answers again",
        "Kafka does not answer (refused).",
    ]
