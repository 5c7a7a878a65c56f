"""The FastAPI application, put together."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from commands.api import health_routes, metrics_routes, problems
from commands.api.observing import Observing
from commands.api.readiness import Readiness
from commands.api.segments import RawPath
from commands.api.world import World
from infra.settings import Settings

VERSION = "1"


def create_app(settings: Settings, name: str = "api") -> FastAPI:
    """The app of one API process, whose connections are named `samefold <name>`. Raises NotConfigured, BadContext, BadView."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with app.state.world:
            yield

    app = FastAPI(
        title="Samefold",
        version=VERSION,
        lifespan=lifespan,
        # they load scripts from elsewhere, which offline is nowhere
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.world = World(settings, name)
    app.state.readiness = Readiness(settings, app.state.world.look)
    problems.install(app)
    app.include_router(health_routes.router)
    app.include_router(metrics_routes.router)
    app.add_middleware(RawPath)
    app.add_middleware(Observing)
    return app
