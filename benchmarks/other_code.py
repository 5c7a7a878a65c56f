"""A process with other read models than this code's: `python -m benchmarks.other_code ONLY VERSION AGENT MODULE [ARGUMENT…]`.

Of the authors' views it has those that ONLY names, with commas between, and all of a folder that it names; VERSION and AGENT are
those of `balances`, as a later deployment would bring them, and it has no indexes, as the peers' tables have none. What runs is the
product's own MODULE, unchanged.
"""

from __future__ import annotations

import pkgutil
import runpy
import sys
from collections.abc import Collection

from projections import balances
from projections.engine.views.view import CORE

VIEW = "balances"
FIRST = balances.VERSION
"""The version that this code has of it."""


def keep_only(wanted: Collection[str], version: int = FIRST, agent: str = CORE) -> None:
    """Leave all other views of `projections/` out, before any of them is found."""
    import projections
    from projections.engine.views import view

    projections.__path__ += [name for name in wanted if "/" in name]
    there = {info.name for info in pkgutil.iter_modules(projections.__path__) if not info.ispkg}
    view.NOT_VIEWS.update(there - set(wanted))
    balances.VERSION = version
    vars(balances).update(AGENT=agent, INDEXES=())


def main() -> None:
    _, only, version, agent, *rest = sys.argv
    keep_only(only.split(","), int(version), agent)
    sys.argv = rest
    runpy.run_module(rest[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
