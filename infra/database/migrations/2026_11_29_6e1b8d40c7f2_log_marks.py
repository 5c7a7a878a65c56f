"""marks: reading states at offsets of the log"""

import sqlalchemy as sa
from alembic import op

revision = "6e1b8d40c7f2"
down_revision = "c30f5e7a9d43"


def upgrade() -> None:
    op.create_table(
        "log_marks",
        sa.Column("topic", sa.Text(collation="C"), nullable=False),
        sa.Column("topic_id", sa.Text(), nullable=False),
        sa.Column("partition", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column(
            "number",
            sa.BigInteger(),
            autoincrement=False,
            nullable=False,
            comment="next_offset / 50,000, rounded down: one mark at most for each",
        ),
        *(
            sa.Column(name, sa.BigInteger(), nullable=False)
            for name in ("next_offset", "epoch", "seq", "command_offset")
        ),
        sa.PrimaryKeyConstraint("topic", "topic_id", "partition", "number"),
        comment="Reading states at offsets of the log, from which a reader may begin; checked against the log before use",
    )
