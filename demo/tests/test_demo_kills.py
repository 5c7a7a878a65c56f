"""make test: without the bank. A kill of the demo counts only if it hit work, and a successor came back to work."""

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
ROLES: tuple[Role, ...] = get_args(Role)


class Alive(Child):
    """A supervised process that is always there."""

    pid = cast(Any, 4711)


@dataclass
class World:
    """Crew, watch and sending in one, without a process: ten commands become visible at each look."""

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
        self.seen = min(self.seen + 10, self.sent)
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

    parts = cast(Sending, world), commands, cast(Crew, world), cast(Watch, world)
    return Load(*parts, kills=kills, advance=lambda _count: None, after_kills=after_kills).run()


def effective(loaded: Loaded) -> tuple[int, ...]:
    return tuple(loaded.effective(role) for role in ROLES)


def test_handlers_agents_policies_and_the_api_are_killed_in_turn_over_the_whole_load() -> None:
    world = World()
    loaded = load(world)
    assert effective(loaded) == (5, 5, 5, 5)
    assert world.killed[:6] == ["handler-1", "agent-1", "policies-1", "api-1", "handler-2", "agent-2"]
    assert [kill.role for kill in loaded.kills] == [*ROLES] * 5
    assert all(kill.on_the_way > 0 for kill in loaded.kills)
    for number, kill in enumerate(loaded.kills, start=1):
        assert number / 22 <= kill.at < (number + 1) / 22
    assert (world.seen, world.told) == (len(COMMANDS), 1)


def test_without_kills_everything_is_sent_at_once() -> None:
    world = World()
    load(world, kills=0)
    assert (world.sizes, world.killed) == ([len(COMMANDS)], [])


def idle_successors_of(role: Role) -> dict[str, Any]:
    return {"works": lambda child: not child.name.startswith(role)}


@pytest.mark.parametrize(
    ("given", "roles"),
    [
        ({"dies": False}, ROLES),
        ({"asking": False}, ["api"]),
        ({"breaks_off": False}, ["api"]),
        *((idle_successors_of(role), [role]) for role in ROLES),
    ],
    ids=["nobody was hit", "nobody asks the API", "no request broke off", *(f"no {role} comes back" for role in ROLES)],
)
def test_a_kill_without_effect_does_not_count(given: dict[str, Any], roles: Sequence[Role]) -> None:
    world = World(**given)
    loaded = load(world)
    assert [loaded.effective(role) for role in roles] == [0] * len(roles)
    assert world.seen == len(COMMANDS)
    of_api = sum(name.startswith("api") for name in world.killed)
    assert of_api == 0 if not world.asking else of_api > 1 or world.breaks_off, "it is tried again where it can be"


def test_a_kill_at_the_end_of_the_load_does_not_count() -> None:
    world = World()
    loaded = load(world, kills=33, commands=COMMANDS[:99])
    assert 0 < sum(effective(loaded)) < 4 * 33, "each takes two commands"
    assert len(world.killed) > sum(effective(loaded))


@pytest.mark.parametrize(("held", "all_sent"), [(1, False), (0, True)])
def test_an_api_s_successor_that_has_work_gets_no_more(
    held: int, all_sent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STALL_S", 0.01)
    world = World(**idle_successors_of("api"), held=held)
    with nullcontext() if all_sent else pytest.raises(Stalled):
        load(world)
    assert (world.sent == len(COMMANDS)) == all_sent


def test_who_died_of_signal_9_was_killed_and_who_ended_by_itself_was_not(tmp_path: Path) -> None:
    def idle() -> tuple[Child, subprocess.Popen[bytes]]:
        program = [sys.executable, "-c", "import sys; sys.stdin.read()"]
        process = subprocess.Popen(program, stdin=subprocess.PIPE)
        return Child("idle", "idle", process=process), process

    crew = Crew(Settings(), tmp_path)
    child, process = idle()
    assert crew.kill(child) == process.pid
    assert process.returncode == -9
    assert crew.kill(child) is None
    process.communicate()
    child, process = idle()
    process.communicate()
    assert crew.kill(child) is None
