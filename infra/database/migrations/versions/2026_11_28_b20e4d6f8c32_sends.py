"""what follows a refusal, timers that guard, and leases of relays"""

import sqlalchemy as sa
from alembic import op

revision = "b20e4d6f8c32"
down_revision = "a10f3c5e7b21"


def upgrade() -> None:
    expected = "codes of rejections that need no follow-up, each after a space"
    for column in (
        *(sa.Column(name, sa.Text(), nullable=True) for name in ("later_type", "later_body", "later_fingerprint")),
        sa.Column("after_ms", sa.BigInteger(), nullable=True, comment="from the last answer until `later` is due"),
        sa.Column("expected", sa.Text(), nullable=True, comment=expected),
    ):
        op.add_column("outbox", column)
    op.create_index("outbox_dead", "outbox", ["policy", "stream"], postgresql_where=sa.text("dead is not null"))
    op.create_table(
        "relay_leases",
        sa.Column("policy", sa.Text(collation="C"), nullable=False),
        sa.Column("partition", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("holder", sa.Text(), nullable=False),
        sa.Column("until", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("policy", "partition"),
        comment="Which process sends the commands that a policy wished in a partition; others may when it has ended",
    )
