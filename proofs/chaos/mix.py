"""All faults by the lane in which they follow one another; lanes run in parallel, services alone.

Each lane deals its own at random from a shuffled deck, so that all come before one comes again.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import cycle
from typing import NamedTuple

from infra.processes.faultpoints import AGENT, BUILDER, HANDLER, RELAY, Point
from proofs.chaos import process_faults as faults
from proofs.chaos import wire_faults
from proofs.chaos.field import Field, NotReached
from proofs.chaos.stumbles import JOBS, STORES, WAYS, How, Store, stumble, terminate_sessions

Act = Callable[[Field], bool]


class Fault(NamedTuple):
    """`act` returns whether it took effect; then `kind` is one of those that were counted."""

    kind: str
    act: Act


class Lane(NamedTuple):
    """`quiet_s` is the shortest and the longest pause between two of its faults, in seconds."""

    name: str
    faults: Sequence[Fault]
    quiet_s: tuple[float, float] = (0.0, 0.5)


def _strikes(role: str, points: Iterable[Point | None]) -> Iterator[Fault]:
    """At each point; at any moment where it is None."""

    def act(on: Callable[..., bool], point: Point | None) -> Act:
        return lambda field: on(
            field, None if role == "builder" else field.random.choice(field.crew.members[role]), point
        )

    for point in points:
        for word, on in (("killed", faults.kill), ("frozen", faults.freeze)):
            yield Fault(f"{word}: {faults.kind_of(role, point)}", act(on, point))


def _cuts(whose: wire_faults.Whose) -> Iterator[Fault]:
    for half in wire_faults.HALVES:
        yield Fault(f"{whose}: {half} cut off", partial(wire_faults.cut, whose=whose, half=half))


def _stumble(store: Store, how: How, first: int) -> Act:
    jobs = cycle([*JOBS[first % len(JOBS) :], *JOBS[: first % len(JOBS)]])
    return lambda field: stumble(field, store, how, next(jobs))


HANDLERS = [
    *_strikes("handler", (*HANDLER, None)),
    Fault("produce: answer held past the time-out", wire_faults.produce_answer_held),
    Fault("produce: request held over a takeover, then appended", wire_faults.produce_request_held),
]
AGENTS = [
    *_strikes("agent", (*AGENT, None)),
    Fault("rebalance: an agent joined", faults.rebalance),
    Fault("rebalance: an agent left", faults.rebalance),
    Fault("COMMIT: request held past the time-outs", wire_faults.commit_held),
]
IN_A_BATCH: tuple[Point, ...] = ("batch read", "rows sent", "COMMIT sent", "COMMIT acknowledged")
SERVICES = [
    *(Fault(f"{store}: {how}", _stumble(store, how, number)) for store in STORES for number, how in enumerate(WAYS)),
    Fault("session terminated", terminate_sessions),
]
ALONE = Lane("services", SERVICES, (2.0, 10.0))
LANES = (
    Lane("handlers", HANDLERS),
    Lane("agents", AGENTS),
    Lane("policies", [*_strikes("policies", (*RELAY, None, *IN_A_BATCH)), *_cuts("wish")]),
    Lane("builders", [*_strikes("builder", BUILDER), *_cuts("switch COMMIT")]),
    Lane("stopped views", [Fault("view stopped and resumed", faults.resumed)]),
    Lane("wire", [*_cuts("produce"), *_cuts("COMMIT")], (2.0, 6.0)),
    ALONE,
)
KINDS = [
    *(fault.kind for lane in LANES for fault in lane.faults),
    # a stumble counts for the job that runs meanwhile too, which is another one each time
    *(f"{job} while the {store} stumbled" for store in STORES for job in JOBS),
]


class Deck:
    """Deals all, shuffled, and then all again. Its lock is held while a fault of it acts."""

    def __init__(self, lane: Lane, seed: int) -> None:
        self.lane = lane
        self.random = random.Random(seed)
        self.acts = threading.Lock()
        self._left: list[Fault] = []

    def deal(self) -> Fault:
        if not self._left:
            self._left = self.random.sample(self.lane.faults, len(self.lane.faults))
        return self._left.pop()

    def put_back(self, fault: Fault) -> None:
        """It did not take effect: it comes again, after the others."""
        self._left.insert(0, fault)


class Mix:
    """What is dealt goes on from one field to the next."""

    def __init__(self, seed: int) -> None:
        chance = random.Random(seed)
        self.decks = [Deck(lane, chance.getrandbits(32)) for lane in LANES]
        self.without_effect = 0
        self._entrance = threading.Lock()
        """Who acts alone keeps it, so that nobody begins anything while those that have begun are waited for."""

    @contextmanager
    def on(self, field: Field) -> Iterator[None]:
        """Faults strike while the block runs; those that are under way at its end are waited for."""
        out = threading.Event()
        with ThreadPoolExecutor(len(self.decks)) as pool:
            for deck in self.decks:
                pool.submit(self._burn, deck, field, out)
            try:
                yield
            except BaseException:
                field.abandon()
                raise
            finally:
                out.set()

    def _burn(self, deck: Deck, field: Field, out: threading.Event) -> None:
        while not out.wait(deck.random.uniform(*deck.lane.quiet_s)):
            if deck.lane is ALONE:
                with self._entrance, ExitStack() as others:
                    for one in self.decks:
                        others.enter_context(one.acts)
                    self._act(deck, field, out)
            else:
                with self._entrance:
                    deck.acts.acquire()
                try:
                    self._act(deck, field, out)
                finally:
                    deck.acts.release()

    def _act(self, deck: Deck, field: Field, out: threading.Event) -> None:
        if out.is_set():
            return
        fault, took = deck.deal(), False
        try:
            took = fault.act(field)
        except NotReached:
            pass
        except Exception as error:
            field.violations.append(f"'{fault.kind}' failed: {error!r}")
        if not took:
            self.without_effect += 1
            deck.put_back(fault)
