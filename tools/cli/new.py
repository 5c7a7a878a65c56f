"""`samefold new`: make a new service from this clone of Samefold."""

import os
import shlex
import shutil
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from tools.scaffold import copying
from tools.scaffold.names import check_context, check_service, names_of
from tools.scaffold.parts import SKELETON, Parts

FIRST_MIGRATION = "from tools.migrations.migrate import revise_without_database as revise; revise('first tables')"


def new(
    folder: Annotated[Path, typer.Argument(help="The service's folder: a new or an empty one.")],
    context: Annotated[str, typer.Option(help="Its first bounded context, in lower case and the plural.")],
    name: Annotated[str | None, typer.Option(help="The service's name; by default the folder's.")] = None,
) -> None:
    """Make a new service: Samefold's files, and a first context with an event, a command, a view and their tests.

    Needs no network. The service is a git repository of its own; `samefold update` brings it newer versions of Samefold.
    """
    root = Path(__file__).parents[2]
    folder = folder.expanduser().resolve()
    name = name or folder.name.replace("-", "_")
    check_service(name, root / "requirements")
    check_context(context)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise copying.NotCopied(f"{folder} is not empty.", "Name a new folder.")
    if not (root / ".git").exists():
        raise copying.NotCopied(
            f"{root} is not a git repository, so a service could not be updated.", "Clone Samefold with git."
        )
    typer.echo(f"Copying Samefold's files into {folder}")
    if copying.git(root, "status", "--porcelain"):
        typer.echo(f"Changes in {root} that are not committed are left out.", err=True)
    with ExitStack() as undone:  # no half of a service is left behind, which the next try would find not empty
        if folder.exists():
            undone.callback(folder.mkdir, exist_ok=True)
        undone.callback(shutil.rmtree, folder, ignore_errors=True)
        copying.copy(root, folder, name)
        written = Parts(folder).service(context).files
        readme = names_of(context).apply((SKELETON / "readme.txt").read_text()).replace("SERVICE", name)
        (folder / "README.md").write_text(readme)
        here = os.environ | {"PYTHONPATH": str(folder), "PYTHONSAFEPATH": "1"}
        copying.run([sys.executable, "-c", FIRST_MIGRATION], folder, here)
        copying.git(folder, "init", "--quiet", "--initial-branch", "main")
        copying.git(folder, "add", "--all")
        message = f"{name}, made with Samefold {copying.answers(folder)['_commit']}"
        copying.git(folder, "commit", "--quiet", "--no-verify", "--no-gpg-sign", "--message", message)
        undone.pop_all()
    for file in (*written, *(file.relative_to(folder) for file in folder.glob("projections/migrations/*.py"))):
        typer.echo(f"wrote  {file}")
    typer.echo(
        f"\nNext:\n"
        f"  1. cd {shlex.quote(str(folder))}\n"
        f"  2. make run      sets it up and starts everything; README.md has a command to try\n"
        f"  3. make test     its tests, on a real Kafka and PostgreSQL\n"
        f"  4. Edit domain/{context}.py; `samefold add --help` writes more events, commands and views."
    )
