"""The next release of this code: a copy of the tree, in which an event has a new version, and a read model a column from it."""

from __future__ import annotations

import difflib
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from infra.errors import SamefoldError

FOLDER = "next-release"
EVENT = "MoneyDeposited"
"""The event that has a currency from the next release on. Those that are in the log by then are in CZK."""
VIEW = "balances"
COLUMN = "deposited"
"""The next release's additional column: all that was ever deposited into an account in CZK, in cents."""

PACKAGES = ("domain", "commands", "policies", "projections", "api", "spark_jobs", "infra", "tools")
ACCOUNTS, BALANCES = "domain/accounts.py", f"projections/{VIEW}.py"
EDITS: Mapping[str, Sequence[tuple[str, str]]] = {
    ACCOUNTS: (
        (
            "class MoneyDeposited:\n    cents: Cents\n",
            "class MoneyDeposited:\n    VERSION: ClassVar[int] = 2\n    cents: Cents\n    currency: Text\n",
        ),
        (
            "@fact\nclass MoneyWithdrawn:\n",
            "@upcaster(MoneyDeposited, 1)\ndef with_currency(body: Body) -> Body:\n"
            '    return {**body, "currency": "CZK"}\n\n\n@fact\nclass MoneyWithdrawn:\n',
        ),
        ("[MoneyDeposited(cents=cents, on=on,", '[MoneyDeposited(cents=cents, currency="CZK", on=on,'),
    ),
    BALANCES: (
        ("VERSION = 2\n", "VERSION = 3\n"),
        ("AccountOpened, Movement, change", "AccountOpened, MoneyDeposited, Movement, change"),
        ("    owner: str\n", f"    owner: str\n    {COLUMN}: int\n"),
        ("0, None, event.owner)", "0, None, event.owner, 0)"),
        (
            "    return Balance("
            "row.account, cents, row.overdraft_limit, row.opened_on, event.on, count, row.closed_on, row.owner)\n",
            '    is_czk = isinstance(event, MoneyDeposited) and event.currency == "CZK"\n'
            f"    {COLUMN} = row.{COLUMN} + (change(event) if is_czk else 0)\n"
            "    return Balance(\n"
            f"        row.account, cents, row.overdraft_limit, row.opened_on, event.on, count, row.closed_on, row.owner, {COLUMN}\n"
            "    )\n",
        ),
    ),
}


class NotTheSample(SamefoldError):
    """A file that the demo changes is not the sample's any more."""


def make(folder: Path) -> str:
    """Write the next release into `folder`, which is not there yet; the difference to this one. Raises NotTheSample."""
    here = Path(__file__).parents[1]
    for package in PACKAGES:
        shutil.copytree(here / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    lines: list[str] = []
    for name in EDITS:
        before = (here / name).read_text()
        after = changed(name, before)
        (folder / name).write_text(after)
        lines += difflib.unified_diff(
            before.splitlines(), after.splitlines(), f"a/{name}", f"b/{name}", n=0, lineterm=""
        )
    return "\n".join(lines)


def changed(name: str, text: str) -> str:
    """A file as the next release has it. Raises NotTheSample."""
    for before, after in EDITS[name]:
        if text.count(before) != 1:
            raise NotTheSample(
                f"{name} is not the sample's any more, so the demo does not know how to change it.",
                "`samefold demo --no-release` ends with the proof.",
            )
        text = text.replace(before, after)
    return text


def environment(folder: Path) -> dict[str, str]:
    """The environment in which a process imports the code in `folder`."""
    others = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": f"{folder}{os.pathsep}{others}" if others else str(folder), "PYTHONSAFEPATH": "1"}
