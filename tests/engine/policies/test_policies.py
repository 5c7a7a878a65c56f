"""make test + test-all: one run of all parts; the long one takes longer.

Policies as they run: an agent for each, and the relay, with a handler on the real stores."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import date, timedelta
from pathlib import Path
from random import Random, random
from typing import Any, get_args

import pytest

from commands.client import wait_for
from domain.accounts import Deposit, MoneyDeposited, Movement, Withdraw
from infra.database.connect import connect
from infra.log.partitioner import partition_of
from infra.log.records import Command
from infra.log.rule import START, Reading
from infra.settings import Settings
from policies import transfers
from policies.engine import webhooks
from policies.engine.activations import switch
from policies.engine.policy import Policy, Post, Send, discover
from policies.engine.process import Policies
from projections.engine.store.positions import lock_positions, set_generation
from projections.engine.views.core_views import all_views
from projections.engine.views.event_context import At
from projections.engine.views.view import Kind
from tests.engine.api.api import agent, in_a_loop
from tests.engine.policies.publishers import publisher, reader
from tests.engine.policies.test_webhooks import Receiver, receiver, with_endpoints  # noqa: F401  # a fixture
from tests.engine.spine import command, commits, deposit, handler, open_account, scalar, send, set_up
from tools.testing.waiting import DEADLINE_S, until

DAY = date(2026, 1, 1)


@contextmanager
def running(world: Settings, *policies: Policy, name: str = "p1", **more: Any) -> Iterator[Policies]:
    """The process of these policies, in a thread."""
    with in_a_loop(lambda: Policies(world, policies, name, **more), name) as process:
        agents = [policy.agent for policy in policies]
        query = "select count(distinct agent) from positions where agent = any(%s)"
        until(lambda: scalar(world, query, agents) == len(agents), "the policies are live")
        yield process


def forward(event: MoneyDeposited, at: At) -> Iterable[Send]:
    """What account 1 gets, account 2 gets too; and if it did, account 1 gives it away."""
    if at.id == "1":
        yield Send("accounts/2", Deposit(cents=event.cents, on=event.on), then=Withdraw(cents=event.cents, on=event.on))


FORWARD = Policy("forward", 1, forward, frozenset({MoneyDeposited}))


def balance(world: Settings, account: str) -> int | None:
    cents: int | None = scalar(world, "select cents from balances where account = %s", account)
    return cents


def open_wishes(world: Settings) -> int:
    count: int = scalar(world, "select count(*) from outbox")
    return count


def test_a_wish_is_sent_once_in_effect_and_then_its_follow_up(world: Settings) -> None:
    set_up(world)
    with running(world, FORWARD), handler(world), agent(world):
        send(world, open_account("1"), open_account("2"), *(deposit("1", f"d{n}", n) for n in range(1, 101)))
        until(lambda: (balance(world, "1"), balance(world, "2")) == (0, 5050), "all is forwarded")
        until(lambda: open_wishes(world) == 0, "no wish is left")
    ids = [commit.command_id for commit in commits(world)]
    assert len(ids) == len(set(ids)) == 302


def test_a_post_goes_out_when_it_was_wished(
    world: Settings,
    receiver: Receiver,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A notification says so: without one, posts are looked for once an hour here."""
    monkeypatch.setattr(webhooks, "POLL_S", 3_600.0)

    def react(event: MoneyDeposited, _at: At) -> Iterable[Post]:
        yield Post("crm", {"cents": event.cents})

    settings = with_endpoints(world, crm=receiver.url("crm/ok"))
    set_up(settings)
    with handler(settings), running(settings, Policy("letters", 1, react, frozenset({MoneyDeposited}))):
        until(lambda: scalar(settings, "select count(*) from relay_leases") > 0, "the relay is notified")
        send(settings, open_account("1"), deposit("1", "d1", 7))
        until(lambda: [request["body"] for request in receiver.got()] == [{"cents": 7}], "it goes out")


COMES = {"money-deposited.v1": 1, "interest-credited.v1": 1, "money-returned.v1": 1}
GOES = {"money-withdrawn.v1": -1, "fee-charged.v1": -1}


def generated(chance: Random) -> Iterator[Command]:
    """Money of open accounts comes, goes and is transferred, also to one that is closed; not all of it is there."""
    names, on = [f"x{number}" for number in range(6)], DAY.isoformat()

    def transfer(ident: str, source: str, target: str, cents: int) -> Command:
        body: dict[str, Any] = {"source": source, "target": target, "cents": cents}
        return command(f"transfers/{ident}", ident, "RequestTransfer", on=on, **body)

    for name in ["closed", "rich", *names]:
        yield open_account(name, chance.randrange(50))
        yield deposit(name, "0", 500) if name != "closed" else command("accounts/closed", "0", "CloseAccount", on=on)
    for cents, target in (1, "x0"), (1, "closed"), (500_000, "x0"):
        yield transfer(f"rich-{target}-{cents}", "rich", target, cents)
    for ident in map(str, range(1, 150)):
        name, cents = chance.choice(names), chance.randint(1, 200)
        if chance.random() < 0.3:
            yield transfer(ident, name, chance.choice([*names, "closed"]), cents)
        else:
            kind = chance.choice(["Deposit", "Withdraw", "CreditInterest", "ChargeFee"])
            yield command(f"accounts/{name}", ident, kind, cents=cents, on=on)


def test_other_teams_sums_of_public_events_are_the_balances(world: Settings, tmp_path: Path) -> None:
    """Fees, interest and refunds among them, and transfers that fail."""
    sent = list(generated(Random(random())))
    set_up(world)
    with reader(world) as public, publisher(world, tmp_path), handler(world), agent(world):
        with running(world, *discover().values()):
            send(world, *sent)
            wait_for(world, sent, lambda _: None, timeout_s=DEADLINE_S)
            open_ones = "select count(*) from transfers where state not in ('completed', 'failed', 'refunded')"
            until(lambda: scalar(world, open_ones) == 0, "the transfers have ended")
        last = {partition_of(f"accounts/{name}", world.partitions): name for name in map(str, range(100))}
        send(world, *map(open_account, last.values()))
        public.wait(f"accounts/{name}@1" for name in last.values())
    sums, ways = Counter[str](), defaultdict[str, list[str]](list)
    for event in public.events:
        data = event["data"]
        if "transfer" in data:
            ways[data["transfer"]].append(data.get("how", "requested"))
        else:
            sums[data["account"]] += (COMES | GOES).get(event["type"], 0) * data.get("cents", 0)
    with connect(world, "test") as db:
        assert sums == dict(db.execute("select account, cents from balances").fetchall())
        assert ways == {
            name: ["requested", state] for name, state in db.execute("select transfer, state from transfers")
        }
    stored = {event.type for commit in commits(world) for event in commit.events}
    assert {kind.__name__ for kind in get_args(Movement)} <= stored
    assert {how for _, how in ways.values()} == {"completed", "failed", "refunded"}


def test_no_outage_refunds_a_transfer(world: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long first the policies and then the handlers do not run: to give up takes no time here."""
    monkeypatch.setattr(transfers, "PATIENCE", timedelta())
    set_up(world)
    asked: dict[str, Any] = {"source": "1", "target": "2", "cents": 1, "on": "2026-01-04"}
    requests = [command(f"transfers/{n}", f"ask-{n}", "RequestTransfer", **asked) for n in range(20)]
    with agent(world):
        with running(world, discover()["transfers"]):
            pass  # live from the first event on
        with handler(world):
            send(world, open_account("1"), open_account("2"), deposit("1", "d1", 20), *requests)
            until(lambda: len(commits(world)) == 23, "all are requested")
        with running(world, discover()["transfers"]):
            until(lambda: scalar(world, "select count(*) from outbox where sent_at is not null") == 20, "all are sent")
            with handler(world):
                until(lambda: open_wishes(world) == 0 and balance(world, "2") == 20, "all has ended")
        ended = "select array_agg(distinct state) from transfers_v1"
        until(lambda: scalar(world, ended) == ["completed"], "all are complete")
    given_up = [one for one in commits(world) if one.command_id.endswith("~then~later")]
    assert [one.events for one in given_up] == [[]] * 20, "each has given up, later than it mattered"


def failing(event: MoneyDeposited, at: At) -> Iterable[Send]:
    raise ZeroDivisionError("this policy has a defect")


def test_a_policy_that_stops_stops_no_other(world: Settings, caplog: pytest.LogCaptureFixture) -> None:
    set_up(world)
    defect = Policy("defect", 1, failing, frozenset({MoneyDeposited}))
    with running(world, FORWARD, defect), handler(world), agent(world):
        send(world, open_account("1"), open_account("2"), deposit("1", "d1", 7))
        until(lambda: (balance(world, "1"), balance(world, "2")) == (0, 7), "all is forwarded")
        until(lambda: "this policy has a defect" in caplog.text, "the other one says why it stops")
    assert scalar(world, "select max(command_offset) from positions where agent = 'policy_defect'") < 1


def forward_later(event: MoneyDeposited, at: At) -> Iterable[Send]:
    if event.cents == 7:
        raise ZeroDivisionError("this policy has a defect")
    if at.id == "1":
        yield Send("accounts/2", Deposit(cents=event.cents, on=event.on), due=at.time + timedelta(seconds=2))


def test_what_a_policy_wished_before_it_stopped_is_sent_on_time(
    world: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    """One partition stops. The process keeps all of them, for the relay and for webhooks."""
    set_up(world)
    with (
        running(world, Policy("late", 1, forward_later, frozenset({MoneyDeposited}))) as late,
        handler(world),
        agent(world),
    ):
        send(world, open_account("1"), open_account("2"), deposit("1", "d1", 6), deposit("1", "d2", 7))
        until(lambda: "this policy has a defect" in caplog.text, "it says why it stops")
        assert len(late.partitions({"late"})) == world.partitions
        until(lambda: balance(world, "2") == 6, "the timer goes off")


def forward_to_3(event: MoneyDeposited, at: At) -> Iterable[Send]:
    if at.id == "1":
        yield Send("accounts/3", Deposit(cents=event.cents, on=event.on))


FORWARD_2 = Policy("forward", 2, forward_to_3, frozenset({MoneyDeposited}))


@pytest.mark.slow
def test_each_event_belongs_to_the_version_that_was_in_force(world: Settings, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever code runs, and also in a database that was restored to a time before the switch."""
    set_up(world)
    with handler(world), agent(world):
        with running(world, FORWARD):
            send(world, *map(open_account, "123"), deposit("1", "d1", 7))
            until(lambda: (balance(world, "1"), balance(world, "2")) == (0, 7), "version 1 reacts")
            until(lambda: open_wishes(world) == 0, "no wish is left")
        switch(world, FORWARD_2)
        with running(world, FORWARD_2):
            send(world, deposit("1", "d2", 5))
            until(lambda: (balance(world, "1"), balance(world, "3")) == (5, 5), "version 2 reacts")
            until(lambda: open_wishes(world) == 0, "no wish is left")
        with connect(world, "test") as db, db.transaction():
            at = lock_positions(db, ["policy_forward"], world.events_topic)["policy_forward"]
            set_generation(db, world.events_topic, {"policy_forward": dict.fromkeys(at, START)}, "restored")
            db.execute("delete from activations")
        with running(world, FORWARD_2, name="new"):
            until(
                lambda: "version 1 of policy 'forward' is in force" in caplog.text, "version 2 leaves old events alone"
            )
            with running(world, FORWARD, name="old"):
                until(lambda: passed(world, at) == len(at), "both versions together read everything")
            until(lambda: open_wishes(world) == 0, "old wishes have met their old outcomes")
    assert [balance(world, account) for account in "123"] == [5, 7, 5]
    ids = [commit.command_id for commit in commits(world)]
    assert len(ids) == len(set(ids)) == 8


def passed(world: Settings, at: dict[int, Reading]) -> int:
    """How many of the policy's partitions have been read up to there."""
    with connect(world, "test") as db:
        found = db.execute("select partition, next_offset from positions where agent = 'policy_forward'").fetchall()
    now: dict[int, int] = dict(found)
    return sum(now[partition] >= reading.next_offset for partition, reading in at.items())


def test_a_policy_is_no_view_which_a_rebuild_would_run_again() -> None:
    """Nor would `verify` or time travel: they take the views, and nothing else."""
    assert discover()
    assert not [view.name for view in all_views().values() if view.kind is Kind.POLICY]
