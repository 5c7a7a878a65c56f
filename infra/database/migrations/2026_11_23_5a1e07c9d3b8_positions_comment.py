"""the comment on positions names no paper any more"""

from alembic import op

revision = "5a1e07c9d3b8"
down_revision = "0005"


def upgrade() -> None:
    op.create_table_comment("positions", "How far each agent has folded each partition; the fence of every batch")
