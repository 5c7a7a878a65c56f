"""A world whose database has roles, for tests: each has a prefix of its own, since roles belong to the whole server."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from urllib.parse import quote

import psycopg
from psycopg import sql

from infra.database import roles
from infra.database.connect import Connection, connect
from infra.settings import Settings
from tools.dev.postgres import USER
from tools.dev.stack import Stack
from tools.testing.fixtures import world_of

_numbers = count(1)


class RoleWorld:
    """A database, and settings that connect to it as one of its roles."""

    def __init__(self, stack: Stack, admin: Settings, prefix: str) -> None:
        self.stack = stack
        self.admin = admin
        self.prefix = prefix
        self.database = str(psycopg.conninfo.conninfo_to_dict(admin.database)["dbname"])

    def role(self, role: str) -> str:
        return f"{self.prefix}_{role}"

    def settings(self, user: str, settings: Settings | None = None) -> Settings:
        """Other settings, if given, with this database and user."""
        url = self.stack.postgres.url(self.database).replace(f"{USER}@", f"{quote(user)}@")
        return Settings(**{**(settings or self.admin).model_dump(exclude_none=True), "database_url": url})

    def of(self, role: str, settings: Settings | None = None) -> Settings:
        return self.settings(self.role(role), settings)

    @contextmanager
    def connected(self, role: str = "") -> Iterator[Connection]:
        with connect(self.of(role) if role else self.admin, "test") as db:
            yield db

    def apply(self) -> int:
        with self.connected() as db:
            return roles.apply(db, self.prefix)


@contextmanager
def role_world(stack: Stack, template: str, prefix: str = "") -> Iterator[RoleWorld]:
    """A copy of a database, without the roles yet; whatever roles the test makes with the prefix are gone afterwards."""
    prefix = prefix or f"t{os.getpid()}-{next(_numbers)}"  # a name that must be quoted
    with world_of(stack, template) as settings:
        yield RoleWorld(stack, settings, prefix)
    with psycopg.connect(stack.postgres.url(), autocommit=True) as db:
        of_prefix = "select rolname from pg_roles where starts_with(rolname, %s) order by not rolname ^@ %s"
        for (name,) in db.execute(of_prefix, (f"{prefix}_", f"{prefix}_owner")).fetchall():  # with who belongs to it
            db.execute(sql.SQL("drop role {}").format(sql.Identifier(name)))
