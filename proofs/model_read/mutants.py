"""Guarantees switched off, one at a time, in the test only: each is a change to the product's own code while a run lasts.

Most are other texts (`mutants.txt`); those here need more than that. `harmless` is why nothing breaks without a guarantee.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.log.rule import Reading
from projections.engine.rebuild import catch_up
from projections.engine.store import commit
from proofs import patches
from proofs.model_read import actors
from proofs.model_read.editing import edited
from proofs.model_read.policies import PolicyWorld
from proofs.model_read.run import SwitchOff
from proofs.model_read.world import World
from proofs.patches import Edit

FILE = Path(__file__).with_name("traces.txt")
"""For each mutant that is not harmless, a shortest schedule in its scenario. After the last choice, the last actor goes on."""

TEXTS = Path(__file__).with_suffix(".txt")


@dataclass(frozen=True)
class Mutant:
    scenario: str
    switch_off: SwitchOff
    harmless: str = ""


def _texts(edits: tuple[Edit, ...]) -> SwitchOff:
    return lambda _world: edited(*edits)


MUTANTS: dict[str, Mutant] = {
    patch.name: Mutant(patch.facts["scenario"], _texts(patch.edits), patch.facts.get("harmless", ""))
    for patch in patches.read(TEXTS)
}


def mutant(name: str, scenario: str) -> Callable[[Callable[[World], Iterator[None]]], None]:
    def register(function: Callable[[World], Iterator[None]]) -> None:
        MUTANTS[name] = Mutant(scenario, contextmanager(function))

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


@contextmanager
def _kept_rows(world: World) -> Iterator[None]:
    held: dict[str, Any] = {}
    fresh = commit.Committer.__init__

    def keep(self: commit.Committer, plan: Any, positions: Any, **more: Any) -> None:
        fresh(self, plan, positions, **more)
        assert world.play.current is not None
        kept = held.setdefault(world.play.current.process, self.held)
        kept |= {partition: rows for partition, rows in self.held.items() if partition not in kept}
        self.held = kept

    with replaced(commit.Committer, "__init__", keep):
        yield


@mutant("rows kept over a fence", "two agents")
def rows_kept_over_a_fence(world: World) -> Iterator[None]:
    """A fenced agent goes on with the rows that it held."""
    with _kept_rows(world), edited(Edit("projections/engine/store/commit.py", CLEAR, "pass")):
        yield


CLEAR = "self.held[batch.partition].clear()"


@mutant("rows kept over a reading of the positions", "a partition goes back and forth")
def rows_kept_over_a_reading(world: World) -> Iterator[None]:
    """A fence clears them; taking a partition over again does not."""
    with _kept_rows(world):
        yield


@mutant("only the fenced partitions are dropped", "replay")
def only_the_fenced_are_dropped(world: World) -> Iterator[None]:
    """Under a new generation, rows of partitions that were not in the batch are held on to."""
    with _kept_rows(world):
        yield


@mutant("a reader keeps asking the old table", "switch with readers")
def reader_of_the_old_table(_world: World) -> Iterator[None]:
    def ask(connection: Any, table: str) -> Any:
        query = (
            f"select l.table_name, b.account, b.trail from live l left join {table} b on true where l.view = 'balances'"
        )
        rows = connection.execute(query.encode()).fetchall()
        return table, {account: trail for _, account, trail in rows if account is not None}

    with replaced(actors, "_ask", ask):
        yield


@mutant("a build may be ahead of its agent", "switch")
def build_ahead(world: World) -> Iterator[None]:
    """Catching up goes to the log's ends, and no check refuses it."""
    ends = {p: Reading(*partition.readings[-1]) for p, partition in world.oracle.partitions.items()}
    catch_up.ENDS = ends  # type: ignore[attr-defined]
    with edited(*AHEAD):
        yield


CATCH_UP = "projections/engine/rebuild/catch_up.py"
AHEAD = (
    Edit(CATCH_UP, "tail.towards(self.at, to, MOST_RECORDS)", "tail.towards(self.at, ENDS, MOST_RECORDS)"),
    Edit(
        CATCH_UP,
        "if agent is None or batch.next.next_offset > agent",
        "if False and batch.next.next_offset > agent",
    ),
    Edit(
        "projections/engine/rebuild/switch.py",
        "if reading.next_offset > to[partition].next_offset:",
        "if False:",
    ),
    Edit("projections/engine/live/tail.py", "if reached != dict(to):", "if False:"),
)


@mutant("a policy is switched before it has caught up after a restore", "a switch of a policy, restore")
def switched_too_early(_world: World) -> Iterator[None]:
    with replaced(PolicyWorld, "has_caught_up", lambda _self: True):
        yield
