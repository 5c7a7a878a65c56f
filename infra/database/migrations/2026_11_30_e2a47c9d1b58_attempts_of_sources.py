"""source_positions.attempt: which messages a process received first"""

import sqlalchemy as sa
from alembic import op

revision = "e2a47c9d1b58"
down_revision = "5b7d20c4e9a1"

COMMENT = "what a process that began here received first: [from, to, number, code]"


def upgrade() -> None:
    op.add_column("source_positions", sa.Column("attempt", sa.JSON(), comment=COMMENT))
