"""make test: a query takes milliseconds. The sample queries: given these rows of views, those answers."""

from datetime import date

from infra.settings import Settings
from projections.balances import Balance
from tools.testing.given_views import answered

DAY = date(2026, 1, 1)


def balance(account: str, owner: str, cents: int) -> Balance:
    return Balance(account, cents, 0, DAY, DAY, 1, None, owner)


def test_who_holds_most_comes_first_and_small_owners_do_not_come(world: Settings) -> None:
    rows = {"balances": [balance("1", "ada", 300), balance("2", "bob", 500), balance("3", "ada", 400)]}
    rows["balances"] += [balance("4", "eve", -1), balance("5", "amy", 500)]
    assert answered(world, "largest_accounts", rows) == [("ada", 2, 700), ("amy", 1, 500), ("bob", 1, 500)]
    assert answered(world, "largest_accounts", rows, at_least=501) == [("ada", 2, 700)]
    assert answered(world, "largest_accounts", {}) == []
