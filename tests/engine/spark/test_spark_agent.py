"""make test + test-all + prove: one query is quick where Spark runs; kills take longer, processes of its own minutes.

The agent on Spark: the same rows as any other fold, whatever is killed, whoever else folds, and whatever set is live.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, make_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest

from domain.accounts import AccountOpened, Details, MoneyDeposited
from infra.database.connect import connect
from infra.errors import PartEnded, SamefoldError
from infra.log import clients, topics
from infra.log.partitioner import partition_of
from infra.log.source import LogTrimmed
from infra.processes.faultpoints import AgentPoint
from infra.settings import Settings
from projections.engine.operate.verify import verify
from projections.engine.rebuild.rebuild import rebuild, resume
from projections.engine.views.core_views import all_views
from projections.engine.views.view import View
from spark_jobs.engine import agent as spark_agent
from spark_jobs.engine import stream
from spark_jobs.engine.agent import Agent
from tests.engine.bookkeeper import DAY, Bookkeeper, fold_all
from tests.engine.projections.bankviews import CORRECTED, PARKING, behind, live_table, make_tables, start_over, stopping
from tests.engine.projections.test_agent import NoteTaken
from tests.engine.spark.spark_armed import Armed, order, views_of
from tests.engine.spawned import spawned
from tests.engine.spine import beside, delete, in_a_transaction, produce, scalar, set_up
from tools.testing.fixtures import Samefold
from tools.testing.waiting import DEADLINE_S, until

if TYPE_CHECKING:
    from spark_jobs.engine.spark import Spark

ACCOUNTS = [str(number) for number in range(24)]
POINTS: list[AgentPoint] = [
    "positions read",
    "batch read",
    "compare-and-set done",
    "rows sent",
    "COMMIT sent",
    "COMMIT acknowledged",
]
DRIVERS_KILLED = 2


@dataclass
class Folding:
    """A Spark agent in a thread of the test, on the common session."""

    folder: Path
    errors: list[BaseException]

    def order(self, point: AgentPoint, action: str) -> Callable[[], bool]:
        """Whether a task has been struck."""
        return order(self.folder, point, action).exists

    def ended_with(self, kind: type[BaseException]) -> str:
        """The message of the error that ended it."""
        until(lambda: self.errors, f"it ends with {kind}")
        error = self.errors.pop()
        assert isinstance(error, kind), error
        return str(error)


Start = Callable[..., AbstractContextManager[Folding]]


@pytest.fixture
def folding(spark_engine: Spark, world: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """`with folding() as agent:` runs one, with the code of that name (`tests.engine.spark.spark_armed`)."""
    spark = spark_engine.session

    @contextmanager
    def begin(code: str = "this") -> Iterator[Folding]:
        monkeypatch.setattr(stream, "fold", Armed(tmp_path, code))
        monkeypatch.setattr(spark_agent, "agent_views", lambda _agent: dict(views_of(code)))
        agent = Agent(world, "core", "spark-agent", lambda: spark)
        with beside(agent.run, agent.stop, "agent on Spark") as errors:
            yield Folding(tmp_path, errors)

    return begin


def reach_the_end(world: Settings) -> None:
    until(lambda: behind(world) == 0, "all is folded")


def exact(world: Settings, views: Mapping[str, View] | None = None) -> None:
    """Rows, epoch, seq and command offsets are those of the plain fold of the log up to the positions."""
    assert verify(world, dict(views or all_views())).differences == 0


@pytest.fixture
def keeper(world: Settings) -> Bookkeeper:
    set_up(world)
    return Bookkeeper(world)


# ── the same rows ──


@pytest.mark.slow
def test_void_records_duplicates_holes_and_parked_streams(keeper: Bookkeeper, folding: Start) -> None:
    world = keeper.world
    views = views_of("parking")
    start_over(world, views)
    with folding("parking"):
        keeper.life(ACCOUNTS, 3)
        successor = Bookkeeper(world)
        keeper.commit("1", MoneyDeposited(cents=7, on=DAY))  # superseded: void
        keeper.flush()
        successor.garbage(0)
        produce(world, world.events_topic, 1, None, None)
        in_a_transaction(world, world.events_topic, 2, None, b"garbage")  # its marker is an offset without a record
        successor.garbage(2)
        for account in ("p1", "p2"):
            successor.commit(account, AccountOpened(overdraft_limit=0, on=DAY))
            successor.commit(account, MoneyDeposited(cents=1, on=DAY, details=Details(purpose="poison")))
            successor.commit(account, MoneyDeposited(cents=2, on=DAY))
        successor.flush()
        reach_the_end(world)
        successor.commit("p1", MoneyDeposited(cents=3, on=DAY))
        successor.flush()
        reach_the_end(world)
    exact(world, views)
    parked = scalar(world, "select array_agg(view || ' ' || stream || ' ' || since_version) from parked")
    assert sorted(parked) == sorted(f"{view} accounts/{one} 2" for view in PARKING for one in ("p1", "p2"))


# ── killed ──


@pytest.mark.slow
def test_nothing_is_lost_or_doubled_when_tasks_are_killed_before_and_after_their_commit(
    keeper: Bookkeeper, folding: Start
) -> None:
    keeper.life(ACCOUNTS, 1)
    with folding() as agent:
        for point in POINTS:
            struck = agent.order(point, "kill")
            keeper.life(ACCOUNTS, 2)
            until(struck, f"a task was killed at '{point}'")
        reach_the_end(keeper.world)
    exact(keeper.world)


def test_what_spark_takes_for_done_and_the_database_lacks_is_read_again(keeper: Bookkeeper, folding: Start) -> None:
    with folding() as agent:
        for _ in range(2):
            struck = agent.order("positions read", "away")
            keeper.life(ACCOUNTS, 1)
            until(struck, "the database was away")
            reach_the_end(keeper.world)
    exact(keeper.world)


@pytest.mark.slow
def test_a_database_that_was_set_back_is_folded_again_from_there(keeper: Bookkeeper, folding: Start) -> None:
    """As one that is restored from a backup made before the first event. Who trusted the checkpoint would not get there."""
    world = keeper.world
    with folding():
        for _ in range(3):  # when a batch is folded, Spark has written down that the one before it is done
            keeper.life(ACCOUNTS, 1)
            reach_the_end(world)
        with connect(world, "test") as db, db.transaction():
            db.execute(
                "update positions set (next_offset, epoch, seq, command_offset, generation) = (0, -1, 0, -1, %s)",
                [uuid4()],
            )
            for view in all_views():
                db.execute(f"truncate {live_table(world, view)}".encode())
        before = sum(topics.describe(world, world.events_topic).end.values())
        with load(keeper):
            until(lambda: scalar(world, "select sum(next_offset) from positions") > before, "it has folded all again")
        reach_the_end(world)
    exact(world)


@pytest.mark.slow
def test_two_that_fold_at_once_are_told_apart_by_the_fence(keeper: Bookkeeper, folding: Start) -> None:
    """The other one between a task's look at the position and its batch."""
    with folding() as agent:
        struck = agent.order("batch read", "hold")
        keeper.life(ACCOUNTS, 3)
        until(struck, "a task sleeps")
        fold_all(keeper.world)
        (agent.folder / "release").touch()
        keeper.life(ACCOUNTS, 1)
        reach_the_end(keeper.world)
    exact(keeper.world)


@pytest.mark.prove(part="chaos")
def test_faust_and_spark_take_over_from_each_other_killed_frozen_and_at_once(
    keeper: Bookkeeper, tmp_path: Path
) -> None:
    world = keeper.world
    run_on_spark = (*COMMAND, "run", "agent", "--on", "spark", "--master", "local[2,4]", "--name", "last")
    with load(keeper) as end_load:
        for number in range(DRIVERS_KILLED):
            # each is killed where it stands, when its block ends
            with process("projections.engine.live.agent", world, tmp_path, f"faust-{number}"):
                wait_for_commits_of(world, f"faust-{number}")
            with process("spark_jobs.engine.agent", world, tmp_path, f"spark-{number}"):
                wait_for_commits_of(world, f"spark-{number}")
        with (
            process("projections.engine.live.agent", world, tmp_path, "faust") as faust,
            spawned(world, tmp_path / "supervisor.log", *run_on_spark) as spark,
        ):
            wait_for_commits_of(world, "faust")
            until(lambda: "starting on Spark" in (tmp_path / "supervisor.log").read_text(), "Spark starts")
            faust.send_signal(signal.SIGSTOP)
            wait_for_commits_of(world, "last-agent-core-spark")
            faust.send_signal(signal.SIGCONT)
            wait_for_commits_of(world, "faust")
            end_load()
            reach_the_end(world)
            assert faust.poll() is None
            spark.send_signal(signal.SIGTERM)
            assert spark.wait(DEADLINE_S) == 0
    assert "ended with exit code" not in (tmp_path / "supervisor.log").read_text(), "nothing had to be started again"
    exact(world)


# ── whose views are live ──


@pytest.mark.slow
def test_old_code_holds_after_a_switch_and_new_code_goes_on(
    keeper: Bookkeeper, folding: Start, caplog: pytest.LogCaptureFixture
) -> None:
    world = keeper.world
    new = views_of("next")
    make_tables(world, new)
    caplog.set_level("INFO", "spark_jobs")
    with load(keeper) as end_load:
        with folding():
            wait_for_commits_of(world, "spark-agent")
            assert re.search(r"agent spark-agent: has all partitions, from 0:\d+,1:\d+,2:\d+,3:\d+ on", caplog.text)
            rebuild(world, ["balances"], dict(new))
            until(lambda: "holding: balances is live as v3, this code has v2" in caplog.text, "it holds")
            assert "samefold rebuild balances" in caplog.text
            was = scalar(world, "select sum(next_offset) from positions")
        end_load()
        assert scalar(world, "select sum(next_offset) from positions") == was
        assert behind(world) > 0
    with folding("next"):
        reach_the_end(world)
    exact(world, new)


# ── what ends it, and what it waits out ──


@pytest.mark.slow
def test_an_event_of_newer_code_holds_its_partition_and_the_others_go_on(
    keeper: Bookkeeper, folding: Start, caplog: pytest.LogCaptureFixture
) -> None:
    world = keeper.world
    other = next(
        n
        for n in "23456789"
        if partition_of(f"accounts/{n}", world.partitions) != partition_of("accounts/1", world.partitions)
    )
    keeper.commit("1", AccountOpened(overdraft_limit=0, on=DAY), MoneyDeposited(cents=5, on=DAY))
    keeper.commit("1", NoteTaken(DAY))  # type: ignore[arg-type]
    keeper.commit("1", MoneyDeposited(cents=5, on=DAY))
    keeper.flush()
    with folding():
        until(lambda: "unknown-event: accounts/1 has an event 'NoteTaken'" in caplog.text, "it says so")
        keeper.commit(other, AccountOpened(overdraft_limit=0, on=DAY), MoneyDeposited(cents=7, on=DAY))
        keeper.flush()
        until(lambda: scalar(world, "select sum(cents) from balances_v2") == 12, "others go on")
    assert caplog.text.count("unknown-event") == 1


@pytest.mark.slow
def test_a_defect_behind_a_micro_batch_ends_it_and_begins_no_other_query(
    keeper: Bookkeeper, folding: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    def defect(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(Agent, "_heard", defect)
    keeper.life(ACCOUNTS, 1)
    keeper.flush()
    with folding() as agent:
        assert "raised ZeroDivisionError" in agent.ended_with(PartEnded)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "gone"),
    [("stopping", set(PARKING)), pytest.param("ending", {"sums"}, marks=pytest.mark.prove(part="chaos"))],
)
def test_views_stop_alone_as_under_the_faust_agents(
    keeper: Bookkeeper, folding: Start, code: str, gone: set[str]
) -> None:
    world = keeper.world
    start_over(world, views_of(code))
    with folding(code):
        keeper.life(ACCOUNTS, 2)
        keeper.commit(ACCOUNTS[0], MoneyDeposited(cents=1, on=DAY, details=Details(purpose="poison")))
        keeper.life(ACCOUNTS, 2)
        reach_the_end(world)
        assert set(verify(world, dict(views_of(code))).stopped) == gone
        keeper.life(ACCOUNTS, 1)
        reach_the_end(world)
        resume(world, gone - {"moves"}, stopping(CORRECTED))
        keeper.life(ACCOUNTS, 1)
        reach_the_end(world)
    exact(world, {**views_of(code), **{name: stopping(CORRECTED)[name] for name in ("sums", "totals")}})


@pytest.mark.slow
def test_poison_ends_its_process_right_before_it_as_the_faust_agents(
    keeper: Bookkeeper, spark_engine: Spark, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """All of it but its own JVM: it runs on the common session."""
    keeper.commit("1", AccountOpened(overdraft_limit=0, on=DAY), MoneyDeposited(cents=5, on=DAY))
    keeper.commit("1", UNFIT())
    keeper.commit("1", MoneyDeposited(cents=5, on=DAY))
    keeper.flush()
    for name, value in keeper.world.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["agent", "--name", "one"])
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(spark_agent, "session", lambda *_: nullcontext(spark_engine.session))
    monkeypatch.setattr(spark_agent, "collect_seldom", lambda: None)
    monkeypatch.setattr(spark_agent, "_leave_soon", lambda _: None)
    monkeypatch.setattr("spark_jobs.engine.agent.logs.configure", lambda *_: None)
    monkeypatch.setattr(os, "_exit", sys.exit)
    with pytest.raises(SystemExit) as end:
        spark_agent.main()
    assert end.value.code == 1
    assert "agent one stops: unreadable-event: MoneyDeposited of accounts/1 can't be read" in caplog.text
    assert "Nothing was skipped." in caplog.text
    assert "Traceback" not in caplog.text
    assert scalar(keeper.world, "select cents from balances_v2") == 5
    exact(keeper.world)


@pytest.mark.prove(part="chaos")
def test_it_waits_out_a_database_that_drops_its_connections(keeper: Bookkeeper, folding: Start) -> None:
    world = keeper.world
    with folding():
        for _ in range(2):
            keeper.life(ACCOUNTS, 1)
            reach_the_end(world)
            with connect(world, "test") as db:
                db.execute(
                    "select pg_terminate_backend(pid) from pg_stat_activity "
                    "where application_name = 'samefold spark-agent' and datname = current_database()"
                )
    exact(world)


@pytest.mark.slow
def test_a_log_whose_beginning_is_gone_is_refused(keeper: Bookkeeper, folding: Start) -> None:
    keeper.life(ACCOUNTS, 3)
    delete(keeper.world, keeper.world.events_topic, {0: 3})
    with folding() as agent:
        assert "at 0" in agent.ended_with(LogTrimmed)


@pytest.mark.slow
def test_a_topic_made_anew_under_it_ends_it(
    keeper: Bookkeeper, folding: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spark_agent, "CHECK_S", 0.2)
    world = keeper.world
    with folding() as agent:
        keeper.life(ACCOUNTS, 1)
        reach_the_end(world)
        admin = clients.admin(world)
        admin.delete_topics([world.events_topic])[world.events_topic].result(10)
        agent.ended_with(SamefoldError)


# ── the command line ──


@pytest.mark.slow
def test_one_query_is_not_started_several_times(samefold: Samefold) -> None:
    said = samefold("run", "agent", "--on", "spark", "--count", "2")
    assert said.returncode == 2
    assert "one query has a task for each partition" in " ".join(said.stderr.replace("│", "").split())


# ── the world around ──

COMMAND = (sys.executable, "-c", "from tools.cli import main; main()")


UNFIT: Any = make_dataclass("MoneyDeposited", [("cents", str, "many")])
"""An event of a known type whose body does not fit it."""


@contextmanager
def process(module: str, world: Settings, folder: Path, name: str) -> Iterator[subprocess.Popen[bytes]]:
    """An agent's process."""
    where = ("--master", "local[2,4]") if module == "spark_jobs.engine.agent" else ()
    with spawned(world, folder / f"{name}.log", sys.executable, "-m", module, "--name", name, *where) as running:
        yield running


@contextmanager
def load(keeper: Bookkeeper) -> Iterator[Callable[[], None]]:
    """Commits all the while, until what it yields is called, or the block ends."""
    stopped = threading.Event()

    def go_on() -> None:
        while not stopped.wait(0.05):
            keeper.life(ACCOUNTS, 1)

    with beside(go_on, stopped.set, "load"):
        yield stopped.set


def wait_for_commits_of(world: Settings, name: str) -> None:
    """Until it has committed a batch, from now on: notifications tell whose session they come from."""
    with connect(world, "listener") as db, connect(world, "test") as look:
        db.execute("listen samefold_core")
        for told in db.notifies(timeout=DEADLINE_S):
            row = look.execute("select application_name from pg_stat_activity where pid = %s", [told.pid]).fetchone()
            if row == (f"samefold {name}",):
                return
    raise AssertionError(f"waited in vain for commits of {name}")
