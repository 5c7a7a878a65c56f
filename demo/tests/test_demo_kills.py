"""A kill of the demo counts only if it took effect: it hit a process with work before it, and a successor came back to work."""

import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any, cast, get_args

import msgspec
import pytest

from demo import load as module
from demo.crew import Crew, Role
from demo.load import Load, Loaded, Stalled
from demo.sending import Sending
from demo.watch import Before, Watch
from infra.log.records import Command
from infra.processes.supervisor import Child
from infra.settings import Settings

COMMANDS = [Command(f"c{n}", "accounts/1", "Deposit", msgspec.Raw(b"{}")) for n in range(1_000)]


class Alive(Child):
    """A supervised process that is always there."""

    pid = cast(Any, 4711)


@dataclass
class World:
    """Crew, watch and sending in one, without a process: `step` commands become visible at each look."""

    step: int = 10
    dies: bool = True
    works: Callable[[Child], bool] = lambda _child: True
    asking: bool = True
    held: int = 0
    breaks_off: bool = True
    folder: Path = Path("nowhere")
    sent: int = 0
    seen: int = 0
    sizes: list[int] = field(default_factory=list)
    killed: list[str] = field(default_factory=list)
    told: int = 0
    broken_off: list[float] = field(default_factory=list)

    def members(self, role: Role) -> list[Child]:
        return [Alive(f"{role}-{n}", "module") for n in (1, 2)]

    def check(self) -> None: ...

    def kill(self, child: Child) -> int | None:
        self.killed.append(child.name)
        if self.breaks_off and child.name.startswith("api"):
            self.broken_off += [0.0, inf]  # one was under way, one began when nobody served
        return 4711 if self.dies else None

    @property
    def answered_at(self) -> float:
        return inf if self.works(Alive("api-1", "module")) else 0.0

    def is_asking(self) -> bool:
        return self.asking

    def send(self, batch: Sequence[Command]) -> None:
        self.sizes.append(len(batch))
        self.sent += len(batch)

    def wait(self, seconds: float) -> None: ...

    def look(self) -> None: ...

    def visible(self) -> int:
        self.seen = min(self.seen + self.step, self.sent)
        return self.seen

    def before(self, child: Child) -> Before:
        return Before({}, frozenset(), frozenset())

    def is_at_its_place(self, child: Child, before: Before) -> bool:
        return True

    def has_worked(self, child: Child, before: Before) -> bool:
        return self.works(child)


def load(world: World, kills: int = 5, commands: Sequence[Command] = COMMANDS) -> Loaded:
    def after_kills() -> None:
        world.told += 1
        assert world.sent < len(COMMANDS), "something must be left to send"

    return Load(
        cast(Sending, world),
        commands,
        cast(Crew, world),
        cast(Watch, world),
        kills=kills,
        advance=lambda _count: None,
        after_kills=after_kills,
    ).run()


def effective(loaded: Loaded) -> tuple[int, ...]:
    return tuple(loaded.effective(role) for role in get_args(Role))


def test_handlers_agents_policies_and_the_api_are_killed_in_turn_over_the_whole_load() -> None:
    world = World()
    loaded = load(world)
    assert effective(loaded) == (5, 5, 5, 5)
    assert world.killed[:6] == ["handler-1", "agent-1", "policies-1", "api-1", "handler-2", "agent-2"]
    assert [kill.role for kill in loaded.kills] == [*get_args(Role)] * 5
    assert all(kill.on_the_way > 0 for kill in loaded.kills)
    for number, kill in enumerate(loaded.kills, start=1):
        assert number / 22 <= kill.at < (number + 1) / 22
    assert (world.seen, world.told) == (len(COMMANDS), 1)


def test_without_kills_everything_is_sent_at_once() -> None:
    world = World()
    load(world, kills=0)
    assert (world.sizes, world.killed) == ([len(COMMANDS)], [])


def test_a_kill_that_hit_nobody_does_not_count() -> None:
    world = World(dies=False)
    assert effective(load(world)) == (0, 0, 0, 0)
    assert world.seen == len(COMMANDS)


def test_a_kill_at_the_end_of_the_load_does_not_count() -> None:
    world = World()
    loaded = load(world, kills=33, commands=COMMANDS[:99])
    assert 0 < sum(effective(loaded)) < 4 * 33, "each takes two commands"
    assert len(world.killed) > sum(effective(loaded))


def test_an_api_that_nobody_asks_anything_is_not_killed() -> None:
    world = World(asking=False)
    assert effective(load(world))[3] == 0
    assert not any(name.startswith("api") for name in world.killed)


def test_an_api_s_kill_that_broke_no_request_off_does_not_count_and_is_tried_again() -> None:
    world = World(breaks_off=False)
    assert effective(load(world))[3] == 0
    assert sum(name.startswith("api") for name in world.killed) > 1


@pytest.mark.parametrize(("held", "all_sent"), [(1, False), (0, True)])
def test_an_api_s_successor_that_has_work_gets_no_more(
    held: int, all_sent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STALL_S", 0.01)
    world = World(works=lambda child: not child.name.startswith("api"), held=held)
    with nullcontext() if all_sent else pytest.raises(Stalled):
        load(world)
    assert (world.sent == len(COMMANDS)) == all_sent


@pytest.mark.parametrize("role", get_args(Role))
def test_a_kill_whose_successor_does_no_work_does_not_count(role: Role) -> None:
    loaded = load(World(works=lambda child: not child.name.startswith(role)))
    assert loaded.effective(role) == 0
    assert [kill.back_after_s for kill in loaded.kills if kill.role == role] == [None]


@pytest.fixture
def crew(tmp_path: Path) -> Crew:
    return Crew(Settings(), tmp_path)


def idle() -> Child:
    """A process that lives until its standard input ends."""
    program = "import sys; sys.stdin.read()"
    return Child("idle", "idle", process=subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE))


def test_a_killed_process_died_of_signal_9_and_can_t_be_killed_again(crew: Crew) -> None:
    child = idle()
    assert child.process
    assert crew.kill(child) == child.process.pid
    assert child.process.returncode == -9
    assert crew.kill(child) is None
    child.process.communicate()


def test_a_process_that_ended_by_itself_was_not_killed(crew: Crew) -> None:
    child = idle()
    assert child.process
    child.process.communicate()
    assert crew.kill(child) is None
    assert crew.freeze(child) is None
