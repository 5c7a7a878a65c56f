"""the archive's identity"""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.add_column(
        "topics",
        sa.Column(
            "archive",
            sa.Text(),
            nullable=True,
            comment="the identity of its archive, which stands there too; null before there is one",
        ),
    )
