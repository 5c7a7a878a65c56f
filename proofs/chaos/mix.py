"""A random mix of all faults: each lane deals its own from a shuffled deck, so that all come before one comes again."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from proofs.chaos.catalogue import ALONE, LANES, Fault, Lane
from proofs.chaos.field import Field, NotReached


class Deck:
    """Deals all, shuffled, and then all again."""

    def __init__(self, lane: Lane, seed: int) -> None:
        self.lane = lane
        self._random = random.Random(seed)
        self._left: list[Fault] = []

    def deal(self) -> Fault:
        if not self._left:
            self._left = self._random.sample(self.lane.faults, len(self.lane.faults))
        return self._left.pop()

    def put_back(self, fault: Fault) -> None:
        """It did not take effect: it comes again, after the others."""
        self._left.insert(0, fault)


class Gate:
    """Several pass together, or one alone, who is let in before others that come later."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._together = 0
        self._alone = False

    @contextmanager
    def together(self) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._alone)
            self._together += 1
        try:
            yield
        finally:
            with self._changed:
                self._together -= 1
                self._changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._alone)
            self._alone = True
            self._changed.wait_for(lambda: self._together == 0)
        try:
            yield
        finally:
            with self._changed:
                self._alone = False
                self._changed.notify_all()


class Mix:
    """What is dealt goes on from one field to the next."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.decks = [Deck(lane, self._random.getrandbits(32)) for lane in LANES]
        self.alone = Deck(ALONE, self._random.getrandbits(32))
        self.without_effect = 0

    def pause(self, lane: Lane) -> float:
        """Until the lane's next fault, in seconds."""
        return self._random.uniform(*lane.quiet_s)

    def on(self, field: Field) -> Fire:
        """Start the fire; `put_out` ends it."""
        return Fire(self, field)


class Fire:
    """Lanes at work on one field."""

    def __init__(self, mix: Mix, field: Field) -> None:
        self.mix, self.field = mix, field
        self._gate = Gate()
        self._out = threading.Event()
        passes = [(deck, self._gate.together) for deck in mix.decks] + [(mix.alone, self._gate.alone)]
        self._threads = [
            threading.Thread(target=self._burn, args=one, daemon=True, name=one[0].lane.name) for one in passes
        ]
        for thread in self._threads:
            thread.start()

    def put_out(self, seconds: float = 120) -> None:
        """No more faults; returns when those that are under way have ended."""
        self._out.set()
        for thread in self._threads:
            thread.join(seconds)

    def _burn(self, deck: Deck, passing: Callable[[], AbstractContextManager[None]]) -> None:
        while not self._out.wait(self.mix.pause(deck.lane)):
            with passing():
                self._act(deck)

    def _act(self, deck: Deck) -> None:
        if self._out.is_set():
            return
        fault = deck.deal()
        try:
            took = fault.act(self.field)
        except NotReached:
            took = False
        except Exception as error:
            self.field.violations.append(f"'{fault.kind}' failed: {error!r}")
            took = False
        if not took:
            self.mix.without_effect += 1
            deck.put_back(fault)
