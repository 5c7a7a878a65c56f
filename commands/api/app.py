"""The FastAPI application, put together."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from commands.api import problems
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
    problems.install(app)
    app.add_middleware(RawPath)
    return app
