"""The OpenAPI document, and the pieces that the routes' own descriptions are made of: answers, problems, headers, parameters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from api.problems import MEDIA_TYPE
from infra.domain_model.contexts import contexts

Json = dict[str, Any]

REF = "#/components/schemas/"
_AT = {"type": "string", "format": "date-time"}
_VERSION = {"type": "integer", "minimum": 0, "maximum": 2**63 - 1}
EXAMPLES: Json = {"version": 3, "stream_id": "4711", "key": "8e03978e-40d5-43dd-bc93-6894a57f9324"}
POSITION_EXAMPLE = "1~DGpkHZBqTZ-4fDVMPp-9xw.0-118"


def _object(properties: Json, *, required: Iterable[str] | None = None, more: bool = False, about: str = "") -> Json:
    described = {"description": about} if about else {}
    wanted = list(properties if required is None else required)
    return (
        {"type": "object"}
        | described
        | {
            "properties": properties,
            "required": wanted,
            "additionalProperties": more,
        }
    )


_OF_STREAM: Json = {
    "stream": {"type": "string", "description": "`{context}/{stream_id}`"},
    "command_id": {"type": "string", "description": "The Idempotency-Key"},
}
_OF_OUTCOME: Json = _OF_STREAM | {
    "version": _VERSION | {"description": "The stream's version after it: the number of its events"},
    "position": {"type": "string", "description": "A position token: hand it back as `after` to read what was done"},
    "at": _AT | {"description": "When it was recorded in the log, by the broker's clock"},
}

SCHEMAS: dict[str, Json] = {
    "Problem": _object(
        {
            "type": {"type": "string", "format": "uri-reference", "description": "GET it, and it explains itself"},
            "title": {
                "type": "string",
                "description": "What kind of problem; the sentence of the business in a refusal",
            },
            "status": {"type": "integer", "minimum": 400, "maximum": 599},
            "detail": {"type": "string", "description": "What happened this time"},
            "code": {"type": "string", "description": "What programs branch on; it never changes"},
            "cure": {"type": "string", "description": "What whoever runs the service can do about it"},
            "appended": {
                "type": "string",
                "enum": ["no", "unknown"],
                "description": "Whether this request put the command into the log: `no`, or `unknown`, and its outcome tells",
            },
            "errors": {
                "type": "array",
                "items": _object({"at": {"type": "string"}, "problem": {"type": "string"}}),
                "description": "Each place in the request that does not fit, and why",
            },
        },
        required=("type", "title", "status", "code"),
        more=True,
        about="RFC 9457. A recorded rejection has the members of an outcome too.",
    ),
    "Accepted": _object({"outcome": {"type": "string", "enum": ["accepted"]}} | _OF_OUTCOME),
    "Pending": _object({"outcome": {"type": "string", "enum": ["pending"]}} | _OF_STREAM),
    "Outcome": _object(
        {"outcome": {"type": "string", "enum": ["accepted", "rejected"]}}
        | _OF_OUTCOME
        | {
            "code": {"type": "string", "description": "Why it was rejected"},
            "message": {"type": "string", "description": "The same as a sentence"},
        },
        required=("outcome", *_OF_OUTCOME),
    ),
}
"""By name, for `components`; those of commands are added to them."""


def document(app: FastAPI) -> Json:
    """The whole document."""
    found: Json = get_openapi(
        title=app.title,
        version=app.version,
        summary=app.summary,
        description=app.description,
        openapi_version=app.openapi_version,
        routes=app.routes,
    )
    schemas = found.setdefault("components", {}).setdefault("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):  # FastAPI's own, which nothing here answers
        schemas.pop(name, None)
    schemas |= SCHEMAS
    for path in found["paths"].values():
        for operation in path.values():
            _only_problems(operation["responses"])
    return found


def problems(about: str, *codes: str, headers: Json | None = None) -> Json:
    """A response that is a problem; `codes` are those it may have."""
    told = f"{about} `code`: {', '.join(f'`{code}`' for code in codes)}." if codes else about
    answer: Json = {"description": told, "content": {MEDIA_TYPE: {"schema": {"$ref": f"{REF}Problem"}}}}
    return answer | ({"headers": headers} if headers else {})


def answer(schema: str, about: str, headers: Json | None = None, example: Json | None = None) -> Json:
    """A response with the JSON of a schema in SCHEMAS."""
    content: Json = {"schema": {"$ref": REF + schema}} | ({"example": example} if example else {})
    return {"description": about, "content": {"application/json": content}} | ({"headers": headers} if headers else {})


def header(about: str, schema: Json | None = None) -> Json:
    return {"description": about, "schema": schema or {"type": "string"}}


RETRY_AFTER = {"Retry-After": header("Seconds until it is worth trying again", {"type": "integer", "minimum": 0})}
POSITION = {"Samefold-Position": header("The position token, as in the body")}
KEY = {"Idempotency-Key": header("The key that was given, or that was made for this command")}
ETAG = {"ETag": header("The stream's version, for `If-Match`")}
LOCATION = {"Location": header("Where the outcome will be")}
APPLIED = {"Preference-Applied": header("What was made of `Prefer`")}


def path_parameter(name: str, about: str, example: str) -> Json:
    """A segment of the path that is any text without control characters, of at most 200 bytes with what stands before it."""
    schema = {"type": "string", "minLength": 1, "maxLength": 190, "pattern": r"^[^\x00-\x1f\x7f-\x9f]+$"}
    return {
        "name": name,
        "in": "path",
        "required": True,
        "description": f"{about} A slash in it is written `%2F`.",
        "schema": schema,
        "example": example,
    }


def header_parameter(name: str, about: str, schema: Json, example: str) -> Json:
    return {"name": name, "in": "header", "required": False, "description": about, "schema": schema, "example": example}


PREFER = header_parameter(
    "Prefer",
    "RFC 7240. `respond-async`: 202 as soon as the command is in the log. `wait=N`: wait up to N seconds for the outcome. "
    "What it holds beside that is passed over.",
    {"type": "string"},
    "wait=5",
)


def a_context() -> str:
    """One for examples."""
    return next(iter(contexts()), "context")


def _only_problems(responses: Json) -> None:
    """FastAPI's own 422 becomes one of ours."""
    content = responses.get("422", {}).get("content", {})
    if "HTTPValidationError" in str(content.get("application/json", "")):
        responses["422"] = problems("Something does not fit.", "invalid")
