"""The shell around a writer, as `commands/handler.py` is one; between any two of its steps it may be frozen for ever.

What the shell does in one go, not visible halfway, is one step here: a frozen process is one that is not scheduled, and it
does not matter whether it froze before or after something that left no trace.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from commands.decision import Versioned
from commands.intake import Received
from commands.writer import Action, Append, Confirm, Load, Open, Phase, ReadLog, Refuse, Serve, Snapshot, Wait, Writer
from proofs.model.clone import clone_writer, fingerprint
from proofs.model.history import View
from proofs.model.setting import ACK_TIMEOUT, Era, Setting
from tests.engine.log import TOPIC_ID, opening

if TYPE_CHECKING:
    from proofs.model.world import World

Token = tuple[int, int]
"""Of a commit: (epoch, seq). Of an opening: (-1, the writer's number of openings)."""
Wanted = tuple[frozenset[tuple[str, str]], frozenset[tuple[str, str]]]
NOTHING: Wanted = (frozenset(), frozenset())


class Report(NamedTuple):
    """Kafka's client reports appends in their order; `came` with the offset, or with None for a failure; or never."""

    token: Token
    came: bool = False
    offset: int | None = None
    never: bool = False


class Seen(NamedTuple):
    """What a reading of the database saw: rows are looked up when the answer is used, the view does not change."""

    view: View
    era: Era
    wanted: Wanted


class Handler:
    """A process's part for one partition, from its assignment on; a partition that comes back gets a new writer."""

    def __init__(self, setting: Setting, name: str, code: int) -> None:
        self.name = name
        self.writer = Writer(0, TOPIC_ID, setting.limits)
        self.code = code
        """The version of the write model that this process's code can use."""
        self.next_command = 0
        self.reports: tuple[Report, ...] = ()
        self.timer: str | None = "start"
        """What the shell does next by itself: start, confirm, or nothing."""
        self.call: tuple[Seen, int, int] | None = None
        """A reading of the database that is not answered yet, for commands [first, stop); (-1, -1): the position."""
        self.loaded_end = 0
        """The log's end when this writer last read its position."""
        self._print: tuple[object, ...] | None = None

    def clone(self) -> Handler:
        new = object.__new__(Handler)
        new.__dict__.update(self.__dict__, writer=clone_writer(self.writer), _print=None)
        return new

    def print(self) -> tuple[object, ...]:
        """Equal for handlers that will behave alike."""
        if self._print is None:
            call = self.call and (id(self.call[0].view), *self.call[0][1:], *self.call[1:])
            reports = tuple((r.token if r.token[0] >= 0 else -1, *r[1:]) for r in self.reports)
            phase = self.writer.phase
            at = self.next_command if phase is Phase.SERVING else self.loaded_end if phase is Phase.OPENING else 0
            more = (self.code, self.timer, call, reports, at)
            self._print = (*fingerprint(self.writer), *more)
        return self._print

    # ── what it may do next ──

    def choices(self, world: World) -> list[str]:
        found: list[str] = []
        may_open = world.openings > 0 or not self._opens_next()
        may_act = self.call or (self.timer and (self.timer != "confirm" or world.assignee == self.name))
        if may_open and may_act:
            found.append(f"go {self.name}")
        if self.reports and self.reports[0].came:
            found.append(f"hears {self.name}")
        if not self.call and not self.timer and self.writer.phase is Phase.SERVING:
            room = min(self.writer.room, len(world.setting.commands) - self.next_command, world.setting.bounds.batch)
            first = 0 if len(self.writer.overlay) else 1
            found += [f"takes {self.name} {count}" for count in range(first, room + 1)]
            if room < 0 and not first:
                found.append(f"takes {self.name} 0")
        return found

    def waits_in_vain(self) -> bool:
        """Whether a commit's acknowledgement never comes."""
        return (
            self.writer.phase is Phase.SERVING
            and self.writer.unacknowledged_since is not None
            and bool(self.reports)
            and self.reports[0].never
        )

    @property
    def has_good_news(self) -> bool:
        """Whether the report to come is an opening's offset, or that of the commit in line."""
        if not self.reports or self.reports[0].offset is None:
            return False
        (epoch, number), _, offset, _ = self.reports[0]
        return epoch < 0 or (number == self.writer.acknowledged + 1 and offset == epoch + number)

    def _opens_next(self) -> bool:
        return self.timer == "start" if self.call is None else self.call[1] < 0

    # ── what it does ──

    def go(self, world: World) -> None:
        if self.call is not None:
            (seen, first, stop), self.call = self.call, None
            if first < 0:
                self._do(world, self._position(world, seen))
            elif self.writer.phase is Phase.SERVING:  # else it was fenced meanwhile, and drops what it took
                self._decide(world, seen, first, stop)
            return
        timer, self.timer = self.timer, None
        self._do(world, self.writer.start() if timer == "start" else self.writer.on_confirmed())

    def hears(self, world: World) -> None:
        """The first report that came."""
        report, *rest = self.reports
        self.reports = tuple(rest)
        epoch, number = report.token
        if epoch < 0:
            self._do(world, self.writer.on_opened(report.offset))
        else:
            self._do(world, self.writer.on_acknowledged(number, report.offset, 0.0))

    def cannot_read(self, world: World, offset: int) -> None:
        """Its opening is acknowledged, but Kafka is away when it wants to read up to it: it starts over, unasked."""
        self.writer.on_opened(offset)
        self._do(world, self.writer.start())

    def timed_out(self, world: World) -> None:
        self._do(world, self.writer.on_clock(ACK_TIMEOUT + 1))

    def takes(self, world: World, count: int) -> None:
        """Some commands; `count` is within the writer's room. What is beyond it stays where it is, as if held."""
        first, stop = self.next_command, self.next_command + count
        self.next_command = stop
        world.group_offset = max(world.group_offset, stop)
        wanted = self.writer.wants(world.setting.commands[first:stop])
        seen = Seen(world.database, world.era, (frozenset(wanted[0]), frozenset(wanted[1])))
        if world.setting.bounds.split:
            self.call = (seen, first, stop)
        else:
            self._decide(world, seen, first, stop)

    def _decide(self, world: World, seen: Seen, first: int, stop: int) -> None:
        commands: Sequence[Received] = world.setting.commands[first:stop]
        appended = False
        for action in self.writer.on_commands(commands, self.snapshot(world, seen), 0.0):
            if isinstance(action, Append):
                appended = True
                self._append(world, action, seen.era)
            else:
                self._do(world, action)
        ahead = len(self.writer.overlay._read) + len(self.writer.overlay._own)
        if appended and ahead > world.setting.bounds.run_ahead:
            world.setting.broken("7", f"{self.name} is {ahead} commits ahead")

    def _append(self, world: World, action: Append, era: Era) -> None:
        token = (self.writer.epoch, action.seq)
        self.reports = (*self.reports, Report(token))
        bend = era.bend if era.version == self.code else world.bend_of(self.code)
        world.send(action.value, f"{self.writer.epoch}/{action.seq}", self.name, token, bend)

    def _position(self, world: World, seen: Seen) -> Action:
        self.loaded_end = len(world.log)
        action = self.writer.on_position(self.snapshot(world, seen), self.loaded_end)
        if isinstance(action, Open):
            ahead = self.loaded_end - seen.view.reading.next_offset
            if ahead > world.setting.bounds.run_ahead:
                world.setting.broken("9", f"{self.name} opens {ahead} records ahead")
            if seen.era.version != self.code:
                world.setting.broken("10", f"{self.name} opens on the write model of another version")
        return action

    def snapshot(self, world: World, seen: Seen) -> Snapshot:
        """What a process of this code reads in the database."""
        rows = seen.view
        streams, outcomes = seen.wanted
        found: dict[str, Any] = {}
        for row, stream in ((rows.rows[stream], stream) for _, stream in streams if stream in rows.rows):
            found[stream] = Versioned(row.version, type(row.state)(row.state.cents + seen.era.bend))
        known = frozenset(outcomes & rows.outcomes.keys())
        return Snapshot({0: seen.view.reading}, seen.era.generation, seen.era.version == self.code, found, known)

    def _do(self, world: World, action: Action | None) -> None:
        writer = self.writer
        while action is not None:
            match action:
                case Load():
                    seen = Seen(world.database, world.era, NOTHING)
                    if world.setting.bounds.split:
                        self.call = (seen, -1, -1)
                        break
                    action = self._position(world, seen)
                case Open():
                    token = (-1, writer.openings)
                    self.reports = (Report(token),)
                    value = opening(self.name if world.setting.bounds.names else "w")
                    world.openings -= 1
                    world.send(value, f"{self.name}.{writer.openings}", self.name, token, 0)
                    break
                case ReadLog(start, stop):
                    action = self._read(world, start, stop)
                case Serve(offset):
                    others = [handler for handler in world.handlers.values() if handler.name != self.name]
                    serves = (writer.phase, writer.epoch)
                    if too := [h.name for h in others if (h.writer.phase, h.writer.epoch) == serves]:
                        world.setting.broken("4", f"{too[0]} and {self.name} serve in one epoch, {writer.epoch}")
                    last = world.log.truth[writer.epoch + 1].reading.command_offset
                    if offset != last + 1:
                        world.setting.broken("8", f"{self.name} wants command {offset}, the last that counts is {last}")
                    self.next_command = offset
                    break
                case Wait(_):
                    self.timer = "start"
                    break
                case Confirm(_):
                    self.timer = "confirm"
                    break
                case Refuse(why):
                    world.setting.broken("8", f"refused in a world that keeps its records: {why}")
                case Append():
                    raise AssertionError("only a batch appends")
        # reports of an earlier epoch or opening are dropped
        current = (-1, writer.openings) if writer.phase is Phase.OPENING else None
        self.reports = tuple(r for r in self.reports if r.token == current or 0 <= r.token[0] == writer.epoch)

    def _read(self, world: World, start: int, stop: int) -> Action:
        """At first a poll comes back empty, then the records come one by one."""
        action = self.writer.on_log([])
        while isinstance(action, ReadLog) and start < stop:
            action = self.writer.on_log(world.log.records[start : start + 1])
            start += 1
        if isinstance(action, ReadLog):  # its opening is nowhere: the process ends with an error, and is started again
            action = self.writer.start()
        read = len(self.writer.overlay._read)
        if read > world.setting.bounds.run_ahead + self.writer.epoch - self.loaded_end:
            world.setting.broken("9", f"{self.name} holds {read} commits that it read")
        return action
