"""`samefold send FILE`: commands from JSON lines into the log, and what became of them."""

from pathlib import Path
from typing import Annotated, Any

import typer
from msgspec import UNSET

from commands.client import Sender, answered, read_lines, sealed, wait_for
from infra.settings import Settings
from tools.cli import Json
from tools.terminal import Output, Text, progress, show


def send(
    file: Annotated[Path, typer.Argument(help="JSON lines, plain or .gz; - for standard input.", show_default=False)],
    wait: Annotated[bool, typer.Option("--wait", help="Wait for the outcome of every command.")] = False,
    timeout: Annotated[
        float, typer.Option(help="With --wait: give up after so many seconds without a new outcome.")
    ] = 60,
    operator: Annotated[
        str | None, typer.Option(metavar="NAME", help="Who sends them: recorded as operator:NAME.", show_default=False)
    ] = None,
    as_json: Json = False,
) -> None:
    """Send commands, one JSON object a line: {"stream", "id", "type", "data", "expected_version"?}.

    The type "AddRoom" is version 1 of that command, "AddRoom/2" version 2. Nothing is sent unless every line is a command. Safe
    to run again: a command that has an outcome keeps it.

    access.py is not asked. So --operator can send commands that no caller may send, to repair a business process: docs/policies.md.

    Exit code 1 if a line is wrong or may not be in the log, Kafka is unavailable, an outcome is missing, or an id was used before
    with another command.
    """
    settings = Settings()
    if operator is not None and not operator.strip():
        raise typer.BadParameter("it is empty: name the operator", param_hint="'--operator'")
    lines = read_lines(file, UNSET if operator is None else f"operator:{operator}")
    commands = sealed(settings, lines, file)
    summary: dict[str, Any] = {"sent": len(commands)}
    if wait:
        summary["answered_before"] = answered(settings, commands)
    with progress("sending", len(commands), quiet=as_json) as sent:
        Sender(settings).send(commands, sent, list(lines))
    if wait:
        with progress("outcomes", len(commands), quiet=as_json) as seen:
            summary |= wait_for(settings, commands, seen, timeout_s=timeout).as_dict()
    show(summary, _text, as_json=as_json)
    if summary.get("other_body"):
        raise typer.Exit(1)


def _text(summary: dict[str, Any]) -> Output:
    yield f"{summary['sent']} commands are in the log."
    if "accepted" not in summary:
        return
    yield f"accepted {summary['accepted']}, rejected {summary['rejected']}"
    for code, count in sorted(summary["rejected_by_code"].items()):
        yield f"  {code}: {count}"
    if summary["answered_before"]:
        yield f"{summary['answered_before']} had their answer before: nothing was done again."
    if summary["other_body"]:
        yield Text(f"{summary['other_body']} ids were used before with another command: use new ids.", "red")
