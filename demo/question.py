"""A question in SQL to the log itself, asked with the next release's code: of each year, the deposits and what they come to."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from demo import tree
from demo.bank import command_for
from demo.data import Transaction
from demo.transfers import OURS
from domain.accounts import Deposit

QUESTION = f"""\
select year(`on`) as year, currency, count(*) as deposits, sum(cents) as cents
from deposited
where id not like '{OURS}-%'
group by year, currency
order by year"""  # noqa: S608  # no value from outside


class Year(NamedTuple):
    year: int
    currency: str
    deposits: int
    cents: int


PROGRAM = f"""\
import json, sys
from domain.accounts import {tree.EVENT}
from spark_jobs import events
from spark_jobs.engine.session import session
with session("demo", "local[2]") as spark:
    events(spark, {tree.EVENT}, as_of=sys.argv[1]).createOrReplaceTempView("deposited")
    print(json.dumps(spark.sql(sys.argv[2]).collect()))
"""
"""Prints the answer as JSON. Its arguments: as of when, and the question."""


def years_of(transactions: Iterable[Transaction]) -> list[Year]:
    """The answer by the file."""
    years: dict[int, Year] = {}
    for one in transactions:
        if isinstance(command_for(one), Deposit):
            _, _, count, cents = years.get(one.on.year, (0, "", 0, 0))
            years[one.on.year] = Year(one.on.year, "CZK", count + 1, cents + one.cents)
    return sorted(years.values())
