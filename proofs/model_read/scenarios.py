"""Small worlds: who runs, over which log, with which faults."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from infra.errors import SamefoldError
from projections.engine.live import tail
from projections.engine.views.sql_views import replace_sql_view
from projections.engine.views.view import View
from proofs.model_read.actors import Agent, parker, reader, rebuilder, switcher
from proofs.model_read.log import Log, Story
from proofs.model_read.views import code
from proofs.model_read.world import World

COMMANDS: tuple[type[BaseException], ...] = (SamefoldError,)
"""Commands may end with a named error, where somebody else was there first or the database went away."""


@dataclass(frozen=True)
class Scenario:
    """`before` happens alone, then what `build` adds is on. `may_end` are errors by which an actor may end."""

    name: str
    log: Callable[[], Log]
    build: Callable[[World], None]
    before: Callable[[World], None] = lambda _world: None
    views: Callable[[], Mapping[str, View]] = lambda: code(1)
    faults: Mapping[str, int] = field(default_factory=dict)
    may_end: tuple[type[BaseException], ...] = ()

    def with_faults(self, **faults: int) -> Scenario:
        """The same, and things go wrong, up to so many of each kind."""
        name = f"{self.name}, {' '.join(faults)}"
        return Scenario(name, self.log, self.build, self.before, self.views, faults, self.may_end)


# ── who may be on ──


def add_agent(
    world: World,
    name: str,
    views: Mapping[str, View],
    partitions: list[int],
    batch: int,
    *,
    lanes: int = 1,
    gives_up: bool = False,
    interrupted: int = 0,
) -> None:
    world.sets[name] = {view.name: view.version for view in views.values()}
    Agent(world, name, views, partitions, batch, lanes=lanes, gives_up=gives_up, interrupted=interrupted).start()


def fold(world: World, views: Mapping[str, View], batches: int) -> None:
    """Somebody folds so many batches, alone."""
    world.alone(lambda: Agent(world, "first", views, sorted(world.log.records), 2, batches=batches).start())


def add_command(world: World, name: str, command: Callable[[], None]) -> None:
    """Somebody gives it, sooner or later."""

    def run() -> None:
        world.play.pause()
        command()

    world.play.add(name, run)


def add_rebuild(world: World, name: str, version: int, *, make_live: bool = True) -> None:
    add_command(world, name, partial(rebuilder, world, code(version), ["balances"], make_live=make_live))


def add_switch(world: World, name: str, version: int) -> None:
    add_command(world, name, partial(switcher, world, code(version), ["balances"]))


def add_readers(world: World, times: int) -> None:
    world.play.add("reader", partial(reader, world, times, sql_view=False))
    world.play.add("person", partial(reader, world, times, sql_view=True))


def make_ready(world: World, version: int) -> None:
    """A build of that version, alone."""
    world.solo("rebuild", partial(rebuilder, world, code(version), ["balances"], make_live=False))


# ── logs ──


def one_partition() -> Log:
    """With all that does not count: a zombie's commit, one that arrived twice, garbage."""
    story = Story().open().deposit("accounts/a", 1).zombie("accounts/b", 9)
    story.again().deposit("accounts/a", 2, 3).deposit("accounts/b", 4)
    return Log([story.open().garbage().deposit("accounts/a", 5)])


def two_partitions() -> Log:
    one = Story().open().deposit("accounts/a", 1).deposit("accounts/a", 2).deposit("accounts/c", 3)
    other = Story().open().deposit("accounts/b", 5).deposit("accounts/b", 6)
    return Log([one, other])


def poisoned() -> Log:
    one = Story().open().deposit("accounts/a", 1).deposit("accounts/a", 2, note="poison").deposit("accounts/a", 3)
    other = Story().open().deposit("accounts/b", 5).deposit("accounts/b", 6).deposit("accounts/b", 7)
    return Log([one.deposit("accounts/a", 4).deposit("accounts/a", 5), other])


# ── two agents of the same code ──


def _two_agents(world: World) -> None:
    add_agent(world, "a", code(1), [0], 3)
    add_agent(world, "b", code(1), [0], 3)


def _one_agent(world: World) -> None:
    add_agent(world, "a", code(1), [0], 3)


def _back_and_forth(world: World) -> None:
    """The group takes a's partition away after each batch, and gives it back.

    Without snapshots, whose versions would tell a row that is too old.
    """
    add_agent(world, "a", code(1, system=False), [0], 3, gives_up=True)
    add_agent(world, "b", code(1, system=False), [0], 3)


ONE_AGENT = Scenario("one agent", one_partition, _one_agent)
TWO_AGENTS = Scenario("two agents", one_partition, _two_agents)
BACK_AND_FORTH = Scenario(
    "a partition goes back and forth", one_partition, _back_and_forth, views=partial(code, 1, system=False)
)


# ── a switch under them ──


def _one_ready(world: World) -> None:
    """Version 2 is built, and the agent is already beyond it."""
    fold(world, code(1), 1)
    make_ready(world, 2)
    fold(world, code(1), 1)


def _switch(world: World) -> None:
    add_agent(world, "old", code(1), [0, 1], 2)
    add_switch(world, "switch", 2)


def _switch_little(world: World) -> None:
    """The switch's reads of the log end before where they were to."""
    tail.AHEAD = 1
    _switch(world)


def _switch_and_all(world: World) -> None:
    add_agent(world, "old", code(1), [0, 1], 2, lanes=2)
    add_agent(world, "new", code(2), [0, 1], 2, lanes=2)
    add_switch(world, "switch", 2)
    add_readers(world, 3)


def _interrupted(world: World) -> None:
    add_agent(world, "old", code(1), [0, 1], 2, interrupted=1)
    add_switch(world, "switch", 2)


def _lanes(world: World) -> None:
    """Of views of every kind: each is written by a statement of its own."""
    add_agent(world, "a", code(1, system=False, more=True), [0, 1], 2, lanes=2)
    add_agent(world, "b", code(1, system=False, more=True), [0, 1], 2)


LANES = Scenario("two lanes", two_partitions, _lanes, views=partial(code, 1, system=False, more=True))
INTERRUPTED = Scenario("switch while a batch waits", two_partitions, _interrupted, _one_ready, may_end=COMMANDS)
SWITCH = Scenario("switch", two_partitions, _switch, _one_ready, may_end=COMMANDS)
SWITCH_LITTLE = Scenario(
    "switch that reads little at once", two_partitions, _switch_little, _one_ready, may_end=COMMANDS
)
SWITCH_AND_ALL = Scenario("switch with readers", two_partitions, _switch_and_all, _one_ready, may_end=COMMANDS)


def _switched(world: World) -> None:
    """Version 2 is live, and has folded a batch since."""
    _one_ready(world)
    world.solo("switch", partial(switcher, world, code(2), ["balances"]))
    fold(world, code(2), 1)


def _back(world: World) -> None:
    add_agent(world, "new", code(2), [0, 1], 1)
    add_switch(world, "back", 1)
    add_agent(world, "old", code(1), [0, 1], 1)
    add_readers(world, 3)


def _forth_and_back(world: World) -> None:
    add_agent(world, "old", code(1), [0, 1], 1)
    add_agent(world, "new", code(2), [0, 1], 1)
    add_switch(world, "forth", 2)
    add_switch(world, "back", 1)
    add_readers(world, 3)


GOING_BACK = Scenario("going back", two_partitions, _back, _switched, may_end=COMMANDS)
FORTH_AND_BACK = Scenario("forth and back", two_partitions, _forth_and_back, _one_ready, may_end=COMMANDS)


def _switched_once(world: World) -> None:
    fold(world, code(1, system=False), 1)
    world.solo("rebuild", partial(rebuilder, world, code(2, system=False), ["balances"]))


def _restored_between(world: World) -> None:
    """An agent that knows the generation of the first switch, which a restore takes back; then there is another one."""
    world.pings = True
    world.backs = (1,)
    world.loads_itself = True
    add_agent(world, "new", code(2, system=False), [0, 1], 2)
    add_command(world, "again", partial(rebuilder, world, code(2, system=False), ["balances"]))


RESTORED = Scenario(
    "restored between two switches",
    two_partitions,
    _restored_between,
    _switched_once,
    partial(code, 1, system=False),
    {"restore": 1},
    COMMANDS,
)


def _blind_view(world: World) -> None:
    """The build is ready, but people's SQL view does not read its table yet: whoever made it died right then."""
    _one_ready(world)
    replace_sql_view(world.database.observer, "balances", without="balances_v2")


BLIND_VIEW = Scenario("switch with readers, blind view", two_partitions, _switch_and_all, _blind_view, may_end=COMMANDS)


# ── builds ──


def _folded_one(world: World) -> None:
    fold(world, code(1), 1)


def _rebuild(world: World) -> None:
    add_agent(world, "old", code(1), [0, 1], 2)
    add_agent(world, "new", code(2), [0, 1], 2)
    add_rebuild(world, "rebuild", 2)
    add_readers(world, 3)


def _parts_twice(world: World) -> None:
    world.retries_parts = True
    add_rebuild(world, "rebuild", 2, make_live=False)


def _rebuild_twice(world: World) -> None:
    """Whoever comes second finds what the first one left, who may be dead or frozen, and its loaders awake."""
    add_rebuild(world, "first", 2)
    add_rebuild(world, "second", 2)
    add_agent(world, "old", code(1), [0, 1], 2)
    add_readers(world, 2)


REBUILD = Scenario("rebuild", two_partitions, _rebuild, _folded_one, may_end=COMMANDS)
PARTS_TWICE = Scenario("each part loaded twice", two_partitions, _parts_twice, _folded_one, may_end=COMMANDS)
REBUILD_TWICE = Scenario(
    "rebuild after a dead one", two_partitions, _rebuild_twice, _folded_one, faults={"crash": 1}, may_end=COMMANDS
)


# ── parked streams ──


def _parked(world: World) -> None:
    """A stream is parked in the live table."""
    fold(world, code(1, fails=True), 3)


def _parked_and_ready(world: World) -> None:
    _parked(world)
    make_ready(world, 2)


def _replay(world: World) -> None:
    add_agent(world, "agent", code(1, fails=True), [0, 1], 1)
    add_command(world, "replay", partial(parker, world, code(1), "accounts/a", drop_it=False))


def _drop(world: World) -> None:
    add_agent(world, "agent", code(1, fails=True), [0, 1], 1)
    add_command(world, "drop", partial(parker, world, code(1), "accounts/a", drop_it=True))


def _drop_and_switch(world: World) -> None:
    add_switch(world, "switch", 2)
    _drop(world)


def _drop_and_rebuild(world: World) -> None:
    add_rebuild(world, "rebuild", 2)
    _drop(world)
    add_agent(world, "new", code(2), [0, 1], 2)


REPLAY = Scenario("replay", poisoned, _replay, _parked, may_end=COMMANDS)
DROP = Scenario("drop", poisoned, _drop, _parked, may_end=COMMANDS)
DROP_AND_SWITCH = Scenario("drop against switch", poisoned, _drop_and_switch, _parked_and_ready, may_end=COMMANDS)
DROP_AND_REBUILD = Scenario("drop against rebuild", poisoned, _drop_and_rebuild, _parked, may_end=COMMANDS)

FAULTS = {"kill": 1, "cut": 1, "crash": 1, "timeout": 1}
SCENARIOS = {
    one.name: one
    for one in (
        TWO_AGENTS,
        BACK_AND_FORTH,
        LANES,
        SWITCH,
        SWITCH_LITTLE,
        INTERRUPTED,
        SWITCH_AND_ALL,
        GOING_BACK,
        FORTH_AND_BACK,
        RESTORED,
        BLIND_VIEW,
        REBUILD,
        PARTS_TWICE,
        REBUILD_TWICE,
        REPLAY,
        DROP,
        DROP_AND_SWITCH,
        DROP_AND_REBUILD,
        ONE_AGENT.with_faults(kill=2, cut=2),
        TWO_AGENTS.with_faults(kill=1, cut=1),
        TWO_AGENTS.with_faults(crash=1, timeout=1),
        SWITCH_AND_ALL.with_faults(**FAULTS),
        SWITCH_AND_ALL.with_faults(restore=1),
        FORTH_AND_BACK.with_faults(restore=2, cut=1),
        REBUILD.with_faults(**FAULTS),
        REBUILD.with_faults(restore=1),
        DROP_AND_REBUILD.with_faults(**FAULTS),
    )
}
