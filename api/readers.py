"""What the routes that read share: one for each app, over its world."""

from __future__ import annotations

import asyncio

from fastapi import Request

from api.event_stream import Room
from api.reached import Reached
from api.reading import ViewReader
from api.row_feed import RowFeed
from api.searches import Searches
from api.world import World
from projections.engine.views.view import View


class Readers:
    """Made with the app; nothing in it runs before somebody reads."""

    def __init__(self, world: World) -> None:
        settings = world.settings
        self.reached = Reached(world.pulse, settings.api_max_waiting)
        self.views = ViewReader(settings, world.pool, self.reached)
        self.searches = Searches(settings.api_connections)
        self.room = Room(settings.api_max_live)
        self._pulse = world.pulse
        self._rows: dict[str, RowFeed] = {}

    def rows(self, view: View) -> RowFeed:
        """The one of that view."""
        if view.name not in self._rows:
            self._rows[view.name] = RowFeed(view, self.views, self._pulse)
        return self._rows[view.name]

    async def end(self, stopping: asyncio.Event) -> None:
        """Wait until the process is to end, and then end what would go on for ever."""
        await stopping.wait()
        for feed in self._rows.values():
            await feed.close()


def readers_of(request: Request) -> Readers:
    """Those of the app that serves a request."""
    readers: Readers = request.app.state.readers
    return readers
