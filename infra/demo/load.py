"""Sends the commands, and kills handlers and agents while they are at it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from infra.demo.crew import Crew, Role
from infra.demo.watch import Before, Watch
from infra.errors import SamefoldError
from infra.log.records import Command
from infra.supervisor import Child

STALL_S = 60.0
LOOK_S = 0.05


class Stalled(SamefoldError):
    """Nothing went on for a minute."""


@dataclass(slots=True)
class Kill:
    """A process that died of `kill -9` in the midst of the load: more was sent after its death.

    `at` is the visible progress, 0 to 1; `on_the_way` counts commands that were sent and not visible yet.
    `back_after_s` is when its successor had done work, None until then: a handler a commit that counts, an agent a batch.
    """

    role: Role
    child: Child
    pid: int
    at: float
    on_the_way: int
    before: Before
    back_after_s: float | None = None


@dataclass(slots=True)
class Loaded:
    """`seconds` from the first send until the last outcome was visible."""

    seconds: float = 0.0
    kills: list[Kill] = field(default_factory=list)

    def effective(self, role: Role) -> int:
        """How many kills took effect: the load was unfinished, and a successor came back to work."""
        return sum(kill.role == role and kill.back_after_s is not None for kill in self.kills)


class Load:
    """One load of a bank's commands, through `send`, which returns when they are in the log.

    `kills` is how many handlers, and how many agents, are to be killed.
    With kills the commands are sent slice by slice, so that each kill hits processes that have work before them, and that
    each successor finds some; the last slices only after the last kill. `advance` is told of commands newly visible,
    `after_kills` is called when only the last slices are left to send; it must not block.
    """

    def __init__(
        self,
        send: Callable[[Sequence[Command]], None],
        commands: Sequence[Command],
        crew: Crew,
        watch: Watch,
        *,
        kills: int,
        advance: Callable[[int], None],
        after_kills: Callable[[], None] = lambda: None,
    ) -> None:
        self.send = send
        self.commands = commands
        self.crew = crew
        self.watch = watch
        self.loaded = Loaded()
        self._kills = kills
        self._advance = advance
        self._after_kills = after_kills
        roles: tuple[Role, Role] = ("handler", "agent")
        self._victims = [(role, turn) for turn in range(kills) for role in roles]
        # two slices a kill, one that it hits and one that is sent while the process is down, and some for the end
        self._slice = -(-len(commands) // (2 * len(self._victims) + 4)) if kills else len(commands)
        self._sent = 0
        self._visible = 0
        self._down: tuple[Kill, float] | None = None

    def run(self) -> Loaded:
        """Returns when every command's outcome is visible. Raises Stalled, NotSent, KafkaAway, DatabaseAway."""
        started = moved = time.monotonic()
        told = False
        while self._visible < len(self.commands):
            if self._down is None and self._victims:
                self._strike()
            self._await_successor()
            if not (self._victims or self._down):
                if not told:
                    told = True
                    self._after_kills()
                self._send(len(self.commands))
            self.watch.wait(LOOK_S)
            if self._see():
                moved = time.monotonic()
            elif time.monotonic() > moved + STALL_S:
                raise Stalled(
                    f"{len(self.commands) - self._visible} of {len(self.commands)} commands have no outcome, "
                    f"and none came for {STALL_S:.0f} s.",
                    f"Look into the processes' logs in {self.crew.folder}.",
                )
        self.loaded.seconds = time.monotonic() - started
        return self.loaded

    def _see(self) -> bool:
        """Whether anything new became visible."""
        self.crew.check()
        if self._kills:
            self.watch.look()
        before, self._visible = self._visible, self.watch.visible()
        self._advance(self._visible - before)
        return self._visible > before

    def _send(self, until: int) -> None:
        batch = self.commands[self._sent : until]
        if batch:
            self.send(batch)
            self._sent += len(batch)

    def _strike(self) -> None:
        """Kill the next one when its turn has come, just when it got work, and send more while it is dead."""
        done = len(self.loaded.kills)
        turn_at = len(self.commands) * (done + 1) // (done + len(self._victims) + 2)
        role, turn = self._victims[0]
        members = self.crew.members(role)
        child = members[turn % len(members)]
        if self._visible < turn_at or child.pid is None:
            self._send(turn_at)
            return
        self._send(self._sent + self._slice)
        self._see()
        on_the_way = self._sent - self._visible
        pid = self.crew.kill(child)
        if pid is None or self._sent == len(self.commands):
            return  # nobody died, or the load was all but finished
        died = time.monotonic()
        kill = Kill(role, child, pid, self._visible / len(self.commands), on_the_way, self.watch.before(child))
        self._send(self._sent + self._slice)
        self.loaded.kills.append(kill)
        self._victims.pop(0)
        self._down = kill, died

    def _await_successor(self) -> None:
        if self._down is None:
            return
        kill, since = self._down
        if self.watch.has_worked(kill.child, kill.before):
            kill.back_after_s = time.monotonic() - since
            self._down = None
        elif self._visible == self._sent and self.watch.is_at_its_place(kill.child, kill.before):
            self._send(self._sent + self._slice // 4 + 1)  # others did its work meanwhile: here is some more
