"""The master key of personal values."""

from datetime import UTC, datetime
from secrets import token_hex
from typing import Annotated

import typer

from domain.engine.personal.keys import Keys
from domain.engine.personal.masters import masters, new_line
from infra.database.connect import session
from infra.settings import Settings
from tools.cli import Json, new_app
from tools.terminal import progress, show

app = new_app(__doc__, no_args_is_help=True)


@app.command()
def new(
    name: Annotated[str | None, typer.Option(help="The key's name; by default today's date and a random part.")] = None,
) -> None:
    """Print a line with a new master key, for the file that SAMEFOLD_MASTER_KEY_FILE names. It is written nowhere else."""
    typer.echo(new_line(name or f"{datetime.now(UTC):%Y-%m-%d}-{token_hex(2)}"))


@app.command()
def rotate(as_json: Json = False) -> None:
    """Wrap every key again with the file's first master key; then the others are not needed. Safe to run again, while all runs."""
    settings = Settings()
    keys = Keys(settings)
    with session(settings, "samefold keys") as connection:
        keys.start(connection)
        with progress("keys", keys.open_count(connection), quiet=as_json) as done:
            count = keys.rotate(connection, done)
        result = {"master": masters(settings).first, "wrapped": count, "left": keys.open_count(connection)}
    left = f" {result['left']} came meanwhile from processes with another file: run it again." if result["left"] else ""
    show(result, lambda _: [f"{count} keys are wrapped with '{result['master']}' now.{left}"], as_json=as_json)
