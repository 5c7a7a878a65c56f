"""The read side's promises over the schedules of small worlds; and each guarantee switched off, which must be noticed."""

from __future__ import annotations

import pytest

from infra.testing.fixtures import SEED
from projections.engine.live.reader import Reader
from proofs import traces
from proofs.model_read.explore import Replay, find, search, wander
from proofs.model_read.mutants import FILE, MUTANTS
from proofs.model_read.reader_mutants import READERS, maker
from proofs.model_read.reader_world import (
    ReaderBroken,
    explore_reader,
    log_with_holes,
    make_reader,
    reader_walks,
    short_log,
)
from proofs.model_read.run import run
from proofs.model_read.scenarios import SCENARIOS

KILLED = [name for name, mutant in MUTANTS.items() if not mutant.harmless]
HARMLESS = [name for name, mutant in MUTANTS.items() if mutant.harmless]
SOON = (
    "no compare-and-set",
    "fence beside the locked row",
    "only the fenced partitions are dropped",
    "COMMIT unknown is taken as applied",
    "old code folds on",
    "a batch of an earlier turn is applied",
    "the switch keeps the generation",
)
"""Found among the first schedules; `python -m proofs.model_read --traces` searches for the others too, for many minutes."""
TRACES = traces.read(FILE)
ANY_NUMBER = 10**6


@pytest.mark.slow
@pytest.mark.timeout(600)  # each takes seconds of the processor, however many others want it
@pytest.mark.parametrize(("preemptions", "least"), [(1, 30), (ANY_NUMBER, 400)])
def test_two_agents_that_both_own_a_partition_in_every_schedule(preemptions: int, least: int) -> None:
    found = search(SCENARIOS["two agents"], preemptions=[preemptions])
    assert found.broken is None
    assert found.complete
    assert found.schedules > least


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENARIOS)
def test_schedules_of_few_preemptions_and_by_chance(name: str) -> None:
    for found in (search(SCENARIOS[name], seconds=0.7), wander(SCENARIOS[name], SEED, seconds=0.7)):
        assert found.commits > 0
        assert found.broken is None, traces.folded(found.broken.choices)


@pytest.mark.slow
def test_a_run_is_the_same_again() -> None:
    """Also where statements wait for locks and sessions end: a seed reproduces a run."""
    scenario = SCENARIOS["switch with readers, kill cut crash timeout"]
    one, other = (wander(scenario, SEED, walks=5) for _ in range(2))
    assert (one.steps, one.commits) == (other.steps, other.commits)


@pytest.mark.integration
@pytest.mark.parametrize("name", KILLED)
def test_without_a_guarantee_its_trace_breaks_a_promise_that_the_real_code_keeps(name: str) -> None:
    trace = TRACES[name]
    scenario = SCENARIOS[MUTANTS[name].scenario]
    assert run(scenario, Replay(trace.choices)).violation is None
    broken = run(scenario, Replay(trace.choices), MUTANTS[name].switch_off).violation
    assert broken is not None
    assert broken.promise == trace.promise


@pytest.mark.slow
@pytest.mark.parametrize("name", SOON)
def test_without_a_guarantee_a_search_finds_a_schedule_that_breaks_a_promise(name: str) -> None:
    mutant = MUTANTS[name]
    assert find(SCENARIOS[mutant.scenario], 1, mutant.switch_off, walks=20).broken is not None


@pytest.mark.slow
@pytest.mark.parametrize("name", HARMLESS)
def test_what_is_harmless_to_leave_out_breaks_nothing(name: str) -> None:
    mutant = MUTANTS[name]
    found = search(SCENARIOS[mutant.scenario], mutant.switch_off, seconds=1)
    assert found.commits > 0
    assert found.broken is None


@pytest.mark.parametrize(
    ("holes", "faults", "least"),
    [
        (False, {"lose": 1, "twice": 1, "other": 1, "restore": 1}, 800),
        (False, {"assign": 1, "unknown": 1, "unapplied": 1}, 1_200),
        (False, {"revoke": 1, "assign": 1, "restore": 1}, 1_300),
        (True, {"lose": 1}, 1_300),
        (False, {"away": 1, "unknown": 1, "unapplied": 1, "other": 1}, 550),
        (False, {"set": 2, "other": 1, "unknown": 1}, 400),
    ],
    ids=str,
)
def test_the_reader_in_everything_that_can_happen(holes: bool, faults: dict[str, int], least: int) -> None:
    states = explore_reader(make_reader, log_with_holes() if holes else short_log(), faults)
    assert states > least


def test_the_reader_by_chance() -> None:
    assert reader_walks(str(SEED), 1_000) == 1_000


@pytest.mark.parametrize("kind", READERS)
def test_a_reader_without_a_guarantee_loses_records_or_stands_still(kind: type[Reader]) -> None:
    with pytest.raises(ReaderBroken):
        reader_walks(str(SEED), 10_000, maker(kind))
