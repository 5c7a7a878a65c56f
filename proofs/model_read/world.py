"""The world of one run: a database with the first version live, a log, and the product connected to only these."""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

import psycopg

from infra.archive import marks
from infra.errors import SamefoldError
from infra.log import clients, topics
from infra.log.contract import Contract
from infra.log.topics import Topic
from infra.processes import workers
from infra.settings import Settings
from projections.engine.live.startup import ensure_started
from projections.engine.rebuild import catch_up, shares
from projections.engine.rebuild import load as local
from projections.engine.rebuild.rebuild import resume
from projections.engine.views.core_views import code_set
from projections.engine.views.view import View
from proofs.checker import Violation
from proofs.model_read.actors import Agent
from proofs.model_read.database import TOPIC, State, database
from proofs.model_read.log import Log
from proofs.model_read.oracle import LOST, READER, STOPPED, Oracle, Watch, live_set, positions_of
from proofs.model_read.play import Actor, Crashed, Play, Replay
from proofs.model_read.policy_oracle import PolicyOracle
from proofs.model_read.views import code

KEPT = 5
"""States before a run that a restore may bring back."""


@dataclass
class World:
    """A run's database, log, actors and watch. `seen` is the newest that any reader saw, by stream."""

    log: Log
    views: Mapping[str, View]
    faults: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.database = database()
        self.settings: Settings = self.database.settings
        self.oracle = Oracle(self.log)
        self.sets: dict[str, Mapping[str, int]] = {}
        self.watch: Watch | PolicyOracle = Watch(self.oracle, self.sets)
        self.history: list[State] = []
        """What was committed, the newest last: a restore may bring any of it back."""
        self.play = Play(self, self.faults)
        self.seen: dict[str, int] = {}
        self.loads_itself = False
        """A rebuild loads the parts itself, one after the other, as for a small log."""
        self.retries_parts = False
        """Each part of a load is given to two workers, as where one was thought to be lost."""
        self.backs: tuple[int, ...] = (1, 2, 4)
        """How many commits a restore may take back."""
        self.chances = 0
        self.loaders = 0
        self.restored = False
        self.at_end: set[str] = set()
        """Agents that had folded all there is, as they believed."""
        self.pings = False
        """Agents notice that their connection is gone, and make another, before they use it."""

    def shared(self) -> object:
        """What is committed, and what else actors of several processes read; hashable.

        Where a restore is still to come, what it may bring back counts too.
        """
        states = self.history[-KEPT:] if self.play.faults.get("restore") else self.history[-1:]
        return tuple(state.content for state in states), frozenset(self.seen.items()), self.restored

    @property
    def tables(self) -> Mapping[str, list[Mapping[str, Any]]]:
        """What is committed."""
        return self.history[-1].tables

    # ── the beginning ──

    def begin(self, before: Iterable[Callable[[Any], object]]) -> list[State]:
        """An empty database, the agent's first start, and then what happens alone. The last states of it."""
        self.database.put_back(self.database.empty)
        contract = Contract.of(self._describe(self.settings, TOPIC))
        with psycopg.connect(self.settings.database, autocommit=True) as connection:
            ensure_started(connection, "core", self.views, contract)
        self._start_from([self.database.now()])
        for step in before:
            step(self)
        self.committed("")
        return self.history[-KEPT:]

    def begin_again(self, states: list[State]) -> None:
        """Where a world like this one was when it had begun."""
        self.database.put_back(states[-1])
        self._start_from(states)
        self.watch.checked = 0  # what came before the run is none of its commits

    def _start_from(self, states: list[State]) -> None:
        self.history = list(states)
        self.watch.restored(self.tables)

    # ── stand-ins for the product's surroundings ──

    @contextmanager
    def around(self) -> Iterator[None]:
        """While it lasts, the actors' PostgreSQL is the schedule's, and their Kafka, clock and chance are the run's."""
        with ExitStack() as stack:
            for owner, name, ours in self._replaced():
                stack.enter_context(patch.object(owner, name, self._for_actors(ours, getattr(owner, name))))
            for module, name in ((catch_up, "AHEAD"), (marks, "EVERY"), (shares, "LEAST")):  # a scenario may lower them
                stack.enter_context(patch.object(module, name, getattr(module, name)))
            logging.disable(logging.ERROR)
            stack.callback(logging.disable, logging.NOTSET)
            yield

    def _replaced(self) -> list[tuple[Any, str, Callable[..., Any]]]:
        return [
            (psycopg, "connect", lambda *, application_name, **_options: self.play.connect(application_name)),
            (time, "monotonic", lambda: self.play.now),
            (time, "sleep", self._sleep),
            (os, "urandom", self._chance),
            (random, "uniform", lambda low, high: (low + high) / 2),
            (clients, "range_consumer", self.log.consumer),
            (topics, "describe", self._describe),
            (workers, "run", self.work),
        ]

    def _for_actors(self, ours: Callable[..., Any], theirs: Callable[..., Any]) -> Callable[..., Any]:
        """`ours` for actors; `theirs` for the model itself and in other threads."""
        thread = threading.get_ident()

        def either(*arguments: Any, **how: Any) -> Any:
            is_actor = self.play.current and threading.get_ident() == thread
            return (ours if is_actor else theirs)(*arguments, **how)

        return either

    def _sleep(self, seconds: float) -> None:
        self.play.sleep(seconds)

    def _chance(self, count: int) -> bytes:
        self.chances += 1
        return self.chances.to_bytes(count, "big")

    def _describe(self, _settings: Settings, name: str, **_how: Any) -> Topic:
        ends = self.oracle.ends
        return Topic(name, "topic", len(ends), dict.fromkeys(ends, 0), ends)

    def work(
        self, task: Any, arguments: Iterable[Any], _processes: int, advance: Any = lambda _count: None, **_how: Any
    ) -> list[Any]:
        """`workers.run`: each part of a load is an actor of its own, which goes on when its rebuild has ended."""
        if task is not local.load or self.loads_itself:
            return [task(argument, advance) for argument in arguments]
        started = [[self._loader(partial(task, part)) for _ in range(1 + self.retries_parts)] for part in arguments]
        while not all(any(actor.done for actor in copies) for copies in started):
            self.play.sleep(0.1)
        ended = [next(actor for actor in copies if actor.done) for copies in started]
        for actor in ended:
            if actor.error is not None:
                raise actor.error
        return [actor.result for actor in ended]

    def _loader(self, load: Callable[[], object]) -> Actor:
        self.loaders += 1
        actor = self.play.add(f"load{self.loaders}", load)
        actor.helps = True
        return actor

    # ── what happens ──

    def committed(self, process: str) -> None:
        """The process may have committed something. Raises Violation."""
        state = self.database.now()
        if (state.tables, state.relations) != (self.history[-1].tables, self.history[-1].relations):
            self.history.append(state)
            self.watch.published(process, state.tables)

    def may_restore(self) -> list[int]:
        return [back for back in self.backs if back < len(self.history)]

    def restore(self, back: int) -> None:
        """The database goes back by so many commits. Readers see older states then, of which nothing is promised."""
        state = self.history[-1 - back]
        self.database.put_back(state)
        self.history.append(state)
        self.watch.restored(state.tables)
        self.seen.clear()
        self.restored = True

    def alone(self, start: Callable[[], object]) -> None:
        """The actors that this starts act alone, before the play or after it."""
        before, self.play = self.play, Play(self, {})
        start()
        self.play.run(Replay())
        for actor in self.play.actors.values():
            if actor.error is not None:
                raise actor.error
        self.play = before

    # ── at the end ──

    def check_end(self, may_end: tuple[type[BaseException], ...]) -> None:
        """No process ended without a reason; others, alone, do what is left, and then all is right. Raises Violation."""
        errors = [actor.error for actor in self.play.actors.values() if actor.error is not None and not actor.helps]
        for error in errors:
            if not isinstance(error, (Crashed, Violation, *may_end)):
                raise Violation(STOPPED, f"a process ended: {type(error).__name__}: {error}") from error
            if isinstance(error, Violation):
                raise error
        try:
            self._do_the_rest()
        except SamefoldError as error:
            raise Violation(STOPPED, f"settling ended: {type(error).__name__}: {error}") from error

    def _do_the_rest(self) -> None:
        live = live_set(self.tables)
        views = code(live["balances"], system="command_outcomes" in live, more="moves" in live)
        if code_set(views) != live:
            raise Violation(LOST, f"no code has the set that is live: {live}")
        if not self.restored and any(self.sets[name] == live for name in self.at_end & self.sets.keys()):
            self._require_ends()
        self.sets["settler"] = live
        if stopped := [row["view"] for row in self.tables["stopped_views"]]:
            self.alone(lambda: self.play.add("resume", partial(resume, self.settings, stopped, views)))
        self.alone(lambda: Agent(self, "settler", views, sorted(self.log.records), 100).start())
        self._require_ends()
        self.oracle.check(self.tables)

    def _require_ends(self) -> None:
        at = {partition: reading.next_offset for partition, reading in positions_of(self.tables).items()}
        if at != self.oracle.ends:
            raise Violation(LOST, f"folded up to {at}, but the log ends at {self.oracle.ends}")

    # ── readers ──

    def saw(self, known: Mapping[str, int], seen: Mapping[str, int]) -> None:
        """A reader's answer, by account; `known` is what had been seen when it was asked. Raises Violation."""
        if older := {a: (number, seen.get(a, 0)) for a, number in known.items() if seen.get(a, 0) < number}:
            raise Violation(READER, f"seen before, and now: {older}")
        for account, number in seen.items():
            self.seen[account] = max(number, self.seen.get(account, 0))
