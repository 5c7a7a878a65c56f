"""make test: a database and no process.

The outbox: what batches of a policy write, in whatever order wishes and outcomes are read."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from datetime import date, datetime, timedelta, timezone
from itertools import count, permutations
from threading import Thread
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from commands.intake import fingerprint_of
from domain.accounts import BalanceTooLarge, ChargeFee, Deposit, MoneyDeposited, MoneyWithdrawn, OpenAccount, Withdraw
from domain.transfers import FailTransfer, TransferRequested
from infra.database.connect import Connection, connect
from infra.log import topics
from infra.log.contract import Contract, check_contract
from infra.log.records import Command, Commit, EventRecord, Reason
from infra.log.rule import START, Counted, Reading
from infra.settings import Settings
from policies.engine.operate import NotDead, Which, drop, retry
from policies.engine.outbox import MOST_DEPTH, MOST_WISHES, id_of, view_of
from policies.engine.policy import Policy, Post, Send
from projections.engine.fold.errors import PoisonEvent
from projections.engine.fold.plan import Plan
from projections.engine.store.commit import Batch, CommitStatus, Committer
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
    """A policy's agent without processes: batches of a log, as a writer would append it, into the database."""

    def __init__(self, db: Connection, world: Settings, policy: Policy) -> None:
        self.db = db
        self.world = world
        view = view_of(policy)
        positions = read_positions(db, policy.agent, world.events_topic)
        assert positions is not None
        live = {policy.agent: Live(1, policy.agent)}
        self._committer = Committer(Plan({view.name: view}), replace(positions, live=live))
        self._next = dict.fromkeys(range(8), START._replace(next_offset=1, epoch=0))

    def apply(self, commits: dict[int, Commit | list[Commit]]) -> CommitStatus:
        """One batch of commits by partition."""
        batches = [
            self._batch(partition, one if isinstance(one, list) else [one]) for partition, one in commits.items()
        ]
        return self._committer.apply(self.db, batches).status

    def _batch(self, partition: int, commits: list[Commit]) -> Batch:
        was = self._next[partition]
        counted = [Counted(was.next_offset + n, 1_700_000_000_000 + n, commit) for n, commit in enumerate(commits)]
        after = Reading(was.next_offset + len(commits), 0, was.seq + len(commits), was.command_offset)
        self._next[partition] = after
        return Batch(partition, was, after, counted)

    def rows(self) -> dict[str, dict[str, Any]]:
        """The outbox by id."""
        return {row["id"]: row for (row,) in self.db.execute("select to_jsonb(o) from outbox o order by id")}

    def posts(self) -> dict[str, dict[str, Any]]:
        return {row["id"]: row for (row,) in self.db.execute("select to_jsonb(p) from posts p order by id")}

    def dead(self) -> dict[str, str]:
        """Why the outbox's rows are dead letters, by id."""
        return {ident: (row["dead"] or "").partition(":")[0] for ident, row in self.rows().items()}


Make = Callable[[Policy], Agent]


@pytest.fixture
def make(shared_world: Settings) -> Iterator[Make]:
    """An agent of a policy at the log's beginning, whose outbox is empty."""
    _, events = topics.ensure(shared_world)
    with connect(shared_world, "test") as db:
        check_contract(db, Contract.of(events))
        db.execute("truncate outbox, posts, lanes")
        db.execute("delete from parked")
        at = dict.fromkeys(range(8), START._replace(next_offset=1, epoch=0))
        set_generation(db, shared_world.events_topic, {"policy_saving": at}, "test")
        yield lambda policy: Agent(db, shared_world, policy)


@pytest.fixture
def agent(make: Make) -> Agent:
    return make(policy(saving))


WISH = id_of("saving", "accounts/a", 1, 0)
DEPOSIT = outcome(WISH, "accounts/savings", Deposit(cents=1, on=DAY))
REFUSED = outcome(WISH, "accounts/savings", Deposit(cents=1, on=DAY), "account-is-closed")
THEN = outcome(f"{WISH}~then", "accounts/a", Withdraw(cents=1, on=DAY))


def test_a_wish_waits_for_its_outcome_and_becomes_its_follow_up(agent: Agent) -> None:
    agent.apply({0: deposited()})
    [wish] = agent.rows().values()
    assert (wish["id"], wish["kind"], wish["target"], wish["type"]) == (WISH, "send", "accounts/savings", "Deposit")
    assert (wish["partition"], wish["stream"], wish["version"], wish["number"]) == (0, "accounts/a", 1, 0)
    assert (wish["depth"], wish["correlation_id"], wish["causation_id"]) == (1, "c1", "c1")
    assert json.loads(wish["body"])["cents"] == 1
    agent.apply({1: DEPOSIT})
    [then] = agent.rows().values()
    assert (then["id"], then["target"], then["type"], then["depth"]) == (f"{WISH}~then", "accounts/a", "Withdraw", 1)
    assert (then["partition"], then["causation_id"], then["sent_at"]) == (0, WISH, None)
    agent.apply({0: THEN})
    assert agent.rows() == {}


def test_a_refused_wish_becomes_its_otherwise(agent: Agent) -> None:
    agent.apply({0: deposited(), 1: REFUSED})
    [otherwise] = agent.rows().values()
    assert (otherwise["id"], otherwise["type"]) == (f"{WISH}~otherwise", "ChargeFee")


def plainly(event: MoneyDeposited, at: At) -> Iterator[Send]:
    """It expects that the savings are full, and no other rejection."""
    deposit = Deposit(cents=1, on=event.on)
    yield Send("accounts/savings", deposit, then=Withdraw(cents=1, on=event.on), ignore=(BalanceTooLarge,))


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=str)
@pytest.mark.parametrize("code", ["account-is-closed", "failed", "malformed", "too-large", "too-slow"])
def test_a_rejection_that_nobody_expects_is_a_dead_letter_and_its_retry_goes_on_from_there(
    make: Make, caplog: pytest.LogCaptureFixture, code: str, order: tuple[int, int]
) -> None:
    agent, rejected = make(policy(plainly)), outcome(WISH, "accounts/savings", Deposit(cents=1, on=DAY), code)
    for number in order:
        agent.apply({number: (deposited(), rejected)[number]})
    [dead] = agent.rows().values()
    assert (dead["id"], dead["dead"], dead["stream"]) == (WISH, f"refused: {code}", "accounts/a")
    assert f"wish {WISH} of accounts/a is a dead letter: refused: {code}" in caplog.text
    retry(agent.world, Which(ids=[WISH]))
    [once_more] = agent.rows().values()
    assert (once_more["id"], once_more["dead"], once_more["outcome"]) == (f"{WISH}~again", None, None)
    assert (once_more["body"], once_more["wished_at"]) == (dead["body"], dead["wished_at"])
    agent.apply({1: outcome(f"{WISH}~again", "accounts/savings", Deposit(cents=1, on=DAY), code)})
    retry(agent.world, Which(ids=[f"{WISH}~again"]))
    agent.apply({1: outcome(f"{WISH}~again2", "accounts/savings", Deposit(cents=1, on=DAY))})
    assert list(agent.rows()) == [f"{WISH}~again2~then"]


def test_an_expected_rejection_ends_the_wish_and_what_follows_it(make: Make) -> None:
    agent, full = make(policy(plainly)), BalanceTooLarge.code
    second = id_of("saving", "accounts/a", 2, 0)
    agent.apply({0: [deposited(), deposited(2)]})
    agent.apply({1: [outcome(WISH, "accounts/savings", Deposit(cents=1, on=DAY), full)]})
    agent.apply({1: [outcome(second, "accounts/savings", Deposit(cents=1, on=DAY))]})
    assert list(agent.rows()) == [f"{second}~then"]
    agent.apply({0: outcome(f"{second}~then", "accounts/a", Withdraw(cents=1, on=DAY), full)})
    assert agent.rows() == {}


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)], ids=str)
def test_a_follow_up_that_is_rejected_is_a_dead_letter(agent: Agent, order: tuple[int, ...]) -> None:
    refused_then = outcome(f"{WISH}~then", "accounts/a", Withdraw(cents=1, on=DAY), "insufficient-funds")
    for number in order:
        agent.apply({number: [deposited(), DEPOSIT, refused_then][number]})
    assert agent.dead() == {f"{WISH}~then": "refused"}


def test_a_command_that_was_sent_again_before_the_database_was_restored_meets_its_outcome(make: Make) -> None:
    """Its wish is made again, its rejection is met again; when an operator sends it again, the answer is there."""
    agent = make(policy(plainly))
    agent.apply({0: deposited()})
    agent.apply({1: [REFUSED, outcome(f"{WISH}~again", "accounts/savings", Deposit(cents=1, on=DAY))]})
    assert {ident: row["dead"] for ident, row in agent.rows().items()} == {
        WISH: "refused: account-is-closed",
        f"{WISH}~again": None,
    }
    retry(agent.world, Which(ids=[WISH]))
    assert list(agent.rows()) == [f"{WISH}~again~then"]


GUARD = timedelta(days=2)


def guarded(event: MoneyDeposited, at: At) -> Iterator[Send]:
    """Two days after all that it leads to, a fee."""
    [wish] = saving(event, at)
    assert isinstance(wish, Send)
    yield replace(wish, later=ChargeFee(cents=2, on=event.on), after=GUARD)


@pytest.mark.parametrize("way", ["then", "otherwise"])
def test_a_later_command_waits_for_the_last_answer_and_counts_from_there(make: Make, way: str) -> None:
    """However old the event is: here, some years."""
    agent = make(policy(guarded))
    agent.apply({0: deposited(depth=MOST_DEPTH - 2)})
    agent.apply({1: DEPOSIT if way == "then" else REFUSED})
    assert list(agent.rows()) == [f"{WISH}~{way}"]
    command: Any = Withdraw(cents=1, on=DAY) if way == "then" else ChargeFee(cents=7, on=DAY)
    agent.apply({0: outcome(f"{WISH}~{way}", "accounts/a", command, depth=MOST_DEPTH)})
    [later] = agent.rows().values()
    assert (later["id"], later["target"], later["type"]) == (f"{WISH}~{way}~later", "accounts/a", "ChargeFee")
    assert (later["depth"], later["dead"], json.loads(later["body"])["cents"]) == (0, None, 2)
    [(left,)] = agent.db.execute("select due - now() from outbox")
    assert GUARD - timedelta(hours=1) < left <= GUARD
    agent.apply({0: outcome(later["id"], "accounts/a", ChargeFee(cents=2, on=DAY))})
    assert agent.rows() == {}


@pytest.mark.parametrize("order", list(permutations(range(4))), ids=str)
def test_whatever_is_read_first_a_later_command_ends_the_same(make: Make, order: tuple[int, ...]) -> None:
    agent = make(policy(guarded))
    later = outcome(f"{WISH}~then~later", "accounts/a", ChargeFee(cents=2, on=DAY))
    for number in order:
        agent.apply({number: [deposited(), DEPOSIT, THEN, later][number]})
    assert agent.rows() == {}


def test_a_later_command_without_another_one_waits_for_the_answer_itself(make: Make) -> None:
    send = Send("accounts/b", Deposit(cents=1, on=DAY), later=ChargeFee(cents=2, on=DAY), after=timedelta())
    agent = make(policy(once(send)))
    agent.apply({0: deposited()})
    agent.apply({1: outcome(WISH, "accounts/b", Deposit(cents=1, on=DAY), depth=7)})
    [later] = agent.rows().values()
    assert (later["id"], later["depth"]) == (f"{WISH}~later", 8), "at once, it would let a cycle run for ever"


@pytest.mark.parametrize("answer", [DEPOSIT, REFUSED], ids=["accepted", "refused"])
def test_a_wish_that_was_dropped_after_it_was_sent_ends_with_its_outcome(agent: Agent, answer: Commit) -> None:
    agent.apply({0: deposited()})
    drop(agent.world, Which(ids=[WISH]))
    assert [row["kind"] for row in agent.rows().values()] == ["dropped"]
    agent.apply({1: answer})
    assert agent.rows() == {}, "neither a follow-up nor an outcome that waits for its wish"


@pytest.mark.parametrize("order", list(permutations(range(3))), ids=str)
def test_whatever_is_read_first_the_outbox_ends_the_same(agent: Agent, order: tuple[int, ...]) -> None:
    """The three commits are of three partitions. A restored database reads old outcomes before their wishes."""
    commits = [deposited(), DEPOSIT, THEN]
    for number in order:
        agent.apply({number: commits[number]})
    assert agent.rows() == {}


def test_a_wish_and_its_outcome_in_one_batch_of_several_partitions_meet(agent: Agent) -> None:
    assert agent.apply({1: DEPOSIT, 0: [deposited(), THEN]}) is CommitStatus.APPLIED
    assert agent.rows() == {}


def test_two_processes_join_every_wish_with_its_outcome(agent: Agent) -> None:
    """One reads the wishes, one the outcomes, at the same time."""
    many = 300
    ids = [id_of("saving", "accounts/a", version, 0) for version in range(1, many + 1)]
    wishes = [deposited(version) for version in range(1, many + 1)]
    outcomes = [outcome(ident, "accounts/savings", Deposit(cents=1, on=DAY)) for ident in ids]
    fates: list[CommitStatus] = []

    def work(partition: int, commits: list[Commit]) -> None:
        with connect(agent.world, "test") as own:
            worker = Agent(own, agent.world, policy(saving))
            fates.extend(worker.apply({partition: commit}) for commit in commits)

    threads = [Thread(target=work, args=part) for part in enumerate((wishes, outcomes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert fates == [CommitStatus.APPLIED] * 2 * many
    assert sorted(agent.rows()) == sorted(f"{ident}~then" for ident in ids)


def test_a_fenced_batch_wishes_nothing(agent: Agent) -> None:
    topic = agent.world.events_topic
    with agent.db.transaction():
        set_generation(agent.db, topic, lock_positions(agent.db, ["policy_saving"], topic), "test")
    assert agent.apply({0: deposited()}) is CommitStatus.FENCED
    assert agent.rows() == {}


def test_ids_of_clients_and_of_other_policies_leave_no_row(agent: Agent) -> None:
    foreign = outcome(id_of("other", "accounts/a", 1, 0), "accounts/savings", Deposit(cents=1, on=DAY))
    agent.apply({0: [foreign, commit("accounts/b", 1, "saving", MoneyWithdrawn(cents=1, on=DAY))]})
    assert agent.rows() == {}


@pytest.mark.parametrize(("stream", "cents"), [("accounts/savings", 2), ("accounts/elsewhere", 1)])
def test_an_outcome_of_another_command_under_the_id_is_a_dead_letter(agent: Agent, stream: str, cents: int) -> None:
    """To another stream, as when the policy sends elsewhere now, under the same version, and the database was restored."""
    agent.apply({0: deposited(), 1: outcome(WISH, stream, Deposit(cents=cents, on=DAY))})
    assert agent.dead() == {WISH: "id-reused"}


def test_an_outcome_of_an_older_version_of_the_command_under_the_id_ends_the_wish(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The release before decided it, and then the database was restored to before that. Another stream's ends nothing."""
    older = outcome(WISH, "accounts/savings", Deposit(cents=2, on=DAY))
    elsewhere = outcome(id_of("saving", "accounts/a", 2, 0), "accounts/elsewhere", Deposit(cents=1, on=DAY))
    monkeypatch.setattr(Deposit, "VERSION", 2, raising=False)
    agent.apply({0: [deposited(), deposited(2)], 1: [older, elsewhere]})
    assert WISH not in agent.dead()
    assert agent.dead()[elsewhere.command_id] == "id-reused"


def test_a_chain_that_is_too_long_is_a_dead_letter(agent: Agent) -> None:
    """So is the follow-up of its last command."""
    agent.apply({0: [deposited(1, depth=MOST_DEPTH - 1), deposited(2, depth=MOST_DEPTH)]})
    assert [*agent.dead().values()].count("too-deep") == 1
    assert {row["version"] for row in agent.rows().values() if row["dead"]} == {2}
    agent.apply({1: outcome(WISH, "accounts/savings", Deposit(cents=1, on=DAY), depth=MOST_DEPTH)})
    assert agent.dead() == {f"{WISH}~then": "too-deep", id_of("saving", "accounts/a", 2, 0): "too-deep"}


@pytest.mark.parametrize("due_in_ms", [-60_000, 0, 999])
def test_a_timer_that_is_due_at_once_goes_on_with_the_chain(make: Make, due_in_ms: int) -> None:
    def at_once(event: MoneyDeposited, at: At) -> Iterator[Send]:
        due = at.time + timedelta(milliseconds=due_in_ms)
        yield Send("accounts/b", Deposit(cents=1, on=event.on), due=due)

    agent = make(policy(at_once))
    agent.apply({0: [deposited(depth=MOST_DEPTH - 1), deposited(2, depth=MOST_DEPTH)]})
    assert [(row["depth"], bool(row["dead"])) for row in agent.rows().values() if row["version"] == 1] == [(50, False)]
    assert agent.dead()[id_of("saving", "accounts/a", 2, 0)] == "too-deep"


def test_a_timer_begins_a_new_chain(make: Make) -> None:
    def later(event: MoneyDeposited, at: At) -> Iterator[Send]:
        yield Send("accounts/b", Deposit(cents=1, on=event.on), due=at.time + timedelta(days=30))

    agent = make(policy(later))
    agent.apply({0: deposited(depth=MOST_DEPTH)})
    [wish] = agent.rows().values()
    assert (wish["depth"], wish["dead"]) == (0, None)
    assert datetime.fromisoformat(wish["due"]) - datetime.fromisoformat(wish["wished_at"]) == timedelta(days=30)


def test_a_post_is_a_row_without_an_outcome(make: Make) -> None:
    agent = make(policy(once(Post("ledger", {"cents": 5}))))
    agent.apply({0: deposited()})
    [post] = agent.posts().values()
    assert (post["endpoint"], json.loads(post["body"])) == ("ledger", {"cents": 5})
    assert agent.rows() == {}


NUMBERS = count()


def endless(event: MoneyDeposited, at: At) -> Iterator[Send]:
    for number in NUMBERS:
        yield Send(f"accounts/{number}", Deposit(cents=1, on=event.on))


def failing(event: MoneyDeposited, at: At) -> Iterator[Send]:
    raise ZeroDivisionError("no cents")
    yield


TOO_EARLY = datetime.min.replace(tzinfo=timezone(timedelta(hours=2)))
TOO_LATE = datetime.max.replace(tzinfo=timezone(-timedelta(hours=2)))


def once(wish: Any) -> React:
    return lambda _event, _at: [wish]


def late(event: MoneyDeposited, at: At) -> Iterator[Send]:
    """Its second command can't be made of so few cents."""
    yield Send("accounts/b", Deposit(cents=event.cents, on=event.on))
    yield Send("accounts/c", Deposit(cents=event.cents - 5, on=event.on))


BAD = {
    "raises": (failing, "no cents"),
    "10,000 wishes": (endless, f"more than {MOST_WISHES} wishes"),
    "unknown context": (once(Send("rooms/1", Deposit(cents=1, on=DAY))), "no context is called 'rooms'"),
    "an event": (once(Send("accounts/b", MoneyDeposited(cents=1, on=DAY))), "no command of 'accounts'"),
    "a foreign then": (once(Send("accounts/b", OpenAccount(overdraft_limit=0, on=DAY), then=7)), "sends a int"),
    "naive due": (once(Send("accounts/b", Deposit(cents=1, on=DAY), due=datetime(2026, 1, 1))), "time zone"),  # noqa: DTZ001
    "later, but when?": (
        once(Send("accounts/b", Deposit(cents=1, on=DAY), later=ChargeFee(cents=1, on=DAY))),
        "`after`",
    ),
    "ignores a code": (once(Send("accounts/b", Deposit(cents=1, on=DAY), ignore=("full",))), "not 'full'"),  # type: ignore[arg-type]
    "no wish": (once("hello"), "neither a Send nor a Post"),
    "no JSON": (once(Post("ledger", object())), "object"),
}


@pytest.mark.parametrize("bad", BAD)
def test_what_can_not_be_sent_whatever_the_values_stops_the_policy_by_name(make: Make, bad: str) -> None:
    react, why = BAD[bad]
    agent = make(policy(react))
    with pytest.raises(PoisonEvent, match="Policy 'saving' can't react to event 1 of accounts/a") as stopped:
        agent.apply({0: deposited()})
    assert why in stopped.value.message
    assert "policies/saving.py" in stopped.value.hint
    assert agent.rows() == {}


EMOJI = "\N{GRINNING FACE}" * 60
LATER = Send("accounts/b", Deposit(cents=1, on=DAY), later=ChargeFee(cents=1, on=DAY), after=timedelta(days=1))
INVALID = {
    "a stream's name too long": (once(Send(f"accounts/{EMOJI}", Deposit(cents=1, on=DAY))), "longer than 200 bytes"),
    "a control character": (once(Send("accounts/a\0", Deposit(cents=1, on=DAY))), "without control characters"),
    "no stream": (once(Send("accounts/", Deposit(cents=1, on=DAY))), "stream must be"),
    # PostgreSQL keeps both, and psycopg can't read them back: the relay and `samefold outbox` would fail at each start
    "due before the year 1": (once(Send("accounts/b", Deposit(cents=1, on=DAY), due=TOO_EARLY)), "due"),
    "due after the year 9999": (once(Send("accounts/b", Deposit(cents=1, on=DAY), due=TOO_LATE)), "due"),
    "after in the past": (once(replace(LATER, after=-timedelta(seconds=1))), "`after`"),
    "after centuries": (once(replace(LATER, after=timedelta.max)), "`after`"),
    "no number": (once(Post("ledger", {"rate": float("nan")})), "JSON can't hold"),
    "no endpoint": (once(Post(EMOJI, {})), "an endpoint's name"),
    "a command that its class refuses": (late, "Deposit: cents: Input should be greater than or equal to 1"),
}


@pytest.mark.parametrize("invalid", INVALID)
def test_what_a_value_makes_unsendable_is_a_dead_letter_and_the_policy_goes_on(make: Make, invalid: str) -> None:
    """It keeps neither the value nor where it would go, and what was wished before it is sent."""
    react, why = INVALID[invalid]
    agent = make(policy(react))
    assert agent.apply({0: [deposited(), deposited(1, "accounts/b")]}) is CommitStatus.APPLIED
    rows = agent.rows() | agent.posts()
    dead = [row for row in rows.values() if row["dead"]]
    assert {(row["stream"], row.get("target"), row.get("endpoint"), row["body"]) for row in dead} == {
        ("accounts/a", None, None, None),
        ("accounts/b", None, None, None),
    }
    assert all(row["dead"].startswith("invalid-wish: ") and why in row["dead"] for row in dead)
    assert EMOJI not in str(dead)
    assert len(rows) == len(dead) * (2 if react is late else 1)
    with pytest.raises(NotDead, match="it has no body"):
        retry(agent.world, Which(ids=[dead[0]["id"]]))


def refused(event: TransferRequested, at: At) -> Iterator[Send]:
    yield Send(f"accounts/{EMOJI}", Deposit(cents=1, on=event.on), otherwise=FailTransfer())


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=str)
def test_the_otherwise_of_what_can_not_be_sent_follows(make: Make, order: tuple[int, int]) -> None:
    """With the code as its refusal, and under the id that it always has, in whatever order it and its outcome are read."""
    agent = make(replace(policy(refused), subscription=frozenset({TransferRequested})))
    dead = id_of("saving", "transfers/1", 1, 0)
    requested = commit("transfers/1", 1, "c1", TransferRequested(source="a", target="b", cents=1, on=DAY))
    failed = outcome(f"{dead}~otherwise", "transfers/1", FailTransfer(refusal="invalid-wish"))
    commits = [requested, failed]
    agent.apply({order[0]: commits[order[0]]})
    if order[0] == 0:
        follows = agent.rows()[f"{dead}~otherwise"]
        assert (follows["target"], follows["type"], follows["dead"]) == ("transfers/1", "FailTransfer", None)
        assert json.loads(follows["body"]) == {"refusal": "invalid-wish"}
    agent.apply({order[1]: commits[order[1]]})
    assert agent.dead() == {dead: "invalid-wish"}


def test_what_follows_an_otherwise_that_can_not_be_told_why_is_made(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "policies.engine.outbox.DeadReason", SimpleNamespace(INVALID_WISH="x" * 10_000)
    )  # its class takes no refusal that long
    fine = Send("accounts/b", Deposit(cents=1, on=DAY))
    agent = make(
        replace(policy(lambda event, at: [*refused(event, at), fine]), subscription=frozenset({TransferRequested}))
    )
    agent.apply({0: commit("transfers/1", 1, "c1", TransferRequested(source="a", target="b", cents=1, on=DAY))})
    first, second = id_of("saving", "transfers/1", 1, 0), id_of("saving", "transfers/1", 1, 1)
    assert {ident: row["dead"] is None for ident, row in agent.rows().items()} == {
        first: False,
        f"{first}~otherwise": False,
        second: True,
    }


def test_an_outcome_under_the_id_of_what_can_not_be_sent_leaves_the_dead_letter(make: Make) -> None:
    """The class took the value when it was decided, and the database was restored to before that."""
    agent = make(policy(once(Send(f"accounts/{EMOJI}", Deposit(cents=1, on=DAY)))))
    agent.apply({1: DEPOSIT})
    agent.apply({0: deposited()})
    assert agent.dead() == {WISH: "invalid-wish"}


def test_a_policy_may_park_the_stream_and_go_on(make: Make) -> None:
    agent = make(policy(failing, on_poison="park"))
    assert agent.apply({0: deposited()}) is CommitStatus.APPLIED
    parked = agent.db.execute("select table_name, stream, since_version from parked").fetchall()
    assert parked == [("policy_saving", "accounts/a", 1)]
