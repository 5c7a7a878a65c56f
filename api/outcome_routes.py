"""`GET /outcomes/{context}/{stream_id}/{key}`: what became of a command, for whoever did not wait for it or lost the answer."""

from __future__ import annotations

import asyncio

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from api.answering import end_with
from api.client import ClientGone, client_of
from api.openapi import (
    APPLIED,
    EXAMPLES,
    POSITION,
    PREFER,
    RETRY_AFTER,
    Json,
    a_context,
    answer,
    path_parameter,
    problems,
)
from api.outcomes import JSON, Asked, message_of, recorded_as
from api.preferences import preferences
from api.problems import INVALID, NOT_FOUND, RETRY_AFTER_S, kind
from api.segments import segment
from api.view_requests import as_problems
from api.world import world_of
from commands.intake import bad_name
from infra.domain_model.contexts import contexts
from projections.engine.views.core_views import OUTCOMES

LOOK_S = 2.0
"""Within which one look at the database must have happened."""

NO_OUTCOME = kind(
    404,
    "no-outcome",
    "No outcome is recorded under this key.",
    "Either no such command was appended, or it is not decided and folded yet: ask again after `Retry-After` seconds.",
)
NOT_LOOKED = kind(
    503, "not-looked", "The read model can't be asked now.", "The database does not answer: ask again in a moment."
)

router = APIRouter()

_DESCRIBED: Json = {
    "description": "The first and only answer to a command, for whoever did not wait for it, or lost it.",
    "parameters": [
        path_parameter("context", "The bounded context.", a_context()),
        path_parameter("stream_id", "Which stream of it.", EXAMPLES["stream_id"]),
        path_parameter("key", "The command's Idempotency-Key, without its quotes.", EXAMPLES["key"]),
        PREFER,
    ],
    "responses": {
        "200": answer("Outcome", "What became of it.", POSITION | APPLIED),
        "404": problems("There is no outcome, or not yet.", "no-outcome", "not-found", headers=RETRY_AFTER),
        "422": problems("The path holds no stream or no key.", "invalid", "bad-segment"),
        "429": problems("Too many callers wait.", "too-many-waiting", headers=RETRY_AFTER),
        "503": problems("A store is away, or the world is not as promised.", headers=RETRY_AFTER),
    },
}


@router.get(
    "/outcomes/{context}/{stream_id}/{key}",
    operation_id="outcome",
    tags=["outcomes"],
    response_model=None,
    openapi_extra=_DESCRIBED,
)
async def outcome(request: Request) -> Response:
    """What became of a command."""
    world = world_of(request)
    context = contexts().get(segment(request, "context"))
    if context is None:
        raise NOT_FOUND("There is no such context.")
    asked = Asked(context, segment(request, "stream_id"), segment(request, "key"))
    if problem := bad_name(asked.stream, asked.key):
        raise INVALID(errors=[{"at": "path", "problem": problem}])
    settings, prefer = world.settings, preferences(request)
    patience = prefer.wait_within(0, settings.api_max_wait_s)
    applied = prefer.applied(settings.api_max_wait_s)
    with as_problems():
        world.look.require_live(OUTCOMES)
    with (
        world.waits.waiting(asked.stream, asked.key, world.events.partitions, look=False) as found,
        client_of(request).watched(lambda: end_with(found, ClientGone())),
    ):
        looked = await world.waits.looked(asked.stream, asked.key, LOOK_S)
        try:
            async with asyncio.timeout(patience):
                recorded = await found
        except TimeoutError:
            if not looked:
                raise NOT_LOOKED(headers={"Retry-After": str(RETRY_AFTER_S)}) from None
            raise NO_OUTCOME(headers={"Retry-After": str(RETRY_AFTER_S)} | applied) from None
    members = recorded_as(asked, recorded)
    if recorded.outcome != "accepted":
        members |= {"code": recorded.code, "message": message_of(recorded)}
    headers = {"Samefold-Position": members["position"]} | applied
    return Response(msgspec.json.encode(members), 200, headers, JSON)
