"""Random ways through larger worlds keep every promise too; a way that does not is shrunk to what it takes."""

import random

import pytest

from proofs.model.mutants import MUTANTS
from proofs.model.setting import Parts
from proofs.model.traces import retraced
from proofs.model.walk import Walked, shrunk, walk

WALKS = 1_500


def caught(name: str) -> Walked:
    """The first walk in which that mutant breaks its promise."""
    for seed in range(WALKS):
        walked = walk(seed, MUTANTS[name].parts)
        if walked.violation and walked.violation.promise == MUTANTS[name].promise:
            return walked
    raise AssertionError(f"{WALKS} walks did not catch {name}")


@pytest.mark.slow
def test_no_walk_breaks_a_promise() -> None:
    first = random.randrange(2**32)  # from the seed that pytest prints
    for seed in range(first, first + WALKS):
        walked = walk(seed)
        assert walked.violation is None, str(shrunk(walked))


def test_a_seed_gives_the_same_walk_again() -> None:
    assert walk(7) == walk(7)
    assert walk(7).trace != walk(8).trace


def test_a_walk_that_breaks_a_promise_is_shrunk_until_nothing_can_be_left_out() -> None:
    name = "evicts_on_acknowledgement"
    walked = caught(name)
    short = shrunk(walked, MUTANTS[name].parts)
    assert len(short.trace) < len(walked.trace)
    for left_out in range(len(short.trace)):
        fewer = short.trace[:left_out] + short.trace[left_out + 1 :]
        violation, _ = retraced(short.bounds, fewer, MUTANTS[name].parts())
        assert violation is None or violation.promise != MUTANTS[name].promise
    assert retraced(short.bounds, short.trace, Parts())[0] is None
