"""Writers that each lack one rule: a test that passes for one of them would pass whether or not the rule is kept."""

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

from commands.decision import Versioned
from commands.overlay import Overlay
from commands.writer import Action, Doubt, Phase, ReadLog, Serve, Snapshot, Writer
from infra.log.records import Record
from infra.log.rule import Reading
from tests.engine.purse import PURSE, Filled, State


class FoldsEverything(Overlay):
    def state(self, stream: str, row: Versioned | None, context: Any) -> Versioned:
        before = row or Versioned(0, State())
        entry = self._streams.get(stream)
        if entry is None:
            return before
        if entry.state is None:
            folded = reduce(PURSE.evolve, [Filled(cents=5) for _ in entry.unfolded], before.state)
            entry.state = Versioned(before.version + len(entry.unfolded), folded)
        return entry.state


class EvictsByOffset(Overlay):
    def evict(self, position: Reading, epoch: int) -> bool:
        return super().evict(position._replace(epoch=epoch, seq=position.next_offset), epoch)


class EvictsAnyEpoch(Overlay):
    def evict(self, position: Reading, epoch: int) -> bool:
        return super().evict(position._replace(epoch=epoch), epoch)


class EvictsOneEarly(Overlay):
    def evict(self, position: Reading, epoch: int) -> bool:
        return super().evict(position._replace(next_offset=position.next_offset + 1), epoch)


class CountsOnlyOwn(Overlay):
    def __len__(self) -> int:
        return len(self._own)


def with_overlay(overlay: type[Overlay]) -> type[Writer]:
    """The writer with another overlay."""

    class Other(Writer):
        def _forget(self) -> None:
            super()._forget()
            self.overlay = overlay()

    Other.__name__ = overlay.__name__
    return Other


class BelievesOldSnapshots(Writer):
    def _distrust(self, snapshot: Snapshot) -> Action | None:
        self.base = 0
        return super()._distrust(snapshot)


class KeepsItsFirstBase(Writer):
    def _evict(self, snapshot: Snapshot) -> None:
        base = self.base
        super()._evict(snapshot)
        self.base = base


class EvictsOnAcknowledgement(Writer):
    def on_acknowledged(self, seq: int, offset: int | None, now: float) -> Action | None:
        action = super().on_acknowledged(seq, offset, now)
        self.overlay.evict(Reading(0, self.epoch, self.acknowledged, -1), self.epoch)
        return action


class ServesAfterAnyRead(Writer):
    def on_log(self, records: Sequence[Record]) -> Action:
        action = super().on_log(records)
        if isinstance(action, ReadLog):
            self.phase = Phase.SERVING
            return Serve(self.reading.command_offset + 1)
        return action


class GuessesItsEpoch(Writer):
    def on_opened(self, offset: int | None) -> Action:
        return super().on_opened(self.base if offset is None else offset)


class NeverTimesOut(Writer):
    def on_clock(self, now: float) -> Action | None:
        return None


class BelievesAnyAcknowledgement(Writer):
    def on_acknowledged(self, seq: int, offset: int | None, now: float) -> Action | None:
        return super().on_acknowledged(self.acknowledged + 1, self.epoch + self.acknowledged + 1, now)


class OpensUnasked(Writer):
    def _doubt(self, doubt: Doubt, why: str) -> Action:
        return self.start()


class HasAlwaysRoom(Writer):
    @property
    def room(self) -> int:
        return 1_000


class ResumesWhereTheDatabaseStands(Writer):
    stood = -1

    def on_position(self, snapshot: Snapshot, log_end: int) -> Action:
        self.stood = snapshot.positions[self.partition].command_offset
        return super().on_position(snapshot, log_end)

    def on_log(self, records: Sequence[Record]) -> Action:
        action = super().on_log(records)
        return Serve(self.stood + 1) if isinstance(action, Serve) else action


class OpensFarFromTheEnd(Writer):
    def on_position(self, snapshot: Snapshot, log_end: int) -> Action:
        return super().on_position(snapshot, snapshot.positions[self.partition].next_offset)


class BlindForVersions(Writer):
    def on_position(self, snapshot: Snapshot, log_end: int) -> Action:
        return super().on_position(self.seen(snapshot), log_end)

    def _distrust(self, snapshot: Snapshot) -> Action | None:
        return super()._distrust(self.seen(snapshot))

    def seen(self, snapshot: Snapshot) -> Snapshot:
        return Snapshot(snapshot.positions, snapshot.generation, True, snapshot.rows, snapshot.outcomes)


class AnswersWhatItDoesNotKnow(Writer):
    def on_position(self, snapshot: Snapshot, log_end: int) -> Action:
        return super().on_position(replace(snapshot, unknown=frozenset()), log_end)


class OpensAgainAtOnce(Writer):
    def on_confirmed(self) -> Action:
        self.left = None
        return super().on_confirmed()


class BlindForGenerations(Writer):
    def _distrust(self, snapshot: Snapshot) -> Action | None:
        self.generation = snapshot.generation
        return super()._distrust(snapshot)
