"""Where the time of a request goes: what the processes noted on its way, between its sending and its answer.

Only for requests one at a time: whatever is noted between the two is then that request's.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean
from typing import TypeAlias

from benchmarks.check import require
from benchmarks.http_client import Exchange
from benchmarks.http_marks import APPENDING, ASKED, NOTIFIED, RECORDED

PARTS: dict[str, str] = {
    "client to API": ASKED,
    "API: checked": APPENDING,
    "hop to the handler": "command read",
    "handler: state read, decided": "commit sent",
    "hop to the agent": "batch read",
    "agent: rows read, folded": "COMMIT sent",
    "written, COMMIT, notified": NOTIFIED,
    "API: outcome read": RECORDED,
}
"""The parts in their order, each with the point at which it ends."""
LAST = "API: answered, read by the client"
MIDDLE, TAIL = (0.4, 0.6), (0.99, 1.0)

Parts: TypeAlias = Mapping[str, float]
"""Milliseconds by part."""


def parts_of(exchanges: Sequence[Exchange], marks: Mapping[str, Sequence[float]]) -> list[Parts]:
    """Of each request, fastest first. `marks` has the rising times of each point.

    Those that missed a point are left out: an outcome may be found by the API's own look before it is notified. Raises RunVoid
    where they are more than a tenth.
    """
    divided = [parts for one in exchanges if (parts := _divide(one, marks))]
    left_out = len(exchanges) - len(divided)
    require(10 * left_out <= len(exchanges), f"{left_out} of {len(exchanges)} requests passed a point without a mark")
    return sorted(divided, key=lambda parts: sum(parts.values()))


def _divide(exchange: Exchange, marks: Mapping[str, Sequence[float]]) -> Parts | None:
    times = [exchange.sent]
    for point in PARTS.values():
        noted = marks.get(point, ())
        its = noted[bisect_left(noted, exchange.sent) : bisect_right(noted, exchange.answered)]
        if not its:
            return None
        # a process that just handed something over may be late to note it: the next one was there before
        times.append(max(times[-1], next((at for at in its if at >= times[-1]), its[-1])))
    times.append(exchange.answered)
    return {
        name: 1000 * (after - before) for name, (before, after) in zip([*PARTS, LAST], pairwise(times), strict=True)
    }


def means(parts: Sequence[Parts], of: tuple[float, float]) -> dict[str, float]:
    """The mean of each part over those requests: (0.4, 0.6) are the fifth in the middle. They add up to the mean of the wholes."""
    some = parts[int(len(parts) * of[0]) : max(int(len(parts) * of[1]), int(len(parts) * of[0]) + 1)]
    return {name: fmean(one[name] for one in some) for name in some[0]}
