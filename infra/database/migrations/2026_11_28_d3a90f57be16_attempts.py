"""attempts of agents"""

import sqlalchemy as sa
from alembic import op

revision = "d3a90f57be16"
down_revision = "7c02b9e6d4f1"


def upgrade() -> None:
    op.add_column("positions", sa.Column("attempt", sa.JSON(), comment="what an agent that started here folded first"))
