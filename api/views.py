"""`GET /views`: the read models, row by row, page by page and live. One set of routes for each view, made of what it declares."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import replace
from inspect import Parameter
from itertools import takewhile
from typing import Annotated, Any, NotRequired
from urllib.parse import urlencode

import msgspec
from fastapi import APIRouter, Header, Path, Query, Request
from pydantic import Field, TypeAdapter, WithJsonSchema
from starlette.responses import Response
from typing_extensions import TypedDict

from api import openapi
from api.live_rows import EventStream
from api.openapi import Json, Parked, Position, Route, parameter, problems
from api.problems import INVALID, kind, problem_of
from api.requests import BAD_SEGMENT, path_of, preferences, single
from api.rows import content_tag, row_body, row_tag, stream_of, tells_stream
from api.services import TOO_MANY_SEARCHES, TOO_MANY_SUBSCRIBERS, Services, services_of
from api.view_questions import (
    FEW_ROWS,
    MOST_ROWS,
    PAGING,
    as_problems,
    is_nullable,
    key_of,
    question_of,
    refuse_unknown,
    seen_by,
)
from api.view_reader import TOO_MANY_READERS
from projections.engine.views.columns import schema_of
from projections.engine.views.queries import Found
from projections.engine.views.view import Kind, View

JSON = "application/json"
LONGEST_TAG = 100
_ETAG = re.compile(r'(?:W/)?"([!#-~\x80-\xff]*)"')

NO_ROW = kind(404, "no-row", "The view has no row with this key.")
PARKED = kind(409, "parked", "This row is not kept up to date.")


class PageAnswer(msgspec.Struct):
    """The body of a page."""

    items: list[msgspec.Raw]
    next: str | None
    position: str
    parked: int


def router_of(views: Mapping[str, View]) -> APIRouter:
    """The routes of all views but those that the write side lives on."""
    shown = {name: view for name, view in views.items() if not view.is_system}
    router = APIRouter(route_class=openapi.Described, tags=["views"])
    router.add_api_route(
        "/views",
        openapi.describe(_list(shown)),
        operation_id="views",
        summary="The views",
        description="What may be asked: each view's name, question, key and columns.",
        response_model=ViewList,
        responses={422: problems("A parameter is not known.", INVALID), 503: problems("The database is unavailable.")},
    )
    for view in shown.values():
        _add(router, view)
    return router


def _add(router: APIRouter, view: View) -> None:
    about = _Described(view)
    to_row = f"/views/{view.name}/" + "/".join(f"{{{column.name}}}" for column in view.key)
    router.add_api_route(
        f"/views/{view.name}",
        openapi.describe(_page(view), *about.filters, *_PAGE, openapi.AFTER, openapi.PREFER, _IF_NONE_MATCH),
        operation_id=f"views_{view.name}",
        summary=f"Rows of {view.name}, by key",
        description=view.question,
        response_model=about.page,
        response_description="Rows in the order of their keys.",
        responses=_READ
        | {200: {"headers": _SEEN, "links": {"row": about.to_row}}}
        | {429: problems("Too many read or search.", TOO_MANY_READERS, TOO_MANY_SEARCHES)},
    )
    router.add_api_route(
        to_row,
        openapi.describe(_row(view), *about.key, openapi.AFTER, openapi.PREFER, _IF_NONE_MATCH),
        operation_id=f"views_{view.name}_row",
        summary=f"One row of {view.name}",
        description=view.question,
        response_model=about.answer,
        response_description="The row.",
        responses=_READ | {404: problems("There is no such row.", NO_ROW), 409: problems("It may be old.", PARKED)},
    )
    router.add_api_route(
        f"{to_row}/live",
        openapi.describe(_live(view), *about.key, _LAST_EVENT_ID),
        operation_id=f"views_{view.name}_live",
        summary=f"One row of {view.name}, whenever it changes",
        description="Server-sent events: `row` with the row as it is now, `gone` when there is none, `parked` when it is not "
        "kept up to date. Only the newest state is sent: changes that follow each other faster than they are read are one.",
        response_class=EventStream,
        status_code=200,
        responses={
            200: {"description": "States of the row.", "content": {EventStream.media_type: about.events}},
            422: problems("Something does not fit.", INVALID, BAD_SEGMENT),
            429: problems("Too many are subscribed.", TOO_MANY_SUBSCRIBERS),
            503: problems("The database is unavailable, or another version of the view is live."),
        },
    )


def require_promises(services: Services) -> None:
    """Raises Problem 503 where the database is unavailable, or what is read could be wrong because it is of another log."""
    for subject in ("database", "topics"):
        if error := services.stores.failures.get(subject):
            raise problem_of(error)


def answered(request: Request, tag: str, found: Found, body: bytes, headers: Mapping[str, str]) -> Response:
    """200, or 304 to whoever has it."""
    seen = {"ETag": f'W/"{tag}"', "Samefold-Position": str(found.position), "Cache-Control": "no-cache", **headers}
    given = ",".join(request.headers.getlist("If-None-Match"))
    # by the weak comparison that RFC 9110 asks for there (section 13.1.2)
    if given.strip() == "*" or tag in _ETAG.findall(given):
        return Response(status_code=304, headers=seen)
    return Response(body, 200, seen, JSON)


def _list(views: Mapping[str, View]) -> Route:
    async def route(request: Request) -> Response:
        refuse_unknown(request, set())
        services = services_of(request)
        require_promises(services)
        with as_problems():
            parked = await services.views.parked()
        described = [
            ViewDescription(
                name=view.name,
                question=view.question,
                kind=view.kind,
                version=view.version,
                agent=view.agent,
                parked=parked.get(view.name, 0),
                key=[column.name for column in view.key],
                columns={column.name: schema_of(column) for column in view.columns},
                href=path_of("views", view.name),
            )
            for view in views.values()
        ]
        return Response(msgspec.json.encode({"views": described}), 200, media_type=JSON)

    return route


def _row(view: View) -> Route:
    async def route(request: Request) -> Response:
        key = key_of(view, request)
        refuse_unknown(request, {"after"})
        stream = stream_of(view, key)
        streams = [stream] if stream is not None else []
        views = services_of(request).views
        found = await found_by(view, request, lambda: views.by_keys(view, [key], streams))
        position = str(found.position)
        at = {"Samefold-Position": position}
        if stream is not None and (since := found.parked_since.get(stream)) is not None:
            raise PARKED(headers=at, view=view.name, stream=stream, since_version=since, position=position)
        if not found.rows:
            raise NO_ROW(headers=at, position=position)
        row = found.rows[0].json
        return answered(request, row_tag(view, found, row), found, row_body(view, found, row), _applied(request))

    return route


def _page(view: View) -> Route:
    async def route(request: Request) -> Response:
        with as_problems():
            asked = question_of(view, request)
        most, services = asked.limit + 1, services_of(request)
        searches = services.searches if is_search(view, asked.filters) else None
        if searches:
            await searches.take()
        try:
            found = await found_by(
                view, request, lambda: services.views.page(view, asked.filters, asked.after_key, most)
            )
        finally:
            if searches:
                searches.give_back()
        rows = [row.json for row in found.rows[: asked.limit]]
        next_page = None
        if len(found.rows) > asked.limit:
            cursor = asked.cursor_after(_texts(view, rows[-1]))
            next_page = f"{path_of('views', view.name)}?{urlencode([*asked.rest, ('cursor', cursor)])}"
        body = msgspec.json.encode(PageAnswer(rows, next_page, str(found.position), found.parked))
        tag = content_tag(*rows, (next_page or "").encode(), b"%d" % found.parked)
        link = {"Link": f'<{next_page}>; rel="next"'} if next_page else {}
        return answered(request, tag, found, body, link | _applied(request))

    return route


def _live(view: View) -> Route:
    async def route(request: Request) -> Response:
        key = key_of(view, request)
        refuse_unknown(request, set())
        seen = single(request, "Last-Event-ID")
        if seen is not None and len(seen) > LONGEST_TAG:
            raise INVALID(errors=[{"at": "header.Last-Event-ID", "problem": "It is the id of an event that was sent."}])
        services = services_of(request)
        require_promises(services)
        with as_problems():
            await services.views.require_live(view)
        await services.subscribers.take()
        feed = services.feed(view)
        watcher = feed.watch(key, seen or None)

        def end() -> None:
            feed.leave(watcher)
            services.subscribers.give_back()

        return EventStream(watcher.frames(), end)

    return route


async def found_by(view: View, request: Request, read: Callable[[], Awaitable[Found]]) -> Found:
    """What a read finds, once it is no older than `after` asks for. Raises Problem 409, 422, 429, 503."""
    services = services_of(request)
    require_promises(services)
    with as_problems():
        seen = seen_by(request)
        if not seen.positions:
            return await read()
        topic = services.events
        seen.require_log(topic.id, topic.partitions)
        settings = services.settings
        wait_s = preferences(request).wait_within(settings.api_wait_s, settings.api_max_wait_s)
        return await services.views.no_older(seen, view.agent, wait_s, request, read)


def is_search(view: View, filtered: Collection[str]) -> bool:
    """Whether a page is filtered by other columns than the first of the key, which its index leads to."""
    return not set(filtered) <= set(takewhile(lambda name: name in filtered, (column.name for column in view.key)))


def _applied(request: Request) -> dict[str, str]:
    longest = services_of(request).settings.api_max_wait_s
    return preferences(request).applied(longest) if "after" in request.query_params else {}


def _texts(view: View, row: msgspec.Raw) -> list[str]:
    """The key of a row as texts."""
    values = msgspec.json.decode(row)
    found = (values[column.name] for column in view.key)
    return [str(value).lower() if isinstance(value, bool) else str(value) for value in found]


# ── what the document says ──


class ViewDescription(TypedDict):
    """What may be asked of a view."""

    name: str
    question: str
    kind: Kind
    version: int
    agent: str
    parked: Parked
    key: list[str]
    columns: Annotated[dict[str, Any], Field(description="The JSON schema of each column.")]
    href: str


class ViewList(TypedDict):
    """All views, by name."""

    views: list[ViewDescription]


class _Described:
    """A view's parameters, and the types of its answers."""

    def __init__(self, view: View) -> None:
        title = "".join(part.capitalize() for part in view.name.split("_"))
        # an empty segment is none; numbers take no notice of it
        self.key = [parameter(Path, one.name, "", {"minLength": 1} | schema_of(one)) for one in view.key]
        self.filters = [_filter(view, name) for name in (one.name for one in view.columns) if name not in PAGING]
        columns = {one.name: Annotated[Any, WithJsonSchema(schema_of(one))] for one in view.columns}
        row = TypedDict(f"{title}Row", columns)  # type: ignore[misc]
        parked = {} if tells_stream(view) else {"parked": Parked}
        self.answer = TypedDict(f"{title}Answer", {"row": row, "position": Position, **parked})  # type: ignore[misc]
        next_ = Annotated[str | None, Field(description="The path of the next page, null on the last.")]
        members = {"items": list[row], "next": next_, "position": Position, "parked": Parked}
        self.page = TypedDict(f"{title}Page", members)  # type: ignore[misc]
        self.events = _events(row, parked)
        place = {f"path.{one.name}": f"$response.body#/items/0/{one.name}" for one in view.key}
        self.to_row = {"operationId": f"views_{view.name}_row", "parameters": place}


def _filter(view: View, name: str) -> Parameter:
    column = next(one for one in view.columns if one.name == name)
    said, schema = "Only rows with this value", schema_of(replace(column, optional=False))
    if is_nullable(column):
        said, schema = f"{said}; empty: those without one", {"anyOf": [schema, {"const": ""}]}
    return parameter(Query, name, f"{said}.", schema)


def _events(row: Any, parked: Json) -> Json:
    """Server-sent events with a row's state as JSON (OpenAPI 3.2, section 4.14.4): `gone` has no row."""
    since = Annotated[int, Field(description="The stream's first version that the row leaves out.")]
    members = {"row": row, **parked, "since_version": since}
    optional = {name: NotRequired[kind] for name, kind in members.items()}
    state = TypedDict("State", {"position": Position, **optional})  # type: ignore[misc]
    schema: Json = TypeAdapter(state).json_schema(ref_template=openapi.REF)
    schema.pop("$defs")
    text = {"type": "string"}
    data = text | {"contentMediaType": JSON, "contentSchema": schema}
    event = {"type": "object", "properties": {"event": text, "id": text, "retry": {"type": "integer"}, "data": data}}
    return {"schema": text, "itemSchema": event}


_PAGE = (
    parameter(
        Query, "limit", "How many rows.", {"type": "integer", "minimum": 1, "maximum": MOST_ROWS, "default": FEW_ROWS}
    ),
    parameter(Query, "cursor", "Where the page before ended; it is part of `next`.", {"type": "string"}),
)
_IF_NONE_MATCH = parameter(
    Header, "If-None-Match", "ETags of answers at hand: 304 if one of them still holds.", {"type": "string"}
)
_LAST_EVENT_ID = parameter(
    Header,
    "Last-Event-ID",
    "The `id` of the last event that was seen; an EventSource sends it by itself.",
    {"type": "string"},
)
_SEEN = {
    "ETag": openapi.header("For If-None-Match"),
    "Samefold-Position": openapi.header("The position token, as in the body"),
}
_READ: dict[int | str, Json] = {
    200: {"headers": _SEEN},
    304: {"description": "It is as it was.", "headers": _SEEN},
    409: problems("The position is of another log."),
    422: problems("Something does not fit.", INVALID, BAD_SEGMENT),
    429: problems("Too many wait for the read model.", TOO_MANY_READERS),
    503: problems("A store is unavailable, another version of the view is live, or the wait is over."),
}
