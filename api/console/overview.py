"""`/console`: is all well? What runs, how fast, how far behind, and what needs a person."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from typing import Any, NamedTuple

from confluent_kafka import KafkaException
from fastapi import APIRouter, Request
from psycopg.rows import dict_row
from starlette.responses import Response

from api.console import site
from api.console.now import COMMITS, Curves, Epoch, Group, Processes, line, since
from api.console.site import Console, url
from api.health import STALL_S, Readiness
from api.services import Services, services_of
from infra.database.connect import Connection
from infra.errors import SamefoldError
from infra.settings import Settings
from policies.engine.policy import agent_of, discover, has_public
from projections.engine.live.lag import standing_still
from projections.engine.views.core_views import all_views
from projections.engine.views.view import CORE, POLICY

QUIET_S = 3.0
"""An agent that has been behind for no longer does its work."""
FRESH_S = 1.0
KAFKA_S = 2.5
"""For the brokers' answers; then the page shows what was known before."""
MANY = 1_000
"""More of anything are not counted."""


class Wrong(NamedTuple):
    """What is not well, where to look, and the command that mends it."""

    what: str
    hint: str = ""
    link: str = ""
    command: str = ""


class Overview:
    """What the page of one API process remembers."""

    def __init__(self, services: Services, curves: Curves) -> None:
        self.curves = curves
        self._processes = Processes(services.settings)
        self._asking: asyncio.Future[None] | None = None
        self.groups: list[Group] | None = None
        """None until Kafka has told them."""
        self.epochs: dict[int, Epoch] = {}
        self.asked = asyncio.Lock()
        self.live = float("-inf"), Response()
        """When the part that loads itself again was made, and what it was."""
        self.kafka_error: SamefoldError | None = None

    async def ask(self, console: Console, epochs: Mapping[int, int]) -> None:
        """Ask Kafka for the groups and the log for the partitions' writers; what was known stays where they are silent."""
        if self._asking is None or self._asking.done():
            agents = [*{view.agent for view in all_views().values()}, *map(agent_of, discover())]
            self._asking = console.of_kafka(partial(self._ask, agents, dict(epochs)))
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._asking), KAFKA_S)

    def _ask(self, agents: list[str], epochs: dict[int, int]) -> None:
        try:
            self.groups = self._processes.groups(agents)
            self.epochs = self._processes.epochs(epochs)
        except SamefoldError as error:
            self.kafka_error = error.with_traceback(None)
        except KafkaException as error:
            self.kafka_error = SamefoldError(f"Kafka: {error.args[0].str()}")
        else:
            self.kafka_error = None


async def overview(request: Request) -> Response:
    """The page; for a part that loads itself again, as it was at most FRESH_S ago, however many browsers ask."""
    remembered: Overview = request.app.state.overview
    if "HX-Request" not in request.headers:
        return site.page(request, "overview.html", **await _values(request, remembered))
    async with remembered.asked:
        if time.monotonic() > remembered.live[0] + FRESH_S:
            answer = site.page(request, "overview-live.html", **await _values(request, remembered))
            remembered.live = time.monotonic(), answer
    return remembered.live[1]


async def _values(request: Request, remembered: Overview) -> dict[str, Any]:
    services = services_of(request)
    settings = services.settings
    console = site.console_of(request)
    found = await console.ask(lambda connection: _counted(connection, settings))
    counted = found.found or {"epochs": {}, "counts": {}}
    await remembered.ask(console, counted["epochs"])
    groups, epochs = remembered.groups or [], remembered.epochs
    readiness: Readiness = request.app.state.readiness
    seen, curves, lags = services.stores.seen, remembered.curves.values, readiness.lags
    agents = sorted(seen.positions) if seen else []
    partitions = sorted(seen.ends) if seen else []
    waiting = {at: lag.records for (who, at), lag in lags.items() if who == "handlers"}
    owned = {at for group in groups if group.role == "handlers" for one in group.members for at in one.partitions}
    if seen:
        counted["counts"]["parked"] = sum(streams for _, streams, _ in seen.views)
    wrong = list(_wrong(request, counted["counts"], owned))
    return {
        "wrong": wrong,
        "database": found.error,
        "rate": curves[COMMITS][-1] if curves.get(COMMITS) else None,
        "rates": line(curves.get(COMMITS, ())),
        "waiting": sum(waiting.values()) if seen else None,
        "counts": counted["counts"],
        "many": MANY,
        "groups": groups,
        "at": datetime.now(UTC),
        "agents": [
            {
                "name": agent,
                "records": seen.behind(agent) if seen else 0,
                "seconds": max((lag.seconds for (who, _), lag in lags.items() if who == agent), default=0.0),
                "line": line(curves.get(agent, ())),
                "processes": sum(len(group.members) for group in groups if group.role == agent),
            }
            for agent in agents
        ],
        "partitions": [
            {
                "number": at,
                "is_owned": remembered.groups is None or at in owned,
                "epoch": epochs.get(at),
                "offset": counted["epochs"].get(at),
                "end": seen.ends[at] if seen else None,
                "behind": lags[CORE, at].records if (CORE, at) in lags else 0,
                "waiting": waiting.get(at, 0),
                "still": since(lags[CORE, at].still) if (CORE, at) in lags and lags[CORE, at].still > 1 else None,
            }
            for at in partitions
        ],
    }


def _wrong(request: Request, counts: Mapping[str, int], owned: Collection[int]) -> Iterator[Wrong]:
    """`owned` are the partitions that handlers have."""
    remembered: Overview = request.app.state.overview
    readiness: Readiness = request.app.state.readiness
    stores, lags, kafka_error = services_of(request).stores, readiness.lags, remembered.kafka_error
    for error in {str(error): error for error in readiness.checks().values() if error is not None}.values():
        yield Wrong(error.message, error.hint)
    if kafka_error is not None and "kafka" not in stores.failures:
        yield Wrong(kafka_error.message, kafka_error.hint)
    if kafka_error is None and "kafka" not in stores.failures and remembered.groups is not None and stores.seen:
        running = {group.role for group in remembered.groups}
        if not owned:
            yield Wrong("No handler runs: commands wait.", command="samefold run handler")
        elif without := [at for at in sorted(stores.seen.ends) if at not in owned]:
            yield Wrong(f"No handler has the partitions {site.spans(without)}.", "A rebalance takes some seconds.")
        agents = {view.agent for view in all_views().values()} - running
        # an agent on Spark is in no group: it shows by what it does
        for agent in sorted(agents - {who for (who, _), lag in lags.items() if lag.still < QUIET_S}):
            yield Wrong(f"No process of agent '{agent}' runs.", command=f"samefold run agent --agent {agent}")
        if missing := [name for name in discover() if agent_of(name) not in running]:
            yield Wrong(f"No process runs the policies {', '.join(missing)}.", command="samefold run policies")
        if has_public() and "publisher" not in running:
            yield Wrong("No publisher runs.", command="samefold run publisher")
    for who, what in standing_still(lags, STALL_S).items():
        yield Wrong(f"{who} stands still: {what}.", "The log of its process says why it waits.")
    for view, _, code in stores.seen.views if stores.seen else ():
        if code and view.startswith(POLICY):
            name = view.removeprefix(POLICY)
            yield Wrong(
                f"Policy '{name}' is held: {code}.", link=url("/work") + "#policies", command="samefold policies"
            )
        elif code:
            command = f"samefold views resume {view}"
            yield Wrong(f"View '{view}' has stopped: {code}.", link=f"{url('/views')}#{view}", command=command)
    for name, what in (("parked", "Parked streams"), ("dead", "Dead letters")):
        if count := counts.get(name, 0):
            number = f"{MANY:,} or more" if count >= MANY else f"{count:,}"
            yield Wrong(f"{what}: {number}.", link=f"{url('/work')}#{name}")
    for watch in stores.watches:
        for topic, why in watch.unfit.items():
            yield Wrong(f"Topic '{topic}' may lose history: {why}", command="samefold topics")


def _counted(connection: Connection, settings: Settings) -> dict[str, Any]:
    """The epochs of the agent `core`'s positions, and counts of what waits, each up to MANY and by an index."""
    epochs = connection.execute(
        "select partition, epoch from positions where agent = %s and topic = %s", (CORE, settings.events_topic)
    )
    counts = connection.cursor(row_factory=dict_row).execute(_COUNTS, {"many": MANY}).fetchone()
    return {"epochs": dict(epochs.fetchall()), "counts": counts or {}}


_COUNTS = """
select (select count(*) from (select from outbox where dead is not null limit %(many)s) o)
         + (select count(*) from (select from posts where dead is not null limit %(many)s) p) as dead,
       (select coalesce(sum(due), 0)::bigint
          from (select distinct policy, partition from (select policy from activations group by policy) a,
                                                      (select distinct partition from positions) p) ap,
               lateral (select count(*) as due from (
                 select from outbox o where o.policy = ap.policy and o.partition = ap.partition and kind = 'send'
                    and sent_at is null and dead is null and due is not null and due <= now() limit %(many)s) d) d) as timers,
       (select count(*) from (select from lanes where next_attempt <= now() limit %(many)s) l) as posts
"""


def add_to(router: APIRouter) -> None:
    site.add(router, "", overview)
