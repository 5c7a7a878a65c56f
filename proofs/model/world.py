"""One partition in a hostile world, as a value: what may happen next is enumerable, and after a choice there is another world.

Appends arrive late, twice, out of order or never; acknowledgements late, never or without an offset; writers freeze and come back
while others serve; the read model lags and is restored to older states. Whatever breaks a promise raises Violation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from proofs.checker import Violation
from proofs.model.handler import Handler, Report, Token
from proofs.model.history import Key, View, agent, answers
from proofs.model.setting import Era, Setting

ROUNDS = 60
APPENDS, AGENT = "appends", "agent"


class Flight(NamedTuple):
    """An append under way, and whose report its fate is."""

    value: bytes
    label: str
    owner: str
    token: Token | None
    """None: its fate is reported to no writer."""
    bend: int
    epoch: int
    """-1: an opening."""


class World:
    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.log = setting.judge.root
        self.flights: tuple[Flight, ...] = ()
        self.handlers: dict[str, Handler] = {}
        self.assignee = ""
        self.database = setting.judge.nothing
        self.era_number = 0
        self.stored: tuple[tuple[View, int], ...] = ((self.database, 0),)
        """Every state that the database had, with the number of its era, by position: it may be restored to any of them."""
        self.answers: frozenset[tuple[Key, bytes]] = frozenset()
        """The outcomes that a client may have seen."""
        self.promised: frozenset[tuple[str, int]] = frozenset()
        """(stream, version) of those that were accepted: a client that saw one and then reads finds at least that version."""
        self.group_offset = 0
        bounds = setting.bounds
        self.faults, self.births, self.openings = bounds.faults, bounds.births - 1, bounds.openings
        if bounds.prologue:
            self._prologue(bounds.prologue)
        self.born()

    def copy(self) -> World:
        new = object.__new__(World)
        new.__dict__.update(self.__dict__)
        new.handlers = self.handlers.copy()
        return new

    def print(self) -> int:
        """64 bits that are equal for worlds with the same future, and for no others but by a chance of 2⁻⁶⁴."""
        prints = sorted((hash(handler.print()), name) for name, handler in self.handlers.items())
        number = {name: index for index, (_, name) in enumerate(prints)}
        waiting = {(name, report.token) for name, h in self.handlers.items() for report in h.reports}
        # a commit of a fenced epoch is void wherever it lands
        current = self.log.truth[-1].reading.epoch if self.setting.alike else 0
        flights = []
        for f in self.flights:
            value, owner = b"" if 0 <= f.epoch < current else f.value, number[f.owner] if self.in_line(f) else -1
            flights.append(hash((value, f.bend, owner, (f.owner, f.token) in waiting)))
        processes = tuple(p for p, _ in prints), number.get(self.assignee), tuple(sorted(flights))
        stored = id(self.database), self.era_number, tuple((id(view), era) for view, era in self.stored)
        left = self.faults, self.births, self.openings
        group_offset = 0 if self.setting.alike else self.group_offset
        return hash((self.log.number, *processes, *stored, self.answers, self.promised, *left, group_offset))

    @property
    def era(self) -> Era:
        return self.setting.bounds.eras[self.era_number]

    def bend_of(self, version: int) -> int:
        """The newest build of a version of the write model."""
        return [era.bend for era in self.setting.bounds.eras if era.version == version][-1]

    def in_line(self, flight: Flight) -> bool:
        """Whether it keeps its place among its sender's appends; of a copy, or of one that was given up, the age is unknown."""
        return flight.token is not None and flight.owner in self.handlers

    @property
    def answered(self) -> bool:
        return self.setting.keys <= self.database.outcomes.keys()

    # ── what may happen ──

    def choices(self) -> list[str]:
        """What happens, and to whom: takes w1 2, lands 3/1, restore 0, …"""
        found: list[str] = []
        bounds = self.setting.bounds
        for handler in self.handlers.values():
            found += handler.choices(self)
        kinds = bounds.kinds if self.faults > 0 else frozenset()
        labels: set[str] = set()
        owners: set[str] = set()
        for flight in self.flights:
            owned = self.in_line(flight)
            overtakes = owned and flight.owner in owners
            if owned:
                owners.add(flight.owner)
            if flight.label in labels:
                continue
            labels.add(flight.label)
            if not overtakes or "overtaken" in kinds:
                found.append(f"lands {flight.label}")
            for fate in ("copied", "lost", "misreported", "unsaid", "away"):
                if fate in kinds and (owned or fate in ("copied", "lost")) and (fate != "away" or flight.epoch < 0):
                    found.append(f"{fate} {flight.label}")
        if len(self.log) > self.database.reading.next_offset:
            found.append("agent")
        if self.births > 0:
            found.append("born")
        if self.era_number + 1 < len(bounds.eras):
            found.append("switch")
        for name, handler in self.handlers.items():
            if handler.waits_in_vain() or ("late" in kinds and handler.writer.unacknowledged_since is not None):
                found.append(f"late {name}")
            if "assign" in kinds and name != self.assignee:
                found.append(f"assign {name}")
            if "crash" in kinds:
                found.append(f"crash {name}")
        if "restore" in kinds:
            found += [f"restore {view.reading.next_offset}" for view, _ in self.stored if view is not self.database]
        return found

    def after(self, choice: str) -> World:
        """The world after it. Raises Violation."""
        new = self.copy()
        _, _, whom = choice.partition(" ")
        whom, _, _ = whom.partition(" ")
        if whom in new.handlers:
            new.handlers[whom] = new.handlers[whom].clone()
        new.do(choice)
        return new

    def do(self, choice: str) -> None:
        """Let it happen to this very world, whose handlers no other world shares."""
        match choice.split():
            case ["go", name]:
                self.handlers[name].go(self)
            case ["hears", name]:
                self.handlers[name].hears(self)
            case ["takes", name, count]:
                self.handlers[name].takes(self, int(count))
            case ["late", name]:
                self.faults -= not self.handlers[name].waits_in_vain()
                self.handlers[name].timed_out(self)
            case ["lands" | "copied" | "lost" | "misreported" | "unsaid" | "away" as fate, label]:
                self._fate(fate, label)
            case ["agent"]:
                self._agent()
            case ["born"]:
                self.births -= 1
                self.born()
            case ["switch"]:
                self.era_number += 1
                self._show(self.database)
            case ["restore", offset]:
                self.faults -= 1
                view, self.era_number = next(s for s in self.stored if s[0].reading.next_offset == int(offset))
                self._show(view)
            case ["assign", name]:
                self.faults -= 1
                self.assignee = name
            case ["crash", name]:
                self.faults -= 1
                del self.handlers[name]
            case _:
                raise ValueError(choice)

    # ── the faults stop ──

    def settle(self, order: Sequence[str] = (), promise: str = "F") -> World:
        """The world at its end, by a fair schedule: all writers act in turn, appends arrive, the read model follows.

        Every command gets its answer (promise F), and every stored position leads to the same end (H). `order`: of a round, if not
        that; names of writers, APPENDS and AGENT. Raises Violation.
        """
        end = self.copy()
        end.era_number = len(end.setting.bounds.eras) - 1
        # old code is shut down
        end.handlers = {n: h.clone() for n, h in self.handlers.items() if h.code == end.era.version}
        end.faults, end.openings = 0, 10**9
        if end.assignee not in end.handlers:
            end.births = max(end.births, 1)
            end.born()
        for _ in range(ROUNDS):
            if end.answered:
                break
            for actor in order or (*end.handlers, APPENDS, AGENT):
                end._act(actor)
        else:
            missing = sorted(end.setting.keys - end.database.outcomes.keys())
            raise Violation(promise, f"no answer to {missing} after {ROUNDS} rounds in which everyone acted")
        for view, _ in end.stored:
            if agent(view, end.log.records[view.reading.next_offset :]) != end.log.truth[-1]:
                raise Violation("H", f"the position {view.reading} continues to another result")
        return end

    def _act(self, actor: str) -> None:
        """One turn: all appends arrive, the read model reads all, or a writer has a report or does something by itself."""
        if actor == APPENDS:
            for flight in self.flights:
                self.do(f"lands {flight.label}")
        elif actor == AGENT:
            while len(self.log) > self.database.reading.next_offset:
                self.do("agent")
        elif handler := self.handlers.get(actor):
            may = {choice.split()[0]: choice for choice in handler.choices(self)}
            owned = {flight.token for flight in self.flights if flight.owner == actor}
            if first := may.get("hears") or may.get("go"):
                self.do(first)
            elif handler.reports and handler.reports[0].token not in owned:
                handler.timed_out(self)
            elif "takes" in may:
                self.do(may["takes"])

    # ── appends ──

    def send(self, value: bytes, label: str, owner: str, token: Token, bend: int) -> None:
        self.flights = (*self.flights, Flight(value, label, owner, token, bend, token[0]))

    def _fate(self, fate: str, label: str) -> None:
        number, flight = next((n, f) for n, f in enumerate(self.flights) if f.label == label)
        others = (*self.flights[:number], *self.flights[number + 1 :])
        if fate in ("lands", "away"):
            before = {f.owner for f in self.flights[:number] if self.in_line(f)}
            overtakes = self.in_line(flight) and flight.owner in before
            self.faults -= overtakes or fate == "away"
            self.flights = others
            offset = len(self.log)
            self.log = self.log.append(flight.value, flight.bend, self.setting.judge)
            if fate == "lands":
                self._report(flight, came=True, offset=offset)
            elif flight.owner in self.handlers:
                handler = self.handlers[flight.owner] = self.handlers[flight.owner].clone()
                handler.cannot_read(self, offset)
            return
        self.faults -= 1
        unattached = flight._replace(token=None)
        match fate:
            case "copied":
                self.flights = (*self.flights, unattached._replace(label=f"{label}'"))
            case "lost":
                self.flights = others
                self._report(flight, came=True, offset=None)
            case "misreported":
                self.flights = (*others, unattached)
                self._report(flight, came=True, offset=None)
            case _:  # unsaid
                self.flights = (*others, unattached)
                # a client may never report a commit; an opening it reports in the end, as timed out
                opens = flight.token is not None and flight.token[0] < 0
                self._report(flight, came=opens, offset=None, never=not opens)

    def _report(self, flight: Flight, *, came: bool, offset: int | None, never: bool = False) -> None:
        handler = self.handlers.get(flight.owner)
        if handler is None or flight.token is None or all(r.token != flight.token for r in handler.reports):
            return
        handler = self.handlers[flight.owner] = handler.clone()
        report = Report(flight.token, came, offset, never)
        handler.reports = tuple(report if r.token == report.token else r for r in handler.reports)
        while self.setting.bounds.prompt and handler.has_good_news:
            handler.hears(self)

    # ── the read model ──

    def _agent(self) -> None:
        """The read model commits one record: a larger batch is several of these with no read in between."""
        record = self.log.records[self.database.reading.next_offset]
        self._show(self.setting.judge.folds.after(self.database, agent, record))

    def _show(self, view: View) -> None:
        """The database commits: promises C, D and E."""
        end = self.stored[-1][0].reading.next_offset
        if view is not self.database:
            before = dict(self.answers)
            for key, answer in answers(view):
                if before.setdefault(key, answer) != answer:
                    raise Violation("D", f"the answer to {key} changed")
            if len(before) > len(self.answers):
                self.answers = frozenset(before.items())
                shown = {(commit.stream, commit.version) for commit in view.outcomes.values()}
                self.promised |= shown
        if view.reading.next_offset >= end:
            for stream, version in self.promised:
                found = view.rows[stream].version if stream in view.rows else 0
                if found < version:
                    raise Violation("E", f"an outcome has version {version} of {stream}, its row has {found}")
        if view is not self.log.truth[view.reading.next_offset]:
            raise Violation("C", f"the read model at {view.reading} is not the fold of what counts")
        self.database = view
        known = {v.reading.next_offset: (v, era) for v, era in self.stored}
        known[view.reading.next_offset] = (view, self.era_number)
        self.stored = tuple(known[offset] for offset in sorted(known))

    # ── writers come to life ──

    def born(self) -> None:
        """A process starts, or is given the partition: from now on it is the assignee. The one before may learn of it late."""
        taken = [int(name[1:]) for name in self.handlers]
        number = max([self.setting.bounds.births - self.births, *(n + 1 for n in taken)])
        self.assignee = f"w{number}"
        self.handlers[self.assignee] = Handler(self.setting, self.assignee, self.era.version)

    def _prologue(self, commands: int) -> None:
        """A writer that is long gone answered the first commands, and the database shows them; nothing older is kept."""
        self.born()
        self.openings = 1
        for _ in range(2 * commands + 8):
            for choice in self.choices():
                kind, *rest = choice.split()
                if kind in ("go", "hears", "lands", "agent") or (
                    kind == "takes" and rest[1] == "1" and self.group_offset < commands
                ):
                    self.do(choice)
                    break
        self.handlers.clear()
        self.stored = ((self.database, 0),)
        self.openings = self.setting.bounds.openings
