"""The FastAPI application, put together."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI

from api import (
    command_routes,
    health_routes,
    live_routes,
    metrics_routes,
    openapi,
    outcome_routes,
    problem_routes,
    problems,
    view_routes,
)
from api.observing import Observing
from api.readers import Readers
from api.readiness import Readiness
from api.segments import RawPath
from api.world import World
from infra.domain_model.contexts import contexts
from infra.observability import metrics
from infra.settings import Settings
from projections.engine.views.core_views import all_views

VERSION = "1"


class _App(FastAPI):
    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            self.openapi_schema = openapi.document(self)
        return self.openapi_schema


def create_app(settings: Settings, name: str = "api") -> FastAPI:
    """The app of one API process, whose connections are named `samefold <name>`. Raises NotConfigured, BadContext, BadView."""

    world = World(settings, name)
    readers = Readers(world)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        async with world:
            ending = world.parts.task("readers", readers.end(world.stopping), may_return=True)
            yield
            world.stopping.set()
            await ending

    app = _App(
        title="Samefold",
        version=VERSION,
        lifespan=lifespan,
        # they load scripts from elsewhere, which offline is nowhere
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.world = world
    app.state.readiness = Readiness(settings, world.look)
    app.state.readers = readers
    world.look.tell(lambda: metrics.API_WAITING.set(len(world.waits)))
    problems.install(app)
    app.include_router(command_routes.router_of(contexts()))
    app.include_router(outcome_routes.router)
    app.include_router(problem_routes.router)
    app.include_router(health_routes.router)
    app.include_router(metrics_routes.router)
    app.include_router(view_routes.router_of(all_views()))
    app.include_router(live_routes.router_of(all_views()))
    app.add_middleware(RawPath)
    app.add_middleware(Observing)
    return app
