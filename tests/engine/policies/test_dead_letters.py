"""make test: a database, a relay or a receiver of webhooks.

No wish ends in silence: whatever makes a dead letter of it, a log line, a metric and the listings name it, and so do the pages."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from threading import Thread
from typing import NamedTuple

import pytest

from domain.accounts import Deposit, Withdraw
from infra.database.connect import Connection, connect
from infra.log.clients import MAX_COMMIT_BYTES
from infra.log.records import Commit
from infra.log.rule import START
from infra.observability import metrics
from infra.settings import Settings
from policies.engine import policy as declared
from policies.engine.dead_letters import DeadReason
from policies.engine.outbox import MOST_DEPTH
from policies.engine.policy import Post, Send
from projections.engine.live.exporter import Exporter
from projections.engine.store.positions import set_generation
from tests.engine.policies.test_outbox import (
    DAY,
    EMOJI,
    WISH,
    Agent,
    React,
    deposited,
    once,
    outcome,
    policy,
    saving,
)
from tests.engine.policies.test_relay import relay, wish
from tests.engine.policies.test_webhooks import Receiver, posting, put, receiver, waiting, with_endpoints  # noqa: F401
from tests.engine.spine import set_up
from tools.testing.fixtures import ROOT, Samefold
from tools.testing.waiting import until


class Place(NamedTuple):
    world: Settings
    db: Connection
    receiver: Receiver

    def folded(self, react: React, *commits: Commit) -> None:
        """By the agent of a policy."""
        at = dict.fromkeys(range(8), START._replace(next_offset=1, epoch=0))
        set_generation(self.db, self.world.events_topic, {"policy_saving": at}, "test")
        assert Agent(self.db, self.world, policy(react)).apply({0: [*commits]})

    def relayed(self, depth: int, otherwise: str | None) -> None:
        """What Kafka does not take."""
        body = f'{{"text": "{"x" * (MAX_COMMIT_BYTES + 200_000)}"}}'
        wish(self.db, "saving~large", body=body, otherwise=otherwise)
        self.db.execute("update outbox set depth = %s", [depth])
        with relay(self.world) as errors:
            dead = "select from outbox where dead is not null"
            until(lambda: errors or self.db.execute(dead).rowcount, "it is a dead letter")

    def posted(self, path: str) -> None:
        settings = with_endpoints(self.world, crm=self.receiver.url(path))
        [post] = put(settings, "crm", "boxes/1", [1], "saving")
        with posting(settings, []):
            until(lambda: waiting(settings)[post][1] is not None, "it is a dead letter")


def unexpected(*_: object) -> Iterator[Send]:
    yield Send("accounts/savings", Deposit(cents=1, on=DAY))


REFUSED = outcome(WISH, "accounts/savings", Deposit(cents=1, on=DAY), "account-is-closed")
OTHER = outcome(WISH, "accounts/savings", Withdraw(cents=9, on=DAY))
ENDS: list[tuple[DeadReason, Callable[[Place], None]]] = [
    (
        DeadReason.INVALID_WISH,
        lambda at: at.folded(once(Send(f"accounts/{EMOJI}", Deposit(cents=1, on=DAY))), deposited()),
    ),
    (DeadReason.INVALID_WISH, lambda at: at.folded(once(Post("ledger", {"rate": float("nan")})), deposited())),
    (DeadReason.REFUSED, lambda at: at.folded(unexpected, deposited(), REFUSED)),
    (DeadReason.TOO_DEEP, lambda at: at.folded(saving, deposited(depth=MOST_DEPTH))),
    (DeadReason.TOO_DEEP, lambda at: at.relayed(MOST_DEPTH, "FailTransfer")),
    (DeadReason.ID_REUSED, lambda at: at.folded(saving, deposited(), OTHER)),
    (DeadReason.REFUSED_BY_KAFKA, lambda at: at.relayed(1, None)),
    (DeadReason.GONE, lambda at: at.posted("crm/status/410")),
    (DeadReason.GAVE_UP, lambda at: at.posted("crm/status/500")),
]
"""Each reason, and who meets it."""


@pytest.fixture
def place(world: Settings, receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:  # noqa: F811
    monkeypatch.setattr(declared, "discover", dict)
    set_up(world)
    with connect(world, "test") as db:
        db.execute("insert into activations (policy, number, version, positions) values ('saving', 1, 1, '{}')")
        yield Place(world, db, receiver)


def gauges(*names: str) -> list[float | None]:
    """Of the policy."""
    return [metrics.REGISTRY.get_sample_value(f"samefold_{name}", {"policy": "saving"}) for name in names]


@pytest.mark.parametrize(("reason", "end"), ENDS, ids=[f"{number} {reason}" for number, (reason, _) in enumerate(ENDS)])
def test_a_wish_that_ends_as_a_dead_letter_is_logged_counted_and_listed_with_its_reason(
    place: Place, samefold: Samefold, caplog: pytest.LogCaptureFixture, reason: DeadReason, end: Callable[[Place], None]
) -> None:
    end(place)
    listed = partial(samefold, settings=place.world)
    [one] = json.loads(listed("outbox", "list", "--dead", "--json").stdout)["wishes"]
    assert one["dead"].startswith(f"{reason}: ")

    def told() -> int:
        errors = [line.getMessage() for line in caplog.records if line.levelname == "ERROR"]
        return sum(one["dead"] in line and one["id"] in line for line in errors)

    until(told, "what the database knows is logged, too")
    assert told() == 1
    [stuck] = json.loads(listed("processes", "--stuck", "--json").stdout)["processes"]
    assert (stuck["policy"], stuck["stream"], stuck["first"][0]["why"]) == ("saving", one["stream"], one["dead"])
    exporter = Exporter(place.world, "test")
    thread = Thread(target=exporter.run)
    thread.start()
    try:
        until(lambda: gauges("outbox_dead", "processes_stuck") == [1, 1], "the exporter has counted it")
    finally:
        exporter.stopping.set()
        thread.join(30)


def test_every_reason_is_provoked_and_the_pages_list_each_and_no_other() -> None:
    def listed(page: str) -> set[str]:
        """The codes in the first column of the page's table of reasons."""
        text = (ROOT / "docs" / page).read_text()
        [table] = re.findall(r"^\| reason \|.*\n\|[-| ]+\n((?:\|.*\n)+)", text, re.MULTILINE)
        return {code for line in table.splitlines() for code in re.findall(r"`([\w-]+)", line.split("|")[1])}

    of_messages = {DeadReason.BAD_MESSAGE}  # test_sources.py provokes it
    assert {reason for reason, _ in ENDS} == {*DeadReason} - of_messages
    assert listed("policies.md") == {*DeadReason} - of_messages
    assert listed("sources.md") == of_messages
    assert listed("webhooks.md") == {DeadReason.GONE, DeadReason.GAVE_UP, DeadReason.INVALID_WISH}
    assert all(f"`{reason}`" in (ROOT / "docs" / "observability.md").read_text() for reason in DeadReason)
