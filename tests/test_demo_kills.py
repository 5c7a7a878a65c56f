"""A kill of the demo counts only if it took effect: it hit a process with work before it, and a successor came back to work."""

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from infra.demo.crew import Crew, Role
from infra.demo.load import Load, Loaded
from infra.demo.watch import Before, Watch
from infra.log.records import Command
from infra.settings import Settings
from infra.supervisor import Child

COMMANDS = [Command(f"c{n}", "accounts/1", "Deposit", msgspec.Raw(b"{}")) for n in range(1_000)]


class Alive(Child):
    """A supervised process that is always there."""

    pid = cast(Any, 4711)


@dataclass
class World:
    """Crew and watch in one, without a process: `step` commands become visible at each look."""

    step: int = 10
    dies: bool = True
    works: Callable[[Child], bool] = lambda _child: True
    folder: Path = Path("nowhere")
    sent: int = 0
    seen: int = 0
    killed: list[str] = field(default_factory=list)
    told: int = 0

    def members(self, role: Role) -> list[Child]:
        return [Alive(f"{role}-{n}", "module") for n in (1, 2)]

    def check(self) -> None: ...

    def kill(self, child: Child) -> int | None:
        self.killed.append(child.name)
        return 4711 if self.dies else None

    def send(self, batch: Sequence[Command]) -> None:
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
        world.send,
        commands,
        cast(Crew, world),
        cast(Watch, world),
        kills=kills,
        advance=lambda _count: None,
        after_kills=after_kills,
    ).run()


def effective(loaded: Loaded) -> tuple[int, int]:
    return loaded.effective("handler"), loaded.effective("agent")


def test_handlers_and_agents_are_killed_in_turn_over_the_whole_load() -> None:
    world = World()
    loaded = load(world)
    assert effective(loaded) == (5, 5)
    assert world.killed == ["handler-1", "agent-1", "handler-2", "agent-2"] * 2 + ["handler-1", "agent-1"]
    assert all(kill.on_the_way > 0 for kill in loaded.kills)
    for number, kill in enumerate(loaded.kills, start=1):
        assert number / 12 <= kill.at < (number + 1) / 12
    assert (world.seen, world.told) == (len(COMMANDS), 1)


def test_without_kills_everything_is_sent_at_once() -> None:
    world = World()
    sizes: list[int] = []
    Load(
        lambda batch: (sizes.append(len(batch)), world.send(batch))[1],  # type: ignore[func-returns-value]
        COMMANDS,
        cast(Crew, world),
        cast(Watch, world),
        kills=0,
        advance=lambda _count: None,
    ).run()
    assert (sizes, world.killed) == ([len(COMMANDS)], [])


def test_a_kill_that_hit_nobody_does_not_count() -> None:
    world = World(dies=False)
    assert effective(load(world)) == (0, 0)
    assert world.seen == len(COMMANDS)


def test_a_kill_at_the_end_of_the_load_does_not_count() -> None:
    world = World()
    loaded = load(world, kills=49, commands=COMMANDS[:99])
    assert sum(effective(loaded)) == 49, "each takes two commands, and the last one is left"
    assert len(world.killed) > 49


@pytest.mark.parametrize("role", ["handler", "agent"])
def test_a_kill_whose_successor_does_no_work_does_not_count(role: Role) -> None:
    loaded = load(World(works=lambda child: not child.name.startswith(role)))
    assert loaded.effective(role) == 0
    assert loaded.kills[-1].back_after_s is None


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
