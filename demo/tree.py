"""The next release of this code: a copy of the tree, in which one read model has changed."""

from __future__ import annotations

import difflib
import os
import shutil
from pathlib import Path

from infra.errors import SamefoldError

FOLDER = "next-release"
VIEW = "balances"
COLUMN = "spent"
"""The next release's additional column: all that was ever withdrawn from an account, in cents."""

PACKAGES = ("domain", "commands", "policies", "projections", "api", "spark_jobs", "infra")
CHANGED = "projections/balances.py"
EDITS = (
    ("VERSION = 1\n", "VERSION = 2\n"),
    ("    closed_on: date | None\n", f"    closed_on: date | None\n    {COLUMN}: int\n"),
    ("event.on, event.on, 0, None)", "event.on, event.on, 0, None, 0)"),
    (
        "    return Balance(row.account, cents, row.overdraft_limit, row.opened_on, event.on, count, row.closed_on)\n",
        f"    {COLUMN} = row.{COLUMN} + max(-change(event), 0)\n"
        f"    return Balance(row.account, cents, row.overdraft_limit, row.opened_on, event.on, count, row.closed_on, {COLUMN})\n",
    ),
)


class NotTheSample(SamefoldError):
    """The view that the demo changes is not the sample's any more."""


def make(folder: Path) -> str:
    """Write the next release into `folder`, which is not there yet; the difference to this one. Raises NotTheSample."""
    here = Path(__file__).parents[1]
    for package in PACKAGES:
        shutil.copytree(here / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    before = (here / CHANGED).read_text()
    after = changed(before)
    (folder / CHANGED).write_text(after)
    lines = difflib.unified_diff(
        before.splitlines(), after.splitlines(), f"a/{CHANGED}", f"b/{CHANGED}", n=0, lineterm=""
    )
    return "\n".join(lines)


def changed(text: str) -> str:
    """The view's file as the next release has it. Raises NotTheSample."""
    for before, after in EDITS:
        if text.count(before) != 1:
            raise NotTheSample(
                f"{CHANGED} is not the sample's any more, so the demo does not know how to change it.",
                "`samefold demo --no-release` ends with the proof.",
            )
        text = text.replace(before, after)
    return text


def environment(folder: Path) -> dict[str, str]:
    """The environment in which a process imports the code in `folder`."""
    others = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": f"{folder}{os.pathsep}{others}" if others else str(folder), "PYTHONSAFEPATH": "1"}
