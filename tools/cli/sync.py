"""`samefold sync`: the development stack as the saved code needs it."""

from pathlib import Path
from typing import Any

import typer

from infra.database.connect import session
from infra.processes.locks import locked
from infra.settings import Settings
from tools.cli import Json
from tools.cli.dev import AlreadyRunning
from tools.dev.stack import development_stack
from tools.terminal import show

_RUNNING = r"""
select distinct split_part(application_name, ' ', 2) from pg_stat_activity
 where datname = current_database() and application_name ~ '^samefold \S+-(agent|handler|policies)-' order by 1
"""
"""Those that fold, decide or react."""


def sync(as_json: Json = False) -> None:
    """Bring the development stack to the saved code, once: migrations, tables, rows and policies. Needs no running process.

    What was never released may change under its version: its migration is rewritten and its rows are folded again.
    """
    from tools.sync import sync as run

    settings = Settings()
    development_stack(settings)
    steps: list[str] = []

    def say(step: str, _file: Path | None = None) -> None:
        steps.append(step)
        if not as_json:
            typer.echo(step)

    with locked(settings.data_dir / "run.lock") as is_only:
        if not is_only:
            raise AlreadyRunning(
                f"The service in {settings.data_dir} is running, with the code of its start.",
                "Stop it first: Ctrl-C in its terminal. Or start it with `--watch`, then it follows each saved file.",
            )
        with session(settings, "samefold sync") as connection:
            running = connection.execute(_RUNNING).fetchall()
        if running:
            raise AlreadyRunning(
                f"Processes of the service run, with the code of their start: {', '.join(name for (name,) in running)}.",
                "Stop them first.",
            )
        run(settings, say, lambda _: None)

    def text(_: Any) -> list[str]:
        return [] if steps else ["Nothing to do: the development stack is as this code needs it."]

    show({"steps": steps}, text, as_json=as_json)
