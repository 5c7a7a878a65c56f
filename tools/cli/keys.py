"""`samefold forget SUBJECT`, and `samefold keys`: the master key, which the keys of personal values are wrapped with."""

from __future__ import annotations

from typing import Annotated

import typer

from tools.cli import Json, Yes


def register(app: typer.Typer) -> None:
    keys = typer.Typer(help="The master key of personal values.", no_args_is_help=True)
    for command in (new, rotate):
        keys.command()(command)
    app.add_typer(keys, name="keys")
    app.command()(forget)


def new(
    name: Annotated[
        str | None, typer.Option(help="What keys will name it by; by default today's date and a random part.")
    ] = None,
) -> None:
    """Print a line with a new master key, for the file that SAMEFOLD_MASTER_KEY_FILE names. It is written nowhere else."""
    from datetime import UTC, datetime
    from secrets import token_hex

    from domain.engine.personal.masters import new_line

    typer.echo(new_line(name or f"{datetime.now(UTC):%Y-%m-%d}-{token_hex(2)}"))


def rotate(as_json: Json = False) -> None:
    """Wrap every key again with the file's first master key; then the others are not needed. Safe to run again, while all runs."""
    from domain.engine.personal.keys import Keys
    from domain.engine.personal.masters import masters
    from infra.database.connect import session
    from infra.settings import Settings
    from tools import terminal

    settings = Settings()
    keys = Keys(settings)
    with session(settings, "samefold keys") as connection:
        keys.start(connection)
        with terminal.progress("keys", keys.open_count(connection), quiet=as_json) as done:
            count = keys.rotate(connection, done)
        result = {"master": masters(settings).first, "wrapped": count, "left": keys.open_count(connection)}
    left = f" {result['left']} came meanwhile from processes with another file: run it again." if result["left"] else ""
    terminal.show(result, lambda _: [f"{count} keys are wrapped with '{result['master']}' now.{left}"], as_json=as_json)


def forget(
    subject: Annotated[
        str, typer.Argument(help="Whom: a stream's name, or what a SubjectId names.", show_default=False)
    ],
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Destroy the keys of a subject: whoever shows their personal values shows the fallback from now on. Final.

    Safe to run again. A subject without keys is forgotten too: nothing personal can be written about them any more.
    """
    from domain.engine.personal.keys import Keys, require_subject
    from infra.database.connect import session
    from infra.settings import Settings
    from tools import terminal

    settings = Settings()
    require_subject(subject)
    keys = Keys(settings)
    if not yes:
        typer.confirm(f"Forget '{subject}' for good? No backup of Samefold's brings it back.", abort=True, err=True)
    with session(settings, "samefold forget") as connection:
        found = keys.forget(connection, subject)
    destroyed = f"{found.keys} {'key was' if found.keys == 1 else 'keys were'} destroyed."
    nothing = "It was forgotten before." if found.before else "Nothing was found under this name: check it."
    terminal.show(
        found._asdict(),
        lambda _: [f"'{subject}' is forgotten. {destroyed if found.keys else nothing}"],
        as_json=as_json,
    )
