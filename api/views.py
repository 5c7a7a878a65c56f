"""`GET /views`: the read models, by row, by page and live: one set of routes for each view, from what the view declares."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Hashable, Mapping
from contextlib import nullcontext, suppress
from functools import partial
from typing import Annotated, Any, NotRequired, TypeVar

import msgspec
from fastapi import APIRouter, Request
from pydantic import Field, TypeAdapter, WithJsonSchema
from starlette.responses import Response
from typing_extensions import TypedDict

from api import openapi, problems
from api.cursors import BAD_CURSOR, next_path
from api.door import caller_of, valid_for_s
from api.feeds import EventStream, Feed, Watcher
from api.live_lists import Listed, ListFeed
from api.live_rows import RowFeed, Watched
from api.openapi import JSON, Json, Parked, Position, parameter, responses
from api.permissions import DENIED, readable, rows_for
from api.problems import INVALID, METHOD_NOT_ALLOWED, STOPPING, invalid, kind, kind_of, problem_of
from api.requests import BAD_SEGMENT, path_of, preferences, refuse_unknown, single
from api.services import LONGEST_QUERY_MS, TOO_MANY_SEARCHES, TOO_MANY_SUBSCRIBERS, Services, services_of
from api.view_parameters import parameters_of
from api.view_questions import (
    BAD_TOKEN,
    IF_STOPPED,
    IF_UNINDEXED,
    LAST_ROWS,
    OF_LISTS,
    OTHER_LOG,
    SEARCH,
    key_of,
    question_of,
    seen_by,
)
from api.view_reader import (
    TOO_MANY_READERS,
    F,
    PositionNotReached,
    ViewNotLive,
    ViewReader,
    ViewStopped,
    content_tag,
    parked_since,
    row_members,
    row_tag,
    stream_of,
)
from infra.access import BadAccess, Rows
from infra.database.connect import DatabaseUnavailable
from projections.engine.queries.query import Query
from projections.engine.views.columns import BadValue, schema_of, value_of
from projections.engine.views.indexes import quoted
from projections.engine.views.pages import MOST_COUNTED, Missing, Page, missing_index, order_of
from projections.engine.views.queries import Found
from projections.engine.views.view import Kind, View

K = TypeVar("K", bound=Hashable)

LONGEST_TAG = 100
LONGEST_FEED_S = 300.0
"""A client asks again then. So a right or a key that was withdrawn ends its feed too, and a client that is gone, unseen by the
server, gives its place back."""
_ETAG = re.compile(r'(?:W/)?"([!#-~\x80-\xff]*)"')

NO_ROW = kind(404, "no-row", "The view has no row with this key.")
FIELDS = "application/vnd.samefold.fields+json"
"""A page whose rows have only the `fields` that were asked for: so its schema says that any may be missing."""
NO_INDEX = kind(422, "no-index", "No index serves this question.")
PARKED = kind(409, "parked", "This row is not kept up to date.")


def router_of(views: Mapping[str, View]) -> APIRouter:
    """The routes of all views, except those of the write side."""
    shown = {name: view for name, view in views.items() if not view.is_system}
    router = APIRouter(tags=["views"])
    router.add_api_route(
        "/views",
        partial(_list, shown),
        operation_id="views",
        summary="The views",
        description="The views, each with its name, question, key and columns.",
        response_model=ViewList,
        responses=responses({}, INVALID, kind_of(BadAccess), kind_of(DatabaseUnavailable)),
    )
    for view in shown.values():
        _add(router, view)
    return router


def _add(router: APIRouter, view: View) -> None:
    title = "".join(part.capitalize() for part in view.name.split("_"))
    # a segment is never empty; numbers ignore minLength
    key = [parameter("path", one.name, "", {"minLength": 1} | schema_of(one)) for one in view.key]
    columns = {one.name: Annotated[Any, WithJsonSchema(schema_of(one))] for one in view.columns}
    row = TypedDict(f"{title}Row", columns)  # type: ignore[misc]
    parked = {} if view.tells_stream else {"parked": Parked}
    answer = TypedDict(f"{title}Answer", {"row": row, "position": Position, **parked})  # type: ignore[misc]
    counted = {"count": Count, "count_is_exact": bool}
    others = {"next": NEXT, "position": Position, "parked": Parked} | {
        name: NotRequired[kind] for name, kind in counted.items()
    }
    page = TypedDict(f"{title}Page", {"items": list[row], **others})  # type: ignore[misc]
    part = {
        "type": "object",
        "properties": {one.name: schema_of(one) for one in view.columns},
        "additionalProperties": False,
    }
    items = Annotated[Any, WithJsonSchema({"type": "array", "items": part})]
    of_parts = TypedDict(f"{title}FieldsPage", {"items": items, **others})  # type: ignore[misc]
    schema = TypeAdapter(of_parts).json_schema()
    question = view.question or f"The rows of {view.name}."
    add_live = partial(router.add_api_route, response_class=EventStream, status_code=200)
    to_row = f"/views/{view.name}/" + "/".join(f"{{{column.name}}}" for column in view.key)
    router.add_api_route(
        f"/views/{view.name}",
        partial(_page, view),
        openapi_extra={"parameters": [*parameters_of(view), *_FRESHNESS]},
        operation_id=f"views_{view.name}",
        summary=f"Rows of {view.name}",
        description=question,
        response_model=page,
        response_description="Rows in the order of `sort`, then of their keys.",
        responses=responses(READ | {200: READ[200] | {"content": {FIELDS: {"schema": schema}}}}, *UNREAD, *_UNLISTED),
    )
    add_live(
        f"/views/{view.name}/live",  # before the rows, whose key it looks like
        partial(_live_list, view),
        openapi_extra={"parameters": [*parameters_of(view, is_live=True), _LAST_EVENT_ID]},
        operation_id=f"views_{view.name}_live_list",
        summary=f"Rows of {view.name}, and what changes among them",
        description="Server-sent events: `page` with the rows as they are now; then `changes`, with the places that `leave` the "
        "list that was sent before, and the rows that `enter` it, each at its place in the list as it is then; `stopped` when the "
        "view is not kept up to date, until it is resumed. The stream ends when the token does.",
        responses=_streamed("The list.", {"items": items, **_CHANGES}, NO_INDEX),
    )
    router.add_api_route(
        to_row,
        partial(_row, view),
        openapi_extra={"parameters": [*key, *_FRESHNESS]},
        operation_id=f"views_{view.name}_row",
        summary=f"One row of {view.name}",
        description=question,
        response_model=answer,
        response_description="The row.",
        responses=responses(READ, *UNREAD, NO_ROW, PARKED),
    )
    add_live(
        f"{to_row}/live",
        partial(_live, view),
        openapi_extra={"parameters": [*key, _LAST_EVENT_ID]},
        operation_id=f"views_{view.name}_live",
        summary=f"One row of {view.name}, whenever it changes",
        description="Server-sent events: `row` with the row as it is now, `gone` when there is none, `parked` when it is not "
        "kept up to date, `stopped` when the view is not, until it is resumed. A client that reads slowly gets "
        "only the newest state. The stream ends when the token does.",
        responses=_streamed("States of the row.", {"row": row, **parked, "since_version": _SINCE}, BAD_SEGMENT),
    )


def require_promises(services: Services) -> None:
    """Raises Problem 503 where the database is unavailable, or its rows could be of another log."""
    for subject in ("database", "topics"):
        if error := services.stores.failures.get(subject):
            raise problem_of(error)


def answered(
    request: Request, tag: str, at: Mapping[str, str], body: bytes, headers: Mapping[str, str], media_type: str = JSON
) -> Response:
    """200, or 304 where the client has it. `at` are the headers of `_as_of`."""
    seen = {"ETag": f'W/"{tag}"', **at, **headers}
    given = ",".join(request.headers.getlist("If-None-Match"))
    # by the weak comparison that RFC 9110 asks for there (section 13.1.2)
    if given.strip() == "*" or tag in _ETAG.findall(given):
        return Response(status_code=304, headers=seen)
    return Response(body, 200, seen, media_type)


async def _list(views: Mapping[str, View], request: Request) -> Response:
    refuse_unknown(request)
    services = services_of(request)
    require_promises(services)
    left_out = await services.views.left_out()
    described = [
        ViewDescription(
            name=view.name,
            question=view.question,
            kind=view.kind,
            version=view.version,
            agent=view.agent,
            parked=left_out.get(view.name, (0, None))[0] if is_all else None,
            stopped=left_out.get(view.name, (0, None))[1],
            key=[column.name for column in view.key],
            columns={column.name: schema_of(column) for column in view.columns},
            orders=[",".join(map(str, order)) for order in (order_of(view), *view.indexes)],
            href=path_of("views", view.name),
        )
        for view, is_all in readable(request, views)
    ]
    return Response(msgspec.json.encode({"views": described}), 200, media_type=JSON)


async def _row(view: View, request: Request) -> Response:
    only = rows_for(request, view)
    key = key_of(view, request)
    refuse_unknown(request, {"after", IF_STOPPED})
    views = _reader(request)
    found = await found_by(view, request, lambda: views.by_keys(view, [key], [only] if only else ()))
    at = _as_of(found)
    position = at["Samefold-Position"]
    if only and not found.rows:  # also where it is parked: that would reveal the row
        raise NO_ROW(headers=at, position=position)
    if (since := parked_since(view, found, key)) is not None:
        stream = stream_of(view, key)
        raise PARKED(headers=at, view=view.name, stream=stream, since_version=since, position=position)
    if not found.rows:
        raise NO_ROW(headers=at, position=position, **(_LIVE_HINT if key == ("live",) else {}))
    [row] = await views.shown(found)
    body = msgspec.json.encode(row_members(view, found, row) | {"position": position})
    return answered(request, row_tag(view, found, row), at, body, _applied(request))


_LIVE_HINT = {"hint": "For the live list, send `Accept: text/event-stream`."}


async def _page(view: View, request: Request) -> Response:
    only, caller, services, views = rows_for(request, view), caller_of(request), services_of(request), _reader(request)
    subject = caller.subject if caller else None
    asked = question_of(view, request, subject or "")
    page, most = asked.page, asked.page.most - 1
    missing = missing_index(view, page, only)
    require_promises(services)
    is_search = missing is not None and not await views.is_small(view)
    # what only the caller's rights need an index for is the author's to mend, and no reason to refuse
    if is_search and not asked.may_search and missing_index(view, page, None) is not None:
        raise NO_INDEX(_unserved(view, page, only), hint=_remedy(view, missing or Missing()), view=view.name)

    async def read() -> Found:
        """Who waits for a position is no search meanwhile."""
        async with services.searching(subject) if is_search else nullcontext():
            return await views.page(view, page, only)

    found = await found_by(view, request, read)
    rows, next_page = (await views.shown(found))[:most], None
    if len(found.rows) > most:
        # the values as they are stored: so the table is ordered, and addresses end up in logs
        next_page = next_path(path_of("views", view.name), asked.given, asked.bound, found.rows[most - 1].place or ())
    at = _as_of(found)
    counted: dict[str, Any] = {}
    if found.counted is not None:
        counted = {"count": min(found.counted, MOST_COUNTED), "count_is_exact": found.counted <= MOST_COUNTED}
    members = {"items": rows, "next": next_page, "position": at["Samefold-Position"], "parked": found.parked} | counted
    tag = content_tag(*rows, (next_page or "").encode(), b"%a" % found.parked, msgspec.json.encode(counted))
    link = {"Link": f'<{next_page}>; rel="next"'} if next_page else {}
    media_type = JSON if page.shown is None else FIELDS
    return answered(request, tag, at, msgspec.json.encode(members), link | _applied(request), media_type)


def _unserved(view: View, page: Page, only: Rows | None) -> str:
    names = [one.column.name for one in page.filters] + [name for one in (only.shape if only else ()) for name in one]
    found = f" finds rows by {', '.join(dict.fromkeys(names))}" if names else " sorts them"
    return f"View '{view.name}' is large, and no index of it{found} in the order {','.join(map(str, page.order))}."


def _remedy(view: View, missing: Missing, *, may_search: bool = True) -> str:
    index = f"`Index({', '.join(map(quoted, missing.columns))})`"
    steps = [f"add {index} to INDEXES in the file of view '{view.name}' (docs/new-view.md)"] if missing.columns else []
    steps += [f"ask with `sort={missing.sort}`"] if missing.sort else []
    step = " and ".join(steps)
    search = f"a search within {LONGEST_QUERY_MS / 1000:g} s: `{IF_UNINDEXED}={SEARCH}`."
    if not step:
        return f"No index can serve it: {missing.why} Ask for {'' if may_search else 'pages, with '}{search}"
    step = step[0].upper() + step[1:]
    return f"{step}, or ask for {search}" if may_search else f"{step}: each batch asks it again."


async def _live(view: View, request: Request) -> Response:
    only, key = rows_for(request, view), key_of(view, request)
    refuse_unknown(request)
    return await _watched(view, request, RowFeed, Watched(only, key))


async def _live_list(view: View, request: Request) -> Response:
    if _means_row(view, request):
        request.scope["path_params"] = {view.key[0].name: "live"}
        return await _row(view, request)
    only, caller = rows_for(request, view), caller_of(request)
    page = question_of(view, request, caller.subject if caller else "", OF_LISTS).page
    page = page._replace(most=page.most - 1)  # it has no next page
    require_promises(services_of(request))
    if (missing := missing_index(view, page, only)) is not None and not await _reader(request).is_small(view):
        raise NO_INDEX(_unserved(view, page, only), hint=_remedy(view, missing, may_search=False), view=view.name)
    return await _watched(view, request, ListFeed, Listed(only, page))


def _means_row(view: View, request: Request) -> bool:
    """Whether the path may mean the row whose key is written `live`, and neither `Accept` nor the question says otherwise."""
    [first, *others] = view.key
    if others or EventStream.media_type in request.headers.get("Accept", "").lower():
        return False
    with suppress(BadValue):
        value_of(first, "live")
        return request.query_params.keys() <= {"after", IF_STOPPED}
    return False


async def _watched(view: View, request: Request, kind: type[Feed[K]], watched: K) -> Response:
    if request.method == "HEAD":
        raise METHOD_NOT_ALLOWED("It would not end.", headers={"Allow": "GET"})
    seen = single(request, "Last-Event-ID")
    if seen is not None and len(seen) > LONGEST_TAG:
        raise invalid([("header.Last-Event-ID", "It is the id of an event that was sent.")])
    services = services_of(request)
    require_promises(services)
    await services.views.require_live(view)
    if services.is_stopping:
        raise STOPPING()
    slots, feed = services.subscribers, services.feed(view, kind)
    await slots.acquire()
    watcher = feed.enter(watched, Watcher(seen or None))
    valid_s = valid_for_s(request)
    end_s = LONGEST_FEED_S if valid_s is None else min(valid_s, LONGEST_FEED_S)
    expiry = asyncio.get_running_loop().call_later(end_s, watcher.end)

    def end() -> None:
        expiry.cancel()
        feed.leave(watched, watcher)
        slots.release()

    return EventStream(watcher.frames(), end)


def _reader(request: Request) -> ViewReader:
    """Where the request asks for that, one that reads the last rows of a stopped view. Raises Problem 422."""
    views, given = services_of(request).views, request.query_params.get(IF_STOPPED)
    if given not in (None, LAST_ROWS):
        raise invalid([(f"query.{IF_STOPPED}", f"Its only value is {LAST_ROWS}.")])
    return views.with_last_rows() if given else views


async def found_by(of: View | Query, request: Request, read: Callable[[], Awaitable[F]]) -> F:
    """What a read finds, once it is no older than `after` asks for. Raises Problem 429, 503, BadToken, OtherLog, ViewNotLive, …"""
    services = services_of(request)
    require_promises(services)
    seen = seen_by(request)
    if not seen.positions:
        return await read()
    (_, topic), settings = services.stores.topics(), services.settings
    seen.require_log(topic.id, topic.partitions)
    wait_s = preferences(request).wait_or(settings.api_wait_s)
    return await services.views.no_older(seen, {of.agent} if isinstance(of, View) else of.agents, wait_s, request, read)


def _as_of(found: Found) -> dict[str, str]:
    """The headers that say how far the rows are folded and, of a stopped view, since when no further."""
    stopped = {"Samefold-Stopped": found.stopped[1]} if found.stopped else {}
    return {"Samefold-Position": str(found.position), **stopped}


def _applied(request: Request) -> dict[str, str]:
    return preferences(request).applied if "after" in request.query_params else {}


# ── the OpenAPI document ──


class ViewDescription(TypedDict):
    """A view's routes, key and columns."""

    name: str
    question: str
    kind: Kind
    version: int
    agent: str
    parked: Parked
    stopped: Annotated[str | None, Field(description="Where the view has stopped at an event, the reason's code.")]
    key: list[str]
    columns: Annotated[dict[str, Any], Field(description="The JSON schema of each column.")]
    orders: Annotated[
        list[str], Field(description="What a large table can be sorted by, and filtered from the left: for `sort`.")
    ]
    href: str


Count = Annotated[
    int, Field(ge=0, le=MOST_COUNTED, description="Rows with these filters, where `count=true` asks for it")
]


NEXT = Annotated[str | None, Field(description="The path of the next page, null on the last.")]


class ViewList(TypedDict):
    """All views, by name."""

    views: list[ViewDescription]


def _streamed(description: str, states: Mapping[str, Any], *kinds: problems.Kind) -> openapi.Responses:
    """Server-sent events with a state as JSON (OpenAPI 3.2, section 4.14.4); each kind of event has some of these members."""
    optional = {name: NotRequired[kind] for name, kind in {**states, "code": str, "since": str}.items()}
    state = TypedDict("State", {"position": Position, **optional})  # type: ignore[misc]
    schema: Json = TypeAdapter(state).json_schema(ref_template=openapi.REF)
    schema.pop("$defs", None)
    text = {"type": "string"}
    data = text | {"contentMediaType": JSON, "contentSchema": schema}
    event = {"type": "object", "properties": {"event": text, "id": text, "retry": {"type": "integer"}, "data": data}}
    content = {EventStream.media_type: {"schema": text, "itemSchema": event}}
    answer: openapi.Responses = {200: {"description": description, "content": content}}
    return responses(answer, INVALID, *kinds, TOO_MANY_SUBSCRIBERS, *_UNREADABLE)


_SINCE = Annotated[int, Field(description="The stream's first version that the row leaves out.")]
_CHANGES = {"leave": list[int], "enter": list[dict[str, Any]], "parked": Parked}


_IF_STOPPED = parameter(
    "query",
    IF_STOPPED,
    "Where the view has stopped: its last rows, at the position where it stopped, instead of 503.",
    {"type": "string", "enum": [LAST_ROWS]},
)
IF_NONE_MATCH = openapi.in_header("If-None-Match", "ETags of earlier answers: 304 if one still holds.", 'W/"4711"')
_FRESHNESS = (openapi.AFTER, _IF_STOPPED, openapi.PREFER, IF_NONE_MATCH)
_LAST_EVENT_ID = openapi.in_header("Last-Event-ID", "The `id` of the last event; an EventSource sends it.", "4711")
_SEEN = {
    "ETag": openapi.header("For If-None-Match"),
    "Samefold-Position": openapi.header("The position token, as in the body"),
    "Samefold-Stopped": openapi.header(
        "Since when the view has stopped, where it has", type="string", format="date-time"
    ),
}
READ: openapi.Responses = {
    200: {"headers": _SEEN},
    304: {"description": "It is as it was.", "headers": _SEEN},
}
_UNLISTED = (BAD_CURSOR, NO_INDEX, TOO_MANY_SEARCHES)
_UNREADABLE = (kind_of(DatabaseUnavailable), kind_of(ViewNotLive), kind_of(ViewStopped), STOPPING, *DENIED)
UNREAD = (
    *(BAD_TOKEN, OTHER_LOG, INVALID, BAD_SEGMENT, TOO_MANY_READERS),
    *(kind_of(PositionNotReached), *_UNREADABLE),
)
