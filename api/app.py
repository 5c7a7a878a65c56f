"""Builds the FastAPI application. `/docs` is its interactive page, from packaged files."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import cache
from typing import Any, cast

import msgspec
from fastapi import FastAPI, Request
from fastapi.routing import APIRoute
from fastapi_offline import FastAPIOffline
from starlette.responses import Response
from starlette.routing import BaseRoute, Match, Route
from starlette.types import Receive, Scope, Send

from api import commands, health, hooks, outcomes, problems, queries, views
from api.door import OPEN, PROBLEMS, Door
from api.health import Readiness
from api.openapi import JSON, Body, document
from api.request_metrics import RequestMetrics
from api.requests import RawPath
from api.services import Services
from domain.engine.contexts import contexts
from infra.observability import metrics
from infra.settings import Settings
from projections.engine.queries.query import discover
from projections.engine.views.core_views import all_views

VERSION = "1"


def create_app(settings: Settings, name: str = "api") -> FastAPI:
    """The app of one API process, whose connections are named `samefold <name>`.

    Raises NotConfigured, BadContext, BadView, BadQuery, BadPolicy, BadSettings.
    """

    services = Services(settings, name)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        async with services:
            yield

    options: dict[str, Any] = {"title": "Samefold", "version": VERSION, "lifespan": lifespan, "redirect_slashes": False}
    options["exception_handlers"] = problems.HANDLERS
    # RequestMetrics makes a request's span; FastAPI's would be a second one, with the stream's name in it
    options["telemetry"] = {"tracing": False, "metrics": False, "logs": False}
    if settings.shows_docs:
        app = FastAPIOffline(redoc_url=None, **options)
    else:
        app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, **options)
    app.state.services = services
    app.state.readiness = Readiness(services.stores, services.keys, services.issuer)
    services.stores.subscribe(lambda: metrics.API_WAITING.set(len(services.outcomes)))
    bodies: list[Body] = []
    routers = [
        *(commands.router_of(contexts(), bodies), outcomes.router(), health.router()),
        *(views.router_of(all_views()), queries.router_of(discover()), hooks.router_of(services.hooks)),
    ]
    open_paths = OPEN | {hooks.path_of(hook) for hook in services.hooks}
    if settings.console:
        from api.console.routes import router_of  # brings Jinja2, which a process without the console does without

        routers.append(router_of(app, services))
    ours = [route for router in routers for route in router.routes]
    app.router.routes = [Direct(ours), *app.router.routes, *ours]  # `include_router` would match each request twice
    at_the_door = PROBLEMS if services.issuer else ()
    app.openapi = cache(lambda: document(app, bodies, open_paths, at_the_door))  # type: ignore[method-assign]
    encoded = cache(lambda: msgspec.json.encode(app.openapi()))

    async def encoded_document(_request: Request) -> Response:
        return Response(encoded(), media_type=JSON)

    if settings.shows_docs:
        # before FastAPI's own, which encodes it again for each request: that takes longer than ten commands
        app.router.routes.insert(0, Route("/openapi.json", encoded_document))
    if services.issuer:
        app.add_middleware(Door, settings=settings, issuer=services.issuer, open_paths=open_paths)
    app.add_middleware(RawPath)
    app.add_middleware(RequestMetrics)
    return app


class Direct(BaseRoute):
    """The first route: calls our routes' functions with the request itself, for HEAD as for GET.

    FastAPI tries one route after the other, and its layers take a fifth of the API's time for a command. It answers what has no
    route here: /docs, 404, 405.
    """

    def __init__(self, routes: Iterable[BaseRoute]) -> None:
        self._tree: dict[Any, Any] = {}
        """By one segment after the other, `...` for a parameter; then by None and the method."""
        for route in (one for one in routes if isinstance(one, APIRoute)):
            node = self._tree
            for part in route.path.split("/"):
                node = node.setdefault(... if part.startswith("{") else part, {})
            methods = {*(route.methods or ())}
            also = {"HEAD"} if "GET" in methods else set()
            node.setdefault(None, {}).update(dict.fromkeys(methods | also, route))

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Gives the request its route and the values of its parameters."""
        values: list[str] = []
        parts = scope["path"].split("/") if scope["type"] == "http" else []
        routes = _found(self._tree, parts, values)
        if (route := routes.get(scope.get("method"))) is None:
            return Match.NONE, {}
        return Match.FULL, {"route": route, "path_params": dict(zip(route.param_convertors, values, strict=True))}

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await scope["route"].endpoint(Request(scope, receive))
        await response(scope, receive, send)


def _found(node: dict[Any, Any], parts: Sequence[str], values: list[str], at: int = 0) -> dict[Any, Any]:
    """The routes of a path by their methods, with the values of its parameters; a key may look like a word of a longer path."""
    if at == len(parts):
        return cast(dict[Any, Any], node.get(None, {}))
    if (child := node.get(parts[at])) is not None and (found := _found(child, parts, values, at + 1)):
        return found
    if not parts[at] or (child := node.get(...)) is None:
        return {}
    values.append(parts[at])
    if not (found := _found(child, parts, values, at + 1)):
        values.pop()
    return found
