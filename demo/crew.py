"""Handlers, agents, policies and the API as supervised processes that can be killed one by one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from infra.processes.supervisor import Child, agents, api, handlers, policies
from infra.settings import Settings
from proofs.kit import Supervised

Role = Literal["handler", "agent", "policies", "api"]

HOST = "127.0.0.1"


class Crew(Supervised):
    """`with Crew(settings, folder) as crew:` runs the processes; `folder` gets the logs.

    The processes get `settings` and `environment`. Their names begin with `place`, which must differ between two crews that run at
    once. The API is included if it is given a port.
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
        place = place or settings.group_prefix
        self.handlers = handlers(handler_count, place)
        self.agents = agents(agent_count, place)
        self.policies = policies(policies_count, place)
        self.apis = [] if api_port is None else [api(place, HOST, api_port)]
        children = [*self.handlers, *self.agents, *self.policies, *self.apis]
        super().__init__(children, settings.environment() | dict(environment or {}), folder)

    def members(self, role: Role) -> list[Child]:
        return {"handler": self.handlers, "agent": self.agents, "policies": self.policies, "api": self.apis}[role]
