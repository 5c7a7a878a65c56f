"""`samefold processes`: what the processes of policies wait for, and since when."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infra.cli import Json

if TYPE_CHECKING:
    from rich.console import RenderableType

    from policies.engine.processes import ProcessNow, Wait


def register(app: typer.Typer) -> None:
    app.command()(processes)


def processes(
    policy: Annotated[str | None, typer.Option(help="Of this policy only.")] = None,
    stuck: Annotated[bool, typer.Option("--stuck", help="Only what goes on when a person does something.")] = False,
    limit: Annotated[int, typer.Option(min=1, help="Show so many, the oldest ones.")] = 100,
    as_json: Json = False,
) -> None:
    """What policies wait for, by the stream whose events they react to."""
    from infra import terminal
    from infra.settings import Settings
    from policies.engine.operate import require_known
    from policies.engine.policy import discover
    from policies.engine.processes import processes as waiting

    settings = Settings()
    found = waiting(settings, policy=policy, stuck=stuck, limit=limit)
    if policy is not None and not found:
        require_known(settings, policy, discover())

    def text(_: Any) -> Iterator[RenderableType]:
        if not found:
            yield "No process is stuck." if stuck else "No process waits for anything."
            return
        yield terminal.table(("policy", "stream", "since", "waits for"), (row for one in found for row in _rows(one)))
        if len(found) == limit:
            yield "There may be more: --limit"
        if any(one.stuck for one in found):
            yield "`samefold outbox retry ID` or `drop ID` for what is dead, `samefold parked show VIEW STREAM` for what is parked."

    terminal.show({"processes": found}, text, as_json=as_json)


def _rows(one: ProcessNow) -> Iterator[tuple[Any, ...]]:
    from infra.terminal import Text

    for number, wait in enumerate(one.first):
        what = Text(_plainly(wait), "red") if wait.why else _plainly(wait)
        yield (*((one.policy, one.stream) if number == 0 else ("", "")), wait.since and f"{wait.since:%F %T}", what)
    if one.waits > len(one.first):
        yield "", "", "", f"and {one.waits - len(one.first):,} more"


def _plainly(wait: Wait) -> str:
    until = f" until {wait.until:%F %T}" if wait.until else ""
    command = f" {wait.type or ''} to {wait.target} ({wait.id})" if wait.target else f" ({wait.id})" if wait.id else ""
    return f"{wait.what}{until}{command}{f': {wait.why}' if wait.why else ''}"
