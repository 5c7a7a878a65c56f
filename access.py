"""Who may send which command, read which rows, and use the console. What is not allowed here is denied (docs/access.md).

Holders see their own accounts and transfer from them. Tellers pay cash in and out and see all, auditors only read. No caller may
send the commands that policies send.
"""

from domain.accounts import ChargeFee, CloseAccount, CreditInterest, Deposit, OpenAccount, Withdraw
from domain.standing_orders import CancelStandingOrder, PlaceStandingOrder
from domain.transfers import RequestTransfer
from infra.access import Caller, Right, Row, Rows


def may_send(caller: Caller, stream: str, command: object) -> bool | Row:
    """Whether the caller may send it to that stream, `accounts/7`; or the row that must exist for it."""
    teller = "teller" in caller.roles
    # as `ada-1`; a longer number is an instalment's, `ada-1202612`
    holder, _, number = stream.partition("/")[2].rpartition("-")
    is_own = holder == caller.subject and 0 < len(number) < 7
    match command:
        case RequestTransfer(source=source) | PlaceStandingOrder(source=source):
            return teller or (is_own and Row("balances", account=source, owner=caller.subject))
        case CancelStandingOrder():
            return teller or is_own
        case Deposit() | Withdraw(hold=""):  # cash; with a hold it is part of a transfer
            return teller
        case OpenAccount() | CreditInterest() | ChargeFee() | CloseAccount():
            return teller
        case _:
            return False


def may_read(caller: Caller, view: str) -> bool | Rows:
    """Whether the caller may read the view; or which of its rows."""
    if caller.roles & {"teller", "auditor"}:
        return True
    match view:
        case "balances" | "statement":
            return Rows(owner=caller.subject)
        case "command_outcomes":
            return Rows(by=caller.subject)
        case _:
            return False


def may_operate(caller: Caller, right: Right) -> bool:
    """Whether the caller may use the console: to look, to change something, to see personal values."""
    return "operator" in caller.roles or (right == "look" and "auditor" in caller.roles)
