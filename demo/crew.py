"""Handlers, agents and the API as a crew: real processes, supervised by a thread, to be killed and frozen one by one."""

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
from infra.processes.supervisor import Child, Supervisor, agents, api, handlers
from infra.settings import Settings

Role = Literal["handler", "agent", "api"]

HOST = "127.0.0.1"
DIES_WITHIN_S = 10.0
JOIN_S = 30.0


class CrewGone(SamefoldError):
    """The supervisor of the crew ended by itself."""


class Crew:
    """`with Crew(settings, folder) as crew:` runs the processes; leaving the block ends them, whatever happened in it.

    `folder` gets their logs, one file each, and the supervisor's. They see what `settings` says and `environment`. Their names
    begin with `place`; two crews at a time need two. The API is among them where it is given a port.
    """

    def __init__(
        self,
        settings: Settings,
        folder: Path,
        *,
        handler_count: int = 2,
        agent_count: int = 2,
        api_port: int | None = None,
        place: str = "",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.handlers = handlers(handler_count, place or settings.group_prefix)
        self.agents = agents(agent_count, place or settings.group_prefix)
        self.folder = folder
        self.apis = [] if api_port is None else [api(place or settings.group_prefix, HOST, api_port)]
        theirs = settings.environment() | dict(environment or {})
        self._supervisor = Supervisor([*self.handlers, *self.agents, *self.apis], theirs, folder)
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
        return {"handler": self.handlers, "agent": self.agents, "api": self.apis}[role]

    def check(self) -> None:
        """Raises CrewGone when nobody looks after the processes any more."""
        if not self._thread.is_alive():
            raise CrewGone("The supervisor of the demo's processes ended.", f"Their logs are in {self.folder}.")

    def kill(self, child: Child) -> int | None:
        """`kill -9`: the pid of the process that died of it, None where there was none, or it ended otherwise.

        The process is held by its handle, not by a remembered pid, so that a successor can't be hit in its stead.
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
        """SIGSTOP: the frozen process, to be thawed; None where there is none."""
        process = child.process
        if process is None or process.poll() is not None:
            return None
        process.send_signal(signal.SIGSTOP)
        return process


def thaw(process: subprocess.Popen[bytes]) -> None:
    """SIGCONT: it goes on as if nothing had happened."""
    process.send_signal(signal.SIGCONT)
