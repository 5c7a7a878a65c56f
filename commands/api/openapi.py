"""The OpenAPI document, as far as FastAPI can't know it: bodies that it does not parse, headers, problems, refusals, examples."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import TypeAdapter, ValidationError

from commands.api.problems import MEDIA_TYPE
from commands.intake import validator
from domain.language import Refusal
from infra.contexts import Context, contexts

Json = dict[str, Any]

_REF = "#/components/schemas/"
_AT = {"type": "string", "format": "date-time"}
_VERSION = {"type": "integer", "minimum": 0, "maximum": 2**63 - 1}
_EXAMPLES: Json = {"version": 3, "stream_id": "4711", "key": "8e03978e-40d5-43dd-bc93-6894a57f9324"}
_POSITION_EXAMPLE = "1~DGpkHZBqTZ-4fDVMPp-9xw.0-118"


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
                "description": "Whether the command is in the log: `no`, and it has no effect, or `unknown`, and its outcome tells",
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


def command(context: Context, name: str, kind: type, refusals: Mapping[str, type[Refusal]]) -> Json:
    """What FastAPI is to add about the route of a command. Its schemas are put into SCHEMAS."""
    schema = _schema_of(context, name, kind)
    about = " ".join((schema.get("description") or "").split())
    return {
        "summary": _words(name),
        "description": about or f"{_words(name)}.",
        "parameters": [_stream_id(context.name), *_COMMAND_HEADERS],
        "requestBody": {
            "required": True,
            "content": {
                "application/json": {"schema": {"$ref": _REF + _component(context, name)}} | _example(schema, kind)
            },
        },
        "responses": _command_responses(context, refusals),
    }


def problems(about: str, *codes: str, headers: Json | None = None) -> Json:
    """A response that is a problem; `codes` are those it may have."""
    told = f"{about} `code`: {', '.join(f'`{code}`' for code in codes)}." if codes else about
    answer: Json = {"description": told, "content": {MEDIA_TYPE: {"schema": {"$ref": f"{_REF}Problem"}}}}
    return answer | ({"headers": headers} if headers else {})


def answer(schema: str, about: str, headers: Json | None = None, example: Json | None = None) -> Json:
    """A response with the JSON of a schema in SCHEMAS."""
    content: Json = {"schema": {"$ref": _REF + schema}} | ({"example": example} if example else {})
    return {"description": about, "content": {"application/json": content}} | ({"headers": headers} if headers else {})


def header(about: str, schema: Json | None = None) -> Json:
    return {"description": about, "schema": schema or {"type": "string"}}


RETRY_AFTER = {"Retry-After": header("Seconds until it is worth trying again", {"type": "integer", "minimum": 0})}
POSITION = {"Samefold-Position": header("The position token, as in the body")}
_KEY = {"Idempotency-Key": header("The key that was given, or that was made for this command")}
_ETAG = {"ETag": header("The stream's version, for `If-Match`")}
_LOCATION = {"Location": header("Where the outcome will be")}
_APPLIED = {"Preference-Applied": header("What was made of `Prefer`")}


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


def _stream_id(context: str) -> Json:
    about = f"Which of {context}: any text without control characters; with `{context}/` at most 200 bytes in UTF-8."
    return path_parameter("stream_id", about, _EXAMPLES["stream_id"])


PREFER = header_parameter(
    "Prefer",
    "RFC 7240. `respond-async`: 202 as soon as the command is in the log. `wait=N`: wait up to N seconds for the outcome.",
    {
        "type": "string",
        "maxLength": 100,
        "pattern": r"^(respond-async|wait=[0-9]{1,3})(, (respond-async|wait=[0-9]{1,3}))?$",
    },
    "wait=5",
)
_COMMAND_HEADERS = [
    header_parameter(
        "Idempotency-Key",
        "The command's id, a string of RFC 9651 (draft-ietf-httpapi-idempotency-key-header). Sent again with the same key and "
        "body, it gets the same answer and does nothing twice. Without one the service makes one, and a retry is another command.",
        {"type": "string", "maxLength": 202, "pattern": r'^"[!#-\[\]-~]{1,200}"$'},
        f'"{_EXAMPLES["key"]}"',
    ),
    header_parameter(
        "If-Match",
        "The version that the stream must have, as an answer's ETag has it; else 412.",
        {"type": "string", "pattern": r'^"(0|[1-9][0-9]{0,17})"$'},
        '"3"',
    ),
    header_parameter(
        "If-None-Match",
        "`*`: the stream must have no events yet; else 412. Not together with `If-Match`.",
        {"type": "string", "enum": ["*"]},
        "*",
    ),
    PREFER,
    header_parameter(
        "Correlation-Id",
        "The caller's own id of the whole matter; it is kept beside the command and the events.",
        {"type": "string", "minLength": 1, "maxLength": 200, "pattern": r"^[!-~]+$"},
        "order-4711",
    ),
]


def _command_responses(context: Context, refusals: Mapping[str, type[Refusal]]) -> Json:
    recorded = _KEY | POSITION
    accepted = {
        "outcome": "accepted",
        "stream": f"{context.name}/{_EXAMPLES['stream_id']}",
        "command_id": _EXAMPLES["key"],
        "version": _EXAMPLES["version"],
        "position": _POSITION_EXAMPLE,
        "at": "2026-01-31T12:00:00.123Z",
    }
    pending = {"outcome": "pending", "stream": accepted["stream"], "command_id": accepted["command_id"]}
    return {
        "200": answer(
            "Accepted",
            "It was done, and every view of the answer's agent shows it.",
            recorded | _ETAG | _APPLIED,
            accepted,
        ),
        "202": answer(
            "Pending", "It is in the log and will be decided.", _KEY | _LOCATION | RETRY_AFTER | _APPLIED, pending
        ),
        "400": problems("A header or the request itself can't be understood.", "bad-header", "bad-length", "cut-off"),
        "408": problems("The body did not arrive in time.", "too-slow"),
        "409": _refusal_response(context, refusals, recorded),
        "412": problems("The stream is not at the expected version.", "version-conflict", headers=recorded),
        "413": problems("The command, or what it leads to, is too large.", "too-large"),
        "415": problems("The body is not declared to be JSON.", "not-json"),
        "422": problems("Something does not fit.", "invalid", "key-reused", "bad-segment"),
        "429": problems("Too much is waiting.", "read-model-behind", "too-many-waiting", headers=RETRY_AFTER),
        "500": problems("The service made a mistake.", "failed", "defect"),
        "503": problems(
            "A store is away, or the world is not as promised: `appended` says whether the command is in the log.",
            "not-appended",
            "maybe-appended",
            "kafka-away",
            "database-away",
            headers=RETRY_AFTER | {"Location": header("Where the outcome would be, if `appended` is `unknown`")},
        ),
    }


def _refusal_response(context: Context, refusals: Mapping[str, type[Refusal]], headers: Json) -> Json:
    lines = "\n".join(f"- `{code}`: {refusal.message}" for code, refusal in refusals.items())
    answer = problems(f"The business said no.\n\n{lines}" if lines else "The business said no.", headers=headers)
    examples = {
        code: {"summary": refusal.message, "value": _refused(context, refusal)} for code, refusal in refusals.items()
    }
    if examples:
        answer["content"][MEDIA_TYPE]["examples"] = examples
    return answer


def _refused(context: Context, refusal: type[Refusal]) -> Json:
    return {
        "type": f"/problems/{context.name}/{refusal.code}",
        "title": refusal.message,
        "status": 409,
        "detail": refusal.message,
        "code": refusal.code,
        "outcome": "rejected",
        "stream": f"{context.name}/{_EXAMPLES['stream_id']}",
        "command_id": _EXAMPLES["key"],
        "version": _EXAMPLES["version"],
        "position": _POSITION_EXAMPLE,
        "at": "2026-01-31T12:00:00.123Z",
    }


def a_context() -> str:
    """One for examples."""
    return next(iter(contexts()), "context")


OUTCOME: Json = {
    "description": "The first and only answer to a command, for whoever did not wait for it, or lost it.",
    "parameters": [
        path_parameter("context", "The bounded context.", a_context()),
        path_parameter("stream_id", "Which stream of it.", _EXAMPLES["stream_id"]),
        path_parameter("key", "The command's Idempotency-Key, without its quotes.", _EXAMPLES["key"]),
        PREFER,
    ],
    "responses": {
        "200": answer("Outcome", "What became of it.", POSITION | _APPLIED),
        "404": problems("There is no outcome, or not yet.", "no-outcome", "not-found", headers=RETRY_AFTER),
        "422": problems("The path holds no stream or no key.", "invalid", "bad-segment"),
        "429": problems("Too many callers wait.", "too-many-waiting", headers=RETRY_AFTER),
        "503": problems("A store is away, or the world is not as promised.", headers=RETRY_AFTER),
    },
}


def _schema_of(context: Context, name: str, kind: type) -> Json:
    """The JSON schema of a command; it and its parts are put into SCHEMAS under names that are the context's own."""
    prefix = _camel(context.name)
    schema: Json = TypeAdapter(kind).json_schema(ref_template=f"{_REF}{prefix}{{model}}")
    for part, described in schema.pop("$defs", {}).items():
        SCHEMAS[prefix + part] = _readable(described)
    SCHEMAS[_component(context, name)] = _readable(schema) | {"title": _component(context, name)}
    return schema


def _readable(schema: Json) -> Json:
    """Without what makes generators stumble: titles that repeat the name, and objects as defaults."""
    properties = {
        name: {
            key: value
            for key, value in described.items()
            if key != "title" and not (key == "default" and isinstance(value, dict | list))
        }
        for name, described in schema.get("properties", {}).items()
    }
    return schema | {"properties": properties}


def _example(schema: Json, kind: type) -> Json:
    """An example that the command's own validation accepts; nothing where none can be made up."""
    made = {
        name: _value(described)
        for name, described in schema.get("properties", {}).items()
        if name in schema.get("required", ())
    }
    try:
        validator(kind)(TypeAdapter(dict[str, Any]).dump_json(made))
    except ValidationError:
        return {}
    return {"example": made}


def _value(schema: Json) -> Any:
    """A plain value of a property."""
    if given := schema.get("examples"):
        return given[0]
    if choices := schema.get("enum"):
        return choices[0]
    match schema.get("type"), schema.get("format"):
        case "string", "date":
            return "2026-01-31"
        case "string", "date-time":
            return "2026-01-31T12:00:00Z"
        case "string", "uuid":
            return _EXAMPLES["key"]
        case "string", _:
            return "text"[: schema.get("maxLength", 4)]
        case "integer" | "number", _:
            return max(schema.get("minimum", 0), min(100, schema.get("maximum", 100)))
        case "boolean", _:
            return True
        case "array", _:
            return []
        case _:
            return {}


def _only_problems(responses: Json) -> None:
    """FastAPI's own 422 becomes one of ours."""
    content = responses.get("422", {}).get("content", {})
    if "HTTPValidationError" in str(content.get("application/json", "")):
        responses["422"] = problems("Something does not fit.", "invalid")


def _component(context: Context, name: str) -> str:
    return _camel(context.name) + name


def _camel(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))


def _words(name: str) -> str:
    """`OpenAccount` as `Open account`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", name).capitalize()
