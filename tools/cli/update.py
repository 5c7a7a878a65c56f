"""`samefold update`: a newer Samefold in a service that `samefold new` made."""

import re
from pathlib import Path
from typing import Annotated

import typer

from projections.engine.views.core_views import OUTCOMES
from tools.scaffold import copying

VERSION = re.compile(r"^OUTCOMES_VERSION = (\d+)", re.MULTILINE)


def update(
    to: Annotated[
        str | None, typer.Option(metavar="REF", help="A release, branch or commit; by default the newest release.")
    ] = None,
    source: Annotated[
        Path | None, typer.Option("--from", help="A clone of Samefold on this machine, in place of its public address.")
    ] = None,
) -> None:
    """Take over a newer Samefold. Your files stay as they are; changes that you made to Samefold's files are merged.

    Exit code 1 if a change of yours could not be merged: the files are listed.
    """
    root = Path(__file__).parents[2]
    before = _outcomes_version(root)
    done = copying.update(root, to, source)
    if done.before == done.after:
        typer.echo(f"Samefold is at {done.after} already.")
        return
    typer.echo(f"Samefold went from {done.before} to {done.after}.")
    steps = []
    if done.conflicts:
        typer.echo("Your change and the newer one conflict in:", err=True)
        typer.echo("\n".join(f"  {file}" for file in done.conflicts), err=True)
        steps += ["Decide at the marks (<<<<<<<) in these files, then `git add` them"]
    if done.removed:
        typer.echo("The newer Samefold does not have these files, which you changed:", err=True)
        typer.echo("\n".join(f"  {file}" for file in done.removed), err=True)
        steps += ["Carry over your change (`git show HEAD:FILE` shows it), or keep the file: `git checkout HEAD FILE`"]
    steps += [
        "make setup, make check, make test",
        "git add --all, git diff --cached, git commit",
        "samefold doctor, with the environment of each deployment: it names what does not fit this release",
        'samefold db upgrade, deploy: in the order of docs/operating.md, "Deploying a release"',
    ]
    if not (root / "access.py").exists():
        steps += ["Before SAMEFOLD_AUTH=jwt: write access.py, which this service does not have yet (docs/access.md)"]
    after = _outcomes_version(root)
    if before != after:
        steps += [f"samefold rebuild: view '{OUTCOMES}' is at version {after} now"]
    typer.echo("\nNext:")
    for number, step in enumerate(steps, 1):
        typer.echo(f"  {number}. {step}")
    if done.conflicts or done.removed:
        raise typer.Exit(1)


def _outcomes_version(root: Path) -> str:
    """The version of Samefold's own view in the code on disk, which may not be importable before `make setup`."""
    [version] = VERSION.findall((root / "projections/engine/views/core_views.py").read_text())
    return str(version)
