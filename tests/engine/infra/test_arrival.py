"""make test + test-all: reads of a small log are quick; a read of everything that can read, and 1,500 assignments, are not.

Every read of a range ends exactly at its end, or raises an error, wherever Kafka or the archive ends.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from psycopg.errors import UniqueViolation

from domain.accounts import Details, MoneyDeposited
from infra.archive import whole_log, write
from infra.archive.jobs import archive_log
from infra.archive.whole_log import history_of
from infra.database.connect import Connection, connect
from infra.log.records import Record
from infra.log.source import read_held
from infra.log.topics import describe
from infra.processes.engines import Local
from infra.settings import Settings
from projections.engine.fold.as_of import AsOf
from projections.engine.fold.errors import LogChanged
from projections.engine.operate.replaying import drop, parked_events, replay
from projections.engine.operate.verify import verify
from projections.engine.rebuild import folded, load
from projections.engine.rebuild.builds import Build
from projections.engine.rebuild.load import Loaded, RowsRefused, index
from projections.engine.rebuild.rebuild import go_to, rebuild
from projections.engine.rebuild.time_travel import look_back
from projections.engine.store.parking import parked_streams
from projections.engine.store.positions import read_positions
from projections.engine.views.core_views import all_views
from projections.engine.views.view import View
from tests.engine.bookkeeper import DAY, Bookkeeper, fold_all, folded_lives
from tests.engine.infra.archives import is_exact
from tests.engine.projections.bankviews import BROKEN, CORRECTED, build_states, make_tables, parking, rows
from tests.engine.spine import records_of

ACCOUNTS = [str(number) for number in range(12)]


@pytest.fixture
def bank(world: Settings, tmp_path: Any) -> Bookkeeper:
    return folded_lives(world.model_copy(update={"archive_url": str(tmp_path)}), ACCOUNTS, 5)


def _poisoned(bank: Bookkeeper) -> dict[str, View]:
    """A view that has parked a stream, with code that takes it now."""
    broken, corrected = parking(BROKEN), parking(CORRECTED)
    make_tables(bank.world, broken)
    rebuild(bank.world, [], broken)
    bank.commit("1", MoneyDeposited(cents=5, on=DAY, details=Details(purpose="poison")))
    bank.life(ACCOUNTS, 2)
    fold_all(bank.world, broken)
    return corrected


def _parked(world: Settings) -> list[tuple[int, str, bytes]]:
    with connect(world, "test") as db:
        positions = read_positions(db, "core", world.events_topic)
        [one] = [one for one in parked_streams(db) if one.view == "sums"]
    assert positions is not None
    return parked_events(world, one, positions.readings[one.partition])


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Kafka gives half of what it is asked for, and ends; how often it was asked."""
    whole, asked = read_held, list[int]()

    def half(settings: Settings, topic: str, partition: int, start: int, stop: int, **more: Any) -> Iterator[Any]:
        asked.append(stop)
        yield from whole(settings, topic, partition, start, stop - (stop - start) // 2, **more)

    monkeypatch.setattr(whole_log, "read_held", half)
    monkeypatch.setattr(write, "read_held", half)
    return asked


@pytest.mark.slow
def test_a_source_that_ends_early_is_asked_again(bank: Bookkeeper, short: list[int]) -> None:
    world = bank.world
    views = _poisoned(bank)
    stream = list(history_of(world, "accounts/1"))
    assert len(stream) == 1 + 5 + 1 + 2
    assert len(_parked(world)) > 1
    for name in ("sums", "moves", "totals"):
        assert replay(world, views[name], "accounts/1").parked is None
    rebuild(world, ["balances", "statement"], views)
    now = datetime.now(UTC)
    ends = describe(world, world.events_topic).end
    moments: list[AsOf] = [now, ends]
    for moment in moments:
        past = look_back(world, [views["balances"]], moment)
        assert past.positions == ends
        assert rows(world, past.tables["balances"]) == rows(world, "balances_v2_r2")
    bank.life(ACCOUNTS, 1)
    fold_all(world, views)
    go_to(world, ["statement"], views)
    archive_log(world)
    assert len(short) > 8 * world.partitions, "it was asked more than once by each"
    assert verify(world, views).differences == 0
    is_exact(world, records_of(world, world.events_topic))


def _careful(world: Settings, views: dict[str, View]) -> None:
    def refused(*_: object) -> Loaded:
        raise RowsRefused("balances", ValueError("so that it is filled carefully"))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load, "load", refused)
        rebuild(world, ["balances"], views)


READERS: dict[str, Callable[[Settings, dict[str, View]], object]] = {
    "load": lambda world, views: rebuild(world, ["balances"], views),
    "careful load": _careful,
    "replay": lambda world, views: replay(world, views["sums"], "accounts/1"),
    "drop": lambda world, views: drop(world, views["sums"], "accounts/1"),
    "parked events": lambda world, views: _parked(world),
}


def test_no_reader_takes_less_than_all_for_all(bank: Bookkeeper, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if what reads a range forgot to ask again: the mutant of the test above."""
    world = bank.world
    views = _poisoned(bank)
    rebuild(world, ["statement"], views)
    bank.life(ACCOUNTS, 1)
    fold_all(world, views)
    whole = whole_log.read_range

    def one_less(settings: Settings, topic: str, partition: int, start: int, stop: int) -> Iterator[list[Record]]:
        yield from whole(settings, topic, partition, start, max(stop - 1, start))

    was = {name: rows(world, name) for name in ("live", "parked", "sums_v1", "statement_v2_r2")}
    for name, reader in READERS.items():
        with monkeypatch.context() as patch:
            patch.setattr(folded, "read_range", one_less)
            with pytest.raises(LogChanged):
                reader(world, views)
        assert {table: rows(world, table) for table in was} == was, name
    assert verify(world, views).differences == 0
    monkeypatch.setattr(folded, "read_range", one_less)
    assert {one.what for one in verify(world, views).positions} == {"position"}


class Forgetful(Local):
    """Its tasks come back before they have arrived, as those of another code might."""

    def run(self, task: Any, arguments: Any, records: int, advance: Any) -> list[Any]:
        done = super().run(task, arguments, records, advance)
        return [replace(one, end=one.end._replace(next_offset=one.end.next_offset - 1)) for one in done]


def test_what_tasks_come_to_is_looked_at(bank: Bookkeeper, monkeypatch: pytest.MonkeyPatch) -> None:
    world, views = bank.world, all_views()
    ends = describe(world, world.events_topic).end
    with pytest.raises(LogChanged):
        rebuild(world, ["balances"], views, engine_for=lambda _: Forgetful(1))
    with pytest.raises(LogChanged):
        look_back(world, [views["balances"]], ends, engine_for=lambda _: Forgetful(1))
    assert build_states(world, "balances") == {
        "balances_v2": "live",
        "balances_v2_r2": "abandoned",
        "balances_v2_asof_1": "abandoned",
    }

    # also beside a view that is filled carefully
    def refused(connection: Connection, build: Build, view: View) -> None:
        if view.name == "statement":
            raise UniqueViolation
        index(connection, build, view)

    monkeypatch.setattr(load, "index", refused)
    with pytest.raises(LogChanged):
        rebuild(world, ["balances", "statement"], views, engine_for=lambda _: Forgetful(1))


OVER_AND_OVER = """
from confluent_kafka import TopicPartition
from infra.log import clients
from infra.settings import Settings

world = Settings()
consumer = clients.range_consumer(world)
for turn in range(1_500):
    clients.assign(consumer, [TopicPartition(world.events_topic, 0, 0)])
    consumer.consume(1, (0, 0.002, 0.01)[turn % 3])
clients.assign(consumer, [TopicPartition(world.events_topic, 0, 3)])
print([message.offset() for message in consumer.consume(1, 10)])
"""
"""A process of its own: librdkafka may abort it."""


@pytest.mark.slow
def test_a_consumer_is_given_a_partition_over_and_over(bank: Bookkeeper) -> None:
    """Just when it has begun to read, or has not yet."""
    command = [sys.executable, "-c", OVER_AND_OVER]
    done = subprocess.run(
        command, env=os.environ | bank.world.environment(), capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.returncode) == ("[3]\n", 0), done.stderr
