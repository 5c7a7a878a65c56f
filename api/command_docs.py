"""What OpenAPI says of a command's route: made of the class that declares it and of the refusals of its context."""

from __future__ import annotations

from collections.abc import Mapping

from api.command_schemas import component, example, kebab, schema_of, words
from api.openapi import (
    APPLIED,
    ETAG,
    EXAMPLES,
    KEY,
    LOCATION,
    POSITION,
    POSITION_EXAMPLE,
    PREFER,
    REF,
    RETRY_AFTER,
    Json,
    answer,
    header,
    header_parameter,
    path_parameter,
    problems,
)
from api.problems import MEDIA_TYPE
from domain.language import Refusal
from infra.domain_model.contexts import Context


def described(context: Context, name: str, kind: type, refusals: Mapping[str, type[Refusal]]) -> Json:
    """What FastAPI is to add about the route of a command. Its schemas become part of the document."""
    schema = schema_of(context, name, kind)
    about = " ".join((schema.get("description") or "").split())
    return {
        "summary": words(name),
        "description": about or f"{words(name)}.",
        "parameters": [_stream_id(context.name), *_COMMAND_HEADERS],
        "requestBody": {
            "required": True,
            "content": {
                "application/json": {"schema": {"$ref": REF + component(context, name)}} | example(schema, kind)
            },
        },
        "responses": _command_responses(context, refusals),
    }


def _stream_id(context: str) -> Json:
    about = f"Which of {context}: any text without control characters; with `{context}/` at most 200 bytes in UTF-8."
    return path_parameter("stream_id", about, EXAMPLES["stream_id"])


_COMMAND_HEADERS = [
    header_parameter(
        "Idempotency-Key",
        "The command's id, a string of RFC 9651 (draft-ietf-httpapi-idempotency-key-header). Sent again with the same key and "
        "body, it gets the same answer and does nothing twice. Without one the service makes one, and a retry is another command.",
        {"type": "string", "maxLength": 202, "pattern": r'^"[!#-\[\]-~]{1,200}"$'},
        f'"{EXAMPLES["key"]}"',
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
    recorded = KEY | POSITION
    accepted = {
        "outcome": "accepted",
        "stream": f"{context.name}/{EXAMPLES['stream_id']}",
        "command_id": EXAMPLES["key"],
        "version": EXAMPLES["version"],
        "position": POSITION_EXAMPLE,
        "at": "2026-01-31T12:00:00.123Z",
    }
    pending = {"outcome": "pending", "stream": accepted["stream"], "command_id": accepted["command_id"]}
    return {
        "200": answer(
            "Accepted",
            "It was done, and every view of the answer's agent shows it.",
            recorded | ETAG | APPLIED,
            accepted,
        )
        | {"links": _links(context)},
        "202": answer(
            "Pending", "It is in the log and will be decided.", KEY | LOCATION | RETRY_AFTER | APPLIED, pending
        ),
        "400": problems("A header or the request itself can't be understood.", "bad-header", "bad-length", "cut-off"),
        "408": problems("The body did not arrive in time.", "too-slow"),
        "409": _refusal_response(context, refusals, recorded),
        "412": problems("The stream is not at the expected version.", "version-conflict", headers=recorded),
        "413": problems("The command, or what it leads to, is too large.", "too-large"),
        "415": problems("The body is not declared to be JSON.", "not-json"),
        "422": problems("Something does not fit.", "invalid", "key-reused", "bad-segment"),
        "429": problems("Too much is waiting.", "read-model-behind", "too-many-waiting", headers=RETRY_AFTER),
        "431": problems("Line and headers are too large.", "head-too-large"),
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


def operation_id(context: Context, name: str) -> str:
    """What programs call the command's route by: `accounts_open_account`."""
    return f"{context.name}_{kebab(name).replace('-', '_')}"


def _links(context: Context) -> Json:
    """What can be done next: look at it again, or go on with the same stream, at the version that it now has."""
    stream = {"path.stream_id": "$request.path.stream_id"}
    whose = {"path.context": context.name, **stream, "path.key": "$response.body#/command_id"}
    next_ = {**stream, "header.If-Match": "$response.header.ETag"}
    again = {
        kebab(name): {"operationId": operation_id(context, name), "parameters": next_} for name in context.commands
    }
    return {"outcome": {"operationId": "outcome", "parameters": whose}} | again


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
        "stream": f"{context.name}/{EXAMPLES['stream_id']}",
        "command_id": EXAMPLES["key"],
        "version": EXAMPLES["version"],
        "position": POSITION_EXAMPLE,
        "at": "2026-01-31T12:00:00.123Z",
    }
