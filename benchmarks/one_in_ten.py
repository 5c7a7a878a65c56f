"""A process of policies with one policy, which wishes for a command at each tenth offset. No handler answers.

The policy is live from the log's first event. It begins, with all of it loaded, when `balances` is live in this code's version.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable

import msgspec

from domain.accounts import AccountOpened, Deposit, MoneyDeposited, MoneyWithdrawn
from infra.database.connect import connect
from infra.log import clients, topics
from infra.log.rule import START
from infra.processes.serving import serve
from infra.settings import Settings
from policies.engine import At, Send
from policies.engine.activations import APPEND_S, EVER, ActivationRecord, resume
from policies.engine.policy import Policy
from policies.engine.process import Policies
from projections.balances import VERSION

log = logging.getLogger(__name__)


def react(event: AccountOpened | MoneyDeposited | MoneyWithdrawn, at: At) -> Iterable[Send]:
    if at.offset % 10 == 0:
        yield Send(at.stream, Deposit(cents=1, on=event.on))


POLICY = Policy("one_in_ten", 1, react, frozenset({AccountOpened, MoneyDeposited, MoneyWithdrawn}))


def begin(settings: Settings) -> Policies:
    _make_live(settings)
    with connect(settings, "samefold bench") as connection:
        log.info("waits for 'balances'")
        while not connection.execute("select 1 from live where view = 'balances' and version = %s", [VERSION]).rowcount:
            time.sleep(0.005)
    return Policies(settings, [POLICY], POLICY.name)


def _make_live(settings: Settings) -> None:
    """From the first event on, as if it had been live before there were any: `switch` begins at the log's end."""
    events = topics.describe(settings, settings.events_topic)
    start = dict.fromkeys(range(events.partitions), START)
    activation = msgspec.json.encode(ActivationRecord(POLICY.name, 1, POLICY.version, start, events.id))
    topics.ensure_policies(settings)
    kept = [(POLICY.name.encode(), activation)]
    clients.append_all(settings, clients.producer(settings), settings.policies_topic, kept, APPEND_S)
    resume(settings, POLICY.name, EVER)


if __name__ == "__main__":
    serve(POLICY.name, begin, log)
