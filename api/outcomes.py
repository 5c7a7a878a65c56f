"""`GET /outcomes/{context}/{stream_id}/{key}`: the outcome of a command, later, and for others than its sender."""

from __future__ import annotations

import asyncio
from datetime import datetime
from uuid import UUID

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from api import openapi
from api.commands import CommandRef, members_of, message_of
from api.openapi import APPLIED, AT_POSITION, JSON, responses, text_in_path
from api.permissions import DENIED, rows_for
from api.problems import INVALID, NOT_FOUND, RETRY_AFTER_S, UNAVAILABLE, invalid, kind
from api.requests import BAD_SEGMENT, preferences, refuse_unknown, segment, watched
from api.services import Services, services_of
from api.waits import TOO_MANY_WAIT, Answer
from commands.intake import bad_name
from commands.outcomes import Outcome
from domain.engine.contexts import contexts
from infra.access import Rows
from infra.log.partitioner import partition_of
from infra.log.topics import Topic
from projections.engine.views.core_views import OUTCOMES, all_views, command_key
from projections.engine.views.token import Token

NO_OUTCOME = kind(404, "no-outcome", "No outcome is recorded under this key.", RETRY_AFTER_S)


def router() -> APIRouter:
    routes = APIRouter(tags=["outcomes"])
    parameters = [
        text_in_path("context", "The bounded context.", next(iter(contexts()), "context")),
        text_in_path("stream_id", "The stream's id in its context.", openapi.A_STREAM),
        text_in_path("key", "The command's Idempotency-Key, without its quotes.", openapi.A_KEY),
        openapi.PREFER,
    ]
    routes.add_api_route(
        "/outcomes/{context}/{stream_id}/{key}",
        _outcome,
        operation_id="outcome",
        openapi_extra={"parameters": parameters},
        response_model=openapi.Outcome,
        response_description="The outcome.",
        responses=responses(
            {200: {"headers": AT_POSITION | APPLIED}},
            *(NO_OUTCOME, NOT_FOUND, INVALID, BAD_SEGMENT, TOO_MANY_WAIT, *DENIED, *UNAVAILABLE),
        ),
    )
    return routes


async def _outcome(request: Request) -> Response:
    """The first and only answer to a command, where the sender did not wait for it, or lost it."""
    refuse_unknown(request)
    services, rows = services_of(request), rows_for(request, all_views()[OUTCOMES])
    context = contexts().get(segment(request, "context"))
    if context is None:
        raise NOT_FOUND("There is no such context.")
    ref = CommandRef(context, segment(request, "stream_id"), segment(request, "key"))
    if problem := bad_name(ref.stream, ref.key):
        raise invalid([("path", problem)])
    prefer = preferences(request)
    _, events = services.stores.topics()
    async with services.places:
        with services.outcomes.waiting(ref.stream, ref.key, events.partitions, may_be_there=False) as outcome:
            recorded = await _look_up(services, ref, rows, events)
            if recorded is None and (wait_s := prefer.wait_or(0)):
                with watched(request):
                    recorded = await _waited_for(services, ref, rows, events, outcome, wait_s)
    if recorded is None:
        raise NO_OUTCOME(headers=prefer.applied)
    members = members_of(ref, recorded)
    if recorded.outcome != "accepted":
        members |= {"code": recorded.code, "message": message_of(recorded)}
    if recorded.by is not None:
        members["by"] = recorded.by
    headers = {"Samefold-Position": members["position"]} | prefer.applied
    return Response(msgspec.json.encode(members), 200, headers, JSON)


async def _waited_for(
    services: Services, ref: CommandRef, rows: Rows | None, events: Topic, outcome: Answer, wait_s: float
) -> Outcome | None:
    """The outcome, as soon as it is there. For one that is another caller's, all of the time passes, as for none."""
    ends_at = asyncio.get_running_loop().time() + wait_s
    await asyncio.wait((outcome,), timeout=wait_s)
    if not outcome.done() or outcome.result() is None:
        return None
    if (recorded := await _look_up(services, ref, rows, events)) is not None:
        return recorded
    # no command has this id, so that only the end of this process ends the wait
    with services.outcomes.waiting(ref.stream, "", events.partitions, may_be_there=False) as end:
        await asyncio.wait((end,), timeout=max(ends_at - asyncio.get_running_loop().time(), 0))
    return None


async def _look_up(services: Services, ref: CommandRef, rows: Rows | None, events: Topic) -> Outcome | None:
    """The outcome, if it is there. Raises ReadModelNotSetUp, OtherViewsLive, ViewNotLive, DatabaseUnavailable."""
    services.stores.require_live(OUTCOMES)
    key = UUID(command_key(ref.stream, ref.key))
    found = await services.views.by_keys(all_views()[OUTCOMES], [(key,)], [rows] if rows else ())
    if not found.rows:
        return None
    row = msgspec.json.decode(found.rows[0].json)
    partition = partition_of(ref.stream, events.partitions)
    offsets = {topic: {partition: offsets.get(partition, 0)} for topic, offsets in found.position.positions.items()}
    return Outcome(
        "accepted" if row["code"] is None else "rejected",
        row["code"],
        row["message"],
        row["version"],
        UUID(row["fingerprint"]).hex,
        datetime.fromisoformat(row["at"]),
        Token(offsets),
        row["by"],
    )
