"""The agent as a Spark Structured Streaming query. `python -m spark_jobs.agent --agent core --master 'local[*]'`.

Same views, same positions, same compare-and-set as the Faust agent's: either may take over from the other at any moment, and both
may run at once. The database is the only truth. So a query begins at the positions, with a checkpoint made for it, which is
thrown away at its end; whatever goes wrong ends the query, and the next one begins at the positions again. The plain part of the
work, what a task does with its records, is in `stream`.
"""

from __future__ import annotations

import argparse
import logging
import os
import pickle
import random
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

from infra.database.connect import DatabaseAway
from infra.log import topics
from infra.log.clients import KafkaAway
from infra.log.source import LogTrimmed
from infra.observability import logs
from infra.processes.code_identity import CODE
from infra.processes.garbage_collector import collect_seldom
from infra.processes.process_end import Parts, exit_code_of
from infra.processes.services import Services, WrongDatabase
from infra.settings import Settings
from projections.engine.fold.errors import UnknownEvent
from projections.engine.live.reader import BACKOFF_S, BATCH_BYTES, LOOK_AGAIN_S, Newer
from projections.engine.live.startup import set_difference
from projections.engine.live.worker import Worker
from projections.engine.store.positions import Positions
from projections.engine.views.core_views import agent_views, code_set
from spark_jobs import stream, stream_source
from spark_jobs.session import first_line, session
from spark_jobs.stream import COLUMNS, TOLD, Share, Told, Verdict

log = logging.getLogger(__name__)

CHECK_S = 5.0
"""How often the topic is compared with the contract."""
LOOK_S = 0.1
"""How often the main thread looks whether the query still runs."""
LEAVE_S = 5.0
"""At the end, how long to wait for Spark."""

Session = Callable[[], Any]
"""Makes the SparkSession; called once, after Kafka and PostgreSQL have answered."""


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
        self._said = logs.StatusLog(log, f"agent {name}")

    def run(self) -> None:
        """Fold until `stop`. Raises SamefoldError."""
        log.info("agent %s: starts, on Spark", self.name)
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
        spark = self._session()
        spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", self.settings.agent_batch)
        spark.conf.set("spark.sql.execution.arrow.maxBytesPerBatch", BATCH_BYTES)
        spark.conf.set("spark.sql.streaming.stopTimeout", int(LEAVE_S * 1000))
        while (begin := self._positions(events)) is not None:
            self._query(spark, events, *begin)

    # ── before a query ──

    def _started(self) -> topics.Topic | None:
        """Wait for Kafka and PostgreSQL, then make or check the agent's start; the log's topic, None after `stop`."""
        while not self._ended.is_set():
            try:
                _, events = topics.ensure(self.settings)
                self.work.start(events)
            except (KafkaAway, DatabaseAway) as error:
                self._said.wrong("start", error.message)
                self._ended.wait(1)
            else:
                self._said.well("start", "both are there")
                return events
        return None

    def _positions(self, events: topics.Topic) -> tuple[Services, Positions] | None:
        """Where the next query begins, once its views are live and the log is there; None after `stop`."""
        while not self._ended.wait(self._backoff()):
            try:
                now = topics.describe(self.settings, events.name)
                sender = Services.of(self.settings)
                positions = self.work.positions()
            except DatabaseAway as error:
                self._said.wrong("database", error.message, "away")
                self._failures += 1
                continue
            except KafkaAway as error:
                self._said.wrong("kafka", error.message, "away")
                self._failures += 1
                continue
            self._said.well("database", "the database answers again")
            self._said.well("kafka", "Kafka answers again")
            difference = set_difference(positions.live_set if positions else {}, self.code)
            if positions is None or difference is not None:
                self._said.wrong("set", f"holding: {difference or 'the agent has no positions yet'}")
                self._failures = 0
                self._ended.wait(LOOK_AGAIN_S)
                continue
            self._said.well("set", "folding: the live set is this code's")
            topics.require_same(events, now)
            _require_reach(now, positions)
            return sender, positions
        return None

    def _backoff(self) -> float:
        """At once the first time; two that fence each other, or a broker that is away, are asked less and less often."""
        if self._failures <= 1:
            return 0.0
        longest = min(BACKOFF_S[0] * 2.0 ** min(self._failures, 10), BACKOFF_S[1])
        return random.uniform(longest / 2, longest)

    # ── a query ──

    def _query(self, spark: Any, events: topics.Topic, sender: Services, positions: Positions) -> None:
        """One query, until it must begin anew or the agent ends."""
        share = Share(CODE, sender, self._run, self.agent, self.name, dict(self._holes))
        over = threading.Event()

        def batch(frame: Any, _number: int) -> None:
            # what comes after the end is not applied; the checkpoint says it was, but nobody believes that one
            if over.is_set() or self._ended.is_set():
                return
            try:
                self._batch(frame, share, sender, over)
            except BaseException as error:  # Spark would end the query, and we would only begin another one
                self.parts.ended("micro-batch", error)

        # below a folder that the JVM removes, also when this process is killed
        within = spark.sparkContext._temp_dir
        with TemporaryDirectory(prefix="checkpoint-", dir=within, ignore_cleanup_errors=True) as checkpoint:
            source = spark.readStream.format("kafka").options(
                **stream_source.options(self.settings, positions.readings)
            )
            writer = source.load().selectExpr(*COLUMNS).writeStream.foreachBatch(batch)
            query = writer.option("checkpointLocation", Path(checkpoint).as_uri()).queryName(self.name).start()
            try:
                self._watch(query, events, over)
            finally:
                with suppress(Exception):  # it may be dead already, or Spark with it
                    query.stop()

    def _batch(self, frame: Any, share: Share, sender: Services, over: threading.Event) -> None:
        try:
            rows = frame.mapInArrow(partial(stream.fold, share), TOLD).collect()
        except Exception as error:
            self._lost(error, over)
        else:
            self._heard([pickle.loads(row.told) for row in rows], sender, over)  # noqa: S301  # our own tasks' answers

    def _watch(self, query: Any, events: topics.Topic, over: threading.Event) -> None:
        """Until the query is over, or the agent. Raises SamefoldError where the log is not the one it was."""
        check_at = time.monotonic() + CHECK_S
        while not over.wait(LOOK_S) and not self._ended.is_set():
            if not query.isActive:
                self._said.wrong(
                    "query",
                    f"the query ended, and begins again: {first_line(query.exception() or RuntimeError('without a word'))}",
                )
                self._failures += 1
                return
            if time.monotonic() > check_at:
                self._check(events)
                check_at = time.monotonic() + CHECK_S

    def _check(self, events: topics.Topic) -> None:
        """Compare the topic with the contract now and then, and notice who is away also while there is nothing to do."""
        try:
            self.work.ping()
            now = topics.describe(self.settings, events.name)
        except DatabaseAway as error:
            self._said.wrong("database", error.message, "away")
        except KafkaAway as error:
            self._said.wrong("kafka", error.message, "away")
        else:
            self._said.well("database", "the database answers again")
            self._said.well("kafka", "Kafka answers again")
            topics.require_same(events, now)

    def _heard(self, answers: Sequence[Told], sender: Services, over: threading.Event) -> None:
        """What a micro-batch came to."""
        for told in answers:
            if told.folded:
                self._failures = 0
                self._holes.pop(told.partition, None)
                self._said.well("query", "folding again")
            if told.verdict is Verdict.FOLDED:
                self._said.well(f"partition {told.partition}", f"goes on with partition {told.partition}")
        for told in answers:
            match told.verdict:
                case Verdict.FOLDED:
                    continue
                case Verdict.STOPPED if isinstance(told.error, WrongDatabase) and self._is_another(sender):
                    log.info("agent %s: PostgreSQL was started again; reading the positions", self.name)
                case Verdict.STOPPED if isinstance(told.error, UnknownEvent):
                    self._said.wrong(f"partition {told.partition}", Newer(told.error).why)
                case Verdict.STOPPED:
                    self.stop(told.error)
                case Verdict.AWAY if told.error is not None:
                    self._said.wrong("kafka" if isinstance(told.error, KafkaAway) else "database", told.error.message)
                case Verdict.HOLE if told.hole is not None:
                    at, came = told.hole
                    where = f"{self.settings.events_topic}[{told.partition}]"
                    log.info(
                        "agent %s: stands at offset %d of %s, but what came begins at %d", self.name, at, where, came
                    )
                    # if the same comes to a query that begins there, the hole is the log's own
                    self._holes[told.partition] = told.hole
                case Verdict.FENCED:
                    log.info("agent %s: others have been here; reading the positions", self.name)
                case Verdict.OTHER_SET:
                    log.info("agent %s: another set of views went live; reading the positions", self.name)
                case _:
                    raise AssertionError(told)
            self._failures += 1
            over.set()

    def _is_another(self, sender: Services) -> bool:
        """Whether this process itself would be another sender by now."""
        try:
            return Services.of(self.settings) != sender
        except (KafkaAway, DatabaseAway):
            return True

    def _lost(self, error: Exception, over: threading.Event) -> None:
        """Tasks of a micro-batch did not answer: their workers were killed, or they raised what nobody foresaw."""
        if over.is_set() or self._ended.is_set():
            return
        if isinstance(error, PythonException):
            self.stop(error)
        else:
            self._said.wrong("query", f"tasks were lost, and the query begins again: {first_line(error)}")
        self._failures += 1
        over.set()


def _require_reach(events: topics.Topic, positions: Positions) -> None:
    """Raises LogTrimmed where Kafka does not hold what comes next for some partition: the connector reads no archive."""
    for partition, reading in positions.readings.items():
        if not events.first[partition] <= reading.next_offset <= events.end[partition]:
            raise LogTrimmed(
                f"{events.name}[{partition}] holds offsets {events.first[partition]} to {events.end[partition]}, but "
                f"agent '{positions.agent}' goes on at {reading.next_offset}.",
                "Spark's connector reads Kafka alone: let `--on faust` fold what is archived, or restore the log.",
            )


def main() -> NoReturn:
    """Exit code 0 after SIGTERM or SIGINT, 1 after an error."""
    parser = argparse.ArgumentParser(prog="python -m spark_jobs.agent")
    parser.add_argument("--agent", default="core")
    parser.add_argument("--name", default="agent-spark")
    parser.add_argument("--master", default=None, help="where spark-submit does not say it")
    arguments = parser.parse_args()
    settings = Settings()
    logs.configure(settings.log_level, settings.log_format)
    if settings.log_level != "DEBUG":
        logging.getLogger("psycopg").setLevel(logging.CRITICAL)
    collect_seldom()
    # Spark's processes on this machine are our children, and take their settings from the environment
    os.environ.update(settings.environment())
    stack = ExitStack()

    def work() -> None:
        _serve(settings, arguments.agent, arguments.name, arguments.master, stack)

    code = exit_code_of(work, log, f"agent {arguments.name}")
    _leave_soon(code)
    stack.close()
    # not sys.exit: it would wait for whatever Spark still does
    os._exit(code)


def _serve(settings: Settings, agent: str, name: str, master: str | None, stack: ExitStack) -> None:
    def session_of_mine() -> Any:
        return stack.enter_context(session(f"agent {agent}", master, stream_source.session_conf()))

    def end() -> None:
        serving.stop()
        _leave_soon(0)  # also when a broker that is away keeps it waiting

    serving = Agent(settings, agent, name, session_of_mine)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: end())
    serving.run()


def _leave_soon(code: int) -> None:
    """End the process, whatever it still waits for then; dying is always safe here."""
    timer = threading.Timer(LEAVE_S, os._exit, [code])
    timer.daemon = True
    timer.start()


if __name__ == "__main__":
    main()
