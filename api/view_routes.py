"""`GET /views`: the read models, row by row and page by page. One set of routes for each view, made of what it declares."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import urlencode

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from api import view_docs
from api.client import client_of
from api.cursors import cursor_after
from api.preferences import preferences
from api.problems import kind, problem_of
from api.readers import readers_of
from api.rows import content_tag, row_body, row_tag, stream_of, tells_stream
from api.segments import path_of
from api.view_requests import as_problems, key_of, question_of, refuse_unknown, seen_by
from api.world import World, world_of
from projections.engine.views.queries import Found
from projections.engine.views.values import schema_of
from projections.engine.views.view import View

JSON = "application/json"

NO_ROW = kind(
    404, "no-row", "The view has no row with this key.", "`position` tells up to where in the log there is none."
)
PARKED = kind(
    409,
    "parked",
    "This row is not kept up to date.",
    "An event of its stream could not be folded, so the view leaves out the stream from there on, until an operator replays it: "
    "`samefold parked`.",
)

Route = Callable[[Request], Awaitable[Response]]


class PageAnswer(msgspec.Struct):
    """The body of a page."""

    items: list[msgspec.Raw]
    next: str | None
    position: str
    parked: int


def router_of(views: Mapping[str, View]) -> APIRouter:
    """The routes of all views but those that the write side lives on."""
    shown = {name: view for name, view in views.items() if not view.is_system}
    router = APIRouter(tags=["views"])
    router.add_api_route(
        "/views", _list(shown), operation_id="views", response_model=None, openapi_extra=view_docs.views()
    )
    for view in shown.values():
        router.add_api_route(
            f"/views/{view.name}",
            _page(view),
            operation_id=f"views_{view.name}",
            response_model=None,
            openapi_extra=view_docs.page(view),
        )
        router.add_api_route(
            path_to_row(view),
            _row(view),
            operation_id=f"views_{view.name}_row",
            response_model=None,
            openapi_extra=view_docs.row(view, parked=not tells_stream(view)),
        )
    return router


def path_to_row(view: View) -> str:
    return f"/views/{view.name}/" + "/".join(f"{{{column.name}}}" for column in view.key)


def require_promises(world: World) -> None:
    """Raises Problem 503 where the database is away, or what is read could be wrong because it is of another log."""
    for subject in ("database", "topics"):
        if error := world.look.wrong.get(subject):
            raise problem_of(error)


def answered(request: Request, tag: str, found: Found, body: bytes, headers: Mapping[str, str]) -> Response:
    """200, or 304 to whoever has it."""
    etag = f'W/"{tag}"'
    seen = {"ETag": etag, "Samefold-Position": str(found.position), "Cache-Control": "no-cache", **headers}
    if is_at_hand(request, tag):
        return Response(status_code=304, headers=seen)
    return Response(body, 200, seen, JSON)


def is_at_hand(request: Request, tag: str) -> bool:
    """Whether If-None-Match names it, by the weak comparison that RFC 9110 asks for there (section 13.1.2)."""
    given = ",".join(request.headers.getlist("If-None-Match"))
    return given.strip() == "*" or tag in _ETAG.findall(given)


_ETAG = re.compile(r'(?:W/)?"([!#-~\x80-\xff]*)"')


def _list(views: Mapping[str, View]) -> Route:
    async def route(request: Request) -> Response:
        """All views."""
        refuse_unknown(request, set())
        world = world_of(request)
        require_promises(world)
        with as_problems():
            parked = await readers_of(request).views.parked()
        described = [_described(view, parked.get(view.name, 0)) for view in views.values()]
        return Response(msgspec.json.encode({"views": described}), 200, media_type=JSON)

    return route


def _described(view: View, parked: int) -> dict[str, Any]:
    return {
        "name": view.name,
        "question": view.question,
        "kind": view.kind,
        "version": view.version,
        "agent": view.agent,
        "parked": parked,
        "key": [column.name for column in view.key],
        "columns": {column.name: schema_of(column) for column in view.columns},
        "href": path_of("views", view.name),
    }


def _row(view: View) -> Route:
    async def route(request: Request) -> Response:
        key = key_of(view, request)
        refuse_unknown(request, {"after"})
        stream = stream_of(view, key)
        streams = [stream] if stream is not None else []
        views = readers_of(request).views
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
        most, views = asked.limit + 1, readers_of(request).views
        async with readers_of(request).searches.place(view, asked.filters):
            found = await found_by(view, request, lambda: views.page(view, asked.filters, asked.after_key, most))
        rows = [row.json for row in found.rows[: asked.limit]]
        goes_on = len(found.rows) > asked.limit
        next_page = None
        if goes_on:
            cursor = cursor_after(asked.bound, _texts(view, rows[-1]))
            next_page = f"{path_of('views', view.name)}?{urlencode([*asked.rest, ('cursor', cursor)])}"
        body = msgspec.json.encode(PageAnswer(rows, next_page, str(found.position), found.parked))
        tag = content_tag(*rows, (next_page or "").encode(), b"%d" % found.parked)
        link = {"Link": f'<{next_page}>; rel="next"'} if next_page else {}
        return answered(request, tag, found, body, link | _applied(request))

    return route


async def found_by(view: View, request: Request, read: Callable[[], Awaitable[Found]]) -> Found:
    """What a read finds, once it is no older than `after` asks for. Raises Problem 409, 422, 429, 503."""
    world = world_of(request)
    require_promises(world)
    with as_problems():
        seen = seen_by(request)
        if not seen.positions:
            return await read()
        topic = world.events
        seen.require_log(topic.id, topic.partitions)
        wait_s = preferences(request).wait_within(world.settings.api_wait_s, world.settings.api_max_wait_s)
        return await readers_of(request).views.as_of(seen, view.agent, wait_s, client_of(request), read)


def _applied(request: Request) -> dict[str, str]:
    settings = world_of(request).settings
    return preferences(request).applied(settings.api_max_wait_s) if "after" in request.query_params else {}


def _texts(view: View, row: msgspec.Raw) -> list[str]:
    """The key of a row as texts."""
    values = msgspec.json.decode(row)
    found = (values[column.name] for column in view.key)
    return [str(value).lower() if isinstance(value, bool) else str(value) for value in found]
