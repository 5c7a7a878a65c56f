"""What a task of the Spark agent runs in a test: other views than this code's, and fault points at which its process dies.

The orders are files in a folder, named after the point; who renames one first is struck. So a test knows when it happened, and
no process is struck twice.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

from infra.database.connect import DatabaseUnavailable
from infra.processes import faultpoints
from infra.processes.faultpoints import Point
from projections.engine.views.core_views import agent_views
from projections.engine.views.view import View
from spark_jobs.engine import stream
from spark_jobs.engine.stream import Share
from tests.engine.projections.bankviews import BALANCES_2, BROKEN, CORRECTED, parking, stopping, view, with_views
from tools.testing.waiting import until

_fold = stream.fold
ENDING = BROKEN.replace('raise ValueError("can\'t take this")', "__import__('os').kill(__import__('os').getpid(), 9)")

CODES = {
    "this": lambda: agent_views("core"),
    "next": lambda: with_views({"balances": view(BALANCES_2, "balances")}),
    "parking": lambda: parking(BROKEN),
    "stopping": lambda: stopping(BROKEN),
    "ending": lambda: stopping(CORRECTED) | {"sums": stopping(ENDING)["sums"]},
}
"""The views of other code, by a name that can be sent to a task."""


@cache
def views_of(code: str) -> Mapping[str, View]:
    return CODES[code]()


@dataclass(frozen=True, slots=True)
class Armed:
    """`stream.fold` for a test. `folder` is where orders lie."""

    folder: Path
    code: str = "this"

    def __call__(self, share: Share, batches: Iterable[Any]) -> Iterator[Any]:
        with (
            patch.object(faultpoints, "hook", self.reach),
            patch.object(stream, "agent_views", lambda _agent: dict(views_of(self.code))),
        ):
            yield from _fold(share, batches)

    def reach(self, point: Point) -> None:
        action = taken(self.folder / point)
        if action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif action == "away":
            raise DatabaseUnavailable("The database is away, says the test.")
        elif action == "hold":
            until((self.folder / "release").exists, "the test lets the task go on")


def order(folder: Path, point: Point, action: str) -> Path:
    """Give an order; the file that is there as soon as it is carried out."""
    draft = folder / "draft"
    draft.write_text(action)
    struck = folder / f"{point}.struck"
    struck.unlink(missing_ok=True)
    draft.rename(folder / point)
    return struck


def taken(given: Path) -> str:
    """What a process is to do here; the first one that asks takes it."""
    struck = given.with_name(f"{given.name}.struck")
    try:
        given.rename(struck)
    except FileNotFoundError:
        return ""
    return struck.read_text()
