"""Each month a transfer, by a timer that sets the next one.

Another transfer may have an instalment's name already: the instalment is refused then, and is a dead letter, for its money did not
move. That a cancelled order refuses its timer is expected.
"""

from collections.abc import Iterable
from datetime import UTC, date, datetime, time, timedelta

from domain.standing_orders import InstalmentDue, OrderNotActive, PayInstalment, StandingOrderPlaced
from domain.transfers import RequestTransfer
from policies.engine import At, Send

VERSION = 2


def react(event: StandingOrderPlaced | InstalmentDue, at: At) -> Iterable[Send]:
    match event:
        case StandingOrderPlaced(first=first):
            yield pay(first, at)
        case InstalmentDue(source=source, target=target, cents=cents, on=on, following=following):
            transfer = RequestTransfer(source=source, target=target, cents=cents, on=on)
            yield Send(f"transfers/{at.id}{on:%Y%m}", transfer)
            yield pay(following, at)


def pay(day: date, at: At) -> Send:
    """At midnight; instalments whose day has passed one after the other, a second apart: at once, they would be a cycle."""
    due = max(datetime.combine(day, time(), UTC), at.time + timedelta(seconds=1))
    return Send(at.stream, PayInstalment(on=day), due=due, ignore=(OrderNotActive,))
