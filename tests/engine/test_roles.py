"""Each role of docker-compose.yml runs by its own command line, outside of Docker, and together they are a service."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from infra.settings import Settings
from infra.testing.fixtures import ROOT
from tests.engine.front import free_port
from tests.engine.spine import until
from tests.engine.test_compose import OURS, SERVICES


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_roles_together_are_a_service(world: Settings, tmp_path: Path) -> None:
    port = free_port()
    environment = os.environ | world.environment() | {"PYTHONPATH": str(ROOT), "SAMEFOLD_API_PORT": str(port)}
    lines = {
        name: [sys.executable, "-c", "from infra.cli import main; main()", *SERVICES[name]["command"]] for name in OURS
    }
    assert set(lines) == {"topics", "migrate", "handler", "agent", "policies", "publisher", "api"}
    for once in ("topics", "migrate"):
        subprocess.run(lines[once], env=environment, check=True, timeout=60)
    with ExitStack() as running:
        log = running.enter_context((tmp_path / "log").open("w"))
        started = [
            subprocess.Popen(lines[name], env=environment, stdout=log, stderr=log)
            for name in ("handler", "agent", "policies", "publisher", "api")
        ]
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
                until(lambda: is_ready(client), "the service is ready", seconds=60)
                body, key = {"overdraft_limit": 0, "on": "2026-11-21"}, {"Idempotency-Key": '"1"'}
                assert client.post("/accounts/ada/open-account", json=body, headers=key).json()["outcome"] == "accepted"
                assert client.get("/views/balances/ada").json()["row"]["cents"] == 0
        finally:
            for process in started:
                process.send_signal(signal.SIGTERM)  # as Docker stops them
            codes = [process.wait(60) for process in started]
    assert codes == [0] * len(started), (tmp_path / "log").read_text()


def is_ready(client: httpx.Client) -> bool:
    try:
        return client.get("/health/ready").is_success
    except httpx.TransportError:
        return False
