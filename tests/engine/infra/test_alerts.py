"""make test + test-all: promtool is quick, a real Prometheus beside a service takes a minute; both must be installed.

The alerts and the dashboard of ops/: they name metrics that there are, each alert fires for its fault alone, and ends with it.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.metrics import MetricWrapperBase

from api.door import METRICS
from infra.database.connect import connect
from infra.observability import metrics
from infra.settings import Settings
from tests.engine.pages.test_behind_a_proxy import listens
from tests.engine.service.test_topics_settings import alter
from tests.engine.spawned import spawned
from tests.engine.spine import open_account, send, set_up
from tests.engine.tools.test_kubernetes import PODS, container
from tools.dev.process import free_ports
from tools.testing.fixtures import ROOT, Samefold
from tools.testing.waiting import DEADLINE_S, until

RULES = ROOT / "ops" / "prometheus" / "alerts.yml"
ALERTS: dict[str, dict[str, Any]] = {
    rule["alert"]: rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]
}
PANELS = [
    panel
    for panel in json.loads((ROOT / "ops" / "grafana" / "overview.json").read_text())["panels"]
    if panel["type"] != "row"
]
PAGE = (ROOT / "docs" / "operating.md").read_text()


def test_alerts_and_panels_name_metrics_and_labels_that_there_are() -> None:
    known = {"up": set[str](), "ALERTS": {"alertname", "alertstate"}}
    for metric in vars(metrics).values():
        for family in metric.describe() if isinstance(metric, MetricWrapperBase) else ():
            endings = {"gauge": [""], "counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"]}[family.type]
            known |= {family.name + ending: {*metric._labelnames, "le"} for ending in endings}
    known |= {
        family.name + ("_total" if family.type == "counter" else ""): set()
        for family in metrics.REGISTRY.collect()
        if family.name.startswith("process_")
    }
    asked = {name: (rule["expr"], json.dumps(rule["annotations"])) for name, rule in ALERTS.items()}
    asked |= {
        f"{panel['title']}: {target['expr']}": (target["expr"], target.get("legendFormat", ""))
        for panel in PANELS
        for target in panel["targets"]
    }
    for what, (expression, text) in asked.items():
        selected = re.findall(r"(\w+)\{(.*?)\}", expression)
        assert selected, what
        assert {name for name, _ in selected} <= known.keys(), what
        assert set(re.findall(r"\bsamefold_\w+", expression)) <= {name for name, _ in selected}, what
        for name, labels in selected:
            assert set(re.findall(r"(\w+)[=!]", labels)) <= known[name] | {"job"}, what
        labels = {"job", "instance"}.union(*(known[name] for name, _ in selected))
        grouped = [set(one.split(", ")) for one in re.findall(r"by \((.*?)\)", expression)]
        assert all(one <= labels for one in grouped), what
        shown = set(re.findall(r"\{\{ ?(?:\$labels\.)?(\w+) ?\}\}", text)) | set(re.findall(r"\$labels\.(\w+)", text))
        assert shown - {"value"} <= (grouped[0] if grouped else labels), what


def test_each_alert_has_its_words_and_its_section_and_each_section_its_alert() -> None:
    of_alerts = PAGE.partition("\n## Alerts\n")[2].partition("\n## ")[0]
    assert re.findall(r"^### (\w+)$", of_alerts, re.MULTILINE) == [*ALERTS]
    for name, rule in ALERTS.items():
        assert rule["for"]
        assert rule["labels"]["severity"] in ("critical", "warning")
        words = rule["annotations"]
        assert words.keys() == {"summary", "description", "runbook"}
        assert words["runbook"] == f"docs/operating.md#{name.lower()}"
        assert all(text.endswith(".") for text in (words["summary"], words["description"]))


def program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.fail(
            f"{name} is not installed: `apt-get install prometheus` (Debian, Ubuntu), `brew install prometheus`"
        )
    return found


STEP_M, STEPS = 2, 120
"""Each of three phases, well, ill and well again, has so many samples, so many minutes apart."""
OTHER = 'up{instance="other"}'
EXPORTER = 'samefold_exporter_read_timestamp_seconds{subject="stores"}'


def gauge(well: int, ill: int | str) -> str:
    return " ".join(f"{value}x{STEPS - 1}" for value in (well, ill, well))


def counter(by: int) -> str:
    """It stands still, grows, and stands still."""
    return f"0x{STEPS - 1} {by}+{by}x{STEPS - 1} {by * STEPS}x{STEPS - 1}"


def moments(ill: int | str) -> str:
    """The time of each sample, but for the ill ones."""
    return f"0+{60 * STEP_M}x{STEPS - 1} {ill}x{STEPS - 1} {120 * STEP_M * STEPS}+{60 * STEP_M}x{STEPS - 1}"


FAULTS = {
    "SamefoldTargetDown": ('up{instance="this"}', gauge(1, 0)),
    "SamefoldNoMetrics": (f"{OTHER} and {EXPORTER}", moments("_")),
    "SamefoldExporterBlind": (EXPORTER, moments(0)),
    "SamefoldExporterBlind, as there is none": (EXPORTER, moments("_")),
    "SamefoldRestarts": ('process_start_time_seconds{instance="this"}', counter(1)),
    "SamefoldNotReady": ('samefold_ready{check="database"}', gauge(1, 0)),
    "SamefoldLag": ('samefold_lag_seconds{agent="core"}', gauge(59, 61)),
    "SamefoldPartitionWithoutWriter": ('samefold_lag_still_seconds{agent="handlers", partition="2"}', gauge(29, 31)),
    "SamefoldWritersReopen": ('samefold_handler_reopenings_total{why="fenced"}', counter(3)),
    "SamefoldCommandsFailed": ('samefold_handler_rejections_total{why="failed"}', counter(1)),
    "SamefoldGarbage": ('samefold_agent_void_records_total{why="garbage"}', counter(1)),
    "SamefoldViewStopped": ('samefold_view_stopped{view="a"}', gauge(0, 1)),
    "SamefoldParked": ('samefold_parked_streams{view="a"}', gauge(0, 1)),
    "SamefoldDeadLetters": ('samefold_outbox_dead{policy="a"}', gauge(0, 1)),
    "SamefoldProcessesStuck": ('samefold_processes_stuck{policy="a"}', gauge(0, 1)),
    "SamefoldWishesUnsent": ('samefold_outbox_unsent_seconds{kind="timer"}', gauge(59, 61)),
    "SamefoldPostsUnsent": ('samefold_outbox_unsent_seconds{kind="post"}', gauge(899, 901)),
    "SamefoldEndpointUnknown": ('samefold_webhook_endpoint_unknown{endpoint="a"}', gauge(0, 1)),
    "SamefoldPublisherStopped": ('samefold_publisher_stopped{partition="2"}', gauge(0, 1)),
    "SamefoldPublisherLag": ('samefold_publisher_lag_events{partition="2"}', gauge(999, 1001)),
    "SamefoldPublicTopicHeld": ('samefold_publisher_stable_still_seconds{partition="2"}', gauge(29, 31)),
    "SamefoldSourceStopped": ('samefold_source_stopped{policy="a",partition="2"}', gauge(0, 1)),
    "SamefoldArchiveOverdue": ('samefold_archive_overdue_records{partition="2"}', gauge(0, 1)),
    "SamefoldTopicUnfit": ('samefold_topic_unfit{topic="events"}', gauge(0, 1)),
    "SamefoldCertificateExpires": (
        'samefold_certificate_expires_timestamp_seconds{of="kafka"}',
        gauge(30 * 86_400, 9 * 86_400),
    ),
}


def test_each_alert_fires_for_its_fault_alone_and_ends_with_it(tmp_path: Path) -> None:
    """Beside a process that has nothing to tell: it exports a 0 for each metric without labels."""
    assert {fault.partition(",")[0] for fault in FAULTS} == ALERTS.keys()
    unlabelled = [one for one in vars(metrics).values() if isinstance(one, MetricWrapperBase) and not one._labelnames]
    idle = {f'{family.name}{{instance="idle"}}': gauge(0, 0) for one in unlabelled for family in one.describe()}
    tests = []
    for fault, (series, values) in FAULTS.items():
        well = {OTHER: gauge(1, 1), EXPORTER: f"0+{60 * STEP_M}x{3 * STEPS}"}
        given = well | idle | dict.fromkeys(series.split(" and "), values)
        fires = [{"labels": f'{{alertname="{fault.partition(",")[0]}"}}', "value": 1}]
        expected = [
            {
                "expr": 'group by (alertname) (ALERTS{alertstate="firing"})',
                "eval_time": f"{phase * STEPS * STEP_M - 5}m",
                "exp_samples": found,
            }
            for phase, found in ((1, []), (2, fires), (3, []))
        ]
        series_given = [
            {"series": one.replace("{", '{job="samefold", '), "values": value} for one, value in given.items()
        ]
        tests.append({"interval": f"{STEP_M}m", "input_series": series_given, "promql_expr_test": expected})
    file = tmp_path / "tests.yml"
    file.write_text(yaml.safe_dump({"rule_files": [str(RULES)], "evaluation_interval": "5m", "tests": tests}))
    for arguments in (("check", "rules", RULES), ("test", "rules", file)):
        done = subprocess.run([program("promtool"), *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_page_of_kubernetes_asks_pods_that_have_metrics_and_the_api_with_its_scope(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    [text] = re.findall(r"```yaml\n(scrape_configs:.*?)```", page, re.DOTALL)
    [job] = yaml.safe_load(text)["scrape_configs"]
    assert job["oauth2"]["scopes"] == [METRICS]
    [kept] = [re.compile(one["regex"]) for one in job["relabel_configs"] if one["action"] == "keep"]
    asked = {name for name in PODS if any(kept.fullmatch(port["name"]) for port in container(name).get("ports", []))}
    assert asked == {"handler", "agent", "policies", "publisher", "exporter", "api"}
    assert job.pop("kubernetes_sd_configs"), "Debian's Prometheus is built without it"
    file = tmp_path / "prometheus.yml"
    file.write_text(yaml.safe_dump({"scrape_configs": [job]}))
    check = [program("promtool"), "check", "config", "--syntax-only", str(file)]
    done = subprocess.run(check, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


PROCESSES = {
    "handler": ("commands.handler", "--name", "h1"),
    "agent": ("projections.engine.live.agent", "--name", "a1"),
    "exporter": ("projections.engine.live.exporter", "--name", "x1"),
    "api": ("api", "--name", "i1", "--port"),
}
FAULTS_AT_ONCE = {f"Samefold{name}" for name in ("TargetDown", "PartitionWithoutWriter", "TopicUnfit", "DeadLetters")}
SILENT = {"Epochs given up, a minute", "Webhooks tried", "Until certificates expire"}
"""Panels without data, as this service has no such thing."""


@contextmanager
def prometheus(folder: Path, targets: list[str]) -> Iterator[httpx.Client]:
    """One with the page's configuration, which looks every second and tells at once what is wrong for longer."""
    rules = re.sub(r"for: \w+", "for: 1s", RULES.read_text()).replace("> 30\n", "> 3\n")
    (folder / "alerts.yml").write_text(rules)
    config = yaml.safe_load(PAGE.partition("\n## Alerts\n")[2].partition("```yaml\n")[2].partition("```")[0])
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["scrape_configs"][0]["static_configs"] = [{"targets": targets}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    [port] = free_ports(1)
    command = [program("prometheus"), f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    with (folder / "log").open("wb") as log:
        running = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}/api/v1/", timeout=DEADLINE_S) as client:
            until(lambda: listens(port) or running.poll() is not None, "Prometheus listens")
            assert running.poll() is None, (folder / "log").read_text()
            until(lambda: client.get(f"http://127.0.0.1:{port}/-/ready").is_success, "Prometheus is ready")
            yield client
    finally:
        running.terminate()
        running.wait(DEADLINE_S)


@pytest.mark.slow
def test_prometheus_beside_a_service_tells_faults_and_their_end(
    world: Settings, tmp_path: Path, samefold: Samefold
) -> None:
    set_up(world)
    with connect(world, "test") as db:
        db.execute("insert into activations (policy, number, version, positions) values ('gone', 1, 1, '{}')")
    ports = free_ports(len(PROCESSES))
    with ExitStack() as running:
        started = {}
        for (name, module), port in zip(PROCESSES.items(), ports, strict=True):
            line = [sys.executable, "-m", *module, *([str(port)] if name == "api" else [])]
            settings = world.model_copy(update={"metrics_port": port})
            started[name] = running.enter_context(spawned(settings, tmp_path / f"{name}.log", *line))
        client = running.enter_context(prometheus(tmp_path, [f"127.0.0.1:{port}" for port in ports]))

        def asked(expression: str) -> list[Any]:
            answer = client.get("query", params={"query": expression}).json()
            assert answer["status"] == "success", (expression, answer)
            found: list[Any] = answer["data"]["result"]
            return found

        def firing() -> set[str]:
            alerts = client.get("alerts").raise_for_status().json()["data"]["alerts"]
            return {one["labels"]["alertname"] for one in alerts if one["state"] == "firing"}

        def without_data() -> set[str]:
            """Panels. Rates need two samples, which a frozen process had before."""
            found = set()
            for panel in PANELS:
                expressions = [one["expr"].replace("$job", "samefold") for one in panel["targets"]]
                data = [asked(one.replace("$__rate_interval", "1h")) for one in expressions]
                if not any(data):
                    found.add(panel["title"])
            return found

        send(world, open_account("ada"))
        until(lambda: asked("sum(samefold_agent_rows_total)") and asked("min(samefold_ready) == 1"), "the service runs")
        until(lambda: len(asked("up == 1")) == len(PROCESSES) and not firing(), "all is well")
        until(lambda: "Commands decided" not in without_data(), "the handler was asked twice")
        started["handler"].send_signal(signal.SIGSTOP)
        send(world, open_account("bob"))
        alter(world, world.events_topic, retention_ms="604800000")
        with connect(world, "test") as db:
            db.execute(
                "insert into outbox (id, policy, kind, stream, partition, dead) "
                "values ('gone~1', 'gone', 'send', 'boxes/1', 0, 'refused: full')"
            )
        until(lambda: firing() >= FAULTS_AT_ONCE, "each fault has its alert")
        assert without_data() == SILENT
        started["handler"].send_signal(signal.SIGCONT)
        alter(world, world.events_topic, retention_ms="-1")
        done = samefold("outbox", "drop", "gone~1", "--yes", settings=world)
        assert done.returncode == 0, done.stdout + done.stderr
        until(lambda: not firing(), "the alerts end with the faults")
