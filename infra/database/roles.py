"""PostgreSQL's roles: an owner of all tables, one role for each kind of process, one for people (docs/database-roles.md).

`script` makes them. Later tables and SQL views, of migrations and rebuilds, get the same owner and rights from `settle`, by their
names. The roles' names begin with a prefix, which the owner's name contains.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, NamedTuple

from psycopg import sql

from infra.database.connect import Connection
from infra.database.own_tables import OWN_TABLES, VIEW_TABLE
from infra.errors import SamefoldError

PREFIX = re.compile(r"(?!pg(_|$))[a-z][a-z0-9_-]{0,49}")

ROWS, STATES, OUTCOMES = "tables of views", "tables of states", "tables of outcomes"
PEOPLE = "SQL views, and tables of the past"

_KEYS: Final = [
    ("select, insert, update (master, wrapped)", ("personal_keys",)),
    ("select, insert", ("forgotten_subjects",)),
    ("select, insert, update (next_offset)", ("keys_position",)),
]
_STATUS = "activations", "build_positions", "command_types", "live", "parked", "positions", "stopped_views", "topics"
RIGHTS: Final[Mapping[str, Iterable[tuple[str, tuple[str, ...]]]]] = {
    "agent": [
        ("select, insert, update, delete", (ROWS, STATES, OUTCOMES)),
        ("select, insert, delete, maintain", ("live",)),  # a first start locks it
        ("select, insert, delete", ("stopped_views",)),
        ("select, insert, update", ("build_positions", "positions")),
        ("select, insert, update (state)", ("builds",)),  # of a view that it stops
        ("select, insert", ("command_types", "event_types", "log_marks", "parked", "topics")),
        ("select", ("activations", "alembic_version", "archive_files", "skips")),
    ],
    "policy": [
        ("select, insert, update, delete", ("lanes", "outbox", "posts", "relay_leases")),
        ("select, insert, update", ("activations", "positions", "source_positions")),
        ("select, insert", ("parked", "received_messages", "topics")),
        ("select", ("alembic_version", "archive_files", "command_types", "live", "skips", "stopped_views")),
        *_KEYS,
    ],
    "handler": [
        ("select, update (generation)", ("positions",)),
        ("select, insert", ("command_types", "topics")),
        ("select", (STATES, OUTCOMES, "archive_files", "event_types", "live", "stopped_views")),
    ],
    "api": [
        ("select", (ROWS, OUTCOMES, "archive_files", *_STATUS)),
        ("select (id, table_name)", ("builds",)),
        ("select (policy, kind, stream, dead, due, wished_at, sent_at)", ("outbox",)),
        ("select (policy, stream, dead, wished_at)", ("posts",)),
        ("select, insert, update (ended_at, exit_code, output)", ("operator_actions",)),
        *_KEYS,
    ],
    "reader": [("select", (PEOPLE,))],
}
"""What the roles may do with which tables. `migrator` and `operator` become the owner when they log in."""
OWNERS = ("migrator", "operator")
LOGINS = (*OWNERS, *RIGHTS)


class BadPrefix(SamefoldError):
    """The roles' names can't begin with that."""

    exit_code = 2


class _Relation(NamedTuple):
    """A table or SQL view of Samefold's."""

    name: str
    kind: str
    """As in RIGHTS, or "" where only the owner may anything."""
    is_view: bool
    owner: str


def script(connection: Connection, prefix: str) -> Iterator[sql.Composed]:
    """The statements that make the roles, hand over what there is, and set all rights. Safe to run again. Raises BadPrefix."""
    if not PREFIX.fullmatch(prefix):
        raise BadPrefix(
            f"Roles can't be called {prefix}_….",
            "A prefix has at most 50 lower-case letters, digits, _ and -, a letter first. PostgreSQL keeps pg_ for itself.",
        )
    names = {role: sql.Identifier(f"{prefix}_{role}") for role in ("owner", *LOGINS)}
    [(base, place, is_superuser)] = connection.execute(
        "select current_database(), current_schema(), rolsuper from pg_roles where rolname = current_user"
    )
    database, schema, owner = sql.Identifier(base), sql.Identifier(place), names["owner"]
    known = _existing(connection, prefix, ("owner", *LOGINS))
    for role, name in names.items():
        if role not in known:
            yield sql.SQL("create role {} {}").format(name, sql.SQL("nologin" if role == "owner" else "login"))
    if not is_superuser:
        yield sql.SQL("grant {} to current_user").format(owner)
    yield sql.SQL("grant {} to {} with inherit false, set true").format(owner, _listed(names[role] for role in OWNERS))
    yield sql.SQL("revoke connect, temporary on database {} from public").format(database)
    yield sql.SQL("grant connect on database {} to {}").format(database, _listed(names[role] for role in LOGINS))
    for role in OWNERS:
        yield sql.SQL("alter role {} in database {} set role = {}").format(
            names[role], database, sql.Literal(f"{prefix}_owner")
        )
    yield sql.SQL("alter role {} in database {} set default_transaction_read_only = on").format(
        names["reader"], database
    )
    yield sql.SQL("alter schema {} owner to {}").format(schema, owner)
    yield sql.SQL("revoke create on schema {} from public").format(schema)
    yield sql.SQL("grant usage on schema {} to {}").format(schema, _listed(names[role] for role in RIGHTS))
    yield sql.SQL("alter default privileges for role {} revoke execute on routines from public").format(owner)
    relations = _relations(connection)
    for kind, identity in connection.execute(
        _NOT_OWNED, (f"{prefix}_owner", [one.name for one in relations])
    ).fetchall():
        thing = sql.SQL(f"{kind} {identity}")  # as PostgreSQL quoted it
        yield sql.SQL("alter {} owner to {}").format(thing, owner)
        if kind == "routine":
            yield sql.SQL("revoke execute on {} from public").format(thing)
    yield from _rights(prefix, RIGHTS, relations)


def apply(connection: Connection, prefix: str) -> int:
    """Run the script in one transaction; the number of statements. Raises BadPrefix, psycopg.Error."""
    with connection.transaction():
        statements = list(script(connection, prefix))
        for statement in statements:
            connection.execute(statement)
    return len(statements)


def settle(connection: Connection, relation: str | None = None) -> None:
    """Give a table or SQL view, by default all of Samefold's, the owner and the rights of its name, if there are roles."""
    row = connection.execute(
        "select pg_get_userbyid(relowner) from pg_class where oid = to_regclass('builds')"
    ).fetchone()
    prefix = row[0].removesuffix("_owner") if row else ""
    if not row or prefix == row[0] or not (roles := _existing(connection, prefix, RIGHTS)):
        return
    relations = [one for one in _relations(connection) if relation in (None, one.name)]
    for one in relations:
        if one.owner != row[0]:
            connection.execute(
                sql.SQL("alter {} {} owner to {}").format(
                    sql.SQL("view" if one.is_view else "table"), sql.Identifier(one.name), sql.Identifier(row[0])
                )
            )
    for statement in _rights(prefix, roles, relations):
        connection.execute(statement)


def set_password(connection: Connection, role: str, password: str) -> None:
    """Set a role's password. Only what SCRAM checks it with leaves this process. Raises psycopg.Error."""
    verifier = connection.pgconn.encrypt_password(password.encode(), role.encode(), b"scram-sha-256")
    connection.execute(
        sql.SQL("alter role {} password {}").format(sql.Identifier(role), sql.Literal(verifier.decode()))
    )


def _rights(prefix: str, roles: Iterable[str], relations: Iterable[_Relation]) -> Iterator[sql.Composed]:
    """Revokes all rights, then grants each role its own."""
    of_kind: dict[str, list[sql.Identifier]] = {}
    for one in relations:
        of_kind.setdefault(one.kind, []).append(sql.Identifier(one.name))
    if not of_kind:
        return
    grantees = {role: sql.Identifier(f"{prefix}_{role}") for role in RIGHTS if role in roles}
    yield sql.SQL("revoke all on {} from public, {}").format(
        _listed(name for names in of_kind.values() for name in names), _listed(grantees.values())
    )
    for role, grantee in grantees.items():
        for privileges, kinds in RIGHTS[role]:
            if names := [name for kind in kinds for name in of_kind.get(kind, ())]:
                yield sql.SQL("grant {} on {} to {}").format(sql.SQL(privileges), _listed(names), grantee)


def _relations(connection: Connection) -> list[_Relation]:
    """Tables of views by their comments, too: others may have tables with such names in the schema."""
    found = connection.execute(
        "select relname, relkind = 'v', pg_get_userbyid(relowner), coalesce(obj_description(oid, 'pg_class'), '') "
        "from pg_class where relkind in ('r', 'v') "
        "and relnamespace = (select oid from pg_namespace where nspname = current_schema()) order by relname"
    ).fetchall()
    views = {
        name: match["view"]
        for name, is_view, _, comment in found
        if not is_view and (match := VIEW_TABLE.fullmatch(name)) and comment.startswith(f"view {match['view']},")
    }
    known = {*OWN_TABLES, "alembic_version", *views}
    return [
        _Relation(name, _kind(name, is_view), is_view, owner)
        for name, is_view, owner, _ in found
        if (name in views.values() if is_view else name in known)
    ]


def _kind(name: str, is_view: bool) -> str:
    table = VIEW_TABLE.fullmatch(name)
    if table is None and not is_view:
        return name
    view = table["view"] if table else name
    core = OUTCOMES if view == "command_outcomes" else STATES if view.startswith("streams_") else ""
    if is_view or (table and table["past"]):
        return "" if core else PEOPLE
    return core or ROWS


def _existing(connection: Connection, prefix: str, roles: Iterable[str]) -> list[str]:
    names = [f"{prefix}_{role}" for role in roles]
    found = connection.execute("select rolname from pg_roles where rolname = any(%s)", (names,))
    return [name.removeprefix(f"{prefix}_") for (name,) in found]


def _listed(names: Iterable[sql.Identifier]) -> sql.Composed:
    return sql.SQL(", ").join(names)


_NOT_OWNED = """
with here as (select oid from pg_namespace where nspname = current_schema()),
things (class, id, relation, owner) as (
  select 'pg_class'::regclass, c.oid, relname, relowner from pg_class c, here
   where relnamespace = here.oid and relkind in ('r', 'p', 'v', 'm', 'S')
     and not exists (select from pg_depend where classid = 'pg_class'::regclass and objid = c.oid and deptype in ('a', 'i'))
  union all select 'pg_proc'::regclass, p.oid, null, proowner from pg_proc p, here where pronamespace = here.oid
  union all select 'pg_type'::regclass, t.oid, null, typowner from pg_type t left join pg_class c on c.oid = typrelid, here
   where typnamespace = here.oid and (typtype in ('d', 'e', 'r') or c.relkind = 'c'))
select case when class = 'pg_proc'::regclass then 'routine' else o.type end, o.identity
  from things, pg_identify_object(class, id, 0) o
 where pg_get_userbyid(owner) <> %s
   and (relation = any(%s) or owner = (select relowner from pg_class where oid = to_regclass('alembic_version')))
   and not exists (select from pg_depend where classid = class and objid = id and deptype = 'e')
 order by class, o.identity
"""
"""Samefold's tables and views that another role owns, and all else of the role that has migrated so far; no extension's."""
