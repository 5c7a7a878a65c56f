"""make test: stores without processes.

`samefold policies | outbox | parked` as people and scripts run them, and what is measured of policies."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from datetime import date
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from domain.accounts import AccountOpened, Deposit, Details, MoneyDeposited, Withdraw
from infra.archive.jobs import archive_log
from infra.database.connect import Connection, connect
from infra.log import topics
from infra.observability import metrics
from infra.settings import Settings
from policies.engine import operate, posts
from policies.engine import policy as declared
from policies.engine.outbox import id_of, view_of
from policies.engine.policy import Policy, Send
from projections.engine.fold.plan import Plan
from projections.engine.live.exporter import Exporter
from projections.engine.live.lag import WISHES
from projections.engine.operate.trim import plan_trim
from projections.engine.rebuild.catch_up import Tail
from projections.engine.store.commit import CommitStatus, Committer
from projections.engine.store.positions import lock_positions, read_positions, set_generation
from projections.engine.views.event_context import At
from tests.engine.bookkeeper import Bookkeeper, _ends, fold_all, folded_lives
from tests.engine.policies.test_sources import source
from tests.engine.policies.test_webhooks import put, with_endpoints
from tools.testing.fixtures import Samefold
from tools.testing.waiting import until

DAY = date(2026, 1, 1)
ACCOUNTS = [str(number) for number in range(6)]
SECRET = "only for Ada"


def saving(event: MoneyDeposited, at: At) -> Iterator[Send]:
    """Each deposit puts one cent aside."""
    if event.details.purpose == "poison":
        raise ValueError("no")
    yield from corrected(event, at)


def corrected(event: MoneyDeposited, at: At) -> Iterator[Send]:
    yield Send("accounts/savings", Deposit(cents=1, on=event.on), then=Withdraw(cents=1, on=event.on))


SAVING = Policy("saving", 1, saving, frozenset({MoneyDeposited}), "park")


@pytest.fixture
def code(monkeypatch: pytest.MonkeyPatch) -> dict[str, Policy]:
    """The policies that this code has."""
    found = {"saving": SAVING}
    monkeypatch.setattr(declared, "discover", lambda: found)
    return found


@pytest.fixture
def bank(world: Settings, code: dict[str, Policy]) -> Bookkeeper:
    return folded_lives(world, ACCOUNTS, 3)


@pytest.fixture
def db(bank: Bookkeeper) -> Iterator[Connection]:
    with connect(bank.world, "test") as connection:
        yield connection


@pytest.fixture
def cli(bank: Bookkeeper, samefold: Samefold) -> Samefold:
    return partial(samefold, settings=bank.world)


def answer(cli: Samefold, *arguments: str, code: int = 0) -> Any:
    done = cli(*arguments, "--json")
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout)


def fold(db: Connection, world: Settings, policy: Policy) -> None:
    """Fold the log up to its end now, as the policy's agent would."""
    positions = read_positions(db, policy.agent, world.events_topic)
    assert positions is not None
    view, at = view_of(policy), dict(positions.readings)
    committer, end = Committer(Plan({view.name: view}), positions), topics.describe(world, world.events_topic).end
    with Tail(world, world.events_topic, at) as tail:
        while batches := tail.towards(at, _ends(at, end), 1_000):
            assert committer.apply(db, batches).status is CommitStatus.APPLIED
            at.update({batch.partition: batch.next for batch in batches})


def insert(db: Connection, ident: str, **columns: Any) -> None:
    values = {"id": ident, "policy": "saving", "kind": "send", "stream": "accounts/1", "partition": 0} | columns
    names = ", ".join(values)
    db.execute(f"insert into outbox ({names}) values ({', '.join(['%s'] * len(values))})".encode(), [*values.values()])


# ── samefold policies ──


def test_a_policy_is_new_then_live_then_of_another_version_then_removed(
    bank: Bookkeeper, db: Connection, code: dict[str, Policy], cli: Samefold
) -> None:
    def now() -> dict[str, Any]:
        found: dict[str, dict[str, Any]] = answer(cli, "policies")
        return found["saving"]

    assert (now()["code"], now()["live"], now()["state"], now()["since"]) == (1, None, "new", None)
    assert "`samefold policies switch saving`" in cli("policies").stdout
    made = answer(cli, "policies", "switch", "saving")
    assert (made["policy"], made["number"], made["version"]) == ("saving", 1, 1)
    assert (now()["live"], now()["state"], now()["needs"], now()["lag"]["records"]) == (1, "live", [1], 0)
    assert now()["since"] is not None
    again = cli("policies", "switch", "saving")
    assert (again.returncode, again.stderr.split(":")[0]) == (1, "already-live")
    bank.commit("1", MoneyDeposited(cents=5, on=DAY))
    bank.flush()
    assert now()["lag"]["records"] == 1
    assert "policy saving: 1 records" in cli("policies").stdout
    assert "retired" not in cli("views").stdout

    code["saving"] = replace(SAVING, version=2)
    assert (now()["code"], now()["live"], now()["state"]) == (2, 1, "other-version")
    assert "Version 2 of 'saving' reacts" in cli("policies", "switch", "saving").stdout
    code["saving"] = SAVING
    asked = cli("policies", "switch", "saving", given="n\n")
    assert (asked.returncode, now()["live"]) == (1, 2)
    assert "older version 1" in asked.stderr
    assert cli("policies", "switch", "saving", "--yes").returncode == 0
    assert (now()["live"], now()["state"]) == (1, "live")

    insert(db, "saving~1")
    refused = cli("policies", "remove", "saving")
    assert (refused.returncode, refused.stderr.split(":")[0]) == (1, "wishes-open")
    del code["saving"]
    assert (now()["code"], now()["state"], now()["open"]) == (None, "no-code", 1)
    db.execute("delete from outbox")
    assert answer(cli, "policies", "remove", "saving")["version"] is None
    assert answer(cli, "policies") == {}
    assert cli("policies").stdout == "policies/ has none, and none is live.\n"
    code["saving"] = SAVING
    assert (now()["code"], now()["live"], now()["state"]) == (1, None, "removed")


def test_a_restored_database_needs_the_old_code_first(
    bank: Bookkeeper, db: Connection, code: dict[str, Policy], cli: Samefold
) -> None:
    world = bank.world
    cli("policies", "switch", "saving")
    positions = read_positions(db, SAVING.agent, world.events_topic)
    assert positions is not None
    bank.life(ACCOUNTS, 2)
    set_generation(db, world.events_topic, {SAVING.agent: fold_all(world)}, "test")
    code["saving"] = replace(SAVING, version=2)
    cli("policies", "switch", "saving")
    set_generation(db, world.events_topic, {SAVING.agent: positions.readings}, "restored")
    now = answer(cli, "policies")["saving"]
    assert (now["live"], now["state"], now["needs"]) == (2, "old-events", [1])
    assert "Run the code with v1 until its events have been read" in cli("policies").stdout


def test_a_source_that_can_not_be_asked_has_not_received_all(code: dict[str, Policy], cli: Samefold) -> None:
    code["from_billing"] = source()
    [line] = [line for line in cli("policies").stdout.splitlines() if line.startswith("source from_billing")]
    assert line.endswith("No source 'billing' is configured.")


@pytest.mark.parametrize(
    ("to", "why"),
    [
        ("1969-12-31T23:59:59.999Z", "is before 1970.\n  → Write a later time, or earliest."),
        ("2999-01-01T00:00:00Z", "is in the future"),
        ("0:1", "it is a time, not positions"),
    ],
)
def test_a_source_goes_on_from_no_time_that_can_not_be_meant(
    code: dict[str, Policy], cli: Samefold, to: str, why: str
) -> None:
    code["from_billing"] = source()
    done = cli("policies", "reposition", "from_billing", "--yes", "--to", to)
    assert (done.returncode, why in done.stderr) == (2, True), done.stderr


def test_a_policy_that_does_not_exist_is_wrong_usage(cli: Samefold) -> None:
    unknown = cli("policies", "switch", "nonsense")
    assert unknown.returncode == 2
    assert unknown.stderr == "unknown-policy: There is no policy 'nonsense'.\n  → The policies are saving.\n"
    assert cli("parked", "replay", "policy_nonsense", "accounts/1").returncode == 2
    never = cli("policies", "remove", "nonsense")
    assert (never.returncode, never.stderr.split(":")[0]) == (1, "never-live")


# ── samefold outbox ──


def test_the_outbox_is_listed_without_what_may_be_confidential(db: Connection, cli: Samefold) -> None:
    assert cli("outbox", "list").stdout == "Nothing is on its way.\n"
    assert cli("outbox", "list", "--dead").stdout == "There are no dead letters.\n"
    unknown = cli("outbox", "list", "--policy", "nosuch")
    assert (unknown.returncode, "There is no policy 'nosuch'" in unknown.stderr) == (2, True)
    db.execute("insert into activations (policy, number, version, positions, log_offset) values ('old', 1, 1, '{}', 0)")
    assert cli("outbox", "list", "--policy", "old").stdout == "Nothing is on its way.\n"
    body = json.dumps({"note": SECRET})
    insert(db, "saving~1", body=body, target="accounts/2", type="Deposit", wished_at="2026-01-01")
    insert(db, "saving~2", body=body, dead="refused-by-kafka: it is too large", wished_at="2026-01-02")
    insert(db, "saving~3", due="2099-01-01", wished_at="2026-01-03")
    insert(db, "saving~4", sent_at="2026-01-04", wished_at="2026-01-04")
    insert(db, "saving~5", kind=None, stream=None, outcome="accepted")
    insert(db, "other~1", policy="other", wished_at="2026-01-05")
    found = answer(cli, "outbox", "list", "--policy", "saving")
    assert found["total"] == 5
    assert {one["id"]: one["state"] for one in found["wishes"]} == {
        "saving~1": "unsent",
        "saving~2": "dead",
        "saving~3": "waiting",
        "saving~4": "sent",
        "saving~5": "outcome",
    }
    dead = answer(cli, "outbox", "list", "--dead")
    assert [one["id"] for one in dead["wishes"]] == ["saving~2"]
    few = cli("outbox", "list", "--limit", "2")
    assert "… and 4 more" in few.stdout
    for arguments in (("list",), ("list", "--json"), ("list", "--dead")):
        assert SECRET not in cli("outbox", *arguments).stdout
    assert answer(cli, "outbox", "show", "saving~1")["body"] == {"note": SECRET}
    shown = cli("outbox", "show", "saving~2")
    assert SECRET in shown.stdout
    assert "samefold outbox retry saving~2" in shown.stdout
    assert cli("outbox", "show", "saving~9").stderr.startswith("no-such-wish: ")


def test_dead_letters_are_sent_again_or_dropped(db: Connection, cli: Samefold) -> None:
    insert(db, "saving~1", dead="too-deep: a cycle")
    insert(db, "saving~2", dead="too-deep: a cycle")
    insert(db, "saving~3")
    insert(db, "saving~4", dead="too-deep: a cycle", otherwise_type="Withdraw", stream="accounts/4")
    insert(db, "saving~5", dead="id-reused: another command", outcome="accepted")
    alive = cli("outbox", "retry", "saving~1", "saving~3")
    assert (alive.returncode, alive.stderr.split("\n")[0]) == (
        1,
        "not-dead: saving~3 (unsent) is under way; nothing was changed.",
    )
    for command in ("retry", "drop"):
        assert cli("outbox", command, "saving~1", "saving~9").stderr.startswith("no-such-wish: ")
        for arguments in ((), ("saving~1", "--policy", "saving")):
            assert cli("outbox", command, *arguments).returncode == 2
    assert cli("outbox", "retry", "saving~5").stderr.startswith("not-dead: saving~5 can't be sent")
    assert answer(cli, "outbox", "retry", "saving~1") == {"retried": 1, "left": 0}
    again = answer(cli, "outbox", "show", "saving~1")
    assert (again["dead"], again["state"]) == (None, "unsent")
    asked = cli("outbox", "drop", "saving~2", "saving~4", given="n\n")
    assert asked.returncode == 1
    assert "No follow-up will come for accounts/4, " in asked.stderr
    assert answer(cli, "outbox", "list")["total"] == 5
    assert answer(cli, "outbox", "drop", "-", "--yes", "--all") == {"dropped": 0}, "no id is not every id"
    assert answer(cli, "outbox", "retry", "-") == {"retried": 0, "left": 0}
    asked = cli("outbox", "drop", "-", given="saving~2\nsaving~4\n")
    assert (asked.returncode, "add --yes" in asked.stderr) == (2, True)
    assert cli("outbox", "drop", "-", "--yes", given="saving~2\nsaving~4\n").stdout == ("Dropped 2.\n")
    assert {one["id"] for one in answer(cli, "outbox", "list")["wishes"]} == {"saving~1", "saving~3", "saving~5"}


def test_any_wish_can_be_dropped_and_what_may_have_been_sent_waits_for_its_outcome(
    bank: Bookkeeper, db: Connection, cli: Samefold
) -> None:
    """Otherwise a timer of the year 2099, or of a type that nobody knows, would keep a policy from being removed."""
    cli("policies", "switch", "saving")
    insert(db, "saving~1", due="2099-01-01")
    insert(db, "saving~2", kind=None, stream=None, outcome="accepted")
    insert(db, "saving~3", due="2026-01-01", then_type="Withdraw")
    insert(db, "saving~4", sent_at="2026-01-04")
    post, other = put(bank.world, "crm", "accounts/1", [1, 2], policy="saving")
    asked = cli("outbox", "drop", "saving~2", given="n\n")
    assert "If the wish of a dropped outcome is read later" in asked.stderr
    asked = cli("outbox", "drop", "saving~3", post, given="n\n")
    assert "No follow-up will come for accounts/1, " in asked.stderr
    assert "just being sent, may still be decided or delivered" in asked.stderr
    every = ["saving~1", "saving~2", "saving~3", "saving~4", post]
    assert answer(cli, "outbox", "drop", *every, "--yes") == {"dropped": 5}
    left = {one["id"]: one["state"] for one in answer(cli, "outbox", "list")["wishes"]}
    assert left == {"saving~3": "dropped", "saving~4": "dropped", other: "unsent"}
    assert answer(cli, "policies")["saving"]["open"] == 1
    assert answer(cli, "outbox", "drop", "saving~3", "saving~4", "--yes") == {"dropped": 2}
    assert answer(cli, "outbox", "list")["total"] == 1


def test_wishes_are_chosen_by_policy_endpoint_reason_and_age_in_steps(
    bank: Bookkeeper, db: Connection, cli: Samefold, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hundred thousand of them are too many to be named."""
    monkeypatch.setattr(operate, "STEP", 2)
    crm = put(bank.world, "crm", "accounts/1", range(1, 6), policy="saving")
    shop = put(bank.world, "shop", "accounts/1", [1, 2], policy="saving")
    put(bank.world, "shop", "accounts/1", [1], policy="other")
    db.execute("update posts set dead = 'gave-up: attempt 10'")
    db.execute("truncate lanes")
    db.execute("update posts set dead = 'gone: it answered 410' where id = %s", (shop[1],))
    insert(db, "saving~1", dead="id-reused: another command", outcome="accepted", wished_at="2026-05-01")
    insert(db, "saving~2", dead="too-deep: a cycle", wished_at="2026-05-01")
    nothing = {"retried": 0, "left": 0}
    assert answer(cli, "outbox", "retry", "--since", "2026-06-01") == nothing
    for since, listed in [("2026-05-01T00:30:00Z", 0), ("2026-05-01T01:00:00+01:00", 2), ("2026-05-01", 2)]:
        assert answer(cli, "outbox", "list", "--since", since)["total"] == listed
        assert answer(cli, "outbox", "list", "--dead", "--until", since)["total"] == 10 - listed
    assert [one["id"] for one in answer(cli, "outbox", "list", "--reason", "too-deep")["wishes"]] == ["saving~2"]
    assert answer(cli, "outbox", "retry", "--policy", "saving", "--since", "2026-04-01") == {"retried": 1, "left": 1}
    assert answer(cli, "outbox", "retry", "--endpoint", "crm", "--reason", "gone") == nothing
    assert answer(cli, "outbox", "retry", "--endpoint", "crm", "--reason", "gave-up: attempt 1") == nothing
    for command in ("retry", "drop"):
        assert "unknown-policy: " in cli("outbox", command, "--policy", "nosuch").stderr
    assert answer(cli, "outbox", "retry", "--endpoint", "crm", "--reason", "gave-up: attempt 10") == {
        "retried": 5,
        "left": 0,
    }
    settings = with_endpoints(bank.world, shop="http://127.0.0.1:1/")
    found = json.loads(cli("outbox", "list", "--endpoint", "crm", "--json", settings=settings).stdout)["wishes"]
    assert {one["id"]: (one["state"], one["attempts"]) for one in found} == dict.fromkeys(crm, ("no-endpoint", 0))
    asked = cli("outbox", "drop", "--policy", "saving", "--endpoint", "shop", given="n\n")
    assert f"Drop {shop[0]}, {shop[1]}?" in asked.stderr
    assert answer(cli, "outbox", "drop", "--policy", "saving", "--endpoint", "shop", "--yes") == {"dropped": 2}
    assert answer(cli, "outbox", "drop", "--endpoint", "crm", "--yes") == {"dropped": 0}
    assert answer(cli, "outbox", "drop", "--endpoint", "crm", "--all", "--yes") == {"dropped": 5}
    assert posts.endpoints(db) == set(), "no lane is left without a post"
    assert {one["policy"] for one in answer(cli, "outbox", "list", "--dead")["wishes"]} == {"saving", "other"}


def test_the_database_before_its_migration_is_named(empty_world: Settings, samefold: Samefold) -> None:
    for arguments in (("policies",), ("outbox", "list")):
        done = samefold(*arguments, settings=empty_world)
        assert (done.returncode, done.stderr.split(":")[0]) == (1, "database-behind")


# ── samefold parked ──


@pytest.fixture
def parked(bank: Bookkeeper, db: Connection, cli: Samefold) -> Bookkeeper:
    """Account `ada` is parked for the policy since version 3; a wish of version 2 has ended after that."""
    world = bank.world
    cli("policies", "switch", "saving")
    for event in (
        AccountOpened(overdraft_limit=0, on=DAY),
        MoneyDeposited(cents=5, on=DAY),
        MoneyDeposited(cents=6, on=DAY, details=Details(purpose="poison")),
        MoneyDeposited(cents=7, on=DAY),
    ):
        bank.commit("ada", event)
    bank.flush()
    fold(db, world, SAVING)
    for suffix, account in (("", "savings"), ("~then", "ada")):
        ident = id_of("saving", "accounts/ada", 2, 0) + suffix
        [(fingerprint,)] = db.execute("select fingerprint from outbox where id = %s", (ident,)).fetchall()
        bank.commit(account, command_id=ident, fingerprint=fingerprint)
        bank.flush()
        fold(db, world, SAVING)
    return bank


def ids(db: Connection) -> set[tuple[str, bool]]:
    """Ids of the outbox, each with whether the wish is there."""
    return set(db.execute("select id, kind is not null from outbox").fetchall())


def test_a_parked_stream_is_replayed_without_the_outcomes_that_were_read(
    parked: Bookkeeper, db: Connection, code: dict[str, Policy], cli: Samefold
) -> None:
    assert ids(db) == set(), "the wish of version 2 has ended, parked or not"
    [one] = answer(cli, "parked", "list")
    assert (one["view"], one["stream"], one["since_version"], one["live"]) == ("policy_saving", "accounts/ada", 3, True)
    assert answer(cli, "policies")["saving"]["parked"] == 1
    shown = answer(cli, "parked", "show", "policy_saving", "accounts/ada")
    assert [event["version"] for event in shown["events"]] == [3, 4]
    again = answer(cli, "parked", "replay", "policy_saving", "accounts/ada", code=1)
    assert (again["events"], again["parked_since"]) == (0, 3)
    code["saving"] = replace(SAVING, react=corrected)
    done = answer(cli, "parked", "replay", "policy_saving", "accounts/ada")
    assert (done["events"], done["parked_since"]) == (2, None)
    assert ids(db) == {(id_of("saving", "accounts/ada", version, 0), True) for version in (3, 4)}
    assert answer(cli, "parked", "list") == []


def test_a_parked_event_is_dropped_and_the_rest_goes_on(parked: Bookkeeper, db: Connection, cli: Samefold) -> None:
    done = answer(cli, "parked", "drop", "policy_saving", "accounts/ada", "--yes")
    assert (done["dropped"], done["events"], done["parked_since"]) == (3, 1, None)
    [dropped] = answer(cli, "parked", "list", "--dropped")
    assert (dropped["view"], dropped["stream"], dropped["version"]) == ("policy_saving", "accounts/ada", 3)
    assert "ValueError: no" in dropped["error"]
    assert "accounts/ada" in cli("parked", "list", "--dropped").stdout
    assert ids(db) == {(id_of("saving", "accounts/ada", 4, 0), True)}
    parked.commit("ada", MoneyDeposited(cents=8, on=DAY))
    parked.flush()
    fold(db, parked.world, SAVING)
    assert (id_of("saving", "accounts/ada", 5, 0), True) in ids(db)


# ── samefold processes ──


def test_each_process_is_listed_with_what_it_waits_for_and_those_that_need_a_person_are_stuck(
    parked: Bookkeeper, db: Connection, cli: Samefold
) -> None:
    db.execute("update parked set parked_at = '2026-01-09'")
    insert(db, "saving~1", stream="accounts/1", wished_at="2026-01-03", type="Deposit", target="accounts/savings")
    insert(db, "saving~2", stream="accounts/1", wished_at="2026-01-02", due="2099-01-01")
    insert(db, "saving~3", stream="accounts/2", wished_at="2026-01-04", sent_at="2026-01-05")
    insert(db, "saving~4", stream="accounts/2", wished_at="2026-01-06", dead="refused: failed")
    insert(db, "other~1", policy="other", stream="accounts/1", wished_at="2026-01-07")
    insert(db, "saving~9", kind=None, stream=None, outcome="accepted")
    found = answer(cli, "processes")["processes"]
    assert [(one["policy"], one["stream"], one["stuck"], one["since"][:10]) for one in found] == [
        ("saving", "accounts/1", False, "2026-01-02"),
        ("saving", "accounts/2", True, "2026-01-04"),
        ("other", "accounts/1", False, "2026-01-07"),
        ("saving", "accounts/ada", True, "2026-01-09"),
    ]
    assert [[(wait["what"], wait["id"]) for wait in one["first"]] for one in found] == [
        [("timer", "saving~2"), ("unsent", "saving~1")],
        [("dead", "saving~4"), ("sent", "saving~3")],
        [("unsent", "other~1")],
        [("parked", None)],
    ]
    text = cli("processes").stdout
    assert "unsent Deposit accounts/savings saving~1" in " ".join(text.split())
    stuck = answer(cli, "processes", "--stuck", "--policy", "saving")["processes"]
    assert [(one["stream"], [wait["why"] for wait in one["first"]]) for one in stuck] == [
        ("accounts/2", ["refused: failed"]),
        ("accounts/ada", [found[3]["first"][0]["why"]]),
    ]
    assert "There may be more" in cli("processes", "--limit", "1").stdout
    assert cli("processes", "--policy", "nosuch").stderr.startswith("unknown-policy: ")


@pytest.mark.parametrize("column", ["type", "then_type", "otherwise_type", "later_type"])
def test_a_switch_is_refused_while_a_policy_has_wished_commands_that_it_would_drop(
    bank: Bookkeeper, db: Connection, cli: Samefold, column: str
) -> None:
    db.execute("insert into command_types values ('accounts', 'Steal'), ('transfers', 'Steal')")
    types = {"target": "accounts/2", "type": "Deposit", column: "Steal"}
    insert(db, "saving~1", **types)
    insert(db, "saving~2", **types)
    refused = cli("switch")
    assert (refused.returncode, refused.stderr.partition(":")[0]) == (1, "types-wished")
    assert "2 of accounts.Steal (policy saving)" in refused.stderr
    db.execute("delete from outbox")
    assert {"accounts.Steal", "transfers.Steal"} <= set(answer(cli, "switch")["removed"])


# ── metrics, trimming ──


def test_lag_parked_streams_and_the_outbox_are_metrics(parked: Bookkeeper, db: Connection) -> None:
    world = parked.world
    insert(db, "saving~1", wished_at="2026-01-01")
    insert(db, "saving~2", dead="too-deep: a cycle")
    insert(db, "saving~3", due="2099-01-01")
    insert(db, "saving~4", wished_at="2026-01-01", due="2026-02-01")
    parked.life(["ada"], 2)
    end = topics.describe(world, world.events_topic).end
    exporter = Exporter(world, "test")
    thread = Thread(target=exporter.run)

    def value(name: str, **labels: str) -> float | None:
        return metrics.REGISTRY.get_sample_value(f"samefold_{name}", labels)

    def lag() -> float:
        return sum(value("lag_events", agent="policy_saving", partition=str(partition)) or 0 for partition in end)

    try:
        with db.transaction():
            db.execute("lock outbox in access exclusive mode")
            thread.start()
            until(lambda: lag() == 2, "lag is told while the outbox can't be counted")
        until(lambda: value("outbox_dead", policy="saving") == 1, "the exporter has read both stores")
        until(lambda: value("parked_streams", view="policy_saving") == 1, "the exporter has read both stores")
        until(lambda: value("processes_stuck", policy="saving") == 2, "the exporter has read both stores")
    finally:
        exporter.stopping.set()
        thread.join(30)
    assert value("outbox_open", policy="saving") == 3
    command, timer, post = (value("outbox_unsent_seconds", policy="saving", kind=kind) or 0 for kind in WISHES)
    assert command - timer == pytest.approx(31 * 86_400)
    assert timer > 1_000_000
    assert post == 0


def test_the_log_is_not_trimmed_before_a_policy_has_read_it(
    bank: Bookkeeper, db: Connection, cli: Samefold, tmp_path: Path
) -> None:
    world = bank.world.model_copy(update={"archive_restore_days": 0, "archive_url": str(tmp_path)})
    cli("policies", "switch", "saving")
    at = lock_positions(db, [SAVING.agent], world.events_topic)[SAVING.agent]
    bank.life(ACCOUNTS, 2)
    fold_all(world)
    archive_log(world)
    _, cuts = plan_trim(world)
    assert {cut.partition: cut.to for cut in cuts} == {
        partition: reading.next_offset for partition, reading in at.items()
    }
    assert all("policy_saving" in cut.held for cut in cuts if cut.held)
    cli("policies", "remove", "saving")
    _, cuts = plan_trim(world)
    assert {cut.partition: cut.to for cut in cuts} == topics.describe(world, world.events_topic).end
