"""`samefold db`: the database's tables, by migrations."""

from __future__ import annotations

from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    group = typer.Typer(help="The database's tables.", no_args_is_help=True)
    group.command()(upgrade)
    group.command()(revision)
    group.command()(check)
    app.add_typer(group, name="db")


def upgrade(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False) -> None:
    """Bring the database to this code's newest migration. Safe to run again, and by several at once."""
    from infra.database import migrate
    from infra.settings import Settings
    from infra.terminal import print_json, stdout

    before, after = migrate.upgrade(Settings())
    if as_json:
        print_json({"before": before, "after": after})
    elif before == after:
        stdout.print(f"The database is at migration {' and '.join(after)}, as this code needs it.")
    else:
        stdout.print(f"The database went from migration {' and '.join(before) or 'none'} to {' and '.join(after)}.")


def revision(
    message: Annotated[str, typer.Option("--message", "-m", help="What the migration is for, in a few words.")],
) -> None:
    """Write the migration from the database to what the code declares: tables of new views and raised versions.

    Exit code 1 where an existing version's table would have to change: raise the view's version.
    """
    from infra.database import migrate
    from infra.settings import Settings
    from infra.terminal import stdout

    written = migrate.revise(Settings(), message)
    if written is None:
        stdout.print("Nothing to do: the database has every table that the code declares.")
    else:
        stdout.print(f"Wrote {written}\nRead it, then run `samefold db upgrade`.")


def check() -> None:
    """Compare the database with what the code declares. Exit code 1 where they differ."""
    from infra.database import migrate
    from infra.settings import Settings
    from infra.terminal import stdout

    migrate.check(Settings())
    stdout.print("The database has exactly the tables that the code declares.")
