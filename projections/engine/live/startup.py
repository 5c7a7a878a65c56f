"""The first start of an agent, and the checks of every later one.

Positions mean something only in the topic, with the partitions and the partitioner under which they were written. And a worker
folds only while its code's views are exactly those recorded live. Both are promises that are written down here and kept.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from uuid import uuid4

from psycopg import sql

from infra.database.connect import Connection
from infra.errors import SamefoldError
from infra.log import partitioner, topics
from infra.log.rule import START
from infra.log.topics import Topic
from infra.settings import Settings
from projections.engine.store.command_types import add_types
from projections.engine.store.positions import Positions, read_positions
from projections.engine.views.core_views import code_set
from projections.engine.views.sql_views import replace_sql_view
from projections.engine.views.view import CORE, View


class ContractBroken(SamefoldError):
    """The topic is not the one whose positions the database holds."""


class ShapeChanged(SamefoldError):
    """A view's columns or a context's State changed under the same version."""


class NotEmpty(SamefoldError):
    """A first start found rows in a table that it would fill."""


@dataclass(frozen=True, slots=True)
class Contract:
    """The topic as it is now; `topic_id` as Kafka gives it."""

    topic: str
    topic_id: str
    partitions: int
    partitioner: str

    @classmethod
    def of(cls, topic: Topic) -> Contract:
        """The contract that this code keeps with a topic as it is now."""
        return cls(topic.name, topic.id, topic.partitions, partitioner.NAME)


def ensure_started(
    connection: Connection, agent: str, views: Mapping[str, View], contract: Contract
) -> Positions | None:
    """Make the first start if there was none, check the contract and the views' shapes, and return where the agent stands.

    The first start writes contract, positions at 0, builds and pointers in one transaction, or nothing. None where the
    agent has never run and can't start by itself, because some of its views are live in another agent: `set_difference`
    says what to do. Raises ContractBroken, ShapeChanged, NotEmpty, psycopg.Error.
    """
    positions = read_positions(connection, agent, contract.topic)
    if positions is None:
        with connection.transaction():
            # two first starts at once: the second waits here, and then finds what the first one wrote
            connection.execute("lock table live in share row exclusive mode")
            positions = read_positions(connection, agent, contract.topic)
            taken = connection.execute("select 1 from live where view = any(%s) limit 1", [list(views)]).fetchone()
            if positions is None and not taken:
                check_contract(connection, contract)
                _start(connection, agent, views, contract)
        positions = positions or read_positions(connection, agent, contract.topic)
    check_contract(connection, contract)
    _check_shapes(connection, views)
    _ensure_sql_views(connection, views)
    return positions


def check_contract(connection: Connection, contract: Contract) -> None:
    """Compare the topic with what the database was promised; write it down the first time. Raises ContractBroken."""
    connection.execute(
        "insert into topics (topic, topic_id, partitions, partitioner) values (%s, %s, %s, %s) on conflict do nothing",
        (contract.topic, contract.topic_id, contract.partitions, contract.partitioner),
    )
    row = connection.execute(
        "select topic_id, partitions, partitioner from topics where topic = %s", [contract.topic]
    ).fetchone()
    require_promised(Contract(contract.topic, *row) if row else contract, contract)


def require_contract(settings: Settings, connection: Connection) -> Topic:
    """The topic of events, which is the one that the positions are in. Raises ContractBroken, TopicMissing, KafkaAway."""
    topic = topics.describe(settings, settings.events_topic)
    check_contract(connection, Contract.of(topic))
    return topic


def require_promised(promised: Contract, contract: Contract) -> None:
    """Raises ContractBroken where the topic as it is now is not what the database was promised."""
    if promised.topic_id != contract.topic_id:
        raise ContractBroken(
            f"Topic '{contract.topic}' was made anew: its id is {contract.topic_id}, but the database's positions are in "
            f"{promised.topic_id}.",
            "Restore the topic, or start with an empty database (`samefold dev reset` for the local one).",
        )
    if promised.partitions != contract.partitions:
        raise ContractBroken(
            f"Topic '{contract.topic}' has {contract.partitions} partitions; it had {promised.partitions}.",
            "Streams would now live in other partitions. Copy the log into a new topic and start with an empty database.",
        )
    if promised.partitioner != contract.partitioner:
        raise ContractBroken(
            f"This code places streams by {contract.partitioner}; topic '{contract.topic}' was filled by "
            f"{promised.partitioner}.",
            f"Run the code that uses {promised.partitioner}.",
        )


def set_difference(live: Mapping[str, int], code: Mapping[str, int]) -> str | None:
    """In words, how the views of this code differ from those recorded live, and what cures it; None where they agree."""
    changes, rebuilds = [], []
    for name in sorted({*live, *code}):
        has, wants = live.get(name), code.get(name)
        if has == wants:
            continue
        if wants is None:
            changes.append(f"{name} v{has} is live, but this code has no such view in this agent")
        elif has is None:
            changes.append(f"{name} v{wants} of this code is not live")
        else:
            changes.append(f"{name} is live as v{has}, this code has v{wants}")
        rebuilds.append(name)
    if not changes:
        return None
    return f"{'; '.join(changes)}. `samefold rebuild {' '.join(rebuilds)}` with this code makes it live."


def _start(connection: Connection, agent: str, views: Mapping[str, View], contract: Contract) -> None:
    for view in views.values():
        table = sql.Identifier(view.table_name)
        if connection.execute(sql.SQL("select 1 from {} limit 1").format(table)).fetchone():
            raise NotEmpty(
                f"Agent '{agent}' has never run, but {view.table_name} holds rows.",
                "The database was restored in part, or filled by hand. Restore all of it, or start with an empty one.",
            )
    generation = uuid4()
    connection.execute(
        """insert into positions (agent, topic, partition, topic_id, next_offset, epoch, seq, command_offset, generation)
           select %s, %s, p, %s, %s, %s, %s, %s, %s from generate_series(0, %s - 1) p""",
        (agent, contract.topic, contract.topic_id, *START, generation, contract.partitions),
    )
    whole = json.dumps(code_set(dict(views)))
    for view in views.values():
        build = uuid4()
        connection.execute(
            """insert into builds (id, view, version, agent, table_name, state, code_set, shape)
               values (%s, %s, %s, %s, %s, 'live', %s, %s)""",
            (build, view.name, view.version, agent, view.table_name, whole, view.shape),
        )
        connection.execute(
            "insert into live (view, agent, version, table_name) values (%s, %s, %s, %s)",
            (view.name, agent, view.version, view.table_name),
        )
    if agent == CORE:
        add_types(connection)


def _ensure_sql_views(connection: Connection, views: Mapping[str, View]) -> None:
    """Make the SQL views for people that are not there: after the first start, or after one that died before this."""
    missing = connection.execute(
        "select view from live where view = any(%s) and to_regclass(quote_ident(view)) is null order by view",
        [list(views)],
    ).fetchall()
    for (name,) in missing:
        replace_sql_view(connection, name)


def _check_shapes(connection: Connection, views: Mapping[str, View]) -> None:
    rows = connection.execute(
        "select b.view, b.version, b.shape from builds b join live l using (table_name) where b.view = any(%s)",
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
