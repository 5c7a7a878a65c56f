"""Kafka and PostgreSQL on this machine, under one data folder, without Docker."""

import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from infra.errors import SamefoldError
from infra.processes import warm
from infra.processes.interrupts import one_interrupt
from infra.processes.locks import locked
from infra.settings import Settings
from tools.cli import Json, Yes, confirm, new_app
from tools.dev.issuer import ISSUER
from tools.dev.stack import OtherServices, Stack, development_stack, make_folder
from tools.terminal import Output, show


class AlreadyRunning(SamefoldError):
    """Another `samefold dev run` uses this data folder, or another program the API's port."""


app = new_app(__doc__, no_args_is_help=True)


@app.command()
def up() -> None:
    """Start both, or repair what was killed; quick when they run."""
    stack = development_stack(Settings())
    stack.up()
    typer.echo(f"Kafka       {stack.kafka.bootstrap}")
    typer.echo(f"PostgreSQL  {stack.postgres.url()}")
    typer.echo(f"Data        {stack.folder}")
    typer.echo("\nNext: `samefold db upgrade`, then `samefold run all`. To stop: `samefold dev down`.")


@app.command()
def run(
    watch: Annotated[bool, typer.Option("--watch", help="Follow saved files: `samefold sync`, and a restart.")] = False,
) -> None:
    """Start both, bring tables and topics up to date, and run all processes. One Ctrl-C stops all; the data stays."""
    settings = Settings()
    stack = development_stack(settings)
    with _only_one(settings), one_interrupt():
        if watch:
            warm.prepare()
        try:
            stack.up()
            settings = Settings()
            url = f"http://{settings.api_host}:{settings.api_port}"
            shown = f"{url}/docs. What it takes and shows: {url}/openapi.json" if settings.shows_docs else url
            if settings.console:
                typer.echo(f"The console: {url}/console")
            typer.echo(f"The API: {shown}. Ctrl-C stops everything.")
            _follow(settings) if watch else _run_all(settings)
        finally:
            stack.down()


def _follow(settings: Settings) -> None:
    from tools.dev import watch

    watch.run(settings)


def _run_all(settings: Settings) -> None:
    from infra.log.topics import ensure
    from policies.engine.activations import start_all
    from tools.cli.run import run_all
    from tools.migrations.migrate import upgrade

    upgrade(settings)
    ensure(settings)
    start_all(settings)
    run_all()


@contextmanager
def _only_one(settings: Settings) -> Iterator[None]:
    """Refuse a second run, which at its end would stop the first one's Kafka and PostgreSQL, and one on a port that is taken.

    The port has a lock too: another service that has just started does not listen yet. Raises AlreadyRunning, FolderUnusable.
    """
    make_folder(settings.data_dir)
    port = f"samefold-{os.getuid()}-port-{settings.api_port}.lock"
    port_in_use = AlreadyRunning(
        f"Port {settings.api_port} of {settings.api_host} is in use.",
        "Stop what listens there, or set SAMEFOLD_API_PORT.",
    )
    with locked(settings.data_dir / "run.lock") as is_only, locked(Path(tempfile.gettempdir()) / port) as has_port:
        if not is_only:
            raise AlreadyRunning(
                f"The service in {settings.data_dir} is already running.", "Stop it first: Ctrl-C in its terminal."
            )
        if settings.api_port and not has_port:  # 0: each takes a free one
            raise port_in_use
        with suppress(OSError), socket.create_connection((settings.api_host, settings.api_port), 1):
            raise port_in_use
        yield


@app.command()
def down() -> None:
    """Stop both; the data stays."""
    _stack().down()
    typer.echo("Stopped. The data is still there: `samefold dev up` goes on, `samefold dev reset` removes it.")


@app.command()
def status(as_json: Json = False) -> None:
    """What runs, where, and where it logs. Exit code 1 unless both answer."""

    def text(found: Any) -> Output:
        for name, service in (("Kafka", found["kafka"]), ("PostgreSQL", found["postgres"])):
            state = (
                "answers" if service["answers"] else "runs, but does not answer" if service["running"] else "is down"
            )
            yield f"{name:<12}{state:<28}{service['endpoint'] or ''}  (log: {service['log']})"

    found = _stack().status()
    show(found, text, as_json=as_json)
    if not (found["kafka"]["answers"] and found["postgres"]["answers"]):
        raise typer.Exit(1)


@app.command()
def reset(yes: Yes = False) -> None:
    """Stop both and remove their data."""
    stack = _stack()
    confirm(f"Remove all of Kafka's and PostgreSQL's data in {stack.folder}?", yes=yes)
    with locked(stack.folder / "run.lock") if stack.folder.is_dir() else nullcontext(enter_result=True) as is_only:
        if not is_only:
            raise AlreadyRunning(f"The service in {stack.folder} is running.", "Stop it first: Ctrl-C in its terminal.")
        stack.reset()
    typer.echo("Removed.")


@app.command()
def token(
    subject: Annotated[str, typer.Option(help="The token's subject.")],
    role: Annotated[list[str] | None, typer.Option(help="A role of the subject; may be repeated.")] = None,
    scope: Annotated[list[str] | None, typer.Option(help="A scope, like metrics; may be repeated.")] = None,
    minutes: Annotated[float, typer.Option(min=0.1, max=525_600, help="How long it is valid.")] = 60,
) -> None:
    """Print a token that the API takes where SAMEFOLD_AUTH=jwt. The stack must be up."""
    stack, settings = _stack(), Settings()
    if settings.jwt_issuer != ISSUER or settings.jwt_keys != str(stack.issuer.keys):
        raise OtherServices(
            f"The settings name another issuer than the development stack's: {settings.jwt_issuer or 'none'}.",
            "Run `samefold dev up`, and leave SAMEFOLD_JWT_ISSUER and SAMEFOLD_JWT_KEYS unset; or ask that issuer for a token.",
        )
    typer.echo(stack.issuer.token(subject, role or (), scope or (), minutes))


def _stack() -> Stack:
    return Stack(Settings().data_dir)
