"""make test: Spark. The sample datasets: given these events, those rows."""

from datetime import date

from pyspark.sql import SparkSession

from domain.accounts import AccountOpened, InterestCredited, MoneyDeposited, MoneyWithdrawn
from spark_jobs import monthly_turnover
from tools.testing.given_log import GivenLog

JANUARY, FEBRUARY = date(2026, 1, 1), date(2026, 2, 1)


def test_a_months_turnover_is_what_was_paid_in_and_out(spark: SparkSession) -> None:
    log = GivenLog(
        spark,
        [
            ("accounts/1", AccountOpened(overdraft_limit=0, on=JANUARY)),
            ("accounts/1", MoneyDeposited(cents=900, on=date(2026, 1, 31))),
            ("accounts/2", MoneyDeposited(cents=50, on=JANUARY)),
            ("accounts/1", MoneyWithdrawn(cents=100, on=JANUARY)),
            ("accounts/1", InterestCredited(cents=7, on=JANUARY)),
            ("accounts/1", MoneyWithdrawn(cents=1, on=date(2026, 2, 28))),
        ],
    )
    found = monthly_turnover.table(log).collect()
    assert sorted(tuple(row) for row in found) == [
        (JANUARY, "1", 1_000, 2),
        (JANUARY, "2", 50, 1),
        (FEBRUARY, "1", 1, 1),
    ]
    assert (log.events(MoneyDeposited).count(), log.events(since="2026-01-01T00:00Z").count()) == (2, 0)
