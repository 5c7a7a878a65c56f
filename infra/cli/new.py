"""`samefold new`: a service of your own, made of this clone of Samefold."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from infra.errors import SamefoldError

FIRST_MIGRATION = "from infra.database.migrate import revise_without_database as revise; revise('first tables')"


class FolderInUse(SamefoldError):
    """The new service's folder has something in it."""


class NotAClone(SamefoldError):
    """Samefold itself is not a git repository here."""


def register(app: typer.Typer) -> None:
    app.command()(new)


def new(
    folder: Annotated[Path, typer.Argument(help="Where to make it: a folder that is not there yet, or is empty.")],
    context: Annotated[str, typer.Option(help="Its first bounded context, in lower case and the plural.")],
    name: Annotated[str | None, typer.Option(help="The service's name; by default the folder's.")] = None,
) -> None:
    """Make a new service: Samefold's files, and a first context with an event, a command, a view and their tests.

    Needs no network. The service is a git repository of its own; `samefold update` brings it newer versions of Samefold.
    """
    from infra.scaffold import copying
    from infra.scaffold.names import module, names_of
    from infra.scaffold.parts import SKELETON, Parts

    root = Path(__file__).parents[2]
    folder = folder.expanduser().resolve()
    name = module(name or folder.name.replace("-", "_"), "a service", "hotel")
    names = names_of(context)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FolderInUse(f"{folder} is not empty.", "Name a folder that is not there yet.")
    if not (root / ".git").exists():
        raise NotAClone(
            f"{root} is not a git repository, from which a service could be updated.", "Clone Samefold with git."
        )
    typer.echo(f"Copying Samefold's files into {folder}")
    if copying.git(root, "status", "--porcelain"):
        typer.echo(f"Changes in {root} that are not committed are left out.", err=True)
    copying.copy(root, folder, name)
    written = Parts(folder).service(context)
    readme = names.told((SKELETON / "readme.txt").read_text()).replace("SERVICE", name)
    (folder / "README.md").write_text(readme)
    subprocess.run(
        [sys.executable, "-c", FIRST_MIGRATION],
        env=os.environ | {"PYTHONPATH": str(folder), "PYTHONSAFEPATH": "1"},
        cwd=folder,
        check=True,
    )
    copying.git(folder, "init", "--quiet", "--initial-branch", "main")
    copying.git(folder, "add", "--all")
    copying.git(
        folder, "commit", "--quiet", "--message", f"{name}, made with Samefold {copying.answers(folder)['_commit']}"
    )
    for file in (
        *written.files,
        *sorted(path.relative_to(folder) for path in folder.glob("projections/migrations/*.py")),
    ):
        typer.echo(f"wrote  {file}")
    typer.echo(
        f"\nNext:\n"
        f"  1. cd {folder}\n"
        f"  2. make run      sets it up and starts everything; README.md has a command to try\n"
        f"  3. make test     its tests, on a real Kafka and PostgreSQL\n"
        f"  4. Say in domain/{context}.py what {context} are; `samefold add --help` writes more events, commands and views."
    )
