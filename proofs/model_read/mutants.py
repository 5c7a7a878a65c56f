"""Guarantees switched off, one at a time, in the test only: each is a change to the product's own code while a run lasts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from uuid import UUID

from infra.log.rule import Reading
from projections.engine.live import reader, tail
from projections.engine.live import worker as work
from projections.engine.operate import replaying
from projections.engine.rebuild import builds, switch
from projections.engine.rebuild import catch_up as catching_up
from projections.engine.rebuild import load as local
from projections.engine.store import commit
from projections.engine.store import positions as positions_module
from proofs.model_read import actors
from proofs.model_read.catalogue import meaning, writes
from proofs.model_read.oracle import LOST, POSITIONS, READER, ROWS, SET
from proofs.model_read.postgres import Result, Row, Statement, Steps
from proofs.model_read.sql_positions import MOVE, move, reading_of
from proofs.model_read.world import World


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


def _without(old: str, new: str = "") -> str:
    assert old in MOVE, "the compare-and-set has changed"
    return MOVE.replace(old, new)


# ── the compare-and-set ──

NO_CAS = _without("     and (p.next_offset, p.epoch, p.seq) = (u.was, u.was_epoch, u.was_seq)\n")
OFFSET_ONLY = _without("(p.next_offset, p.epoch, p.seq) = (u.was, u.was_epoch, u.was_seq)", "p.next_offset = u.was")
BESIDE = _without(
    "p.generation = %s", "(select min(g.generation::text) from positions g where g.agent = p.agent)::uuid = %s"
)


def _same_generation(row: Row, _was: tuple[int, ...], generation: UUID) -> bool:
    return bool(row["generation"] == generation)


def _same_offset(row: Row, was: tuple[int, ...], generation: UUID) -> bool:
    return bool(row["generation"] == generation and reading_of(row)[0] == was[0])


def _same_reading(row: Row, was: tuple[int, ...], _generation: UUID) -> bool:
    return tuple(reading_of(row)[:3]) == was


def _generation_seen(statement: Statement, generation: UUID) -> bool:
    return all(row["generation"] == generation for row in statement.where("positions"))


writes(NO_CAS)(move(_same_generation))
writes(OFFSET_ONLY)(move(_same_offset))
writes(BESIDE)(move(_same_reading, _generation_seen))


@mutant("no compare-and-set", ROWS, "two agents")
def no_compare_and_set(_world: World) -> Iterator[None]:
    """A batch moves its positions wherever they stand."""
    with replaced(commit, "_MOVE", NO_CAS):
        yield


@mutant(
    "compare-and-set of the offset alone",
    ROWS,
    "two agents",
    harmless="epoch and seq at an offset are a function of the log below it, so within one log the offset says it all; they "
    "are compared for the case of another log under the same name",
)
def offset_alone(_world: World) -> Iterator[None]:
    """Neither epoch nor seq is compared."""
    with replaced(commit, "_MOVE", OFFSET_ONLY):
        yield


@mutant("fence beside the locked row", ROWS, "switch")
def fence_beside(_world: World) -> Iterator[None]:
    """The generation is asked in a sub-select: after a wait, PostgreSQL does not look at it again."""
    with replaced(commit, "_MOVE", BESIDE):
        yield


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
    with _kept_rows(world), replaced(commit.Committer, "_forget", lambda _self, _batches: None):
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


@mutant("COMMIT unknown is taken as applied", LOST, "one agent, kill cut")
def unknown_is_applied(_world: World) -> Iterator[None]:
    with _outcome_of_unknown(lambda _again: commit.BatchResult(commit.Fate.APPLIED)):
        yield


@mutant(
    "COMMIT unknown is taken as not applied",
    ROWS,
    "two agents, kill cut",
    harmless="the batch is sent again from where it was, and if it was applied after all, the compare-and-set fences it",
)
def unknown_is_not_applied(_world: World) -> Iterator[None]:
    with _outcome_of_unknown(lambda again: again()):
        yield


@contextmanager
def _outcome_of_unknown(instead: Callable[[Callable[[], commit.BatchResult]], commit.BatchResult]) -> Iterator[None]:
    real = work.Worker.apply

    def apply(self: work.Worker, takes: Any, turn: int = 0, lane: int = 0) -> Any:
        committer = self._committer
        if committer is None:
            return real(self, takes, turn, lane)
        asked = committer.apply

        def outcome(connection: Any, batches: Any) -> commit.BatchResult:
            found = asked(connection, batches)
            return (
                instead(lambda: asked(self._connected(lane), batches)) if found.fate is commit.Fate.UNKNOWN else found
            )

        committer.apply = outcome  # type: ignore[method-assign]
        try:
            return real(self, takes, turn, lane)
        finally:
            del committer.apply

    with replaced(work.Worker, "apply", apply):
        yield


@mutant("old code folds on", SET, "switch with readers")
def old_code_folds_on(_world: World) -> Iterator[None]:
    """No worker compares its set with the one that is live."""
    with replaced(reader, "set_difference", lambda _live, _code: None):
        yield


@mutant("a batch of an earlier turn is applied", SET, "switch while a batch waits")
def earlier_turn(_world: World) -> Iterator[None]:
    """With the positions read since, which may be of another set of views."""
    real = work.Worker.apply

    def apply(self: work.Worker, takes: Any, _turn: int = 0, lane: int = 0) -> Any:
        return real(self, takes, self._turn, lane)

    with replaced(work.Worker, "apply", apply):
        yield


# ── the switch ──


@mutant("the switch keeps the generation", ROWS, "switch")
def generation_kept(world: World) -> Iterator[None]:
    def same() -> UUID:
        return _generation(world)

    with replaced(positions_module, "uuid4", same):
        yield


@mutant("generations are counted", ROWS, "restored between two switches")
def generations_counted(world: World) -> Iterator[None]:
    """The next number, instead of a token that was never used: a restored database gives it out once more."""

    def following() -> UUID:
        return UUID(int=_generation(world).int + 1)

    with replaced(positions_module, "uuid4", following):
        yield


def _generation(world: World) -> UUID:
    found: UUID = next(iter(world.database.committed["positions"].values()))["generation"]
    return found


@mutant("positions are read before the locks", ROWS, "switch")
def read_before_the_locks(_world: World) -> Iterator[None]:
    lock = switch._Switch._lock_positions

    def read_then_lock(self: Any) -> Any:
        found = self.connection.execute(
            "select partition, next_offset, epoch, seq, command_offset from positions "
            "where agent = %s and topic = %s order by partition",
            ("core", self.topic),
        ).fetchall()
        lock(self)
        return {"core": {partition: Reading(*reading) for partition, *reading in found}}

    with replaced(switch._Switch, "_lock_positions", read_then_lock):
        yield


def _some(self: Any, at: Any, to: Any, give_up_s: float) -> Any:
    return self.towards(at, to, tail.AHEAD * len(at), give_up_s)


@mutant("the switch takes what a read gives for all there is", ROWS, "switch that reads little at once")
def short_read_is_all(_world: World) -> Iterator[None]:
    with replaced(tail.Tail, "exactly", _some):
        yield


@mutant("switched to before people's SQL view reads the table", READER, "switch with readers, blind view")
def without_people(_world: World) -> Iterator[None]:
    with replaced(switch, "is_in_sql_view", lambda *_: True):
        yield


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


@mutant("a part without its row in build_parts", ROWS, "each part loaded twice")
def part_without_row(_world: World) -> Iterator[None]:
    enter = local._Table._enter

    def always(self: Any) -> bool:
        enter(self)
        return True

    with replaced(local._Table, "_enter", always):
        yield


@contextmanager
def _orphans_unchecked() -> Iterator[None]:
    def enter(self: Any) -> bool:
        entered = self._connection.execute(
            "insert into build_parts (build, partition, rows) values (%s, %s, 0) on conflict do nothing",
            (self.build.id, self.partition),
        )
        return bool(entered.rowcount == 1)

    with replaced(builds, "end_loaders", lambda *_: None), replaced(local._Table, "_enter", enter):
        yield


@mutant(
    "orphaned loaders are neither ended nor asked for their build's state",
    ROWS,
    "rebuild after a dead one",
    harmless="no table serves two builds, so a late loader reaches only its own, which nobody reads; ending it keeps one "
    "that froze inside COPY from holding up whoever takes that table away",
)
def orphans_unchecked(_world: World) -> Iterator[None]:
    with _orphans_unchecked():
        yield


@mutant("a table serves two builds", ROWS, "rebuild after a dead one")
def table_serves_two(_world: World) -> Iterator[None]:
    """An abandoned build's table is taken again, and its loaders may still be there."""

    def again(connection: Any, view: Any) -> tuple[str, bool]:
        for build in builds.builds_of(connection, [view.name]):
            if build.version == view.version and build.state == "abandoned":
                connection.execute("update builds set table_name = %s where id = %s", (f"gone {build.id}", build.id))
        return str(view.table_name), False

    with _orphans_unchecked(), replaced(builds, "_free_table", again):
        yield


@mutant("a build may be ahead of its agent", ROWS, "switch")
def build_ahead(world: World) -> Iterator[None]:
    """Catching up goes to the log's ends, and nobody objects."""
    ends = {p: Reading(*partition.readings[-1]) for p, partition in world.oracle.partitions.items()}
    real = catching_up.Group.catch_up

    def to_the_ends(self: Any, connection: Any, tail: Any, _to: Any, between: Any = lambda: None) -> int:
        return real(self, connection, tail, ends, between)

    at = positions_module.read_positions

    def positions(connection: Any, agent: str, topic: str) -> Any:
        found = at(connection, agent, topic)
        return replace(found, readings=ends) if found else None

    with (
        replaced(catching_up.Group, "catch_up", to_the_ends),
        replaced(catching_up, "read_positions", positions),
        replaced(switch._Switch, "_refuse_what_is_ahead", lambda *_: None),
        replaced(tail.Tail, "exactly", _some),
    ):
        yield


@mutant("no check of a build's state before it is moved on", ROWS, "drop against switch")
def state_unchecked(_world: World) -> Iterator[None]:
    with replaced(catching_up.Group, "check", lambda *_: None):
        yield


# ── parked streams ──


@mutant("replay without the locks of the positions", POSITIONS, "replay")
def replay_without_locks(_world: World) -> Iterator[None]:
    def unlocked(statement: Statement, parameters: Any) -> Steps:
        (agent,) = parameters[0]
        rows = statement.where("positions", agent=agent)
        return Result([(agent, row["partition"], *reading_of(row)) for row in rows], len(rows))
        yield

    with meaning(
        "select agent, partition, next_offset, epoch, seq, command_offset from positions "
        "where agent = any(%s) and topic = %s order by agent, topic, partition for update",
        unlocked,
    ):
        yield


@mutant("a drop and a pin at once", ROWS, "drop against rebuild")
def drop_and_pin(_world: World) -> Iterator[None]:
    """As it was before the model found it."""
    with replaced(builds, "lock_skips", lambda *_: None), replaced(replaying, "lock_skips", lambda *_: None):
        yield


@mutant("a drop leaves tables alone that are beyond the event", ROWS, "drop against switch")
def drop_abandons_nothing(_world: World) -> Iterator[None]:
    real = builds.lock_builds

    def none(connection: Any, ids: Any) -> Any:
        real(connection, ids)
        return []

    with replaced(replaying, "lock_builds", none):
        yield
