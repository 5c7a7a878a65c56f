"""shares of a build's parts"""

from alembic import op

revision = "94c3a7e5b180"
down_revision = "6e1b8d40c7f2"


def upgrade() -> None:
    # an older release loads whole partitions, as the defaults say
    op.execute("""
        alter table build_parts add share int not null default 0, add shares int not null default 1,
          drop constraint build_parts_pkey, add primary key (build, partition, share, shares)""")
