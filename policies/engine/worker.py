"""A policy's worker: the same as that of views, but for who may fold which events.

Each event belongs to the version of the policy that was in force at its place in the log (`activations`), and only code of that
version reacts to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

from infra.database.connect import Connection
from infra.log.contract import Contract, check_contract
from infra.log.records import Record
from infra.log.rule import Reading
from infra.log.topics import Admin
from infra.processes.gathering import Window
from infra.settings import Settings
from policies.engine import activations
from policies.engine.outbox import view_of
from policies.engine.policy import Policy
from projections.engine.fold.errors import EngineStop, OtherCode
from projections.engine.live.agent import Agent
from projections.engine.live.reader import Reader
from projections.engine.live.worker import Worker
from projections.engine.store.positions import Live, Positions, read_positions
from projections.engine.views.view import POLICY

LOOK_AGAIN_S = 0.5
"""How often a policy that is not live checks whether it is."""
GATHER_MS = 50
"""How long events gather for a policy: no client waits for what it wishes, and a fetch costs the broker as much as a command."""
HELD = -1
"""In place of the live version, where the database is new to the policy: no code has it."""


class OtherVersion(OtherCode):
    """The events from an offset on belong to another version of the policy."""

    code: ClassVar[str] = "other-version"
    other_code: ClassVar[str] = "that version"

    def __init__(self, policy: Policy, version: int, *, partition: int, offset: int) -> None:
        super().__init__(
            f"From offset {offset} of partition {partition} on, version {version} of policy '{policy.name}' is in force; "
            f"this code has version {policy.version}.",
            f"Run the code that has version {version} too, until it has passed.",
            partition=partition,
            offset=offset,
        )


class PolicyWorker(Worker):
    """Folds one policy's events into wishes."""

    def __init__(self, settings: Settings, policy: Policy, name: str) -> None:
        super().__init__(settings, policy.agent, {policy.agent: view_of(policy)}, name, defers=True)
        self.policy = policy
        self.topics = [settings.policies_topic]
        self._admin = Admin(settings)
        self._activations: list[activations.Activation] = []

    def begin(self, connection: Connection, contract: Contract) -> Positions | None:
        """As that of views. Raises NotConfigured too."""
        check_contract(connection, contract)
        if source := self.policy.source:
            self.settings.source(source.name)  # without it, no messages come: let another process have the partitions
        activations.start_new(self.settings, connection, self.policy)
        return self.read(connection)

    def read(self, connection: Connection) -> Positions | None:
        """The policy's positions, live in this code's version if that is in force in some partition."""
        activations.bring_in(self.settings, connection, self._admin)
        activations.ensure_positions(connection, self.settings.events_topic, self.policy.name)
        positions = read_positions(connection, self.agent, self.settings.events_topic)
        if positions is None:
            return None
        # after the positions: an activation that came in between changed their generation
        self._activations = activations.activations_of(connection, self.policy.name)
        if any(one.log_offset is None for one in self._activations):  # a switch that is not in the log yet
            return self.read(connection)
        if self.policy.name in activations.held_policies(connection):
            return replace(positions, live={self.agent: Live(HELD, self.agent)})
        in_force = {self._in_force(partition, at.next_offset) for partition, at in positions.readings.items()}
        version = self.policy.version if self.policy.version in in_force else max(in_force)
        return replace(positions, live={self.agent: Live(version, self.agent)})

    def close(self, lane: int = 0) -> None:
        """The next connection may be to an older copy of the database, which does not fence what a switch had fenced."""
        super().close(lane)
        self._committer = None

    def own(
        self, partition: int, was: Reading, records: Sequence[Record]
    ) -> tuple[Sequence[Record], EngineStop | None]:
        """The records up to the next activation, if this code's version is in force."""
        begin, end = was.next_offset, activations.ends_at(self._activations, partition, was.next_offset)
        if (version := self._in_force(partition, begin)) != self.policy.version:
            return (), OtherVersion(self.policy, version, partition=partition, offset=begin)
        if end is None or not records or records[-1].offset < end:
            return records, None
        after = OtherVersion(self.policy, self._in_force(partition, end), partition=partition, offset=end)
        return [record for record in records if record.offset < end], after

    def _in_force(self, partition: int, offset: int) -> int:
        return activations.version_at(self._activations, partition, offset)


def policy_agent(settings: Settings, policy: Policy, name: str) -> Agent:
    """The agent that folds a policy."""
    reader = Reader(
        {policy.agent: policy.version},
        batch=settings.batch,
        window=Window(0),  # what gathers has gathered
        difference=difference,
        look_again=LOOK_AGAIN_S,
        waits=EngineStop,  # its partitions stay this process's, and what it wished before is sent
    )
    return Agent(settings, PolicyWorker(settings, policy, name), reader, name, gather_ms=GATHER_MS)


def difference(live: Mapping[str, int], code: Mapping[str, int]) -> str | None:
    """Why this code's version of the policy may not react, as text with the command to run; None if it may."""
    ((agent, wants),) = code.items()
    name, has = agent.removeprefix(POLICY), live.get(agent)
    if has == wants:
        return None
    if has == HELD:
        return str(activations.NewDatabase(name))
    if not has:
        found = "is new" if has is None else "was removed"
        return f"policy '{name}' {found}. `samefold policies switch {name}` makes it live, from that moment on."
    return (
        f"the next events of policy '{name}' belong to its version {has}, and this code has {wants}. `samefold policies` says "
        f"whether to switch to this code, to restart with newer code, or to run policies/{name}.py of version {has} until it has "
        "read them."
    )
