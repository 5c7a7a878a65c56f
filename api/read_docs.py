"""What `/openapi.json` says of all routes that read: common parameters, headers, and answers that are not the wanted ones."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

TEXT: dict[str, Any] = {"type": "string"}
NUMBER: dict[str, Any] = {"type": "integer"}

PATTERN = r"^1(~[A-Za-z0-9_-]{1,64}(\.[0-9]{1,18}(-[0-9]{1,18})+)+)*$"
POSITION: dict[str, Any] = {
    "type": "string",
    "pattern": PATTERN,
    "description": "Where the log was read to. Hand it back as `after` to read nothing older.",
    "examples": ["1~mVYkg7c0Qx6B6y3zTnAz-w.5-12345"],
}
PARKED: dict[str, Any] = {
    "type": "integer",
    "minimum": 0,
    "description": "Streams of which this lacks all since an event that could not be folded, until an operator sees to it.",
}
AFTER: dict[str, Any] = {
    "name": "after",
    "in": "query",
    "description": "Positions of earlier answers: this one will be no older than any of them.",
    "schema": {"type": "array", "items": {"type": "string", "pattern": PATTERN}},
}
PREFER: dict[str, Any] = {
    "name": "Prefer",
    "in": "header",
    "description": "`wait=N`: how many seconds to wait for the positions in `after` (RFC 7240).",
    "schema": TEXT,
}
IF_NONE_MATCH: dict[str, Any] = {
    "name": "If-None-Match",
    "in": "header",
    "description": "ETags of answers at hand: 304 if one of them still holds.",
    "schema": TEXT,
}
LAST_EVENT_ID: dict[str, Any] = {
    "name": "Last-Event-ID",
    "in": "header",
    "description": "The `id` of the last event that was seen; an EventSource sends it by itself.",
    "schema": TEXT,
}
SEEN: dict[str, Any] = {
    "ETag": {"description": "For If-None-Match.", "schema": TEXT},
    "Samefold-Position": {"schema": POSITION},
}


def json_object(title: str, properties: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of an object that has all of these members."""
    return {"title": title, "type": "object", "required": list(properties), "properties": dict(properties)}


def answer(description: str, schema: Mapping[str, Any], headers: Mapping[str, Any] | None = None) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": schema}}} | (
        {"headers": headers} if headers else {}
    )


def events(description: str, data: Mapping[str, Any]) -> dict[str, Any]:
    """A stream of server-sent events; `data` is the schema of the JSON in each (OpenAPI 3.2, section 4.14.4)."""
    decoded = {"type": "string", "contentMediaType": "application/json", "contentSchema": data}
    event = {"type": "object", "properties": {"event": TEXT, "id": TEXT, "retry": NUMBER, "data": decoded}}
    return {"description": description, "content": {"text/event-stream": {"itemSchema": event, "schema": TEXT}}}


def problems(*statuses: int) -> dict[str, Any]:
    return {
        str(status): {
            "description": HTTPStatus(status).phrase,
            "content": {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}},
        }
        for status in statuses
    }
