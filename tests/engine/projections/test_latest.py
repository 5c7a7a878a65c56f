"""make test: batches take milliseconds. `Latest` and `First` follow the log's order: time, partition, offset, place in the commit.

That builds, shares, replays and `verify` agree with the agent is tested where these are: `bankviews.TOTALS` has such columns.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from datetime import date
from typing import Any

import pytest
from msgspec.structs import replace

from domain.accounts import MoneyDeposited, MoneyWithdrawn
from domain.transfers import TransferRequested
from infra.log.rule import START
from infra.settings import Settings
from projections.engine.fold.fold import NOTHING_BLOCKED
from projections.engine.fold.plan import Sums
from projections.engine.rebuild.folded import Folded
from projections.engine.rebuild.time_travel import query_of
from projections.engine.store.commit import Batch, CommitStatus
from projections.engine.views.event_context import At
from tests.engine.projections.bankviews import view
from tests.engine.projections.test_asking import ask, page_of, rows
from tests.engine.projections.test_engine import PARTITIONS, Bench
from tests.engine.projections.test_fold import filled, spent
from tests.engine.projections.viewkit import views
from tools.testing.fixtures import ROOT

SEEN = """
    class Mood(Enum):
        GOOD = "good"
        BAD = "bad"

    class Seen(NamedTuple):
        all: Key[str]
        times: Sum[int]
        cents: Latest[int]
        began: First[int]
        note: Latest[str | None]
        first_note: First[str | None]
        mood: Latest[Mood]
        left: Latest[bool | None]

    def delta(event: Filled | Spent, at: At) -> Iterable[Seen]:
        note = (getattr(event, "note", "") or None)
        mood = Mood.GOOD if isinstance(event, Filled) else Mood.BAD
        yield Seen("all", 1, -1, -1, None, None, Mood.GOOD, None)
        yield Seen("all", 0, event.cents, event.cents, note, note, mood, False if isinstance(event, Spent) else None)
"""
"""Of each event, two rows: the second one is the later."""
TIME_MS = 1_700_000_000_000

Said = tuple[int, int, int, int]
"""A place in the log's order: time, partition, offset, number of the event in its commit."""


@pytest.fixture
def bench(world: Settings) -> Iterator[Bench]:
    with_seen = Bench(world, views(seen=SEEN))
    yield with_seen
    with_seen.db.close()


def log_of(bench: Bench, chance: random.Random) -> tuple[list[list[Batch]], dict[Said, tuple[int, str, bool]]]:
    """Batches by partition, whose clocks go back now and then and often agree; and what each event says, by its place."""
    said: dict[Said, tuple[int, str, bool]] = {}
    logs: list[list[Batch]] = [[] for _ in range(PARTITIONS)]
    for number in range(60):
        partition, steps = chance.randrange(PARTITIONS), []
        for _ in range(chance.randint(1, 3)):
            kinds = [chance.random() < 0.6 for _ in range(chance.randint(1, 3))]
            notes = [chance.choice(["", f"note {number}"]) for _ in kinds]
            events = [filled(number * 10 + n, notes[n]) if fills else spent(number) for n, fills in enumerate(kinds)]
            steps.append((f"p{partition}", events, kinds, notes))
        batch = bench.batch(partition, *(step[:2] for step in steps))
        counted = [one._replace(time_ms=TIME_MS + number // 9 - chance.randrange(3)) for one in batch.counted]
        for one, (_, _, kinds, notes) in zip(counted, steps, strict=True):
            for n, (fills, note) in enumerate(zip(kinds, notes, strict=True)):
                cents = number * 10 + n if fills else number
                said[one.time_ms, partition, one.offset, n] = cents, note if fills else "", fills
        logs[partition].append(batch._replace(counted=counted))
    return logs, said


def wanted(said: dict[Said, tuple[int, str, bool]]) -> dict[str, Any]:
    in_order = [said[place] for place in sorted(said)]
    notes = [note for _, note, _ in in_order if note]
    return {
        "all": "all",
        "times": len(said),
        "cents": in_order[-1][0],
        "began": -1,
        "note": notes[-1],
        "first_note": notes[0],
        "mood": "good" if in_order[-1][2] else "bad",
        "left": False,
    }


def read(bench: Bench) -> list[list[dict[str, Any]]]:
    """The row as the API, the SQL view and a query of time travel show it."""
    [seen] = [one for one in bench.views.values() if one.name == "seen"]
    page = page_of(seen)
    texts = ["select * from seen", query_of(bench.db, seen, seen.table_name)]
    columns = [column.name for column in seen.columns]
    tables = [bench.db.execute(text.encode()).fetchall() for text in texts]
    return [rows(ask(bench.db, page)), *([dict(zip(columns, row, strict=True)) for row in of] for of in tables)]


@pytest.mark.parametrize("seed", range(4))
def test_in_every_order_of_batches_the_logs_order_decides(bench: Bench, seed: int) -> None:
    """Partitions in any order, batches of one or several, and what a build would load: all hold and show the same."""
    chance = random.Random(seed)
    logs, said = log_of(bench, chance)
    built = [row for partition, log in enumerate(logs) for row in folded(bench, partition, log)]
    waiting = [list(log) for log in logs]
    while some := [log for log in waiting if log]:
        taken = [log.pop(0) for log in chance.sample(some, chance.randint(1, len(some)))]
        assert bench.apply(*taken).status is CommitStatus.APPLIED
    assert sorted(bench.rows("seen"), key=repr) == sorted(built, key=repr)
    assert read(bench) == [[wanted(said)]] * 3


def folded(bench: Bench, partition: int, log: Sequence[Batch]) -> list[tuple[Any, ...]]:
    """The partition's rows of the table, as a build folds it in one batch."""
    whole = Folded(bench.plan, NOTHING_BLOCKED)
    whole.fold(Batch(partition, START, log[-1].next, [one for batch in log for one in batch.counted]))
    return list(whole.kept_rows(bench.views["seen"], partition))


def test_none_leaves_a_column_as_it_is_and_before_the_first_value_it_is_null(bench: Bench) -> None:
    bench.apply(bench.batch(0, ("a", [filled(1)])))
    assert [(row["note"], row["left"]) for [row] in read(bench)] == [(None, None)] * 3
    bench.apply(bench.batch(1, ("b", [filled(2, "said")])), bench.batch(2, ("c", [spent(3)])))
    bench.apply(bench.batch(0, ("a", [filled(4)])))
    assert [(row["note"], row["first_note"], row["left"]) for [row] in read(bench)] == [("said", "said", False)] * 3
    seen = bench.views["seen"]
    for filters, count in (({"note": "said"}, 1), ({"note": "not"}, 0), ({"left": False, "mood": "good"}, 1)):
        page = page_of(seen, filters)
        assert len(rows(ask(bench.db, page))) == count


def test_an_event_that_is_folded_late_is_not_the_latest(bench: Bench) -> None:
    """As a replay folds what was parked, even where the view took the commit's first event, and only its second was parked."""
    [whole] = bench.batch(0, ("a", [filled(1, "late"), filled(2, "later")])).counted
    now = bench.batch(0, ("b", [filled(3)])).counted
    taken, parked = (
        whole._replace(commit=replace(whole.commit, version=version, events=[event], command_id=f"a{version}"))
        for version, event in enumerate(whole.commit.events, 1)
    )
    for counted, row in (([taken], (1, "late")), (now, (3, "late")), ([parked], (3, "later"))):
        bench.apply(bench.batch(1, ("c", []))._replace(counted=counted))
        assert [(seen["cents"], seen["note"]) for [seen] in read(bench)] == [row] * 3
    assert {seen["first_note"] for [seen] in read(bench)} == {"late"}


def test_the_guides_example_fills_one_row_from_two_contexts() -> None:
    text = (ROOT / "docs" / "new-view.md").read_text()
    [source] = re.findall(r"```python\n(class Activity.*?)```", text, re.DOTALL)
    activity = view("from domain.transfers import TransferRequested\n" + source, "activity")
    assert activity.contexts == ("accounts", "transfers")
    made = [
        MoneyDeposited(cents=1, on=date(2026, 1, 2)),
        MoneyWithdrawn(cents=1, on=date(2026, 1, 3)),
        TransferRequested(source="a", target="b", cents=1, on=date(2026, 1, 3)),
    ]
    how, found = Sums(activity), list[Any]()
    for offset, event in enumerate(made):
        at = At("transfers/7" if isinstance(event, TransferRequested) else "accounts/a", 1, 1_000, 0, offset)
        [row] = activity.function(event, at)
        assert how.key(row) == ("a",)
        more = how.located(how.increments(row), at)
        found = how.merge(found, more) if found else list(more)
    assert found[:4] == [2, date(2026, 1, 2), date(2026, 1, 3), "b"]
