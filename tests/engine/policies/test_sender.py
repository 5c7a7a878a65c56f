"""make test: a state machine without a store.

What the relay sends next and marks, as its state machine decides it; and all that can happen around it, by chance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from random import Random

import pytest

from policies.engine.sender import MARK_S, Sender, UnsentCommand
from tools.testing.fixtures import SEED

NOW = datetime(2026, 1, 1, tzinfo=UTC)
MINE = {("p", 0), ("p", 1)}


def row(
    ident: str, stream: str = "a/1", target: str = "b/1", *, partition: int = 0, due: float | None = None
) -> UnsentCommand:
    at = None if due is None else NOW + timedelta(seconds=due)
    return UnsentCommand(ident, "p", partition, stream, target, "Go", "{}", at, 1, "", "")


def ids(rows: Iterable[UnsentCommand]) -> list[str]:
    return [one.id for one in rows]


def sent(sender: Sender, *rows: UnsentCommand, after: float = 0) -> list[str]:
    """What it sends when these are read."""
    return ids(sender.unsent(rows, NOW + timedelta(seconds=after))[0])


def test_a_command_waits_for_the_answer_to_its_predecessor() -> None:
    sender, one, two, other = Sender(), row("1"), row("2"), row("3", target="b/2")
    assert sent(sender, one, two, other) == ["1", "3"]
    assert sent(sender, one, two, other) == []
    assert ids(sender.acknowledged(one, 0)) == ["2"]
    assert ids(sender.acknowledged(two, 0)) == []
    assert ids(sender.acknowledged(other, 0)) == []


def test_a_failed_command_is_sent_again_before_its_successor() -> None:
    sender, one, two = Sender(), row("1"), row("2")
    sent(sender, one, two)
    sender.failed(one)
    assert sent(sender, one, two) == []
    assert ids(sender.again()) == ["1"]
    assert ids(sender.again()) == []
    assert ids(sender.acknowledged(one, 0)) == ["2"]


def test_the_rest_goes_on_behind_a_refused_command() -> None:
    sender, one, two = Sender(), row("1"), row("2")
    sent(sender, one, two)
    assert ids(sender.refused(one)) == ["2"]
    assert sender.to_mark(99) == []
    assert sent(sender, one) == [], "retried by hand, it comes after what was read before"
    assert ids(sender.acknowledged(two, 0)) == ["1"]


def test_a_row_is_marked_a_while_after_its_acknowledgement() -> None:
    """Not before: a killed process would have forgotten it."""
    sender, one = Sender(), row("1")
    sent(sender, one)
    assert sender.to_mark(99) == []
    sender.acknowledged(one, 99)
    assert sender.to_mark(99 + MARK_S / 2) == []
    assert sender.to_mark(99 + MARK_S) == ["1"]
    assert sent(sender, one) == []
    sender.marked(["1"])
    assert (sender.to_mark(999), sender.known) == ([], 0)


def test_timers_are_sent_once_when_they_are_due_in_that_order() -> None:
    """Late ones too, from whatever streams they are."""
    sender = Sender()
    timers = [row("early", "a/2", due=1), row("late", "a/1", due=2), row("other", "a/1", "b/2", due=3)]
    assert sender.unsent(timers, NOW) == ([], timers[0].due)
    assert sent(sender, *timers, after=5) == ["early", "other"]
    assert sent(sender, *timers, after=6) == []
    assert ids(sender.acknowledged(timers[0], 0)) == ["late"]


def test_what_waits_is_forgotten_where_another_process_has_the_partition_now() -> None:
    sender, one, two = Sender(), row("1", partition=1), row("2", partition=1)
    sent(sender, one, two)
    sender.assigned({("p", 0)})
    assert sender.known == 1
    assert ids(sender.acknowledged(one, 0)) == []
    sender.assigned(MINE)
    assert sent(sender, one, two) == ["2"], "it comes back, and the first one is not marked yet"


class Outbox:
    """Rows that processes with a sender each read, send and mark; a log with what arrived, in order."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.rows = [row(f"{n}", f"a/{n % 3}", f"b/{n % 2}", partition=n % 2) for n in range(8)]
        self.unsent = {one.id for one in self.rows}
        self.log: list[UnsentCommand] = []
        self.senders = [Sender(), Sender()]
        self.mine: list[set[tuple[str, int]]] = [MINE, set()]
        self.in_flight: list[list[UnsentCommand]] = [[], []]
        self.clock = 0.0

    def step(self, faults: bool) -> None:
        self.clock += 1
        which = self.random.randrange(2)
        sender, flying = self.senders[which], self.in_flight[which]
        choices = ["read", "answer", "mark", *(["kill", "move", "fail"] if faults else [])]
        match self.random.choice(choices):
            case "read":
                sender.assigned(self.mine[which])
                mine = self.mine[which]
                rows = [one for one in self.rows if one.id in self.unsent and (one.policy, one.partition) in mine]
                flying += sender.unsent(rows[: self.random.randint(1, 9)], NOW)[0]
                flying += sender.again()
            case "answer" if flying:
                arrived = flying.pop(self.random.randrange(len(flying)))
                self.log.append(arrived)
                flying += sender.acknowledged(arrived, self.clock)
            case "mark":
                marked = sender.to_mark(self.clock)
                assert {one.id for one in self.log} >= set(marked), "marked, and not in the log"
                self.unsent -= set(marked)
                sender.marked(marked)
            case "fail" if flying:  # it may have arrived nevertheless
                failed = flying.pop(self.random.randrange(len(flying)))
                self.log += [failed] if self.random.random() < 0.5 else []
                sender.failed(failed)
            case "kill":
                self.log += [one for one in flying if self.random.random() < 0.5]
                self.senders[which], self.in_flight[which] = Sender(), []
            case "move":
                self.mine.reverse()
            case _:
                pass  # nothing is in flight


@pytest.mark.parametrize("seed", range(300))
def test_whatever_happens_each_command_arrives_and_first_in_order(seed: int) -> None:
    outbox = Outbox(Random(f"{SEED} {seed}"))
    for _ in range(60):
        outbox.step(faults=True)
    for _ in range(2_000):
        if not outbox.unsent:
            break
        outbox.step(faults=False)
    assert outbox.unsent == set()
    first = list(dict.fromkeys(outbox.log))
    assert sorted(ids(first)) == sorted(ids(outbox.rows))
    for order in Counter(one.order for one in outbox.rows):
        assert ids(one for one in first if one.order == order) == ids(one for one in outbox.rows if one.order == order)
