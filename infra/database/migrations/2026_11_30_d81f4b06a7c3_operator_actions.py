"""operator_actions: what callers of the console had done"""

import sqlalchemy as sa
from alembic import op

revision = "d81f4b06a7c3"
down_revision = "94c3a7e5b180"


def upgrade() -> None:
    op.create_table(
        "operator_actions",
        sa.Column("id", sa.Uuid(), nullable=False, comment="of the form: one that is sent twice acts once"),
        sa.Column("at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("by", sa.Text(), comment="the caller's subject; null without SAMEFOLD_AUTH"),
        sa.Column("command", sa.Text(), nullable=False, comment="as one types it"),
        sa.Column("ended_at", sa.DateTime(timezone=True)),
        sa.Column("exit_code", sa.Integer(), comment="null while it runs, and where nobody saw its end"),
        sa.Column("output", sa.Text()),
        sa.PrimaryKeyConstraint("id"),
        comment="What callers of the console had done: commands of samefold, by whom, and what became of them",
    )
    op.create_index("operator_actions_at", "operator_actions", ["at", "id"])
