"""A process of policies with one policy, this one: it wishes for one event in ten of `workload.history`. No handler answers.

It begins, with all of it loaded, when `balances` is live in the version that this code has.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterable

from domain.accounts import Deposit, MoneyWithdrawn
from infra.database.connect import connect
from infra.settings import Settings
from policies.engine import At, Send
from policies.engine.policy import policy_of
from policies.engine.process import Policies
from projections.balances import VERSION as RELEASED
from projections.engine.live.agent import serve

VERSION = 1
NAME = "one_in_ten"
log = logging.getLogger(NAME)


def react(event: MoneyWithdrawn, at: At) -> Iterable[Send]:
    if event.cents % 10 < 3:  # a third of the events of `history` are withdrawals
        yield Send(at.stream, Deposit(cents=1, on=event.on))


def begin(settings: Settings) -> Policies:
    with connect(settings, "samefold bench") as connection:
        log.info("waits for 'balances'")
        while not connection.execute(
            "select 1 from live where view = 'balances' and version = %s", [RELEASED]
        ).rowcount:
            time.sleep(0.005)
    return Policies(settings, [policy_of(sys.modules[__name__])], NAME)


if __name__ == "__main__":
    from benchmarks import one_in_ten  # noqa: PLW0406 — its module must have its name, which is the policy's

    serve(NAME, one_in_ten.begin, one_in_ten.log)
