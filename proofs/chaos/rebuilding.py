"""A builder's process, which rebuilds views and switches to them.

`python -m proofs.chaos.armed proofs.chaos.rebuilding --name NAME VIEW…`
Exit code 0 when they are live, 3 after a named error; any other is a defect.
"""

from __future__ import annotations

import argparse
import sys

from infra.errors import SamefoldError
from infra.settings import Settings
from projections.engine.rebuild.rebuild import rebuild
from projections.engine.views.core_views import all_views

NAMED_ERROR = 3


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--name", required=True)
    parser.add_argument("views", nargs="+")
    arguments = parser.parse_args()
    try:
        # one process: the points are armed in this one
        rebuilt = rebuild(Settings(), arguments.views, all_views(), processes=1)
    except SamefoldError as error:
        print(f"{error.code}: {error}", flush=True)
        return NAMED_ERROR
    print(rebuilt, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
