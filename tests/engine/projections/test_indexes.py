"""make test + test-all: an index of few rows is made in a moment; processes that are killed take longer.

Indexes of views: migrations that make and drop them, beside live traffic, killed at each step; builds that have them at the end;
those that somebody made by hand; and that no row is too large for them.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, date, datetime
from decimal import Decimal
from itertools import combinations
from pathlib import Path
from typing import Any
from uuid import UUID

import psycopg
import pytest
from psycopg import sql

from domain.engine.value_limits import MOST_DIGITS
from infra.database import revisions
from infra.database.connect import Connection, DatabaseBehind, connect
from infra.database.revisions import VIEWS, DatabaseAhead
from infra.processes.engines import SILENT
from infra.settings import Settings
from projections.engine import Index
from projections.engine.rebuild.indexing import compare
from projections.engine.rebuild.rebuild import go_to, rebuild
from projections.engine.views.column_types import MOST_KEY_BYTES
from projections.engine.views.columns import BadView
from projections.engine.views.core_views import all_views
from projections.engine.views.indexes import Order, digest_in, index_name, orders_of
from projections.engine.views.tables import to_index, to_make
from projections.engine.views.view import View
from tests.engine.bookkeeper import Bookkeeper, fold_all
from tests.engine.projections.bankviews import ACCOUNTS, live_table
from tests.engine.projections.builders import killed
from tests.engine.projections.test_migrations import declare, scripts
from tests.engine.projections.viewkit import PURSES, view
from tools.migrations import indexes, migrate
from tools.migrations.migrate import SchemaDrift
from tools.testing.fixtures import ROOT, Samefold, command
from tools.testing.waiting import DEADLINE_S, until

__all__ = ["scripts"]

BALANCES = "balances_v2_by_cents_account_031a120f", "balances_v2_by_owner_account_7bb00a91"

"""In the order of their names."""
MADE = [*reversed(BALANCES)]
"""In the order of the declaration."""


def there(settings: Settings, table: str, *, valid: bool = True) -> list[str]:
    """A table's indexes that are of a declaration."""
    query = (
        "select relname from pg_index join pg_class on pg_class.oid = indexrelid "
        "where indrelid = to_regclass(%s) and indisvalid = %s order by 1"
    )
    with connect(settings, "test") as db:
        return [name for (name,) in db.execute(query, (table, valid)) if digest_in(table, name)]


def names(view: View, table: str | None = None) -> list[str]:
    table = table or view.table_name
    return sorted(index_name(table, order) for order in view.indexes)


def indexed(*declared: str) -> View:
    return view(f"    INDEXES = ({''.join(f'{one}, ' for one in declared)})\n" + PURSES)


def behind(settings: Settings) -> None:
    """The database is that of the release before the one which declares indexes of `balances`."""
    with connect(settings, "test") as db:
        for name in BALANCES:
            db.execute(sql.SQL("drop index {}").format(sql.Identifier(name)))
        db.execute("update alembic_version set version_num = '6d9363487a46' where version_num = 'b7d40c6e19a2'")
        with pytest.raises(DatabaseBehind):
            revisions.require_schema(db)


def done(settings: Settings) -> None:
    """The database is as this release needs it."""
    migrate.check(settings)
    with connect(settings, "test") as db:
        revisions.require_schema(db)
    assert there(settings, "balances_v2") == list(BALANCES)
    assert there(settings, "balances_v2", valid=False) == []


@contextmanager
def old_transaction(
    settings: Settings, statement: bytes | sql.Composed = b"update balances_v2 set cents = cents"
) -> Iterator[Connection]:
    """One that has done this, by default written to `balances`, and does not end."""
    with connect(settings, "somebody") as db:
        db.execute("set idle_in_transaction_session_timeout = 0")
        db.execute("begin isolation level repeatable read")
        db.execute(statement)
        yield db
        db.execute("rollback")


def waits(settings: Settings) -> bool:
    """Whether an index waits for older transactions. A transaction itself sees such reports as they were when it began."""
    with connect(settings, "test") as db:
        row = db.execute("select count(*) from pg_stat_progress_create_index where phase like 'waiting%'").fetchone()
    return row != (0,)


# ── migrations ──


def test_an_index_that_is_added_or_removed_is_a_migration_without_a_new_version(
    empty_world: Settings, scripts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    declare(monkeypatch, view(PURSES))
    migrate.upgrade(empty_world)
    migrate.revise(empty_world, "purses")
    migrate.upgrade(empty_world)

    for number, (declared, made, dropped) in enumerate(
        [
            (['Index("cents")', 'Index("note", "-cents")'], 2, 0),
            (['Index("-cents")', 'Index("note", "-cents")'], 1, 1),  # another definition is another index
            ([], 0, 2),
            (['Index("-cents")'], 1, 0),  # again
        ]
    ):
        now = indexed(*declared)
        declare(monkeypatch, now)
        before = there(empty_world, "purses_v1")
        with pytest.raises(SchemaDrift, match="index purses_v1_by_") as refused:
            migrate.check(empty_world)
        assert "db revision" in refused.value.hint
        assert migrate.upgrade(empty_world).indexes == ([], []), "no migration names them yet"
        assert there(empty_world, "purses_v1") == before

        written = migrate.revise(empty_world, f"indexes {number}")

        assert written is not None
        text = written.read_text()
        assert "table(" not in text
        assert (text.count("op.create_index("), text.count("op.drop_index(")) == (made, dropped)
        assert (text.count("if_not_exists=True"), text.count("if_exists=True")) == (made, dropped)
        _, _, done = migrate.upgrade(empty_world)
        assert there(empty_world, "purses_v1") == names(now)
        assert (sorted(done.made), sorted(done.dropped)) == (
            sorted({*names(now)} - {*before}),
            sorted({*before} - {*names(now)}),
        )
        migrate.check(empty_world)
        assert migrate.revise(empty_world, "nothing") is None


def test_a_database_that_has_none_of_it_yet_ends_with_the_declared_indexes(
    empty_world: Settings, scripts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a migration for the table, and others that make, drop and make again."""
    declare(monkeypatch, indexed('Index("cents")'))
    migrate.upgrade(empty_world)
    for declared in (['Index("cents")'], ['Index("note")'], ['Index("cents")']):
        declare(monkeypatch, indexed(*declared))
        assert migrate.revise(empty_world, "purses") is not None
        migrate.upgrade(empty_world)
    with connect(empty_world, "test") as db:
        db.execute("drop schema public cascade")
        db.execute("create schema public")
    assert migrate.upgrade(empty_world).indexes == ([], []), "those of new tables are in the migrations themselves"
    migrate.check(empty_world)
    assert there(empty_world, "purses_v1") == names(indexed('Index("cents")'))
    assert len(list(scripts.glob("*purses*"))) == 3


def test_the_first_migration_of_a_service_makes_the_indexes_too(empty_world: Settings, scripts: Path) -> None:
    for file in scripts.glob("*.py"):
        file.unlink()
    assert migrate.revise_without_database("first tables") is not None
    migrate.upgrade(empty_world)
    done(empty_world)


def test_an_index_of_a_release_before_is_told_by_the_version_alone(
    empty_world: Settings, scripts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table of an older version keeps its indexes: a switch may go back to it."""
    migrate.upgrade(empty_world)
    raised = replace(indexed('Index("cents")'), name="balances", version=3)
    declare(monkeypatch, raised)
    written = migrate.revise(empty_world, "balances v3")
    assert written is not None
    assert "drop_index" not in written.read_text()
    migrate.upgrade(empty_world)
    migrate.check(empty_world)
    assert there(empty_world, "balances_v2") == list(BALANCES)
    assert there(empty_world, "balances_v3") == names(raised)
    assert scripts in written.parents


def test_an_index_made_by_hand_stays_and_is_no_drift(
    bank: Bookkeeper, scripts: Path, monkeypatch: pytest.MonkeyPatch, samefold: Samefold
) -> None:
    world, last = bank.world, revisions.heads()[VIEWS]
    with connect(world, "somebody") as db:
        db.execute("create index mine on balances_v2 (overdraft_limit desc, cents)")
        db.execute("create index mine_too on balances_v2 (cents) where cents > 0")
    told = samefold("doctor", settings=world).stdout
    assert (
        'index mine (drop it, or declare it in its view\'s file: `INDEXES = (Index("-overdraft_limit", "cents"),)`)'
        in told
    )
    assert "index mine_too\n" in told
    declare(monkeypatch, replace(all_views()["balances"], indexes=()))
    migrate.revise(world, "no more indexes")
    assert revisions.heads()[VIEWS] != last
    assert migrate.upgrade(world).indexes == ([], list(BALANCES))
    migrate.check(world)
    assert migrate.revise(world, "nothing") is None
    with connect(world, "test") as db:
        assert db.execute("select count(*) from pg_indexes where indexname like 'mine%'").fetchone() == (2,)
    assert scripts.is_dir()


def test_older_code_drops_no_index_of_newer_code(bank: Bookkeeper, monkeypatch: pytest.MonkeyPatch) -> None:
    with connect(bank.world, "test") as db:
        db.execute("update alembic_version set version_num = '9999' where version_num = 'b7d40c6e19a2'")
    declare(monkeypatch, replace(all_views()["balances"], indexes=()))
    dropped = {("balances_v2", digest_in("balances_v2", name)): ("drop", name) for name in BALANCES}
    monkeypatch.setattr(indexes, "planned_indexes", lambda: dropped)
    with pytest.raises(DatabaseAhead):
        migrate.upgrade(bank.world)
    assert there(bank.world, "balances_v2") == list(BALANCES)


def test_the_release_before_leaves_alone_what_a_newer_release_is_making(
    bank: Bookkeeper, scripts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = bank.world
    rebuild(world, ["balances"], older_views())
    behind(world)
    made = indexes.settle_indexes(world, SILENT).made  # its migrations are not applied yet
    assert len(made) == 4
    with monkeypatch.context() as old:
        declare(old, older_views()["balances"])
        next(scripts.glob("*b7d40c6e19a2*")).unlink()
        assert migrate.upgrade(world).indexes == ([], [])
    assert sorted(made) == sorted(there(world, "balances_v2") + there(world, "balances_v2_r2"))


@pytest.mark.parametrize("first_table", ["stays", "goes"])
def test_an_index_that_no_migration_drops_stays(
    bank: Bookkeeper, monkeypatch: pytest.MonkeyPatch, first_table: str
) -> None:
    """Also where the version's first table is gone."""
    world = bank.world
    rebuild(world, ["balances"], all_views())
    if first_table == "goes":
        with connect(world, "somebody") as db:
            db.execute("drop table balances_v2 cascade")  # with the SQL view, which the upgrade makes again
    declare(monkeypatch, older_views()["balances"])
    assert migrate.upgrade(world).indexes == ([], [])
    assert there(world, "balances_v2_r2") == names(all_views()["balances"], "balances_v2_r2")


def test_an_index_that_no_migration_names_is_told_with_what_to_do(
    empty_world: Settings, scripts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The author has removed the declaration, and the migration that was released nowhere."""
    declare(monkeypatch, view(PURSES))
    migrate.upgrade(empty_world)
    migrate.revise(empty_world, "purses")
    migrate.upgrade(empty_world)
    [index] = names(indexed('Index("cents")'))
    with connect(empty_world, "test") as db:
        db.execute(sql.SQL("create index {} on purses_v1 (cents, purse)").format(sql.Identifier(index)))
        assert migrate.upgrade(empty_world).indexes == ([], [])
        with pytest.raises(SchemaDrift, match=f"{index} is not declared") as refused:
            migrate.check(empty_world)
        assert "`drop index concurrently`" in refused.value.hint
        db.execute(sql.SQL("drop index concurrently {}").format(sql.Identifier(index)))
    migrate.check(empty_world)


# ── beside live traffic ──


def test_an_upgrade_over_several_releases_makes_none_that_a_later_one_drops(
    empty_world: Settings, scripts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within the migration's transaction it would keep writers waiting."""
    declare(monkeypatch, view(PURSES))
    migrate.upgrade(empty_world)
    applied = list[set[str]]()
    for message, of in {"purses": view(PURSES), "by cents": indexed('Index("cents")'), "not": view(PURSES)}.items():
        declare(monkeypatch, of)
        migrate.revise(empty_world, message)
        migrate.upgrade(empty_world)
        with connect(empty_world, "test") as db:
            applied.append({*revisions.applied(db)})
    with connect(empty_world, "test") as db:  # as it was two releases ago
        for was, is_now in zip(applied[0] - applied[2], applied[2] - applied[0], strict=True):
            db.execute("update alembic_version set version_num = %s where version_num = %s", (was, is_now))
    with old_transaction(empty_world, b"update purses_v1 set cents = 1"):
        migrate.upgrade(empty_world)
    assert there(empty_world, "purses_v1") == []
    migrate.check(empty_world)


def test_agents_write_and_new_code_waits_while_an_index_is_made(
    bank: Bookkeeper, caplog: pytest.LogCaptureFixture
) -> None:
    world = bank.world
    behind(world)
    with ThreadPoolExecutor(1) as pool:
        with old_transaction(world, b"select from balances_v2"):
            upgraded = pool.submit(migrate.upgrade, world)
            until(lambda: waits(world), "the index waits for the transaction")
            until(lambda: "waits until a transaction ends" in caplog.text, "it is told")
            bank.life([*ACCOUNTS, "new"], 3)
            fold_all(world)
            with connect(world, "test") as db, pytest.raises(DatabaseBehind):
                revisions.require_schema(db)
            assert not upgraded.done()
        assert upgraded.result(DEADLINE_S).indexes.made == MADE
    assert "(somebody, user" in caplog.text
    done(world)
    by_index = "select account, cents from balances_v2 order by cents, account"
    with connect(world, "test") as db, connect(world, "test", by_key=True) as other:
        other.execute("set enable_sort = off")
        assert BALANCES[0] in str(other.execute(f"explain {by_index}".encode()).fetchall())
        assert other.execute(by_index).fetchall() == db.execute(by_index).fetchall()
        assert db.execute("select count(*) from balances_v2").fetchone() == (len(ACCOUNTS) + 1,)


def test_upgrades_at_once_make_an_index_once(bank: Bookkeeper, caplog: pytest.LogCaptureFixture) -> None:
    world = bank.world
    behind(world)
    with ThreadPoolExecutor(3) as pool:
        with old_transaction(world):
            upgraded = [pool.submit(migrate.upgrade, world) for _ in range(3)]
            until(lambda: waits(world), "the index waits for the transaction")
            until(lambda: caplog.text.count("another command makes indexes") == 2, "the others wait for it")
        made = [future.result(DEADLINE_S).indexes.made for future in upgraded]
    assert sorted(made) == [[], [], MADE]
    assert "this one waits for it: session " in caplog.text
    done(world)


def test_a_migration_does_not_lock_writers_out_of_a_table_whose_index_is_there(
    bank: Bookkeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = bank.world
    behind(world)
    indexes.settle_indexes(world, SILENT)  # and killed then
    monkeypatch.setattr(migrate, "LOCK_TIMEOUT_MS", 100)
    with old_transaction(world):
        assert migrate.upgrade(world).indexes == ([], [])
    done(world)


STAGES = {
    "before its turn": "tools.migrations.indexes.turn",
    "before the first": "tools.migrations.indexes.mend",
    "before the migration": "alembic.command.upgrade",
    "after the migration, not committed": "tools.migrations.migrate.settle",
    "after the migration": "tools.migrations.migrate.ensure_sql_views",
}


@pytest.mark.slow_but("the first")
@pytest.mark.parametrize("stage", STAGES.values(), ids=STAGES)
def test_a_killed_upgrade_goes_on(bank: Bookkeeper, stage: str) -> None:
    world = bank.world
    behind(world)
    killed(world, stage, "db", "upgrade")
    bank.life(["1"], 1)
    fold_all(world)
    migrate.upgrade(world)
    done(world)


@pytest.mark.slow
def test_a_process_that_is_killed_in_the_midst_of_an_index_leaves_its_session_to_finish_it(bank: Bookkeeper) -> None:
    world = bank.world
    behind(world)
    with old_transaction(world) as old:
        environment = os.environ | {"PYTHONPATH": str(ROOT)} | world.environment()
        with subprocess.Popen(command("db", "upgrade"), env=environment) as process:
            until(lambda: waits(world), "the index waits for the transaction")
            process.send_signal(signal.SIGKILL)
        with ThreadPoolExecutor(1) as pool:
            upgraded = pool.submit(migrate.upgrade, world)
            old.execute("commit")
            made = upgraded.result(DEADLINE_S).indexes.made
    assert len(made) == 1
    done(world)


@pytest.mark.parametrize("drop", [False, True], ids=["made", "dropped"])
def test_an_invalid_index_is_made_again(bank: Bookkeeper, samefold: Samefold, drop: bool) -> None:
    world = bank.world
    if drop:
        interrupt(world, "balances_v2", lambda: _drop_concurrently(world, BALANCES[0]))
    else:
        behind(world)
        interrupt(world, "balances_v2", lambda: indexes.settle_indexes(world, SILENT))
    [invalid] = there(world, "balances_v2", valid=False)
    if drop:
        with pytest.raises(SchemaDrift, match=f"{invalid} is invalid") as refused:
            migrate.check(world)
        assert "samefold db upgrade" in refused.value.hint
        told = samefold("doctor", settings=world)
        assert told.returncode == 1
        assert f"{invalid} is invalid." in " ".join(told.stdout.split())
    assert invalid in migrate.upgrade(world).indexes.made
    done(world)


def interrupt(settings: Settings, table: str, work: Callable[[], object]) -> None:
    """Interrupt PostgreSQL while it makes or drops an index of the table concurrently: it leaves it as an invalid one."""
    statement = sql.SQL("lock table {} in row exclusive mode").format(sql.Identifier(table))
    with old_transaction(settings, statement), ThreadPoolExecutor(1) as pool:
        working = pool.submit(work)
        until(lambda: there(settings, table, valid=False), "the index is invalid")
        with connect(settings, "administrator") as db:
            db.execute(
                "select pg_terminate_backend(pid, 5000) from pg_stat_activity "
                "where datname = current_database() and query ~* '(create|drop) index concurrently' and pid <> pg_backend_pid()"
            )
        with pytest.raises(Exception, match=r"ended this session|terminating connection"):
            working.result(DEADLINE_S)


def _drop_concurrently(settings: Settings, index: str) -> None:
    with connect(settings, "somebody") as db:
        db.execute("set lock_timeout = 0")
        db.execute(sql.SQL("drop index concurrently {}").format(sql.Identifier(index)))


# ── builds ──


def test_a_build_has_them_after_its_load(bank: Bookkeeper) -> None:
    assert rebuild(bank.world, ["balances"], all_views()).tables == {"balances": "balances_v2_r2"}
    assert there(bank.world, "balances_v2_r2") == names(all_views()["balances"], "balances_v2_r2")
    migrate.check(bank.world)


def older_views() -> dict[str, View]:
    """Of the release before, without indexes."""
    return all_views() | {"balances": replace(all_views()["balances"], indexes=())}


def test_a_build_of_the_release_before_gets_them_before_its_switch(bank: Bookkeeper) -> None:
    rebuild(bank.world, ["balances"], older_views(), make_live=False)
    assert there(bank.world, "balances_v2_r2") == []
    go_to(bank.world, ["balances"], all_views())
    assert live_table(bank.world, "balances") == "balances_v2_r2"
    migrate.check(bank.world)


def test_a_switch_makes_an_invalid_one_again(bank: Bookkeeper) -> None:
    world = bank.world
    rebuild(world, ["balances"], all_views(), make_live=False)
    wanted = names(all_views()["balances"], "balances_v2_r2")
    interrupt(world, "balances_v2_r2", lambda: _drop_concurrently(world, wanted[0]))
    assert there(world, "balances_v2_r2", valid=False) == [wanted[0]]
    go_to(world, ["balances"], all_views())
    assert there(world, "balances_v2_r2") == wanted
    migrate.check(world)


def test_a_switch_waits_for_an_upgrade_that_makes_them(bank: Bookkeeper, caplog: pytest.LogCaptureFixture) -> None:
    world = bank.world
    rebuild(world, ["balances"], older_views(), make_live=False)
    with ThreadPoolExecutor(2) as pool:
        with old_transaction(world, b"select from balances_v2_r2"):
            upgraded = pool.submit(migrate.upgrade, world)
            until(lambda: waits(world), "the index waits for the transaction")
            switched = pool.submit(go_to, world, ["balances"], all_views())
            told = "this one waits for it: session "
            until(lambda: told in caplog.text or switched.done(), "the switch waits for the upgrade")
            assert not switched.done(), switched.exception()
        assert len(upgraded.result(DEADLINE_S).indexes.made) == 2
        switched.result(DEADLINE_S)
    assert live_table(world, "balances") == "balances_v2_r2"
    migrate.check(world)


def test_an_upgrade_gives_them_to_tables_that_the_release_before_made_live(bank: Bookkeeper) -> None:
    world = bank.world
    rebuild(world, ["balances"], older_views())
    missing = names(all_views()["balances"], "balances_v2_r2")
    with pytest.raises(SchemaDrift) as refused:
        migrate.check(world)
    assert all(f"{name} is missing" in refused.value.message for name in missing)
    assert sorted(migrate.upgrade(world).indexes.made) == missing
    done(world)


def test_a_table_that_is_being_loaded_is_left_alone(bank: Bookkeeper) -> None:
    world = bank.world
    rebuild(world, ["balances"], older_views(), make_live=False)
    with connect(world, "test") as db:
        assert len(compare(db, all_views().values())) == 2
        db.execute("update builds set state = 'loading' where table_name = 'balances_v2_r2'")
        assert compare(db, all_views().values()) == []
    assert migrate.upgrade(world).indexes == ([], [])


# ── their names, and what fits into them ──


def test_names_fit_and_differ() -> None:
    """In a schema, where the name of a view has at most 40 letters."""
    long = replace(indexed('Index("cents")', 'Index("note", "cents")', 'Index("note", "-cents")'), name="p" * 40)
    digests, found = set[str | None](), set[str]()
    for table in ("_v999", "_v99", "_v99_r9999", "_v99_r99999", "_v99_asof_9999"):
        of_table = {name: digest_in(long.name + table, name) for name in names(long, long.name + table)}
        assert all(len(name.encode()) <= 63 and name.startswith(long.name + table) for name in of_table)
        assert not found & of_table.keys()
        found |= of_table.keys()
        digests |= {*of_table.values()}
    assert len(digests) == 3, "they are of the order alone"
    assert None not in digests
    assert not digest_in("balances_v2", "balances_v2_r2_by_cents_account_031a120f")
    assert not digest_in("balances_v2", "balances_v2_pkey")
    assert not digest_in("balances_v2", "balances_v2_by_cents")


WIDE = """
    class Word(Enum):
        LONG = "€{'w' * 200}"

    class Row(NamedTuple):
        {key}
        flag: bool
        cents: int
        text: str
        other: str
        day: date
        moment: datetime
        amount: Decimal
        price: Decimal
        number: UUID
        word: Word

    def key(event: Any, at: At) -> Any: ...

    def evolve(row: Row | None, event: Filled | Spent, at: At) -> Row | None: ...
"""
COLUMNS = ("flag", "cents", "text", "other", "day", "moment", "amount", "price", "number", "word")
KEYS = {
    "a stream": ("purse: Key[str]", 1),
    "a stream and more": ("purse: Key[str]\n        name: Key[str]\n        value: Key[Decimal]", 3),
}
SUMS = """
    class Row(NamedTuple):
        name: Key[str]
        value: Key[Decimal]
        day: Key[date]
        number: Key[UUID]
        count: Sum[int]

    def delta(event: Filled | Spent, at: At) -> Iterable[Row]: ...
"""


def texts(length: int) -> str:
    """Of characters of four bytes each, which can't be compressed."""
    return "".join(chr(random.randrange(0x10000, 0x10FFFF)) for _ in range(length))


def longest(column: str) -> Any:
    """A value that takes as much as any."""
    digits = "".join(random.choices("123456789", k=2 * MOST_DIGITS))
    values = {
        "flag": True,
        "cents": 2**63 - 1,
        "day": date(9999, 12, 31),
        "moment": datetime(9999, 12, 31, tzinfo=UTC),
        "number": UUID(int=2**128 - 1),
        "count": 1,
        "purse": texts(60),
        "name": texts((MOST_KEY_BYTES - 240 - MOST_DIGITS) // 4),
    }
    if column in ("amount", "price", "value"):
        return Decimal(f"{digits[:MOST_DIGITS]}.{digits[MOST_DIGITS:]}")
    return values.get(column, "€" + "w" * 200 if column == "word" else texts(5_000))


def accepted(source: str, columns: Sequence[str], *, is_summary: bool = False) -> tuple[View, int]:
    """The view with every index of one, two or four columns that a declaration accepts; how many it refuses as too large."""
    base, orders, refused = view(source), list[Order](), 0
    for count in (1, 2, 4):
        for some in combinations(columns, count):
            try:
                orders += orders_of((Index(*some),), "rows", base.columns, is_summary=is_summary)
            except BadView as error:
                refused += "could take" in error.message
    return replace(base, indexes=tuple(orders)), refused


def insert_longest(world: Settings, wide: View) -> None:
    names = [column.name for column in wide.columns]
    row = [longest(name) for name in names]
    with connect(world, "test") as db:
        for start in range(0, len(wide.indexes), 30):
            some = replace(wide, indexes=wide.indexes[start : start + 30])
            with db.transaction(force_rollback=True):
                for statement in (*to_make(some, "wide"), *to_index(some, "wide")[1:]):
                    db.execute(statement)
                places = sql.SQL(", ").join(sql.Placeholder() * (len(names) + 1))
                columns = sql.SQL(", ").join(map(sql.Identifier, [*names, "_partition"]))
                db.execute(sql.SQL("insert into wide ({}) values ({})").format(columns, places), [*row, 0])


@pytest.mark.parametrize("key", KEYS.values(), ids=KEYS)
def test_the_longest_values_fit_into_every_index_that_a_declaration_accepts(
    shared_world: Settings, key: tuple[str, int]
) -> None:
    declared, parts = key
    source = WIDE.replace("{key}", declared).replace("{'w' * 200}", "w" * 200)
    wide, refused = accepted(source, COLUMNS)
    assert refused > 0, "two decimals and two texts are too much"
    assert len(wide.indexes) > 100
    insert_longest(shared_world, wide)
    assert len(wide.key) == parts


def test_the_longest_key_of_a_summary_fits_into_its_indexes(shared_world: Settings) -> None:
    wide, refused = accepted(SUMS, ("name", "value", "day", "number"), is_summary=True)
    assert refused == 0
    insert_longest(shared_world, wide)


def test_without_the_prefix_a_text_does_not_fit(shared_world: Settings) -> None:
    """What the others show would fail: PostgreSQL refuses the row."""
    with connect(shared_world, "test") as db, db.transaction(force_rollback=True):
        db.execute("create table wide (text text)")
        db.execute("create index on wide (text)")
        with pytest.raises(psycopg.errors.ProgramLimitExceeded):
            db.execute("insert into wide values (%s)", (texts(5_000),))
