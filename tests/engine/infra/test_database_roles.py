"""make test: a statement of each kind takes milliseconds. `samefold db roles`: each role may do what its processes do, and nothing
else, with tables of the future too. That the processes can work with them: test_on_the_wire.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import psycopg
import pytest
from psycopg import errors, sql

from domain.engine.personal.keys import Keys
from domain.engine.personal.masters import new_line
from infra.database.connect import DatabaseRefused, connect
from infra.log import topics
from infra.log.contract import Contract
from projections.engine.live.startup import ensure_started
from projections.engine.operate.verify import verify
from projections.engine.rebuild.builds import drop_tables, droppable
from projections.engine.rebuild.claims import builder, claim, end_builders
from projections.engine.rebuild.rebuild import go_to, rebuild, resume
from projections.engine.store.command_types import make_types_live
from projections.engine.views.core_views import agent_views
from projections.engine.views.sql_views import ViewInUse, replace_sql_view
from tests.engine.bookkeeper import Bookkeeper, fold_all
from tests.engine.infra.role_worlds import RoleWorld, role_world
from tests.engine.projections.bankviews import live_table, stop_as_older_code_would
from tests.engine.spine import set_up
from tools.dev.stack import Stack
from tools.migrations.migrate import upgrade
from tools.testing.fixtures import ROOT, Samefold
from tools.testing.waiting import DEADLINE_S, until

LOGINS = ("migrator", "operator", "agent", "policy", "handler", "api", "reader")
LIMITED = ("agent", "policy", "handler", "api", "reader")


@pytest.fixture
def place(stack: Stack, migrated: str) -> Iterator[RoleWorld]:
    with role_world(stack, migrated) as found:
        found.apply()
        yield found


@pytest.fixture(scope="module")
def shared(stack: Stack, migrated: str) -> Iterator[RoleWorld]:
    """For tests that change nothing."""
    with role_world(stack, migrated) as found:
        found.apply()
        set_up(found.admin)
        yield found


MAY = """
object                select                      insert               update        delete
balances              reader                      -                    -             -
streams_accounts      -                           -                    -             -
command_outcomes      -                           -                    -             -
balances_v2           agent api                   agent                agent         agent
statement_v2          agent api                   agent                agent         agent
streams_accounts_v3   agent handler               agent                agent         agent
command_outcomes_v3   agent handler api           agent                agent         agent
positions             agent policy handler api    agent policy         agent policy  -
live                  agent policy handler api    agent                -             agent
stopped_views         agent policy handler api    agent                -             agent
topics                agent policy handler api    agent policy handler  -            -
builds                agent                       agent                -             -
build_positions       agent api                   agent                agent         -
build_parts           -                           -                    -             -
parked                agent policy api            agent policy         -             -
skips                 agent policy                -                    -             -
command_types         agent policy handler api    agent handler        -             -
event_types           agent handler               agent                -             -
activations           agent policy api            policy               policy        -
outbox                policy                      policy               policy        policy
relay_leases          policy                      policy               policy        policy
posts                 policy                      policy               policy        policy
lanes                 policy                      policy               policy        policy
source_positions      policy                      policy               policy        -
received_messages     policy                      policy               -             -
personal_keys         policy api                  policy api           -             -
forgotten_subjects    policy api                  policy api           -             -
keys_position         policy api                  policy api           -             -
archive_files         agent policy handler api    -                    -             -
log_marks             agent                       agent                -             -
operator_actions      api                         api                  -             -
alembic_version       agent policy                -                    -             -
"""
"""Who may do what with a whole table; by columns, some may more."""
ROWS = [re.split(r" {2,}", line) for line in MAY.strip().splitlines()[1:]]
BY_COLUMN = {
    ("handler", "update positions set generation = generation"): True,
    ("handler", "select from positions for update"): True,
    ("handler", "update positions set next_offset = 0"): False,
    ("handler", "update positions set epoch = 0, generation = generation"): False,
    ("api", "select policy, kind, stream, dead, due, wished_at, sent_at from outbox"): True,
    ("api", "select id, table_name from builds"): True,
    ("api", "select policy, dead, wished_at from posts"): True,
    ("api", "select body from posts"): False,
    ("api", "select body from outbox"): False,
    ("api", "select then_body from outbox"): False,
    ("api", "update personal_keys set wrapped = null, master = ''"): True,
    ("api", "update personal_keys set subject = ''"): False,
    ("api", "update operator_actions set ended_at = now(), exit_code = 0, output = ''"): True,
    ("api", "update operator_actions set command = ''"): False,
    ("policy", "update personal_keys set at_offset = 0"): False,
    ("policy", "update keys_position set next_offset = 1"): True,
    ("policy", "update keys_position set topic_id = ''"): False,
    ("agent", "update builds set state = state"): True,
    ("agent", "update builds set table_name = table_name"): False,
    ("agent", "lock table live in share row exclusive mode"): True,
    ("agent", "lock table positions in access exclusive mode"): True,  # who may update may lock
    ("handler", "lock table live in row exclusive mode"): False,
    ("reader", "lock table balances_v2 in access share mode"): False,
}
DDL = (
    "create table mine (a int)",
    "create temporary table mine (a int)",
    "create table mine as select 1",
    "create view mine as select 1",
    "create schema mine",
    "create function mine() returns int language sql as 'select 1'",
    "create type mine as enum ('a')",
    "create sequence mine",
    "create role mine",
    "create index on balances_v2 (cents)",
    "create rule mine as on insert to balances_v2 do nothing",
    "alter table balances_v2 add column mine int",
    "alter view balances owner to {login}",
    "alter role {operator} password 'mine'",
    "alter database {database} set lock_timeout = 1",
    "comment on table balances_v2 is 'mine'",
    "drop table balances_v2",
    "drop view balances",
    "truncate balances_v2",
    "truncate outbox",
    "grant {owner} to {login}",
    "set role {owner}",
    "set session authorization {owner}",
    "select to_be_called()",
    "select pg_terminate_backend(pid) from pg_stat_activity where usename = {operator_text}",
    "select pg_read_file('postgresql.conf')",
    "copy (select 1) to program 'true'",
)


def may(place: RoleWorld, role: str, statement: str, *, unlocked: bool = True) -> bool:
    """Whether a role's rights let it run this; nothing of it stays."""
    return allowed(place, role, [statement], unlocked=unlocked) == [statement]


def allowed(place: RoleWorld, role: str, statements: Sequence[str], *, unlocked: bool = True) -> list[str]:
    """What of this a role's rights let it run. A reader's sessions can't but read, unless they say that they are `unlocked`."""
    names = {name: sql.Identifier(place.role(name)) for name in ("owner", *LOGINS)}
    names |= {"login": names[role], "database": sql.Identifier(place.database)}
    operator = sql.Literal(place.role("operator"))
    found = []
    with place.connected(role) as db:
        if unlocked:
            db.execute("set default_transaction_read_only = off")
        for statement in statements:
            try:
                with db.transaction(force_rollback=True):
                    db.execute(sql.SQL(statement).format(**names, operator_text=operator))
            except (errors.InsufficientPrivilege, errors.ReadOnlySqlTransaction, errors.ObjectNotInPrerequisiteState):
                continue
            except psycopg.IntegrityError:  # the rights were checked before
                pass
            found.append(statement)
    return found


def whole(place: RoleWorld) -> dict[str, set[str]]:
    """Statements that take a right for all columns of a table, and who should have it, by the matrix.

    To insert what is selected, or to change what is compared, takes both.
    """
    columns = "select attrelid::regclass::text, attname from pg_attribute where attnum = 1"
    with place.connected() as db:
        first = dict(db.execute(columns).fetchall())
    found: dict[str, set[str]] = {}
    for name, *whose in ROWS:
        select, change = f"select * from {name}", f"update {name} set {first[name]} = {first[name]}"
        statements = (select, f"insert into {name} {select}", change, f"delete from {name}")
        found |= {one: set(who.split()) for one, who in zip(statements, whose, strict=True)}
    return found


def test_the_matrix_names_every_table(shared: RoleWorld) -> None:
    with shared.connected() as db:
        found = {name for (name,) in db.execute("select tablename from pg_tables where schemaname = 'public'")}
    others = re.compile(r"(streams_|daily_totals|transfers).*_v\d+|(balances|statement)_v1|command_outcomes_v[12]")
    assert {name for name in found if not others.fullmatch(name)} <= {row[0] for row in ROWS}


@pytest.mark.parametrize("role", LIMITED)
def test_a_role_may_do_what_the_matrix_says(shared: RoleWorld, role: str) -> None:
    matrix = whole(shared)
    assert allowed(shared, role, [*matrix]) == [statement for statement, who in matrix.items() if role in who]


@pytest.mark.parametrize("of", BY_COLUMN, ids=" ".join)
def test_some_rights_are_of_columns_or_locks(shared: RoleWorld, of: tuple[str, str]) -> None:
    assert may(shared, *of) == BY_COLUMN[of]


@pytest.mark.parametrize("role", LIMITED)
def test_no_process_may_change_tables_roles_or_sessions(shared: RoleWorld, role: str) -> None:
    with shared.connected("operator") as operator:
        operator.execute("create or replace function to_be_called() returns int language sql as 'select 1'")
        assert allowed(shared, role, DDL) == []


def test_a_reader_reads(shared: RoleWorld) -> None:
    assert may(shared, "reader", "select * from statement natural join balances", unlocked=False)
    with shared.connected("reader") as db:
        assert db.execute("show default_transaction_read_only").fetchone() == ("on",)


def test_others_do_not_get_in(shared: RoleWorld) -> None:
    stranger = shared.role("stranger")
    with shared.connected() as db:
        db.execute(sql.SQL("create role {} login").format(sql.Identifier(stranger)))
    for who, why in ((stranger, "permission denied for database"), (shared.role("owner"), "not permitted to log in")):
        with pytest.raises(DatabaseRefused, match=why):
            connect(shared.settings(who), "test")


def test_the_migrator_makes_indexes_and_says_for_whom_it_waits(
    place: RoleWorld, caplog: pytest.LogCaptureFixture
) -> None:
    with place.connected() as db:
        db.execute("drop index balances_v2_by_cents_account_031a120f")
    with place.connected("agent") as agent, ThreadPoolExecutor(1) as pool:
        agent.execute("begin isolation level repeatable read")
        agent.execute("update balances_v2 set cents = cents")
        upgraded = pool.submit(upgrade, place.of("migrator"))
        until(lambda: f"user {place.role('agent')}" in caplog.text, "the session is named")
        agent.execute("rollback")
        assert upgraded.result(DEADLINE_S).indexes.made == ["balances_v2_by_cents_account_031a120f"]
    with place.connected() as db:
        [(owner,)] = db.execute("select tableowner from pg_tables where tablename = 'balances_v2'")
        found = "select pg_get_userbyid(relowner) from pg_class where relname = 'balances_v2_by_cents_account_031a120f'"
        assert db.execute(found).fetchone() == (owner,)


@pytest.mark.parametrize("role", ["migrator", "operator"])
def test_operators_are_the_owner_from_login_on(shared: RoleWorld, role: str) -> None:
    """With all that sessions begin with, and after a pooler has reset the session."""
    owner = shared.role("owner")
    with connect(shared.of(role), "test", short_transactions=True, by_key=True) as db:
        for reset in ("", "discard all", "reset all", "reset role"):
            if reset:
                db.execute(reset.encode())
            assert db.execute("select current_user, session_user").fetchone() == (owner, shared.role(role))
            with db.transaction(force_rollback=True):
                db.execute("create table made (a int)")
                [made] = db.execute("select tableowner from pg_tables where tablename = 'made'")
                assert made == (owner,)


# ── what comes later has the same owner and rights ──


def all_rights(place: RoleWorld, name: str) -> tuple[str, list[tuple[str, str]]]:
    """A relation's owner, and who else may do what."""
    with place.connected() as db:
        [(owner,)] = db.execute("select pg_get_userbyid(relowner) from pg_class where oid = %s::regclass", (name,))
        rights = db.execute(
            "select coalesce(r.rolname, 'public'), a.privilege_type from pg_class c cross join aclexplode(c.relacl) a "
            "left join pg_roles r on r.oid = a.grantee where c.oid = %s::regclass and a.grantee <> relowner order by 1, 2",
            (name,),
        ).fetchall()
    return owner, rights


@pytest.mark.parametrize("by", ["operator", "the administrator"])
def test_what_rebuilds_make_has_the_owner_and_the_rights_of_its_name(
    place: RoleWorld, samefold: Samefold, by: str
) -> None:
    """Whoever runs them, before the switch, after it, and after older tables were dropped and the SQL view was made again.

    Tables of the past are for people.
    """
    set_up(place.admin)
    keeper = Bookkeeper(place.admin)
    keeper.life(["1", "2"], 3)
    fold_all(place.admin)
    settings = place.of("operator") if by == "operator" else place.admin
    before = {name: all_rights(place, name) for name in ("statement", "statement_v2", "streams_accounts_v3")}
    owner = place.role("owner")
    assert {who for who, _ in before.values()} == {owner}
    rebuild(settings, ["statement"], agent_views("core"))
    made = {view: live_table(place.admin, view) for view in ("statement", "streams_accounts")}
    assert made == {"statement": "statement_v2_r2", "streams_accounts": "streams_accounts_v3_r2"}
    assert all_rights(place, "statement_v2_r2") == before["statement_v2"]
    assert all_rights(place, "streams_accounts_v3_r2") == before["streams_accounts_v3"]
    assert all_rights(place, "statement") == before["statement"]
    with place.connected() as db:  # columns that differ: the SQL view is not replaced but made again
        db.execute("drop view statement")
        replace_sql_view(db, "statement")
    upgrade(settings)
    assert all_rights(place, "statement") == before["statement"]
    drop_tables(settings, droppable(settings, "statement", "statement_v2"), None)
    with place.connected("reader") as db:
        assert db.execute("select count(distinct account) from statement").fetchone() == (2,)
    keeper.life(["1", "2"], 2)
    fold_all(place.of("agent"))
    assert verify(place.of("operator"), agent_views("core")).differences == 0
    now = datetime.now(UTC).isoformat()
    done = samefold("rebuild", "balances", "--no-switch", "--as-of", now, settings=settings)
    assert done.returncode == 0, done.stderr
    [table] = re.findall(r"balances_v2_asof_\d+", done.stdout)[:1]
    assert may(place, "reader", f"select * from {table}", unlocked=False)
    assert not may(place, "api", f"select * from {table}")


def test_an_operator_sees_who_locks_a_sql_view_and_since_when_if_he_may(place: RoleWorld) -> None:
    """PostgreSQL hides what other roles' sessions do, unless the login role has been granted to see it."""
    set_up(place.admin)
    with place.connected("reader") as reader, place.connected() as admin:
        reader.execute("begin")
        reader.execute("select count(*) from balances")
        who = f"session {reader.info.backend_pid} (test, user {place.role('reader')}"
        with pytest.raises(ViewInUse, match=re.escape(f"{who}).")):
            rebuild(place.of("operator"), ["balances"], agent_views("core"), wait_s=0)
        admin.execute(sql.SQL("grant pg_read_all_stats to {}").format(sql.Identifier(place.role("operator"))))
        with pytest.raises(ViewInUse, match=re.escape(f"{who}, idle in transaction since ")):
            go_to(place.of("operator"), ["balances"], agent_views("core"), wait_s=0)


def test_a_first_start_is_an_agents_and_makes_nothing(place: RoleWorld, caplog: pytest.LogCaptureFixture) -> None:
    """Not even a SQL view that is missing: an upgrade does."""
    _, events = topics.ensure(place.admin)
    for _ in range(2):
        with place.connected("agent") as db:
            assert ensure_started(db, "core", agent_views("core"), Contract.of(events)) is not None
        with place.connected("operator") as db:
            db.execute("drop view if exists balances")
    with place.connected("handler") as db:
        make_types_live(db, place.admin.events_topic)
    assert "no SQL view for people of balances: run `samefold db upgrade`" in caplog.text
    upgrade(place.of("migrator"))
    assert may(place, "reader", "select * from balances", unlocked=False)
    stop_as_older_code_would(place.of("agent"), "balances")
    assert may(place, "reader", "select * from balances", unlocked=False), "it keeps its rows"
    assert resume(place.of("operator"), [], agent_views("core")).tables == {"balances": "balances_v2"}


def test_a_process_that_may_not_is_told_what_may(place: RoleWorld, samefold: Samefold) -> None:
    set_up(place.admin)
    for role, *command in (
        ("agent", "db", "upgrade"),
        ("agent", "rebuild", "balances"),
        ("handler", "views", "drop", "balances", "balances_v2_r2"),
        ("handler", "parked", "list"),
        ("api", "outbox", "list"),
    ):
        one = samefold(*command, settings=place.of(role))
        assert one.returncode == 1
        assert one.stderr.startswith("database-refused: "), one.stderr
        assert f"refused this to {place.role(role)}: permission denied" in one.stderr
        assert "run as the migrator or the operator: docs/database-roles.md" in one.stderr


def test_an_operator_ends_what_operators_began(place: RoleWorld) -> None:
    """PostgreSQL lets a role end its own sessions: the owner, which it has become, has none."""
    set_up(place.admin)
    with builder(place.of("operator"), "rebuild") as first, place.connected("operator") as second:
        claim(first, "balances")
        end_builders(second, ["balances"])
        with pytest.raises(psycopg.OperationalError):
            first.execute("select")


# ── making them ──


def test_what_is_printed_is_what_is_applied(stack: Stack, migrated: str, samefold: Samefold) -> None:
    with role_world(stack, migrated) as place:
        printed = samefold("db", "roles", "--prefix", place.prefix, settings=place.admin)
        assert printed.returncode == 0, printed.stderr
        assert f'create role "{place.prefix}_api" login;' in printed.stdout
        assert "password" not in printed.stdout
        with place.connected() as db:
            assert db.execute("select from pg_roles where starts_with(rolname, %s)", (place.prefix,)).fetchall() == []
            db.execute(printed.stdout.encode())
        rights = {row[0]: all_rights(place, row[0]) for row in ROWS}
        again = samefold("db", "roles", "--prefix", place.prefix, "--apply", settings=place.admin)
        assert again.stdout.startswith("Applied ")
        assert {name: all_rights(place, name) for name in rights} == rights
        left = samefold("db", "roles", "--prefix", place.prefix, settings=place.of("reader")).stdout
        assert "create role" not in left
        assert '_owner" to current_user' in left, "of whoever runs it, not of whoever printed it"
        assert "alter table" not in left


@pytest.mark.parametrize("prefix", ["", "A", "1a", 'a"; drop table live; --', "a b", "a" * 51, "é", "pg"])
def test_an_odd_prefix_is_refused(shared: RoleWorld, samefold: Samefold, prefix: str) -> None:
    refused = samefold("db", "roles", "--apply", "--prefix", prefix, settings=shared.admin)
    assert refused.returncode == 2
    assert refused.stderr.startswith("bad-prefix: ")


OWNERS = """
select name, pg_get_userbyid(owner) from (
  select relname, relowner, relnamespace from pg_class
  union select proname, proowner, pronamespace from pg_proc
  union select typname, typowner, typnamespace from pg_type) all_of_them (name, owner, place)
where place = 'public'::regnamespace
"""


THEIRS = {f"{array}{name}" for name in ("theirs", "report_v2", "report_v2_asof_1") for array in ("", "_")}
"""Tables and their array types; some are called as Samefold's are."""


def test_an_existing_database_is_handed_over(stack: Stack) -> None:
    """All of the role that has migrated so far, and nothing of others."""
    with role_world(stack, "template0") as place:
        old, other = place.role("old"), place.role("other")
        with place.connected() as db:
            made = sql.SQL("create role {0} login; grant create on schema public to {0}")
            for name in (old, other):
                db.execute(made.format(sql.Identifier(name)))
        set_up(place.settings(old))
        theirs = "create table theirs (a int); create table report_v2 (a int); create table report_v2_asof_1 (a int)"
        of_old = """
            create sequence numbers; create type mood as enum ('good'); create domain short as text;
            create function answer() returns int language sql as 'select 42';
            create table odd (id serial, mood mood); create materialized view seen as select 1 as one;
            create type pair as (a int, b int); grant select on positions to public
        """
        for name, things in ((old, of_old), (other, theirs)):
            with connect(place.settings(name), "test") as db:
                db.execute(things.encode())
        assert place.apply() > 0
        with place.connected() as db:
            owners = dict(db.execute(OWNERS).fetchall())
        assert {name for name, who in owners.items() if who == other} == THEIRS
        assert {"numbers", "mood", "short", "answer", "odd", "odd_id_seq", "seen", "pair"} <= owners.keys()
        assert {"live", "balances"} <= owners.keys()
        assert {who for name, who in owners.items() if name not in THEIRS} == {place.role("owner")}
        for role in LIMITED:
            assert not may(place, role, "select answer()")
            assert not may(place, role, "select * from odd")
        assert not may(place, "reader", "select * from positions")
        assert may(place, "agent", "select * from balances_v2")


def test_an_administrator_need_not_be_a_superuser(stack: Stack) -> None:
    """As on managed servers: it owns the database, and may make roles."""
    with role_world(stack, "template0") as place:
        boss = place.role("boss")
        with place.connected() as db:
            db.execute(sql.SQL("create role {} login createrole").format(sql.Identifier(boss)))
            mine = sql.SQL("alter database {} owner to {}")
            db.execute(mine.format(sql.Identifier(place.database), sql.Identifier(boss)))
        place.admin = place.settings(boss)
        place.apply()
        upgrade(place.of("migrator"))
        place.apply()
        assert all_rights(place, "positions")[0] == place.role("owner")
        assert may(place, "reader", "select * from balances", unlocked=False)
        assert not may(place, "reader", "select * from balances_v2")


def test_a_right_too_many_is_taken_back(place: RoleWorld) -> None:
    with place.connected("operator") as db:
        db.execute(sql.SQL("grant all on outbox to {}").format(sql.Identifier(place.role("reader"))))
        db.execute("grant select (body) on outbox to public")
    assert may(place, "api", "select body from outbox")
    place.apply()
    assert not may(place, "api", "select body from outbox")
    assert not may(place, "reader", "select * from outbox")


# ── passwords, and keys ──


@pytest.mark.parametrize("given", ["", "\n", "a\0b\n", "one\ntwo\n", "\udcff\n"])
def test_no_password_is_refused(shared: RoleWorld, samefold: Samefold, given: str) -> None:
    assert samefold("db", "password", shared.role("api"), settings=shared.admin, given=given).returncode == 2


def test_a_password_for_nobody(shared: RoleWorld, samefold: Samefold) -> None:
    refused = samefold("db", "password", "nobody-here", settings=shared.admin, given="secret-word\n")
    assert refused.returncode == 1
    assert refused.stderr.startswith("database-refused: ")
    assert "secret-word" not in refused.stderr


@pytest.mark.parametrize("role", ["api", "policy", "operator"])
def test_keys_of_people_are_made_copied_and_destroyed(place: RoleWorld, role: str, tmp_path: Path) -> None:
    (file := tmp_path / "master-key").touch(0o600)
    file.write_text(new_line("tests"))
    settings = place.of(role, place.admin.model_copy(update={"master_key_file": file}))
    keys = Keys(settings)
    with connect(settings, "test") as db:
        keys.start(db)
        made = keys.key_for(db, "customers/ada")
        assert keys.keys_for(db, [made.id]) == {made.id: made.key}
    operator = place.of("operator", settings)
    with connect(operator, "test") as db:
        assert Keys(operator).forget(db, "customers/ada").keys == 1
    with connect(settings, "test") as db:
        keys.catch_up(db)
        assert keys.keys_for(db, [made.id]) == {made.id: None}


# ── the page ──

PAGE = (ROOT / "docs" / "database-roles.md").read_text()


def test_the_page(stack: Stack, migrated: str, samefold: Samefold) -> None:
    """Its commands print what it shows (`…` stands for anything)."""
    assert {f"samefold_{role}" for role in LOGINS} == set(re.findall(r"\| `(samefold_\w+)` \|", PAGE))
    typed = 0
    with role_world(stack, migrated, "samefold") as place:
        settings = place.admin
        for block in re.findall(r"^```console\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL):
            for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
                line, _, output = part.partition("\n")
                if line.startswith("export "):
                    settings = place.of("migrator")
                    assert f"//{place.role('migrator')}@/" in line
                    continue
                done = samefold(*line.partition(" <")[0].split()[1:], settings=settings, given="secret\n")
                assert done.returncode == 0, (line, done.stderr)
                shown = ".*".join(map(re.escape, output.split("…")))
                assert re.fullmatch(shown, done.stdout, re.DOTALL), (line, done.stdout)
                typed += 1
    assert typed == 4
