"""`samefold update`: a newer Samefold in a service that `samefold new` made."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

VERSIONS = """
import json
from projections.engine.views.core_views import agent_views, outcomes_view
print(json.dumps({view.name: view.version for view in [outcomes_view()]}))
"""


def register(app: typer.Typer) -> None:
    app.command()(update)


def update(
    to: Annotated[
        str | None, typer.Option(metavar="REF", help="A release, branch or commit; by default the newest release.")
    ] = None,
    source: Annotated[
        Path | None, typer.Option("--from", help="A clone of Samefold on this machine, in place of its public address.")
    ] = None,
) -> None:
    """Take over a newer Samefold. Your files stay as they are; changes that you made to Samefold's are merged.

    Exit code 1 where a change of yours and a newer one conflict: the files are listed, with marks where to decide.
    """
    from infra.scaffold.copying import update

    root = Path(__file__).parents[2]
    before = _versions(root)
    done = update(root, to, source)
    if done.before == done.after and not done.conflicts:
        typer.echo(f"Samefold is at {done.after} already.")
        return
    typer.echo(f"Samefold went from {done.before} to {done.after}.")
    if done.conflicts:
        typer.echo("Your change and the newer one conflict in:", err=True)
        for file in done.conflicts:
            typer.echo(f"  {file}", err=True)
        typer.echo("  → Decide at the marks (<<<<<<<) and `git add` the files, then run `make check`.", err=True)
        raise typer.Exit(1)
    steps = ["make setup, make check, make test", "git diff, git commit", "samefold db upgrade, deploy"]
    steps += [
        f"samefold rebuild: view '{view}' is at version {version} now"
        for view, version in _versions(root).items()
        if before.get(view) != version
    ]
    typer.echo("\nNext:")
    for number, step in enumerate(steps, 1):
        typer.echo(f"  {number}. {step}")


def _versions(root: Path) -> dict[str, int]:
    """The versions of Samefold's own views, as the code on disk has them."""
    told = subprocess.run(
        [sys.executable, "-c", VERSIONS],
        env=os.environ | {"PYTHONPATH": str(root)},
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    found: dict[str, int] = json.loads(told.stdout) if told.returncode == 0 else {}
    return found
