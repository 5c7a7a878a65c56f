"""make test-all + prove: each takes sessions or processes that end.

`samefold rebuild --abandon` ends who builds the same view, frozen or not, who does no harm when he wakes up.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from infra.database.connect import SessionEnded, connect
from infra.settings import Settings
from projections.engine.operate.trim import plan_trim, trim_log
from projections.engine.operate.verify import verify
from projections.engine.rebuild import claims
from projections.engine.rebuild.builds import NotDroppable, begin, drop_tables, droppable
from projections.engine.rebuild.claims import BuildAbandoned, BuildAlive, claim, end_builders, session_name
from projections.engine.rebuild.rebuild import go_to, rebuild
from projections.engine.views.core_views import all_views
from tests.engine.bookkeeper import Bookkeeper, fold_all, live_agent
from tests.engine.projections.bankviews import ACCOUNTS, build_states, live_table, rows
from tests.engine.projections.builders import LOADED, STAGES, SWITCHED, ended, struck
from tests.engine.spine import scalar
from tools.testing.waiting import DEADLINE_S, until

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "CLAIM_S", 0.2)


def test_it_says_who_builds_ends_him_and_takes_his_place(bank: Bookkeeper) -> None:
    world = bank.world
    name = rf"samefold rebuild, pid {os.getpid()} on \S+"
    who = rf"by another process: session \d+ \({name}, user samefold, idle since \d{{4}}-.* UTC\)\."
    with connect(world, session_name("rebuild")) as other, connect(world, "another view") as unconcerned:
        begin(other, [all_views()["balances"]], world.events_topic, {}, "core")
        claim(unconcerned, "statement")
        with pytest.raises(BuildAlive, match=who) as refused:
            rebuild(world, ["balances"], all_views())
        assert "samefold rebuild balances --abandon" in refused.value.hint
        result = rebuild(world, ["balances"], all_views(), end_others=True)
        assert result.tables == {"balances": "balances_v2_r3"}
        assert build_states(world, "balances")["balances_v2_r2"] == "abandoned"
        assert unconcerned.execute("select 1").fetchone() == (1,), "only who stands in the way is ended"
        with pytest.raises(Exception, match="terminat"):
            other.execute("select 1")


def test_it_ends_nobody_where_nobody_builds(bank: Bookkeeper) -> None:
    assert rebuild(bank.world, ["balances"], all_views(), end_others=True).tables == {"balances": "balances_v2_r2"}


def test_a_session_that_does_not_end_is_told(bank: Bookkeeper, monkeypatch: pytest.MonkeyPatch) -> None:
    nobody = "(values (0, 'x', null::inet, now())) a(pid, application_name, client_addr, backend_start)"
    monkeypatch.setattr(claims, "_HOLDER", f"from {nobody} where %s <> ''")
    with connect(bank.world, "test") as db, pytest.raises(BuildAlive, match="did not end"):
        end_builders(db, ["balances"])


# ── a builder that is frozen, and wakes up when another one has taken his place ──

REBUILD = ("rebuild", "balances", "statement", "--json")


def frozen_builder(world: Settings, stage: str) -> AbstractContextManager[subprocess.Popen[str]]:
    return struck(world, signal.SIGSTOP, stage, *REBUILD)


@pytest.mark.parametrize("stage", STAGES.values(), ids=STAGES)
def test_a_frozen_builder_is_ended_and_does_no_harm_when_it_wakes(bank: Bookkeeper, stage: str) -> None:
    world = bank.world
    with frozen_builder(world, stage) as frozen:
        with pytest.raises(BuildAlive, match=f"pid {frozen.pid} on"):
            rebuild(world, ["balances"], all_views())
        rebuild(world, ["balances", "statement"], all_views(), end_others=True)
        bank.life(ACCOUNTS, 1)
        fold_all(world)
        was = {name: rows(world, name) for name in ("balances", "statement")}
        assert "build-abandoned: " in ended(frozen)[2]
        assert frozen.returncode == 1
    for name, before in was.items():
        assert live_table(world, name) == f"{all_views()[name].table_name}_r3"
        assert rows(world, name) == before
        assert build_states(world, name)[f"{all_views()[name].table_name}_r2"] == "abandoned"
    assert verify(world, all_views()).differences == 0


BEFORE_IT_HAS_A_TABLE = ["projections.engine.rebuild.builds.create", "projections.engine.rebuild.builds.drop_keys"]


@pytest.mark.parametrize("stage", BEFORE_IT_HAS_A_TABLE)
def test_one_that_is_ended_before_it_has_a_table_says_who_ended_it(bank: Bookkeeper, stage: str) -> None:
    world = bank.world
    with frozen_builder(world, stage) as frozen, connect(world, session_name("rebuild")) as other:
        end_builders(other, ["balances"])
        claim(other, "balances")
        _, _, why = ended(frozen)
    name = rf"samefold rebuild, pid {os.getpid()} on "
    assert re.search(rf"build-abandoned: Another process ended this one: session \d+ \({name}", why), why


@pytest.mark.parametrize("command", ["switch", "views drop", "archive trim"])
def test_whoever_claims_a_view_says_who_ended_it(bank: Bookkeeper, command: str, tmp_path: Path) -> None:
    """Each waits for a lock in the midst of what it does."""
    world = bank.world.model_copy(update={"archive_url": str(tmp_path), "archive_restore_days": 0})
    rebuild(world, ["balances"], all_views(), make_live=command != "switch")
    commands: dict[str, Callable[[], object]] = {
        "switch": lambda: go_to(world, ["balances"], all_views()),
        "views drop": lambda: drop_tables(world, droppable(world, "balances", "balances_v2"), None),
        "archive trim": lambda: trim_log(world, *plan_trim(world)),
    }
    if command == "archive trim":
        with connect(world, "killed") as killed:
            begin(killed, [all_views()["balances"]], world.events_topic, {}, "core")
    lock = {
        "switch": "select from positions for update",
        "views drop": "lock table balances_v2",
        "archive trim": "lock table balances_v2_r3",
    }
    with connect(world, "test") as db, connect(world, "another") as other, ThreadPoolExecutor(1) as pool:
        db.execute("begin")
        db.execute(lock[command])
        done = pool.submit(commands[command])
        until(lambda: claims.by_whom(other, "balances") != "", "it has claimed the view")
        end_builders(other, ["balances"])
        claim(other, "balances")
        with pytest.raises(BuildAbandoned, match=r"Another process ended this one: session \d+ \(another, user"):
            done.result(DEADLINE_S)


ENDED = {
    "another process that is gone": ("once", BuildAbandoned, r"^Another process ended this one\."),
    "a database that stops": ("again", SessionEnded, "ended this session"),
}


@pytest.mark.parametrize(("start", "error", "said"), ENDED.values(), ids=ENDED)
def test_who_ended_a_session_is_told(
    bank: Bookkeeper, monkeypatch: pytest.MonkeyPatch, start: str, error: type[Exception], said: str
) -> None:
    """PostgreSQL ends sessions with the same words when it is stopped; started again, it is not the server it was."""
    world = bank.world
    monkeypatch.setattr(claims, "ENDED_S", 0.2)
    starts = iter(["once", start])
    monkeypatch.setattr(claims, "_server", lambda _: next(starts))

    def is_ended() -> None:
        with connect(world, "admin") as db, claims.builder(world, "rebuild") as connection:
            db.execute("select pg_terminate_backend(%s, 5000)", (connection.info.backend_pid,))
            connection.execute("select 1")

    with pytest.raises(error, match=said):
        is_ended()


def test_one_that_had_switched_is_not_undone(bank: Bookkeeper) -> None:
    """Frozen behind its COMMIT: what it made live stays so until the next one's switch."""
    world = bank.world
    with frozen_builder(world, "switch done") as frozen:
        assert live_table(world, "balances") == "balances_v2_r2"
        again = rebuild(world, ["statement"], all_views(), end_others=True)
        assert again.tables == {"statement": "statement_v2_r3", "streams_accounts": "streams_accounts_v3_r3"}
        assert live_table(world, "balances") == "balances_v2_r2"
        code, told, _ = ended(frozen)
        assert code == 0
        assert json.loads(told)["tables"]["balances"] == "balances_v2_r2"
    assert live_table(world, "statement") == "statement_v2_r3"
    assert verify(world, all_views()).differences == 0


@pytest.mark.prove("chaos")
def test_beside_an_agent_that_goes_on(bank: Bookkeeper) -> None:
    """Two who both insist, under load: one is ended, the other's table is live."""
    world = bank.world

    def insist(_: int) -> Any:
        try:
            return rebuild(world, ["balances"], all_views(), end_others=True).tables["balances"]
        except BuildAlive as error:  # who was ended first may have been quicker than the claim
            return error
        except BuildAbandoned as error:
            return error

    with live_agent(world), ThreadPoolExecutor(2) as pool:
        both = [pool.submit(insist, number) for number in range(2)]
        bank.life(ACCOUNTS, 10)
        ended = [one.result() for one in both]
    tables = [one for one in ended if isinstance(one, str)]
    assert tables
    assert live_table(world, "balances") == max(tables)
    assert verify(world, all_views()).differences == 0


def test_what_a_killed_builder_left_is_dropped_by_name(bank: Bookkeeper) -> None:
    world, table = bank.world, "balances_v2_r2"

    def drop() -> None:
        drop_tables(world, droppable(world, "balances", table), all_views()["balances"])

    with frozen_builder(world, LOADED):
        with pytest.raises(BuildAlive):
            drop()
        assert build_states(world, "balances")[table] == "loading"
    until(lambda: _dropped(drop), "PostgreSQL notices that the builder was killed")
    assert build_states(world, "balances")[table] == "abandoned"
    assert scalar(world, f"select to_regclass('{table}')") is None


def test_a_ready_table_is_dropped_by_name_too(bank: Bookkeeper) -> None:
    world = bank.world
    assert rebuild(world, ["balances"], all_views(), make_live=False).tables == {"balances": "balances_v2_r2"}
    with pytest.raises(NotDroppable, match="balances_v2_r2 is ready"):
        droppable(world, "balances", "2")
    drop_tables(world, droppable(world, "balances", "balances_v2_r2"), all_views()["balances"])
    assert build_states(world, "balances") == {"balances_v2": "live", "balances_v2_r2": "abandoned"}


def _dropped(drop: Callable[[], None]) -> bool:
    try:
        drop()
    except BuildAlive:
        return False
    return True


IN_THE_PAST = "projections.engine.rebuild.time_travel.finish_loading"


@pytest.mark.parametrize("stage", [LOADED, SWITCHED, IN_THE_PAST])
def test_ctrl_c_leaves_no_harm_and_says_so(bank: Bookkeeper, stage: str) -> None:
    world = bank.world
    more = ["--as-of", "0:2", "--no-switch"] if stage == IN_THE_PAST else []
    with struck(world, signal.SIGINT, stage, "rebuild", "balances", *more) as process:
        code, _, complained = ended(process)
    assert code == 130, complained
    assert "interrupted: Interrupted." in complained
    assert "Traceback" not in complained
    assert live_table(world, "balances") == "balances_v2"
    assert not {"loading", "past-loading", "past"} & set(build_states(world, "balances").values())
    assert rebuild(world, ["balances"], all_views()).switched
    assert verify(world, all_views()).differences == 0
