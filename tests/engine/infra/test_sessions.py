"""make test + test-all: `make test` must pass where PgBouncer is not installed.

What lies between a session and what it depends on: a pooler of sessions, and defaults that
a role or database has, change nothing; a pooler of transactions or statements is refused by name.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from urllib.parse import quote

import psycopg
import pytest
from psycopg import sql

from infra.database.connect import TransactionPooling, connect, parameters
from infra.database.deadline import Session
from infra.settings import Settings
from policies.engine.policy import discover
from tests.engine.api.api import everything, serving
from tests.engine.policies.test_policies import running
from tests.engine.spine import scalar, set_up
from tools.dev.postgres import USER
from tools.dev.process import python_script
from tools.dev.stack import Stack
from tools.testing.fixtures import Samefold
from tools.testing.waiting import DEADLINE_S, until

PORT = 6432


@contextmanager
def pooled(stack: Stack, settings: Settings, mode: str, **more: object) -> Iterator[Settings]:
    """The same settings, with a pooler of that `pool_mode` in front of PostgreSQL. `more` are further settings of PgBouncer."""
    program = shutil.which("pgbouncer", path=f"{os.environ['PATH']}:/usr/sbin")
    if program is None:
        pytest.fail(
            "PgBouncer is not installed: `apt-get install pgbouncer` (Debian, Ubuntu), `brew install pgbouncer`"
        )
    folder = Path(tempfile.mkdtemp(prefix="pooler-"))
    try:
        (folder / "users").write_text(f'"{USER}" ""\n')
        lines = {
            "pool_mode": mode,
            "listen_addr": "",
            "listen_port": PORT,
            "unix_socket_dir": folder,
            "auth_type": "trust",
            "auth_file": folder / "users",
        } | more
        (folder / "pgbouncer.ini").write_text(
            f"[databases]\n* = host={stack.postgres.socket_folder}\n[pgbouncer]\n"
            + "".join(f"{name} = {value}\n" for name, value in lines.items())
        )
        command = [program, str(folder / "pgbouncer.ini")]
        if os.geteuid() == 0:  # like PostgreSQL, it refuses to run as root
            command = python_script("unprivileged.py", folder, *command)
        with (folder / "log").open("w") as log:
            running = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            until((folder / f".s.PGSQL.{PORT}").exists, "PgBouncer listens")
            database = psycopg.conninfo.conninfo_to_dict(settings.database)["dbname"]
            url = f"postgresql://{USER}@/{database}?host={quote(str(folder), safe='')}&port={PORT}"
            yield Settings(**{**settings.model_dump(exclude_none=True), "database_url": url})
        finally:
            running.terminate()
            running.wait(DEADLINE_S)
    finally:
        shutil.rmtree(folder)


@contextmanager
def at_work(settings: Settings, number: int) -> Iterator[None]:
    """So many other clients of the pooler, each of which runs one short statement after the other."""
    over = Event()

    def work() -> None:
        with psycopg.connect(settings.database, autocommit=True, prepare_threshold=None) as connection:
            while not over.is_set():
                connection.execute("select 1")

    with ThreadPoolExecutor(max(number, 1)) as pool:
        working = [pool.submit(work) for _ in range(number)]
        yield
        over.set()
        for one in working:
            one.result(DEADLINE_S)


@pytest.mark.slow
@pytest.mark.parametrize(("backends", "others"), [(1, 0), (20, 0), (2, 3)])
@pytest.mark.parametrize("round_robin", [0, 1])
@pytest.mark.parametrize("mode", ["transaction", "statement"])
def test_other_pooling_is_refused_by_name(
    stack: Stack, world: Settings, samefold: Samefold, mode: str, round_robin: int, backends: int, others: int
) -> None:
    """By commands and by the API's connections, with one backend or many, alone and among other clients."""
    with (
        pooled(stack, world, mode, server_round_robin=round_robin, default_pool_size=backends) as settings,
        at_work(settings, others),
    ):
        done = samefold("views", settings=settings)
        assert (done.returncode, done.stdout) == (1, "")
        assert re.match(r"transaction-pooling: .*\n  → .*pool_mode = session", done.stderr)

        async def open_one() -> None:
            await Session.connect(**parameters(settings, "test"))

        with pytest.raises(TransactionPooling):
            asyncio.run(open_one())


@pytest.mark.slow
def test_an_api_behind_one_is_not_ready_and_says_why(stack: Stack, world: Settings) -> None:
    set_up(world)
    with pooled(stack, world, "transaction") as settings, serving(settings) as api:
        until(lambda: "transaction-pooling" in api.get("/health/ready").text, "it has asked the database")
        assert api.get("/health/ready").status_code == 503


COMMANDS = (
    "db upgrade",
    "db check",
    "views",
    "rebuild balances statement",
    "rebuild balances --no-switch",
    "switch balances",
    "rebuild balances --no-switch --as-of -1m",
    "verify",
    "parked list",
    "outbox list",
    "policies",
    "topics",
    "archive",
    "history accounts/{}",
)


def the_service_works(world: Settings, samefold: Samefold) -> None:
    """All processes, and the commands that use the database."""
    with everything(world) as api, running(world, *discover().values()):
        account = api.opened(limit=1000)
        until(lambda: scalar(world, "select count(*) from balances"), "it is folded")
    for command in COMMANDS:
        done = samefold(*command.format(account).split(), settings=world)
        assert (done.returncode, "rror" in done.stderr) == (0, False), (command, done.stderr, done.stdout)


@pytest.mark.slow
def test_a_pooler_of_sessions_changes_nothing(stack: Stack, empty_world: Settings, samefold: Samefold) -> None:
    with pooled(stack, empty_world, "session", default_pool_size=60) as settings:
        the_service_works(settings, samefold)


DEFAULTS = {
    "DateStyle": "SQL, DMY",
    "IntervalStyle": "sql_standard",
    "TimeZone": "Asia/Kathmandu",
    "array_nulls": "off",
    "backslash_quote": "off",
    "bytea_output": "escape",
    "check_function_bodies": "off",
    "client_encoding": "LATIN1",
    "client_min_messages": "debug5",
    "createrole_self_grant": "set",
    "cursor_tuple_fraction": "1",
    "debug_parallel_query": "on",
    "default_statistics_target": "1",
    "default_transaction_deferrable": "on",
    "default_transaction_isolation": "serializable",
    "enable_indexscan": "off",
    "escape_string_warning": "off",
    "exit_on_error": "on",
    "extra_float_digits": "-15",
    "from_collapse_limit": "1",
    "gin_fuzzy_search_limit": "1",
    "jit_above_cost": "0",
    "lc_messages": "C",
    "lc_numeric": "C",
    "plan_cache_mode": "force_generic_plan",
    "quote_all_identifiers": "on",
    "restrict_nonsystem_relation_kind": "view, foreign-table",
    "row_security": "off",
    "standard_conforming_strings": "off",
    "synchronous_commit": "off",
    "timezone_abbreviations": "India",
    "transform_null_equals": "on",
    "work_mem": "64",
    "xmlbinary": "hex",
    "xmloption": "document",
}
"""Each far from PostgreSQL's own. `alter role … set` would do the same. Timeouts: test_connect.py."""


def begin_with(world: Settings, defaults: Mapping[str, str]) -> None:
    """Let sessions of the database begin with these."""
    with connect(world, "test") as db:
        database = sql.Identifier(db.info.dbname)
        for name, value in defaults.items():
            # a list is written without quotes around all of it
            values = sql.SQL(", ").join(map(sql.Literal, value.split(", ")))
            db.execute(sql.SQL("alter database {} set {} = {}").format(database, sql.Identifier(name.lower()), values))


def test_defaults_of_the_database_change_nothing(empty_world: Settings, samefold: Samefold) -> None:
    begin_with(empty_world, DEFAULTS)
    the_service_works(empty_world, samefold)


def test_a_database_that_is_read_only_stays_so(world: Settings, samefold: Samefold) -> None:
    set_up(world)
    begin_with(world, {"default_transaction_read_only": "on"})
    assert samefold("views", settings=world).returncode == 0
    done = samefold("rebuild", "balances", settings=world)
    assert (done.returncode, done.stderr.split(":")[0]) == (1, "database-unavailable")
    assert "read-only" in done.stderr
