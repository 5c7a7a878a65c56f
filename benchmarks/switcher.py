"""Switches `balances` to another table, over and over: `python -m benchmarks.switcher --version 2 --count 100`.

Every tenth time, the first one too, it is one that was just rebuilt (the function behind `samefold rebuild balances`; the
table before the last is dropped, as `samefold views drop` would); else the one that was live before, caught up, as by `samefold
switch balances`. With a rebuild each time the log, which grows meanwhile, would soon take a minute to load. A second lies between
two switches: one on the heels of another finds agents that have not folded anything since. Prints a JSON object a switch; times
are in milliseconds.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from benchmarks.child import flags, tell
from benchmarks.other_code import VIEW, keep_only

REBUILD_EACH = 10
PAUSE_S = 1.0

if TYPE_CHECKING:
    from infra.settings import Settings
    from projections.engine.views.view import View


def main() -> None:
    given = flags("version", "count")
    keep_only([VIEW], given.version)

    from infra.settings import Settings
    from projections.engine.rebuild.rebuild import go_to, rebuild
    from projections.engine.views.core_views import all_views

    settings, views = Settings(), all_views()
    for number in range(given.count):
        if number:
            time.sleep(PAUSE_S)
        began = time.monotonic()
        anew = number % REBUILD_EACH == 0
        switched = rebuild(settings, [VIEW], views).switched if anew else go_to(settings, [VIEW], views)
        assert switched is not None, "a rebuild that makes live switches"
        told = {"rebuilt": anew, "in_all_ms": 1000 * (time.monotonic() - began)}
        tell(told | {name: getattr(switched, name) for name in ("catch_up_ms", "switch_ms", "gap_ms", "tries")})
        _drop_older(settings, views)


def _drop_older(settings: Settings, views: Mapping[str, View]) -> None:
    """The last one stays, to go back to."""
    from projections.engine.rebuild.builds import BuildState, NotDroppable, drop_tables, droppable

    try:
        there = droppable(settings, VIEW, str(views[VIEW].version))
    except NotDroppable:
        return
    if older := [build for build in there if build.state is BuildState.OLD][:-1]:
        drop_tables(settings, older, views[VIEW])


if __name__ == "__main__":
    main()
