"""Small worlds: which actors run, over which log, with which faults."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from infra.archive import marks
from infra.database.connect import DatabaseUnavailable
from infra.errors import SamefoldError
from projections.engine.operate.replaying import drop, replay
from projections.engine.rebuild import catch_up, shares
from projections.engine.rebuild.catch_up import Ahead, MovedElsewhere
from projections.engine.rebuild.claims import BuildAbandoned
from projections.engine.rebuild.rebuild import NoBuild, NotStopped, go_to, rebuild, resume
from projections.engine.views.sql_views import replace_sql_view
from projections.engine.views.view import View
from proofs.model_read.actors import Agent, reader
from proofs.model_read.bank import Bank
from proofs.model_read.log import Log, Story
from proofs.model_read.policies import (
    PolicyWorld,
    make_live,
    policy_agent,
    relay,
    to_second,
    to_second_as_the_page_says,
)
from proofs.model_read.policy_oracle import decided
from proofs.model_read.views import code
from proofs.model_read.world import World

Step = Callable[[Any], object]
"""Something to be done in a world."""


@dataclass(frozen=True)
class Scenario:
    """Each step of `before` ends before the next; then those of `actors` start, all at once. `may_end` are errors by which an
    actor may end: a command by a named one, as another one came first, or the database was unavailable."""

    name: str
    log: Callable[[], Log]
    actors: Sequence[Step]
    before: Sequence[Step] = ()
    views: Callable[[], Mapping[str, View]] = lambda: code(1)
    faults: Mapping[str, int] = field(default_factory=dict)
    may_end: tuple[type[BaseException], ...] = (SamefoldError,)
    kind: type[World] = World

    def with_faults(self, *each: Mapping[str, int]) -> list[Scenario]:
        """The same, and things go wrong, up to so many of each kind: once as it is, and then each of these."""
        return [self, *(replace(self, name=f"{self.name}, {' '.join(faults)}", faults=faults) for faults in each)]


# ── actors ──


def agent(
    name: str, version: int, batch: int, partitions: Sequence[int] = (0, 1), views: Mapping[str, bool] = {}, **how: Any
) -> Step:
    """An agent process with the code of that version. `views`: see `code`; `how`: see `Agent`."""

    def start(world: World) -> None:
        its = code(version, **views)
        world.sets[name] = {view.name: view.version for view in its.values()}
        Agent(world, name, its, partitions, batch, **how).start()

    return start


def command(name: str, run: Step) -> Step:
    """Given sooner or later."""

    def start(world: World) -> None:
        def act() -> None:
            world.play.pause()
            run(world)

        world.play.add(name, act)

    return start


def rebuilding(version: int, *, make_live: bool = True, tasks: int | None = None, **views: bool) -> Step:
    """`samefold rebuild`, with one process."""
    of = partial(code, version, **views)

    def act(world: World) -> object:
        shares.LEAST = 1  # a log of two records is worth two tasks
        return rebuild(world.settings, ["balances"], of(), make_live=make_live, tasks=tasks)

    return act


def switching(version: int) -> Step:
    """`samefold switch`, forth or back."""
    return lambda world: go_to(world.settings, ["balances"], code(version))


def resuming(world: World) -> None:
    """`samefold views resume`, with code that takes the event that the view stopped at."""
    resume(world.settings, ["balances"], code(1, stops=True))


def parked_stream(act: Callable[..., object]) -> Step:
    """`samefold parked replay` or `drop`, with code that takes the event that the stream is parked for."""
    return lambda world: act(world.settings, code(1)["balances"], "accounts/a")


def readers(world: World) -> None:
    """Of the API's statement and of the SQL view for people."""
    world.play.add("reader", partial(reader, world, 3, sql_view=False))
    world.play.add("person", partial(reader, world, 3, sql_view=True))


def having(**settings: Any) -> Step:
    """Settings of the world."""
    return lambda world: world.__dict__.update(settings)


# ── what came before ──


def fold(version: int, batches: int, **views: bool) -> Step:
    """So many batches."""
    of = partial(code, version, **views)
    return lambda world: world.alone(Agent(world, "first", of(), sorted(world.log.records), 2, batches=batches).start)


def alone(name: str, run: Step) -> Step:
    return lambda world: world.alone(lambda: world.play.add(name, partial(run, world)))


READY = alone("rebuild", rebuilding(2, make_live=False))
ONE_READY = (fold(1, 1), READY, fold(1, 1))
"""Version 2 is built, and the agent is already beyond it."""
PARKED = (fold(1, 3, fails=True),)
"""A stream is parked in the live table."""


def hide_ready(world: World) -> None:
    """People's SQL view does not read the ready table yet: the rebuild died right then."""
    replace_sql_view(world.database.observer, "balances", without="balances_v2")


def read_little(_world: World) -> None:
    """The switch's reads of the log end before where they were to."""
    catch_up.AHEAD = 1


def mark_often(_world: World) -> None:
    """Nearly each batch is to have a mark."""
    marks.EVERY = 2


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


def two_shares() -> Log:
    """Each of two shares has a stream."""
    return Log([Story().open().deposit("accounts/a", 1).deposit("accounts/d", 2).deposit("accounts/a", 3)])


def poisoned() -> Log:
    one = Story().open().deposit("accounts/a", 1).deposit("accounts/a", 2, note="poison").deposit("accounts/a", 3)
    other = Story().open().deposit("accounts/b", 5).deposit("accounts/b", 6).deposit("accounts/b", 7)
    return Log([one.deposit("accounts/a", 4).deposit("accounts/a", 5), other])


def poisoned_twice() -> Log:
    one = Story().open().deposit("accounts/a", 1).deposit("accounts/a", 2, note="poison").deposit("accounts/a", 3)
    return Log([one, Story().open().deposit("accounts/b", 5).deposit("accounts/b", 6, note="poison")])


def new_bank() -> Bank:
    """Deposits from one account to another in both directions, in order, and to itself; some are refused."""
    return Bank([("a", "b", 2), ("b", "a", 3), ("a", "b", 5), ("a", "a", 4)])


def decided_bank() -> Bank:
    """All that a policy wished is in the log, as where the database was restored to an older copy."""
    return Bank([("a", "b", 2), ("b", "c", 3), ("a", "b", 5)], decided)


# ── scenarios ──

PLAIN = {"system": False}
"""Without snapshots, whose versions would show that a row is too old."""
EVERY_KIND = {"more": True}
"""Also a journal and a summary: each kind of view is written by a statement of its own."""
POISONED = agent("agent", 1, 1, views={"fails": True})
FORTH = command("switch", switching(2))
DROP = command("drop", parked_stream(drop))
AGAIN = command("rebuild", rebuilding(2))
FAULTS = {"kill": 1, "cut": 1, "crash": 1, "timeout": 1}
RESTORE = {"restore": 1}

ONE_AGENT = Scenario("one agent", one_partition, [agent("a", 1, 3, [0])], may_end=())
TWO_AGENTS = Scenario("two agents", one_partition, [agent(name, 1, 3, [0]) for name in ("a", "b")], may_end=())
BACK_AND_FORTH = Scenario(
    "a partition goes back and forth",  # the group takes it from a after each batch, and gives it back
    one_partition,
    [agent("a", 1, 3, [0], PLAIN, gives_up=True), agent("b", 1, 3, [0], PLAIN)],
    views=partial(code, 1, **PLAIN),
    may_end=(),
)
TWO_LANES = Scenario(
    "two lanes",
    two_partitions,
    [agent("a", 1, 2, views=EVERY_KIND, lanes=2), agent("b", 1, 2, views=EVERY_KIND)],
    views=partial(code, 1, **EVERY_KIND),
    may_end=(),
)
SWITCH = Scenario("switch", two_partitions, [agent("old", 1, 2), FORTH], ONE_READY)
SWITCH_AND_ALL = Scenario(
    "switch with readers",
    two_partitions,
    [agent("old", 1, 2, lanes=2), agent("new", 2, 2, lanes=2), FORTH, readers],
    ONE_READY,
)
FORTH_AND_BACK = Scenario(
    "forth and back",
    two_partitions,
    [agent("old", 1, 1), agent("new", 2, 1), command("forth", switching(2)), command("back", switching(1)), readers],
    ONE_READY,
)
RESTORED = Scenario(
    "restored between two switches",  # the agent knows the generation of the first, which the restore takes back
    two_partitions,
    [
        having(pings=True, backs=(1,), loads_itself=True),
        agent("new", 2, 2, views=PLAIN),
        command("again", rebuilding(2, **PLAIN)),
    ],
    [fold(1, 1, **PLAIN), alone("rebuild", rebuilding(2, **PLAIN))],
    partial(code, 1, **PLAIN),
    {"restore": 1},
)
REBUILD = Scenario("rebuild", two_partitions, [agent("old", 1, 2), agent("new", 2, 2), AGAIN, readers], [fold(1, 1)])
LOADED_TWICE = Scenario(
    "each part loaded twice",
    two_partitions,
    [having(retries_parts=True), command("rebuild", rebuilding(2, make_live=False))],
    [fold(1, 1)],
)
SHARED = replace(
    LOADED_TWICE,
    name="each share loaded twice",
    log=two_shares,
    actors=[having(retries_parts=True), command("rebuild", rebuilding(2, make_live=False, tasks=2))],
    before=[fold(1, 2)],
)
AFTER_A_DEAD_ONE = Scenario(
    "rebuild after a dead one",  # the second finds what the first left, dead or frozen, and its loaders awake
    two_partitions,
    [command("first", rebuilding(2)), command("second", rebuilding(2)), agent("old", 1, 2), readers],
    [fold(1, 1)],
    faults={"crash": 1},
)
STOPS = {"fails": True, "stops": True}
RESUME = command("resume", resuming)
STOP = Scenario(
    "a view stops and is resumed",
    poisoned_twice,
    [
        agent("a", 1, 2, views=STOPS, lanes=2),
        agent("b", 1, 1, views=STOPS),
        RESUME,
        command("again", resuming),
        readers,
    ],
    may_end=(NotStopped, NoBuild, BuildAbandoned, MovedElsewhere, Ahead, DatabaseUnavailable),
)
STOP_AND_SWITCH = Scenario(
    "a view stops against a switch",
    poisoned_twice,
    [agent("old", 1, 1, views=STOPS), agent("new", 2, 2), FORTH, RESUME],
    [READY],
)
DROP_AND_REBUILD = Scenario("drop against rebuild", poisoned, [AGAIN, POISONED, DROP, agent("new", 2, 2)], PARKED)


def _of_policies(name: str, log: Callable[[], Log], *actors: Step, **faults: int) -> Scenario:
    before = [alone("start", make_live)]
    return Scenario(name, log, actors, before, partial(code, 1, **PLAIN), faults, kind=PolicyWorld)


SECOND = command("switch", to_second)
ONE = policy_agent("one", 1, 3)
BOTH_READ = (ONE, policy_agent("two", 1, 2))
JOIN = _of_policies("wishes and outcomes", decided_bank, *BOTH_READ)
RELAYED = _of_policies("a relay", new_bank, *BOTH_READ, relay())
TWO_RELAYS = _of_policies(
    "two relays", new_bank, having(keeps_flying=True, unanswered=1), ONE, relay(), relay("relay'")
)
NEW = policy_agent("new", 2, 2)
POLICY_SWITCH = _of_policies("a switch of a policy", new_bank, *BOTH_READ, NEW, SECOND, relay())
AS_THE_PAGE_SAYS = [*BOTH_READ, NEW, command("switch", to_second_as_the_page_says), relay()]
TAKEN_BACK = _of_policies(
    "a policy's switch is taken back",  # in the database, not in the topic; the agent knows neither
    new_bank,
    having(pings=True),
    policy_agent("one", 1, 2),
    SECOND,
    restore=1,
)

SCENARIOS = {
    one.name: one
    for one in (
        *TWO_AGENTS.with_faults({"kill": 1, "cut": 1}, {"crash": 1, "timeout": 1}),
        *ONE_AGENT.with_faults({"kill": 2, "cut": 2})[1:],
        *replace(TWO_AGENTS, name="marks", actors=[mark_often, *TWO_AGENTS.actors]).with_faults(
            {"kill": 1, "restore": 1}
        ),
        BACK_AND_FORTH,
        TWO_LANES,
        SWITCH,
        replace(SWITCH, name="switch that reads little at once", actors=[read_little, *SWITCH.actors]),
        replace(SWITCH, name="switch while a batch waits", actors=[agent("old", 1, 2, interrupted=1), FORTH]),
        *SWITCH_AND_ALL.with_faults(FAULTS, RESTORE),
        replace(SWITCH_AND_ALL, name="switch with readers, blind view", before=[*ONE_READY, hide_ready]),
        *FORTH_AND_BACK.with_faults({"restore": 2, "cut": 1}),
        RESTORED,
        *REBUILD.with_faults(FAULTS, RESTORE),
        LOADED_TWICE,
        *SHARED.with_faults({"kill": 1}),
        AFTER_A_DEAD_ONE,
        Scenario("replay", poisoned, [POISONED, command("replay", parked_stream(replay))], PARKED),
        Scenario("drop", poisoned, [POISONED, DROP], PARKED),
        Scenario("drop against switch", poisoned, [FORTH, POISONED, DROP], [*PARKED, READY]),
        *DROP_AND_REBUILD.with_faults(FAULTS),
        *STOP.with_faults(FAULTS, RESTORE),
        *STOP_AND_SWITCH.with_faults(FAULTS),
        *JOIN.with_faults(FAULTS, RESTORE),
        *RELAYED.with_faults(FAULTS, {"restore": 1, "crash": 1}),
        *TWO_RELAYS.with_faults({"crash": 1, "kill": 1})[1:],
        *POLICY_SWITCH.with_faults(FAULTS),
        *replace(POLICY_SWITCH, actors=AS_THE_PAGE_SAYS).with_faults(RESTORE)[1:],
        TAKEN_BACK,
    )
}
