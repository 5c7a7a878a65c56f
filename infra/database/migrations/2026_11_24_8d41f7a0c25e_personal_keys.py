"""keys of personal values"""

import sqlalchemy as sa
from alembic import op

revision = "8d41f7a0c25e"
down_revision = "3f8b6a91d204"


def upgrade() -> None:
    op.create_table(
        "personal_keys",
        sa.Column("id", sa.Text(collation="C"), nullable=False, comment="random"),
        sa.Column("subject", sa.Text(collation="C"), nullable=False),
        sa.Column("master", sa.Text(), nullable=False, comment="the master key's name"),
        sa.Column(
            "wrapped",
            sa.LargeBinary(),
            nullable=True,
            comment="the key, encrypted with the master key; null: destroyed",
        ),
        sa.Column("at_offset", sa.BigInteger(), nullable=False, comment="a subject's first key seals"),
        sa.PrimaryKeyConstraint("id"),
        comment="A copy of the topic of keys: what personal values are sealed with",
    )
    op.create_index("personal_keys_subject", "personal_keys", ["subject", "at_offset"])
    op.create_table(
        "forgotten_subjects",
        sa.Column("subject", sa.Text(collation="C"), nullable=False),
        sa.Column("at_offset", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("subject"),
        comment="A copy of the topic of keys: who is forgotten, for good",
    )
    op.create_table(
        "keys_position",
        sa.Column("topic_id", sa.Text(), nullable=False),
        sa.Column("next_offset", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("topic_id"),
        comment="How far the topic of keys is copied; one row",
    )
