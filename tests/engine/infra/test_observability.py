"""make test + test-all: one API tells most, a supervisor's processes take seconds.

Metrics are documented, bounded and right; each process tells its own; correlation ids reach the commit.
"""

from __future__ import annotations

import json
import re
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil
import pytest
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.parser import text_string_to_metric_families

from api import request_metrics
from commands.client import BadCommandLine, read_lines
from commands.decision import Versioned, decide
from commands.intake import Intake, receive
from commands.writer import ReopenReason
from domain.engine.contexts import RECORDED
from infra.archive.whole_log import history_of
from infra.database.connect import DatabaseUnavailable
from infra.log.partitioner import partition_of
from infra.log.records import Command, Record, encode
from infra.observability import metrics
from infra.processes.supervisor import Supervisor, exporter, handlers
from infra.settings import Settings
from projections.engine.live.exporter import Exporter
from projections.engine.store.commit import CommitStatus
from projections.engine.views.core_views import all_views
from tests.engine.api.api import Api
from tests.engine.api.front import free_port
from tests.engine.api.test_api_health import CHECKS
from tests.engine.purse import PURSE
from tests.engine.spine import beside, open_account, produce, send, set_up
from tools.testing.fixtures import ROOT
from tools.testing.waiting import until

PAGE = (ROOT / "docs" / "observability.md").read_text()
OPEN = {"overdraft_limit": 0, "on": "2026-01-01"}
WITHDRAW = {"cents": 1, "on": "2026-01-02"}

Labels = tuple[tuple[str, str], ...]


def values(text: str) -> dict[tuple[str, Labels], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


class Counted:
    def __init__(self, api: Api) -> None:
        self._api = api
        self._before = self._now()

    def _now(self) -> dict[tuple[str, Labels], float]:
        return values(self._api.client.get("/metrics").text)

    def since(self, name: str, **labels: str) -> float:
        key = (f"samefold_{name}", tuple(sorted(labels.items())))
        return self._now().get(key, 0.0) - self._before.get(key, 0.0)


# ── the page ──


def test_the_page_has_every_metric_with_its_type_and_labels_and_no_other() -> None:
    rows = re.findall(r"^\| `(samefold_\w+)` \| (\w+) \| ([\w, ]*?) ?\| \S", PAGE, re.MULTILINE)
    documented = {name: (kind, tuple(filter(None, labels.split(", ")))) for name, kind, labels in rows}
    declared = {
        family.name: (family.type, tuple(metric._labelnames))
        for metric in vars(metrics).values()
        if isinstance(metric, MetricWrapperBase)
        for family in metric.describe()
    }
    assert documented == declared
    assert len(rows) == len(declared)


def test_the_page_names_the_values_of_labels() -> None:
    for value in (
        *CommitStatus,
        *ReopenReason,
        *RECORDED,
        "refused",
        "garbage",
        "epoch",
        "seq",
        "locked",
        "yes",
        "no",
        "unknown",
    ):
        assert f"`{value}`" in PAGE, value


# ── labels ──

HOSTILE = [
    ("GET", "/"),
    ("GET", "/nothing/here"),
    ("GET", "/accounts/%00/open-account"),
    ("POST", "/accounts/%2e%2e%2f%F0%9F%92%A5/open-account"),
    ("POST", f"/accounts/{'x' * 3000}/open-account"),
    ("POST", "/accounts/%ff/open-account"),
    ("DELETE", "/accounts/a/open-account"),
    ("BREW", "/metrics"),
    ("GET", '/views/no"such{view}\\n/1'),
    ("GET", "/outcomes/accounts/a/b"),
    ("GET", "/health/ready?x=%0Asamefold_forged%201"),
]


def test_no_input_makes_a_label(api: Api) -> None:
    """The labels of all series that hostile requests add are those of the topics and the code."""
    there = values(api.client.get("/metrics").text)  # what other tests' agents and views left in this process too
    for number in range(3):
        headers = {"Correlation-Id": f"id-{number}", "Idempotency-Key": f"key-{number}"}
        for method, path in HOSTILE:
            answer = api.client.request(method, f"{path}{number}", headers=headers, json=OPEN)
            assert answer.status_code < 500, (method, path, answer.text)
    paths = {*api.client.get("/openapi.json").json()["paths"], "/openapi.json", "/metrics"}
    allowed = {
        "le": None,
        "method": request_metrics.METHODS | {"other"},
        "route": paths | {request_metrics.UNMATCHED},
        "status": {str(status) for status in range(100, 600)},
        "agent": {view.agent for view in all_views().values()},
        "partition": {str(number) for number in range(api.services.settings.partitions)},
        "view": set(all_views()),
        "topic": set(api.services.settings.topics),
        "result": set(CommitStatus),
        "outcome": {"accepted", "rejected"},
        "appended": {"yes", "no", "unknown"},
        "check": CHECKS,
        "why": {*RECORDED, *ReopenReason, "refused", "garbage", "epoch", "seq", "locked"},
    }
    for name, labels in values(api.client.get("/metrics").text).keys() - there.keys():
        for label, value in labels:
            among = allowed[label]
            assert among is None or value in among, (name, label, value)


# ── counts ──


def test_what_happens_to_commands_is_counted_once(api: Api, shared_world: Settings) -> None:
    counted = Counted(api)
    assert api.client.post("/accounts/counted/open-account", json=OPEN).status_code == 200
    assert api.client.post("/accounts/counted/withdraw", json=WITHDRAW).status_code == 409
    produce(shared_world, shared_world.events_topic, 0, None, b"garbage")
    until(lambda: counted.since("agent_void_records_total", agent="core", why="garbage") == 1, "garbage is counted")
    assert counted.since("handler_commits_total", outcome="accepted") == 1
    assert counted.since("handler_commits_total", outcome="rejected") == 1
    assert counted.since("handler_rejections_total", why="refused") == 1
    assert counted.since("handler_batch_commands_sum") == 2
    assert counted.since("agent_commits_total", agent="core") == 2
    assert counted.since("agent_batch_commits_sum", agent="core") == 2
    assert counted.since("agent_events_total", agent="core") == 1
    # the snapshot and the balance of the account, and two outcomes
    assert counted.since("agent_rows_total", agent="core") == 4
    assert counted.since("agent_batches_total", agent="core", result="applied") >= 2
    assert counted.since("api_appends_total", appended="yes") == 2
    assert counted.since("api_outcome_seconds_count") == 2
    route = "/accounts/{stream_id}/withdraw"
    assert counted.since("http_request_seconds_count", method="POST", route=route, status="409") == 1

    def lags() -> set[float]:
        now = values(api.client.get("/metrics").text)
        return {now["samefold_lag_events", (("agent", "core"), ("partition", str(p)))] for p in range(4)}

    until(lambda: lags() == {0.0}, "the next check of the stores finds everything folded")
    now = values(api.client.get("/metrics").text)
    assert now["samefold_parked_streams", (("view", "balances"),)] == 0.0


def test_the_format_is_the_one_that_was_asked_for(api: Api) -> None:
    plain = api.client.get("/metrics")
    assert plain.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    asked = api.client.get("/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"})
    assert asked.headers["Content-Type"].startswith("application/openmetrics-text; version=1.0.0")
    assert asked.text.endswith("# EOF\n")


# ── processes ──


@pytest.mark.slow
def test_each_process_of_a_supervisor_tells_its_metrics_on_a_port_of_its_own(world: Settings) -> None:
    """The lag too, where there is no API."""
    set_up(world)
    send(world, open_account("a"))
    port = two_free_ports()
    children = [*handlers(1, "here"), exporter("here")]
    running = Supervisor(children, world.environment(), metrics_port=port)

    def now(port: int) -> dict[tuple[str, Labels], float]:
        try:
            return values(httpx.get(f"http://127.0.0.1:{port}/metrics").text)
        except httpx.TransportError:
            return {}

    def lag() -> float:
        return sum(value for (name, _), value in now(port + 1).items() if name == "samefold_lag_events")

    epochs, started = ("samefold_handler_epochs_total", ()), ("process_start_time_seconds", ())
    with beside(running.run, running.stop):
        until(lambda: now(port).get(epochs) == world.partitions, "the handler serves")
        # an opening each, and a commit: nobody folds them
        until(lambda: lag() == world.partitions + 1, "the lag is seen")
        before = now(port)[started]
        assert children[0].pid
        psutil.Process(children[0].pid).kill()
        until(lambda: now(port).get(started, before) != before, "it tells that it was started again")


def test_an_exporter_tells_when_it_last_read_and_a_failed_try_is_none(shared_world: Settings) -> None:
    exporter, tries = Exporter(shared_world, "test"), list[float | None]()

    def query() -> None:
        tries.append(
            metrics.REGISTRY.get_sample_value("samefold_exporter_read_timestamp_seconds", {"subject": "stores"})
        )
        if len(tries) == 4:
            exporter.stopping.set()
        elif len(tries) > 1:
            raise DatabaseUnavailable("It is away.", "Wait.")

    exporter._repeat("stores", query, every_s=0.01)
    at_start, read, *later = tries
    assert at_start
    assert read
    assert at_start < read
    assert later == [read, read]


def two_free_ports() -> int:
    """The first of two that lie together."""
    for _ in range(100):
        port = free_port()
        with socket.socket() as one, socket.socket() as two, suppress(OSError, OverflowError):
            one.bind(("127.0.0.1", port))
            two.bind(("127.0.0.1", port + 1))
            return port
    raise AssertionError("no two ports are free")


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(metrics.PortTaken, match=str(port)):
            metrics.serve(Settings(metrics_port=port))


# ── correlation ──


def test_a_correlation_id_goes_from_the_request_into_the_commit_and_back(api: Api, shared_world: Settings) -> None:
    given = {"Correlation-Id": "order 66, part (a)"}
    answer = api.client.post("/accounts/related/open-account", json=OPEN, headers=given)
    assert (answer.status_code, answer.headers["Correlation-Id"]) == (200, given["Correlation-Id"])
    assert api.client.post("/accounts/related/withdraw", json=WITHDRAW, headers=given).status_code == 409
    assert api.client.post("/accounts/related/withdraw", json=WITHDRAW).status_code == 409
    found = list(history_of(shared_world, "accounts/related"))
    assert [commit.get("correlation_id") for commit in found] == [given["Correlation-Id"]] * 2 + [None]
    assert "correlation_id" not in found[2], "none, and not null"


LINE = {"stream": "purse/a", "id": "f", "type": "Fill", "data": {"cents": 5, "note": ""}}
BOTH = {"correlation_id": "matter", "causation_id": "event 7"}


def commit_of(command: Command) -> dict[str, Any]:
    """The commit that the record of a command becomes, as it stands in the log."""
    value, key = encode(command), command.stream.encode()
    record = Record(partition_of(command.stream, 4), 0, 0, key, value)
    received = receive(record, Intake("topic", 4, contexts={PURSE.name: PURSE}))
    decided = decide(received, Versioned(0, PURSE.state()), epoch=0, seq=1, max_bytes=10_000)
    commit: dict[str, Any] = json.loads(decided.value)
    return commit


def test_lines_may_carry_both_ids_and_the_command_is_the_same(tmp_path: Path) -> None:
    file = tmp_path / "c.jsonl"
    file.write_text("\n".join(map(json.dumps, [LINE | BOTH, LINE])))
    related, plain = map(commit_of, read_lines(file).values())
    assert related == plain | BOTH
    assert related["outcome"] == "accepted"
    assert not BOTH.keys() & plain.keys()
    assert b"correlation" not in encode(Command("f", "purse/a", "Fill", msgspec.Raw(b"{}")))


@pytest.mark.parametrize("wrong", [{"correlation_id": "x" * 201}, {"causation_id": "a\n"}, {"causation_id": ""}])
def test_ids_that_can_not_be_kept_are_refused_at_each_door(tmp_path: Path, wrong: dict[str, str]) -> None:
    file = tmp_path / "c.jsonl"
    file.write_text(json.dumps(LINE | wrong))
    with pytest.raises(BadCommandLine, match=next(iter(wrong))):
        read_lines(file)
    given = BOTH | wrong
    body = msgspec.Raw(json.dumps(LINE["data"]).encode())
    commit = commit_of(Command("f", "purse/a", "Fill", body, None, given["correlation_id"], given["causation_id"]))
    assert commit["reason"]["code"] == "malformed"
    assert not BOTH.keys() & commit.keys()
