"""The agent as a Spark Structured Streaming query. `python -m spark_jobs.engine.agent --agent core --master 'local[*]'`.

It has the views, positions and compare-and-set of the Faust agent: either may take over from the other at any moment, and both may
run at once. The database is the only truth. So a query starts at the positions, with a checkpoint of its own that is deleted at
its end. Any failure ends the query, and the next one starts at the positions again. What a task does with its records is in
`stream`.
"""

from __future__ import annotations

import argparse
import logging
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn
from uuid import uuid4

from pyspark.errors import PythonException

from infra.database.connect import DatabaseUnavailable
from infra.errors import SamefoldError
from infra.log import topics
from infra.log.clients import KafkaUnavailable
from infra.observability import logs
from infra.processes.code_identity import CODE
from infra.processes.garbage_collector import collect_seldom
from infra.processes.process_end import Parts, exit_code_of
from infra.processes.supervisor import own_secrets
from infra.settings import Settings
from projections.engine.fold.as_of import in_words
from projections.engine.fold.errors import UnknownEvent
from projections.engine.live.reader import BATCH_BYTES, LOOK_AGAIN_S, WaitForNewerCode, backoff
from projections.engine.live.startup import set_difference
from projections.engine.live.worker import Worker, check_reach
from projections.engine.store.positions import Positions
from projections.engine.views.core_views import agent_views, code_set
from spark_jobs.engine import stream
from spark_jobs.engine.services import Services, WrongDatabase
from spark_jobs.engine.session import first_line, named_error, session
from spark_jobs.engine.stream import COLUMNS, RESULT, Share, ShareResult, Status
from spark_jobs.engine.tables import register

log = logging.getLogger(__name__)

CHECK_S = 5.0
"""How often the topic is compared with the contract."""
POLL_S = 0.1
"""How often the main thread checks that the query still runs."""
MOST_RECORDS = 100_000
"""Of one micro-batch, which should not take minutes. Its tasks commit in small transactions in any case."""
LEAVE_S = 5.0
"""How long to wait for Spark at the end."""

Session = Callable[[], Any]
"""Makes the SparkSession; called once, when Kafka and PostgreSQL are available."""


class Agent:
    """One agent process. `run` returns after `stop`, and raises the named error that ended it."""

    def __init__(self, settings: Settings, agent: str, name: str, session: Session) -> None:
        self.settings = settings
        self.agent = agent
        self.name = name
        self.code = code_set(agent_views(agent))
        self.work = Worker(settings, agent, agent_views(agent), name)
        self.error: BaseException | None = None
        self._session = session
        self._run = uuid4().hex
        self.parts = Parts(f"agent {name}", self.stop)
        self._ended = threading.Event()
        self._failures = 0
        self._holes: dict[int, tuple[int, int]] = {}
        self._status = logs.StatusLog(log, f"agent {name}")

    def run(self) -> None:
        """Fold until `stop`. Raises SamefoldError."""
        log.info("agent %s: starting on Spark", self.name)
        try:
            self._serve()
        finally:
            self.work.close()
        if self.error is not None:
            raise self.error

    def stop(self, error: BaseException | None = None) -> None:
        """End, with an error or cleanly; the first one counts."""
        if not self._ended.is_set():
            self.error = error
            self._ended.set()

    def _serve(self) -> None:
        events = self._started()
        if events is None:
            return
        self._topics = topics.Watch(self.settings, [events], self._status, topics.Admin(self.settings))
        spark = self._session()
        register(spark)
        spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", self.settings.batch)
        spark.conf.set("spark.sql.execution.arrow.maxBytesPerBatch", BATCH_BYTES)
        spark.conf.set("spark.sql.streaming.stopTimeout", int(LEAVE_S * 1000))
        while (begin := self._positions(events)) is not None:
            self._query(spark, *begin)

    # ── before a query ──

    def _started(self) -> topics.Topic | None:
        """Wait for Kafka and PostgreSQL, then record or check the agent's start; the log's topic, None after `stop`."""
        while not self._ended.is_set():
            try:
                _, events = topics.ensure(self.settings)
                self.work.start(events)
            except (KafkaUnavailable, DatabaseUnavailable) as error:
                self._status.wrong("start", error.message)
                self._ended.wait(1)
            else:
                self._status.well("start", "Kafka and PostgreSQL are available")
                return events
        return None

    def _positions(self, events: topics.Topic) -> tuple[Services, Positions] | None:
        """Where the next query starts, once its views are live and the log is readable; None after `stop`."""
        while not self._ended.wait(backoff(self._failures)):
            try:
                now = topics.describe(self.settings, events.name)
                sender = Services.of(self.settings)
                positions = self.work.positions()
                archived = self.work.archived(events.name)
            except (DatabaseUnavailable, KafkaUnavailable) as error:
                self._unavailable(error)
                self._failures += 1
                continue
            self._available()
            difference = set_difference(positions.live_set if positions else {}, self.code)
            if positions is None or difference is not None:
                self._status.wrong("set", f"holding: {difference or 'the agent has no positions yet'}")
                self._failures = 0
                self._ended.wait(LOOK_AGAIN_S)
                continue
            self._status.well("set", "folding: the live set is this code's")
            topics.require_same(events, now)
            check_reach(now, positions, archived)
            return sender, positions
        return None

    # ── a query ──

    def _query(self, spark: Any, sender: Services, positions: Positions) -> None:
        """Run one query, until it must start again or the agent ends."""
        share = Share(CODE, sender, self._run, self.agent, self.name, dict(self._holes))
        over = threading.Event()

        def batch(frame: Any, _number: int) -> None:
            # not applied after the end; the checkpoint records it as done, but is deleted
            if over.is_set() or self._ended.is_set():
                return
            try:
                self._batch(frame, share, sender, over)
            except BaseException as error:  # Spark would only end the query, and the next one would start
                self.parts.ended("micro-batch", error)

        # in a folder that the JVM removes, also when this process is killed
        within = spark.sparkContext._temp_dir
        with TemporaryDirectory(prefix="checkpoint-", dir=within, ignore_cleanup_errors=True) as checkpoint:
            starting = {partition: reading.next_offset for partition, reading in positions.readings.items()}
            source = spark.readStream.format("samefold").options(
                read="records", starting=in_words(starting), most=MOST_RECORDS
            )
            rows = source.schema(COLUMNS).load()
            writer = rows.writeStream.foreachBatch(batch)
            query = writer.option("checkpointLocation", Path(checkpoint).as_uri()).queryName(self.name).start()
            if not self._failures:
                log.info("agent %s: has all partitions, from %s on", self.name, in_words(starting))
            try:
                self._watch(query, over)
            finally:
                with suppress(Exception):  # the query or Spark may have ended
                    query.stop()

    def _batch(self, frame: Any, share: Share, sender: Services, over: threading.Event) -> None:
        try:
            rows = frame.mapInArrow(partial(stream.fold, share), RESULT).collect()
        except Exception as error:
            self._lost(error, over)
        else:
            self._heard([pickle.loads(row.result) for row in rows], sender, over)  # noqa: S301  # our own tasks' results

    def _watch(self, query: Any, over: threading.Event) -> None:
        """Wait until the query or the agent ends. Raises SamefoldError when the log is another one."""
        check_at = time.monotonic() + CHECK_S
        while not over.wait(POLL_S) and not self._ended.is_set():
            if not query.isActive:
                self._status.wrong(
                    "query",
                    f"the query ended and is started again: {first_line(query.exception() or RuntimeError('no reason given'))}",
                )
                self._failures += 1
                return
            if time.monotonic() > check_at:
                self._check()
                check_at = time.monotonic() + CHECK_S

    def _check(self) -> None:
        """Compare the topic with the contract, and notice also without traffic that a service is unavailable."""
        try:
            self.work.ping()
            self._topics.check()
        except (DatabaseUnavailable, KafkaUnavailable) as error:
            self._unavailable(error)
        else:
            self._available()

    def _heard(self, results: Sequence[ShareResult], sender: Services, over: threading.Event) -> None:
        for result in results:
            if result.folded:
                self._failures = 0
                self._holes.pop(result.partition, None)
                self._status.well("query", "folding again")
            if result.status is Status.FOLDED:
                self._status.well(f"partition {result.partition}", f"folding partition {result.partition} again")
        for result in results:
            match result.status:
                case Status.FOLDED:
                    continue
                case Status.STOPPED if isinstance(result.error, WrongDatabase) and self._is_another(sender):
                    log.info("agent %s: PostgreSQL was restarted; reading the positions", self.name)
                case Status.STOPPED if isinstance(result.error, DatabaseUnavailable | KafkaUnavailable):
                    self._unavailable(result.error)
                case Status.STOPPED if isinstance(result.error, UnknownEvent):
                    self._status.wrong(f"partition {result.partition}", WaitForNewerCode(result.error).why)
                case Status.STOPPED:
                    self.stop(result.error)
                case Status.HOLE if result.hole is not None:
                    at, came = result.hole
                    where = f"{self.settings.events_topic}[{result.partition}]"
                    log.info(
                        "agent %s: its position is offset %d of %s, but the records begin at %d",
                        self.name,
                        at,
                        where,
                        came,
                    )
                    # if a query from that position gets the same, the hole is the log's own
                    self._holes[result.partition] = result.hole
                case Status.FENCED:
                    log.info("agent %s: fenced by another agent; reading the positions", self.name)
                case Status.OTHER_SET:
                    log.info("agent %s: other views went live; reading the positions", self.name)
                case _:
                    raise AssertionError(result)
            self._failures += 1
            over.set()

    def _unavailable(self, error: SamefoldError) -> None:
        self._status.wrong("kafka" if isinstance(error, KafkaUnavailable) else "database", error.message, "unavailable")

    def _available(self) -> None:
        self._status.well("database", "the database is available again")
        self._status.well("kafka", "Kafka is available again")

    def _is_another(self, sender: Services) -> bool:
        """Whether this process itself sees other services by now."""
        try:
            return Services.of(self.settings) != sender
        except (KafkaUnavailable, DatabaseUnavailable):
            return True

    def _lost(self, error: Exception, over: threading.Event) -> None:
        """Handle tasks without a result: their processes were killed, they could not read the log, or they raised a defect."""
        if over.is_set() or self._ended.is_set():
            return
        named = named_error(error)
        if isinstance(named, DatabaseUnavailable | KafkaUnavailable):
            self._unavailable(named)
        elif named or isinstance(error, PythonException):
            self.stop(named or error)
        else:
            self._status.wrong("query", f"tasks were lost, and the query is started again: {first_line(error)}")
        self._failures += 1
        over.set()


def main() -> NoReturn:
    """Exit code 0 after SIGTERM or SIGINT, 1 after an error."""
    parser = argparse.ArgumentParser(prog="python -m spark_jobs.engine.agent")
    parser.add_argument("--agent", default="core")
    parser.add_argument("--name", default="agent-spark")
    parser.add_argument("--master", default=None, help="Spark's master; by default that of spark-submit")
    arguments = parser.parse_args()
    settings = Settings()
    logs.configure(settings.log_level, settings.log_format)
    if settings.log_level != "DEBUG":
        logging.getLogger("psycopg").setLevel(logging.CRITICAL)
    collect_seldom()
    # Spark's local processes are our children and take their settings from the environment
    os.environ.update(own_secrets("spark_jobs.engine.agent", settings.environment()))
    stack = ExitStack()

    def start() -> Any:
        return stack.enter_context(session(f"agent {arguments.agent}", arguments.master))

    def work() -> None:
        serving = Agent(settings, arguments.agent, arguments.name, start)

        def end(*_: object) -> None:
            serving.stop()
            _leave_soon(0)  # also while an unavailable broker blocks it

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, end)
        serving.run()

    code = exit_code_of(work, log, f"agent {arguments.name}")
    _leave_soon(code)
    stack.close()
    # not sys.exit: it would wait for Spark's threads
    os._exit(code)


def _leave_soon(code: int) -> None:
    """End the process after LEAVE_S, even if it still waits: a kill is always safe here."""
    timer = threading.Timer(LEAVE_S, os._exit, [code])
    timer.daemon = True
    timer.start()


if __name__ == "__main__":
    main()
