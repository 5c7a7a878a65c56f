"""The processes under fire, all armed: handlers, agents, policies and the API under a supervisor, others on their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from infra.processes.supervisor import Child
from infra.settings import Settings
from proofs.chaos.armed import LACKING, SOCKET, Control
from proofs.kit import Supervised
from proofs.patches import ROOT
from tools.dev.process import free_ports

STOPPED = psutil.STATUS_STOPPED
FENCED = "was fenced out of its group"


class Crew(Supervised):
    """Processes run while the `with` lasts; `folder` gets their logs. Children are named as they are to Kafka and PostgreSQL."""

    def __init__(
        self, settings: Settings, control: Control, folder: Path, lacking: Mapping[str, str] | None = None
    ) -> None:
        """`lacking` names a rule that a module's processes are to lack."""
        ours = {SOCKET: str(control.path), LACKING: json.dumps(lacking or {}), "PYTHONPATH": str(ROOT)}
        self._environment = settings.environment() | ours
        self._prefix = settings.group_prefix
        self.handlers = [self._child(f"handler-{n}", "commands.handler") for n in (1, 2)]
        self.agents = [self._child(f"agent-{n}", "projections.engine.live.agent") for n in (1, 2)]
        self.policies = [self._child(f"policies-{n}", "policies.engine.process") for n in (1, 2)]
        self.members = {"handler": self.handlers, "agent": self.agents, "policies": self.policies}
        [self.api_port] = free_ports(1)
        api = Child("api", "api", ("--name", self.named("api"), "--port", str(self.api_port)))
        self._others: list[subprocess.Popen[bytes]] = []
        super().__init__([*self.handlers, *self.agents, *self.policies, api], self._environment, folder)

    def stop(self) -> None:
        for process in self._others:
            if process.poll() is None:
                process.kill()
                process.wait()
            end_of(process)
        super().stop()

    def process(self, child: Child, seconds: float = 60) -> subprocess.Popen[bytes]:
        """The child's process, waited for while it is being started again. Its next end is no reason to wait longer."""
        deadline = time.monotonic() + seconds
        while (process := child.process) is None or process.poll() is not None:
            assert time.monotonic() < deadline, f"{child.name} is not started again"
            time.sleep(0.02)  # between two polls
        child.failures = 0
        return process

    def start(self, module: str, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        """Another process, which is not started again; its name is to be `named(name)` to `control`."""
        armed = ["-m", "infra.processes.supervised", "proofs.chaos.armed", module, "--name", self.named(name)]
        return self._start(self.folder / f"{name}.log", [*armed, *arguments], stdin=subprocess.PIPE)

    def samefold(self, output: Path, *arguments: str) -> subprocess.Popen[bytes]:
        """The command line, as a process of its own whose output is in a file."""
        return self._start(output, ["-c", "from tools.cli import main; main()", *arguments], stdin=subprocess.DEVNULL)

    def _start(self, output: Path, arguments: Sequence[str], stdin: int) -> subprocess.Popen[bytes]:
        with output.open("ab") as file:
            process = subprocess.Popen(
                [sys.executable, *arguments],
                stdin=stdin,
                stdout=file,
                stderr=file,
                cwd=self.folder,
                env=os.environ | self._environment,
                start_new_session=True,
            )
        self._others.append(process)
        return process

    def ends(self) -> list[str]:
        """What processes logged that ended because they must not go on, or by a defect; being fenced out is neither."""
        return [
            f"{file.stem}: {line.strip()}"
            for file in sorted(self.folder.glob("*.log"))
            for line in file.read_text(errors="replace").splitlines()
            if (" stops: " in line or line.startswith("Traceback")) and FENCED not in line
        ]

    def named(self, name: str) -> str:
        return f"{self._prefix}-{name}"

    def role(self, child: Child | None) -> str:
        """A builder's where it is no child."""
        return next((role for role, members in self.members.items() if child in members), "builder")

    def _child(self, name: str, module: str) -> Child:
        return Child(name, "proofs.chaos.armed", (module, "--name", self.named(name)))


def end_of(process: subprocess.Popen[bytes]) -> None:
    """The pipe by which a child notices that its parent is gone."""
    if process.stdin is not None:
        process.stdin.close()


def is_stopped(process: subprocess.Popen[bytes]) -> bool:
    """Whether the kernel has it stopped."""
    try:
        return psutil.Process(process.pid).status() == STOPPED
    except psutil.NoSuchProcess:
        return False


def was_killed(process: subprocess.Popen[bytes]) -> bool:
    """Whether it is dead, and of SIGKILL."""
    return process.poll() == -signal.SIGKILL
