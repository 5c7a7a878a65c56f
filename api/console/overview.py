"""`/console`: is all well? What runs, how fast, how far behind, and what needs a person."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from confluent_kafka import KafkaException
from fastapi import APIRouter, Request
from psycopg.rows import dict_row
from starlette.responses import Response

from api.console import site
from api.console.now import COMMITS, Curves, Epoch, Group, Processes, line, since
from api.console.site import url
from api.services import Services, services_of
from infra.database.connect import Connection
from infra.errors import SamefoldError
from infra.settings import Settings
from policies.engine.policy import agent_of, discover, has_public
from projections.engine.live.lag import standing_still
from projections.engine.views.core_views import all_views
from projections.engine.views.view import CORE, POLICY

STALL_S = 30.0
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
        self.services = services
        self.curves = curves
        self._processes = Processes(services.settings)
        self._asking: asyncio.Future[tuple[list[Group], dict[int, Epoch]]] | None = None
        self._known: tuple[list[Group], dict[int, Epoch]] = [], {}
        self.kafka_error: SamefoldError | None = None

    async def processes(self, epochs: Mapping[int, int]) -> tuple[list[Group], dict[int, Epoch]]:
        """The groups, and the writers of the partitions; as they were known before where Kafka is silent."""
        if self._asking is None or self._asking.done():
            agents = [*{view.agent for view in all_views().values()}, *map(agent_of, discover())]
            work = asyncio.to_thread(self._ask, agents, dict(epochs))
            self._asking = asyncio.ensure_future(work)
        with suppress(TimeoutError):
            self._known = await asyncio.wait_for(asyncio.shield(self._asking), KAFKA_S)
        return self._known

    def _ask(self, agents: list[str], epochs: dict[int, int]) -> tuple[list[Group], dict[int, Epoch]]:
        try:
            found = self._processes.groups(agents), self._processes.epochs(epochs)
        except SamefoldError as error:
            self.kafka_error = error.with_traceback(None)
        except KafkaException as error:
            self.kafka_error = SamefoldError(f"Kafka: {error.args[0].str()}")
        else:
            self.kafka_error = None
            return found
        return self._known


async def overview(request: Request) -> Response:
    remembered: Overview = request.app.state.overview
    services = services_of(request)
    settings = services.settings
    found = await site.console_of(request).ask(lambda connection: _counted(connection, settings))
    counted = found.found or {"epochs": {}, "counts": {}}
    groups, epochs = await remembered.processes(counted["epochs"])
    seen, curves, lags = services.stores.seen, remembered.curves.values, remembered.curves.lags
    agents = sorted(seen.positions) if seen else []
    partitions = sorted(seen.ends) if seen else []
    waiting = {at: lag.records for (who, at), lag in lags.items() if who == "handlers"}
    writers = {
        at: member.name
        for group in groups
        if group.role == "handlers"
        for member in group.members
        for at in member.partitions
    }
    wrong = list(_wrong(services, counted["counts"], lags, groups, remembered.kafka_error, partitions))
    values: dict[str, Any] = {
        "wrong": wrong,
        "database": found.error,
        "rate": curves[COMMITS][-1] if curves.get(COMMITS) else None,
        "rates": line(curves.get(COMMITS, ())),
        "waiting": sum(waiting.values()) if seen else None,
        "counts": counted["counts"],
        "many": MANY,
        "groups": groups,
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
                "owner": writers.get(at),
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
    template = "overview-live.html" if "HX-Request" in request.headers else "overview.html"
    return site.page(request, template, **values)


def _wrong(
    services: Services,
    counts: Mapping[str, int],
    lags: Mapping[tuple[str, int], Any],
    groups: list[Group],
    kafka_error: SamefoldError | None,
    partitions: list[int],
) -> Iterator[Wrong]:
    for error in services.stores.failures.values():
        yield Wrong(error.message, error.hint)
    if kafka_error is not None and "kafka" not in services.stores.failures:
        yield Wrong(kafka_error.message, kafka_error.hint)
    running = {group.role: group for group in groups}
    if kafka_error is None and partitions:
        taken = {at for group in groups if group.role == "handlers" for one in group.members for at in one.partitions}
        if "handlers" not in running:
            yield Wrong("No handler runs: commands wait.", command="samefold run handler")
        elif without := [at for at in partitions if at not in taken]:
            yield Wrong(
                f"No handler has the partitions {', '.join(map(str, without))}.", "A rebalance takes some seconds."
            )
        for agent in sorted({view.agent for view in all_views().values()} - running.keys()):
            yield Wrong(f"No process of agent '{agent}' runs.", command=f"samefold run agent --agent {agent}")
        if missing := [name for name in discover() if agent_of(name) not in running]:
            yield Wrong(f"No process runs the policies {', '.join(missing)}.", command="samefold run policies")
        if has_public() and "publisher" not in running:
            yield Wrong("No publisher runs.", command="samefold run publisher")
    for who, what in standing_still(lags, STALL_S).items():
        yield Wrong(f"{who} stands still: {what}.", "The log of its process says why it waits.")
    for view, _, code in services.stores.seen.views if services.stores.seen else ():
        if code and view.startswith(POLICY):
            name = view.removeprefix(POLICY)
            yield Wrong(
                f"Policy '{name}' is held: {code}.", link=url("/work") + "#policies", command="samefold policies"
            )
        elif code:
            command = f"samefold views resume {view}"
            yield Wrong(f"View '{view}' has stopped: {code}.", link=f"{url('/views')}#{view}", command=command)
    for name, what, place in (
        ("parked", "Parked streams", "parked"),
        ("dead", "Dead letters", "dead"),
        ("stuck", "Processes of policies that are stuck", "dead"),
    ):
        if count := counts.get(name, 0):
            number = f"{MANY:,} or more" if count >= MANY else f"{count:,}"
            yield Wrong(f"{what}: {number}.", link=f"{url('/work')}#{place}")
    if services.stores.watch:
        for topic, why in services.stores.watch.unfit.items():
            yield Wrong(f"Topic '{topic}' may lose history: {why}", command="samefold topics")


def _counted(connection: Connection, settings: Settings) -> dict[str, Any]:
    """The epochs of the agent `core`'s positions, and counts of what waits, each up to MANY and by an index."""
    epochs = connection.execute(
        "select partition, epoch from positions where agent = %s and topic = %s", (CORE, settings.events_topic)
    )
    counts = connection.cursor(row_factory=dict_row).execute(_COUNTS, {"many": MANY}).fetchone()
    return {"epochs": dict(epochs.fetchall()), "counts": counts or {}}


_COUNTS = f"""
select (select count(*) from (select from parked limit %(many)s) p) as parked,
       (select count(*) from (select from outbox where dead is not null limit %(many)s) o)
         + (select count(*) from (select from posts where dead is not null limit %(many)s) p) as dead,
       (select count(*) from (select distinct policy, stream from outbox where dead is not null limit %(many)s) o)
         + (select count(*) from (select from parked where starts_with(view, '{POLICY}') limit %(many)s) p) as stuck,
       (select coalesce(sum(due), 0)::bigint
          from (select distinct policy, partition from (select policy from activations group by policy) a,
                                                      (select distinct partition from positions) p) ap,
               lateral (select count(*) as due from (
                 select from outbox o where o.policy = ap.policy and o.partition = ap.partition and kind = 'send'
                    and sent_at is null and dead is null and due is not null and due <= now() limit %(many)s) d) d) as timers,
       (select count(*) from (select from lanes where next_attempt <= now() limit %(many)s) l) as posts
"""  # noqa: S608


def add_to(router: APIRouter) -> None:
    site.add(router, "", overview)
