"""Handlers, agents, policies and the API as supervised processes that can be killed and frozen one by one."""

from __future__ import annotations

import logging
import signal
import subprocess
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, Self

from infra.errors import SamefoldError
from infra.processes import supervisor
from infra.processes.supervisor import Child, Supervisor, agents, api, handlers, policies
from infra.settings import Settings

Role = Literal["handler", "agent", "policies", "api"]

HOST = "127.0.0.1"
DIES_WITHIN_S = 10.0
JOIN_S = 30.0


class CrewGone(SamefoldError):
    """The supervisor ended by itself."""


class Crew:
    """`with Crew(settings, folder) as crew:` runs the processes; leaving the block ends them, whatever happened in it.

    `folder` gets the logs, one file each. The processes get `settings` and `environment`. Their names begin with `place`, which
    must differ between two crews that run at once. The API is included if it is given a port.
    """

    def __init__(
        self,
        settings: Settings,
        folder: Path,
        *,
        handler_count: int = 2,
        agent_count: int = 2,
        policies_count: int = 2,
        api_port: int | None = None,
        place: str = "",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.handlers = handlers(handler_count, place or settings.group_prefix)
        self.agents = agents(agent_count, place or settings.group_prefix)
        self.policies = policies(policies_count, place or settings.group_prefix)
        self.folder = folder
        self.apis = [] if api_port is None else [api(place or settings.group_prefix, HOST, api_port)]
        theirs = settings.environment() | dict(environment or {})
        self._supervisor = Supervisor([*self.handlers, *self.agents, *self.policies, *self.apis], theirs, folder)
        self._thread = threading.Thread(target=self._supervisor.run, name="supervisor", daemon=True)
        self._log: logging.Handler | None = None

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._log = logging.FileHandler(self.folder / "supervisor.log")
        self._log.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
        supervisor.log.addHandler(self._log)
        supervisor.log.propagate = False
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End the processes, in order."""
        self._supervisor.stop()
        self._thread.join(JOIN_S)
        if self._log:
            supervisor.log.removeHandler(self._log)
            supervisor.log.propagate = not supervisor.log.handlers
            self._log.close()
            self._log = None

    def members(self, role: Role) -> list[Child]:
        return {"handler": self.handlers, "agent": self.agents, "policies": self.policies, "api": self.apis}[role]

    def check(self) -> None:
        """Raises CrewGone if the supervisor has ended."""
        if not self._thread.is_alive():
            raise CrewGone("The supervisor of the demo's processes ended.", f"Their logs are in {self.folder}.")

    def kill(self, child: Child) -> int | None:
        """`kill -9`. Returns the pid of the killed process; None if there was none or it ended otherwise.

        Uses the process's handle, not its pid, so that its successor can't be killed instead.
        """
        process = child.process
        if process is None or process.poll() is not None:
            return None
        process.kill()
        try:
            code = process.wait(DIES_WITHIN_S)
        except subprocess.TimeoutExpired:
            return None
        return process.pid if code == -signal.SIGKILL else None

    def freeze(self, child: Child) -> subprocess.Popen[bytes] | None:
        """SIGSTOP. Returns the frozen process, for `thaw`; None if there is none."""
        process = child.process
        if process is None or process.poll() is not None:
            return None
        process.send_signal(signal.SIGSTOP)
        return process


def thaw(process: subprocess.Popen[bytes]) -> None:
    """SIGCONT."""
    process.send_signal(signal.SIGCONT)
