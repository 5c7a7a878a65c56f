"""make test: functions without a store.

Who may do what in the sample bank: each role, each command, on the caller's own account and on another holder's."""

from dataclasses import fields, replace
from datetime import date
from typing import Any

import pytest
from hypothesis import given as for_all
from hypothesis import settings
from hypothesis import strategies as st

from access import may_read, may_send
from domain.accounts import Withdraw
from domain.engine.contexts import contexts
from domain.standing_orders import CancelStandingOrder
from domain.transfers import RequestTransfer
from infra.access import Caller, Row, Rows
from projections.engine.views.core_views import all_views
from tools.testing.facts import facts

ADA = Caller("ada")
TELLER = Caller("tom", frozenset({"teller"}))
AUDITOR = Caller("una", frozenset({"auditor"}))
OWNERS = {"7": "ada", "9": "bob", "8": ""}

WHO = [
    ("ada, her own", ADA, "7"),
    ("ada, bob's", ADA, "9"),
    ("ada, nobody's", ADA, "8"),
    ("teller", TELLER, "9"),
    ("auditor", AUDITOR, "9"),
    ("bob as operator, ada's", Caller("bob", frozenset({"operator"})), "7"),
]
MAY = {
    "OpenAccount": {"teller"},
    "Deposit": {"teller"},
    "Withdraw": {"teller"},
    "CreditInterest": {"teller"},
    "ChargeFee": {"teller"},
    "CloseAccount": {"teller"},
    "RequestTransfer": {"ada, her own", "teller"},
    "PlaceStandingOrder": {"ada, her own", "teller"},
    "CancelStandingOrder": {name for name, *_ in WHO},  # each its own: below
}
"""All other commands, new ones too, are nobody's."""

COMMANDS = [(context.name, command) for context in contexts().values() for command in context.commands.values()]


def is_allowed(answer: bool | Row) -> bool:
    """As the API answers it, from the rows of `balances`."""
    if not isinstance(answer, Row):
        return answer
    assert answer.view == "balances"
    rows = [{"account": account, "owner": owner} for account, owner in OWNERS.items()]
    return any(answer.columns.items() <= row.items() for row in rows)


@pytest.mark.parametrize(("context", "command"), COMMANDS, ids=[command.__name__ for _, command in COMMANDS])
@settings(deadline=None, max_examples=10)
@for_all(data=st.data())
def test_who_may_send_what(context: str, command: type[Any], data: st.DataObject) -> None:
    for name, caller, account in WHO:
        about = {"owner": OWNERS[account], "overdraft_limit": 0, "source": account, "hold": ""}
        given = data.draw(facts(command))
        given = replace(given, **{field.name: about[field.name] for field in fields(given) if field.name in about})
        stream = f"{context}/{account if context == 'accounts' else f'{caller.subject}-1'}"
        assert is_allowed(may_send(caller, stream, given)) == (name in MAY.get(command.__name__, ())), name


@pytest.mark.parametrize("name", ["bob-1", "ada-x-1", "ada", "1", "-1", "adam-1", "ada-", "ada-1202612"])
def test_a_transfer_or_order_of_a_holder_bears_its_name(name: str) -> None:
    """And is not called as an instalment of an order is: a transfer that has its name would keep it from being paid."""
    request = RequestTransfer(source="7", target="9", cents=1, on=date(2026, 11, 21))
    for stream, command in (f"transfers/{name}", request), (f"standing_orders/{name}", CancelStandingOrder()):
        assert may_send(ADA, stream, command) is False
        assert may_send(TELLER, stream, command) is True


@pytest.mark.parametrize("caller", [ADA, TELLER, AUDITOR])
def test_a_withdrawal_with_a_hold_is_the_policys(caller: Caller) -> None:
    assert not may_send(caller, "accounts/7", Withdraw(cents=1, on=date(2026, 11, 21), hold="t1"))


@pytest.mark.parametrize("view", all_views())
def test_who_may_read_what(view: str) -> None:
    own = {"balances": Rows(owner="ada"), "statement": Rows(owner="ada"), "command_outcomes": Rows(by="ada")}
    assert may_read(ADA, view) == own.get(view, False)
    assert may_read(TELLER, view) is True
    assert may_read(AUDITOR, view) is True
