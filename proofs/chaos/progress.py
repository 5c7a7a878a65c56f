"""The agent's positions, read many times a second: how far they are, and that they never go back."""

from __future__ import annotations

import psycopg

from infra.database.connect import Connection, DatabaseUnavailable, connect
from infra.processes.background_thread import BackgroundThread
from infra.settings import Settings
from proofs.bank_oracle import Place, places_in

LOOK_S = 0.03


class Progress(BackgroundThread):
    """Positions of `core` by partition, as last read; what was seen to go back is in `violations`."""

    def __init__(self, settings: Settings) -> None:
        super().__init__("progress")
        self.settings = settings
        self.places = [Place()] * settings.partitions
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
        now = places_in(connection)
        if not now:
            return
        for partition, (was, place) in enumerate(zip(self.places, now, strict=True)):
            if place[:2] < was[:2] or place.epoch < was.epoch or place.command_offset < was.command_offset:
                self.violations.append(f"I9: the position of partition {partition} went from {was} to {place}")
        self.places = now
        self.looks += 1
