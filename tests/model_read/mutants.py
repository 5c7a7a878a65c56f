"""Guarantees switched off, one at a time, in the test only: each is a change to the product's own code while a run lasts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from projections.engine import commit
from tests.model_read.catalogue import writes
from tests.model_read.postgres import Row
from tests.model_read.sql_positions import MOVE, move, reading_of
from tests.model_read.world import World


@dataclass(frozen=True)
class Mutant:
    """`guarantee` is what it lacks, `scenario` where it is caught."""

    name: str
    guarantee: str
    scenario: str
    switch_off: Callable[[World], AbstractContextManager[None]]


MUTANTS: dict[str, Mutant] = {}


def mutant(name: str, guarantee: str, scenario: str) -> Callable[[Callable[[World], Iterator[None]]], None]:
    def register(function: Callable[[World], Iterator[None]]) -> None:
        MUTANTS[name] = Mutant(name, guarantee, scenario, contextmanager(function))

    return register


@contextmanager
def replaced(owner: Any, name: str, new: Any) -> Iterator[None]:
    """An attribute has another value for a while."""
    old = owner.__dict__[name] if isinstance(owner, type) else getattr(owner, name)
    setattr(owner, name, new)
    try:
        yield
    finally:
        setattr(owner, name, old)


def _without(old: str, new: str = "") -> str:
    assert old in MOVE, "the compare-and-set has changed"
    return MOVE.replace(old, new)


NO_CAS = _without("     and (p.next_offset, p.epoch, p.seq) = (u.was, u.was_epoch, u.was_seq)\n")
OFFSET_ONLY = _without("(p.next_offset, p.epoch, p.seq) = (u.was, u.was_epoch, u.was_seq)", "p.next_offset = u.was")


def _same_generation(row: Row, _was: tuple[int, ...], generation: UUID) -> bool:
    return bool(row["generation"] == generation)


def _same_offset(row: Row, was: tuple[int, ...], generation: UUID) -> bool:
    return bool(row["generation"] == generation and reading_of(row)[0] == was[0])


writes(NO_CAS)(move(_same_generation))
writes(OFFSET_ONLY)(move(_same_offset))


@mutant("no compare-and-set", "a batch moves its positions only from where it read them", "two agents")
def no_compare_and_set(_world: World) -> Iterator[None]:
    with replaced(commit, "_MOVE", NO_CAS):
        yield


@mutant("rows kept after a fence", "held rows are dropped with the batch that was fenced", "two agents")
def rows_kept_after_a_fence(world: World) -> Iterator[None]:
    held: dict[str, Any] = {}
    fresh = commit.Committer.__init__

    def keep(self: commit.Committer, plan: Any, positions: Any) -> None:
        fresh(self, plan, positions)
        assert world.play.current is not None
        self.held = held.setdefault(world.play.current.name, self.held)

    with (
        replaced(commit.Committer, "__init__", keep),
        replaced(commit.Committer, "_forget", lambda _self, _batches: None),
    ):
        yield
