"""the bank's tables"""

import sqlalchemy as sa
from alembic import op

revision = "9c41f0d2be67"
down_revision = None
branch_labels = ("views",)
depends_on = "0005"


def upgrade() -> None:
    # older databases have them: they were made by core migration 0001
    op.create_table(
        "balances_v1",
        sa.Column("account", sa.Text(collation="C"), autoincrement=False, nullable=False),
        sa.Column("cents", sa.BigInteger(), nullable=False),
        sa.Column("overdraft_limit", sa.BigInteger(), nullable=False),
        sa.Column("opened_on", sa.Date(), nullable=False),
        sa.Column("last_on", sa.Date(), nullable=False),
        sa.Column("transactions", sa.BigInteger(), nullable=False),
        sa.Column("closed_on", sa.Date(), nullable=True),
        sa.Column("_partition", sa.SmallInteger(), nullable=False),
        sa.PrimaryKeyConstraint("account"),
        comment="view balances, version 1, entity by (account), shape 5d4ec7518787",
        postgresql_with={"fillfactor": "70"},
        if_not_exists=True,
    )
    op.create_table(
        "daily_totals_v1",
        sa.Column("day", sa.Date(), autoincrement=False, nullable=False),
        sa.Column("operation", sa.Text(collation="C"), autoincrement=False, nullable=False),
        sa.Column("count", sa.Numeric(), nullable=False, comment="sum"),
        sa.Column("cents", sa.Numeric(), nullable=False, comment="sum"),
        sa.Column("largest", sa.BigInteger(), nullable=False, comment="max"),
        sa.Column("_partition", sa.SmallInteger(), nullable=False),
        sa.PrimaryKeyConstraint("day", "operation", "_partition"),
        comment="view daily_totals, version 1, summary by (day, operation), shape ea88ef1b3344",
        if_not_exists=True,
    )
    op.create_table(
        "statement_v1",
        sa.Column("account", sa.Text(collation="C"), autoincrement=False, nullable=False),
        sa.Column("line", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("day", sa.Date(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("operation", sa.Text(), nullable=False),
        sa.Column("purpose", sa.Text(), nullable=False),
        sa.Column("counter_bank", sa.Text(), nullable=False),
        sa.Column("counter_account", sa.Text(), nullable=False),
        sa.Column("cents", sa.BigInteger(), nullable=False),
        sa.Column("balance", sa.BigInteger(), nullable=False),
        sa.Column("_partition", sa.SmallInteger(), nullable=False),
        sa.PrimaryKeyConstraint("account", "line"),
        comment="view statement, version 1, journal by (account, line), shape 6404d50dbbff",
        if_not_exists=True,
    )
    op.create_table(
        "streams_accounts_v1",
        sa.Column("stream", sa.Text(collation="C"), autoincrement=False, nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.JSON(), nullable=False),
        sa.Column("_partition", sa.SmallInteger(), nullable=False),
        sa.PrimaryKeyConstraint("stream"),
        comment="view streams_accounts, version 1, snapshot by (stream), shape 1475b40a3aa1",
        postgresql_with={"fillfactor": "70"},
        if_not_exists=True,
    )
