"""who sent each command"""

import sqlalchemy as sa
from alembic import op

revision = "b4e60d1f7a38"
down_revision = "8d41f7a0c25e"


def upgrade() -> None:
    op.create_table(
        "command_outcomes_v2",
        sa.Column("stream", sa.Text(collation="C"), autoincrement=False, nullable=False),
        sa.Column("command_id", sa.Text(collation="C"), autoincrement=False, nullable=False),
        sa.Column("outcome", sa.Text(), nullable=False),
        sa.Column("code", sa.Text(), nullable=True),
        sa.Column("message", sa.Text(), nullable=True),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("fingerprint", sa.Text(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("by", sa.Text(), nullable=True),
        sa.Column("_partition", sa.SmallInteger(), nullable=False),
        sa.PrimaryKeyConstraint("stream", "command_id"),
        comment="view command_outcomes, version 2, outcomes by (stream, command_id), shape 366603fe6b4e",
    )
