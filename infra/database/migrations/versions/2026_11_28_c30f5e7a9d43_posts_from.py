"""from when on a policy makes posts"""

import sqlalchemy as sa
from alembic import op

revision = "c30f5e7a9d43"
down_revision = "b20e4d6f8c32"


def upgrade() -> None:
    at = sa.DateTime(timezone=True)
    comment = "posts are made of events since then; null: held, as the database is new"
    op.add_column("activations", sa.Column("posts_from", at, server_default=sa.text("'-infinity'"), comment=comment))
