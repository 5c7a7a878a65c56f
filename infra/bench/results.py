"""What benchmarks find: samples of contenders, ratios of medians, and whether an aim is met."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any


@dataclass(frozen=True, slots=True)
class Sample:
    """One contender's turn in one round. `value` is in the benchmark's unit; `cpu` in seconds, by group of processes.

    `more` holds other figures of the same turn, their units in their names.
    """

    contender: str
    case: str
    round: int
    value: float
    count: int
    seconds: float
    cpu: dict[str, float] = field(default_factory=dict)
    more: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Aim:
    """A median, or a ratio of two medians, that is wanted."""

    what: str
    wanted: float
    found: float
    at_most: bool = False
    unit: str = ""

    @property
    def is_met(self) -> bool:
        return self.found <= self.wanted if self.at_most else self.found >= self.wanted


@dataclass(slots=True)
class Result:
    """A benchmark's outcome. It exists only where every end state equalled the independent fold."""

    name: str
    title: str
    unit: str
    samples: list[Sample]
    aims: list[Aim]
    size: dict[str, Any]
    plots: dict[str, Any] = field(default_factory=dict)
    """What the plot shows beside the medians."""

    @property
    def contenders(self) -> list[tuple[str, str]]:
        """(contender, case) in order of appearance."""
        return list(dict.fromkeys((sample.contender, sample.case) for sample in self.samples))

    def of(self, contender: str, case: str) -> list[Sample]:
        return [one for one in self.samples if (one.contender, one.case) == (contender, case)]

    def as_dict(self) -> dict[str, Any]:
        return {
            "benchmark": self.name,
            "title": self.title,
            "unit": self.unit,
            "size": self.size,
            "medians": [
                {
                    "contender": contender,
                    "case": case,
                    self.unit: rounded(middle(self.samples, contender, case)),
                    "rounds": [rounded(one.value) for one in self.of(contender, case)],
                    "cpu_us_each": _cpu_each(self.of(contender, case)),
                }
                for contender, case in self.contenders
            ],
            "aims": [asdict(aim) | {"found": rounded(aim.found), "is_met": aim.is_met} for aim in self.aims],
            "samples": [asdict(sample) for sample in self.samples],
            **({"plots": self.plots} if self.plots else {}),
        }


def middle(samples: Iterable[Sample], contender: str, case: str) -> float:
    """The median of a contender's values."""
    return median(one.value for one in samples if (one.contender, one.case) == (contender, case))


def rounded(value: float) -> float:
    """Three digits and the thousands: nobody measures better than that."""
    return round(value) if value >= 100 else round(value, 2)


def _cpu_each(samples: list[Sample]) -> dict[str, float]:
    """Microseconds of processor time per item, over all rounds."""
    groups = dict.fromkeys(group for one in samples for group in one.cpu)
    count = sum(one.count for one in samples)
    return {group: round(1e6 * sum(one.cpu.get(group, 0) for one in samples) / count, 1) for group in groups}
