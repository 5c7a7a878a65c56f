"""make test-all: two releases and rebuilds take seconds.

An API next to another release: commands need the write model of their context, and a read needs the view that it asks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial

import pytest

from api import health
from api.stores import HealthSnapshot
from infra.database.connect import connect
from infra.log import topics
from infra.settings import Settings
from projections.engine.live.lag import PartitionLag
from projections.engine.operate.overview import overview
from projections.engine.operate.trim import _limits
from projections.engine.rebuild.rebuild import rebuild
from projections.engine.store.command_types import add_types, own_types
from projections.engine.views.core_views import all_views
from projections.engine.views.view import View
from tests.engine.api.api import Api, agent, fresh, problem, serving
from tests.engine.projections.bankviews import BALANCES_2, SUMS, make_tables, view
from tests.engine.spine import handler, set_up
from tools.testing.waiting import until

pytestmark = pytest.mark.slow

FAIL = "def fail(event):\n    pass\n"


@contextmanager
def code(views: Mapping[str, View]) -> Iterator[None]:
    """APIs and agents that start now run code with these views."""
    with pytest.MonkeyPatch.context() as patch:
        for module in ("app", "commands", "waits", "services"):
            patch.setattr(f"api.{module}.all_views", lambda: views, raising=False)
        patch.setattr("projections.engine.live.agent.agent_views", lambda name: of_agent(views, name))
        yield


def of_agent(views: Mapping[str, View], agent: str) -> dict[str, View]:
    return {name: one for name, one in views.items() if one.agent == agent}


def release(*without: str, **changed: View) -> dict[str, View]:
    """The shipped code's views but for these."""
    found = {**all_views(), **changed}
    return {name: found[name] for name in sorted(found) if name not in without}


NEXT = release(
    balances=view(BALANCES_2, "balances"),  # raised
    daily_totals=replace(all_views()["daily_totals"], agent="side"),  # moved
    sums=view(SUMS, "sums", FAIL),  # added
)


NEXT_NAMES = ("balances", "daily_totals", "statement", "sums")


@pytest.fixture(scope="module")
def releases(shared_world: Settings) -> Iterator[tuple[Api, Api]]:
    """The APIs of this release and of the next one, on the same stores. This one's views are live."""
    set_up(shared_world)
    make_tables(shared_world, {name: NEXT[name] for name in ("balances", "sums")})
    with ExitStack() as running:
        running.enter_context(pytest.MonkeyPatch.context()).setattr(health, "STALL_S", 0.5)
        running.enter_context(handler(shared_world))
        shipped = running.enter_context(serving(shared_world, "shipped"))
        with code(NEXT):
            coming = running.enter_context(serving(shared_world, "next"))
        with agent(shared_world):  # a handler's openings are records, too, behind which nothing may stand still
            for api in (shipped, coming):
                until(partial(is_ready, api), "the API is ready")
        yield shipped, coming


def go_to(world: Settings, views: Mapping[str, View]) -> set[str]:
    """Make the views of that release live; those that it took another table for."""
    return {*rebuild(world, [], views).tables}


def served(api: Api, *views: str) -> dict[str, int]:
    """What the reads of these views are answered, by view; commands, outcomes and the list of views are served too."""
    name = fresh()
    until(partial(is_ready, api), "the API is ready")
    answer = api.open(name)
    assert answer.status_code == 200, answer.text
    assert api.get(f"/outcomes/accounts/{name}/{name}").json()["outcome"] == "accepted"
    assert api.get("/views").status_code == 200
    found = {}
    for view_ in views:
        read = api.get(f"/views/{view_}?limit=1&after={answer.json()['position']}")
        assert read.status_code == 200 or read.json()["code"] == "view-not-live", read.text
        found[view_] = read.status_code
    return found


def test_either_release_serves_commands_and_unchanged_views_before_and_after_the_switch(
    releases: tuple[Api, Api], shared_world: Settings
) -> None:
    shipped, coming = releases
    go_to(shared_world, all_views())
    old, new = ("balances", "daily_totals", "statement"), NEXT_NAMES
    with agent(shared_world):
        assert served(shipped, *old) == dict.fromkeys(old, 200)
        assert served(coming, *new) == {"balances": 503, "daily_totals": 200, "statement": 200, "sums": 503}
    go_to(shared_world, NEXT)
    with code(NEXT), agent(shared_world, "side", "side"), agent(shared_world):
        assert served(shipped, *old) == {"balances": 503, "daily_totals": 200, "statement": 200}
        assert served(coming, *new) == dict.fromkeys(new, 200)


def test_an_agent_that_stands_still_holds_up_its_own_views_alone(
    releases: tuple[Api, Api], shared_world: Settings
) -> None:
    _, coming = releases
    go_to(shared_world, NEXT)
    with code(NEXT), agent(shared_world):  # and none for `side`
        until(partial(is_ready, coming), "the API is ready")
        position = coming.open("still").json()["position"]
        until(lambda: standing_still(coming) > 0.6, "the agent `side` has stood still for longer than it may")
        until(partial(is_ready, coming), "the API is ready all the same")
        assert standing_still(coming) > 0.6
        assert coming.get(f"/views/balances/still?after={position}").status_code == 200
        problem(coming.get(f"/views/daily_totals?after={position}", Prefer="wait=0"), 503, "position-not-reached")
        assert coming.get("/views/daily_totals").status_code == 200


def test_an_agent_without_live_views_is_ignored(releases: tuple[Api, Api], shared_world: Settings) -> None:
    """The switch that takes its last view retires it: it holds up no process and no trimming, and its worker waits."""
    shipped, coming = releases
    moved_back = release(balances=NEXT["balances"], sums=NEXT["sums"])
    go_to(shared_world, NEXT)
    with code(NEXT), agent(shared_world, "side", "side") as worker:
        until(lambda: worker.reader.fetching != [], "the agent folds")
        go_to(shared_world, moved_back)
        with code(moved_back), agent(shared_world):
            assert coming.open("retired").status_code == 200
            until(lambda: worker.reader.fetching == [], "it holds, at the first batch that is fenced")
            topic = topics.describe(shared_world, shared_world.events_topic)
            for api in (shipped, coming):
                until(partial(has_seen, api, topic.end), "a check after the log has moved")
                assert "side" not in newest(api).positions, "it is not waited for"
                until(partial(is_ready, api), "the API is ready")
                assert 'samefold_lag_events{agent="side",partition="0"} 0.0' in api.get("/metrics").text
    with connect(shared_world, "test") as db:
        held = [limit.whose for _, limit in _limits(shared_world, topic, db)]
    assert any("'core'" in whose for whose in held)
    assert not any("'side'" in whose for whose in held)
    found = overview(shared_world, moved_back)
    assert found.retired == ("side",)
    assert set(found.agents) == {"core"}
    assert go_to(shared_world, NEXT) == {"daily_totals"}
    assert overview(shared_world, NEXT).retired == ()
    with code(NEXT), agent(shared_world, "side", "side"), agent(shared_world):
        assert served(coming, *NEXT_NAMES) == dict.fromkeys(NEXT_NAMES, 200)


def is_ready(api: Api) -> bool:
    return api.get("/health/ready").status_code == 200


def newest(api: Api) -> HealthSnapshot:
    found = api.services.stores.seen
    assert found is not None
    return found


def has_seen(api: Api, ends: Mapping[int, int]) -> bool:
    return all(newest(api).ends.get(partition, 0) >= end for partition, end in ends.items())


def standing_still(api: Api) -> float:
    """For how long the agent `side` has stood still in some partition, in seconds."""
    lags: dict[tuple[str, int], PartitionLag] = api.server.config.loaded_app.state.readiness._lags.now
    return max((lag.still for (agent, _), lag in lags.items() if agent == "side"), default=0)


def test_a_command_that_no_handler_knows_yet_is_not_appended(releases: tuple[Api, Api], shared_world: Settings) -> None:
    """A handler of the release before would call it malformed for good, under this id."""
    shipped, _ = releases
    with connect(shared_world, "test") as db:
        db.execute("delete from command_types where type = 'OpenAccount/2'")
        try:
            until(lambda: len(shipped.services.stores.types) == len(own_types()) - 1, "it is noticed")
            assert problem(shipped.open("too-early"), 503, "command-not-live")["appended"] == "no"
        finally:
            add_types(db)
    until(lambda: shipped.services.stores.types == own_types(), "a handler that knows it starts")
    assert shipped.post("in-time", "open-account", {"Prefer": "respond-async"}, overdraft_limit=5).status_code == 202
