"""shares of a build's parts"""

import sqlalchemy as sa
from alembic import op

revision = "94c3a7e5b180"
down_revision = "6e1b8d40c7f2"


def upgrade() -> None:
    for name, default, comment in (
        ("share", "0", "of the partition's streams: 0, 1, …"),
        ("shares", "1", "how many the partition has"),
    ):
        op.add_column(
            "build_parts", sa.Column(name, sa.Integer(), server_default=default, nullable=False, comment=comment)
        )
    # an older release's rebuild, which may run meanwhile, loads whole partitions
    op.drop_constraint("build_parts_pkey", "build_parts")
    op.create_primary_key("build_parts_pkey", "build_parts", ["build", "partition", "share", "shares"])
