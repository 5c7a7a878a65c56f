"""What benchmarks find: samples of contenders, ratios of medians, and whether an aim is met."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from math import ceil
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
    """A median, or a ratio of two medians, that is wanted. A plot shows a median's as a line among the bars of its case."""

    what: str
    wanted: float
    found: float
    at_most: bool = False
    unit: str = ""
    case: str = ""

    @property
    def is_met(self) -> bool:
        return self.found <= self.wanted if self.at_most else self.found >= self.wanted


@dataclass(frozen=True, slots=True)
class Median:
    """A contender's rounds in one case, together: the medians, and processor time per item over all rounds, by group."""

    contender: str
    case: str
    value: float
    rounds: list[float]
    cpu_us_each: dict[str, float]
    more: dict[str, float]


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
    """What the plot shows in addition to the medians."""
    not_run: list[str] = field(default_factory=list)
    """Contenders that are not installed, each with what to do about it."""

    @property
    def contenders(self) -> list[tuple[str, str]]:
        """(contender, case) in order of appearance."""
        return list(dict.fromkeys((sample.contender, sample.case) for sample in self.samples))

    def of(self, contender: str, case: str) -> list[Sample]:
        return [one for one in self.samples if (one.contender, one.case) == (contender, case)]

    def medians(self) -> list[Median]:
        return [_median_of(contender, case, self.of(contender, case)) for contender, case in self.contenders]

    def as_dict(self) -> dict[str, Any]:
        return {
            "benchmark": self.name,
            "title": self.title,
            "unit": self.unit,
            "size": self.size,
            "medians": [asdict(told) for told in self.medians()],
            "aims": [asdict(aim) | {"found": rounded(aim.found), "is_met": aim.is_met} for aim in self.aims],
            "samples": [asdict(sample) for sample in self.samples],
            **({"plots": self.plots} if self.plots else {}),
            **({"not_run": self.not_run} if self.not_run else {}),
        }


def middle(samples: Iterable[Sample], contender: str, case: str) -> float:
    """The median of a contender's values."""
    return median(one.value for one in samples if (one.contender, one.case) == (contender, case))


def rounded(value: float) -> float:
    """Three significant digits: measurements are not more exact."""
    return round(value) if value >= 100 else round(value, 2)


def _median_of(contender: str, case: str, samples: list[Sample]) -> Median:
    groups = dict.fromkeys(group for one in samples for group in one.cpu)
    count = sum(one.count for one in samples)
    return Median(
        contender,
        case,
        rounded(median(one.value for one in samples)),
        [rounded(one.value) for one in samples],
        {group: round(1e6 * sum(one.cpu.get(group, 0) for one in samples) / count, 1) for group in groups},
        {name: rounded(median(one.more[name] for one in samples)) for name in samples[0].more},
    )


PERCENTILES = (75, 90, 95, 99, 99.9)


def latency_sample(contender: str, case: str, number: int, measured: Sequence[float]) -> Sample:
    """A turn's milliseconds: their median, and higher percentiles."""
    more = {f"p{p:g}_ms": percentile(measured, p) for p in PERCENTILES} | {"max_ms": max(measured)}
    return Sample(contender, case, number, median(measured), len(measured), sum(measured) / 1000, {}, more)


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that so many per cent of all do not exceed."""
    ordered = sorted(values)
    return ordered[max(ceil(len(ordered) * percent / 100), 1) - 1]


def curve(values: Sequence[float]) -> list[float]:
    """The percentiles 1 to 100."""
    return [round(percentile(values, percent), 3) for percent in range(1, 101)]
