"""A process of policies with one policy, which wishes for a command at each tenth offset. No handler answers.

The policy is live from the log's first event. It begins, with all of it loaded, when `balances` is live in this code's version.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable

from domain.accounts import AccountOpened, Deposit, MoneyDeposited, MoneyWithdrawn
from infra.database.connect import connect
from infra.settings import Settings
from policies.engine import At, Send
from policies.engine.activations import switch
from policies.engine.policy import Policy
from policies.engine.process import Policies
from projections.balances import VERSION
from projections.engine.live.process import serve

log = logging.getLogger(__name__)


def react(event: AccountOpened | MoneyDeposited | MoneyWithdrawn, at: At) -> Iterable[Send]:
    if at.offset % 10 == 0:
        yield Send(at.stream, Deposit(cents=1, on=event.on))


POLICY = Policy("one_in_ten", 1, react, frozenset({AccountOpened, MoneyDeposited, MoneyWithdrawn}))


def begin(settings: Settings) -> Policies:
    switch(settings, POLICY)  # while nothing is folded: a policy that comes later has no part in the past
    with connect(settings, "samefold bench") as connection:
        log.info("waits for 'balances'")
        while not connection.execute("select 1 from live where view = 'balances' and version = %s", [VERSION]).rowcount:
            time.sleep(0.005)
    return Policies(settings, [POLICY], POLICY.name)


if __name__ == "__main__":
    serve(POLICY.name, begin, log)
