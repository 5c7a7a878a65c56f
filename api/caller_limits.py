"""What one caller may ask of this process: so many requests a second, and so many at once. Others are not slowed down by it."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

from api.problems import kind

TOO_MANY_REQUESTS = kind(429, "too-many-requests", "One caller asks too much.", 1)
MOST_CALLERS = 100_000
"""Of whom the process knows what they have asked lately."""


class Bucket:
    """A token bucket: `rate` tokens a second, at most `burst`."""

    __slots__ = ("_at", "_burst", "_left", "_rate", "running")

    def __init__(self, rate: float, burst: float) -> None:
        self._rate = rate
        self._burst = burst
        self._left = burst
        self._at = time.monotonic()
        self.running = 0
        """Requests that are being answered."""

    def take(self) -> float:
        """Take a token: 0, or the seconds until there is one."""
        now = time.monotonic()
        self._left = min(self._burst, self._left + (now - self._at) * self._rate)
        self._at = now
        if self._left < 1:
            return (1 - self._left) / self._rate
        self._left -= 1
        return 0


class CallerLimits:
    """The callers of one process, by subject."""

    def __init__(self, rate: float, at_once: int) -> None:
        self._rate = rate
        self._at_once = at_once
        self._buckets: OrderedDict[str, Bucket] = OrderedDict()

    @contextmanager
    def taking(self, subject: str) -> Iterator[None]:
        """For the time of one request. Raises Problem 429."""
        bucket = self._bucket(subject)
        if wait_s := bucket.take():
            raise TOO_MANY_REQUESTS(
                f"You may send {self._rate:g} requests a second.", headers={"Retry-After": str(math.ceil(wait_s))}
            )
        if bucket.running >= self._at_once:
            raise TOO_MANY_REQUESTS(f"{self._at_once} of your requests are being answered.")
        bucket.running += 1
        try:
            yield
        finally:
            bucket.running -= 1

    def _bucket(self, subject: str) -> Bucket:
        bucket = self._buckets.get(subject)
        if bucket is None:
            if len(self._buckets) >= MOST_CALLERS:  # the one who has been silent for longest and waits for nothing
                idle = (one for one, known in self._buckets.items() if not known.running)
                self._buckets.pop(next(idle, ""), None)
            bucket = self._buckets[subject] = Bucket(self._rate, max(1, 2 * self._rate))
        self._buckets.move_to_end(subject)
        return bucket
