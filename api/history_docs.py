"""What `/openapi.json` says of the routes that show a stream's events."""

from __future__ import annotations

from typing import Any

from api.openapi import path_parameter
from api.read_docs import (
    AFTER,
    IF_NONE_MATCH,
    LAST_EVENT_ID,
    PREFER,
    SEEN,
    TEXT,
    answer,
    json_object,
    problems,
)
from api.read_docs import events as server_sent
from infra.domain_model.contexts import Context

MOST_EVENTS = 1_000
FEW_EVENTS = 100

_NEXT: dict[str, Any] = {
    "anyOf": [TEXT, {"type": "null"}],
    "description": "The path of the next page, null on the last. A page may be short, even empty, and not the last.",
}
_VERSION: dict[str, Any] = {
    "type": "integer",
    "minimum": 0,
    "description": "A stream's version is the number of its events.",
}
_FROM_VERSION: dict[str, Any] = {
    "name": "from_version",
    "in": "query",
    "description": "The first event that is wanted.",
    "schema": {"type": "integer", "minimum": 1, "maximum": 10**18 - 1, "default": 1},
}
_ENTRY: dict[str, Any] = {
    "title": "HistoryEntry",
    "type": "object",
    "required": ["version", "outcome", "at", "command_id"],
    "properties": {
        "version": _VERSION,
        "outcome": {"type": "string", "enum": ["accepted", "rejected"]},
        "at": {"type": "string", "format": "date-time", "description": "The broker's time."},
        "command_id": TEXT,
        "type": {"type": "string", "description": "The event's stored name."},
        "data": {"type": "object", "description": "The event as it was recorded."},
        "code": {"type": "string", "description": "Of a rejection."},
        "message": {"type": "string", "description": "Of a rejection."},
        "correlation_id": TEXT,
        "causation_id": TEXT,
    },
}


def events(context: Context) -> dict[str, Any]:
    """Of `GET /{context}/{stream_id}/events`."""
    schema = json_object(
        "History", {"stream": TEXT, "version": _VERSION, "events": {"type": "array", "items": _ENTRY}, "next": _NEXT}
    )
    limit = {
        "name": "limit",
        "in": "query",
        "description": "About how many events; those of one command are not parted.",
        "schema": {"type": "integer", "minimum": 1, "maximum": MOST_EVENTS, "default": FEW_EVENTS},
    }
    rejected = {
        "name": "rejected",
        "in": "query",
        "description": "Rejected commands too.",
        "schema": {"type": "boolean", "default": False},
    }
    cursor = {
        "name": "cursor",
        "in": "query",
        "description": "Where the page before ended; it is part of `next`.",
        "schema": TEXT,
    }
    return {
        "summary": f"What happened to a stream of {context.name}",
        "description": "Its events in order, from the log. It ends where the read model stands: it tells of no event that no view "
        "knows yet. `ETag` is the stream's version, for `If-Match` of a command.",
        "parameters": [_stream_id(context), _FROM_VERSION, limit, rejected, cursor, AFTER, PREFER, IF_NONE_MATCH],
        "responses": {
            "200": answer("Events in order.", schema, SEEN),
            "304": {"description": "The stream has that version still.", "headers": SEEN},
            **problems(404, 409, 422, 429, 503),
        },
    }


def live(context: Context) -> dict[str, Any]:
    """Of `GET /{context}/{stream_id}/events/live`."""
    commit = json_object(
        "LiveCommit", {"stream": TEXT, "version": _VERSION, "events": {"type": "array", "items": _ENTRY}}
    )
    from_version = _FROM_VERSION | {"description": "The first event that is wanted, unless Last-Event-ID says it."}
    return {
        "summary": f"What happens to a stream of {context.name}",
        "description": "Server-sent events, one `commit` for each accepted command: first what has happened, then what happens, "
        "each once, in order, as soon as the read model has it. `id` is the stream's version.",
        "parameters": [_stream_id(context), from_version, LAST_EVENT_ID],
        "responses": {"200": server_sent("Commits of the stream.", commit), **problems(422, 429, 503)},
    }


def _stream_id(context: Context) -> dict[str, Any]:
    return path_parameter("stream_id", f"The stream's name within {context.name}.", "4711")
