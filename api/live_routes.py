"""Server-sent events: a view's row, as it is and whenever it changes: `GET /views/{view}/{key…}/live`."""

from __future__ import annotations

from collections.abc import Mapping

from fastapi import APIRouter, Request
from starlette.responses import Response

from api import view_docs
from api.event_stream import EventStream
from api.problems import INVALID
from api.readers import readers_of
from api.request_headers import single
from api.rows import tells_stream
from api.view_requests import as_problems, key_of, refuse_unknown
from api.view_routes import Route, path_to_row, require_promises
from api.world import world_of
from projections.engine.views.view import View

LONGEST_TAG = 100


def router_of(views: Mapping[str, View]) -> APIRouter:
    """The routes of all views but those that the write side lives on."""
    router = APIRouter()
    for view in views.values():
        if not view.is_system:
            router.add_api_route(
                f"{path_to_row(view)}/live",
                _row(view),
                operation_id=f"views_{view.name}_live",
                tags=["views"],
                response_model=None,
                response_class=EventStream,
                status_code=200,
                openapi_extra=view_docs.live_row(view, parked=not tells_stream(view)),
            )
    return router


def _row(view: View) -> Route:
    async def route(request: Request) -> Response:
        key = key_of(view, request)
        refuse_unknown(request, set())
        seen = _last_event_id(request)
        require_promises(world_of(request))
        readers = readers_of(request)
        with as_problems():
            await readers.views.require_live(view)
        readers.room.enter()
        feed = readers.rows(view)
        watcher = feed.watch(key, seen)

        def end() -> None:
            feed.leave(watcher)
            readers.room.leave()

        return EventStream(watcher.frames(), end)

    return route


def _last_event_id(request: Request) -> str | None:
    """Raises Problem 400, 422."""
    seen = single(request, "Last-Event-ID")
    if seen is not None and len(seen) > LONGEST_TAG:
        raise INVALID(errors=[{"at": "header.Last-Event-ID", "problem": "It is the id of an event that was sent."}])
    return seen or None
