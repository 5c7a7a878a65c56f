"""The reader without one of its guarantees, in the test only."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from infra.log.records import Record
from projections.engine.live.reader import Action, Reader
from projections.engine.store.commit import BatchResult, Fate
from projections.engine.store.positions import Positions
from proofs.model_read.reader_world import BATCH, CODE


class TakesLatePositions(Reader):
    """Positions that were read for an earlier turn are taken for this one's."""

    def positions(self, turn: int, positions: Positions | None) -> list[Action]:
        return super().positions(self.turn, positions)


class TakesLateFates(Reader):
    """A batch of an earlier turn is taken for this one's."""

    def done(self, turn: int, done: BatchResult, now: float, lane: int = 0) -> list[Action]:
        self._under_way.setdefault(lane, ())
        done = BatchResult(done.fate, {p: r for p, r in done.readings.items() if p in self._parts}, done.stop)
        return super().done(self.turn, done, now, lane)


class TrustsAHoleAtOnce(Reader):
    """What comes right after a seek is what the log has: as it was before the model lost a fetch there."""

    def records(self, partition: int, records: Sequence[Record], end: int, now: float) -> list[Action]:
        part = self._parts.get(partition)
        if part is not None and records and not part.buffer and part.wanted == part.reading.next_offset:
            part.hole_to = records[0].offset
        return super().records(partition, records, end, now)


class SeesNoHoles(Reader):
    """Records are taken as they come."""

    def records(self, partition: int, records: Sequence[Record], end: int, now: float) -> list[Action]:
        actions: list[Action] = []
        for record in records:
            if (part := self._parts.get(partition)) is not None:
                part.hole_to = record.offset
            actions += super().records(partition, [record], end, now)
        return actions


class KeepsBuffers(Reader):
    """A fence drops nothing: what was fetched is applied from the positions that are read now."""

    def _ask(self, after: float = 0.0) -> list[Action]:
        kept = {partition: (part.buffer, part.wanted) for partition, part in self._parts.items()}
        actions = super()._ask(after)
        self._kept = kept
        return actions

    def positions(self, turn: int, positions: Positions | None) -> list[Action]:
        if turn != self.turn:
            return []
        actions = super().positions(turn, positions)
        for partition, (buffer, wanted) in self._kept.items():
            if (part := self._parts.get(partition)) is not None and buffer:
                part.buffer, part.wanted = buffer, wanted
        return actions


class ForgetsToAsk(Reader):
    """After a batch whose fate is unknown it goes on as if it had been applied."""

    def done(self, turn: int, done: BatchResult, now: float, lane: int = 0) -> list[Action]:
        if done.fate is Fate.UNKNOWN:
            done = BatchResult(Fate.APPLIED)
        return super().done(turn, done, now, lane)


READERS: tuple[type[Reader], ...] = (
    TakesLatePositions,
    TakesLateFates,
    TrustsAHoleAtOnce,
    SeesNoHoles,
    KeepsBuffers,
    ForgetsToAsk,
)


def maker(kind: type[Reader]) -> Callable[[], Reader]:
    return lambda: kind(CODE, batch=BATCH, max_age=1.0, lanes=2)
