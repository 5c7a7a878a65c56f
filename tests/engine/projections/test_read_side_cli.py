"""make test: commands run in this process.

`samefold views | rebuild | switch | verify | parked` as people and scripts run them: what they print, how they end.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from infra.database.connect import connect
from infra.settings import Settings
from projections.engine.views.core_views import all_views
from tests.engine.bookkeeper import Bookkeeper, fold_all
from tests.engine.projections.bankviews import ACCOUNTS, live_table, stop_as_older_code_would, with_views
from tests.engine.spine import scalar
from tools.cli import switch, views
from tools.testing.fixtures import Samefold
from tools.testing.waiting import until


def _json(samefold: Samefold, world: Settings, *arguments: str, code: int = 0) -> Any:
    done = samefold(*arguments, "--json", settings=world)
    assert done.returncode == code, done.stderr
    assert done.stderr == ""
    return json.loads(done.stdout)


def test_rebuild_switch_back_and_drop(bank: Bookkeeper, samefold: Samefold) -> None:
    world = bank.world
    done = _json(samefold, world, "rebuild", "balances", "statement")
    assert done["rows"] == {"balances": 20, "statement": 100, "streams_accounts": 20}
    assert done["commits"] == 120
    assert done["switch"]["tables"] == {
        "balances": "balances_v2_r2",
        "statement": "statement_v2_r2",
        "streams_accounts": "streams_accounts_v3_r2",  # a journal brings the states that its lines were made from
    }
    assert done["switch"]["gap_ms"] > 0
    again = samefold("rebuild", "balances", "--no-switch", settings=world)
    assert "samefold switch balances 2" in again.stderr, "going back would be quicker"
    assert "balances: balances_v2_r3, 20 rows" in again.stdout
    assert "not live yet" in again.stdout
    assert "balances is live in balances_v2_r3" in samefold("switch", "balances", settings=world).stdout
    assert _json(samefold, world, "switch", "statement", "2")["tables"] == {
        "statement": "statement_v2",
        "streams_accounts": "streams_accounts_v3",
    }
    asked = samefold("views", "drop", "balances", "balances_v2_r2", settings=world, given="n\n")
    assert asked.returncode == 1
    assert scalar(world, "select to_regclass('balances_v2_r2')") is not None
    dropped = samefold("views", "drop", "balances", "balances_v2_r2", "--yes", settings=world)
    assert dropped.stdout == "Dropped balances_v2_r2.\n"
    assert scalar(world, "select to_regclass('balances_v2_r2')") is None
    assert live_table(world, "balances") == "balances_v2_r3"


def test_nothing_to_do_and_wrong_usage(bank: Bookkeeper, samefold: Samefold) -> None:
    world = bank.world
    assert samefold("rebuild", settings=world).stdout == "Nothing to do: what is live is what this code has.\n"
    assert samefold("switch", settings=world).stdout == "Nothing to do: what is live is what this code has.\n"
    unknown = samefold("rebuild", "nonsense", settings=world)
    assert unknown.returncode == 2
    assert unknown.stderr.startswith("unknown-view: There is no view 'nonsense'.")
    assert samefold("verify", "nonsense", settings=world).returncode == 2
    assert samefold("switch", "balances", "7", settings=world).returncode == 2
    missing = samefold("switch", "balances", "2", settings=world)
    assert missing.returncode == 1
    assert missing.stderr.startswith("no-build: ")


def test_verify_ends_with_1_and_tells_what_differs(bank: Bookkeeper, samefold: Samefold) -> None:
    world = bank.world
    fine = _json(samefold, world, "verify")
    assert fine["differences"] == 0
    assert set(fine["views"]) == set(all_views())
    with connect(world, "vandal") as db:
        db.execute("update balances_v2 set cents = cents + 1 where account = '3'")
    found = _json(samefold, world, "verify", "balances", code=1)
    assert found["differences"] == 1
    [shown] = found["views"]["balances"]["shown"]
    assert (shown["what"], shown["key"]) == ("changed", {"account": "3"})
    assert shown["found"]["cents"] == shown["expected"]["cents"] + 1
    told = samefold("verify", settings=world)
    assert told.returncode == 1
    assert "balances (account=3) differs: cents is" in told.stdout
    assert "120 commits folded, 1 differences" in told.stdout


def test_views_tell_lag_builds_and_what_to_do(bank: Bookkeeper, samefold: Samefold) -> None:
    world = bank.world
    bank.life(ACCOUNTS, 1)
    until(lambda: _json(samefold, world, "views")["agents"]["core"]["lag"]["seconds"] > 0, "some time has passed")
    found = _json(samefold, world, "views")
    assert found["views"]["balances"] == {
        "code": 2,
        "live": 2,
        "stopped": None,
        "table": "balances_v2",
        "agent": "core",
        "parked": 0,
        "builds": found["views"]["balances"]["builds"],
    }
    assert [build["state"] for build in found["views"]["balances"]["builds"]] == ["live"]
    core = found["agents"]["core"]
    assert core["lag"]["records"] == len(ACCOUNTS)
    assert core["lag"]["seconds"] < 600
    assert core["difference"] is None
    fold_all(world)
    assert _json(samefold, world, "views")["agents"]["core"]["lag"] == {"records": 0, "seconds": 0.0}
    with connect(world, "older code") as db:
        db.execute("update live set version = 3 where view = 'balances'")
    told = samefold("views", settings=world).stdout
    assert "balances is live as v3, this code has v2" in told
    assert "samefold rebuild balances" in told
    [wrong] = [one for one in _json(samefold, world, "doctor", code=1)["findings"] if not one["ok"]]
    assert wrong["name"] == "views"
    assert "Agent core: balances is live as v3, this code has v2. " in wrong["found"]
    assert "samefold rebuild balances" in wrong["found"]
    with connect(world, "another topic") as db:
        db.execute("update live set version = 2 where view = 'balances'")
        db.execute("delete from positions")
    assert "balances v2 of this code is not live" in samefold("views", settings=world).stdout


def test_a_stopped_view_is_told_and_resumed(
    bank: Bookkeeper, samefold: Samefold, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This code takes every event, so the view is stopped as by an older code's agent. At last its file is removed."""
    world, without = bank.world, {name: one for name, one in all_views().items() if name != "balances"}
    stop_as_older_code_would(world, "balances")
    found = _json(samefold, world, "doctor", code=1)["findings"]
    [found] = [one for one in found if not one["ok"]]
    assert (found["name"], "balances: stopped at event 9 of accounts/3" in found["found"]) == ("standing still", True)
    assert "samefold views resume" in found["hint"]
    bank.life(ACCOUNTS, 1)
    fold_all(world, with_views({}, "balances"))
    found = _json(samefold, world, "views")["views"]["balances"]
    assert (found["live"], found["table"]) == (None, "balances_v2")
    assert (found["stopped"]["stream"], found["stopped"]["code"]) == ("accounts/3", "poison-event")
    told = samefold("views", settings=world).stdout
    assert "ValueError: [red]x[/red]" in told, "taken literally"
    assert "samefold views resume balances" in told
    assert _json(samefold, world, "verify")["stopped"] == ["balances"]
    assert "balances is stopped, so not compared" in samefold("verify", "balances", settings=world).stdout
    refused = samefold("views", "resume", "statement", settings=world)
    assert refused.returncode == 2
    assert refused.stderr.startswith("not-stopped: ")
    assert _json(samefold, world, "views", "resume", "balances")["tables"] == {"balances": "balances_v2"}
    assert _json(samefold, world, "verify")["differences"] == 0
    assert samefold("views", "resume", settings=world).stdout == "Nothing to do: what is live is what this code has.\n"
    stop_as_older_code_would(world, "balances")
    for command in (switch, views):
        monkeypatch.setattr(command, "all_views", lambda: without)
    told = samefold("views", settings=world).stdout
    assert ("projections/balances.py" in told, "balances v2 is live" in told) == (False, False)
    assert "`samefold switch balances` at once" in told
    assert samefold("switch", "balances", settings=world).returncode == 0
    assert "balances" not in _json(samefold, world, "views")["views"]


def test_parked_says_when_there_is_nothing(bank: Bookkeeper, samefold: Samefold) -> None:
    world = bank.world
    assert samefold("parked", "list", settings=world).stdout == "Nothing is parked.\n"
    assert _json(samefold, world, "parked", "list") == []
    for command, *more in (["show"], ["replay"], ["drop", "--yes"]):
        refused = samefold("parked", command, "balances", "accounts/3", *more, settings=world)
        assert refused.returncode == 1
        assert refused.stderr.startswith("not-parked: ")


def test_parked_shows_replays_and_drops(bank: Bookkeeper, samefold: Samefold) -> None:
    """This code takes every event, so the stream is parked by hand: rows and record as an older code left them."""
    world = bank.world
    version = scalar(world, "select version from streams_accounts where stream = 'accounts/3'")
    partition = scalar(world, "select _partition from balances_v2 where account = '3'")
    with connect(world, "older code") as db:
        for since in (version, version - 1):
            db.execute("delete from statement_v2 where account = '3' and line >= %s", (since,))
            db.execute("delete from parked")
            db.execute(
                "insert into parked (table_name, stream, view, partition, since_offset, since_version, error) "
                "values ('statement_v2', 'accounts/3', 'statement', %s, 1, %s, 'KeyError: [red]x[/red]')",
                (partition, since),
            )
            lines = scalar(world, "select count(*) from statement where account = '3'")
            if since == version:
                shown = _json(samefold, world, "parked", "show", "statement", "accounts/3")
                assert [event["version"] for event in shown["events"]] == [version]
                assert "[red]x[/red]" in samefold("parked", "list", settings=world).stdout, "taken literally"
                done = _json(samefold, world, "parked", "replay", "statement", "accounts/3")
                assert (done["events"], done["dropped"], done["parked_since"]) == (1, None, None)
                assert scalar(world, "select count(*) from statement where account = '3'") == lines + 1
            else:
                done = _json(samefold, world, "parked", "drop", "statement", "accounts/3", "--yes")
                assert (done["events"], done["dropped"]) == (1, since)
    assert _json(samefold, world, "verify", "statement")["differences"] == 0
