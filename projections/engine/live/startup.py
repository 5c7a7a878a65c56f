"""The first start of an agent, and the checks of every later start.

Positions are valid only for the topic, the partitions and the partitioner with which they were written. And a worker folds only
while its code's views are exactly the live ones. The first start records both, and later ones check them.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from uuid import uuid4

from psycopg import sql

from infra.database.connect import Connection
from infra.errors import SamefoldError
from infra.log.contract import Contract, check_contract
from infra.log.rule import START
from projections.engine.store.command_types import add_types
from projections.engine.store.event_types import record_event_types
from projections.engine.store.positions import POINTERS, Positions, read_positions, set_generation
from projections.engine.views.core_views import code_set
from projections.engine.views.sql_views import is_in_sql_view
from projections.engine.views.view import CORE, View

log = logging.getLogger(__name__)

HOW_IT_GOES_LIVE = (
    "`samefold rebuild` makes it live; in a new service, an agent's first start does (`samefold run agent`)."
)
"""What to do about a view that has no live version. Without names, as others may be missing: their agent needs all of them."""


class ShapeChanged(SamefoldError):
    """A view's columns or a context's State changed under the same version."""


class NotEmpty(SamefoldError):
    """A first start found rows in a view's table."""


def ensure_started(
    connection: Connection, agent: str, views: Mapping[str, View], contract: Contract
) -> Positions | None:
    """Make the first start if there was none, check the contract and the views' shapes, and return the agent's positions.

    The first start writes contract, positions at 0, builds and live tables in one transaction, or nothing. Returns None if the
    agent has never run and some of its views are live in another agent: then a rebuild starts it (`set_difference`). Raises
    ContractBroken, ShapeChanged, NotEmpty, psycopg.Error.
    """
    positions = read_positions(connection, agent, contract.topic)
    if positions is None:
        with connection.transaction():
            # of two first starts at once, the second waits here and then finds the first one's positions
            connection.execute("lock table live in share row exclusive mode")
            positions = read_positions(connection, agent, contract.topic)
            known = f"select 1 from {POINTERS} p where view = any(%s) limit 1"  # noqa: S608
            taken = connection.execute(known, [list(views)]).fetchone()
            if positions is None and not taken:
                check_contract(connection, contract)
                _start(connection, agent, views, contract)
        positions = positions or read_positions(connection, agent, contract.topic)
    check_contract(connection, contract)
    check_shapes(connection, views, "live")
    _warn_of_missing_sql_views(connection, views)
    return positions


def set_difference(live: Mapping[str, int], code: Mapping[str, int]) -> str | None:
    """How the views of this code differ from the live ones, with the command to run, as text; None if they are equal."""
    changes, rebuilds = [], []
    for name in sorted({*live, *code}):
        has, wants = live.get(name), code.get(name)
        if has == wants:
            continue
        if wants is None:
            changes.append(f"{name} v{has} belongs to this agent, but this code has no such view in it")
        elif has is None:
            changes.append(f"{name} v{wants} of this code is not live")
        else:
            changes.append(f"{name} is live as v{has}, this code has v{wants}")
        rebuilds.append(name)
    if not changes:
        return None
    hint = f"`samefold rebuild {' '.join(rebuilds)}` with this code makes"
    if any(name not in code or live.get(name, 0) > code[name] for name in rebuilds):
        hint = f"If newer code made that live, restart this process with it; else {hint} its own views live."
    else:
        hint += " it live." if len(rebuilds) == 1 else " them live."
    return f"{'; '.join(changes)}. {hint}"


def _start(connection: Connection, agent: str, views: Mapping[str, View], contract: Contract) -> None:
    for view in views.values():
        table = sql.Identifier(view.table_name)
        if connection.execute(sql.SQL("select 1 from {} limit 1").format(table)).fetchone():
            raise NotEmpty(
                f"Agent '{agent}' has never run, but {view.table_name} holds rows.",
                "The database was restored in part, or filled by hand. Restore all of it, or start with an empty one.",
            )
    set_generation(connection, contract.topic, {agent: dict.fromkeys(range(contract.partitions), START)}, "first start")
    whole = json.dumps(code_set(views))
    for view in views.values():
        connection.execute(
            """insert into builds (id, view, version, agent, table_name, state, code_set, shape)
               values (%s, %s, %s, %s, %s, 'live', %s, %s)""",
            (uuid4(), view.name, view.version, agent, view.table_name, whole, view.shape),
        )
        connection.execute(
            "insert into live (view, agent, version, table_name) values (%s, %s, %s, %s)",
            (view.name, agent, view.version, view.table_name),
        )
    if agent == CORE:
        add_types(connection)
        record_event_types(connection)


def _warn_of_missing_sql_views(connection: Connection, views: Mapping[str, View]) -> None:
    """Or that lack the live table. Commands and the API do without them, and to make them is not an agent's right."""
    live = connection.execute("select view, table_name from live where view = any(%s) order by view", [list(views)])
    if missing := [view for view, table in live.fetchall() if not is_in_sql_view(connection, view, table)]:
        names = ", ".join(missing)
        log.warning(
            "there is no SQL view for people of %s: run `samefold db upgrade`, which makes what is missing", names
        )


def check_shapes(connection: Connection, views: Mapping[str, View], among: str) -> None:
    """Compare these views with their tables among those of this SQL. Raises ShapeChanged, psycopg.Error."""
    rows = connection.execute(
        f"select b.view, b.version, b.shape from builds b join {among} l using (table_name) where b.view = any(%s)",  # noqa: S608
        [list(views)],
    ).fetchall()
    for name, version, shape in rows:
        view = views[name]
        if view.version == version and view.shape != shape:
            where = f"STATE_VERSION in domain/{view.contexts[0]}.py" if view.kind == "snapshot" else "its VERSION"
            raise ShapeChanged(
                f"View '{name}' changed its shape, but is still version {version}.",
                f"Raise {where} to {version + 1}, then `samefold db revision`, `samefold db upgrade` and "
                f"`samefold rebuild {name}`.",
            )
