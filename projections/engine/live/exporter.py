"""`python -m projections.engine.live.exporter`: the metrics of outbox, archive and certificates, and those that an API tells too.

It queries both stores every two seconds, archive and certificates seldom, and none of them when it is scraped.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import NoReturn

from infra import tls
from infra.archive.manifest import end_of
from infra.database.connect import session
from infra.errors import SamefoldError
from infra.log import topics
from infra.observability import logs, metrics
from infra.processes.process_end import exit_code_of
from infra.settings import Settings
from projections.engine.live.lag import OUTBOX, STUCK, VIEWS, Lags, tell_lags, tell_outbox
from projections.engine.store.positions import AGENTS

log = logging.getLogger(__name__)

QUERY_S = 2.0
SELDOM_S = 60.0
OVERDUE_S = 86_400.0
REST = 19
"""How many times as long as counting the outbox took it is not counted again: that goes through all of it."""


class Exporter:
    """Updates the metrics until it is stopped. While a store is unavailable, they keep their values, and one says since when."""

    def __init__(self, settings: Settings, name: str) -> None:
        self.settings = settings
        self.name = name
        self.stopping = threading.Event()
        self._status = logs.StatusLog(log, name)
        self._admin = topics.Admin(settings)
        self._lags = Lags()

    def run(self) -> None:
        """Raises PortTaken."""
        metrics.serve(self.settings)
        # threads of their own: ten million wishes take a minute, and lag is told meanwhile
        others: dict[str, tuple[Callable[[], None], float, int]] = {
            "outbox": (self._count, QUERY_S, REST),
            "certificates and archive": (self._look, SELDOM_S, 0),
        }
        threads = [
            threading.Thread(target=self._repeat, args=(subject, *how), name=subject, daemon=True)
            for subject, how in others.items()
        ]
        for thread in threads:
            thread.start()
        self._repeat("stores", self._query)
        for thread in threads:
            thread.join(QUERY_S)

    def _repeat(self, subject: str, query: Callable[[], None], every_s: float = QUERY_S, rest: int = 0) -> None:
        read = metrics.EXPORTER_READ.labels(subject)
        read.set_to_current_time()
        while not self.stopping.is_set():
            began, pause = time.monotonic(), every_s
            try:
                query()
            except SamefoldError as error:
                self._status.wrong(subject, f"{subject}: {error}")
            else:
                self._status.well(subject, f"{subject}: read again")
                read.set_to_current_time()
                pause += (time.monotonic() - began) * rest
            self.stopping.wait(pause)

    def _count(self) -> None:
        name = f"samefold {self.name}"
        with session(self.settings, name, statement_timeout_ms=0) as connection:
            for policy, streams in connection.execute(STUCK):
                metrics.PROCESSES_STUCK.labels(policy).set(streams)
            tell_outbox(connection.execute(OUTBOX).fetchall())

    def _query(self) -> None:
        positions: dict[str, dict[int, int]] = {}
        with session(self.settings, f"samefold {self.name}") as connection:
            for agent, partition, next_offset in connection.execute(_POSITIONS, (self.settings.events_topic,)):
                positions.setdefault(agent, {})[partition] = next_offset
            views = connection.execute(VIEWS).fetchall()
        events = topics.describe(self.settings, self.settings.events_topic, admin=self._admin)
        self._lags.saw(time.monotonic(), positions, events.end)
        tell_lags(self._lags.now, views)

    def _look(self) -> None:
        """At certificates, and at records that each run of `samefold archive` has left out for a day."""
        admin, events_topic = topics.Admin(self.settings), self.settings.events_topic
        brokers = admin.ask(lambda client, within_s: client.list_topics(events_topic, within_s).brokers.values())
        for of, expires in tls.expiries(self.settings, [(one.host, one.port) for one in brokers]).items():
            metrics.CERTIFICATE_EXPIRES.labels(of).set(expires)
        events = topics.describe(self.settings, events_topic, admin=admin)
        with session(self.settings, f"samefold {self.name}") as connection:
            archived = {partition: end_of(connection, events_topic, partition).next_offset for partition in events.end}
        if any(archived.values()):
            young = topics.offsets_at(self.settings, events, int((time.time() - OVERDUE_S) * 1_000))
            for partition, end in events.end.items():
                overdue = young.get(partition, end) - archived[partition]
                metrics.ARCHIVE_OVERDUE.labels(str(partition)).set(max(overdue, 0))


_POSITIONS = f"select agent, partition, next_offset from positions where topic = %s and agent in {AGENTS}"  # noqa: S608


def main() -> NoReturn:
    """Serve until SIGTERM or SIGINT. Exit code 1 after an error."""
    parser = argparse.ArgumentParser(prog="python -m projections.engine.live.exporter")
    parser.add_argument("--name", default="exporter")
    arguments = parser.parse_args()
    settings = Settings()
    logs.configure(settings.log_level, settings.log_format)
    exporter = Exporter(settings, arguments.name)
    for number in (signal.SIGTERM, signal.SIGINT):
        # in a thread: a signal handler deadlocks when it sets an event for which its own thread is waiting
        signal.signal(number, lambda *_: threading.Thread(target=exporter.stopping.set).start())
    os._exit(exit_code_of(exporter.run, log, arguments.name))


if __name__ == "__main__":
    main()
