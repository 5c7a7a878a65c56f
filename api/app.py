"""Builds the FastAPI application. `/docs` is its interactive page, from packaged files."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi_offline import FastAPIOffline
from starlette.responses import Response
from starlette.routing import Route

from api import commands, health, outcomes, problems, views
from api.door import OPEN, PROBLEMS, Door
from api.health import Readiness
from api.openapi import JSON, Body, document
from api.request_metrics import RequestMetrics
from api.requests import RawPath
from api.services import Services
from domain.engine.contexts import contexts
from infra.observability import metrics
from infra.settings import Settings
from projections.engine.views.core_views import all_views

VERSION = "1"


def create_app(settings: Settings, name: str = "api") -> FastAPI:
    """The app of one API process, whose connections are named `samefold <name>`. Raises NotConfigured, BadContext, BadView."""

    services = Services(settings, name)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        async with services:
            yield

    options: dict[str, Any] = {"title": "Samefold", "version": VERSION, "lifespan": lifespan, "redirect_slashes": False}
    options["exception_handlers"] = problems.HANDLERS
    if settings.shows_docs:
        app = FastAPIOffline(redoc_url=None, **options)
    else:
        app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, **options)
    app.state.services = services
    app.state.readiness = Readiness(services.stores, services.keys, services.issuer)
    services.stores.subscribe(lambda: metrics.API_WAITING.set(len(services.outcomes)))
    bodies: list[Body] = []
    routers = (commands.router_of(contexts(), bodies), outcomes.router(), health.router(), views.router_of(all_views()))
    for router in routers:
        app.router.routes += router.routes  # `include_router` would match each request twice
    at_the_door = PROBLEMS if services.issuer else ()
    app.openapi = cache(lambda: document(app, bodies, OPEN, at_the_door))  # type: ignore[method-assign]
    encoded = cache(lambda: msgspec.json.encode(app.openapi()))

    async def encoded_document(_request: Request) -> Response:
        return Response(encoded(), media_type=JSON)

    if settings.shows_docs:
        # before FastAPI's own, which encodes it again for each request: that takes longer than ten commands
        app.router.routes.insert(0, Route("/openapi.json", encoded_document))
    if services.issuer:
        app.add_middleware(Door, settings=settings, issuer=services.issuer)
    app.add_middleware(RawPath)
    app.add_middleware(RequestMetrics)
    return app
