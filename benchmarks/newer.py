"""A process of later code: `python -m benchmarks.newer 2 projections.engine.live.agent --name NAME`.

The view `balances` with its version raised, as a deployment would bring it, and of the authors' views this one alone.
"""

from __future__ import annotations

import runpy
import sys

VIEW = "balances"


def raise_version(version: int) -> None:
    """Before any view is found."""
    from benchmarks.agent import keep_only
    from projections import balances

    keep_only([VIEW])
    balances.VERSION = version


def main() -> None:
    _, version, *rest = sys.argv
    raise_version(int(version))
    sys.argv = rest
    runpy.run_module(rest[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
