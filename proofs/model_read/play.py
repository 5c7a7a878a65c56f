"""One run: one actor at a time runs, and between any two statements it is chosen which is next.

An actor runs the product's code until that sends a statement that other sessions could notice; there it waits for its turn. So a
schedule is a list of choices, and the same choices give the same run again: a statement that waits for a lock goes on as soon as
that is free, in PostgreSQL's order, and a deadlock is reported to the last one to wait.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import psycopg
from greenlet import getcurrent, greenlet  # type: ignore[import-untyped]

from proofs.model_read.sessions import Exchange, Session

if TYPE_CHECKING:
    from proofs.model_read.world import World

QUICK_S = 0.001
"""How long a statement is given before the server is asked whether it waits."""
TOO_LONG = 3_000
"""Steps after which a run goes round in circles."""


class Crashed(BaseException):
    """The actor's process is no more."""


class Stuck(AssertionError):
    """No actor can go on, or a run does not come to an end."""


class Chooser(Protocol):
    """Chooses what happens next."""

    def choose(self, choices: Sequence[str], last: str, state: Callable[[], object]) -> str | None:
        """One of the choices; None ends the run. `state` gives `Play.state`."""


class Replay:
    """Follows a list of choices, passing over those that can't be made, and then lets the last actor go on as long as it can."""

    def __init__(self, choices: Sequence[str] = ()) -> None:
        self.left = list(choices)

    def choose(self, choices: Sequence[str], last: str, state: Callable[[], object]) -> str:
        while self.left:
            choice = self.left.pop(0)
            if choice in choices:
                return choice
        return choices[0]


class Actor:
    """One thread of a process."""

    def __init__(self, name: str, run: Callable[[], object], process: str, main: greenlet) -> None:
        self.name = name
        self.process = process
        """Threads of one process share its memory, and its end."""
        self.run = run
        self.thread = greenlet(self._act, main)
        self.exchange: Exchange | None = None
        """The statement whose answer it waits for."""
        self.asleep: int | None = None
        """The number of changes in the database when it went to sleep."""
        self.until: Callable[[], bool] | None = None
        """What it waits for, besides an answer or time."""
        self.prompt = False
        self.crashed = False
        self.waits_since = 0
        self.done = False
        self.helps = False
        """Another actor waits for it, and gets its error."""
        self.error: BaseException | None = None
        self.result: object = None

    def _act(self) -> None:
        try:
            self.result = self.run()
        except BaseException as error:
            self.error = error
        self.done = True

    @property
    def waits(self) -> bool:
        """Whether its statement waits for a lock."""
        return not self.done and self.exchange is not None and self.exchange.began


class Play:
    """The actors of one run in a world."""

    def __init__(self, world: World, faults: Mapping[str, int]) -> None:
        self.world = world
        self.database = world.database
        self.faults = dict(faults)
        self.actors: dict[str, Actor] = {}
        self.sessions: list[Session] = []
        self.changes = 0
        """Rises with every transaction's end."""
        self.now = 1_000.0
        self.over = False
        self.current: Actor | None = None
        self.choices: list[str] = []
        """Those that were made."""
        self._histories: dict[str, int] = {}
        """By process, a hash of all that its code has seen so far."""
        self._main = getcurrent()
        self._new: list[Actor] = []

    def add(self, name: str, run: Callable[[], object], process: str = "") -> Actor:
        """Another thread from now on, of a process of its own unless `process` names one."""
        actor = self.actors[name] = Actor(name, run, process or name, self._main)
        self._new.append(actor)
        return actor

    # ── in the actors' threads ──

    def connect(self, name: str) -> Session:
        actor = self._mine()
        session = Session(self, self.database.session(name), actor.process)
        self.sessions.append(session)
        return session

    def end(self, session: Session) -> None:
        """The client closes it."""
        self.sessions.remove(session)
        self.database.end(session.pgconn)
        self.changes += 1

    def carry_out(self, exchange: Exchange) -> None:
        """The actor of this thread waits for its turn, and then for the answer."""
        actor = self._mine()
        actor.exchange = exchange
        self._hand_over()
        actor.exchange = None

    def sleep(self, seconds: float, until: Callable[[], bool] | None = None) -> None:
        """Sleeping is waiting for something to change; if no other actor can change anything, time passes."""
        self.now += seconds
        self._wait(self.changes, until)

    def wait_until(self, condition: Callable[[], bool], *, prompt: bool) -> None:
        """Wait for another thread of the same process; time does not help. With `prompt`, nothing comes between."""
        if not condition():
            self._wait(None, condition, prompt=prompt)

    def pause(self) -> None:
        """The actor may be frozen here, with nothing under way."""
        self._wait(-1)

    def _wait(self, asleep: int | None, until: Callable[[], bool] | None = None, *, prompt: bool = False) -> None:
        actor = self._mine()
        actor.asleep, actor.until, actor.prompt = asleep, until, prompt
        self._hand_over()
        actor.asleep = actor.until = None

    def check_alive(self) -> None:
        """Raises Crashed in the thread of one that is not."""
        if self.over or (self.current is not None and self.current.crashed):
            raise Crashed

    def _mine(self) -> Actor:
        self.check_alive()
        assert self.current is not None, "only actors use the database while a play is on"
        return self.current

    def _hand_over(self) -> None:
        self._main.switch()
        self.check_alive()

    # ── in the main thread ──

    def run(self, chooser: Chooser) -> bool:
        """Let all actors act until they are done, or until the chooser ends it, and then False. Raises what an invariant raises."""
        try:
            self._go_on()
            last = ""
            while not all(actor.done for actor in self.actors.values()):
                choices = self._choices(last)
                if not choices:
                    raise Stuck(f"no actor can go on: {self._where()}")
                choice = chooser.choose(choices, last, self.state)
                if choice is None:
                    return False
                self._carry_out(choice)
                last = "" if choice.startswith("!") else choice
                if len(self.choices) > TOO_LONG:
                    raise Stuck(f"no end after {TOO_LONG} steps: {self._where()}")
            return True
        finally:
            self._end()

    def state(self) -> object:
        """Hashable; equal in two runs of one scenario that have the same future, whatever came first in their past.

        An actor's code is deterministic, so what it and its transaction hold follows from what its process has seen.
        """
        actors = self.actors.values()
        waiting = sorted((actor.waits_since, actor.name) for actor in actors if actor.waits)
        return (
            self.world.shared(),
            frozenset(self._histories.items()),
            tuple((actor.name, actor.done, actor.waits, self._is_awake(actor)) for actor in actors),
            tuple(name for _, name in waiting),
            frozenset(self.faults.items()),
        )

    def _choices(self, last: str) -> list[str]:
        """What may happen next: the one that acted last first, then the others, then faults."""
        ready = [name for name, actor in self.actors.items() if self._can_step(actor)]
        choices = [name for name in ready if self._is_awake(self.actors[name])] or ready
        waiting = [name for name, actor in self.actors.items() if actor.waits]
        if not choices:
            # only time can help
            return [f"!timeout {name}" for name in waiting][:1]
        if last in choices:
            choices.remove(last)
            choices.insert(0, last)
        if self.faults.get("timeout", 0) > 0:
            choices += [f"!timeout {name}" for name in waiting]
        for fault in ("kill", "cut", "crash"):
            if self.faults.get(fault, 0) > 0:
                choices += [f"!{fault} {name}" for name in self._vulnerable(fault)]
        if self.faults.get("restore", 0) > 0:
            choices += [f"!restore {back}" for back in self.world.may_restore()]
        return choices

    def _can_step(self, actor: Actor) -> bool:
        if actor.done or actor.waits:
            return False
        if actor.until is not None and actor.asleep is None:
            return actor.until()
        return actor.asleep is not None or actor.exchange is not None

    def _is_awake(self, actor: Actor) -> bool:
        return actor.asleep is None or actor.asleep != self.changes or (actor.until is not None and actor.until())

    def _vulnerable(self, fault: str) -> list[str]:
        live = [(name, actor) for name, actor in self.actors.items() if not actor.done]
        if fault == "crash":
            return list(dict.fromkeys(actor.process for _, actor in live if actor.process))
        return [
            name for name, actor in live if actor.process and actor.exchange and actor.exchange.session.in_transaction
        ]

    def _carry_out(self, choice: str) -> None:
        self.choices.append(choice)
        if choice.startswith("!"):
            self._fault(*choice[1:].split())
            self._go_on()
            return
        actor = self.actors[choice]
        if (exchange := actor.exchange) is None:
            self._resume(actor)
        else:
            actor.waits_since = len(self.choices)
            patience = QUICK_S
            while not exchange.go_on(patience) and not self.database.waiting([exchange.server.backend_pid]):
                patience *= 2
        self._go_on()

    def _go_on(self) -> None:
        """What needs no choice: statements whose locks are free go on, and actors that have their answer."""
        while True:
            self._start_new()
            self._serve_waiting()
            if answered := self._answered():
                self._note_commits(answered)
                for actor in answered:
                    self._resume(actor)
            elif not self._wake_prompt() and not self._new:
                return

    def _answered(self) -> list[Actor]:
        """Those whose statement is done, or that lost the connection to it: in the order in which they sent it."""
        found = [a for a in self.actors.values() if not a.done and a.exchange and (a.exchange.done or a.exchange.lost)]
        return sorted(found, key=lambda actor: actor.waits_since)

    def _serve_waiting(self) -> None:
        """A statement whose lock is free now has gone on: wait for its answer, or until it waits again."""
        patience = QUICK_S
        while waiting := [
            e for e in (a.exchange for a in self.actors.values() if a.waits) if e and not (e.done or e.lost)
        ]:
            blocked = self.database.waiting([exchange.server.backend_pid for exchange in waiting])
            running = [one for one in waiting if one.server.backend_pid not in blocked]
            for exchange in running:
                exchange.go_on(patience)
            if not running:
                return
            patience *= 2

    def _note_commits(self, answered: Sequence[Actor]) -> None:
        """Note what these statements have committed."""
        ended = [actor for actor in answered if actor.exchange and not actor.exchange.session.in_transaction]
        self.changes += bool(ended)
        if writer := next((a for a in ended if a.exchange and not a.exchange.reads), None):
            self.world.committed(writer.process)

    def _start_new(self) -> None:
        while self._new:
            self._resume(self._new.pop(0))

    def _wake_prompt(self) -> bool:
        """Wake an actor whose wait for its own process needs no choice."""
        for actor in self.actors.values():
            if actor.prompt and not actor.done and actor.asleep is None and actor.until is not None and actor.until():
                self._resume(actor)
                return True
        return False

    def _fault(self, kind: str, name: str) -> None:
        self.faults[kind] = self.faults.get(kind, 0) - 1
        exchange = self.actors[name].exchange if name in self.actors else None
        match kind:
            case "restore":
                for session in list(self.sessions):
                    session.lost = True
                    self.sessions.remove(session)
                    self.database.terminate(session.pgconn)
                    session.pgconn.finish()
                for actor in self.actors.values():
                    if actor.exchange is not None:
                        actor.exchange.lost = True
                self.changes += 1
                self.world.restore(int(name))
            case "timeout":
                assert exchange is not None
                exchange.time_out()
            case "kill":
                assert exchange is not None
                self.database.terminate(exchange.server)
                while not exchange.go_on(1):
                    pass
            case "cut":
                assert exchange is not None
                self._leave(exchange)
            case _:
                threads = [one for one in self.actors.values() if one.process == name and not one.done]
                under_way = [one.exchange for one in threads if one.exchange is not None]
                for exchange in under_way:
                    self._leave(exchange)
                for session in [one for one in self.sessions if one.owner == name and not one.lost]:
                    session.lost = True
                    self.end(session)
                for thread in threads:
                    thread.crashed = True
                    self._resume(thread)

    def _leave(self, exchange: Exchange) -> None:
        """The client is gone; what it sent before is still carried out."""
        session = exchange.session
        rest = [(query, parameters) for _, query, parameters in session.queued]
        heir = session.heir()
        self.sessions.remove(session)
        self.sessions.append(heir)
        left = Exchange.taken_over(exchange, heir)

        def finish() -> None:
            try:
                self.carry_out(left)
                left.answer()
                for query, parameters in rest:
                    heir.execute(query, parameters)
            except psycopg.Error:
                pass
            finally:
                heir.close()

        owner = session.owner
        number = sum(name.startswith(f"{owner}'") for name in self.actors)
        orphan = self.add(f"{owner}'{number or ''}", finish)
        orphan.process = ""
        orphan.helps = True

    def _resume(self, actor: Actor) -> None:
        """Let the actor's own code run, up to where it waits next."""
        before = self._histories.get(actor.process, 0)
        answer = actor.exchange.seen if actor.exchange else None
        dones = tuple(other.done for other in self.actors.values())
        self._histories[actor.process] = hash((before, actor.name, answer, dones, self.now, actor.crashed))
        self.current = actor
        actor.thread.switch()
        self.current = None

    def _where(self) -> str:
        return "; ".join(f"{name}: {_state(actor)}" for name, actor in self.actors.items())

    def _end(self) -> None:
        self.over = True
        for actor in self.actors.values():
            if not actor.done and actor not in self._new:
                self._resume(actor)
        for session in self.sessions:
            self.database.end(session.pgconn)


def _state(actor: Actor) -> str:
    if actor.done:
        return repr(actor.error) if actor.error else "done"
    return actor.exchange.text if actor.exchange else "asleep"
