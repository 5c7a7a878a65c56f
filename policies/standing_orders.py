"""Each month a transfer, by a timer that sets the next one."""

from collections.abc import Iterable
from datetime import UTC, date, datetime, time

from domain.standing_orders import InstalmentDue, PayInstalment, StandingOrderPlaced
from domain.transfers import RequestTransfer
from policies.engine import At, Send

VERSION = 1


def react(event: StandingOrderPlaced | InstalmentDue, at: At) -> Iterable[Send]:
    match event:
        case StandingOrderPlaced(first=first):
            yield Send(at.stream, PayInstalment(on=first), due=midnight(first))
        case InstalmentDue(source=source, target=target, cents=cents, on=on, following=following):
            transfer = RequestTransfer(source=source, target=target, cents=cents, on=on)
            yield Send(f"transfers/{at.id}{on:%Y%m}", transfer)
            yield Send(at.stream, PayInstalment(on=following), due=midnight(following))


def midnight(day: date) -> datetime:
    return datetime.combine(day, time(), UTC)
