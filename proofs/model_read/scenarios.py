"""Small worlds: which actors run, over which log, with which faults."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from infra.errors import SamefoldError
from projections.engine.live import tail
from projections.engine.operate.replaying import drop, replay
from projections.engine.rebuild.rebuild import go_to, rebuild
from projections.engine.views.sql_views import replace_sql_view
from projections.engine.views.view import View
from proofs.model_read.actors import Agent, reader
from proofs.model_read.bank import Bank
from proofs.model_read.log import Log, Story
from proofs.model_read.policies import (
    PolicyWorld,
    a_relay,
    make_live,
    policy_agent,
    to_second,
    to_second_as_the_page_says,
)
from proofs.model_read.policy_oracle import decided
from proofs.model_read.views import code
from proofs.model_read.world import World

COMMANDS: tuple[type[BaseException], ...] = (SamefoldError,)
"""Commands may end with a named error: another one came first, or the database was unavailable."""

Step = Callable[[World], None]


@dataclass(frozen=True)
class Scenario:
    """Each step of `before` ends before the next; then those of `actors` start, all at once. `may_end` are errors by which an
    actor may end."""

    name: str
    log: Callable[[], Log]
    actors: Sequence[Step]
    before: Sequence[Step] = ()
    views: Callable[[], Mapping[str, View]] = lambda: code(1)
    faults: Mapping[str, int] = field(default_factory=dict)
    may_end: tuple[type[BaseException], ...] = COMMANDS
    kind: type[World] = World

    def with_faults(self, **faults: int) -> Scenario:
        """The same, and things go wrong, up to so many of each kind."""
        return replace(self, name=f"{self.name}, {' '.join(faults)}", faults=faults)


# ── actors ──


def agent(
    name: str,
    version: int,
    batch: int,
    *,
    partitions: Sequence[int] = (0, 1),
    views: Mapping[str, bool] = {},
    **how: Any,
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


def rebuilding(version: int, *, make_live: bool = True, **views: bool) -> Step:
    """`samefold rebuild`, with one process."""
    return lambda world: _discard(
        rebuild(world.settings, ["balances"], code(version, **views), make_live=make_live, processes=1)
    )


def switching(version: int) -> Step:
    """`samefold switch`, forth or back."""
    return lambda world: _discard(go_to(world.settings, ["balances"], code(version)))


def parked_stream(act: Callable[..., object]) -> Step:
    """`samefold parked replay` or `drop`, with code that takes the event that the stream is parked for."""
    return lambda world: _discard(act(world.settings, code(1)["balances"], "accounts/a"))


def readers(times: int) -> Step:
    """Of the API's statement and of the SQL view for people."""

    def start(world: World) -> None:
        world.play.add("reader", partial(reader, world, times, sql_view=False))
        world.play.add("person", partial(reader, world, times, sql_view=True))

    return start


def having(**settings: Any) -> Step:
    """Settings of the world."""

    def start(world: World) -> None:
        for name, value in settings.items():
            setattr(world, name, value)

    return start


def _discard(_result: object) -> None:
    return None


# ── what came before ──


def fold(version: int, batches: int, **views: bool) -> Step:
    """So many batches."""
    return lambda world: world.alone(
        lambda: Agent(world, "first", code(version, **views), sorted(world.log.records), 2, batches=batches).start()
    )


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


def new_bank() -> Bank:
    """Deposits from one account to another in both directions, in order, and to itself; some are refused."""
    return Bank([("a", "b", 2), ("b", "a", 3), ("a", "b", 5), ("a", "a", 4)])


def decided_bank() -> Bank:
    """All that a policy wished is in the log, as where the database was restored to an older copy."""
    return Bank([("a", "b", 2), ("b", "c", 3), ("a", "b", 5)], decided)


# ── scenarios ──


def read_little(_world: World) -> None:
    """The switch's reads of the log end before where they were to."""
    tail.AHEAD = 1


PLAIN = {"system": False}
"""Without snapshots, whose versions would show that a row is too old."""
EVERY_KIND = {"more": True}
"""Also a journal and a summary: each kind of view is written by a statement of its own."""
FAILS = {"fails": True}
POISONED = agent("agent", 1, 1, views=FAILS)
FORTH = command("switch", switching(2))
DROP = command("drop", parked_stream(drop))
AGAIN = command("rebuild", rebuilding(2))

ONE_AGENT = Scenario("one agent", one_partition, [agent("a", 1, 3, partitions=[0])], may_end=())
TWO_AGENTS = Scenario(
    "two agents", one_partition, [agent(name, 1, 3, partitions=[0]) for name in ("a", "b")], may_end=()
)
SWITCH_AND_ALL = Scenario(
    "switch with readers",
    two_partitions,
    [agent("old", 1, 2, lanes=2), agent("new", 2, 2, lanes=2), FORTH, readers(3)],
    ONE_READY,
)
FORTH_AND_BACK = Scenario(
    "forth and back",
    two_partitions,
    [
        agent("old", 1, 1),
        agent("new", 2, 1),
        command("forth", switching(2)),
        command("back", switching(1)),
        readers(3),
    ],
    ONE_READY,
)
REBUILD = Scenario("rebuild", two_partitions, [agent("old", 1, 2), agent("new", 2, 2), AGAIN, readers(3)], [fold(1, 1)])
DROP_AND_REBUILD = Scenario("drop against rebuild", poisoned, [AGAIN, POISONED, DROP, agent("new", 2, 2)], PARKED)
FAULTS = {"kill": 1, "cut": 1, "crash": 1, "timeout": 1}


def _of_policies(name: str, log: Callable[[], Log], *actors: Step, faults: Mapping[str, int] = {}) -> Scenario:
    return Scenario(name, log, actors, [LIVE], partial(code, 1, **PLAIN), faults, kind=PolicyWorld)


LIVE = alone("start", make_live)
SECOND = command("switch", to_second)
AS_THE_PAGE_SAYS = command("switch", to_second_as_the_page_says)
BOTH_READ = (policy_agent("one", 1, 3), policy_agent("two", 1, 2))
JOIN = _of_policies("wishes and outcomes", decided_bank, *BOTH_READ)
RELAYED = _of_policies("a relay", new_bank, *BOTH_READ, a_relay())
TWO_RELAYS = _of_policies(
    "two relays", new_bank, having(keeps_flying=True, unanswered=1), BOTH_READ[0], a_relay("relay"), a_relay("relay'")
)
POLICY_SWITCH = _of_policies("a switch of a policy", new_bank, *BOTH_READ, policy_agent("new", 2, 2), SECOND, a_relay())
SWITCH_TAKEN_BACK = _of_policies(
    "a policy's switch is taken back",  # in the database, not in the topic; the agent knows neither
    new_bank,
    having(pings=True),
    policy_agent("one", 1, 2),
    SECOND,
    faults={"restore": 1},
)
POLICY_SCENARIOS = (
    JOIN,
    JOIN.with_faults(**FAULTS),
    JOIN.with_faults(restore=1),
    RELAYED,
    RELAYED.with_faults(**FAULTS),
    RELAYED.with_faults(restore=1, crash=1),
    TWO_RELAYS.with_faults(crash=1, kill=1),
    POLICY_SWITCH,
    POLICY_SWITCH.with_faults(**FAULTS),
    replace(
        POLICY_SWITCH.with_faults(restore=1),
        actors=[AS_THE_PAGE_SAYS if actor is SECOND else actor for actor in POLICY_SWITCH.actors],
    ),
    SWITCH_TAKEN_BACK,
)

SCENARIOS = {
    one.name: one
    for one in (
        TWO_AGENTS,
        Scenario(
            "a partition goes back and forth",  # the group takes it from a after each batch, and gives it back
            one_partition,
            [
                agent("a", 1, 3, partitions=[0], views=PLAIN, gives_up=True),
                agent("b", 1, 3, partitions=[0], views=PLAIN),
            ],
            views=partial(code, 1, **PLAIN),
            may_end=(),
        ),
        Scenario(
            "two lanes",
            two_partitions,
            [agent("a", 1, 2, views=EVERY_KIND, lanes=2), agent("b", 1, 2, views=EVERY_KIND)],
            views=partial(code, 1, **EVERY_KIND),
            may_end=(),
        ),
        Scenario("switch", two_partitions, [agent("old", 1, 2), FORTH], ONE_READY),
        Scenario(
            "switch that reads little at once", two_partitions, [read_little, agent("old", 1, 2), FORTH], ONE_READY
        ),
        Scenario("switch while a batch waits", two_partitions, [agent("old", 1, 2, interrupted=1), FORTH], ONE_READY),
        SWITCH_AND_ALL,
        Scenario(
            "going back",
            two_partitions,
            [agent("new", 2, 1), command("back", switching(1)), agent("old", 1, 1), readers(3)],
            [*ONE_READY, alone("switch", switching(2)), fold(2, 1)],
        ),
        FORTH_AND_BACK,
        Scenario(
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
        ),
        replace(SWITCH_AND_ALL, name="switch with readers, blind view", before=[*ONE_READY, hide_ready]),
        REBUILD,
        Scenario(
            "each part loaded twice",
            two_partitions,
            [having(retries_parts=True), command("rebuild", rebuilding(2, make_live=False))],
            [fold(1, 1)],
        ),
        Scenario(
            "rebuild after a dead one",  # the second finds what the first left, dead or frozen, and its loaders awake
            two_partitions,
            [command("first", rebuilding(2)), command("second", rebuilding(2)), agent("old", 1, 2), readers(2)],
            [fold(1, 1)],
            faults={"crash": 1},
        ),
        Scenario("replay", poisoned, [POISONED, command("replay", parked_stream(replay))], PARKED),
        Scenario("drop", poisoned, [POISONED, DROP], PARKED),
        Scenario("drop against switch", poisoned, [FORTH, POISONED, DROP], [*PARKED, READY]),
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
        *POLICY_SCENARIOS,
    )
}
