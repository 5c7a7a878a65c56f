"""command types"""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    op.create_table(
        "command_types",
        sa.Column("context", sa.Text(collation="C"), nullable=False),
        sa.Column("type", sa.Text(collation="C"), nullable=False),
        sa.PrimaryKeyConstraint("context", "type"),
        comment="The commands that some release's handlers decide: to those that do not know them, they are not malformed",
    )
