"""make test + test-all + prove: what is code takes no store, other stores and another code take Spark.

Whoever reads the log or writes a table for another process works on the same Kafka, database, archive and code, or says so.

The executors of one Spark get other settings from their folder, and other code from their environment.
"""

from __future__ import annotations

import compileall
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from psycopg.conninfo import conninfo_to_dict

from infra.archive.jobs import archive_log
from infra.database.connect import connect
from infra.errors import SamefoldError
from infra.processes import workers
from infra.processes.code_identity import CODE, WrongCode
from infra.processes.engines import Engine, Local
from infra.settings import Settings
from projections.engine.operate.verify import verify
from projections.engine.rebuild.rebuild import rebuild
from projections.engine.rebuild.time_travel import look_back
from projections.engine.views.core_views import all_views
from spark_jobs.engine.agent import Agent
from tests.engine.bookkeeper import Bookkeeper, folded_lives
from tests.engine.projections.test_agent import is_made
from tools.dev.kafka import Kafka
from tools.testing.fixtures import ROOT, dev_env, world_of
from tools.testing.waiting import until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tools.dev.stack import Stack

ACCOUNTS = [str(number) for number in range(12)]
VIEWS = {"balances": all_views()["balances"]}

Job = Callable[[Settings, Callable[[int], Engine]], object]
JOBS: dict[str, Job] = {
    "rebuild": lambda world, engines: rebuild(world, ["balances"], all_views(), engine_for=engines),
    "time travel": lambda world, engines: look_back(world, VIEWS.values(), {}, engine_for=engines),
    "verify": lambda world, engines: verify(world, VIEWS, engine_for=engines),
    "archive": lambda world, engines: archive_log(world, engine_for=engines),
}


@pytest.fixture(scope="module")
def bank(shared_world: Settings, tmp_path_factory: pytest.TempPathFactory) -> Bookkeeper:
    """Nobody writes into its database or archive here, so that the tests may share it."""
    folder = tmp_path_factory.mktemp("bank")
    return folded_lives(shared_world.model_copy(update={"archive_url": str(folder / "archive")}), ACCOUNTS, 4)


@pytest.fixture(scope="module")
def misled(
    bank: Bookkeeper,
    spark: SparkSession,
    spark_place: Path,
    stack: Stack,
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
) -> Iterator[str]:
    """The executors have another Kafka, database or code than the driver, as the test's parameter says."""
    what = str(request.param)
    with ExitStack() as stack_of, pytest.MonkeyPatch.context() as patch:
        theirs, folder = bank.world, tmp_path_factory.mktemp(what)
        if what == "kafka":
            theirs = stack_of.enter_context(other_kafka(theirs, folder))
        elif what == "database":
            name = str(conninfo_to_dict(theirs.database)["dbname"])
            copied = stack_of.enter_context(world_of(stack, name))
            theirs = theirs.model_copy(update={"database_url": copied.database_url})
        else:
            environment = spark.sparkContext.environment
            patch.setitem(environment, "PYTHONPATH", str(older_checkout(folder)))
            patch.setitem(environment, "PYTHONSAFEPATH", "1")  # nothing from where the JVM was started
        (spark_place / "dev.env").write_text(dev_env(theirs))
        yield what


@contextmanager
def other_kafka(world: Settings, folder: Path) -> Iterator[Settings]:
    """A Kafka with topics of the same names, and a longer life in them."""
    broker = Kafka(folder / "kafka")
    broker.start()
    try:
        other = world.model_copy(update={"kafka_bootstrap": broker.bootstrap})
        until(lambda: is_made(other), "it has the topics")
        Bookkeeper(other).life(ACCOUNTS, 9)
        yield other
    finally:
        broker.stop()


def older_checkout(folder: Path) -> Path:
    """This code, but for one line of a view."""
    for package in ("domain", "projections", "infra", "spark_jobs"):
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    view = folder / "projections" / "balances.py"
    view.write_text(view.read_text() + "\n# of before\n")
    return folder


def written(world: Settings) -> list[object]:
    """What is another one when somebody has written."""
    tables = (
        "table_name, state from builds where state <> 'abandoned'",
        "agent, partition, next_offset, generation from positions",
        "path, sha256 from archive_files",
        "account, cents from balances_v2",
    )
    with connect(world, "test") as db:
        return [db.execute(f"select {columns} order by 1, 2".encode()).fetchall() for columns in tables]


@pytest.mark.slow
@pytest.mark.parametrize(
    "misled",
    ["kafka", *(pytest.param(one, marks=pytest.mark.prove(part="chaos")) for one in ("database", "code"))],
    indirect=True,
)
def test_executors_that_work_elsewhere_end_each_job_by_name_and_write_nothing(
    bank: Bookkeeper, misled: str, spark: SparkSession
) -> None:
    from spark_jobs.engine.spark import Spark

    bank.life(ACCOUNTS[:1], 1)  # what an agent has still to fold
    before = written(bank.world)
    agent: Job = lambda world, _: Agent(world, "core", "misled", lambda: spark).run()  # noqa: E731
    for job, run in {**JOBS, "agent": agent}.items():
        with pytest.raises(SamefoldError) as refused:
            run(bank.world, lambda _: Spark(spark))
        assert refused.value.code == f"wrong-{misled}", job
        assert socket.gethostname() in refused.value.message
        assert "docs/operating.md" in refused.value.hint
        assert written(bank.world) == before, job


@pytest.mark.slow
def test_a_local_worker_whose_code_was_changed_since_says_so(bank: Bookkeeper, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the parent has is told to it when it begins; what it finds itself is what lies on the disk by then."""
    monkeypatch.setattr(workers, "CODE", {**CODE, "projections/balances.py": "of before"})
    before = written(bank.world)
    for job, run in JOBS.items():
        with pytest.raises(WrongCode, match=r"other code .*: projections/balances\.py\."):
            run(bank.world, lambda _: Local(2))
        assert written(bank.world) == before, job


@pytest.mark.slow
def test_line_endings_compiled_files_and_what_python_can_not_import_make_no_other_code(tmp_path: Path) -> None:
    """Emacs leaves such a link, to no file, beside each file that is being edited."""

    def code_of(checkout: Path) -> dict[str, str]:
        told = "import json; from infra.processes.code_identity import CODE; print(json.dumps(dict(CODE)))"
        run = [sys.executable, "-P", "-c", told]
        said = subprocess.run(run, env=os.environ | {"PYTHONPATH": str(checkout)}, capture_output=True, check=True)
        return dict(json.loads(said.stdout))

    checkout = older_checkout(tmp_path / "checkout")
    older = code_of(checkout)
    assert [name for name in CODE if older[name] != CODE[name]] == ["projections/balances.py"]
    for source in checkout.rglob("*.py"):
        source.write_bytes(source.read_bytes().replace(b"\n", b"\r\n"))
    assert compileall.compile_dir(checkout, quiet=1)
    (link := checkout / "domain" / ".#accounts.py").symlink_to("somebody@here.4711")
    assert code_of(checkout) == older
    link.unlink()
    zipped = shutil.make_archive(str(tmp_path / "zipped"), "zip", checkout)
    assert code_of(Path(zipped)) == older


def test_each_module_that_decodes_folds_or_writes_is_code() -> None:
    """Whatever else they import says nothing about a row."""
    others = {"__init__", "errors", "settings", "tls"}
    others |= {f"observability/{name}" for name in ("__init__", "correlation", "logs", "metrics", "tracing")}
    others |= {
        f"processes/{name}"
        for name in (
            "__init__",
            "code_identity",
            "engines",
            "faultpoints",
            "garbage_collector",
            "gathering",
            "memory",
            "process_end",
            "time_limit",
            "workers",
        )
    }
    others |= {f"database/{name}" for name in ("__init__", "connect", "own_tables", "revisions", "roles")}
    told = (
        "import sys, projections.engine.rebuild.rebuild, projections.engine.operate.verify\n"
        "import infra.archive.jobs, spark_jobs.engine.stream\n"
        "projections.engine.views.core_views.all_views()\n"
        "for module in list(sys.modules.values()): print(getattr(module, '__file__', None) or '')"
    )
    said = subprocess.run([sys.executable, "-c", told], capture_output=True, check=True, text=True, cwd=ROOT)
    files = [Path(line) for line in said.stdout.splitlines()]
    packages = [ROOT / package for package in ("domain", "projections", "infra", "spark_jobs")]
    imported = {str(file.relative_to(ROOT)) for file in files for package in packages if file.is_relative_to(package)}
    assert {"domain/accounts.py", "domain/engine/storable.py"} <= imported
    assert imported - CODE.keys() == {f"infra/{name}.py" for name in others}
