"""make test + test-all: a look takes a second; lookers that are killed and several at once take longer.

Views as they were, as of a time or at positions, in tables that nothing else ever touches; generated ones, and on Spark, too, are
looked at in `proofs/test_one_fold.py`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource
from typer.testing import CliRunner

from domain.accounts import Details, MoneyDeposited
from infra.archive.jobs import archive_log
from infra.database.connect import connect
from infra.log import clients, topics
from infra.processes.engines import Engine, local
from infra.settings import Settings
from projections.engine.fold.as_of import AsOf, BadMoment, Cut, cuts, in_words, parse_as_of
from projections.engine.operate.replaying import drop
from projections.engine.operate.verify import verify
from projections.engine.rebuild.builds import NotDroppable, builds_of, drop_tables, droppable
from projections.engine.rebuild.claims import BuildAbandoned, BuildAlive
from projections.engine.rebuild.rebuild import NoBuild, go_to, rebuild
from projections.engine.rebuild.switch import switch
from projections.engine.rebuild.time_travel import LookedBack, look_back
from projections.engine.views.core_views import all_views
from projections.engine.views.view import View
from tests.engine.bookkeeper import DAY, Bookkeeper, Meanwhile, fold_all
from tests.engine.infra.archives import banks
from tests.engine.projections.bankviews import (
    ACCOUNTS,
    BROKEN,
    PARKING,
    build_states,
    live_table,
    make_tables,
    parking,
    rows,
    view,
    with_views,
)
from tests.engine.projections.builders import LOADED, killed
from tests.engine.spine import delete, records_of, scalar, set_up
from tools.cli import build
from tools.migrations import migrate
from tools.testing.fixtures import Samefold

NOON = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)


def _look(
    world: Settings, as_of: AsOf, *names: str, views: Mapping[str, View] | None = None, engine: Engine | None = None
) -> LookedBack:
    known = views or all_views()
    engine_for = local if engine is None else lambda _: engine
    return look_back(world, [known[name] for name in names or known], as_of, engine_for=engine_for)


def _live_rows(world: Settings) -> dict[str, list[Any]]:
    return {name: rows(world, live_table(world, name)) for name in all_views()}


def _asked(world: Settings, query: str) -> Counter[Any]:
    with connect(world, "test") as db:
        return Counter(db.execute(query.encode()).fetchall())


def test_every_view_as_it_was_at_positions(bank: Bookkeeper) -> None:
    """Rows of the live fold, kept when it stood at a position, against those folded later from the log."""
    world = bank.world
    at = fold_all(world)
    was = _live_rows(world)
    asked = {name: _asked(world, f"select * from {name}") for name in ("balances", "daily_totals", "statement")}
    bank.life(ACCOUNTS, 3, DAY + timedelta(days=9))  # the agent has not come to this yet: a moment may be beyond it
    positions = {partition: reading.next_offset for partition, reading in at.items()}
    found = _look(world, positions)
    assert (found.engine, found.positions) == ("local", positions)
    assert {name: rows(world, table) for name, table in found.tables.items()} == was
    assert found.rows == {name: len(there) for name, there in was.items()}
    assert sum(map(bool, was.values())) >= 5, "there was something to compare"
    for name, before in asked.items():
        assert _asked(world, found.queries[name]) == before, "the query shows what readers saw"
    fold_all(world)
    now = _live_rows(world)
    assert all(now[name] != before for name, before in was.items() if before)
    assert {name: rows(world, table) for name, table in _look(world, {}).tables.items()} == now
    assert set(build_states(world, "statement").values()) == {"live", "past"}
    assert verify(world, all_views()).differences == 0
    migrate.check(world)  # no migration takes such a table for drift


# ── as of a time ──


def _first_later(world: Settings, time_ms: int) -> dict[int, int]:
    """By the definition: of each partition, the first offset whose time is later, else its end."""
    found = dict(topics.describe(world, world.events_topic).end)
    for record in reversed(records_of(world, world.events_topic)):
        if record.time_ms > time_ms:
            found[record.partition] = record.offset
    return found


def _at(time_ms: int) -> datetime:
    return datetime.fromtimestamp(time_ms / 1000, UTC)


def test_a_time_is_one_cut_per_partition_and_equal_times_are_not_torn_apart(bank: Bookkeeper) -> None:
    world = bank.world
    bank.life(ACCOUNTS, 40)  # so many at once that the broker gave some the same time
    records = records_of(world, world.events_topic)
    times = Counter((record.partition, record.time_ms) for record in records)
    (partition, time_ms), equal = times.most_common(1)[0]
    assert equal > 1
    found = _look(world, _at(time_ms), "statement", "daily_totals")
    assert found.positions == _first_later(world, time_ms)
    last = max(record.offset for record in records if (record.partition, record.time_ms) == (partition, time_ms))
    assert found.positions[partition] == last + 1
    same = _look(world, found.positions, "statement", "daily_totals")
    assert {name: rows(world, table) for name, table in found.tables.items()} == {
        name: rows(world, table) for name, table in same.tables.items()
    }
    before = _look(world, _at(time_ms - 1), "statement")
    assert before.positions == _first_later(world, time_ms - 1)
    assert before.positions[partition] < last + 1 - (equal - 1)


def _from_a_clock(world: Settings, *times: int) -> None:
    """Records in partition 0 with these times, as from a broker whose clock was set."""
    resource = ConfigResource(
        ConfigResource.Type.TOPIC,
        world.events_topic,
        incremental_configs=[
            ConfigEntry("message.timestamp.type", "CreateTime", incremental_operation=AlterConfigOpType.SET)
        ],
    )
    admin = clients.admin(world)
    for future in admin.incremental_alter_configs([resource]).values():
        future.result(10)
    producer = clients.producer(world)
    for time_ms in times:
        producer.produce(world.events_topic, b"no envelope", partition=0, timestamp=time_ms)
        assert producer.flush(10) == 0


def test_a_clock_that_went_back_does_not_move_the_cut_whatever_the_brokers_index_says(
    world: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the index says is an offset of a later record, perhaps not the first: of what was trimmed it knows none."""
    set_up(world)
    _from_a_clock(world, 1000, 3000, 2000, 4000, 5000)

    def cut(time_ms: int) -> int:
        return _look(world, _at(time_ms), "balances").positions[0]

    for time_ms, at in ((999, 0), (1000, 1), (2500, 1), (2999, 1), (3000, 3), (3999, 3), (4000, 4)):
        assert cut(time_ms) == at, time_ms
    for answer in ({0: 4}, dict[int, int]()):
        monkeypatch.setattr(topics, "offsets_at", lambda *_, answer=answer: answer)
        assert cut(2500) == 1
        with monkeypatch.context() as patch:  # without the look, the index decides
            patch.setattr(Cut, "before", lambda _, records: list(records))
            assert cut(2500) == answer.get(0, 5)


@pytest.mark.slow
def test_the_past_is_in_the_archive_too(world: Settings, tmp_path: Path) -> None:
    """Of a time that Kafka has trimmed it answers with the first record that it holds."""
    with banks(world, tmp_path) as keeper:
        world = keeper.world
        records = [record for record in records_of(world, world.events_topic) if record.partition == 0]
        moment = _at(records[len(records) // 2].time_ms)
        was = _look(world, moment, "statement", "daily_totals")
        archive_log(world)
        keeper.life(["1", "2"], 3)
        delete(world, world.events_topic, was.positions | {0: topics.describe(world, world.events_topic).end[0]})
        now = _look(world, moment, "statement", "daily_totals")
    assert now.positions == was.positions
    for name in was.tables:
        assert rows(world, now.tables[name]) == rows(world, was.tables[name])


def test_what_was_at_the_very_beginning_and_in_an_empty_log(world: Settings) -> None:
    set_up(world)
    assert _look(world, NOON - timedelta(days=365 * 60), "balances", "daily_totals").rows == {
        "balances": 0,
        "daily_totals": 0,
    }
    assert _look(world, {}, "balances").positions == dict.fromkeys(range(world.partitions), 0)
    with connect(world, "test") as db:
        assert [build.state for build in builds_of(db, ["balances"])] == ["live", "past", "past"]


# ── moments ──

MOMENTS: dict[str, AsOf] = {
    "2026-11-21T14:30:00+01:00": datetime(2026, 11, 21, 13, 30, tzinfo=UTC),
    "2026-11-21 14:30:00.250Z": datetime(2026, 11, 21, 14, 30, 0, 250_000, tzinfo=UTC),
    "-15m": NOON - timedelta(minutes=15),
    "-90s": NOON - timedelta(seconds=90),
    "-2h": NOON - timedelta(hours=2),
    "-7d": NOON - timedelta(days=7),
    "0:123,1:456": {0: 123, 1: 456},
    " 3:7 ": {3: 7},
}


@pytest.mark.parametrize(("text", "meant"), MOMENTS.items())
def test_moments_are_read_and_written(text: str, meant: AsOf) -> None:
    assert parse_as_of(text, NOON) == meant
    assert parse_as_of(in_words(meant), NOON) == meant


NO_MOMENTS = {
    "yesterday": "neither a time nor positions",
    "15m": "neither",
    "-15": "neither",
    f"-{'9' * 5_000}d": "neither",
    f"0:{'9' * 5_000}": "neither",
    "0:1,0:2": "twice",
    "2026-11-21T14:30:00": r"time zone.*2026-11-21T14:30:00Z",
    "2026-11-21": "time zone",
    "-999999999999d": "calendar",
}


@pytest.mark.parametrize(("text", "why"), NO_MOMENTS.items())
def test_what_is_no_moment_is_refused_with_the_cure(text: str, why: str) -> None:
    with pytest.raises(BadMoment, match=why):
        parse_as_of(text, NOON)


def test_moments_that_this_log_does_not_have(bank: Bookkeeper) -> None:
    topic = topics.describe(bank.world, bank.world.events_topic)
    for moment, why in (
        ({0: topic.end[0] + 1}, "has no position"),
        ({99: 0}, "has no position 99:0"),
        (NOON + timedelta(milliseconds=1), "is in the future"),
    ):
        with pytest.raises(BadMoment, match=why):
            cuts(bank.world, topic, moment, NOON)
    named = cuts(bank.world, topic, {0: 1}, NOON)
    assert {p: cut.next_offset for p, cut in named.items()} == {**topic.end, 0: 1}, (
        "the others are folded to their ends"
    )


# ── what is kept apart ──


@pytest.mark.slow
def test_nothing_but_a_drop_by_name_touches_a_table_of_the_past(bank: Bookkeeper) -> None:
    world = bank.world
    table = _look(world, {}, "balances").tables["balances"]
    assert table == "balances_v2_asof_1"
    was = rows(world, table)
    bank.life(ACCOUNTS, 2)
    fold_all(world)
    with pytest.raises(NoBuild):
        go_to(world, ["balances"], all_views())
    assert rebuild(world, ["balances"], all_views()).tables == {"balances": "balances_v2_r2"}
    assert rebuild(world, ["balances"], all_views()).tables == {"balances": "balances_v2_r3"}
    with connect(world, "test") as db:
        [build] = [build for build in builds_of(db, ["balances"]) if build.table == table]
        with pytest.raises(BuildAbandoned, match="is past"):
            switch(world, db, [build], all_views())
    assert "asof" not in scalar(world, "select pg_get_viewdef('balances'::regclass)"), "people's view leaves it out"
    assert build_states(world, "balances")[table] == "past"
    assert rows(world, table) == was
    assert {build.table for build in droppable(world, "balances", "2")} == {"balances_v2", "balances_v2_r2"}
    drop_tables(world, droppable(world, "balances", table), all_views()["balances"])
    assert scalar(world, f"select to_regclass('{table}')") is None
    with pytest.raises(NotDroppable):
        droppable(world, "balances", table)
    assert _look(world, {}, "balances").tables["balances"] == "balances_v2_asof_2", "a name is used once"
    assert verify(world, all_views()).differences == 0


NOT_MIGRATED = {
    "a view": ("ever", "order", 'select account, "order" from ever_v1_asof_1'),
    "its columns": ("balances", "deposits", "select account, deposits from balances_v1_asof_1"),
}


@pytest.mark.parametrize(("name", "column", "query"), NOT_MIGRATED.values(), ids=NOT_MIGRATED)
def test_what_was_not_migrated_yet_can_be_looked_at(bank: Bookkeeper, name: str, column: str, query: str) -> None:
    """New code asks how it would have been, before it is deployed."""
    source = f"""
    class Row(NamedTuple):
        account: Key[str]
        {column}: int

    def evolve(row: Row | None, event: MoneyDeposited, at: At) -> Row | None:
        return Row(at.id, event.cents + (row[1] if row else 0))
    """
    found = _look(bank.world, {}, name, views=with_views({name: view(source, name)}))
    assert found.queries == {name: query}
    assert sum(_asked(bank.world, query).values()) == len(ACCOUNTS)


@pytest.mark.slow
def test_a_drop_leaves_what_was_seen_as_it_was_and_is_left_out_of_what_is_seen_then(bank: Bookkeeper) -> None:
    world, views = bank.world, parking(BROKEN)
    bank.commit("1", MoneyDeposited(cents=5, on=DAY, details=Details(purpose="poison")))
    bank.life(["1", "2"], 2)
    make_tables(world, views)
    fold_all(world)
    rebuild(world, [], views)
    seen = _look(world, {}, *PARKING, views=views).tables
    for name, table in seen.items():
        was = rows(world, table)
        assert table not in drop(world, views[name], "accounts/1").abandoned
        assert rows(world, table) == was
        skipping = _look(world, {}, name, views=views).tables[name]
        assert rows(world, skipping) == rows(world, live_table(world, name)) != was
        drop_tables(world, droppable(world, name, table), views[name])
    assert scalar(world, "select count(*) from parked") == 0, "what was parked for the tables is gone with them"


# ── builders that die, and several at once ──


@pytest.mark.parametrize("stage", [LOADED, "projections.engine.rebuild.time_travel.finish_loading"])
@pytest.mark.slow
def test_a_look_that_was_killed_harms_nothing_and_goes_with_the_next_one(bank: Bookkeeper, stage: str) -> None:
    world = bank.world
    killed(world, stage, "rebuild", "balances", "statement", "--as-of", "-0s", "--no-switch")
    assert build_states(world, "balances") == {"balances_v2": "live", "balances_v2_asof_1": "past-loading"}
    rebuild(world, ["balances"], all_views())
    assert build_states(world, "balances")["balances_v2_asof_1"] == "past-loading", (
        "a rebuild has nothing to do with it"
    )
    drop_tables(world, droppable(world, "balances", "balances_v2_asof_1"), None)
    found = _look(world, {}, "balances", "statement")
    assert found.tables == {"balances": "balances_v2_asof_2", "statement": "statement_v2_asof_2"}
    for view_name in ("balances", "statement"):
        assert build_states(world, view_name)[f"{view_name}_v2_asof_1"] == "abandoned"
        assert scalar(world, f"select to_regclass('{view_name}_v2_asof_1')") is None
        assert rows(world, found.tables[view_name]) == rows(world, live_table(world, view_name))
    assert verify(world, all_views()).differences == 0


@pytest.mark.slow
def test_looks_and_a_rebuild_of_one_view_at_once(bank: Bookkeeper) -> None:
    """In the midst of a look, another one and a rebuild begin and end; its table can't be dropped under it."""
    world = bank.world
    inner: list[LookedBack] = []

    def meanwhile() -> None:
        inner.append(_look(world, {0: 2}, "balances"))
        rebuild(world, ["balances"], all_views())
        with pytest.raises(BuildAlive, match="balances_v2_asof_1"):
            drop_tables(world, droppable(world, "balances", "balances_v2_asof_1"), None)

    assert _look(world, {}, "balances", engine=Meanwhile(meanwhile)).tables == {"balances": "balances_v2_asof_1"}
    assert inner[0].tables == {"balances": "balances_v2_asof_2"}
    assert build_states(world, "balances") == {
        "balances_v2": "old",
        "balances_v2_asof_1": "past",
        "balances_v2_asof_2": "past",
        "balances_v2_r2": "live",
    }


# ── the command line ──


def test_the_commands(bank: Bookkeeper, samefold: Samefold) -> None:
    world = bank.world
    end = topics.describe(world, world.events_topic).end
    some = f"0:{end[0] - 1},1:{end[1]}"
    told = samefold("rebuild", "balances", "daily_totals", "--as-of", some, "--no-switch", settings=world)
    assert told.returncode == 0, told.stderr
    assert "balances: balances_v2_asof_1" in told.stdout
    assert "sum(cents) as cents" in told.stdout
    assert "samefold views drop daily_totals daily_totals_v1_asof_1" in told.stdout
    ago = samefold("rebuild", "balances", "--as-of", "-0s", "--no-switch", "--json", settings=world)
    found = json.loads(ago.stdout)
    assert ago.stderr == ""
    assert {int(p): at for p, at in found["positions"].items()} == end
    assert (found["engine"], found["rows"]) == ("local", {"balances": len(ACCOUNTS)})
    assert "local" in found["engine_because"]
    assert _asked(world, found["queries"]["balances"]) == _asked(world, "select * from balances")
    shown = json.loads(samefold("views", "--json", settings=world).stdout)["views"]["balances"]["builds"]
    first = next(build for build in shown if build["table"] == "balances_v2_asof_1")
    assert (first["state"], first["as_of"]) == ("past", some)
    assert first["positions"]["0"] == end[0] - 1
    assert f"(past, as of {some})" in samefold("views", settings=world).stdout
    dropped = samefold("views", "drop", "balances", "balances_v2_asof_1", "--yes", settings=world)
    assert dropped.stdout == "Dropped balances_v2_asof_1.\n"


REFUSED = {
    "without --no-switch": (["balances", "--as-of", "-1m"], "never goes live: add --no-switch"),
    "with --abandon": (["balances", "--as-of", "-1m", "--no-switch", "--abandon"], "block no rebuild"),
    "no view": (["--as-of", "-1m", "--no-switch"], "name the views"),
    "an unknown view": (["nonsense", "--as-of", "-1m", "--no-switch"], "There is no view 'nonsense'"),
    "no moment": (["balances", "--as-of", "noon", "--no-switch"], "'noon' is neither"),
}


@pytest.mark.parametrize(("arguments", "why"), REFUSED.values(), ids=REFUSED)
def test_wrong_usage_is_refused_with_a_sentence(arguments: list[str], why: str) -> None:
    done = CliRunner().invoke(build(), ["rebuild", *arguments])
    said = done.stderr + str(done.exception)
    assert why in " ".join(said.replace("│", " ").split())
    assert getattr(done.exception, "exit_code", done.exit_code) == 2
