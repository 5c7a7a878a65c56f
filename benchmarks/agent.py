"""An agent's process with only some of the authors' views: `python -m benchmarks.agent --only balances --name NAME`.

The system's views (states of streams, outcomes) are always there. What runs is `projections.engine.live.agent`, unchanged.
"""

from __future__ import annotations

import argparse
import sys
from typing import NoReturn


def main() -> NoReturn:
    from projections.engine.live import agent

    parser = argparse.ArgumentParser(prog="python -m benchmarks.agent")
    parser.add_argument("--only", action="append", default=[])
    arguments, rest = parser.parse_known_args()
    keep_only(arguments.only)
    sys.argv = [sys.argv[0], *rest]
    agent.main()


def keep_only(wanted: list[str]) -> None:
    """Leave all other views of `projections/` out, before any of them is found."""
    import pkgutil

    import projections
    from projections.engine.views import view

    there = {info.name for info in pkgutil.iter_modules(projections.__path__) if not info.ispkg}
    view.NOT_VIEWS.update(there - set(wanted))


if __name__ == "__main__":
    main()
