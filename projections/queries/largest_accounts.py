"""Which owners hold most?"""

from typing import NamedTuple


class Parameters(NamedTuple):
    at_least: int = 0


class Owner(NamedTuple):
    owner: str
    accounts: int
    cents: int


SQL = """
select owner, count(*) as accounts, sum(cents) as cents
  from balances
 group by owner
having sum(cents) >= %(at_least)s
 order by cents desc, owner
"""
