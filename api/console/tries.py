"""`/console/try`: a form for each command, made from its schema. What it sends is answered by the command's own route."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache
from typing import Any
from urllib.parse import quote
from uuid import uuid4

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.types import Message

from api.commands import post
from api.console import site
from api.openapi import Body
from api.problems import NOT_FOUND, Problem
from domain.engine.contexts import Context, contexts
from domain.engine.schemas import schema_of
from domain.engine.versions import stored_type

_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?").fullmatch
_ENDED = range(200, 500)
"""Statuses of an answer after which the form is for another command."""
PENDING = 202
FIELD = "field."
"""What the names of a form's fields begin with, which are the command's: it may have a field `id`."""


@dataclass(frozen=True, slots=True)
class Field:
    """An input of a form. `kind` is text, number, date, choice or json."""

    name: str
    kind: str
    required: bool
    choices: tuple[str, ...] = ()
    hint: str = ""
    default: str = ""


@dataclass(frozen=True, slots=True)
class Form:
    """The form of a command."""

    context: Context
    name: str
    kind: type
    about: str
    fields: tuple[Field, ...]

    @property
    def ref(self) -> str:
        return f"{self.context.name}.{self.name}"


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of a command; `members` are those of the JSON object that a client gets."""

    status: int
    title: str
    members: dict[str, Any]


@cache
def forms() -> dict[str, Form]:
    """By context and name of the command."""
    found = (_form(context, name, kind) for context in contexts().values() for name, kind in context.commands.items())
    return {form.ref: form for form in found}


def _form(context: Context, name: str, kind: type) -> Form:
    schema = schema_of(kind)
    properties, required = schema.get("properties", {}), schema.get("required", ())
    fields = tuple(_field(name, one, required=name in required) for name, one in properties.items())
    about = str(Body(context, name, kind).schema.get("description", ""))
    return Form(context, name, kind, " ".join(about.split()), fields)


def _field(name: str, schema: dict[str, Any], *, required: bool) -> Field:
    kinds = [one for one in schema.get("anyOf", [schema]) if one.get("type") != "null"]
    one = kinds[0] if len(kinds) == 1 else {}
    bounds = {"minimum": "at least", "maximum": "at most", "minLength": "from", "maxLength": "up to"}
    words = [
        f"{word} {one[bound]}{' characters' if 'Length' in bound else ''}"
        for bound, word in bounds.items()
        if bound in one
    ]
    default = schema.get("default")
    shown = "" if default is None else default if isinstance(default, str) else json.dumps(default, ensure_ascii=False)
    choices, kind = tuple(map(str, one.get("enum", ()))), "json"
    match one.get("type"), one.get("format"):
        case _ if choices and one.get("type") == "string":
            kind = "choice"
        case "string", "date":
            kind = "date"
        case "string", form:
            kind, words = "text", [*words, *([form] if form else [])]
        case "integer" | "number", _:
            kind = "number"
        case "boolean", _:
            kind, choices = "choice", ("true", "false")
        case other, _:
            members = f" with {', '.join(one['properties'])}" if one.get("properties") else ""
            words.append(f"JSON: {other or 'one of several types'}{members}")
    return Field(name, kind, required, choices, ", ".join(words), shown)


def body_of(form: Form, given: dict[str, str]) -> bytes:
    """The command's JSON. What does not look like its type is sent as a text, and the route says what is wrong."""
    members = []
    for field in form.fields:
        text = given.get(FIELD + field.name, "")
        if text == "":
            continue
        is_raw = (
            (field.kind == "number" and _NUMBER(text))
            or (field.kind == "choice" and field.choices == ("true", "false"))
            or (field.kind == "json" and _is_json(text))
        )
        members.append(f"{json.dumps(field.name)}: {text if is_raw else json.dumps(text, ensure_ascii=False)}")
    return f"{{{', '.join(members)}}}".encode()


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


async def tries(request: Request) -> Response:
    ref = request.query_params.get("command", "")
    if ref and ref not in forms():
        raise NOT_FOUND(f"This code has no command '{ref[:100]}'.")
    given = {"stream": request.query_params.get("stream", "")}
    return _page(request, forms().get(ref), given, str(uuid4()), None)


async def send(request: Request) -> Response:
    """Send a command as its route takes it, from the same caller."""
    given = await site.form_of(request)
    if (form := forms().get(given.get("command", ""))) is None:
        raise NOT_FOUND("This code has no such command.")
    answer = await _answer(request, form, given)
    # the same form again is the same command: unless it may not have been appended, the next one is another
    ident = str(uuid4()) if answer.status in _ENDED and answer.status != PENDING else given.get("id", "")
    return _page(request, form, given, ident, answer)


async def _answer(request: Request, form: Form, given: dict[str, str]) -> Answer:
    stream, expected = given.get("stream", "").strip(), given.get("expected", "").strip()
    headers = [
        (b"content-type", b"application/json"),
        (b"idempotency-key", given.get("id", "").encode("ascii", "replace")),
    ]
    if expected:
        headers.append((b"if-match", f'"{expected}"'.encode("latin-1", "replace")))
    scope = dict(request.scope) | {
        "headers": headers,
        "query_string": b"",
        "path_params": {"stream_id": quote(stream, safe="")},
    }
    body = [body_of(form, given)]

    async def receive() -> Message:
        return {"type": "http.request", "body": body.pop()} if body else await request.receive()

    try:
        response = await post(form.context, form.kind, stored_type(form.kind), Request(scope, receive))
    except Problem as problem:
        return Answer(
            problem.kind.status,
            problem.kind.title,
            {"code": problem.kind.code, "detail": problem.detail, **msgspec.to_builtins(problem.members)},
        )
    title = "The outcome is not known yet." if response.status_code == PENDING else "Accepted."
    return Answer(response.status_code, title, msgspec.json.decode(response.body))


def _page(request: Request, form: Form | None, given: dict[str, str], ident: str, answer: Answer | None) -> Response:
    status = answer.status if answer and answer.status >= 400 else 200
    by_context: dict[str, list[Form]] = {}
    for one in forms().values():
        by_context.setdefault(one.context.name, []).append(one)
    values = {"forms": by_context, "form": form, "given": given, "ident": ident, "answer": answer, "prefix": FIELD}
    return site.page(request, "try.html", status, **values)


def add_to(router: APIRouter) -> None:
    site.add(router, "/try", tries)
    site.add(router, "/try", send, method="POST")
