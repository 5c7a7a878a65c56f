"""One run: actors are threads of which one at a time has the word, and between any two statements a choice is made who is next.

An actor runs the product's code until that sends a statement that others could notice; there it waits for its turn. So a
schedule is a list of choices, and the same choices give the same run again.
"""

from __future__ import annotations

import _thread
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import psycopg
from psycopg import errors

from proofs.model_read.postgres import Database, Footprint, Session

LOST = "server closed the connection unexpectedly"
TOO_LONG = 3_000
"""Steps after which a run goes round in circles."""


class Crashed(BaseException):
    """The actor's process is no more."""


class Endless(AssertionError):
    """A run does not come to an end."""


class Stuck(AssertionError):
    """Nobody can go on."""


class Chooser(Protocol):
    """Chooses what happens next, and is told what that touched."""

    def choose(self, choices: Sequence[str], last: str) -> str | None:
        """One of the choices; None ends the run."""

    def touched(self, footprint: Footprint) -> None: ...


class First:
    """Lets whoever can go on, go on."""

    def choose(self, choices: Sequence[str], last: str) -> str:
        return choices[0]

    def touched(self, footprint: Footprint) -> None:
        """Alone, there is nothing to compare."""


class Actor:
    """One process."""

    def __init__(self, name: str, run: Callable[[], None], process: str) -> None:
        self.name = name
        self.process = process
        """Threads of one process share its memory, and its end."""
        self.run = run
        self.turn = _thread.allocate_lock()
        self.turn.acquire()
        self.session: Session | None = None
        """Where it waits for an answer."""
        self.asleep: int | None = None
        """The number of changes in the database when it went to sleep."""
        self.until: Callable[[], bool] | None = None
        """What it waits for, besides an answer or time."""
        self.prompt = False
        self.crashed = False
        self.waits_since = 0
        self.done = False
        self.helps = False
        """Somebody else waits for it, and is told its error."""
        self.error: BaseException | None = None


class Play:
    """The actors of one run over one database."""

    def __init__(self, database: Database, faults: Mapping[str, int] | None = None) -> None:
        self.database = database
        self.faults = dict(faults or {})
        self.actors: dict[str, Actor] = {}
        self.orphans: dict[str, Session] = {}
        """Sessions that work on without their client, by name."""
        self.now = 1_000.0
        self.over = False
        self.current: Actor | None = None
        self.story: list[tuple[str, str]] = []
        self.may_restore: Callable[[], list[int]] = list
        self.restore: Callable[[int], None] = lambda _back: None
        self._main = _thread.allocate_lock()
        self._main.acquire()
        self.eager = False
        """Whoever has waited for a lock that is free now goes on at once, as on a real server."""
        self._new: list[Actor] = []
        self._pool: list[_Worker] = []

    def add(self, name: str, run: Callable[[], None], process: str = "") -> Actor:
        """Another thread from now on, of a process of its own unless it is said of which."""
        actor = self.actors[name] = Actor(name, run, process or name)
        self._new.append(actor)
        return actor

    # ── in the actors' threads ──

    def wait(self, session: Session) -> None:
        """The actor of this thread waits until all that it sent in this session is answered."""
        actor = self._mine()
        actor.session = session
        self._hand_over(actor)
        actor.session = None

    def sleep(self, seconds: float, until: Callable[[], bool] | None = None) -> None:
        """Sleeping is waiting for something to change; if nobody else can change anything, time passes."""
        self.now += seconds
        actor = self._mine()
        actor.asleep, actor.until = self.database.changes, until
        self._hand_over(actor)
        actor.asleep = actor.until = None

    def wait_until(self, condition: Callable[[], bool], *, prompt: bool) -> None:
        """Wait for another thread of the same process; time does not help. With `prompt`, nothing comes between."""
        if not condition():
            actor = self._mine()
            actor.until, actor.prompt = condition, prompt
            self._hand_over(actor)
            actor.until = None

    def pause(self) -> None:
        """The actor may be frozen here, with nothing under way."""
        actor = self._mine()
        actor.asleep = -1
        self._hand_over(actor)
        actor.asleep = None

    def check_alive(self) -> None:
        """Raises Crashed in the thread of one that is not."""
        if self.over or (self.current is not None and self.current.crashed):
            raise Crashed

    def _mine(self) -> Actor:
        self.check_alive()
        assert self.current is not None, "only actors use the database while a play is on"
        return self.current

    def _hand_over(self, actor: Actor) -> None:
        self._main.release()
        actor.turn.acquire()
        self.check_alive()

    # ── in the main thread ──

    def run(self, chooser: Chooser) -> bool:
        """Let everybody act until all are done, or until the chooser ends it, and then False. Raises what an invariant raises."""
        try:
            self._start_new()
            self._wake_prompt()
            last = ""
            while not all(actor.done for actor in self.actors.values()) or self.orphans:
                choices = self._choices(last)
                if not choices:
                    raise Stuck(f"nobody can go on: {self._where()}")
                choice = self._resumed() if self.eager else None
                choice = choice or chooser.choose(choices, last)
                if choice is None:
                    return False
                footprint = self._carry_out(choice)
                chooser.touched(footprint)
                last = "" if choice.startswith("!") else choice
                if len(self.story) > TOO_LONG:
                    raise Endless(f"no end after {TOO_LONG} steps: {self._where()}")
            return True
        finally:
            self._end()

    def _start_new(self) -> None:
        while self._new:
            actor = self._new.pop(0)
            worker = _worker()
            self._pool.append(worker)
            worker.begin(self, actor)
            self._give_word(actor)

    def _choices(self, last: str) -> list[str]:
        """What may happen next: the one that acted last first, then the others, then faults."""
        ready = [name for name, actor in self.actors.items() if self._can_step(actor)]
        ready += [name for name, orphan in self.orphans.items() if not orphan.blocked]
        choices = [name for name in ready if self._is_awake(name)]
        if not choices:
            choices = ready
        if not choices:
            # only time can help
            return [f"!timeout {name}" for name in self._waiting()][:1]
        if last in choices:
            choices.remove(last)
            choices.insert(0, last)
        waiting = self._waiting() if self.faults.get("timeout", 0) > 0 else []
        choices += [f"!timeout {name}" for name in waiting]
        for fault in ("kill", "cut", "crash"):
            if self.faults.get(fault, 0) > 0:
                choices += [f"!{fault} {name}" for name in self._vulnerable(fault)]
        if self.faults.get("restore", 0) > 0:
            choices += [f"!restore {back}" for back in self.may_restore()]
        return choices

    def _resumed(self) -> str | None:
        """Of those whose statement is under way and waits no more, the one that has waited the longest."""
        waited = [a for a in self.actors.values() if not a.done and a.session is not None and a.session.under_way]
        free = [actor for actor in waited if actor.session is not None and not actor.session.blocked]
        return min(free, key=lambda actor: actor.waits_since).name if free else None

    def _can_step(self, actor: Actor) -> bool:
        if actor.done:
            return False
        if actor.until is not None and actor.asleep is None:
            return actor.until()
        return actor.asleep is not None or (actor.session is not None and not actor.session.blocked)

    def _is_awake(self, name: str) -> bool:
        actor = self.actors.get(name)
        if actor is None or actor.asleep is None or actor.asleep != self.database.changes:
            return True
        return actor.until is not None and actor.until()

    def _waiting(self) -> list[str]:
        return [n for n, a in self.actors.items() if not a.done and a.session is not None and a.session.blocked]

    def _vulnerable(self, fault: str) -> list[str]:
        live = [(name, actor) for name, actor in self.actors.items() if not actor.done]
        if fault == "crash":
            return list(dict.fromkeys(actor.process for _, actor in live))
        return [name for name, actor in live if actor.session is not None and actor.session.transaction is not None]

    def _carry_out(self, choice: str) -> Footprint:
        if choice.startswith("!"):
            self._fault(*choice[1:].split())
            self.story.append((choice, ""))
            footprint = Footprint(everything=True)
        elif choice in self.orphans:
            footprint = self._step(choice, self.orphans[choice])
        else:
            actor = self.actors[choice]
            if actor.session is not None:
                footprint = self._step(choice, actor.session)
            else:
                self.story.append((choice, "goes on"))
                footprint = Footprint(everything=actor.asleep is not None)
                self._give_word(actor)
            footprint.locked.add(("process", (actor.process,)))
        for actor in list(self.actors.values()):
            session = actor.session
            if not actor.done and session is not None and (session.cut or not session.todo):
                self._give_word(actor)
        self._retire()
        self._start_new()
        self._wake_prompt()
        return footprint

    def _wake_prompt(self) -> None:
        """Those whose wait for their own process is no choice of anybody's."""
        while True:
            ready = [
                a for a in self.actors.values() if a.prompt and not a.done and a.asleep is None and a.until is not None
            ]
            woken = next((actor for actor in ready if actor.until is not None and actor.until()), None)
            if woken is None:
                return
            self._give_word(woken)
            self._start_new()

    def _step(self, name: str, session: Session) -> Footprint:
        began = session.under_way
        ended = session.step()
        if name in self.actors and not (began or ended):
            self.actors[name].waits_since = len(self.story)
        answer = session.answers[-1] if ended and session.answers else None
        said = "" if ended else " … waits"
        if isinstance(answer, psycopg.Error):
            said = f" … {type(answer).__name__}"
        self.story.append((name, session.tells[:70] + said))
        return session.footprint

    def _retire(self) -> None:
        """The server notices that a client is gone when it has done what that sent."""
        for name, orphan in list(self.orphans.items()):
            if not orphan.todo:
                del self.orphans[name]
                orphan.end(psycopg.OperationalError(LOST))

    def _fault(self, kind: str, name: str) -> None:
        self.faults[kind] = self.faults.get(kind, 0) - 1
        if kind == "restore":
            self.orphans.clear()
            self.restore(int(name))
            return
        session = self.actors[name].session if name in self.actors else None
        match kind:
            case "timeout":
                assert session is not None
                session.fail(errors.LockNotAvailable("canceling statement due to lock timeout"))
            case "kill":
                assert session is not None
                session.end(errors.AdminShutdown("terminating connection due to administrator command"))
            case "cut":
                assert session is not None
                self._orphan(name, session)
            case _:
                for one in [one for one in self.database.sessions if one.owner == name]:
                    self._orphan(name, one)
                threads = [one for one in self.actors.values() if one.process == name and not one.done]
                for thread in threads:
                    thread.crashed = True
                    self._give_word(thread)

    def _orphan(self, name: str, session: Session) -> None:
        """The client is gone; what it sent before is still carried out."""
        session.owner = ""
        session.cut = True
        if session.todo:
            number = sum(orphan.startswith(f"{name}'") for orphan in self.orphans)
            self.orphans[f"{name}'{number or ''}"] = session
        else:
            session.end(psycopg.OperationalError(LOST))

    def _give_word(self, actor: Actor) -> None:
        """Let the actor's own code run, up to where it waits next."""
        self.current = actor
        actor.turn.release()
        self._main.acquire()
        self.current = None

    def _where(self) -> str:
        return "; ".join(
            f"{name} {'done' if actor.done else actor.session.tells if actor.session else 'asleep'}"
            for name, actor in self.actors.items()
        )

    def _end(self) -> None:
        self.over = True
        for actor in self.actors.values():
            if not actor.done and actor not in self._new:
                self._give_word(actor)
        _free.extend(self._pool)


class _Worker:
    """A thread that plays one actor after another."""

    def __init__(self) -> None:
        self.go = _thread.allocate_lock()
        self.go.acquire()
        self.part: tuple[Play, Actor] | None = None
        threading.Thread(target=self._work, daemon=True).start()

    def begin(self, play: Play, actor: Actor) -> None:
        self.part = (play, actor)
        self.go.release()

    def _work(self) -> None:
        while True:
            self.go.acquire()
            assert self.part is not None
            play, actor = self.part
            actor.turn.acquire()
            try:
                if not play.over:
                    actor.run()
            except BaseException as error:
                actor.error = error
            actor.done = True
            play._main.release()


_free: list[_Worker] = []


def _worker() -> _Worker:
    return _free.pop() if _free else _Worker()


def unexpected(play: Play, expected: tuple[type[BaseException], ...]) -> list[tuple[str, BaseException]]:
    """What ended actors that should not have ended them."""
    found = [(name, actor.error) for name, actor in play.actors.items() if not actor.helps]
    return [(name, e) for name, e in found if e is not None and not isinstance(e, (Crashed, *expected))]
