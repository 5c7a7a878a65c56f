"""outcomes by a digest of stream and command id: half as large"""

import sqlalchemy as sa
from alembic import op

revision = "e91c5d27ab40"
down_revision = "b4e60d1f7a38"


def upgrade() -> None:
    op.create_table(
        "command_outcomes_v3",
        sa.Column("command", sa.Uuid(), nullable=False),
        sa.Column("fingerprint", sa.Uuid(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("code", sa.Text(), nullable=True),
        sa.Column("message", sa.Text(), nullable=True),
        sa.Column("by", sa.Text(), nullable=True),
        sa.Column("_partition", sa.SmallInteger(), nullable=False),
        sa.PrimaryKeyConstraint("command"),
        comment="view command_outcomes, version 3, outcomes by (command), shape 33dc1af99c52",
    )
