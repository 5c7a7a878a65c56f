"""What the other bank says: money that it paid to us, which arrives here; and that ours arrived there, which is noted here."""

from collections.abc import Iterable
from datetime import date

from domain.accounts import Deposit
from domain.language import Cents, Text
from policies.engine import Received, Send, message

VERSION = 1
SOURCE = "other"


@message("money-withdrawn.v1")
class Paid:
    account: Text
    cents: Cents
    on: date


@message("money-deposited.v1")
class Arrived:
    account: Text
    cents: Cents
    on: date


def receive(message: Paid | Arrived, at: Received) -> Iterable[Send]:
    role, _, number = message.account.partition("-")
    to = "payee" if isinstance(message, Paid) and role == "payer" else "answer" if role == "payee" else ""
    if to:
        yield Send(f"accounts/{to}-{number}", Deposit(cents=message.cents, on=message.on))
