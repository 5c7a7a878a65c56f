"""make test: a database and no process.

The outbox: what batches of a policy write, in whatever order wishes and outcomes are read."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from datetime import date, datetime, timedelta, timezone
from itertools import count, permutations
from threading import Thread
from typing import Any

import msgspec
import pytest

from commands.intake import fingerprint_of
from domain.accounts import ChargeFee, Deposit, MoneyDeposited, MoneyWithdrawn, OpenAccount, Withdraw
from infra.database.connect import Connection, connect
from infra.database.migrate import upgrade
from infra.log import topics
from infra.log.records import Command, Commit, EventRecord, Reason
from infra.log.rule import START, Counted, Reading
from infra.settings import Settings
from policies.engine.outbox import MOST_DEPTH, MOST_WISHES, id_of, view_of
from policies.engine.policy import Policy, Post, Send
from projections.engine.fold.errors import PoisonEvent
from projections.engine.fold.plan import Plan
from projections.engine.live.startup import Contract, check_contract
from projections.engine.store.commit import Batch, Committer, Fate, prepare
from projections.engine.store.positions import Live, lock_positions, read_positions, set_generation
from projections.engine.views.event_context import At

DAY = date(2026, 1, 1)
React = Callable[[Any, At], Iterable[Send | Post]]


def policy(react: React, **more: Any) -> Policy:
    return Policy("saving", 1, react, frozenset({MoneyDeposited}), **more)


def saving(event: MoneyDeposited, at: At) -> Iterator[Send | Post]:
    """Each deposit puts one cent aside."""
    yield Send(
        "accounts/savings",
        Deposit(cents=1, on=event.on),
        then=Withdraw(cents=1, on=event.on),
        otherwise=ChargeFee(cents=7, on=event.on),
    )


class Log:
    """Commits by partition, with offsets and sequence numbers as a writer gives them."""

    def __init__(self) -> None:
        self._next = dict.fromkeys(range(8), START._replace(next_offset=1, epoch=0))

    def batch(self, partition: int, *commits: Commit) -> Batch:
        was = self._next[partition]
        counted = [Counted(was.next_offset + n, 1_700_000_000_000 + n, commit) for n, commit in enumerate(commits)]
        after = Reading(was.next_offset + len(commits), 0, was.seq + len(commits), was.command_offset)
        self._next[partition] = after
        return Batch(partition, was, after, counted)


def commit(stream: str, version: int, command_id: str, *events: Any, **more: Any) -> Commit:
    records = [EventRecord(type(event).__name__, msgspec.Raw(msgspec.json.encode(event))) for event in events]
    reason: Reason | None = more.pop("reason", None)
    values: dict[str, Any] = {
        "stream": stream,
        "version": version,
        "events": records,
        "command_id": command_id,
        "command_offset": 0,
        "fingerprint": "",
        "outcome": "rejected" if reason else "accepted",
        "reason": reason,
        "epoch": 0,
        "seq": 0,
    }
    return Commit(**values | more)


def deposited(version: int = 1, stream: str = "accounts/a", **more: Any) -> Commit:
    return commit(stream, version, f"c{version}", MoneyDeposited(cents=5, on=DAY), **more)


def outcome(ident: str, stream: str, command: Any, reason: str | None = None, **more: Any) -> Commit:
    sent = Command(ident, stream, type(command).__name__, msgspec.Raw(msgspec.json.encode(command)))
    why = Reason(reason, reason) if reason else None
    return commit(stream, 9, ident, reason=why, fingerprint=fingerprint_of(sent), **more)


class Agent:
    """A policy's agent without processes: batches into the database."""

    def __init__(self, db: Connection, world: Settings, policy: Policy) -> None:
        self.db = db
        self.world = world
        self.policy = policy
        view = view_of(policy)
        positions = read_positions(db, policy.agent, world.events_topic)
        assert positions is not None
        live = {policy.agent: Live(1, policy.agent)}
        self.committer = Committer(Plan({view.name: view}), replace(positions, live=live))

    def apply(self, *batches: Batch) -> Fate:
        return self.committer.apply(self.db, batches).fate


@pytest.fixture
def db(world: Settings) -> Iterator[Connection]:
    upgrade(world)
    _, events = topics.ensure(world)
    with connect(world, "test") as connection:
        prepare(connection)
        check_contract(connection, Contract.of(events))
        start(connection, world)
        yield connection


def start(connection: Connection, world: Settings) -> None:
    at = dict.fromkeys(range(8), START._replace(next_offset=1, epoch=0))
    set_generation(connection, world.events_topic, {"policy_saving": at}, "test")


def rows(db: Connection) -> dict[str, dict[str, Any]]:
    cursor = db.execute("select to_jsonb(o) from outbox o order by id")
    return {row["id"]: row for (row,) in cursor}


WISH = id_of("saving", "accounts/a", 1, 0)
DEPOSIT = outcome(WISH, "accounts/savings", Deposit(cents=1, on=DAY))
REFUSED = outcome(WISH, "accounts/savings", Deposit(cents=1, on=DAY), "account-is-closed")
THEN = outcome(f"{WISH}~then", "accounts/a", Withdraw(cents=1, on=DAY))


def test_a_wish_waits_for_its_outcome_and_becomes_its_follow_up(db: Connection, world: Settings) -> None:
    agent, log = Agent(db, world, policy(saving)), Log()
    agent.apply(log.batch(0, deposited()))
    [wish] = rows(db).values()
    assert (wish["id"], wish["kind"], wish["target"], wish["type"]) == (WISH, "send", "accounts/savings", "Deposit")
    assert (wish["partition"], wish["stream"], wish["version"], wish["number"]) == (0, "accounts/a", 1, 0)
    assert (wish["depth"], wish["correlation_id"], wish["causation_id"]) == (1, "c1", "c1")
    assert json.loads(wish["body"])["cents"] == 1
    agent.apply(log.batch(1, DEPOSIT))
    [then] = rows(db).values()
    assert (then["id"], then["target"], then["type"], then["depth"]) == (f"{WISH}~then", "accounts/a", "Withdraw", 1)
    assert (then["partition"], then["causation_id"], then["sent_at"]) == (0, WISH, None)
    agent.apply(log.batch(0, THEN))
    assert rows(db) == {}


def test_a_refused_wish_becomes_its_otherwise(db: Connection, world: Settings) -> None:
    agent, log = Agent(db, world, policy(saving)), Log()
    agent.apply(log.batch(0, deposited()), log.batch(1, REFUSED))
    [otherwise] = rows(db).values()
    assert (otherwise["id"], otherwise["type"]) == (f"{WISH}~otherwise", "ChargeFee")


@pytest.mark.parametrize("order", list(permutations(range(3))), ids=str)
def test_whatever_is_read_first_the_outbox_ends_the_same(
    db: Connection, world: Settings, order: tuple[int, ...]
) -> None:
    """The three commits are of three partitions. A restored database reads old outcomes before their wishes."""
    agent, log = Agent(db, world, policy(saving)), Log()
    commits = [deposited(), DEPOSIT, THEN]
    for number in order:
        agent.apply(log.batch(number, commits[number]))
    assert rows(db) == {}


def test_a_wish_and_its_outcome_in_one_batch_of_several_partitions_meet(db: Connection, world: Settings) -> None:
    agent, log = Agent(db, world, policy(saving)), Log()
    assert agent.apply(log.batch(1, DEPOSIT), log.batch(0, deposited(), THEN)) is Fate.APPLIED
    assert rows(db) == {}


def test_two_processes_join_every_wish_with_its_outcome(db: Connection, world: Settings) -> None:
    """One reads the wishes, one the outcomes, at the same time."""
    many = 300
    log = Log()
    ids = [id_of("saving", "accounts/a", version, 0) for version in range(1, many + 1)]
    wishes = [log.batch(0, deposited(version)) for version in range(1, many + 1)]
    outcomes = [log.batch(1, outcome(ident, "accounts/savings", Deposit(cents=1, on=DAY))) for ident in ids]
    fates: list[Fate] = []

    def work(batches: list[Batch]) -> None:
        with connect(world, "test") as own:
            prepare(own)
            agent = Agent(own, world, policy(saving))
            fates.extend(agent.apply(batch) for batch in batches)

    threads = [Thread(target=work, args=[batches]) for batches in (wishes, outcomes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert fates == [Fate.APPLIED] * 2 * many
    assert sorted(rows(db)) == sorted(f"{ident}~then" for ident in ids)


def test_a_fenced_batch_wishes_nothing(db: Connection, world: Settings) -> None:
    agent, log = Agent(db, world, policy(saving)), Log()
    with db.transaction():
        set_generation(db, world.events_topic, lock_positions(db, ["policy_saving"], world.events_topic), "test")
    assert agent.apply(log.batch(0, deposited())) is Fate.FENCED
    assert rows(db) == {}


def test_ids_of_clients_and_of_other_policies_leave_no_row(db: Connection, world: Settings) -> None:
    agent, log = Agent(db, world, policy(saving)), Log()
    foreign = outcome(id_of("other", "accounts/a", 1, 0), "accounts/savings", Deposit(cents=1, on=DAY))
    agent.apply(log.batch(0, foreign, commit("accounts/b", 1, "saving", MoneyWithdrawn(cents=1, on=DAY))))
    assert rows(db) == {}


def test_an_outcome_of_another_command_under_the_id_is_a_dead_letter(db: Connection, world: Settings) -> None:
    agent, log = Agent(db, world, policy(saving)), Log()
    other = outcome(WISH, "accounts/savings", Deposit(cents=2, on=DAY))
    agent.apply(log.batch(0, deposited()), log.batch(1, other))
    assert {ident: row["dead"].partition(":")[0] for ident, row in rows(db).items()} == {WISH: "id-reused"}


def test_an_outcome_of_another_stream_under_the_id_is_a_dead_letter(db: Connection, world: Settings) -> None:
    """The policy sends elsewhere now, under the same version, and the database was restored."""
    agent, log = Agent(db, world, policy(saving)), Log()
    other = outcome(WISH, "accounts/elsewhere", Deposit(cents=1, on=DAY))
    agent.apply(log.batch(0, deposited()), log.batch(1, other))
    assert {ident: row["dead"].partition(":")[0] for ident, row in rows(db).items()} == {WISH: "id-reused"}


def test_an_outcome_of_an_older_version_of_the_command_under_the_id_ends_the_wish(
    db: Connection, world: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The release before decided it, and then the database was restored to before that."""
    older = outcome(WISH, "accounts/savings", Deposit(cents=2, on=DAY))
    elsewhere = outcome(id_of("saving", "accounts/a", 2, 0), "accounts/elsewhere", Deposit(cents=1, on=DAY))
    monkeypatch.setattr(Deposit, "VERSION", 2, raising=False)
    agent, log = Agent(db, world, policy(saving)), Log()
    agent.apply(log.batch(0, deposited(), deposited(2)), log.batch(1, older, elsewhere))
    found = rows(db)
    assert WISH not in found
    assert found[elsewhere.command_id]["dead"].partition(":")[0] == "id-reused", "another stream's does not"


def test_a_chain_that_is_too_long_is_a_dead_letter(db: Connection, world: Settings) -> None:
    agent, log = Agent(db, world, policy(saving)), Log()
    agent.apply(log.batch(0, deposited(1, depth=MOST_DEPTH - 1), deposited(2, depth=MOST_DEPTH)))
    dead = {row["version"]: row["dead"] for row in rows(db).values()}
    assert dead[1] is None
    assert dead[2].startswith("too-deep: ")


def test_a_follow_up_of_the_deepest_command_is_a_dead_letter(db: Connection, world: Settings) -> None:
    agent, log = Agent(db, world, policy(saving)), Log()
    deepest = outcome(WISH, "accounts/savings", Deposit(cents=1, on=DAY), depth=MOST_DEPTH)
    agent.apply(log.batch(0, deposited()), log.batch(1, deepest))
    assert [row["dead"].partition(":")[0] for row in rows(db).values()] == ["too-deep"]


def test_a_timer_begins_a_new_chain(db: Connection, world: Settings) -> None:
    def later(event: MoneyDeposited, at: At) -> Iterator[Send]:
        yield Send("accounts/b", Deposit(cents=1, on=event.on), due=at.time + timedelta(days=30))

    agent, log = Agent(db, world, policy(later)), Log()
    agent.apply(log.batch(0, deposited(depth=MOST_DEPTH)))
    [wish] = rows(db).values()
    assert (wish["depth"], wish["dead"]) == (0, None)
    assert datetime.fromisoformat(wish["due"]) - datetime.fromisoformat(wish["wished_at"]) == timedelta(days=30)


def test_a_post_is_a_row_without_an_outcome(db: Connection, world: Settings) -> None:
    def tell(event: MoneyDeposited, at: At) -> Iterator[Post]:
        yield Post("ledger", {"cents": event.cents})

    agent, log = Agent(db, world, policy(tell)), Log()
    agent.apply(log.batch(0, deposited()))
    [post] = rows(db).values()
    assert (post["kind"], post["target"], json.loads(post["body"])) == ("post", "ledger", {"cents": 5})


NUMBERS = count()


def endless(event: MoneyDeposited, at: At) -> Iterator[Send]:
    for number in NUMBERS:
        yield Send(f"accounts/{number}", Deposit(cents=1, on=event.on))


def failing(event: MoneyDeposited, at: At) -> Iterator[Send]:
    raise ZeroDivisionError("no cents")
    yield


def once(wish: Any) -> React:
    return lambda _event, _at: [wish]


BAD = {
    "raises": (failing, "no cents"),
    "10,000 wishes": (endless, f"more than {MOST_WISHES} wishes"),
    "unknown context": (once(Send("rooms/1", Deposit(cents=1, on=DAY))), "no context is called 'rooms'"),
    "no stream": (once(Send("accounts", Deposit(cents=1, on=DAY))), "stream must be"),
    "an event": (once(Send("accounts/b", MoneyDeposited(cents=1, on=DAY))), "no command of 'accounts'"),
    "a foreign then": (once(Send("accounts/b", OpenAccount(overdraft_limit=0, on=DAY), then=7)), "sends a int"),
    "naive due": (once(Send("accounts/b", Deposit(cents=1, on=DAY), due=datetime(2026, 1, 1))), "time zone"),  # noqa: DTZ001
    # PostgreSQL keeps both, and psycopg can't read them back: the relay and `samefold outbox` would fail at each start
    "due before the year 1": (
        once(
            Send(
                "accounts/b",
                Deposit(cents=1, on=DAY),
                due=datetime.min.replace(tzinfo=timezone(timedelta(hours=2))),
            )
        ),
        "due",
    ),
    "due after the year 9999": (
        once(
            Send(
                "accounts/b",
                Deposit(cents=1, on=DAY),
                due=datetime.max.replace(tzinfo=timezone(-timedelta(hours=2))),
            )
        ),
        "due",
    ),
    "no wish": (once("hello"), "neither a Send nor a Post"),
    "no JSON": (once(Post("ledger", object())), "object"),
    "no number": (once(Post("ledger", {"rate": float("nan")})), "not JSON compliant"),
    "no endpoint": (once(Post("", {})), "endpoint"),
}


@pytest.mark.parametrize("bad", BAD)
def test_what_can_not_be_sent_stops_the_policy_by_name(db: Connection, world: Settings, bad: str) -> None:
    react, why = BAD[bad]
    agent, log = Agent(db, world, policy(react)), Log()
    with pytest.raises(PoisonEvent, match="Policy 'saving' can't take event 1 of accounts/a") as stopped:
        agent.apply(log.batch(0, deposited()))
    assert why in stopped.value.message
    assert "policies/saving.py" in stopped.value.hint
    assert rows(db) == {}


def test_a_policy_may_park_the_stream_and_go_on(db: Connection, world: Settings) -> None:
    agent, log = Agent(db, world, policy(failing, on_poison="park")), Log()
    assert agent.apply(log.batch(0, deposited())) is Fate.APPLIED
    parked = db.execute("select table_name, stream, since_version from parked").fetchall()
    assert parked == [("policy_saving", "accounts/a", 1)]
