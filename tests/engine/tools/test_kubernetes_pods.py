"""make test-all: all processes at once.

Each container of ops/kubernetes runs by its own command line, outside of a cluster, and together they are a service.

They run as in a pod: nothing but /tmp can be written, the user has no name and no home, and each has its own secret as files.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from infra.log import topics
from infra.settings import PREFIX
from tests.engine.api.front import free_port, is_ready
from tests.engine.api.tokens import Keys, bearer, key_file
from tests.engine.infra.role_worlds import RoleWorld, role_world
from tests.engine.tools.service_trees import SAMEFOLD, copy_of_the_image
from tests.engine.tools.test_kubernetes import POSTGRES_ROLES, WORKLOADS, container, environment, secret
from tests.engine.tools.test_roles import listening
from tools.dev.stack import Stack
from tools.testing.waiting import DEADLINE_S, until

POD = """
mount --bind "$TMPDIR" "$TMPDIR"
mount --bind . .
mount -o remount,bind,ro .
mount -o remount,bind,ro /
cd "$PWD"
exec unshare --user --map-user=4711 --map-group=4711 "$@"
"""
"""`sh` runs this in a mount namespace of its own, as its root; the program runs as a user that has no name."""
IN_A_POD = ["unshare", "--map-root-user", "--mount", "sh", "-ec", POD, "sh"]
OF_A_SERVICE = {"SAMEFOLD_PORT": "tcp://10.0.0.1:8000", "SAMEFOLD_API_SERVICE_HOST": "10.0.0.1"}


def has_namespaces(image: Path, folder: Path) -> bool:
    """Not on macOS, nor in a container that forbids them: there the processes run as this user, and must write as little."""
    probe = [*IN_A_POD, "sh", "-c", '! touch here 2>/dev/null && touch "$TMPDIR/here"']
    return bool(
        shutil.which("unshare")
        and subprocess.run(probe, cwd=image, env=os.environ | {"TMPDIR": str(folder)}, check=False).returncode == 0
    )


class Pods:
    """The containers of one service as processes of this machine."""

    def __init__(self, world: RoleWorld, keys: Keys, folder: Path) -> None:
        self.world = world
        self.folder = folder
        self.image = copy_of_the_image(folder / "app")
        self.port = free_port()
        (probed := folder / "probe").mkdir()
        self.uid, self.command = (4711, IN_A_POD) if has_namespaces(self.image, probed) else (os.getuid(), [])
        self.log = folder / "log"
        settings = world.admin.environment()
        same = ("_TOPIC", "_PREFIX", "_BOOTSTRAP", "PARTITIONS", "_FACTOR", "_PROTOCOL")
        self.here = {name: value for name, value in settings.items() if name.endswith(same)} | {
            "SAMEFOLD_JWT_KEYS": str(key_file(folder, keys)),
            "SAMEFOLD_METRICS_PORT": "0",
            "SAMEFOLD_API_PORT": str(self.port),
        }

    def start(self, name: str) -> subprocess.Popen[bytes]:
        mounted = self.folder / "run" / name
        (mounted / "tmp").mkdir(parents=True, exist_ok=True)
        role = self.world.role(POSTGRES_ROLES[secret(name)])
        url = f"host={self.world.stack.postgres.socket_folder} dbname={self.world.database} user={role}"
        for key, value in {"database_url": url, "kafka_sasl_password": "secret"}.items():
            (mounted / key).unlink(missing_ok=True)
            (mounted / key).write_text(value)
            (mounted / key).chmod(0o440)
        own = environment(name)
        own |= {key: value for key, value in self.here.items() if PREFIX + "KAFKA_BOOTSTRAP" in own}
        own = {key: value.replace("/run/secrets/samefold", str(mounted)) for key, value in own.items()}
        own |= {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(self.image), "TMPDIR": str(mounted / "tmp")}
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [*self.command, sys.executable, "-c", SAMEFOLD, *container(name)["args"]],
                env=own | OF_A_SERVICE | {"PATH": os.environ["PATH"]},
                cwd=self.image,
                stdout=log,
                stderr=log,
            )

    def written(self) -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in self.image.rglob("*")}


@pytest.mark.slow
def test_the_pods_together_work_and_write_nothing_but_locks(stack: Stack, tmp_path: Path) -> None:
    with role_world(stack, "template0") as world:
        keys = Keys(environment("api")["SAMEFOLD_JWT_ISSUER"], key="ES256")
        pods = Pods(world, keys, tmp_path)
        before = pods.written()
        topics.ensure(world.admin)
        world.apply()
        lasting = {}
        try:
            assert pods.start("migrate").wait(DEADLINE_S) == 0, pods.log.read_text()
            lasting["agent"] = pods.start("agent")
            # the first agent of all must have started: until then the Job is tried again
            until(lambda: pods.start("rebuild").wait(DEADLINE_S) == 0, "the rebuild is done")
            for name in WORKLOADS.keys() - {"migrate", "agent", "rebuild", "operator"}:
                lasting[name] = pods.start(name)
            with httpx.Client(base_url=f"http://127.0.0.1:{pods.port}", timeout=DEADLINE_S) as client:
                until(lambda: is_ready(str(client.base_url)), "the service is ready")
                client.headers.update(bearer(keys.token(aud=environment("api")["SAMEFOLD_JWT_AUDIENCE"])))
                body, key = {"overdraft_limit": 0, "on": "2026-11-21"}, {"Idempotency-Key": '"1"'}
                opened = client.post("/accounts/ada/open-account", json=body, headers=key)
                assert opened.json()["outcome"] == "accepted"
                assert client.get("/views/balances/ada").json()["row"]["cents"] == 0
                ports = {name: listening(process.pid) for name, process in lasting.items()}
                assert ports.pop("api") == [("0.0.0.0", pods.port)]
                assert [name for name, found in ports.items() if [host for host, _ in found] != ["0.0.0.0"]] == []
        finally:
            for process in lasting.values():
                process.send_signal(signal.SIGTERM)  # as the kubelet stops them
            codes = {name: process.wait(DEADLINE_S) for name, process in lasting.items()}
        told = pods.log.read_text()
        assert set(codes.values()) == {0}, told
        left_out = "left out, because they are a Service's of Kubernetes, and no settings: " + ", ".join(
            sorted(OF_A_SERVICE)
        )
        assert told.count(left_out) == len(lasting)
        written = [path.name for path in (tmp_path / "run").glob("*/tmp/**/*")]
        assert [name for name in written if not re.fullmatch(rf"samefold-{pods.uid}-.*\.lock", name)] == []
        assert len(written) == len(lasting)
        assert pods.written() == before
