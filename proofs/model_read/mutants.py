"""Guarantees switched off, one at a time, in the test only: each is a change to the product's own code while a run lasts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.log.rule import Reading
from projections.engine.live import reader, tail, worker
from projections.engine.operate import replaying
from projections.engine.rebuild import builds, catch_up, load, switch
from projections.engine.store import commit, positions
from proofs.model_read import actors
from proofs.model_read.editing import Edit, edited
from proofs.model_read.oracle import LOST, POSITIONS, READER, ROWS, SET
from proofs.model_read.world import World

FILE = Path(__file__).with_name("traces.txt")
"""For each mutant that is not harmless, a shortest schedule in its scenario. After the last choice, the last actor goes on."""


@dataclass(frozen=True)
class Mutant:
    """`promise` is what breaks without it, in `scenario`; `harmless` says why it does not."""

    name: str
    promise: str
    scenario: str
    switch_off: Callable[[World], AbstractContextManager[None]]
    harmless: str = ""


MUTANTS: dict[str, Mutant] = {}


def mutant(
    name: str, promise: str, scenario: str, *, harmless: str = ""
) -> Callable[[Callable[[World], Iterator[None]]], None]:
    def register(function: Callable[[World], Iterator[None]]) -> None:
        MUTANTS[name] = Mutant(name, promise, scenario, contextmanager(function), harmless)

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


def edits(name: str, promise: str, scenario: str, *texts: Edit, harmless: str = "") -> None:
    """A guarantee whose absence is another text of the product's."""
    MUTANTS[name] = Mutant(name, promise, scenario, lambda _world: edited(*texts), harmless)


# ── the compare-and-set ──

SAME_READING = "(p.next_offset, p.epoch, p.seq) = (u.was, u.was_epoch, u.was_seq)"

edits("no compare-and-set", ROWS, "two agents", Edit(commit, f"     and {SAME_READING}\n", ""))
edits(
    "compare-and-set of the offset alone",
    ROWS,
    "two agents",
    Edit(commit, SAME_READING, "p.next_offset = u.was"),
    harmless="epoch and seq at an offset are a function of the log below it, so within one log the offset says it all; they "
    "are compared for the case of another log under the same name",
)
edits(
    "fence beside the locked row",  # in a sub-select: after a wait, PostgreSQL does not look at it again
    ROWS,
    "switch",
    Edit(
        commit,
        "p.generation = %s",
        "(select min(g.generation::text) from positions g where g.agent = p.agent)::uuid = %s",
    ),
)


# ── what an agent holds ──


@contextmanager
def _kept_rows(world: World) -> Iterator[None]:
    held: dict[str, Any] = {}
    fresh = commit.Committer.__init__

    def keep(self: commit.Committer, plan: Any, positions: Any) -> None:
        fresh(self, plan, positions)
        assert world.play.current is not None
        kept = held.setdefault(world.play.current.process, self.held)
        kept |= {partition: rows for partition, rows in self.held.items() if partition not in kept}
        self.held = kept

    with replaced(commit.Committer, "__init__", keep):
        yield


@mutant("rows kept over a fence", ROWS, "two agents")
def rows_kept_over_a_fence(world: World) -> Iterator[None]:
    """Whoever is fenced goes on with the rows that it held."""
    with _kept_rows(world), edited(Edit(commit, "self.held[batch.partition].clear()", "pass")):
        yield


@mutant("rows kept over a reading of the positions", ROWS, "a partition goes back and forth")
def rows_kept_over_a_reading(world: World) -> Iterator[None]:
    """A fence clears them; taking a partition over again does not."""
    with _kept_rows(world):
        yield


@mutant("only the fenced partitions are dropped", ROWS, "replay")
def only_the_fenced_are_dropped(world: World) -> Iterator[None]:
    """Under a new generation, rows of partitions that were not in the batch are held on to."""
    with _kept_rows(world):
        yield


edits(
    "COMMIT unknown is taken as applied",
    LOST,
    "one agent, kill cut",
    Edit(commit, "return BatchResult(Fate.UNKNOWN)", "return BatchResult(Fate.APPLIED)"),
)
edits(
    "COMMIT unknown is taken as not applied",
    ROWS,
    "two agents, kill cut",
    Edit(
        worker,
        "                if result.fate is not Fate.APPLIED:",
        "                if result.fate is Fate.UNKNOWN:\n                    continue\n"
        "                if result.fate is not Fate.APPLIED:",
    ),
    harmless="the batch is sent again from where it was, and if it was applied after all, the compare-and-set fences it",
)
edits(
    "old code folds on",
    SET,
    "switch with readers",
    Edit(reader, "set_difference(positions.live_set if positions else {}, self.code)", "None"),
)
edits(
    "a batch of an earlier turn is applied",  # with the positions read since, which may be of another set of views
    SET,
    "switch while a batch waits",
    Edit(worker, "if committer is None or turn != self._turn:", "if committer is None:"),
)


# ── the switch ──

NEW = "    generation = uuid4()"
LAST = 'connection.execute("select generation from positions limit 1").fetchone()[0]'

edits("the switch keeps the generation", SET, "switch", Edit(positions, NEW, f"    generation = {LAST}"))
edits(
    "generations are counted",  # instead of a token that was never used: a restored database gives it out once more
    ROWS,
    "restored between two switches",
    Edit(positions, NEW, f"    generation = UUID(int={LAST}.int + 1)"),
)
UNLOCKED = Edit(positions, "order by agent, topic, partition for update", "order by agent, topic, partition")
edits(
    "positions are read before the locks",
    POSITIONS,
    "switch",
    UNLOCKED,
    Edit(
        positions,
        "    for agent, partition, *reading in found:",
        '    connection.execute("select from positions for update")\n    for agent, partition, *reading in found:',
    ),
)
SHORT_READ = Edit(tail, "if reached != dict(to):", "if False:")
edits("the switch takes what a read gives for all there is", ROWS, "switch that reads little at once", SHORT_READ)
edits(
    "switched to before people's SQL view reads the table",
    READER,
    "switch with readers, blind view",
    Edit(switch, "if not is_in_sql_view(self.connection, build.view, build.table):", "if False:"),
)


@mutant("a reader keeps asking the old table", READER, "switch with readers")
def reader_of_the_old_table(_world: World) -> Iterator[None]:
    def ask(connection: Any, table: str) -> Any:
        query = (
            f"select l.table_name, b.account, b.trail from live l left join {table} b on true where l.view = 'balances'"
        )
        rows = connection.execute(query.encode()).fetchall()
        return table, {account: trail for _, account, trail in rows if account is not None}

    with replaced(actors, "_ask", ask):
        yield


# ── builds ──

edits(
    "a part without its row in build_parts",
    ROWS,
    "each part loaded twice",
    Edit(load, "        self.rows = int(there[0]) if there else 0\n        return False", "        return True"),
)
ORPHANS_UNCHECKED = (
    Edit(builds, "starts_with(application_name, %s)", "starts_with(application_name, %s) and false"),
    Edit(load, "if row is None or row[0] not in FILLING:", "if False:"),
)
edits(
    "orphaned loaders are neither ended nor asked for their build's state",
    ROWS,
    "rebuild after a dead one",
    *ORPHANS_UNCHECKED,
    harmless="no table serves two builds, so a late loader reaches only its own, which nobody reads; ending it keeps one "
    "that froze inside COPY from holding up whoever takes that table away",
)
edits(
    "a table serves two builds",  # an abandoned build's table is taken again, and its loaders may still be there
    ROWS,
    "rebuild after a dead one",
    *ORPHANS_UNCHECKED,
    Edit(
        builds,
        "    used = {table for",
        """
    for build in builds_of(connection, [view.name]):
        if (build.version, build.state) == (view.version, "abandoned"):
            connection.execute("update builds set table_name = %s where id = %s", (f"gone {build.id}", build.id))
    used = {table for""",
    ),
)


@mutant("a build may be ahead of its agent", ROWS, "switch")
def build_ahead(world: World) -> Iterator[None]:
    """Catching up goes to the log's ends, and nobody objects."""
    ends = {p: Reading(*partition.readings[-1]) for p, partition in world.oracle.partitions.items()}
    catch_up.ENDS = ends  # type: ignore[attr-defined]
    with edited(
        Edit(catch_up, "tail.towards(self.at, to, MOST_RECORDS)", "tail.towards(self.at, ENDS, MOST_RECORDS)"),
        Edit(
            catch_up,
            "if agent is None or batch.next.next_offset > agent",
            "if False and batch.next.next_offset > agent",
        ),
        Edit(switch, "if reading.next_offset > to[partition].next_offset:", "if False:"),
        SHORT_READ,
    ):
        yield


edits(
    "no check of a build's state before it is moved on",
    ROWS,
    "drop against switch",
    Edit(catch_up, "if build.state not in (BuildState.READY, BuildState.OLD):", "if False:"),
    Edit(catch_up, "if build.positions != self.at:", "if False:"),
)


# ── parked streams ──

edits("replay without the locks of the positions", POSITIONS, "replay", UNLOCKED)
edits(
    "a drop and a pin at once",  # as it was before the model found it
    ROWS,
    "drop against rebuild",
    Edit(builds, '(f"samefold skips {view}",)', '(f"samefold skips {view} {id(connection)}",)'),
)
edits(
    "a drop leaves tables alone that are beyond the event",
    ROWS,
    "drop against switch",
    Edit(replaying, "if build.state in (BuildState.LOADING, BuildState.READY, BuildState.OLD)", "if False"),
)
