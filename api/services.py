"""What the requests of one API process share: connections to both stores, the state of the stores, and the waiting requests."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeVar
from weakref import WeakValueDictionary

from fastapi import Request

from api.feeds import Feed
from api.problems import kind
from api.stores import StoreChecks
from api.view_reader import TOO_MANY_READERS, PositionWaits, ViewReader
from api.waits import TOO_MANY_WAIT, Notifications, OutcomeWaits, Slots
from commands.append import Appender
from domain.engine.contexts import has_personal_fields
from domain.engine.personal.keys import Keys
from infra.access import Access
from infra.database.connect import parameters
from infra.database.deadline import Pool
from infra.errors import SamefoldError
from infra.processes.gathering import Window
from infra.processes.process_end import Parts
from infra.settings import Settings
from policies.engine.inbox import hooks_of
from projections.engine.views.core_views import all_views
from projections.engine.views.view import View

if TYPE_CHECKING:
    from api.issuer import Issuer

F = TypeVar("F", bound=Feed[Any])

POOL_WAIT_S = 2.0
"""For a connection of the pool."""
LONGEST_QUERY_MS = 8_000
"""After that the database ends the query."""
QUERY_S = 10.0
"""After that the connection is closed: the database hangs."""
POOL_AGAIN_S = 2.0
"""For connecting again; the pool tries once more when a connection is wanted, which the checks do twice a second."""
SEARCH_WAIT_S = 2.0
"""How long a search waits for others to end."""

MANY = 8
"""So many other requests that wait for their outcomes are load: an append gathers with others for its full time."""
A_THIRD = 1 / 3
"""Of what an outcome takes: then about a third of the requests that wait are in each batch on its way."""
MAX_LIVE = 1_000
"""Clients that may be subscribed to live changes. More are served by more processes."""

TOO_MANY_SEARCHES = kind(429, "too-many-searches", "Too many searches are running.", 1)
TOO_MANY_SUBSCRIBERS = kind(429, "too-many-subscribers", "Too many clients are subscribed.", 5)


class Services:
    """Entered once, in the event loop that serves. It starts without the stores too, and finds them when they are available.

    Its constructor raises NotConfigured, DatabaseRefused, BadContext, BadView, MasterKeyUnusable, and of webhooks BadPolicy,
    BadSettings.
    """

    def __init__(self, settings: Settings, name: str) -> None:
        self.settings = settings
        self.name = name
        self.access: Access | None = None
        """A test's; else it is that of `access.py`."""
        self.is_stopping = False
        self.failure: SamefoldError | None = None
        """Why a part of this ended that must not end; the process ends then."""
        self.parts = Parts(name, self._failed)
        views = all_views()
        session = parameters(settings, f"samefold {name}", statement_timeout_ms=LONGEST_QUERY_MS)
        self.pool = Pool(
            session.pop("conninfo"),
            kwargs=session,
            open=False,
            min_size=2,
            max_size=settings.api_connections + 1,
            timeout=POOL_WAIT_S,
            reconnect_timeout=POOL_AGAIN_S,
            name=name,
            seconds=QUERY_S,
        )
        self.notifications = Notifications(settings, name, {view.agent for view in views.values()})
        self.stores = StoreChecks(settings, self.pool, name, views)
        self.keys = Keys(settings) if has_personal_fields() else None
        """Of personal values, which are sealed and opened here. None where no context has any."""
        self.issuer: Issuer | None = None
        if settings.auth == "jwt":
            from api.issuer import Issuer  # with two libraries, which take a tenth of the process's start

            self.issuer = Issuer(settings, name)
        self._closing = threading.Event()
        self.appender = Appender(settings, name, self.stores.kafka)
        self.stores.on_topics = self.appender.prepare
        self.hooks = hooks_of(settings)
        self.stores.with_inbox = bool(self.hooks)
        self.receiving = Slots(settings.api_max_waiting, TOO_MANY_WAIT)
        """For messages to webhooks that wait for Kafka's acknowledgement: commands have places of their own."""
        self.outcomes = OutcomeWaits(settings, self.notifications, name)
        # a request that waits costs next to nothing; one that is refused and sent again, as much as a command
        self.places = Slots(settings.api_max_waiting, TOO_MANY_WAIT, settings.api_wait_s, appended="no")
        """For requests that wait for outcomes."""
        self.round_trip = Window(share=A_THIRD)
        """Of what outcomes take."""
        self.positions = PositionWaits(self.notifications, settings.api_max_waiting)
        # one connection less than there are: readers never make the database look unavailable to the process itself
        why = f"No connection to the database was free for {POOL_WAIT_S:g} s."
        readers = Slots(settings.api_connections, TOO_MANY_READERS, POOL_WAIT_S, detail=why)
        self.views = ViewReader(settings, self.pool, readers, self.positions, self.keys)
        # half of the connections are for lists that no index leads to; they would block all other reads
        self.searches = Slots(settings.api_connections // 2, TOO_MANY_SEARCHES, SEARCH_WAIT_S)
        self._searching: WeakValueDictionary[str, Slots] = WeakValueDictionary()
        self.subscribers = Slots(MAX_LIVE, TOO_MANY_SUBSCRIBERS)
        self._feeds: dict[tuple[str, type], Feed[Any]] = {}

    @asynccontextmanager
    async def searching(self, caller: str | None) -> AsyncIterator[None]:
        """For the time of a search; of one caller there is one at a time, so that others have theirs. Raises Problem 429."""
        slot = Slots(1, TOO_MANY_SEARCHES, SEARCH_WAIT_S)
        own = slot if caller is None else self._searching.setdefault(caller, slot)
        async with own, self.searches:
            yield

    def gather_s(self) -> float:
        """How long the command of a request, which has its place, is gathered with others. Alone it is not."""
        return self.round_trip.seconds * min((self.places.taken - 1) / MANY, 1.0)

    def feed(self, view: View, kind: type[F]) -> F:
        """The live rows of that view, or its live lists."""
        if (found := self._feeds.get((view.name, kind))) is None:
            found = self._feeds[view.name, kind] = kind(view, self.views, self.notifications)
        assert isinstance(found, kind)
        return found

    def stop(self, still_wait_s: float) -> None:
        """End live updates now, and answer all waiting requests after that many seconds: the process is stopping."""
        self.is_stopping = True
        for feed in self._feeds.values():
            feed.end()
        for waits in (self.outcomes, self.positions):
            asyncio.get_running_loop().call_later(still_wait_s, waits.give_up)

    async def __aenter__(self) -> Self:
        await self.pool.open()
        self.parts.callbacks()
        self.appender.open(self.parts)
        if self.keys is not None:
            self.parts.thread("keys", partial(self.keys.keep_copying, self._closing))
        if self.issuer is not None:
            self.parts.task("issuer", self.issuer.keep_reading())
        self.parts.task("notifications", self.notifications.listen())
        self.parts.task("store checks", self.stores.keep_checking())
        self.parts.task("outcomes", self.outcomes.answer())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.parts.cancel()
        self._closing.set()
        await self.appender.close()
        await self.pool.close(1)

    def _failed(self, error: SamefoldError) -> None:
        self.failure = error


def services_of(request: Request) -> Services:
    """Those of the app that serves a request."""
    services: Services = request.app.state.services
    return services
