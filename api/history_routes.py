"""`GET /{context}/{stream_id}/events`: what happened to a stream, from the log itself, up to where the read model stands.

Not beyond: whoever reads here and in a view must not find an event of which no view, and no outcome, knows yet.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import NamedTuple
from urllib.parse import urlencode

import msgspec
from fastapi import APIRouter, Request
from msgspec import UNSET, UnsetType
from starlette.responses import Response

from api import history_docs
from api.cursors import BadCursor, cursor_after, values_of
from api.history_docs import FEW_EVENTS, MOST_EVENTS
from api.preferences import preferences
from api.problems import INVALID, kind
from api.readers import readers_of
from api.segments import path_of, segment
from api.view_requests import as_problems, number_of, refuse_unknown
from api.view_routes import JSON, Route, found_by, is_at_hand, require_promises
from api.world import world_of
from commands.intake import bad_name
from infra.domain_model.contexts import Context
from infra.log.history import Wanted
from infra.log.partitioner import partition_of
from infra.log.records import time_of
from infra.log.rule import START, Counted, Reading
from projections.engine.views.core_views import snapshot_view
from projections.engine.views.queries import Found

LARGEST = 2**63 - 1
PARAMETERS = {"from_version", "limit", "rejected", "cursor", "after"}

NO_STREAM = kind(
    404, "no-stream", "The stream has no events.", "`position` tells up to where in the log there is none."
)


class Entry(msgspec.Struct, omit_defaults=True):
    """An event, or a rejected command, as history shows it."""

    version: int
    outcome: str
    at: str
    command_id: str
    type: str | UnsetType = UNSET
    data: msgspec.Raw | UnsetType = UNSET
    code: str | UnsetType = UNSET
    message: str | UnsetType = UNSET
    correlation_id: str | UnsetType = UNSET
    causation_id: str | UnsetType = UNSET


class History(msgspec.Struct):
    """The body of an answer."""

    stream: str
    version: int
    events: list[Entry]
    next: str | None


class Question(NamedTuple):
    """What a request asks for."""

    from_version: int
    limit: int
    rejected: bool
    bound: list[str]
    """What a cursor of it is bound to."""
    at: Reading
    """Where a cursor goes on."""
    rest: list[tuple[str, str]]
    """The parameters that the next page has too."""


def router_of(contexts: Mapping[str, Context]) -> APIRouter:
    """The route of each context."""
    router = APIRouter()
    for context in contexts.values():
        router.add_api_route(
            f"/{context.name}/{{stream_id}}/events",
            _route(context),
            operation_id=f"{context.name}_events",
            tags=[context.name],
            response_model=None,
            openapi_extra=history_docs.events(context),
        )
    return router


def stream_in(context: Context, request: Request) -> str:
    """The stream in the path. Raises Problem 422."""
    stream = f"{context.name}/{segment(request, 'stream_id')}"
    if problem := bad_name(stream, "-"):
        raise INVALID(errors=[{"at": "path.stream_id", "problem": problem}])
    return stream


async def version_of(request: Request, context: Context, stream: str) -> tuple[int, Found]:
    """The stream's version as the read model has it, 0 without events. Raises Problem 409, 422, 429, 503."""
    view, views = snapshot_view(context), readers_of(request).views
    found = await found_by(view, request, lambda: views.by_keys(view, [(stream,)]))
    return (int(msgspec.json.decode(found.rows[0].json)["version"]) if found.rows else 0), found


def place_in(found: Found, stream: str) -> tuple[int, int]:
    """The stream's partition, and up to which offset the read model has folded it."""
    [offsets] = found.position.positions.values()
    partition = partition_of(stream, len(offsets))
    return partition, offsets[partition]


def entries(one: Counted, after: int) -> Iterator[Entry]:
    """What a commit holds beyond a version."""
    commit = one.commit
    at = time_of(one.time_ms).isoformat()
    entry = partial(
        Entry,
        outcome=commit.outcome,
        at=at,
        command_id=commit.command_id,
        correlation_id=commit.correlation_id,
        causation_id=commit.causation_id,
    )
    if (reason := commit.reason) is not None:
        yield entry(version=commit.version, code=reason.code, message=reason.message)
    for version, event in enumerate(commit.events, start=commit.version - len(commit.events) + 1):
        if version > after:
            yield entry(version=version, type=event.type, data=event.data)


def _route(context: Context) -> Route:
    async def route(request: Request) -> Response:
        stream = stream_in(context, request)
        require_promises(world_of(request))
        with as_problems():
            asked = _question(request, stream)
        version, found = await version_of(request, context, stream)
        seen = {"Samefold-Position": str(found.position), "Cache-Control": "no-cache"}
        if not version and not asked.rejected:
            raise NO_STREAM(headers={"Samefold-Position": str(found.position)}, position=str(found.position))
        etag = {} if asked.rejected else {"ETag": f'"{version}"'}
        if etag and is_at_hand(request, str(version)):
            return Response(status_code=304, headers=seen | etag)
        history = await _history(request, stream, version, found, asked)
        if history.next is not None:
            etag = {}  # where a page ends is chance, so the same version may come with other bytes
            seen["Link"] = f'<{history.next}>; rel="next"'
        applied = preferences(request).applied(world_of(request).settings.api_max_wait_s)
        return Response(msgspec.json.encode(history), 200, seen | etag | applied, JSON)

    return route


async def _history(request: Request, stream: str, version: int, found: Found, asked: Question) -> History:
    partition, stop = place_in(found, stream)
    after = asked.from_version - 1
    wanted = Wanted(stream, partition, after, version, asked.rejected)
    if after >= version and not asked.rejected:
        return History(stream, version, [], None)
    with as_problems():
        if asked.at.next_offset > stop:
            raise BadCursor("The cursor is ahead of the read model.", "Begin without a cursor.")
        page = await readers_of(request).scans.page(wanted, asked.at, stop, asked.limit)
    found_entries = [entry for one in page.commits for entry in entries(one, after)]
    if page.is_last:
        return History(stream, version, found_entries, None)
    cursor = cursor_after(asked.bound, [str(number) for number in page.next])
    query = urlencode([*asked.rest, ("cursor", cursor)])
    context, _, stream_id = stream.partition("/")
    return History(stream, version, found_entries, f"{path_of(context, stream_id, 'events')}?{query}")


def _question(request: Request, stream: str) -> Question:
    """Raises Problem 422, BadCursor."""
    refuse_unknown(request, PARAMETERS)
    given = dict(request.query_params)
    from_version = number_of(given.get("from_version"), 1, LARGEST)
    limit = number_of(given.get("limit"), FEW_EVENTS, MOST_EVENTS)
    rejected = {"true": True, "false": False}.get(given.get("rejected", "false"))
    errors = []
    if from_version is None:
        errors.append({"at": "query.from_version", "problem": "It is a version: 1, 2, 3, …"})
    if limit is None:
        errors.append({"at": "query.limit", "problem": f"It is a number from 1 to {MOST_EVENTS}."})
    if rejected is None:
        errors.append({"at": "query.rejected", "problem": "It is true or false."})
    if from_version is None or limit is None or rejected is None:
        raise INVALID(errors=errors)
    bound = [stream, str(from_version), str(rejected)]
    at = _reading(given["cursor"], bound) if "cursor" in given else START
    rest = [(name, text) for name, text in given.items() if name in ("from_version", "limit", "rejected")]
    return Question(from_version, limit, rejected, bound, at, rest)


def _reading(cursor: str, bound: list[str]) -> Reading:
    try:
        reading = Reading(*map(int, values_of(cursor, bound, len(START))))
    except ValueError:
        reading = START
    if not 0 < reading.next_offset <= LARGEST:
        raise BadCursor("The cursor is not one of this question.", "Follow an answer's `next` as it is.")
    return reading
