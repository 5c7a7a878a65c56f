"""A standalone Spark cluster out of the pip package: a master and two workers, whose executors take settings from a folder."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil

from infra.settings import PREFIX, Settings
from tools.testing.fixtures import ROOT, dev_env
from tools.testing.waiting import until


def home() -> Path:
    spec = find_spec("pyspark")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def plain_environment() -> dict[str, str]:
    """This process's, without a setting of ours or of a Spark that runs in it."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith((PREFIX, "PYSPARK_", "SPARK_", "_PYSPARK"))
    }


def runs(process: psutil.Process) -> bool:
    """Not one that has ended and waits for a parent that asks."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


HOSTS = ("127.0.0.1", "127.0.0.2")
"""Spark runs a speculative copy of a task on another host only."""


class Cluster:
    """For a `with`. `settings_for` says what the executors' settings are from now on."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Cluster:
        try:
            self._start("master.Master", "master", "--host", HOSTS[0], "--port", "0", "--webui-port", "0")
            self.url = self._told("master", r"Starting Spark master at (spark://\S+)")
            for host in HOSTS:
                where = ("--host", host, "--webui-port", "0", "--work-dir", str(self.folder / host))
                self._start("worker.Worker", host, *where, "--cores", "1", "--memory", "1g", self.url)
            for host in HOSTS:
                self._told("master", f"(Registering worker {host})")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_error: object) -> None:
        for process in reversed(self._processes):
            process.send_signal(signal.SIGTERM)
        for process in self._processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def settings_for(self, world: Settings) -> None:
        (self.folder / "dev.env").write_text(dev_env(world))

    def _start(self, kind: str, name: str, *arguments: str) -> None:
        environment = plain_environment() | {
            "SPARK_HOME": str(home()),
            "SPARK_DAEMON_MEMORY": "192m",
            "SPARK_DAEMON_JAVA_OPTS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
            "PYTHONPATH": str(ROOT),
            f"{PREFIX}DATA_DIR": str(self.folder),
        }
        command = [str(home() / "bin" / "spark-class"), f"org.apache.spark.deploy.{kind}", *arguments]
        with self._log(name).open("wb") as log:
            self._processes.append(
                subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT, cwd=self.folder)
            )

    def _told(self, name: str, pattern: str) -> str:
        until(lambda: re.search(pattern, self._log(name).read_text()) is not None, f"{name}: {pattern}")
        found = re.search(pattern, self._log(name).read_text())
        assert found is not None
        return found[1]

    def _log(self, name: str) -> Path:
        return self.folder / f"{name}.log"


SMALL = {"spark.executor.memory": "512m", "spark.executor.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"}


def spark_submit(master: str, script: str, *arguments: str, settings: Settings, cwd: Path) -> Any:
    """A script of `spark_jobs/engine/`, or of this path, as an operator runs it; the driver's settings are in its environment."""
    conf = [part for name, value in SMALL.items() for part in ("--conf", f"{name}={value}")]
    ui = ["--conf", "spark.ui.enabled=false", "--conf", "spark.driver.host=127.0.0.1"]
    return subprocess.run(
        [
            home() / "bin" / "spark-submit",
            "--master",
            master,
            *conf,
            *ui,
            ROOT / "spark_jobs" / "engine" / script,
            *arguments,
        ],
        env=plain_environment()
        | settings.environment()
        | {"PYSPARK_PYTHON": sys.executable, "PYTHONPATH": str(ROOT), "SPARK_HOME": str(home())},
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )
