"""The bank as a user of pyeventsourcing would write it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from urllib.parse import parse_qs, urlsplit
from uuid import NAMESPACE_URL, UUID, uuid5

from eventsourcing.application import Application
from eventsourcing.domain import Aggregate, event

from benchmarks.workload import OPEN, OVERDRAFT_LIMIT, Order, name_of

TOGETHER = 500


class InsufficientFunds(Exception):
    """The balance and the overdraft limit do not cover the amount."""


class Account(Aggregate):
    """One account."""

    class Opened(Aggregate.Created):
        """It exists."""

        name: str
        overdraft_limit: int

    class Deposited(Aggregate.Event):
        """Money came in."""

        cents: int

    class Withdrawn(Aggregate.Event):
        """Money went out."""

        cents: int

    @event(Opened)
    def __init__(self, name: str, overdraft_limit: int) -> None:
        self.name = name
        self.overdraft_limit = overdraft_limit
        self.balance = 0

    @staticmethod
    def create_id(name: str) -> UUID:
        return uuid5(NAMESPACE_URL, name)

    @event(Deposited)
    def deposit(self, cents: int) -> None:
        self.balance += cents

    def withdraw(self, cents: int) -> None:
        if self.balance - cents < -self.overdraft_limit:
            raise InsufficientFunds
        self._withdraw(cents)

    @event(Withdrawn)
    def _withdraw(self, cents: int) -> None:
        self.balance -= cents


class Bank(Application[UUID]):
    """The application: get, change, save."""

    def record_all(self, orders: Iterable[Order]) -> int:
        """Orders that are all accepted, many accounts to a transaction; how many events that made."""
        waiting: dict[str, Account] = {}
        count = 0
        known: dict[str, Account] = {}
        for account, cents, _ in orders:
            name = name_of(account)
            if cents == OPEN:
                known[name] = Account(name=name, overdraft_limit=OVERDRAFT_LIMIT)
            elif cents > 0:
                known[name].deposit(cents)
            else:
                known[name].withdraw(-cents)
            waiting[name] = known[name]
            count += 1
            if len(waiting) == TOGETHER:
                self.save(*waiting.values())
                waiting.clear()
        self.save(*waiting.values())
        return count

    def obey(self, order: Order) -> bool:
        """One command; whether it was accepted."""
        account: Account = self.repository.get(Account.create_id(name_of(order.account)))
        try:
            if order.cents > 0:
                account.deposit(order.cents)
            else:
                account.withdraw(-order.cents)
        except InsufficientFunds:
            return False
        self.save(account)
        return True

    def rows(self, names: Iterable[str]) -> dict[str, tuple[int, int]]:
        """(version, balance) by name."""
        found: list[Account] = [self.repository.get(Account.create_id(name)) for name in names]
        return {account.name: (account.version, account.balance) for account in found}


def environment(database_url: str, options: Mapping[str, str]) -> dict[str, str]:
    """pyeventsourcing's settings for that database, a Unix socket in the query."""
    parts = urlsplit(database_url)
    return {
        "PERSISTENCE_MODULE": "eventsourcing.postgres",
        "POSTGRES_DBNAME": parts.path.removeprefix("/"),
        "POSTGRES_HOST": parse_qs(parts.query)["host"][0],
        "POSTGRES_USER": parts.username or "",
        "POSTGRES_PASSWORD": "",
        **options,
    }
