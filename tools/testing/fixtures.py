"""What tests share: `stack`, the embedded Kafka and PostgreSQL, `world`, a piece of it that is one test's alone, and `spark`.

With `pytest -n 2 --dist loadgroup` each worker has a stack of its own; one worker runs the tests that share a module's fixture,
Spark or the service.
"""

import atexit
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from io import StringIO
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

import hypothesis
import pytest

from infra.settings import PREFIX, Settings
from tools.testing.waiting import DEADLINE_S

if TYPE_CHECKING:
    from confluent_kafka.admin import AdminClient
    from pyspark.sql import SparkSession

    from spark_jobs.engine.spark import Spark
    from tools.dev.stack import Stack

StackT = TypeVar("StackT", bound="Stack")
SEED = int(os.environ.setdefault("TEST_SEED", str(random.randrange(2**32))))
RUN = os.environ.setdefault("TEST_RUN", str(os.getpid()))
"""Both also in the environment, from which the workers of `pytest -n` take them."""
ROOT = Path(__file__).parents[2]
MEMORY = Path("/dev/shm")
ENOUGH_MEMORY = 2 * 2**30
TEMPLATE = "migrated"

_worlds = count(1)


hypothesis.settings.register_profile("full", deadline=None)
hypothesis.settings.register_profile("quick", max_examples=30, deadline=None)
hypothesis.settings.load_profile("full")
"""`make test` looks at so many examples of each property, `make test-all` at Hypothesis's 100; a busy machine fails neither."""


@pytest.fixture(scope="session")
def _nowhere(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("nowhere")


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, _nowhere: Path) -> None:
    """A developer's own settings (environment, .env, dev.env) must not decide a test, which starts from the printed seed."""
    monkeypatch.chdir(_nowhere)
    for name in [name for name in os.environ if name.startswith(PREFIX)]:
        monkeypatch.delenv(name)
    random.seed(SEED)


class Samefold(Protocol):
    """`samefold("dev", "status", settings=world)` runs a command; the result is as of `subprocess.run`.

    It runs in the test's own process, since starting one takes longer than most commands do; or as a process of its own, for
    `process_s` seconds at most.
    """

    def __call__(
        self, *arguments: str, settings: Settings | None = None, given: str = "", process_s: float | None = None
    ) -> subprocess.CompletedProcess[str]: ...


@pytest.fixture
def samefold(tmp_path: Path) -> Samefold:
    """In an empty working directory, with nothing configured but what `settings` says."""

    def run(
        *arguments: str, settings: Settings | None = None, given: str = "", process_s: float | None = None
    ) -> subprocess.CompletedProcess[str]:
        environment = settings.environment() if settings else {}
        if process_s is None:
            return _in_this_process(tmp_path, arguments, environment, given)
        return subprocess.run(
            command(*arguments),
            env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
            cwd=tmp_path,
            input=given,
            timeout=process_s,
            capture_output=True,
            text=True,
            check=False,
        )

    return run


def command(*arguments: str) -> list[str]:
    """The command line as a process, for an environment whose PYTHONPATH is ROOT."""
    return [sys.executable, "-c", "from tools.cli import main; main()", *arguments]


def _in_this_process(
    folder: Path, arguments: tuple[str, ...], environment: dict[str, str], given: str
) -> subprocess.CompletedProcess[str]:
    from tools.cli import main

    stdout, stderr = StringIO(), StringIO()
    code: object = 0
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(stdout), redirect_stderr(stderr):
        patch.chdir(folder)
        patch.setattr(sys, "argv", ["samefold", *arguments])
        patch.setattr(sys, "stdin", StringIO(given))
        for name, value in environment.items():
            patch.setenv(name, value)
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
    assert isinstance(code, int), code
    return subprocess.CompletedProcess(arguments, code, stdout.getvalue(), stderr.getvalue())


@pytest.fixture(scope="session")
def stack() -> Iterator["Stack"]:
    """One Kafka and one PostgreSQL for the whole run."""
    from tools.dev.stack import Stack

    with started(Stack) as stack:
        yield stack


@contextmanager
def started(make: Callable[[Path], StackT]) -> Iterator[StackT]:
    """A stack that runs in a folder with a short name, which is gone afterwards."""
    from tools.dev.process import StartFailed

    folder = Path(tempfile.mkdtemp(prefix=f"samefold-{RUN}-", dir=in_memory()))
    folder.chmod(0o711)  # where root may not make a user namespace, PostgreSQL runs as nobody and must get in
    stack = make(folder)
    # The JVM's second compiler would take twice what the tests' own work in the broker does.
    stack.kafka.jvm = (*stack.kafka.jvm, "-XX:TieredStopAtLevel=1")

    def remove() -> None:
        stack.down()
        shutil.rmtree(folder, ignore_errors=True)

    # Also for ways out that skip fixtures, such as an exit in the middle of a test.
    atexit.register(remove)
    with suppress(StartFailed):  # on a busy machine it may take longer than a start may: the next call waits on
        stack.up()
    stack.up()
    yield stack
    remove()
    atexit.unregister(remove)


def in_memory() -> Path | None:
    """Where writing costs nothing, since nothing of the stack need outlive the machine; None where there is too little room."""
    return MEMORY if MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > ENOUGH_MEMORY else None


@pytest.fixture(scope="session")
def migrated(stack: "Stack") -> str:
    """The name of a database with all migrations, of which others are copies: migrating takes longer than copying."""
    from tools.migrations import migrate

    _execute(stack, f'create database "{TEMPLATE}"')
    migrate.upgrade(stack.settings(database_url=stack.postgres.url(TEMPLATE)))
    return TEMPLATE


@pytest.fixture
def world(stack: "Stack", migrated: str) -> Iterator[Settings]:
    """Settings of a test's own topics (not made yet), consumer groups and migrated database, on the shared stack."""
    with world_of(stack, migrated) as settings:
        yield settings


@pytest.fixture
def empty_world(stack: "Stack") -> Iterator[Settings]:
    """A world whose database no migration has seen."""
    with world_of(stack, "template0") as settings:
        yield settings


@pytest.fixture(scope="module")
def shared_world(stack: "Stack", migrated: str) -> Iterator[Settings]:
    """A world that the tests of a module share."""
    with world_of(stack, migrated) as settings:
        yield settings


@contextmanager
def world_of(stack: "Stack", template: str = "template0") -> Iterator[Settings]:
    """A piece of the stack whose database is a copy of `template`, and is gone with its topics afterwards."""
    number = next(_worlds)
    database = f"world_{number}"
    _execute(stack, f'create database "{database}" template "{template}"')
    yield stack.settings(
        **{
            f"{name}_topic": f"{name}-{number}"
            for name in ("commands", "events", "policies", "public", "inbox", "keys")
        },
        group_prefix=f"samefold-{number}",
        database_url=stack.postgres.url(database),
        partitions=4,
        session_timeout_ms=3_000,
        auth="off",  # whatever the service's own settings say
        console=False,
        api_host="127.0.0.1",
    )
    _execute(stack, f'drop database "{database}" with (force)')
    _delete_topics(stack, re.compile(rf"-{number}\b"))


def _execute(stack: "Stack", statement: str) -> None:
    import psycopg

    with psycopg.connect(stack.postgres.url(), autocommit=True) as connection:
        connection.execute(statement.encode())


def _delete_topics(stack: "Stack", name: re.Pattern[str]) -> None:
    """A broker with thousands of them is slow."""
    from infra.log import topics

    def delete(client: "AdminClient", within_s: float) -> None:
        mine = [topic for topic in client.list_topics(timeout=within_s).topics if name.search(topic)]
        for deleted in client.delete_topics(mine).values() if mine else ():
            deleted.result(within_s)

    topics.Admin(stack.settings(), DEADLINE_S).ask(delete)


@pytest.fixture(scope="session")
def spark_place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data folder of Spark's executors: each task reads its settings from `dev.env` there."""
    return tmp_path_factory.mktemp("executors")


@pytest.fixture(scope="session")
def spark(spark_place: Path) -> Iterator["SparkSession"]:
    """One Spark on two cores for the whole run; a task whose process dies is tried again, up to four times."""
    from spark_jobs.engine.session import session

    with pytest.MonkeyPatch.context() as patch:
        # the JVM's environment, and so the tasks', is that of the moment when it starts
        for name in [name for name in os.environ if name.startswith(PREFIX)]:
            patch.delenv(name)
        patch.setenv(f"{PREFIX}DATA_DIR", str(spark_place))
        starting = session("tests", "local[2,4]")
        found = starting.__enter__()
    yield found
    starting.__exit__(None, None, None)


@pytest.fixture
def spark_engine(spark: "SparkSession", world: Settings, spark_place: Path) -> "Spark":
    """The Spark engine, whose executors have this world's settings."""
    from spark_jobs.engine.spark import Spark

    (spark_place / "dev.env").write_text(dev_env(world))
    return Spark(spark)


def dev_env(world: Settings) -> str:
    """The lines of a `dev.env` that say what these settings say."""
    values = world.environment().items()
    return "".join(f"{name}={value}\n" for name, value in values if name != f"{PREFIX}DATA_DIR")
