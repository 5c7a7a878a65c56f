"""Receivers of one partition, a relay, a handler and the source's agent, as a value: what may happen, and what must hold."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import date
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple, Self, cast
from unittest import mock

from domain.accounts import Deposit
from domain.language import Text
from infra.log.topics import Topic
from infra.observability import logs
from infra.settings import Settings
from infra.settings import Source as SourceSetting
from policies.engine import Received, Send, message, receiver
from policies.engine.activations import Activation, Messages, OldEventsLeft, _messages_at, _set_messages
from policies.engine.messages import Raw, Reception
from policies.engine.outbox import Cause, Wish
from policies.engine.policy import Policy, policy_of
from policies.engine.receiver import Receiver, _Place
from proofs.checker import Violation

ONCE = "a message has its effect once"
VERSION = "a message is received by the version that is in force at its offset"
ALL = "in the end each message has had its effect, and no wish is open"
ABORTED = "what a producer has aborted has no effect"
SILENT = logging.CRITICAL + 1
MARKER, OPEN = "marker", "x"
"""In a topic: no message, but an offset of a transaction; and a message whose transaction is aborted later."""


class Row(NamedTuple):
    """Of the outbox: the stream of the wish, that of its outcome, and whether the relay has sent it."""

    wish: str = ""
    outcome: str = ""
    sent: bool = False


class Live(NamedTuple):
    """An activation. `recorded`: it is in the topic of policies, which a restore leaves alone."""

    version: int
    offset: int
    recorded: bool = True


class Database(NamedTuple):
    at: tuple[int, int] | None = None
    """The source's position, and the activation that its last reader knew."""
    lives: tuple[Live, ...] = (Live(1, 0),)
    outbox: frozenset[tuple[str, Row]] = frozenset()
    received: frozenset[bytes] = frozenset()
    folded: int = 0

    def with_row(self, ident: str, **half: Any) -> Database:
        """With a half of a row upserted, and what has both halves deleted. `proofs/model_read` runs the real statements."""
        was = next((row for one, row in self.outbox if one == ident), Row())
        row = was._replace(**{name: value for name, value in half.items() if not getattr(was, name)})
        rest = self.outbox - {(ident, was)}
        return self._replace(outbox=rest if row.wish and row.wish == row.outcome else rest | {(ident, row)})


_NEW = Database()


class _Killed(Exception):
    """The process ended."""


@dataclass
class _Session:
    """A connection, to which the product's statements go. `ends_at`: the process is killed after so many transactions."""

    database: Database
    ends_at: int = 0
    commits: int = 0
    rowcount: int = 0
    found: list[Any] = field(default_factory=list)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        was = self.database
        try:
            yield
        except BaseException:
            self.database = was
            raise
        self.commits += 1
        if self.commits == self.ends_at:
            raise _Killed

    def execute(self, query: Any, values: Sequence[Any] = ()) -> Self:
        now = self.database
        if query == receiver._MOVE:
            [was], [activation], [after] = values[1:4]
            same = {"p.next_offset = u.was": now.at and now.at[0] == was}
            same["p.activation = u.activation"] = now.at and now.at[1] == activation
            self.rowcount = int(all(holds for condition, holds in same.items() if condition in query))
            if self.rowcount and now.at:
                self.database = now._replace(at=(after, now.at[1]))
        elif query == receiver._NEW:
            self.found = [(ident,) for ident in values[1] if ident not in now.received]
            self.database = now._replace(received=now.received | {*values[1]})
        elif query == receiver._BEGIN:
            begin = now.at[0] if now.at else values[3]
            self.database, self.found = now._replace(at=(begin, values[4])), [(begin, None)]
        elif query.startswith("update source_positions set next_offset"):
            self.database = now._replace(at=now.at and (values[0], now.at[1]))
        elif query.startswith("update source_positions"):
            self.database = now._replace(at=now.at and (now.at[0], values[0]))
        else:
            position = [] if now.at is None else [now.at[0]]
            self.found = [(0, at) for at in position]
        return self

    def fetchall(self) -> list[Any]:
        return self.found

    def __iter__(self) -> Iterator[Any]:
        return iter(self.found)


def _written(session: _Session, _policy: str, wishes: Iterable[tuple[Wish, Cause]]) -> list[Callable[[], None]]:
    for wish, _ in wishes:
        session.database = session.database.with_row(wish.id, wish=wish.target)
    return []


@message("said.v1")
class Said:
    what: Text


@cache
def _source(version: int, by_id: bool) -> Policy:
    def receive(message: Said, at: Received) -> Iterable[Send]:
        yield Send(f"accounts/{message.what}-{version}", Deposit(cents=1, on=date(2026, 1, 1)))

    module = ModuleType("policies.heard")
    parts = {"VERSION": version, "SOURCE": "other", "receive": receive} | ({"DEDUP": "id"} if by_id else {})
    vars(module).update(parts)
    return policy_of(module)


@cache
def _receiver(name: int, version: int, by_id: bool, end: int) -> Receiver:
    """A process; what it remembers comes from a world."""
    settings = Settings(sources={"other": SourceSetting(topic="other")})
    made = Receiver(settings, _source(version, by_id), f"process {name}", lambda: {0})
    made._topic = Topic("other", "topic", 1, {0: 0}, {0: end})
    made._reception = Reception(settings, made.policy, "topic", 1)
    made._status = logs.StatusLog(logging.Logger("nobody", SILENT), "a source")
    return made


def committed(topic: Sequence[str], offset: int, *, is_open: bool) -> Iterator[tuple[int, str]]:
    """What Kafka gives a reader of committed messages from this offset on."""
    for at, what in enumerate(topic):
        if what == OPEN and is_open:
            return
        if at >= offset and what not in (MARKER, OPEN):
            yield at, what


@dataclass(frozen=True)
class World:
    topic: tuple[str, ...]
    """By offset. The same text twice is a message that its producer repeats."""
    by_id: bool
    processes: tuple[tuple[int, _Place | None], ...]
    """Of each receiver its code's version, and where it goes on if it knows that."""
    faults: tuple[tuple[str, int], ...]
    """How often each thing may still happen: kill, copy, restore, switch."""
    database: Database = _NEW
    copy: Database | None = None
    record: tuple[Live, ...] = (Live(1, 0),)
    """The topic of policies."""
    log: tuple[tuple[str, str], ...] = ()
    """Of each command that was decided its id and stream."""
    flight: frozenset[tuple[str, str]] = frozenset()
    is_open: bool = True
    reached: int = 0
    """The position that the database had when it was restored."""

    def print(self) -> object:
        alike = sorted((version, place or ()) for version, place in self.processes)
        return hash((*(value for name, value in vars(self).items() if name != "processes"), tuple(alike)))

    def choices(self) -> list[str]:
        left, found = dict(self.faults), ["abort"] if self.is_open else []
        for number, (_, place) in enumerate(self.processes):
            found += [f"look {number}"] if place is None else [f"receive {number} 1", f"receive {number} 9"]
            found += [f"receive {number} 9 killed"] if place is not None and left["kill"] else []
        found += [f"send {to}" for to in self._unsent()] + [f"decide {to}" for _, to in self.flight]
        found += [f"send {to} killed" for to in self._unsent() if left["kill"]]
        found += ["fold"] if self.database.folded < len(self.log) else []
        found += ["copy"] if left["copy"] and self.copy is None else []
        found += ["restore"] if left["restore"] and self.copy else []
        # after a restore only when the source has received again what it had: docs/policies.md
        found += ["switch"] if left["switch"] and self._at() >= self.reached else []
        return sorted(found)

    def after(self, choice: str) -> World:
        kind, *words = choice.split()
        made = self._less("kill") if words[-1:] == ["killed"] else self._less(kind)
        made = cast("Callable[..., World]", getattr(made, f"_{kind}"))(*words)
        made._check()
        return made

    def _less(self, fault: str) -> World:
        return replace(self, faults=tuple((name, left - (name == fault)) for name, left in self.faults))

    # ── what may happen ──

    def _abort(self) -> World:
        return replace(self, is_open=False)

    def _copy(self) -> World:
        return replace(self, copy=self.database)

    def _restore(self) -> World:
        """Connections break, so each process begins again."""
        assert self.copy is not None, "there is one"
        gone = tuple((version, None) for version, _ in self.processes)
        return replace(self, database=self.copy, processes=gone, reached=max(self.reached, self._at()))

    def _at(self) -> int:
        return self.database.at[0] if self.database.at else 0

    def _brought_in(self) -> World:
        """The table of activations equals the topic of policies, and the topic has what a killed switch left out of it."""
        lives = self.record + self.database.lives[len(self.record) :]
        lives = tuple(one._replace(recorded=True) for one in lives)
        return replace(self, record=lives, database=self.database._replace(lives=lives))

    def _known(self) -> list[Activation]:
        return [
            Activation(
                "heard", number, one.version, {}, 0 if one.recorded else None, Messages("topic", {0: one.offset})
            )
            for number, one in enumerate(self.database.lives, 1)
        ]

    def _switch(self) -> World:
        """Its transaction. What it records is brought in by whoever looks next."""
        made = self._brought_in()
        session: Any = _Session(made.database)
        with suppress(OldEventsLeft), session.transaction():
            known, number = made._known(), len(made.database.lives) + 1
            version = 3 - known[-1].version
            messages = _messages_at(session, "heard", known, None, None)
            assert messages is not None, "it is a source"
            _set_messages(session, "heard", number, messages, moves=False)
            lives = (*made.database.lives, Live(version, messages.offsets[0], recorded=False))
            session.database = session.database._replace(lives=lives)
        return replace(made, database=session.database)

    def _look(self, number: str) -> World:
        made = self._brought_in()
        return made._doing(int(number), lambda one, session: one._look(session, made._known(), 0))

    def _receive(self, number: str, most: str, killed: str = "") -> World:
        place = self.processes[int(number)][1]
        assert place is not None, "it has looked"
        some = [*committed(self.topic, place.offset, is_open=self.is_open)][: int(most)]
        raws = [_raw(offset, what) for offset, what in some]
        end = self.topic.index(OPEN) if self.is_open and OPEN in self.topic else len(self.topic)
        ends = {0: end} if len(some) < int(most) else {}
        return self._doing(int(number), lambda one, session: one._receive(session, raws, ends), ends_at=bool(killed))

    def _doing(self, number: int, step: Callable[[Receiver, Any], object], ends_at: int = 0) -> World:
        version, place = self.processes[number]
        one = _receiver(number, version, self.by_id, len(self.topic))
        one._places, one._waiting = ({0: place} if place else {}), ({} if place else {0: 0.0})
        session = _Session(self.database, ends_at)
        try:
            with mock.patch.multiple(receiver, write_of_messages=_written, WORK_S=float("inf")):
                step(one, session)
            place = one._places.get(0)
        except _Killed:
            place = None
        processes = [*self.processes]
        processes[number] = version, place
        return replace(self, database=session.database, processes=tuple(processes))

    def _unsent(self) -> dict[str, str]:
        """Of each stream to which a command waits to be sent its id."""
        return {row.wish: ident for ident, row in self.database.outbox if row.wish and not row.sent}

    def _send(self, stream: str, killed: str = "") -> World:
        """Where it is killed, it has not marked it as sent."""
        ident = self._unsent()[stream]
        database = self.database if killed else self.database.with_row(ident, sent=True)
        return replace(self, flight=self.flight | {(ident, stream)}, database=database)

    def _decide(self, stream: str) -> World:
        """As handlers do: a command's id counts once for each stream."""
        one = min(one for one in self.flight if one[1] == stream)
        return replace(self, flight=self.flight - {one}, log=self.log if one in self.log else (*self.log, one))

    def _fold(self) -> World:
        ident, stream = self.log[self.database.folded]
        database = self.database._replace(folded=self.database.folded + 1)
        return replace(self, database=database.with_row(ident, outcome=stream))

    # ── what must hold ──

    def _effects(self) -> Mapping[str, list[int]]:
        """Of each message the versions that had an effect."""
        found: dict[str, list[int]] = {}
        for _, stream in self.log:
            what, version = stream.removeprefix("accounts/").split("-")
            found.setdefault(what, []).append(int(version))
        return found

    def _check(self) -> None:
        for what, versions in self._effects().items():
            if what == OPEN:
                raise Violation(ABORTED, f"{self.log}")
            if len(versions) > 1:
                raise Violation(ONCE, f"{what} had one of each version in {versions}")
            in_force = [one.version for one in self.record if one.offset <= self.topic.index(what)]
            if versions != in_force[-1:]:
                raise Violation(VERSION, f"{what} by {versions}, and in force were {in_force}")

    def settle(self) -> object:
        """Both versions' code runs, all is sent, decided and read."""
        world = replace(self, is_open=False, processes=((1, None), (2, None)), faults=_no_faults(self.faults))
        for _ in range(40):
            done = world
            for choice in world.choices():
                if choice in world.choices():
                    world = world.after(choice)
            if world.print() == done.print():
                break
        lost = {*self.topic} - {MARKER, OPEN} - {*world._effects()}
        if lost or world.database.outbox:
            raise Violation(ALL, f"lost {sorted(lost)}, open {sorted(world.database.outbox)}")
        return world


def _no_faults(faults: Iterable[tuple[str, int]]) -> tuple[tuple[str, int], ...]:
    return tuple((name, 0) for name, _ in faults)


@cache
def _raw(offset: int, what: str) -> Raw:
    event = {"specversion": "1.0", "id": what, "source": "/other", "type": "said.v1", "data": {"what": what}}
    return Raw(
        "other", 0, offset, 0, None, json.dumps(event).encode(), {"content-type": "application/cloudevents+json"}
    )
