"""What the routes that read share: one for each app, over its world."""

from __future__ import annotations

from fastapi import Request

from commands.api.reached import Reached
from commands.api.reading import ViewReader
from commands.api.world import World


class Readers:
    """Made with the app; nothing in it runs before somebody reads."""

    def __init__(self, world: World) -> None:
        self.reached = Reached(world.pulse, world.settings.api_max_waiting)
        self.views = ViewReader(world.settings, world.pool, self.reached)


def readers_of(request: Request) -> Readers:
    """Those of the app that serves a request."""
    readers: Readers = request.app.state.readers
    return readers
