"""The OpenAPI document: FastAPI makes it from what each route declares; the commands' bodies come from the classes in `domain/`.

Routes declare their parameters for the document only: if FastAPI parsed them, that would cost more than the rest of the request's
way through the framework, so `api/requests.py` parses them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from typing import Annotated, Any, Literal, NotRequired

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, WithJsonSchema, with_config
from pydantic_core.core_schema import WithDefaultSchema
from typing_extensions import TypedDict

from api.problems import MEDIA_TYPE, Kind
from api.requests import KEY as KEY_PATTERN
from commands.intake import validator
from domain.engine.contexts import Context
from projections.engine.views.columns import AsInRows

JSON = "application/json"
Json = dict[str, Any]
Responses = dict[int | str, Json]

REF = "#/components/schemas/{model}"
A_STREAM, A_KEY, A_VERSION = "4711", "8e03978e-40d5-43dd-bc93-6894a57f9324", 3
"""For examples."""
A_POSITION = "1~mVYkg7c0Qx6B6y3zTnAz-w.5-12345"
POSITION = r"^1(~[A-Za-z0-9_-]{1,64}(\.[0-9]{1,18}(-[0-9]{1,18})+)+)*$"


# ── answers ──


Appended = Annotated[Literal["no", "unknown"], Field(description="Whether this request put the command into the log")]


class Error(TypedDict):
    """A place in the request that is invalid, and why."""

    at: str
    problem: str


@with_config(ConfigDict(extra="allow"))
class Problem(TypedDict):
    """RFC 9457. A recorded rejection has the members of an outcome too."""

    type: Annotated[str, Field(description="Names the kind of problem; docs/http-api.md explains it")]
    title: Annotated[str, Field(description="What kind of problem; in a refusal, the context's own sentence")]
    status: Annotated[int, Field(ge=400, le=599)]
    code: Annotated[str, Field(description="What programs branch on; it never changes")]
    detail: NotRequired[Annotated[str, Field(description="What happened this time")]]
    hint: NotRequired[Annotated[str, Field(description="What the operators of the service can do about it")]]
    appended: NotRequired[Appended]
    errors: NotRequired[list[Error]]


Stream = Annotated[str, Field(description="`{context}/{stream_id}`")]
CommandId = Annotated[str, Field(description="The Idempotency-Key")]
Version = Annotated[int, Field(ge=0, le=2**63 - 1, description="How many events the stream has after the command")]
Position = Annotated[str, Field(pattern=POSITION, examples=[A_POSITION], description="Of the log, for `after`")]
At = Annotated[str, WithJsonSchema({"type": "string", "format": "date-time", "description": "By the broker's clock"})]
Parked = Annotated[
    int | None,
    Field(ge=0, description="Streams left out from an event on that can't be folded; 1000: or more. null: not shown"),
]


class _Recorded(TypedDict):
    stream: Stream
    command_id: CommandId
    version: Version
    position: Position
    at: At


@with_config(ConfigDict(extra="forbid"))
class Accepted(_Recorded):
    """It was done."""

    outcome: Literal["accepted"]


@with_config(ConfigDict(extra="forbid"))
class Pending(TypedDict):
    """It is in the log."""

    outcome: Literal["pending"]
    stream: Stream
    command_id: CommandId


@with_config(ConfigDict(extra="forbid"))
class Outcome(_Recorded):
    """The outcome of a command."""

    outcome: Literal["accepted", "rejected"]
    code: NotRequired[Annotated[str, Field(description="Why it was rejected")]]
    message: NotRequired[Annotated[str, Field(description="The same as a sentence")]]
    by: NotRequired[Annotated[str, Field(description="Who sent it: a token's subject, policy:NAME or operator:NAME")]]


def header(about: str, **schema: Any) -> Json:
    return {"description": about, "schema": schema or {"type": "string"}}


RETRY_AFTER = {"Retry-After": header("Seconds until it is worth trying again", type="integer", minimum=0)}
AT_POSITION = {"Samefold-Position": header("The position token, as in the body")}
APPLIED = {"Preference-Applied": header("The preferences of `Prefer` that were followed")}
KEY = {"Idempotency-Key": header("The key that was given, or that was made for this command")}
ETAG = {"ETag": header("The stream's version, for `If-Match`")}
LOCATION = {"Location": header("Where the outcome is, or will be")}


def responses(others: Responses, *kinds: Kind, headers: Mapping[int, Json] | None = None) -> Responses:
    """These responses and those that are problems of these kinds, by status. `headers` are further ones of problems."""
    found = dict(others)
    for status, some in groupby(sorted(kinds, key=lambda kind: kind.status), key=lambda kind: kind.status):
        same = list(some)
        retry = RETRY_AFTER if any(kind.retry_after_s is not None for kind in same) else {}
        about = "\n".join(map(_line, same))
        found[status] = _PROBLEM | {"description": about, "headers": retry | (headers or {}).get(status, {})}
    return found


_PROBLEM: Json = {"content": {MEDIA_TYPE: {"schema": {"$ref": REF.format(model="Problem")}}}}


def _line(kind: Kind) -> str:
    return f"- `{kind.code}`: {kind.title}"


# ── parameters ──


def parameter(where: Literal["path", "query", "header"], name: str, about: str, schema: Json) -> Json:
    return {"in": where, "name": name, "required": where == "path", "description": about, "schema": schema}


def text_in_path(name: str, about: str, example: str) -> Json:
    """A segment of any text without control characters."""
    schema = {"type": "string", "minLength": 1, "maxLength": 190, "pattern": r"^[^\x00-\x1f\x7f-\x9f]+$"}
    return parameter("path", name, f"{about} A slash in it is written `%2F`.", schema | {"examples": [example]})


def in_header(name: str, about: str, example: str, **schema: Any) -> Json:
    return parameter("header", name, about, {"type": "string", "examples": [example]} | schema)


PREFER = in_header(
    "Prefer",
    "RFC 7240. `respond-async`: 202 as soon as the command is in the log. `wait=N`: wait up to N seconds. Others are ignored.",
    "wait=5",
)
AFTER = parameter(
    "query",
    "after",
    "Positions of earlier answers: this answer will not be older than any of them.",
    {"type": "array", "items": {"type": "string", "pattern": POSITION}},
)


COMMAND_HEADERS = (
    in_header(
        "Idempotency-Key",
        "The command's id, a string of RFC 9651 (draft-ietf-httpapi-idempotency-key-header). Sent again with the same key and "
        "body, it gets the same answer and does nothing twice. Without one the service makes one, and a retry is another command. "
        "A key without spaces is accepted without its quotes, too.",
        f'"{A_KEY}"',
        pattern=KEY_PATTERN,
    ),
    in_header(
        "If-Match",
        "The version that the stream must have, as an answer's ETag has it; else 412.",
        f'"{A_VERSION}"',
        pattern=r'^"(0|[1-9][0-9]{0,17})"$',
    ),
    in_header(
        "If-None-Match",
        "`*`: the stream must have no events yet; else 412. Not together with `If-Match`.",
        "*",
        enum=["*"],
    ),
    in_header(
        "Correlation-Id",
        "The caller's own id for all that belongs together; it is kept with the command and its events.",
        "order-4711",
        minLength=1,
        maxLength=200,
        pattern=r"^[!-~]+$",
    ),
)


# ── commands' bodies ──


class _Readable(AsInRows):
    """Without what code generators can't read: titles that repeat the name, and objects as defaults."""

    def field_title_should_be_set(self, *_: object) -> bool:
        return False

    def default_schema(self, schema: WithDefaultSchema) -> Json:
        made = super().default_schema(schema)
        if isinstance(made.get("default"), dict | list):
            del made["default"]
        return made


class Body:
    """The JSON schema of a command, under names with its context as prefix, and an example that its validation accepts."""

    def __init__(self, context: Context, name: str, kind: type) -> None:
        prefix = "".join(part.capitalize() for part in context.name.split("_"))
        self.kind = kind
        self.component = prefix + name
        references = REF.format(model=prefix + "{model}")
        self.schema: Json = TypeAdapter(kind).json_schema(ref_template=references, schema_generator=_Readable)
        parts = {prefix + part: schema for part, schema in self.schema.pop("$defs", {}).items()}
        self.components = parts | {self.component: self.schema | {"title": self.component}}

    def described(self) -> Json:
        content: Json = {"schema": {"$ref": REF.format(model=self.component)}}
        required = self.schema.get("required", ())
        example = {name: _value(one) for name, one in self.schema.get("properties", {}).items() if name in required}
        with suppress(ValidationError):
            validator(self.kind)(TypeAdapter(Json).dump_json(example))
            content["example"] = example
        return {"requestBody": {"required": True, "content": {JSON: content}}}


def _value(schema: Json) -> Any:
    """A plain value of a property."""
    if given := schema.get("examples") or schema.get("enum"):
        return given[0]
    match schema.get("type"), schema.get("format"):
        case "string", "date":
            return "2026-01-31"
        case "string", "date-time":
            return "2026-01-31T12:00:00Z"
        case "string", "uuid":
            return A_KEY
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


# ── the document ──


def document(app: FastAPI, bodies: list[Body], open_paths: Collection[str], at_the_door: Sequence[Kind]) -> Json:
    """The whole document: FastAPI's, with the schemas of problems and of commands.

    `at_the_door` are the problems of every route but those with open paths; where there are some, requests need a token.
    """
    made: Json = get_openapi(title=app.title, version=app.version, routes=app.routes)
    problem: Json = TypeAdapter(Problem).json_schema(ref_template=REF)
    schemas = made["components"]["schemas"]
    schemas |= problem.pop("$defs") | {"Problem": problem}
    for body in bodies:
        schemas |= body.components
    if at_the_door:
        _lock(made, open_paths, at_the_door)
    return made


def _lock(made: Json, open_paths: Collection[str], at_the_door: Sequence[Kind]) -> None:
    made["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer", "bearerFormat": "JWT"}}
    made["security"] = [{"token": []}]
    for path, operations in made["paths"].items():
        for operation in operations.values():
            if path in open_paths:
                operation["security"] = []
                continue
            for kind in at_the_door:
                response = operation["responses"].setdefault(str(kind.status), _PROBLEM | {"description": ""})
                if _line(kind) not in response["description"]:
                    response["description"] = f"{response['description']}\n{_line(kind)}".strip()
