"""event types"""

import sqlalchemy as sa
from alembic import op

revision = "3f8b6a91d204"
down_revision = "c7d20e5f41ab"


def upgrade() -> None:
    op.create_table(
        "event_types",
        sa.Column("type", sa.Text(collation="C"), nullable=False),
        sa.PrimaryKeyConstraint("type"),
        comment="The stored types of events that some release's agents can fold; handlers append no others",
    )
