"""The routes of all pages."""

from __future__ import annotations

from fastapi import APIRouter, FastAPI

from api.console import actions, overview, site, streams, tries, views, work
from api.console.actions import Actions
from api.console.now import Curves
from api.console.overview import Overview
from api.console.site import Console
from api.services import Services


def router_of(app: FastAPI, services: Services) -> APIRouter:
    """The console of this process, whose state the app gets."""
    app.state.console = Console(services)
    app.state.actions = Actions(app.state.console)
    app.state.overview = Overview(services, Curves(services))
    router = APIRouter()
    site.add_frame(router)
    for page in (overview, views, streams, work, tries, actions):
        page.add_to(router)
    site.add(router, "/{path:path}", site.no_page)
    return router
