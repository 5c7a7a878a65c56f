"""`GET /problems/{code}`: every `type` of a problem can be looked up, and says what it means."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from api import openapi
from api.problems import NOT_FOUND, explained
from infra.domain_model.contexts import contexts, refusals_of

openapi.SCHEMAS["Explanation"] = {
    "type": "object",
    "properties": {
        "type": {"type": "string"},
        "code": {"type": "string"},
        "status": {"type": "integer"},
        "title": {"type": "string"},
        "explanation": {"type": "string"},
    },
    "required": ["type", "code", "status", "title", "explanation"],
    "additionalProperties": False,
}

_RESPONSES = {"200": openapi.answer("Explanation", "What it means."), "404": openapi.problems("Unknown.", "not-found")}

router = APIRouter(tags=["problems"])


@router.get(
    "/problems/{code}",
    operation_id="problem",
    response_model=None,
    openapi_extra={
        "parameters": [openapi.path_parameter("code", "The problem's code.", "invalid")],
        "responses": _RESPONSES,
    },
)
async def problem(request: Request) -> Response:
    """What a problem means, and what to do about it."""
    kind = explained(request.path_params["code"])
    if kind is None:
        raise NOT_FOUND("There is no such problem.")
    return _answer(f"/problems/{kind.code}", kind.code, kind.status, kind.title, kind.why)


@router.get(
    "/problems/{context}/{code}",
    operation_id="refusal",
    response_model=None,
    openapi_extra={
        "parameters": [
            openapi.path_parameter("context", "The bounded context.", openapi.a_context()),
            openapi.path_parameter("code", "The refusal's code.", "a-code"),
        ],
        "responses": _RESPONSES,
    },
)
async def refusal(request: Request) -> Response:
    """What a refusal of the business means."""
    context = contexts().get(request.path_params["context"])
    found = refusals_of(context).get(request.path_params["code"]) if context else None
    if context is None or found is None:
        raise NOT_FOUND("There is no such refusal.")
    why = "The business said no. The refusal is recorded: the same command under the same key is always answered so."
    return _answer(f"/problems/{context.name}/{found.code}", found.code, 409, found.message, why)


def _answer(kind: str, code: str, status: int, title: str, explanation: str) -> Response:
    body = {"type": kind, "code": code, "status": status, "title": title, "explanation": explanation}
    return Response(msgspec.json.encode(body), media_type="application/json")
