"""One fold: whoever folds a log, live or from its beginning, in one process or on a cluster, ends with the same rows at the same
positions, and they are those of a fold that shares no line with the engine."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from infra.dev.stack import Stack
from infra.settings import Settings
from projections.engine.rebuild import go_to
from tests.conftest import SEED
from tests.one_fold.folding import (
    Live,
    build_differences,
    built,
    expected_at,
    in_memory,
    live_differences,
    verified,
)
from tests.one_fold.histories import History, history
from tests.one_fold.kinds import all_kinds
from tests.one_fold.oracle import Entry, Expected, fold
from tests.one_fold.places import Places, places, read_log, write_skips

pytestmark = pytest.mark.timeout(300)

VIEWS = all_kinds()
RICH = 600
"""Steps of a history in which everything happens."""

generated = settings(deadline=None, database=None)


@pytest.fixture(scope="module")
def ground(stack: Stack) -> Iterator[Places]:
    with places(stack, "one_fold", VIEWS) as made:
        yield made


def timed(made: History) -> list[list[Entry]]:
    """The log as a broker would have it, a record each second."""
    return [[Entry(1_767_225_600_000 + 1000 * n, value) for n, value in enumerate(log)] for log in made.logs]


def memory_differences(made: History, chance: random.Random) -> list[str]:
    logs = timed(made)
    expected = fold(logs, skips=made.skips)
    found = in_memory(logs, VIEWS, made.skips, chance)
    return [
        *(["positions"] if found.places != expected.places else []),
        *(["parked"] if found.parked != expected.parked else []),
        *(line for view in VIEWS for line in expected.differences(view, found.rows[view])),
    ]


# ── without a database: many histories ──


@seed(SEED)
@settings(generated, max_examples=40)
@given(chance=st.randoms(use_true_random=False), partitions=st.integers(1, 16), steps=st.integers(1, 40))
def test_in_memory_any_short_history(chance: random.Random, partitions: int, steps: int) -> None:
    assert memory_differences(history(chance, partitions, steps, poison=0.2), chance) == []


@seed(SEED)
@settings(generated, max_examples=15)
@given(chance=st.randoms(use_true_random=True), partitions=st.integers(1, 16))
def test_in_memory_any_long_history(chance: random.Random, partitions: int) -> None:
    assert memory_differences(history(chance, partitions, RICH), chance) == []


def test_what_histories_are_made_of() -> None:
    """All that a log may hold is in them, or the tests here would prove little."""
    made: Counter[str] = Counter()
    commits = void = parked = 0
    for number in range(3):
        one = history(random.Random(f"{SEED} {number}"), 2, RICH)
        expected = fold(timed(one), skips=one.skips)
        made += one.made
        commits, void, parked = commits + expected.commits, void + expected.void, parked + len(expected.parked)
        assert all(expected.rows.values())
    assert commits > 500
    assert void > 200
    assert parked > 3
    happened = [
        "commit",
        "open",
        "superseded",
        "lose",
        "hold",
        "release",
        "swap",
        "repeat",
        "garbage",
        "impostor",
        "refused",
        "poison",
        "skip",
    ]
    assert [what for what in (*happened, "sent twice", "of 1 events", "of 3 events") if not made[what]] == []


# ── on PostgreSQL and Kafka ──


def live_to_the_middle_and_built(
    place: Settings, logs: Sequence[Sequence[Entry]], made: History, live: Live, chance: random.Random
) -> Expected:
    """Live agents fold a part, which every engine then builds; the oracle's fold to there."""
    middle = {partition: chance.randint(0, len(log)) for partition, log in enumerate(logs)}
    assert live.fold(logs, middle) is None
    expected = expected_at(logs, place, made.skips)
    assert [at.next_offset for at in expected.places] == list(middle.values())
    assert live_differences(place, expected) == []
    return expected


@seed(SEED)
@settings(generated, max_examples=3)
@given(chance=st.randoms(use_true_random=True), partitions=st.integers(1, 16))
def test_live_agents_and_the_local_engine(ground: Places, chance: random.Random, partitions: int) -> None:
    made = history(chance, partitions, RICH)
    place = ground.make(made.logs)
    logs = read_log(place)
    assert [[entry.value for entry in log] for log in logs] == made.logs
    write_skips(place, made.skips)
    with Live(place, VIEWS, chance) as live:
        expected = live_to_the_middle_and_built(place, logs, made, live, chance)
        assert build_differences(place, expected, built(place, VIEWS)) == []
        assert live.fold(logs) is None
        assert live.fenced > 0
    # now the tables that were built catch up, and go live
    expected = fold(logs, skips=made.skips)
    assert live_differences(place, expected) == []
    switched = go_to(place, VIEWS, VIEWS, processes=1)
    assert set(switched.tables) == set(VIEWS)
    assert live_differences(place, expected) == []
    assert verified(place, VIEWS) == 0
