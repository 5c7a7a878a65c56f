"""The outcome of a command: the answer to its sender, and `GET /outcomes/{context}/{stream_id}/{key}` later."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from api import openapi
from api.openapi import APPLIED, AT_POSITION, JSON, responses, text_in_path
from api.outcome_waits import TOO_MANY_WAIT, Outcome, Recorded
from api.permissions import DENIED, rows_for
from api.problems import INVALID, NOT_FOUND, RETRY_AFTER_S, UNAVAILABLE, Kind, kind
from api.requests import BAD_SEGMENT, TOO_LARGE, path_of, preferences, refuse_unknown, segment, watched
from api.services import Services, services_of
from commands.intake import bad_name
from domain.engine.contexts import Context, contexts, refusals_of
from infra.access import Rows
from infra.log.partitioner import partition_of
from projections.engine.views.core_views import OUTCOMES, all_views, command_key
from projections.engine.views.token import Token

CONFLICT = kind(412, "version-conflict", "The stream is not at the version that was expected.")
UNCLEAR = kind(422, "unclear-stream", "The name of a new stream looks like another's.")
KEY_REUSED = kind(422, "key-reused", "This Idempotency-Key was used before, with another command.")
FAILED = kind(500, "failed", "The code of the business failed on this command.")
REFUSED = kind(409, "refused", "The business said no.")
NO_OUTCOME = kind(404, "no-outcome", "No outcome is recorded under this key.", RETRY_AFTER_S)

REJECTED = {"malformed": INVALID, "misrouted": FAILED} | {it.code: it for it in (CONFLICT, TOO_LARGE, FAILED, UNCLEAR)}
"""The codes that the handler itself rejects commands with; all others are refusals of the business."""


@dataclass(frozen=True, slots=True)
class CommandRef:
    """Names a command. `is_callers`: the caller chose the key, so the command may be a repeated one."""

    context: Context
    stream_id: str
    key: str
    is_callers: bool = True

    @property
    def stream(self) -> str:
        return f"{self.context.name}/{self.stream_id}"

    @property
    def location(self) -> str:
        """The path under which the outcome is found."""
        return path_of("outcomes", self.context.name, self.stream_id, self.key)


def answer_of(ref: CommandRef, recorded: Recorded, fingerprint: str, headers: Mapping[str, str]) -> Response:
    """The answer to the sender of a command with that fingerprint. Raises Problem for all but acceptance."""
    if recorded.fingerprint != fingerprint:
        raise KEY_REUSED(headers=headers, command_id=ref.key)
    members = _members(ref, recorded)
    headers = {**headers, "Samefold-Position": members["position"]}
    if recorded.outcome == "accepted":
        headers["ETag"] = f'"{recorded.version}"'
        return Response(msgspec.json.encode(members), 200, headers, JSON)
    detail = _sentence(_message(recorded) or "")
    code = recorded.code or REFUSED.code
    if known := REJECTED.get(code):
        raise known(detail, headers=headers, **members)
    refusal = refusals_of(ref.context).get(code)
    kind_ = Kind(409, code, refusal.message, context=ref.context.name) if refusal else REFUSED._replace(code=code)
    raise kind_(detail, headers=headers, **members)


def _members(ref: CommandRef, recorded: Recorded) -> dict[str, Any]:
    """What accepted and rejected outcomes have in common."""
    return {
        "outcome": recorded.outcome,
        "stream": ref.stream,
        "command_id": ref.key,
        "version": recorded.version,
        "position": str(recorded.position),
        "at": recorded.at,
    }


def _message(recorded: Recorded) -> str | None:
    """As the business or the handler wrote it; how code failed is in the log of events, and not public."""
    return FAILED.title if recorded.code == "failed" else recorded.message


def _sentence(text: str) -> str:
    return text if not text or text[-1] in ".!?" else f"{text[:1].upper()}{text[1:]}."


def router() -> APIRouter:
    routes = APIRouter(route_class=openapi.Described, tags=["outcomes"])
    openapi.describe(
        _outcome,
        text_in_path("context", "The bounded context.", next(iter(contexts()), "context")),
        text_in_path("stream_id", "Which stream of it.", openapi.A_STREAM),
        text_in_path("key", "The command's Idempotency-Key, without its quotes.", openapi.A_KEY),
        openapi.PREFER,
    )
    routes.add_api_route(
        "/outcomes/{context}/{stream_id}/{key}",
        _outcome,
        operation_id="outcome",
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
        raise INVALID(errors=[{"at": "path", "problem": problem}])
    prefer = preferences(request)
    partitions = services.events.partitions
    async with services.places:
        with services.outcomes.waiting(ref.stream, ref.key, partitions, may_be_there=False) as outcome:
            recorded = await _look_up(services, ref, rows)
            if recorded is None and (wait_s := prefer.wait_or(0)):
                with watched(request):
                    recorded = await _waited_for(services, ref, rows, outcome, wait_s)
    if recorded is None:
        raise NO_OUTCOME(headers=prefer.applied)
    members = _members(ref, recorded)
    if recorded.outcome != "accepted":
        members |= {"code": recorded.code, "message": _message(recorded)}
    if recorded.by is not None:
        members["by"] = recorded.by
    headers = {"Samefold-Position": members["position"]} | prefer.applied
    return Response(msgspec.json.encode(members), 200, headers, JSON)


async def _waited_for(
    services: Services, ref: CommandRef, rows: Rows | None, outcome: Outcome, wait_s: float
) -> Recorded | None:
    """The outcome, as soon as it is there. For one that is another caller's, all of the time passes, as for none."""
    ends_at = asyncio.get_running_loop().time() + wait_s
    await asyncio.wait((outcome,), timeout=wait_s)
    if not outcome.done() or outcome.result() is None:
        return None
    if (recorded := await _look_up(services, ref, rows)) is not None:
        return recorded
    # no command has this id, so that only the end of this process ends the wait
    with services.outcomes.waiting(ref.stream, "", services.events.partitions, may_be_there=False) as end:
        await asyncio.wait((end,), timeout=max(ends_at - asyncio.get_running_loop().time(), 0))
    return None


async def _look_up(services: Services, ref: CommandRef, rows: Rows | None) -> Recorded | None:
    """The outcome, if it is there. Raises ReadModelNotSetUp, OtherViewsLive, ViewNotLive, DatabaseUnavailable."""
    services.stores.require_live(OUTCOMES)
    key = UUID(command_key(ref.stream, ref.key))
    found = await services.views.by_keys(all_views()[OUTCOMES], [(key,)], (), [rows] if rows else ())
    if not found.rows:
        return None
    partition = partition_of(ref.stream, services.events.partitions)
    row = msgspec.json.decode(found.rows[0].json)
    members = {name: row[name] for name in ("code", "message", "version", "by")}
    members |= {
        "outcome": "accepted" if row["code"] is None else "rejected",
        "fingerprint": UUID(row["fingerprint"]).hex,
    }
    offsets = {topic: {partition: offsets.get(partition, 0)} for topic, offsets in found.position.positions.items()}
    return Recorded(at=datetime.fromisoformat(row["at"]), position=Token(offsets), **members)
