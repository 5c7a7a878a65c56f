"""`samefold console`: the console of the API that runs, in a browser."""

from typing import Annotated

import httpx
import typer

from infra.errors import SamefoldError
from infra.settings import Settings

ANSWER_S = 5.0


class NoConsole(SamefoldError):
    """No API that serves the console answers."""


def console(
    url: Annotated[str, typer.Option(help="The API's address; by default where the settings let it listen.")] = "",
    browser: Annotated[bool, typer.Option("--open/--no-open", help="Open it, or only print its address.")] = True,
) -> None:
    """Open the console: pages that show what runs, what waits and what happened. The API serves it where SAMEFOLD_CONSOLE=on."""
    settings = Settings()
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.api_host, settings.api_host)  # noqa: S104
    host = f"[{host}]" if ":" in host else host
    address = f"{url.rstrip('/') or f'http://{host}:{settings.api_port}'}/console"
    try:
        answer = httpx.get(f"{address}/static/console.css", timeout=ANSWER_S)
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise NoConsole(
            f"Nothing answers at {address}: {error}.", "Start the API: `make run`, or `samefold run api`."
        ) from None
    if not answer.is_success:
        raise NoConsole(f"The API at {address} serves no console.", "Start it with SAMEFOLD_CONSOLE=on.")
    typer.echo(address)
    if browser:
        typer.launch(address)
