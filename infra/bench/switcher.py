"""Rebuilds `balances` and makes it live, over and over: `python -m infra.bench.switcher --version 1 --count 100`.

The function behind `samefold rebuild balances`, and that behind `samefold views drop` for the table before the last. Prints a JSON
object a switch; times are in milliseconds.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from infra.bench.newer import VIEW, raise_version

if TYPE_CHECKING:
    from infra.settings import Settings
    from projections.engine.view import View


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m infra.bench.switcher")
    parser.add_argument("--version", type=int, required=True)
    parser.add_argument("--count", type=int, required=True)
    given = parser.parse_args()
    raise_version(given.version)

    from infra.settings import Settings
    from projections.engine.rebuild import rebuild
    from projections.engine.system import all_views

    settings, views = Settings(), all_views()
    for _ in range(given.count):
        began = time.monotonic()
        result = rebuild(settings, [VIEW], views)
        assert result.switched is not None, "a rebuild that makes live switches"
        told = {
            "in_all_ms": 1000 * (time.monotonic() - began),
            "switch_ms": result.switched.switch_ms,
            "gap_ms": result.switched.gap_ms,
            "tries": result.switched.tries,
            "commits": result.commits,
        }
        sys.stdout.write(json.dumps(told) + "\n")
        sys.stdout.flush()
        _drop_older(settings, views)


def _drop_older(settings: Settings, views: Mapping[str, View]) -> None:
    """The last one stays, to go back to."""
    from projections.engine.builds import State
    from projections.engine.dropping import NotDroppable, drop_tables, droppable

    try:
        there = droppable(settings, VIEW, str(views[VIEW].version))
    except NotDroppable:
        return
    if older := [build for build in there if build.state is State.OLD][:-1]:
        drop_tables(settings, older, views[VIEW])


if __name__ == "__main__":
    main()
