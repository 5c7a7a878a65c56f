"""transfers, standing orders, and holds in the state of accounts"""

import sqlalchemy as sa
from alembic import op

revision = "3f8a6b1c94d7"
down_revision = "9c41f0d2be67"


def upgrade() -> None:
    op.create_table(
        "streams_accounts_v2",
        sa.Column("stream", sa.Text(collation="C"), autoincrement=False, nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.JSON(), nullable=False),
        sa.Column("_partition", sa.SmallInteger(), nullable=False),
        sa.PrimaryKeyConstraint("stream"),
        comment="view streams_accounts, version 2, snapshot by (stream), shape b3439304151a",
        postgresql_with={"fillfactor": "70"},
    )
    op.create_table(
        "streams_standing_orders_v1",
        sa.Column("stream", sa.Text(collation="C"), autoincrement=False, nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.JSON(), nullable=False),
        sa.Column("_partition", sa.SmallInteger(), nullable=False),
        sa.PrimaryKeyConstraint("stream"),
        comment="view streams_standing_orders, version 1, snapshot by (stream), shape eaae9124af55",
        postgresql_with={"fillfactor": "70"},
    )
    op.create_table(
        "streams_transfers_v1",
        sa.Column("stream", sa.Text(collation="C"), autoincrement=False, nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.JSON(), nullable=False),
        sa.Column("_partition", sa.SmallInteger(), nullable=False),
        sa.PrimaryKeyConstraint("stream"),
        comment="view streams_transfers, version 1, snapshot by (stream), shape c030906f6385",
        postgresql_with={"fillfactor": "70"},
    )
    op.create_table(
        "transfers_v1",
        sa.Column("transfer", sa.Text(collation="C"), autoincrement=False, nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("source", sa.Text(), nullable=False),
        sa.Column("target", sa.Text(), nullable=False),
        sa.Column("cents", sa.BigInteger(), nullable=False),
        sa.Column("day", sa.Date(), nullable=False),
        sa.Column("refusal", sa.Text(), nullable=False),
        sa.Column("requested_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("changed_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("_partition", sa.SmallInteger(), nullable=False),
        sa.PrimaryKeyConstraint("transfer"),
        comment="view transfers, version 1, entity by (transfer), shape fa122ad2a4a8",
        postgresql_with={"fillfactor": "70"},
    )
