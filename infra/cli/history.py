"""`samefold history STREAM`: a stream's events, from the log itself."""

from __future__ import annotations

from typing import Annotated, Any

import typer


def register(app: typer.Typer) -> None:
    app.command()(history)


def history(
    stream: Annotated[str, typer.Argument(help="A stream's name, e.g. rooms/12.")],
    void: Annotated[
        bool, typer.Option("--void", help="Show the stream's void records too: they have no effect.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """Show what happened to a stream, in order: accepted events and recorded rejections."""
    from rich.table import Table

    from infra.log.history import history_of
    from infra.settings import Settings
    from infra.terminal import print_json, stdout

    entries = list(history_of(Settings(), stream))
    if not void:
        entries = [entry for entry in entries if entry["void"] is None]
    if as_json:
        for entry in entries:
            print_json(entry)
        return
    if not entries:
        stdout.print(f"Nothing has happened to '{stream}' (names are case-sensitive).")
        return
    table = Table("version", "time", "what", "data", "command", "at")
    for entry in entries:
        for row in _rows(entry):
            table.add_row(*row)
    stdout.print(table)


def _rows(entry: dict[str, Any]) -> list[tuple[str, ...]]:
    import json

    from rich.markup import escape

    where = f"{entry['partition']}:{entry['offset']}"
    time = entry["time"][:19].replace("T", " ")
    tail = (escape(entry["command_id"]), where)
    if entry["void"]:
        return [("", time, f"[dim]void ({entry['void']})[/dim]", "", *tail)]
    if entry["reason"]:
        return [
            (
                "",
                time,
                f"[yellow]rejected: {escape(entry['reason']['code'])}[/yellow]",
                escape(entry["reason"]["message"]),
                *tail,
            )
        ]
    first = entry["version"] - len(entry["events"]) + 1
    return [
        (str(first + index), time, event["type"], escape(json.dumps(event["data"], ensure_ascii=False)), *tail)
        for index, event in enumerate(entry["events"])
    ]
