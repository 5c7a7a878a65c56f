"""The database's tables."""

import sys
from typing import Annotated

import typer

from infra.database import roles as database_roles
from infra.database.connect import session
from infra.settings import Settings
from tools.cli import Json, new_app
from tools.terminal import Stages, print_json, stdout

app = new_app(__doc__, no_args_is_help=True)


@app.command()
def upgrade(as_json: Json = False) -> None:
    """Bring the database to this code's newest migration. Safe to run again, and by several at once.

    Indexes of views are made and dropped before, beside live traffic. Killed meanwhile, run it again: it goes on.
    """
    from tools.migrations import migrate

    with Stages(quiet=as_json) as stages:
        before, after, (made, dropped) = migrate.upgrade(Settings(), stages)
    if as_json:
        print_json({"before": before, "after": after, "made": made, "dropped": dropped})
        return
    for what, names in {"Made": made, "Dropped": dropped}.items():
        for name in names:
            stdout.print(f"{what} index {name}.")
    if before == after:
        stdout.print(f"The database is at migration {' and '.join(after)}, as this code needs it.")
    else:
        stdout.print(f"The database went from migration {' and '.join(before) or 'none'} to {' and '.join(after)}.")


@app.command()
def revision(
    message: Annotated[str, typer.Option("--message", "-m", help="What the migration is for, in a few words.")],
) -> None:
    """Write the migration from the database to what the code declares: tables of new views and raised versions, and indexes.

    Exit code 1 where an existing version's table would have to change: raise the view's version.
    """
    from tools.migrations import migrate

    written = migrate.revise(Settings(), message)
    if written is None:
        stdout.print("Nothing to do: the database has every table that the code declares.")
    else:
        stdout.print(f"Wrote {written}\nRead it, then run `samefold db upgrade`.")


@app.command()
def check() -> None:
    """Compare the database with what the code declares. Exit code 1 where they differ."""
    from tools.migrations import migrate

    migrate.check(Settings())
    stdout.print("The database has exactly the tables that the code declares.")


@app.command()
def roles(
    prefix: Annotated[str, typer.Option(help="What the roles' names begin with.")] = "samefold",
    apply: Annotated[
        bool, typer.Option("--apply", help="Run the SQL, in one transaction, instead of printing it.")
    ] = False,
) -> None:
    """Print the SQL that makes a role for each kind of process and hands the tables to their owner. Safe to run again.

    SAMEFOLD_DATABASE_URL must name an administrator to apply it, anybody to print it.
    """
    with session(Settings(), "samefold db roles") as connection:
        if apply:
            count = database_roles.apply(connection, prefix)
            typer.echo(f"Applied {count} statements. `samefold db password ROLE` sets a role's password.")
        else:
            statements = [statement.as_string(connection) for statement in database_roles.script(connection, prefix)]
            typer.echo("\n".join(f"{line};" for line in ("begin", *statements, "commit")))


@app.command()
def password(role: Annotated[str, typer.Argument(help="A role's whole name, e.g. samefold_api.")]) -> None:
    """Set a role's password, which is asked for, or read from standard input. Only a SCRAM verifier reaches PostgreSQL."""
    if sys.stdin.isatty():
        secret = typer.prompt("Password", hide_input=True, confirmation_prompt=True, err=True)
    else:
        secret = sys.stdin.read().removesuffix("\n").removesuffix("\r")
    if not (secret and secret.isprintable()):
        raise typer.BadParameter("it is empty, or holds a character that no password may", param_hint="the password")
    with session(Settings(), "samefold db password") as connection:
        database_roles.set_password(connection, role, secret)
    typer.echo(f"Set the password of {role}.")
