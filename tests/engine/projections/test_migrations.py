"""make test + test-all: a database is migrated in a moment; copies of the tree and waits take longer.

Migrations: made from the declarations, forward only, and never touching the table of a version that exists.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from pydantic import SecretStr

from infra.database import revisions
from infra.database.connect import DatabaseBehind, DatabaseRefused, connect
from infra.database.revisions import BRANCHES, CORE, VIEWS, DatabaseAhead, MigrationsConflict
from infra.settings import Settings
from policies.engine import posts
from policies.engine.operate import Which, retry
from projections.engine.views import core_views as system
from projections.engine.views.indexes import Part
from projections.engine.views.view import View
from proofs.one_fold.values import COLUMNS
from tests.engine.projections.viewkit import PURSES, view
from tools.migrations import migrate
from tools.migrations.migrate import SchemaDrift, ViewChangedShape
from tools.migrations.unreleased import remake, rewrite
from tools.testing.fixtures import ROOT, Samefold
from tools.testing.waiting import DEADLINE_S


@pytest.fixture
def world(empty_world: Settings) -> Settings:
    """No migration has seen its database."""
    return empty_world


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the views' migrations, to write more of them."""
    copied = tmp_path / "migrations"
    shutil.copytree(BRANCHES[VIEWS], copied, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setitem(BRANCHES, VIEWS, copied)
    return copied


def declare(monkeypatch: pytest.MonkeyPatch, *views: View) -> None:
    """The code declares these views too, or in place of those with the same name."""
    there = {**system.all_views(), **{one.name: one for one in views}}
    monkeypatch.setattr(system, "all_views", lambda: there)


def tables(settings: Settings) -> set[str]:
    with connect(settings, "test") as db:
        return {name for (name,) in db.execute("select tablename from pg_tables where schemaname = 'public'")}


def test_an_upgrade_makes_what_the_code_declares_and_check_finds_nothing(world: Settings) -> None:
    before, after, _ = migrate.upgrade(world)
    assert before == []
    assert {"positions", "live", "builds", "balances_v2", "streams_accounts_v3"} <= tables(world)
    migrate.check(world)
    assert migrate.upgrade(world) == (after, after, ([], []))
    with connect(world, "test") as db:
        revisions.require_schema(db)


def test_upgrades_at_once_take_turns(world: Settings) -> None:
    with ThreadPoolExecutor(4) as pool:
        done = [future.result() for future in [pool.submit(migrate.upgrade, world) for _ in range(4)]]
    assert sorted(before == [] for before, *_ in done) == [False, False, False, True]
    migrate.check(world)


@pytest.mark.slow
def test_an_upgrade_waits_for_a_longer_one(world: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migrate, "LOCK_TIMEOUT_MS", 50)
    with connect(world, "test") as db, ThreadPoolExecutor(1) as pool:
        with db.transaction():
            db.execute("select pg_advisory_xact_lock(%s)", (int.from_bytes(b"SAMEFOLD", "big"),))
            second = pool.submit(migrate.upgrade, world)
            with pytest.raises(TimeoutError):
                second.result(1)
        assert second.result(DEADLINE_S)[0] == []


def test_an_upgrade_without_rights_names_that(world: Settings) -> None:
    with connect(world, "test") as db:
        db.execute("revoke create on schema public from public")
        db.execute(f"create role {(role := 'reader_of_' + db.info.dbname)} login in role pg_read_all_data")
        try:
            url = world.database.replace(f"{db.info.user}@", f"{role}@").replace(f"{db.info.user}:", f"{role}:")
            with pytest.raises(DatabaseRefused, match="permission denied"):
                migrate.upgrade(world.model_copy(update={"database_url": SecretStr(url)}))
        finally:
            db.execute(f"drop role {role}")


def test_a_database_with_a_newer_migration_is_ahead(world: Settings) -> None:
    migrate.upgrade(world)
    with connect(world, "test") as db:
        db.execute("insert into alembic_version values ('9999')")
        with pytest.raises(DatabaseAhead, match="at migration 9999,"):
            revisions.require_schema(db)
    for act in (migrate.upgrade, migrate.check):
        with pytest.raises(DatabaseAhead):
            act(world)
    assert "balances_v1" in tables(world)


def test_a_new_view_is_a_migration_that_makes_its_table(
    world: Settings, scripts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    migrate.upgrade(world)
    declare(monkeypatch, view(PURSES))
    with pytest.raises(SchemaDrift, match="add table purses_v1"):
        migrate.check(world)

    written = migrate.revise(world, "purses")

    assert written is not None
    assert written.parent == scripts
    text = written.read_text()
    assert text.count("op.") == 1
    assert '"purses_v1"' in text
    migrate.upgrade(world)
    migrate.check(world)
    assert migrate.revise(world, "nothing") is None
    assert list(scripts.glob("*nothing*")) == []


def test_the_migration_of_an_unreleased_version_is_rewritten_and_its_table_made_anew(
    world: Settings, scripts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_released(name: str, _version: int) -> bool:
        return name != "purses"

    before = system.all_views()
    declare(monkeypatch, view(PURSES))
    written = migrate.revise_without_database("purses")
    assert written is not None
    assert rewrite(system.all_views(), is_released) == []
    migrate.upgrade(world)

    changed = view(PURSES.replace("note: str\n", "note: str\n        more: int | None\n"))
    declare(monkeypatch, replace(changed, indexes=((Part(changed.columns[1]), Part(changed.columns[0])),)))
    assert rewrite(system.all_views(), lambda *_: True) == []
    assert rewrite(system.all_views(), is_released) == [written]
    assert rewrite(system.all_views(), is_released) == []
    assert migrate.revise_without_database("nothing") is None
    with pytest.raises(ViewChangedShape):
        migrate.check(world)
    with connect(world, "test") as db:
        remake(db, [system.all_views()["purses"]])
    migrate.check(world)

    monkeypatch.setattr(system, "all_views", lambda: before)
    assert rewrite(before, lambda *_: True) == []
    assert rewrite(before, is_released) == [written]
    assert "op." not in written.read_text()
    migrate.upgrade(world)


def test_a_column_of_each_type_is_migrated_and_found_as_it_was_declared(
    world: Settings, scripts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    migrate.upgrade(world)
    columns = "".join(f"    c{n}: {kind}\n" for n, kind in enumerate(COLUMNS))
    head = "from proofs.one_fold.values import Line, Mood, Parcel, Tone\nclass Row(NamedTuple):\n    id: Key[str]\n"
    rest = "def evolve(row: Row | None, event: Filled, at: At) -> Row | None: ..."
    declare(monkeypatch, view(f"{head}{columns}{rest}"))
    assert migrate.revise(world, "each type") is not None
    migrate.upgrade(world)
    migrate.check(world)
    assert migrate.revise(world, "nothing") is None


def test_a_raised_version_is_a_table_beside_the_old_one(
    world: Settings, scripts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    migrate.upgrade(world)
    with connect(world, "test") as db:
        db.execute("create table balances_v2_r2 (like balances_v2 including all)")
        db.execute("create table forgotten_v3 (a int)")
    raised = replace(view(PURSES, "purses"), name="balances", version=3)
    declare(monkeypatch, raised)

    migrate.revise(world, "balances v3")
    migrate.upgrade(world)

    migrate.check(world)
    assert {"balances_v2", "balances_v2_r2", "balances_v3", "forgotten_v3"} <= tables(world)
    assert "drop" not in next(scripts.glob("*balances_v3*")).read_text()


CHANGED = [
    PURSES.replace("note: str", "note: str\n        more: int"),
    PURSES.replace("        note: str\n", ""),
    PURSES.replace("note: str", "note: str | None"),
    PURSES.replace("cents: int\n", "cents: str\n", 1),
    PURSES.replace("note: str", "note: Key[str]") + "\n    def key(event: Any, at: At) -> Any: ...",
]


@pytest.mark.slow
@pytest.mark.usefixtures("scripts")
def test_a_versions_table_is_never_altered(world: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    declare(monkeypatch, view(PURSES))
    migrate.upgrade(world)
    migrate.revise(world, "purses")
    migrate.upgrade(world)
    for change in CHANGED:
        declare(monkeypatch, view(change))
        with pytest.raises(ViewChangedShape, match="View 'purses' changed its shape: raise its version to 2"):
            migrate.check(world)
    with pytest.raises(ViewChangedShape, match="raise its version to 2"):
        migrate.revise(world, "again")


def test_a_changed_state_asks_for_a_raised_state_version(world: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    migrate.upgrade(world)
    declare(monkeypatch, replace(system.all_views()["streams_accounts"], shape="another"))
    with pytest.raises(ViewChangedShape) as refused:
        migrate.check(world)
    assert "STATE_VERSION" in refused.value.hint


def test_the_commands(world: Settings, samefold: Samefold) -> None:
    behind = samefold("db", "check", settings=world)
    assert behind.returncode == 1
    assert "samefold db upgrade" in behind.stderr
    upgraded = samefold("db", "upgrade", "--json", settings=world).stdout
    assert json.loads(upgraded) == {
        "before": [],
        "after": sorted(revisions.heads().values()),
        "made": [],
        "dropped": [],
    }
    assert "as this code needs it" in samefold("db", "upgrade", settings=world).stdout
    assert samefold("db", "check", settings=world).returncode == 0
    nothing = samefold("db", "revision", "-m", "nothing", settings=world)
    assert (nothing.returncode, nothing.stderr) == (0, "")
    assert nothing.stdout.startswith("Nothing to do")


def test_two_migrations_that_follow_the_same_one_are_both_named_with_what_to_type(
    world: Settings, scripts: Path, samefold: Samefold
) -> None:
    migrate.upgrade(world)
    before = revisions.heads()[VIEWS]
    _write(scripts, mine=("mine", before), theirs=("theirs", before))
    for words in (("db", "upgrade"), ("run", "all")):
        told = samefold(*words, settings=world)
        assert told.returncode == 1
        assert "9001_mine.py and 9001_theirs.py" in " ".join(told.stderr.split())
        assert "Traceback" not in told.stderr
    hints = set()
    with connect(world, "test") as db:
        for act in (
            lambda: migrate.upgrade(world),
            lambda: migrate.revise(world, "another"),
            lambda: migrate.check(world),
            lambda: revisions.require_schema(db),
        ):
            with pytest.raises(MigrationsConflict, match=r"9001_mine\.py and 9001_theirs\.py") as refused:
                act()
            hints.add(refused.value.hint)
    [hint] = hints
    typed = re.search(r"write `(down_revision = \S+)` in (\S+)\.$", hint)
    assert typed
    file = Path(typed[2])
    file.write_text(re.sub(r"down_revision.*", typed[1], file.read_text()))
    migrate.upgrade(world)
    with connect(world, "test") as db:
        revisions.require_schema(db)
    assert revisions.heads()[VIEWS] == "theirs"


def _write(scripts: Path, **files: tuple[str, object]) -> None:
    """Migrations by name: id and predecessor."""
    for name, (revision, before) in files.items():
        text = f"revision = '{revision}'\ndown_revision = {before!r}\n\n\ndef upgrade() -> None: ...\n"
        (scripts / f"9001_{name}.py").write_text(text)


def test_migrations_that_make_no_line_are_named(scripts: Path) -> None:
    before = revisions.heads()
    (scripts / "__init__.py").write_text('"""Tables of this service."""\n')
    assert revisions.heads() == before, "a file that is no migration is left out"
    _write(scripts, mine=("9001", None), theirs=("9001", None))
    with pytest.raises(MigrationsConflict, match=r"9001_mine\.py and 9001_theirs\.py"):
        revisions.heads()
    _write(scripts, mine=("9001", "9000"), theirs=("9002", before[VIEWS]))
    with pytest.raises(MigrationsConflict, match=r"9001_mine\.py follows migration '9000', whose file is missing"):
        revisions.heads()
    _write(scripts, mine=("mine", before[VIEWS]), theirs=("theirs", before[VIEWS]), merged=("9002", ("mine", "theirs")))
    assert revisions.heads()[VIEWS] == "9002"


def test_a_service_without_views_has_no_newest_migration_of_theirs(world: Settings, scripts: Path) -> None:
    for file in scripts.glob("*.py"):
        file.unlink()
    assert revisions.heads().keys() == {CORE}
    migrate.upgrade(world)
    with connect(world, "test") as db:
        revisions.require_schema(db)


@pytest.mark.slow_but("False")
@pytest.mark.parametrize("with_database", [False, True])
def test_the_first_migration_is_the_branchs_beginning(world: Settings, scripts: Path, with_database: bool) -> None:
    """Without a database its tables are those that autogenerate would write: nothing is left to do after it."""
    for file in scripts.glob("*.py"):
        file.unlink()
    if with_database:
        migrate.upgrade(world)
        written = migrate.revise(world, "first tables")
    else:
        written = migrate.revise_without_database("first tables")
    assert written is not None
    assert written.parent == scripts
    migrate.upgrade(world)
    migrate.check(world)
    assert "balances_v2" in tables(world)


LATER = (
    "streams_accounts_v2, streams_standing_orders_v1, streams_transfers_v1, transfers_v1, "
    "balances_v2, statement_v2, streams_accounts_v3"
)
"""What the sample's migrations make after the first one."""
OF_THE_CORE = (
    "event_types, personal_keys, forgotten_subjects, keys_position, outbox, posts, lanes, activations, stopped_views, "
    "relay_leases, log_marks, operator_actions, source_positions, received_messages"
)
OLDER = {
    "transfers": ([VIEWS], LATER, "9c41f0d2be67", "streams_accounts_v1", "('accounts/1', 1, '{}', 0)"),
    "the branches": (  # core migration 0001 used to make the bank's tables, too
        [CORE, VIEWS],
        f"{LATER}, {OF_THE_CORE}, command_outcomes_v2, command_outcomes_v3",
        "0005",
        "balances_v1",
        "('1', 1, 1, current_date, current_date, 1, null, 0)",
    ),
}


@pytest.mark.parametrize(("branches", "later", "was", "table", "row"), OLDER.values(), ids=OLDER)
def test_a_database_from_before_them_goes_on(
    world: Settings, branches: list[str], later: str, was: str, table: str, row: str
) -> None:
    migrate.upgrade(world)
    gone = [revisions.heads()[branch] for branch in branches]
    with connect(world, "test") as db:
        db.execute("delete from alembic_version where version_num = any(%s)", (gone,))
        db.execute("insert into alembic_version values (%s)", (was,))
        db.execute(f"drop table {later} cascade".encode())
        if CORE in branches:
            db.execute("alter table positions drop column attempt")
            db.execute(
                "alter table build_parts drop column share, drop column shares, add primary key (build, partition)"
            )
        db.execute(f"insert into {table} values {row}".encode())
    with connect(world, "test") as db, pytest.raises(DatabaseBehind, match=f"at migration .*{was}"):
        revisions.require_schema(db)
    migrate.upgrade(world)
    migrate.check(world)
    assert set(LATER.split(", ")) <= tables(world)
    with connect(world, "test") as db:
        assert db.execute(f"select count(*) from {table}".encode()).fetchone() == (1,)


@contextmanager
def before(revision: str, tmp_path: Path) -> Iterator[None]:
    """Samefold's migrations are those before this one."""
    older = tmp_path / "older"
    shutil.copytree(BRANCHES[CORE], older, ignore=shutil.ignore_patterns("__pycache__"))
    newer = {revision}
    while later := [file for file in older.glob("*.py") if any(f'"{one}"' in file.read_text() for one in newer)]:
        for file in later:
            newer.add(file.stem.split("_")[3])
            file.unlink()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(BRANCHES, CORE, older)
        yield


def test_posts_of_an_older_outbox_are_posted_in_the_same_order(world: Settings, tmp_path: Path) -> None:
    with before("c30f5e7a9d43", tmp_path):
        migrate.upgrade(world)
    insert = (
        "insert into outbox (id, policy, kind, stream, version, number, target, body, wished_at, attempts, next_attempt, dead)"
        " values (%s, 'letters', 'post', %s, %s, 0, 'crm', '{}', now(), 0, %s, %s)"
    )
    tomorrow = datetime.now(UTC) + timedelta(days=1)
    with connect(world, "test") as db:
        for version, attempt, dead in ((3, None, None), (2, None, None), (1, None, "gone: it answered 410")):
            db.execute(insert, (f"letters~{version}", "boxes/1", version, attempt, dead))
        db.execute(insert, ("letters~4", "boxes/2", 1, tomorrow, None))
        db.execute("insert into outbox (id, policy, kind) values ('letters~5', 'letters', 'send')")
    migrate.upgrade(world)
    migrate.check(world)
    with connect(world, "test") as db:
        [(lane, first)] = posts.claim(db, "crm", 10, 60)
        assert (lane.stream, first and first.version) == ("boxes/1", 2), "that of boxes/2 is due tomorrow"
        assert first
        second = posts.delivered(db, lane, first)
        assert second
        assert second.version == 3
        _, (_, other) = posts.claim(db, "crm", 10, 60, tomorrow)
        assert other
        assert other.id == "letters~4"
    assert retry(world, Which(reason="gone")) == (1, 0)
    with connect(world, "test") as db:
        assert db.execute("select id from outbox").fetchall() == [("letters~5",)]


def test_a_core_table_that_was_changed_by_hand_is_no_migration_of_yours(world: Settings, scripts: Path) -> None:
    migrate.upgrade(world)
    with connect(world, "test") as db:
        db.execute("alter table live add column forgotten text")
    before = sorted(scripts.glob("*.py"))
    with pytest.raises(SchemaDrift, match="remove column") as refused:
        migrate.check(world)
    assert "Samefold's own" in refused.value.hint
    assert migrate.revise(world, "nothing of mine") is None
    assert sorted(scripts.glob("*.py")) == before


@pytest.mark.parametrize("arguments", [("check",), ("upgrade", "heads", "--sql")], ids=" ".join)
@pytest.mark.slow_but("check")
def test_alembic_itself_works_at_the_root(world: Settings, arguments: tuple[str, ...]) -> None:
    if arguments == ("check",):
        migrate.upgrade(world)
    done = subprocess.run(
        [sys.executable, "-m", "alembic", *arguments],
        env=os.environ | world.environment(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    if "--sql" in arguments:
        assert "CREATE TABLE balances_v1" in done.stdout.replace("IF NOT EXISTS ", "")
