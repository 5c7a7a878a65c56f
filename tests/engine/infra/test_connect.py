"""make test: what PostgreSQL says is quick to ask.

Connections: their timeouts, and what the database's errors mean to those who wait.
"""

from __future__ import annotations

from contextlib import closing

import psycopg
import pytest
from psycopg import errors

from infra.database.connect import (
    DatabaseBehind,
    DatabaseRefused,
    DatabaseUnavailable,
    TransactionTimedOut,
    connect,
    is_transient,
    named_error,
    named_errors,
)
from infra.settings import Settings
from tools.testing.fixtures import Samefold
from tools.testing.waiting import until

SECRET = "s3cr3t-do-not-tell"


def test_a_session_has_its_timeouts_its_name_and_utc(world: Settings) -> None:
    """A host that vanished is given up after 10 s: keepalives rest while something that was sent is not acknowledged."""
    settings = world.model_copy(update={"idle_in_transaction_timeout_ms": 8901})
    shown = {
        "transaction_timeout": "0",
        "idle_session_timeout": "0",
        "statement_timeout": "30s",
        "lock_timeout": "5s",
        "idle_in_transaction_session_timeout": "8901ms",
        "application_name": "somebody",
        "timezone": "UTC",
    }
    with connect(world, "test") as db:  # neither a database's defaults nor a role's count
        for name in shown:
            if name.endswith("_timeout"):
                db.execute(f"alter database {db.info.dbname} set {name} = '1h'".encode())
    with connect(settings, "somebody") as db:
        assert {name: db.execute(f"show {name}".encode()).fetchone() for name in shown} == {
            name: (value,) for name, value in shown.items()
        }
        assert db.autocommit
        assert db.info.get_parameters()["tcp_user_timeout"] == "10000"


def test_options_in_the_connection_string_stay_in_force(world: Settings) -> None:
    url = f"{world.database}&options=-c%20search_path%3Delsewhere"
    with connect(Settings(database_url=url), "somebody") as db:
        assert db.execute("show search_path").fetchone() == ("elsewhere",)
        assert db.execute("show lock_timeout").fetchone() == ("5s",)


def test_a_process_that_froze_in_a_transaction_does_not_keep_its_locks(world: Settings) -> None:
    frozen = connect(world.model_copy(update={"idle_in_transaction_timeout_ms": 100}), "frozen")
    with frozen, connect(world, "next") as db:
        db.execute("create table locked (a int)")
        frozen.execute("begin")
        frozen.execute("lock table locked")
        until(lambda: not db.execute("select 1 from pg_locks where relation = 'locked'::regclass").fetchall(), "freed")
        with pytest.raises(psycopg.Error) as lost:
            frozen.execute("select 1")
        assert is_transient(lost.value)
        told = named_error(lost.value, world)
        assert isinstance(told, TransactionTimedOut)
        assert "SAMEFOLD_IDLE_IN_TRANSACTION_TIMEOUT_MS" in told.hint


def test_nor_does_one_that_froze_between_two_statements_of_a_pipeline(
    world: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a session counts as active, in no statement: without the third timeout nobody would ever free its locks."""
    monkeypatch.setattr("infra.database.connect.STATEMENT_TIMEOUT_MS", 300)
    quick = world.model_copy(update={"idle_in_transaction_timeout_ms": 300})
    with closing(connect(quick, "frozen", short_transactions=True)) as frozen, connect(world, "next") as db:
        db.execute("create table locked (a int)")
        pipe = frozen.pgconn
        pipe.enter_pipeline_mode()
        for statement in (b"begin", b"lock table locked"):
            pipe.send_query_params(statement, None)
        pipe.send_flush_request()  # as where somebody wants to fetch, and then freezes
        pipe.flush()

        def is_over() -> bool:
            row = db.execute(
                "select state, wait_event, clock_timestamp() - xact_start > '2 s' from pg_stat_activity where pid = %s",
                [pipe.backend_pid],
            ).fetchone()
            return row in (None, ("active", "ClientRead", True))

        until(is_over, "all timeouts have passed")
        held = db.execute("select 1 from pg_locks where relation = 'locked'::regclass and granted").fetchall()
        assert held == []


def test_nobody_there_may_pass_and_no_message_tells_the_password() -> None:
    settings = Settings(database_url=f"postgresql://somebody:{SECRET}@127.0.0.1:9/there")
    with pytest.raises(DatabaseUnavailable) as away:
        connect(settings, "test")
    assert is_transient(away.value)
    assert "there at 127.0.0.1" in away.value.message
    # a traceback with local variables shows them by their repr
    assert SECRET not in f"{away.value!r} {away.value.__cause__!r} {settings!r}"


@pytest.mark.parametrize("wrong", ["postgresql//u:{}@", "postgresql://u:{}@[/d", "host=h pass{}", "{}"])
def test_a_string_that_is_none_is_refused_without_quoting_it(wrong: str, samefold: Samefold) -> None:
    settings = Settings(database_url=wrong.format(SECRET))
    with pytest.raises(DatabaseRefused, match="is not a connection string") as refused:
        connect(settings, "test")
    assert refused.value.__cause__ is None
    done = samefold("db", "upgrade", settings=settings)
    assert "is not a connection string" in done.stderr
    assert SECRET not in f"{refused.value!r} {done.stdout} {done.stderr}"


def test_a_database_or_user_that_does_not_exist_does_not_pass(world: Settings) -> None:
    name = world.database.split("@/")[1].split("?")[0]
    for other in (
        world.database.replace(f"/{name}?", "/nowhere?"),
        world.database.replace("samefold@", "nobody-here@"),
    ):
        assert other != world.database
        with pytest.raises(DatabaseRefused, match="does not exist") as refused:
            connect(Settings(database_url=other), "test")
        assert not is_transient(refused.value)


def test_a_database_that_cant_hold_every_character_is_refused(world: Settings) -> None:
    name = world.database.split("@/")[1].split("?")[0]
    with connect(world, "test") as db:
        locale = "locale_provider libc locale 'C' template template0"
        db.execute(f"create database {name}_latin encoding 'LATIN1' {locale}".encode())
    try:
        with pytest.raises(DatabaseRefused, match="LATIN1"):
            connect(Settings(database_url=world.database.replace(f"/{name}?", f"/{name}_latin?")), "test")
    finally:
        with connect(world, "test") as db:
            db.execute(f"drop database {name}_latin".encode())


PASS = (
    *(errors.AdminShutdown, errors.CannotConnectNow, errors.ConnectionFailure, errors.TooManyConnections),
    *(errors.DiskFull, errors.ReadOnlySqlTransaction, errors.QueryCanceled, errors.LockNotAvailable),
    errors.DeadlockDetected,
)
STAY = (errors.UniqueViolation, errors.UndefinedTable, errors.InsufficientPrivilege, errors.NumericValueOutOfRange)


def test_what_passes_by_itself() -> None:
    assert [error for error in (*PASS, *STAY) if is_transient(error(""))] == [*PASS]
    assert not is_transient(ValueError())


def test_errors_get_names(empty_world: Settings) -> None:
    with connect(empty_world, "test") as db:
        with pytest.raises(DatabaseBehind, match="samefold db upgrade"), named_errors(empty_world):
            db.execute("select * from positions")
        db.execute("set lock_timeout = '1ms'")
        with connect(empty_world, "other") as other:
            other.execute("select pg_advisory_lock(1)")
            with pytest.raises(DatabaseUnavailable, match="another session holds a lock"), named_errors(empty_world):
                db.execute("select pg_advisory_lock(1)")
        with pytest.raises(DatabaseUnavailable), named_errors(empty_world):
            db.execute("select pg_terminate_backend(pg_backend_pid())")


def test_a_plan_made_while_a_table_is_small_goes_by_the_key(world: Settings) -> None:
    """Without it the plan reads the whole table, for good: what the sessions of handlers, agents and waits are spared."""
    asked = "select v from unnest(%s::text[]) as asked(k) join small using (k)"
    with connect(world, "somebody", by_key=True) as db:
        db.execute("create table small (k text primary key, v int)")
        db.execute("insert into small select n::text, n from generate_series(1, 20) n")
        db.execute("analyze small")
        db.execute("set plan_cache_mode = force_generic_plan")
        db.execute(b"prepare asked as " + asked.replace("%s", "$1").encode())
        plan = "\n".join(line for (line,) in db.execute("explain execute asked(array['3'])"))
    assert "Seq Scan on small" not in plan, plan
