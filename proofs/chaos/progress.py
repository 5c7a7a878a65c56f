"""The agents' positions, read many times a second: how far they are, and that they never go back."""

from __future__ import annotations

import psycopg

from infra.database.connect import Connection, DatabaseUnavailable, connect
from infra.processes.background_thread import BackgroundThread
from infra.settings import Settings
from proofs.bank_oracle import Place, places_in
from proofs.policy_oracle import POLICIES

LOOK_S = 0.03


class Progress(BackgroundThread):
    """Positions of `core`, and of policies, by partition, as last read; what was seen to go back is in `violations`."""

    def __init__(self, settings: Settings) -> None:
        super().__init__("progress")
        self.settings = settings
        self.places = [Place()] * settings.partitions
        self.policies = {f"policy_{policy}": self.places for policy in POLICIES}
        self.violations: list[str] = []
        self.looks = 0

    def _work(self) -> None:
        connection: Connection | None = None
        while not self._ended.wait(LOOK_S):
            try:
                connection = connection or connect(self.settings, "chaos progress")
                self._look(connection)
            except (psycopg.Error, DatabaseUnavailable):
                if connection is not None:
                    connection.close()
                    connection = None
        if connection is not None:
            connection.close()

    def _look(self, connection: Connection) -> None:
        self.places = self._looked(connection, "core", self.places)
        self.policies = {agent: self._looked(connection, agent, places) for agent, places in self.policies.items()}
        self.looks += 1

    def _looked(self, connection: Connection, agent: str, before: list[Place]) -> list[Place]:
        now = places_in(connection, agent)
        for partition, (was, place) in enumerate(zip(before, now, strict=bool(now))):
            if place[:2] < was[:2] or place.epoch < was.epoch or place.command_offset < was.command_offset:
                self.violations.append(f"I9: the position of {agent}, {partition}, went from {was} to {place}")
        return now or before
