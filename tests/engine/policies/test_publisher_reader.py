"""make test: the publisher's one reader gives each lane its records from its position on, and none to one that is full."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import SimpleNamespace
from typing import Any

from infra.log.records import Record
from infra.settings import Settings
from policies.engine.publisher import MOST_BATCHES, Publisher
from policies.engine.publishing import Inbox


class Log:
    """Each take has the next record of each partition that is not full."""

    def __init__(self) -> None:
        self.next: dict[int, int] = {}
        self.sought: list[dict[int, int]] = []

    def go_on(self, at: Mapping[int, int]) -> None:
        self.next = dict(at)
        self.sought.append(dict(at))

    def take(self, _most: int, _wait: float, full: Collection[int]) -> dict[int, list[Record]]:
        taken = {one: [Record(one, at, 0, None, b"")] for one, at in self.next.items() if one not in full}
        self.next |= {one: records[-1].offset + 1 for one, records in taken.items()}
        return taken


def reading(lanes: Mapping[int, Any]) -> tuple[Any, Log]:
    publisher: Any = object.__new__(Publisher)
    publisher.settings, publisher._lanes, publisher._log = Settings(), lanes, Log()
    publisher._status = SimpleNamespace(well=lambda *_: None)
    return publisher, publisher._log


def offsets(inbox: Inbox) -> list[int]:
    return [record.offset for _ in range(inbox.batches.qsize()) for record in inbox.batches.get()]


def test_a_lane_that_began_again_between_two_reads_gets_its_records_from_its_position_on() -> None:
    """Without the reader having seen it away: a read of the archive may have taken longer."""
    lanes = {0: SimpleNamespace(inbox=Inbox(5)), 1: SimpleNamespace(inbox=Inbox(7))}
    publisher, log = reading(lanes)
    for _ in range(2):
        publisher._read()
    assert log.sought == [{0: 5, 1: 7}]
    other, lanes[0].inbox = lanes[1].inbox, Inbox(6)
    publisher._read()
    assert log.sought[1:] == [{0: 6, 1: 9}]
    assert (offsets(lanes[0].inbox), offsets(other)) == ([6], [7, 8])


def test_a_lane_with_enough_batches_gets_no_more() -> None:
    lanes = {0: SimpleNamespace(inbox=Inbox(0)), 1: SimpleNamespace(inbox=Inbox(0))}
    publisher, _ = reading(lanes)
    for number in range(MOST_BATCHES + 5):
        publisher._read()
        assert offsets(lanes[1].inbox) == [number]
    assert offsets(lanes[0].inbox) == list(range(MOST_BATCHES))
