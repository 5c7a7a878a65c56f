"""make test: a database is quick.

The first start writes everything or nothing, once; every later one holds the world against what was written.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import psycopg
import pytest

from infra.database.connect import Connection
from infra.log.contract import Contract, ContractBroken
from infra.log.rule import START
from infra.settings import Settings
from projections.engine.live.startup import NotEmpty, ShapeChanged, ensure_started, set_difference
from projections.engine.store.positions import Live, Positions, read_positions
from projections.engine.views.view import View
from tests.engine.projections.viewkit import MOVES, PURSES, make_tables, open_connection, view, views

CONTRACT = Contract("events", "topic-1", 3, "murmur2")


def started(db: Connection, some: Mapping[str, View], contract: Contract = CONTRACT) -> Positions | None:
    return ensure_started(db, "core", some, contract)


@contextmanager
def opened(world: Settings, **more: str) -> Iterator[tuple[Connection, dict[str, View]]]:
    """A database with the tables of these views and of the purses."""
    some = views(purses=PURSES, **more)
    make_tables(world, some)
    with open_connection(world) as db:
        yield db, some


def count(db: Connection, table: str) -> int:
    row = db.execute(f"select count(*) from {table}").fetchone()
    assert row is not None
    return int(row[0])


def test_the_first_start_begins_every_partition_and_points_to_every_table(world: Settings) -> None:
    with opened(world) as (db, some):
        positions = started(db, some)
        assert positions is not None
        assert positions.readings == dict.fromkeys(range(3), START)
        assert positions.live == {
            "command_outcomes": Live(3, "command_outcomes_v3"),
            "purses": Live(1, "purses_v1"),
            "streams_purse": Live(1, "streams_purse_v1"),
        }
        builds = db.execute("select view, table_name, state, code_set from builds order by view").fetchall()
        assert [row[:3] for row in builds] == [
            (name, f"{name}_v{3 if name == 'command_outcomes' else 1}", "live") for name in some
        ]
        assert builds[0][3] == {"command_outcomes": 3, "purses": 1, "streams_purse": 1}
        assert db.execute("select * from purses").fetchall() == []  # the SQL view for people
        assert started(db, some) == positions, "later starts change nothing"
        assert count(db, "builds") == 3


def test_many_first_starts_at_once_make_one(world: Settings) -> None:
    some = views(purses=PURSES, moves=MOVES)
    make_tables(world, some)
    start = threading.Barrier(6)

    def begin() -> Positions | None:
        with open_connection(world) as db:
            start.wait()
            return started(db, some)

    with ThreadPoolExecutor(6) as pool:
        found = [future.result() for future in [pool.submit(begin) for _ in range(6)]]

    assert len({positions.generation for positions in found if positions}) == 1
    with open_connection(world) as db:
        assert (count(db, "positions"), count(db, "live"), count(db, "builds")) == (3, 4, 4)


def test_a_first_start_that_fails_leaves_nothing(world: Settings) -> None:
    with opened(world) as (db, some):
        db.execute("drop table streams_purse_v1 cascade")
        with pytest.raises(psycopg.errors.UndefinedTable):
            started(db, some)
        assert [count(db, table) for table in ("positions", "live", "builds", "topics")] == [0, 0, 0, 0]


def test_a_first_start_refuses_tables_with_rows(world: Settings) -> None:
    with opened(world) as (db, some):
        db.execute("insert into purses_v1 values ('a', 1, '', 0)")
        with pytest.raises(NotEmpty, match="purses_v1 holds rows"):
            started(db, some)
        assert count(db, "positions") == 0


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"topic_id": "topic-2"}, "was recreated"),
        ({"partitions": 4}, "has 4 partitions; it had 3"),
        ({"partitioner": "crc32"}, "the partitioner crc32"),
    ],
)
def test_another_topic_than_the_promised_one_is_refused(world: Settings, changed: dict[str, object], says: str) -> None:
    with opened(world) as (db, some):
        before = started(db, some)
        with pytest.raises(ContractBroken, match=says) as refused:
            started(db, some, dataclasses.replace(CONTRACT, **changed))  # type: ignore[arg-type]
        assert refused.value.hint
        assert started(db, some) == before


def test_a_shape_that_changed_under_its_version_is_refused(world: Settings) -> None:
    with opened(world) as (db, some):
        started(db, some)
        other = view(PURSES.replace("note: str", "note: str | None"))
        with pytest.raises(ShapeChanged, match="'purses' changed its shape, but is still version 1"):
            started(db, some | {"purses": other})
        state = dataclasses.replace(some["streams_purse"], shape="another")
        with pytest.raises(ShapeChanged) as refused:
            started(db, some | {"streams_purse": state})
        assert "STATE_VERSION" in refused.value.hint
        raised = dataclasses.replace(other, version=2)
        assert started(db, some | {"purses": raised}) is not None


def test_an_agent_whose_views_are_live_elsewhere_does_not_start_by_itself(world: Settings) -> None:
    with opened(world) as (db, some):
        started(db, some)
        assert ensure_started(db, "slow", {"purses": some["purses"]}, CONTRACT) is None
        assert read_positions(db, "slow", "events") is None
        alone = {"moves": view(MOVES, "moves")}
        make_tables(world, alone)
        assert ensure_started(db, "slow", alone, CONTRACT) is not None


def test_the_difference_of_two_sets_names_the_cure() -> None:
    assert set_difference({"a": 1, "b": 2}, {"b": 2, "a": 1}) is None
    older = set_difference({"a": 1}, {"a": 2, "new": 1})
    assert older == (
        "a is live as v1, this code has v2; new v1 of this code is not live. "
        "`samefold rebuild a new` with this code makes them live."
    )
    for live in ({"a": 1, "gone": 1}, {"a": 2, "gone": 1}):
        text = str(set_difference(live, {"a": 1, "new": 1}))
        assert "If newer code made that live, restart this process with it; else `samefold rebuild" in text
