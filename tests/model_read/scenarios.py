"""Small worlds: who runs, over which log, with which faults."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial

import psycopg

from infra.errors import SamefoldError
from projections.engine.view import View
from tests.model_read.actors import agent, reader, rebuilder, switcher
from tests.model_read.log import Log, Story
from tests.model_read.oracle import LOST, STOPPED, Violation, positions_of
from tests.model_read.play import LOST as LOST_CONNECTION
from tests.model_read.play import Chooser, Play, unexpected
from tests.model_read.postgres import Footprint
from tests.model_read.views import code
from tests.model_read.world import World

Build = Callable[["World"], None]
Mutant = Callable[[World], AbstractContextManager[None]]


@dataclass(frozen=True)
class Scenario:
    """`build` adds the actors. `may_end` are errors by which an actor may end."""

    name: str
    log: Callable[[], Log]
    build: Build
    views: Callable[[], Mapping[str, View]]
    faults: Mapping[str, int] = field(default_factory=dict)
    may_end: tuple[type[BaseException], ...] = ()


@dataclass(frozen=True)
class Run:
    """What became of one schedule."""

    violation: Violation | None
    choices: list[str]
    story: list[tuple[str, str]]
    commits: int


def run(scenario: Scenario, chooser: Chooser, mutant: Mutant | None = None) -> Run:
    """One run of a scenario, with what must hold checked after every commit and at the end."""
    world = World(scenario.log(), scenario.views(), scenario.faults)
    violation = None
    with world.around(), mutant(world) if mutant else nullcontext():
        scenario.build(world)
        try:
            world.play.run(chooser)
            if all(actor.done for actor in world.play.actors.values()):
                _check_end(world, scenario)
        except Violation as broken:
            violation = broken
        world.play.over = True
    story = world.play.story
    return Run(violation, [choice for choice, _ in story], story, world.watch.checked)


def _check_end(world: World, scenario: Scenario) -> None:
    """Nobody ended for a reason that is none; and one more agent, alone, folds the rest. Raises Violation."""
    for name, error in unexpected(world.play, scenario.may_end):
        if isinstance(error, AssertionError):
            raise error  # of the model, or of the product's own: neither is for a mutant to be caught by
        raise Violation(STOPPED, f"{name} ended: {type(error).__name__}: {error}") from error
    live = {row["view"]: row["version"] for row in world.database.committed["live"].values()}
    views = next((some for some in _codes() if {n: v.version for n, v in some.items()} == live), None)
    if views is None:
        raise Violation(LOST, f"no code has the set that is live: {live}")
    for session in list(world.database.sessions):
        session.end(psycopg.OperationalError(LOST_CONNECTION))
    before, world.play = world.play, Play(world.database)
    world.sets["settler"] = live
    world.play.add("settler", partial(agent, world, "settler", views, sorted(world.log.records), 100))
    world.play.run(_First())
    for _, error in unexpected(world.play, ()):
        raise Violation(STOPPED, f"settling ended: {type(error).__name__}: {error}") from error
    world.play = before
    at = {partition: reading[0] for partition, reading in positions_of(world.database.committed).items()}
    if at != world.oracle.ends:
        raise Violation(LOST, f"folded up to {at}, but the log ends at {world.oracle.ends}")
    world.oracle.check(world.database.committed)


class _First:
    def choose(self, choices: Sequence[str], last: str) -> str:
        return choices[0]

    def touched(self, footprint: Footprint) -> None:
        """Alone, nothing is to be compared."""


@cache
def _codes() -> list[Mapping[str, View]]:
    return [
        code(version, system=system, more=more)
        for version in (1, 2)
        for system in (True, False)
        for more in (True, False)
    ]


def add_agent(world: World, name: str, views: Mapping[str, View], partitions: list[int], batch: int) -> None:
    world.sets[name] = {view.name: view.version for view in views.values()}
    world.play.add(name, partial(agent, world, name, views, partitions, batch))


# ── two agents ──


def one_partition() -> Log:
    """With all that does not count: a zombie's commit, one that arrived twice, garbage."""
    story = Story().open().deposit("accounts/a", 1).zombie("accounts/b", 9)
    story.again().deposit("accounts/a", 2, 3).deposit("accounts/b", 4)
    return Log([story.open().garbage().deposit("accounts/a", 5)])


def _two_agents(world: World) -> None:
    views = code(1)
    add_agent(world, "a", views, [0], 3)
    add_agent(world, "b", views, [0], 3)


two_agents = Scenario("two agents", one_partition, _two_agents, lambda: code(1))

# ── a switch under them ──


def two_partitions() -> Log:
    one = Story().open().deposit("accounts/a", 1).deposit("accounts/a", 2).deposit("accounts/c", 3)
    other = Story().open().deposit("accounts/b", 5).deposit("accounts/b", 6)
    return Log([one, other])


COMMANDS: tuple[type[BaseException], ...] = (SamefoldError,)
"""Commands may end with a named error where somebody else was there first, or the database went away."""


def add_rebuild(world: World, name: str, version: int) -> None:
    world.play.add(name, partial(rebuilder, code(version), ["balances"]))


def add_switch(world: World, name: str, version: int) -> None:
    world.play.add(name, partial(switcher, code(version), ["balances"]))


def add_reader(world: World, name: str, times: int, *, sql_view: bool = False) -> None:
    world.play.add(name, partial(reader, world, times, sql_view=sql_view))


def _rebuild(world: World) -> None:
    add_agent(world, "old", code(1), [0, 1], 2)
    add_agent(world, "new", code(2), [0, 1], 2)
    add_rebuild(world, "rebuild", 2)
    add_reader(world, "reader", 4)
    add_reader(world, "person", 4, sql_view=True)


rebuild_and_switch = Scenario("rebuild and switch", two_partitions, _rebuild, lambda: code(1), may_end=COMMANDS)

SCENARIOS = {one.name: one for one in (two_agents, rebuild_and_switch)}
