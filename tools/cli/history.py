"""`samefold history STREAM`: a stream's events, from the log itself."""

import json
from collections.abc import Iterator
from typing import Annotated, Any

import msgspec
import typer

from domain.engine.contexts import UnreadableEvent, contexts, decode_event
from infra.archive.whole_log import history_of
from infra.settings import Settings
from tools.cli import StreamName
from tools.terminal import Text, opened, print_json, stdout, table


def history(
    stream: StreamName,
    void: Annotated[
        bool, typer.Option("--void", help="Show the stream's void records too: they have no effect.")
    ] = False,
    stored: Annotated[
        bool,
        typer.Option(
            "--stored", help="Show events of older versions as the log has them, not as this code reads them."
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """Show what happened to a stream, in order: accepted events and recorded rejections."""
    settings = Settings()
    entries = [entry for entry in history_of(settings, stream) if void or entry["void"] is None]
    if not entries and (name := stream.partition("/")[0]) not in contexts():
        raise typer.BadParameter(f"there is no context '{name}'; this code has {', '.join(contexts()) or 'none'}")
    if not stored:
        for entry in entries:
            entry["events"] = [_of_today(stream, event) for event in entry["events"]]
    entries = opened(settings, entries)
    if as_json:
        for entry in entries:
            print_json(entry)
    elif not entries:
        stdout.print(f"Nothing has happened to '{stream}' (names are case-sensitive).", markup=False)
    else:
        rows = (row for entry in entries for row in _rows(entry))
        columns = ["version", "time", "what", "data", "command", "at"]
        columns += ["by"] if any("by" in entry for entry in entries) else []
        stdout.print(table(columns, (row[: len(columns)] for row in rows)))


def _of_today(stream: str, event: dict[str, Any]) -> dict[str, Any]:
    """The event as this code reads it, with its stored type as `stored`; one that it can't read as it is stored, with the error."""
    context = contexts().get(stream.partition("/")[0])
    if context is None or event["type"] not in context.readers:
        return event
    kind, _ = context.stored[context.readers[event["type"]][0]]
    if kind == event["type"]:
        return event
    try:
        read = decode_event(context, event["type"], msgspec.json.encode(event["data"]))
    except UnreadableEvent as error:
        return event | {"unreadable": str(error)}
    return {"type": kind, "data": msgspec.to_builtins(read), "stored": event["type"]}


def _rows(entry: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
    time = entry["time"][:19].replace("T", " ")
    tail = (entry["command_id"], f"{entry['partition']}:{entry['offset']}", entry.get("by", ""))
    if entry["void"]:
        yield ("", time, Text(f"void ({entry['void']})", "dim"), "", *tail)
    elif entry["reason"]:
        reason = entry["reason"]
        yield ("", time, Text(f"rejected: {reason['code']}", "yellow"), reason["message"], *tail)
    else:
        first = entry["version"] - len(entry["events"]) + 1
        for version, event in enumerate(entry["events"], first):
            what = f"{event['type']}, stored as {event['stored']}" if "stored" in event else event["type"]
            what += ", unreadable for this code" if "unreadable" in event else ""
            yield (version, time, what, json.dumps(event["data"], ensure_ascii=False), *tail)
