"""make test-all: all services at once.

Each service of docker-compose.yml runs by its own command line, outside of Docker, and together they are a service.

They run as in the image: on a copy of what it holds, without a home, each as its role in PostgreSQL, with its own secret as a file.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import httpx
import psutil
import pytest

from tests.engine.api.front import free_port, is_ready
from tests.engine.infra.role_worlds import role_world
from tests.engine.tools.service_trees import SAMEFOLD, copy_of_the_image
from tests.engine.tools.test_compose import OURS, SERVICES, make_secrets, mounted
from tools.dev.stack import Stack
from tools.testing.waiting import DEADLINE_S, until


@pytest.mark.slow
def test_the_services_together_work_and_write_nothing_but_locks(stack: Stack, tmp_path: Path) -> None:
    with role_world(stack, "template0", "samefold") as world:
        image = copy_of_the_image(tmp_path / "app")
        before = {path: path.stat().st_mtime_ns for path in image.rglob("*")}
        secrets = make_secrets(tmp_path)
        for name in secrets:
            here = f"host={stack.postgres.socket_folder} dbname={world.database}"
            secrets[name].write_text(secrets[name].read_text().replace("host=postgres dbname=samefold", here))
        port = free_port()
        settings = world.admin.environment()
        inherited = {
            name: settings[name]
            for name in settings
            if name.endswith(("_TOPIC", "_PREFIX", "_BOOTSTRAP", "PARTITIONS"))
        }
        (tmp_path / "bin").mkdir()
        program = tmp_path / "bin" / "samefold"
        program.write_text(f"#!/bin/sh\nexec {sys.executable} -c '{SAMEFOLD}' \"$@\"\n")
        program.chmod(0o755)

        def started(name: str) -> subprocess.Popen[bytes]:
            folder = tmp_path / "run" / name
            (folder / "tmp").mkdir(parents=True)
            for target, source in mounted(name).items():
                (folder / target).write_bytes(secrets[source].read_bytes())
                (folder / target).chmod(0o600)
            own = {key: str(value) for key, value in SERVICES[name]["environment"].items()} | inherited
            own = {key: value.replace("/run/secrets", str(folder)) for key, value in own.items()}
            own |= {"SAMEFOLD_METRICS_PORT": "0", "SAMEFOLD_API_PORT": str(port)}
            own |= {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(image), "TMPDIR": str(folder / "tmp")}
            own |= {"PATH": f"{program.parent}:{os.environ['PATH']}", "HOME": "/nonexistent"}
            words = [word.replace("/run/secrets", str(folder)).replace("$$", "$") for word in SERVICES[name]["command"]]
            return subprocess.Popen(
                [*SERVICES[name].get("entrypoint", ["samefold"]), *words], env=own, cwd=image, stdout=log, stderr=log
            )

        with ExitStack() as running:
            log = running.enter_context((tmp_path / "log").open("w"))
            for once in ("topics", "roles", "migrate"):
                assert started(once).wait(60) == 0, (tmp_path / "log").read_text()
            lasting = [name for name in OURS if "restart" in OURS[name]]
            assert set(lasting) == {"handler", "agent", "policies", "publisher", "api"}
            processes = [started(name) for name in lasting]
            try:
                with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=DEADLINE_S) as client:
                    until(lambda: is_ready(str(client.base_url)), "the service is ready")
                    body, key = {"overdraft_limit": 0, "on": "2026-11-21"}, {"Idempotency-Key": '"1"'}
                    opened = client.post("/accounts/ada/open-account", json=body, headers=key)
                    assert opened.json()["outcome"] == "accepted"
                    ports = {name: listening(process.pid) for name, process in zip(lasting, processes, strict=True)}
                    assert ports.pop("api") == [("0.0.0.0", port)]
                    assert [(name, len(found)) for name, found in ports.items() if len(found) != 1] == []  # of metrics
                    assert client.get("/views/balances/ada").json()["row"]["cents"] == 0
            finally:
                for process in processes:
                    process.send_signal(signal.SIGTERM)  # as Docker stops them
                codes = [process.wait(60) for process in processes]
        told = (tmp_path / "log").read_text()
        assert codes == [0] * len(processes), told
        written = {path.suffix for path in (tmp_path / "run").glob("*/tmp/**/*")}
        assert written == {".lock"}
        assert {path: path.stat().st_mtime_ns for path in image.rglob("*")} == before
        passwords = {secrets[name].read_text().rpartition("=")[2].strip() for name in secrets}
        assert not [password for password in passwords if password in told]


def listening(pid: int) -> list[tuple[str, int]]:
    """Addresses and ports of a process and its children."""
    processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    found = [one for process in processes for one in process.net_connections() if one.status == psutil.CONN_LISTEN]
    return [(one.laddr.ip, one.laddr.port) for one in found]
