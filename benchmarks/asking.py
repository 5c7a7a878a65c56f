"""A reader, until SIGTERM: `python -m benchmarks.asking --by pointer --rate 150 --accounts 200 --seed 1`.

Asks for the number of movements on an account, or on all, which never falls. `--by` says how:

    pointer    the statement that programs use: the row and the pointer at once, asked again where the pointer has moved
    view       the SQL view for people
    total      the sum over the SQL view

Prints one JSON object at its end: for each answer, when it was due, asked and answered (seconds of the system's monotonic clock,
which all processes share), the account (-1 for all) and what was seen.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, LiteralString

from psycopg import sql

from benchmarks.child import flags, tell, until_terminated
from benchmarks.workload import name_of

if TYPE_CHECKING:
    from infra.database.connect import Connection

ALL = -1

_BY_POINTER = sql.SQL(
    "select l.table_name, b.transactions from live l left join {} b on b.account = %s where l.view = 'balances'"
)


def main() -> None:
    from infra.database.connect import connect
    from infra.settings import Settings

    given = flags("rate", "accounts", "seed", by=tuple(_WAYS))
    ended = until_terminated()
    chance = random.Random(given.seed)
    answers: list[tuple[float, float, float, int, int]] = []
    with connect(Settings(), "samefold bench reader") as database:
        ask = _WAYS[given.by](database)
        began = answered = time.monotonic()
        while not ended.is_set():
            due = began + len(answers) / given.rate
            if (early := due - time.monotonic()) > 0:
                ended.wait(early)
            account = ALL if given.by == "total" else chance.randrange(given.accounts)
            asked = time.monotonic()
            # who asks late because the answer before was late has waited since it was due
            since = due if answered > due else asked
            seen = ask("" if account == ALL else name_of(account))
            answered = time.monotonic()
            answers.append((since, asked, answered, account, seen))
    tell(answers)


def _by_pointer(database: Connection) -> Callable[[str], int]:
    row = database.execute("select table_name from live where view = 'balances'").fetchone()
    assert row is not None, "balances is live"
    table: str = row[0]

    def answer(account: str) -> tuple[str, Any]:
        found = database.execute(_BY_POINTER.format(sql.Identifier(table)), (account,)).fetchone()
        assert found is not None, "balances is live"
        return found[0], found[1]

    def ask(account: str) -> int:
        nonlocal table
        named, seen = answer(account)
        if named != table:
            table = named
            _, seen = answer(account)
        return seen or 0

    return ask


def _by_query(query: LiteralString) -> Callable[[Connection], Callable[[str], int]]:
    """What a query gives for `%(account)s`."""

    def on(database: Connection) -> Callable[[str], int]:
        def ask(account: str) -> int:
            row = database.execute(query, {"account": account}).fetchone()
            return int(row[0]) if row else 0

        return ask

    return on


_WAYS: dict[str, Callable[[Connection], Callable[[str], int]]] = {
    "pointer": _by_pointer,
    "view": _by_query("select transactions from balances where account = %(account)s"),
    "total": _by_query("select coalesce(sum(transactions), 0) from balances"),
}


if __name__ == "__main__":
    main()
