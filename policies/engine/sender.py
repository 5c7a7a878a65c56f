"""Which commands the relay sends next, and which rows it marks: a state machine without I/O.

Inputs are facts: rows of the outbox that were read, the producer's reports, the clock. Outputs are rows to send and ids to mark.
The relay carries them out, or a model checker.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Set
from datetime import datetime
from typing import NamedTuple

MARK_S = 1.0
"""How long after an acknowledgement a row is marked. Most have got their outcome by then, and are gone."""


class UnsentCommand(NamedTuple):
    """A command in the outbox that has not been sent; its columns."""

    id: str
    policy: str
    partition: int
    stream: str
    target: str
    type: str
    body: str
    due: datetime | None
    depth: int
    correlation_id: str
    causation_id: str
    trace: str | None = None

    @property
    def order(self) -> tuple[str, str]:
        """Rows with the same one are sent in order. Timers are in order of their due times, wherever they come from."""
        return ("" if self.due else self.stream, self.target)


class Sender:
    """Sends each row that is due once, and again after a failure; the next one of an order when its predecessor is answered."""

    def __init__(self) -> None:
        self._known: set[str] = set()
        """Ids of rows that wait here, are in flight, or are not marked yet."""
        self._queues: dict[tuple[str, str], deque[UnsentCommand]] = {}
        """By order, the rows to send. The first one is in flight, or failed."""
        self._failed: list[UnsentCommand] = []
        self._sent: dict[str, float] = {}
        """Acknowledged ids that are not marked, with the time of their acknowledgement."""

    @property
    def known(self) -> int:
        """Number of rows that `unsent` passes over."""
        return len(self._known)

    def assigned(self, mine: Set[tuple[str, int]]) -> None:
        """Forget waiting commands whose (policy, partition) another process has now. Those in flight still get their answer."""
        for order, queue in list(self._queues.items()):
            kept = deque(row for n, row in enumerate(queue) if n == 0 or (row.policy, row.partition) in mine)
            self._known -= {row.id for row in queue} - {row.id for row in kept}
            self._queues[order] = kept

    def unsent(self, rows: Iterable[UnsentCommand], now: datetime) -> tuple[list[UnsentCommand], datetime | None]:
        """Unsent rows were read, in the outbox's order. Returns those to send now, and when the first of the others is due."""
        send, due = [], None
        for row in rows:
            if row.due and row.due > now:
                due = min(due or row.due, row.due)
            elif row.id not in self._known:
                self._known.add(row.id)
                queue = self._queues.setdefault(row.order, deque())
                queue.append(row)
                if len(queue) == 1:
                    send.append(row)
        return send, due

    def acknowledged(self, row: UnsentCommand, now: float) -> list[UnsentCommand]:
        """A row in flight is in the topic. Returns the next one to send, if there is one."""
        self._sent[row.id] = now
        return self._after(row)

    def refused(self, row: UnsentCommand) -> list[UnsentCommand]:
        """Kafka refuses it each time, and it is a dead letter now. Returns the next one to send, if there is one."""
        self._known.discard(row.id)
        return self._after(row)

    def failed(self, row: UnsentCommand) -> None:
        """It may be in the topic or not; `again` returns it."""
        self._failed.append(row)

    def again(self) -> list[UnsentCommand]:
        """The failed rows, to be sent again."""
        failed, self._failed = self._failed, []
        return failed

    def to_mark(self, now: float) -> list[str]:
        """Ids to be marked as sent, if the topic is still the one that has them."""
        return [ident for ident, since in self._sent.items() if since <= now - MARK_S]

    def marked(self, ids: Collection[str]) -> None:
        for ident in ids:
            del self._sent[ident]
        self._known.difference_update(ids)

    def _after(self, row: UnsentCommand) -> list[UnsentCommand]:
        queue = self._queues[row.order]
        queue.popleft()
        if queue:
            return [queue[0]]
        del self._queues[row.order]
        return []
