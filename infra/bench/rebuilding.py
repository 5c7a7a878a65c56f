"""`samefold rebuild VIEW` with its watch out: `python -m infra.bench.rebuilding VIEW`, the product's own function.

Prints one JSON object: when each stage began and ended, and what was folded. Times are in seconds since the epoch.
"""

from __future__ import annotations

import json
import sys
import time
from resource import RUSAGE_CHILDREN, RUSAGE_SELF, getrusage


class _Watched:
    """A progress that writes down when something happened."""

    def __init__(self) -> None:
        self.began: dict[str, float] = {}
        self.first_step_at = 0.0
        self.first_step = 0

    def begin(self, stage: str, _total: int | None = None) -> None:
        self.began[stage] = time.time()

    def advance(self, count: int) -> None:
        if not self.first_step and count:
            self.first_step_at, self.first_step = time.time(), count


def main() -> None:
    from infra.settings import Settings
    from projections.engine.rebuild import rebuild
    from projections.engine.system import all_views

    watched = _Watched()
    result = rebuild(Settings(), sys.argv[1:], all_views(), progress=watched)
    told = {
        "began": watched.began,
        "first_step_at": watched.first_step_at,
        "first_step": watched.first_step,
        "ended": time.time(),
        "commits": result.commits,
        "tables": result.tables,
        "load_s": result.load_ms / 1000,
        "index_s": result.index_ms / 1000,
        "cpu_s": sum(used.ru_utime + used.ru_stime for used in map(getrusage, (RUSAGE_SELF, RUSAGE_CHILDREN))),
        "switch_s": result.switched.switch_ms / 1000 if result.switched else 0.0,
    }
    sys.stdout.write(json.dumps(told) + "\n")


if __name__ == "__main__":
    main()
