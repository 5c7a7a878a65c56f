"""Connections: their timeouts, and what the database's errors mean to those who wait."""

from __future__ import annotations

from contextlib import closing

import psycopg
import pytest
from psycopg import errors

from infra.database.connect import DatabaseAway, DatabaseBehind, DatabaseRefused, connect, naming, passes
from infra.settings import Settings
from tests.spine import until

SECRET = "s3cr3t-do-not-tell"


def test_a_session_has_its_timeouts_its_name_and_utc(world: Settings) -> None:
    settings = world.model_copy(
        update={"statement_timeout_ms": 1234, "lock_timeout_ms": 567, "idle_in_transaction_timeout_ms": 8901}
    )
    with connect(settings, "somebody") as db:

        def shown(name: str) -> str:
            row = db.execute(f"show {name}").fetchone()
            assert row is not None
            return str(row[0])

        assert shown("statement_timeout") == "1234ms"
        assert shown("lock_timeout") == "567ms"
        assert shown("idle_in_transaction_session_timeout") == "8901ms"
        assert shown("application_name") == "somebody"
        assert shown("timezone") == "UTC"
        assert db.autocommit


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
        assert passes(lost.value)


@pytest.mark.parametrize("short", [True, False])
def test_nor_does_one_that_froze_between_two_statements_of_a_pipeline(world: Settings, short: bool) -> None:
    """Such a session counts as active, in no statement: without the third timeout nobody would ever free its locks."""
    quick = world.model_copy(update={"idle_in_transaction_timeout_ms": 300, "statement_timeout_ms": 300})
    with closing(connect(quick, "frozen", short_transactions=short)) as frozen, connect(world, "next") as db:
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
        assert bool(held) is not short


def test_nobody_there_may_pass_and_no_message_tells_the_password() -> None:
    settings = Settings(database_url=f"postgresql://somebody:{SECRET}@127.0.0.1:9/there")
    with pytest.raises(DatabaseAway) as away:
        connect(settings, "test")
    assert passes(away.value)
    assert "there at 127.0.0.1" in away.value.message
    assert SECRET not in str(away.value)


def test_a_string_that_is_none_is_refused_without_quoting_it() -> None:
    settings = Settings(database_url=f"postgresql//somebody:{SECRET}@")
    with pytest.raises(DatabaseRefused) as refused:
        connect(settings, "test")
    assert SECRET not in str(refused.value)
    assert refused.value.__cause__ is None


def test_a_database_or_user_that_does_not_exist_does_not_pass(world: Settings) -> None:
    name = world.database.split("@/")[1].split("?")[0]
    for other in (
        world.database.replace(f"/{name}?", "/nowhere?"),
        world.database.replace("samefold@", "nobody-here@"),
    ):
        assert other != world.database
        with pytest.raises(DatabaseRefused, match="does not exist") as refused:
            connect(Settings(database_url=other), "test")
        assert not passes(refused.value)


@pytest.mark.parametrize(
    ("error", "may_pass"),
    [
        (errors.AdminShutdown, True),
        (errors.CannotConnectNow, True),
        (errors.ConnectionFailure, True),
        (errors.TooManyConnections, True),
        (errors.DiskFull, True),
        (errors.ReadOnlySqlTransaction, True),
        (errors.QueryCanceled, True),
        (errors.LockNotAvailable, True),
        (errors.DeadlockDetected, True),
        (errors.UniqueViolation, False),
        (errors.UndefinedTable, False),
        (errors.InsufficientPrivilege, False),
        (errors.NumericValueOutOfRange, False),
    ],
)
def test_what_passes_by_itself(error: type[psycopg.Error], may_pass: bool) -> None:
    assert passes(error("")) == may_pass
    assert not passes(ValueError())


def test_errors_get_names(world: Settings) -> None:
    with connect(world, "test") as db:
        with pytest.raises(DatabaseBehind, match="samefold db upgrade"), naming(world):
            db.execute("select * from positions")
        with pytest.raises(DatabaseAway), naming(world):
            db.execute("select pg_terminate_backend(pg_backend_pid())")
