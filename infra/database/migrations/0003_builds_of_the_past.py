"""builds of the past"""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.add_column(
        "builds",
        sa.Column(
            "as_of", sa.Text(), nullable=True, comment="the moment that a build of the past shows: a time, or positions"
        ),
    )
    op.drop_constraint("builds_state", "builds", type_="check")
    op.create_check_constraint(
        "builds_state",
        "builds",
        "state IN ('loading', 'ready', 'live', 'old', 'abandoned', 'past-loading', 'past')",
    )
    op.create_check_constraint(
        "builds_of_the_past", "builds", "as_of IS NOT NULL OR state NOT IN ('past-loading', 'past')"
    )
