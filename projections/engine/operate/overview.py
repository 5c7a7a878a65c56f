"""What is live, what this code has, and how far each agent is behind the log."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from infra.archive.whole_log import read_range
from infra.database.connect import session
from infra.log import topics
from infra.log.rule import Reading
from infra.settings import Settings
from projections.engine.live.startup import set_difference
from projections.engine.rebuild.builds import Build, builds_of, exists
from projections.engine.rebuild.switch import Pointer, pointers
from projections.engine.store.parking import ParkedStream, parked_streams
from projections.engine.store.positions import Positions, StoppedView, read_positions, stopped_views
from projections.engine.views.core_views import code_set
from projections.engine.views.view import POLICY, View


@dataclass(frozen=True, slots=True)
class AgentLag:
    """How far an agent is behind the log's end: records, and the age of the first of them."""

    records: int
    seconds: float


@dataclass(frozen=True, slots=True)
class AgentNow:
    """An agent's positions, its lag, and how its live set differs from this code's, as a sentence."""

    positions: Mapping[int, Reading]
    lag: AgentLag
    difference: str | None


@dataclass(frozen=True, slots=True)
class ViewNow:
    """A view in this code, as it is live, or was until it stopped; each may be None. `builds` are those whose tables exist."""

    name: str
    code: View | None
    live: Pointer | None
    stopped: StoppedView | None
    parked: tuple[ParkedStream, ...]
    builds: tuple[Build, ...]


@dataclass(frozen=True, slots=True)
class Overview:
    views: tuple[ViewNow, ...]
    agents: Mapping[str, AgentNow]
    """The agents that this code has or that have live views."""
    retired: tuple[str, ...]
    """Agents without a live view that this code does not have: their positions are not waited for."""


def overview(settings: Settings, views: Mapping[str, View]) -> Overview:
    """The state of all views, live or in this code. Raises DatabaseUnavailable, KafkaUnavailable, TopicMissing."""
    with session(settings, "samefold views") as connection:
        live = pointers(connection)
        builds = [build for build in builds_of(connection) if exists(connection, build.table)]
        parked = parked_streams(connection, live_only=True)
        stopped = {one.view: one for one in stopped_views(connection)}
        agents = _agents(views, live)
        positions = {agent: read_positions(connection, agent, settings.events_topic) for agent in agents}
        retired = connection.execute(_RETIRED, (settings.events_topic, agents)).fetchall()
    topic = topics.describe(settings, settings.events_topic)
    different = differences(views, live, {agent for agent, at in positions.items() if at})
    return Overview(
        tuple(
            ViewNow(
                name,
                views.get(name),
                live.get(name),
                stopped.get(name),
                tuple(one for one in parked if one.view == name),
                tuple(build for build in builds if build.view == name),
            )
            for name in sorted({*views, *live})
        ),
        {agent: _agent(settings, at, topic, different.get(agent)) for agent, at in positions.items()},
        tuple(agent for (agent,) in retired),
    )


def _agent(settings: Settings, positions: Positions | None, topic: topics.Topic, difference: str | None) -> AgentNow:
    if positions is None:
        return AgentNow({}, AgentLag(sum(topic.end.values()), 0.0), difference)
    return AgentNow(positions.readings, lag_of(settings, positions.readings, topic), difference)


def differences(views: Mapping[str, View], live: Mapping[str, Pointer], started: Collection[str]) -> dict[str, str]:
    """By agent, how its live views differ from this code's, and what to do. `started` are the agents that have positions."""
    found = {}
    for agent in _agents(views, live):
        wanted = code_set({name: view for name, view in views.items() if view.agent == agent})
        own = [pointer for pointer in live.values() if pointer.agent == agent and agent in started]
        has = {pointer.view: pointer.version for pointer in own}
        if agent not in started and not live.keys() & wanted.keys():
            found[agent] = f"Start it: `samefold run agent --agent {agent}`."
        elif difference := set_difference(has, wanted):
            found[agent] = difference
    return found


def _agents(views: Mapping[str, View], live: Mapping[str, Pointer]) -> list[str]:
    return sorted({*(view.agent for view in views.values()), *(pointer.agent for pointer in live.values())})


def lag_of(settings: Settings, readings: Mapping[int, Reading], topic: topics.Topic) -> AgentLag:
    behind = {p: topic.end[p] - at.next_offset for p, at in readings.items() if topic.end[p] > at.next_offset}
    waiting = 0.0
    for partition in behind:
        first = readings[partition].next_offset
        for records in read_range(settings, topic.name, partition, first, first + 1):
            waiting = max(waiting, *(time.time() - record.time_ms / 1000 for record in records))
    return AgentLag(sum(behind.values()), waiting)


_RETIRED = f"""
select distinct agent from positions
 where topic = %s and agent not in (select agent from live) and not starts_with(agent, '{POLICY}') and agent != all(%s)
 order by agent
"""  # noqa: S608
