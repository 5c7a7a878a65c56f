"""Sends the commands, and kills handlers, agents, policies and the API meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import get_args

from demo.crew import Crew, Role
from demo.sending import Sending
from demo.watch import Before, Watch
from infra.errors import SamefoldError
from infra.log.records import Command
from infra.processes.supervisor import Child

STALL_S = 60.0
LOOK_S = 0.05


class Stalled(SamefoldError):
    """Nothing went on for a minute."""


@dataclass(slots=True)
class Kill:
    """A process that died of `kill -9` in the midst of the load: more was sent after its death.

    `at` is the visible progress, 0 to 1; `on_the_way` counts commands that were sent and not visible yet, for an API the requests
    that it broke off. `back_after_s` is when its successor had done work, None until then: a handler a commit that counts, an
    agent and policies a batch, an API an answer.
    """

    role: Role
    child: Child
    pid: int
    at: float
    on_the_way: int
    before: Before
    died: float
    broken_off_before: int
    back_after_s: float | None = None

    @property
    def is_effective(self) -> bool:
        """Whether it hit work, and a successor came back to work."""
        return self.back_after_s is not None and (self.role != "api" or self.on_the_way > 0)


@dataclass(slots=True)
class Loaded:
    """`seconds` from the first send until the last outcome was visible."""

    seconds: float = 0.0
    kills: list[Kill] = field(default_factory=list)

    def effective(self, role: Role) -> int:
        """How many kills took effect. The load was unfinished then."""
        return sum(kill.role == role and kill.is_effective for kill in self.kills)


class Load:
    """One load of a bank's commands, through `sending`.

    `kills` is how many handlers, agents and processes of policies, and how often the API, are to be killed, in turn, each when the
    successor of the last one is back at work. Then commands are sent slice by slice, so that each kill hits processes that have
    work before them, and that each successor finds some; the last slices only after the last kill. `advance` is told of commands
    newly visible, `after_kills` is called when only the last slices are left to send; it must not block.
    """

    def __init__(
        self,
        sending: Sending,
        commands: Sequence[Command],
        crew: Crew,
        watch: Watch,
        *,
        kills: int,
        advance: Callable[[int], None],
        after_kills: Callable[[], None] = lambda: None,
    ) -> None:
        self.sending = sending
        self.commands = commands
        self.crew = crew
        self.watch = watch
        self.loaded = Loaded()
        self._kills = kills
        self._advance = advance
        self._after_kills = after_kills
        self._victims = [(role, turn) for turn in range(kills) for role in get_args(Role)]
        self._planned = len(self._victims)
        self._down: Kill | None = None
        # two slices a kill, one that it hits and one that is sent while the process is down, and some for the end
        self._slice = -(-len(commands) // (12 * kills + 10)) if kills else len(commands)
        self._sent = 0
        self._visible = 0

    def run(self) -> Loaded:
        """Returns when every command's outcome is visible.

        Raises Stalled, NotSent, Unexpected, KafkaUnavailable, DatabaseUnavailable.
        """
        started = moved = time.monotonic()
        told = False
        while self._visible < len(self.commands):
            if self._down is not None:
                self._await_successor(self._down)
            elif self._victims:
                self._strike(*self._victims[0])
            else:
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

    @property
    def visible(self) -> int:
        """How many commands have their outcome, as of the last look."""
        return self._visible

    def _see(self) -> bool:
        """Whether anything new became visible."""
        self.crew.check()
        self.sending.check()
        if self._kills:
            self.watch.look()
        before, self._visible = self._visible, self.watch.visible()
        self._advance(self._visible - before)
        return self._visible > before

    def _send(self, until: int) -> None:
        batch = self.commands[self._sent : until]
        if batch:
            self.sending.send(batch)
            self._sent += len(batch)

    def _strike(self, role: Role, turn: int) -> None:
        """Kill the next one when its turn has come, just when it got work, and send more while it is dead."""
        members = self.crew.members(role)
        child = members[turn % len(members)]
        done = self._planned - len(self._victims)
        turn_at = len(self.commands) * (done + 1) // (self._planned + 2)
        # commands that wait for the API's answers delay no turn, unless there are many
        if self._visible + min(self.sending.held, 4 * self._slice) < turn_at or child.pid is None:
            self._send(turn_at)
            return
        self._send(self._sent + self._slice)
        self._see()
        on_the_way, broken_off = self._sent - self._visible, len(self.sending.broken_off)
        if role == "api" and not self.sending.is_asking():
            return  # no request is under way: try again after the next slice
        pid = self.crew.kill(child)
        if pid is None or self._sent == len(self.commands):
            return  # no process was killed, or the load was nearly finished
        died = time.monotonic()
        at, before = self._visible / len(self.commands), Before() if role == "api" else self.watch.before(child)
        self._down = Kill(role, child, pid, at, on_the_way, before, died, broken_off)
        self.loaded.kills.append(self._down)
        self._send(self._sent + self._slice)

    def _await_successor(self, kill: Kill) -> None:
        if self._has_worked(kill):
            kill.back_after_s = time.monotonic() - kill.died
            if kill.role == "api":
                broken_off = self.sending.broken_off[kill.broken_off_before :]
                kill.on_the_way = sum(began < kill.died for began in broken_off)
            self._down = None
            if kill.is_effective:
                self._victims.pop(0)
        elif self._waits_for_work(kill):
            self._send(self._sent + self._slice // 4 + 1)  # other processes did its work meanwhile: send more

    def _has_worked(self, kill: Kill) -> bool:
        if kill.role == "api":
            # only its successor serves at its address, so it answered what was sent after the kill
            return self.sending.answered_at > kill.died
        return self.watch.has_worked(kill.child, kill.before)

    def _waits_for_work(self, kill: Kill) -> bool:
        held = self.sending.held
        if self._visible + held < self._sent:
            return False
        return held == 0 if kill.role == "api" else self.watch.is_at_its_place(kill.child, kill.before)
