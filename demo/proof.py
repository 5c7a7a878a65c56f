"""Proves what the load did: independent sources (the file, the log, the rows, the API's answers) must agree.

Rows and log are read here; `prove` compares them with the file and the answers, and is pure.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from psycopg import sql

from commands.outcomes import live_table
from demo.data import Transaction
from demo.generate import Totals
from demo.sending import Answer
from demo.transfers import OURS
from domain.accounts import OpenAccount
from domain.engine.versions import stored_type
from infra.archive.whole_log import read_range
from infra.database.connect import connect, patient_ms
from infra.log.records import Command
from infra.log.rule import START, read
from infra.log.topics import describe
from infra.settings import Settings
from projections.engine.views.core_views import command_key

Key = tuple[str, str]
"""Stream and command id."""


class Line(NamedTuple):
    """Cents."""

    change: int
    balance: int


class Balance(NamedTuple):
    """Cents."""

    balance: int
    transactions: int


class DailySums(NamedTuple):
    """Over all days and operations; cents."""

    movements: int
    change: int


@dataclass(frozen=True, slots=True)
class Rows:
    """The read models at one moment. Lines by (account, version of the stream), balances by account."""

    outcomes: dict[Key, Answer]
    lines: dict[tuple[str, int], Line]
    balances: dict[str, Balance]
    daily: DailySums


@dataclass(frozen=True, slots=True)
class Proof:
    """The result of the load. Money in cents.

    `lost` counts commands of the file that have no commit in the log, no outcome, no answer where they were sent over HTTP or,
    accepted, no line in the statement; `doubled` commits, outcomes and lines beyond one for each command of the file. `over_http`
    counts the commands that the API answered with what is recorded of them, by outcome. `disagreements` are sentences.
    """

    accounts: int
    accepted: int
    rejected: int
    credits: int
    debits: int
    balance: int
    statement: dict[str, int]
    """Lines by how far their balance is from the bank's own figure."""
    lost: int
    doubled: int
    over_http: dict[str, int]
    disagreements: tuple[str, ...]


def rows_of(settings: Settings, keys: Iterable[Key]) -> Rows:
    """The live tables, in one snapshot, without what transfers left there. An outcome of none of these keys has its digest as id.

    Raises ReadModelNotSetUp, DatabaseUnavailable.
    """
    named = {command_key(*key): key for key in keys}
    with connect(settings, "samefold demo") as connection, connection.transaction():
        connection.execute("set transaction isolation level repeatable read, read only")
        # a million rows take Python longer than a transaction may be idle on a busy machine
        connection.execute(f"set local idle_in_transaction_session_timeout = {patient_ms(settings)}")

        def rows(view: str, columns: str, which: str = "true") -> list[tuple[Any, ...]]:
            query = sql.SQL("select {} from {} where {}")
            table = sql.Identifier(live_table(connection, view))
            return connection.execute(query.format(sql.SQL(columns), table, sql.SQL(which))).fetchall()

        outcomes = rows("command_outcomes", "command, version, code", "by is null")
        lines = rows("statement", "account, line, cents, balance", f"account not like '{OURS}-%'")
        balances = rows("balances", "account, cents, transactions", f"account not like '{OURS}-%'")
        [daily] = rows("daily_totals", "coalesce(sum(count), 0), coalesce(sum(cents), 0)")
        [moved] = rows("statement", "count(*), coalesce(sum(cents), 0)", f"account like '{OURS}-%'")
    return Rows(
        {
            named.get(command.hex, ("", command.hex)): Answer("rejected" if code else "accepted", version, code)
            for command, version, code in outcomes
        },
        {(account, line): Line(*sums) for account, line, *sums in lines},
        {account: Balance(*sums) for account, *sums in balances},
        DailySums(*(int(all_of - ours) for all_of, ours in zip(daily, moved, strict=True))),
    )


def counted_in(settings: Settings) -> Counter[Key]:
    """How many commits of each command count in the log, by the reading rule, without those for transfers.

    Raises KafkaUnavailable, UnreadableRecord.
    """
    topic = describe(settings, settings.events_topic)
    found: Counter[Key] = Counter()
    for partition, end in topic.end.items():
        reading = START
        for records in read_range(settings, topic.name, partition, 0, end):
            reading, counted, _ = read(reading, records)
            commits = [one.commit for one in counted if not one.commit.command_id.startswith(OURS)]
            found.update((commit.stream, commit.command_id) for commit in commits)
    return found


def prove(
    transactions: Sequence[Transaction],
    commands: Sequence[Command],
    log: Mapping[Key, int],
    rows: Rows,
    expected: Totals | None,
    answers: Mapping[Key, Answer | None],
) -> Proof:
    """Compare the file with the log, with the rows and with the answers of what was sent over HTTP, None for those that got none.

    `commands` are those of `transactions`, in their order.
    """
    openings = {_key(command) for command in commands if command.type == stored_type(OpenAccount)}
    movements = [_key(command) for command in commands if command.type != stored_type(OpenAccount)]
    asked = openings.union(movements)
    lost = {key for key in asked if key not in log or key not in rows.outcomes}
    doubled = sum(log.values()) - len(asked & log.keys()) + len(rows.outcomes.keys() - asked)

    told: list[str] = []
    over_http: Counter[str] = Counter()
    for key, answer in answers.items():
        if answer is None:
            lost.add(key)
        elif answer != rows.outcomes.get(key):
            told.append(f"command {key} was answered {answer} over HTTP, and recorded {rows.outcomes.get(key)}")
        else:
            over_http[answer.outcome] += 1

    unclaimed = set(rows.lines)
    off: Counter[str] = Counter()
    files: dict[str, list[int]] = defaultdict(lambda: [0, 0])  # by account: cents, transactions
    accepted = rejected = 0
    for transaction, key in zip(transactions, movements, strict=True):
        recorded = rows.outcomes.get(key)
        if recorded is None or recorded.outcome != "accepted":
            rejected += recorded is not None
            continue
        accepted += 1
        change = transaction.cents if transaction.direction == "credit" else -transaction.cents
        account = files[transaction.account]
        account[0] += change
        account[1] += 1
        where = (transaction.account, recorded.version)
        if where not in unclaimed:
            lost.add(key)
            continue
        unclaimed.remove(where)
        line = rows.lines[where]
        if line != (change, account[0]):
            told.append(f"transaction {transaction.trans_id} left {line} in the statement, not {(change, account[0])}")
        off[_distance(line.balance - transaction.balance)] += 1

    gained = sum(line.change for line in rows.lines.values() if line.change > 0)
    spent = -sum(line.change for line in rows.lines.values() if line.change < 0)
    balance = sum(row.balance for row in rows.balances.values())
    for stream, _ in openings:
        name = stream.partition("/")[2]
        row, theirs = rows.balances.get(name), files.get(name, [0, 0])
        if row is None or list(row) != theirs:
            told.append(f"account {name} has {row} in the balances, and {theirs} by the file")
    if len(rows.balances) != len(openings):
        told.append(f"{len(rows.balances)} accounts have a balance, {len(openings)} were opened")
    if rows.daily != (len(rows.lines), gained - spent):
        told.append(f"the daily totals come to {rows.daily}, the statement to {(len(rows.lines), gained - spent)}")
    if balance != gained - spent:
        told.append(f"the balances come to {balance}, the statement to {gained - spent}")
    found = Totals(len(rows.balances), accepted, gained, spent)
    if expected and (found != expected or balance != expected.balance):
        told.append(f"the generated bank comes to {expected}")
    return Proof(
        accounts=len(rows.balances),
        accepted=accepted,
        rejected=rejected,
        credits=gained,
        debits=spent,
        balance=balance,
        statement={distance: off[distance] for distance in ("within_0_50", "within_1_00", "beyond")},
        lost=len(lost),
        doubled=doubled + len(unclaimed),
        over_http={outcome: over_http[outcome] for outcome in ("accepted", "rejected")},
        disagreements=tuple(told),
    )


def _key(command: Command) -> Key:
    return command.stream, command.id


def _distance(cents: int) -> str:
    """How far a line's balance is from the bank's own figure."""
    return "within_0_50" if abs(cents) <= 50 else "within_1_00" if abs(cents) <= 100 else "beyond"
