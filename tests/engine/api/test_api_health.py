"""make test + test-all: a check takes half a second, a read model that stands still seconds.

Live and ready: each check fails for its own reason, says why and what to do, and holds again by itself.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest

from api import health, stores
from api.health import SUBJECTS, Readiness
from commands import release
from infra.database.connect import connect
from infra.log.partitioner import partition_of
from infra.settings import Settings
from tests.engine.api.api import Api, agent, problem, serving
from tests.engine.projections.bankviews import stop_as_older_code_would
from tests.engine.spine import commits, deposit, handler, open_account, send, set_up
from tools import doctor
from tools.testing.waiting import until

CHECKS = {*SUBJECTS, "looks", "positions"}


@pytest.fixture(scope="module")
def api(shared_world: Settings) -> Iterator[Api]:
    """An API alone: no handler and no agent takes harm from what these tests do to its world."""
    set_up(shared_world)
    with serving(shared_world) as running:
        until(lambda: failing(running) == {}, "all is well")
        yield running


def asked(api: Api) -> tuple[int, dict[str, Any]]:
    """The status of /health/ready, and its checks."""
    answer = api.get("/health/ready")
    if answer.status_code == 503:
        problem(answer, 503, "not-ready")
        assert answer.headers["Retry-After"] == "1"
    return answer.status_code, answer.json()["checks"]


def failing(api: Api) -> dict[str, str]:
    status, checks = asked(api)
    found = {name: check["code"] for name, check in checks.items() if not check["ok"]}
    assert set(checks) == CHECKS
    assert status == (503 if found else 200)
    return found


@contextmanager
def changed(world: Settings, change: str, back: str) -> Iterator[None]:
    with connect(world, "test") as db:
        db.execute(change)
        try:
            yield
        finally:
            db.execute(back)


def test_a_probe_asks_no_store(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = {"begun": 0, "asked": 0}
    look, connection = stores.StoreChecks._check, api.services.pool.connection

    async def counted(self: stores.StoreChecks) -> None:
        looks["begun"] += 1
        await look(self)

    def lent(*arguments: Any) -> Any:
        looks["asked"] += 1
        return connection(*arguments)

    monkeypatch.setattr(stores.StoreChecks, "_check", counted)
    monkeypatch.setattr(api.services.pool, "connection", lent)
    for _ in range(50):
        assert failing(api) == {}
    until(lambda: looks["begun"] > 0, "another check")
    assert looks["asked"] <= looks["begun"] < 50


def test_another_write_model_is_not_ready_and_takes_no_commands_until_the_pointer_is_back(
    api: Api, shared_world: Settings
) -> None:
    moved = "update live set version = version {} 1 where view = 'command_outcomes'"
    with changed(shared_world, moved.format("+"), moved.format("-")):
        until(lambda: failing(api) == {"views": "other-views-live"}, "it is noticed")
        for answer in (api.open("a"), api.get("/outcomes/accounts/a/b")):
            problem(answer, 503, "other-views-live")
        assert api.client.get("/views/balances").status_code == 200, "reads need the view that they ask, and no other"
    until(lambda: failing(api) == {}, "it is ready again")


def test_what_else_is_live_is_no_reason(api: Api, shared_world: Settings) -> None:
    moved = "update live set version = version {} 1 where view = 'balances'"
    checks = api.services.stores
    version = checks.live["balances"]
    with changed(shared_world, moved.format("+"), moved.format("-")):
        until(lambda: checks.live["balances"] == version + 1, "it is noticed")
        assert failing(api) == {}
        for path in ("/views/balances", "/views/balances/a1/live"):
            problem(api.get(path), 503, "view-not-live")
        assert api.client.get("/views/statement").status_code == 200


def test_a_stopped_view_answers_503_and_everything_else_as_ever(api: Api, shared_world: Settings) -> None:
    with connect(shared_world, "test") as db:
        [(before,)] = db.execute("select row_to_json(l) from live l where view = 'balances'").fetchall()
    assert api.client.get("/views/balances").status_code == 200
    stop_as_older_code_would(shared_world, "balances")
    for path in ("/views/balances", "/views/balances/a1", "/views/balances/a1/live"):
        answer = problem(api.get(path), 503, "view-stopped")
        assert "poison-event" in answer["detail"]
    until(lambda: api.get("/health/ready").json().get("stopped_views") == {"balances": "poison-event"}, "it is told")
    assert failing(api) == {}
    assert 'samefold_view_stopped{view="balances"} 1.0' in api.client.get("/metrics").text
    described = {one["name"]: one["stopped"] for one in api.client.get("/views").json()["views"]}
    assert (described["balances"], described["statement"]) == ("poison-event", None)
    assert api.client.get("/views/statement").status_code == 200
    with connect(shared_world, "test") as db:  # as an older release's switch, which knows no stopped views
        db.execute("insert into live select * from json_populate_record(null::live, %s)", [json.dumps(before)])
    assert api.client.get("/views/balances").status_code == 200
    until(lambda: 'samefold_view_stopped{view="balances"} 0.0' in api.client.get("/metrics").text, "it is told")
    assert "stopped_views" not in api.get("/health/ready").json()
    removed = "delete from live where view = 'balances'", "delete from stopped_views where view = 'balances'"
    again = f"insert into live select * from json_populate_record(null::live, '{json.dumps(before)}')"
    with changed(shared_world, ";".join(removed), again):
        until(
            lambda: 'view_stopped{view="balances"}' not in api.client.get("/metrics").text, "what is gone is not told"
        )
        answer = problem(api.get("/views/balances"), 503, "view-not-live")
        assert "`samefold rebuild` makes it live" in answer["hint"], "though an agent may run"


@pytest.mark.slow
def test_a_read_model_that_stands_still_is_not_ready_until_it_moves(
    world: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "STALL_S", 0.6)
    set_up(world)
    with handler(world), serving(world) as api:
        until(lambda: failing(api) == {"positions": "read-model-stands-still"}, "the handler's openings wait")
        _, checks = asked(api)
        assert "records behind the log" in checks["positions"]["why"]
        assert "samefold run agent" in checks["positions"]["hint"]
        with agent(world):
            until(lambda: failing(api) == {}, "it is ready again")


@pytest.mark.slow
def test_commands_that_no_handler_decides_are_told_and_repeated_ones_are_not(
    world: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "STALL_S", 0.6)
    set_up(world)
    with serving(world) as api, agent(world):

        def standing() -> dict[str, str]:
            return dict(api.client.get("/health/ready").json().get("standing_still", {}))

        send(world, open_account("ada"))
        until(lambda: "records behind" in standing().get("handlers", ""), "no handler has ever run")
        with handler(world):
            until(lambda: len(commits(world)) == 1, "it is decided")
            until(lambda: standing() == {}, "it is told")
        send(world, open_account("ada"), deposit("ada", "d1", 1))
        until(lambda: "records behind" in standing().get("handlers", ""), "no handler runs")
        for name, value in world.environment().items():
            monkeypatch.setenv(name, value)
        found = next(one for one in doctor.examine() if one.name == "standing still")
        assert (found.ok, found.found.partition(":")[0]) == (False, "handlers")
        with handler(world):
            send(world, open_account("ada"))
            here = partition_of("accounts/ada", world.partitions)
            until(
                lambda: release.decided(world, world.partitions)[here] == 4,
                "all are decided, the last one by its first answer",
            )
            until(lambda: standing() == {}, "it is told")


def test_a_stall_is_told() -> None:
    """Positions that stand still for longer than they may, behind a log that goes on, and nothing else."""
    look = stores.StoreChecks(Settings(), cast(Any, None), "test", {})
    readiness = Readiness(look, None, None)

    def told(at: float, next_offset: int, end: int) -> str | None:
        look.seen = stores.HealthSnapshot(at, {"core": {0: next_offset}}, {0: end}, ())
        readiness.checked()
        error = readiness.checks()["positions"]
        return error.code if error else None

    for at in range(0, 100, 2):
        assert told(at, 5, 5) is None, "a log that stands still is no reason"
    for at in range(100, 128, 2):
        assert told(at, 5, at) is None, "not yet"
    for at in range(130, 200, 2):
        assert told(at, at - 130, at) is None, "it moves, however far behind"
    for at in range(200, 230, 2):
        assert told(at, 70, 300) is None, "not yet"
    assert told(232, 70, 300) == "read-model-stands-still"
    assert told(234, 71, 300) is None, "it moves again"
    for at in range(236, 290, 2):
        look.seen = stores.HealthSnapshot(at, {"core": {0: 300}, "side": {0: 0}}, {0: 300}, ())
        readiness.checked()
    assert readiness._lags.now["side", 0].still > 30
    assert readiness.checks()["positions"] is None, "only core counts"


def test_a_process_that_has_not_looked_for_long_is_not_ready() -> None:
    look = stores.StoreChecks(Settings(), cast(Any, None), "test", {})
    readiness = Readiness(look, None, None)
    look.failures.clear()

    def told(age_s: float) -> set[str]:
        look.seen = stores.HealthSnapshot(time.monotonic() - age_s, {}, {}, ())
        readiness.checked()
        return {error.code for error in readiness.checks().values() if error}

    assert told(1) == set()
    assert told(11) == {"blind"}
    assert told(0) == set()
