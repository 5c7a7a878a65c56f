"""sources: positions in other services' topics, and the ids of messages that were received"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "5b7d20c4e9a1"
down_revision = "d81f4b06a7c3"


def upgrade() -> None:
    op.create_table(
        "source_positions",
        sa.Column("policy", sa.Text(collation="C"), nullable=False),
        sa.Column("partition", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("topic_id", sa.Text(), nullable=False),
        sa.Column("next_offset", sa.BigInteger(), nullable=False),
        sa.Column(
            "activation",
            sa.Integer(),
            nullable=False,
            comment="the policy's newest that its last reader knew: a later one fences it",
        ),
        sa.PrimaryKeyConstraint("policy", "partition"),
        comment="How far each source has received each partition of its topic; the fence of every batch",
        postgresql_with={"fillfactor": "50"},
    )
    op.create_table(
        "received_messages",
        sa.Column("policy", sa.Text(collation="C"), nullable=False),
        sa.Column("id", sa.LargeBinary(), nullable=False, comment="a digest of the message's own id"),
        sa.PrimaryKeyConstraint("policy", "id"),
        comment="Messages whose own id counts: one that is repeated leads to nothing",
    )
    op.add_column(
        "activations",
        sa.Column(
            "messages", JSONB(), comment="of a source: the same in its topic, {topic_id, offsets: {partition: offset}}"
        ),
    )
    op.add_column("outbox", sa.Column("trace", sa.Text(), comment="of a source's wish: its message's traceparent"))
    for column, kind, comment in (
        ("kind", sa.Text(), "send, or dropped; message: can't be received; null while only the outcome is known"),
        (
            "partition",
            sa.Integer(),
            "of the event that the wish came from, like stream and version; of a source's: target's",
        ),
        ("stream", sa.Text(collation="C"), "of a source's wish: target; of a message: topic and partition"),
        ("version", sa.BigInteger(), "of a source's wish, and of a message: the message's offset"),
    ):
        op.alter_column("outbox", column, existing_type=kind, comment=comment)
