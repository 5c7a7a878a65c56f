"""stopped views"""

import sqlalchemy as sa
from alembic import op

revision = "7c02b9e6d4f1"
down_revision = "e91c5d27ab40"


def upgrade() -> None:
    op.create_table(
        "stopped_views",
        sa.Column("view", sa.Text(collation="C"), nullable=False),
        sa.Column("agent", sa.Text(collation="C"), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False, comment="of the view, as its code had it"),
        sa.Column(
            "table_name", sa.Text(collation="C"), nullable=False, comment="an old build, which a switch catches up"
        ),
        sa.Column("stream", sa.Text(collation="C"), nullable=False),
        sa.Column("stream_version", sa.BigInteger(), nullable=False),
        sa.Column("partition", sa.Integer(), nullable=False),
        sa.Column("log_offset", sa.BigInteger(), nullable=False, comment="of the event that the view can't take"),
        sa.Column("code", sa.Text(), nullable=False),
        sa.Column("error", sa.Text(), nullable=False),
        sa.Column("stopped_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.PrimaryKeyConstraint("view"),
        comment="Views that met an event they can't take and left their agent; in force while the view is not live",
    )
