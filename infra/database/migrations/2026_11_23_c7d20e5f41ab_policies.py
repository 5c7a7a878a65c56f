"""policies"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "c7d20e5f41ab"
down_revision = "5a1e07c9d3b8"


def upgrade() -> None:
    op.create_table(
        "outbox",
        sa.Column("id", sa.Text(collation="C"), nullable=False, comment="of the command or webhook: `<policy>~…`"),
        sa.Column("policy", sa.Text(collation="C"), nullable=False),
        sa.Column("kind", sa.Text(), nullable=True, comment="send or post; null while only the outcome is known"),
        sa.Column(
            "partition",
            sa.Integer(),
            nullable=True,
            comment="of the event that the wish came from, like stream and version",
        ),
        sa.Column("stream", sa.Text(collation="C"), nullable=True),
        sa.Column("version", sa.BigInteger(), nullable=True),
        sa.Column("number", sa.Integer(), nullable=True, comment="of the wish among those of one event: 0, 1, 2, …"),
        sa.Column(
            "target", sa.Text(collation="C"), nullable=True, comment="the command's stream, or the webhook's endpoint"
        ),
        sa.Column("type", sa.Text(), nullable=True),
        sa.Column("body", sa.Text(), nullable=True, comment="JSON"),
        sa.Column("fingerprint", sa.Text(), nullable=True, comment="of the command; null where its body is made later"),
        sa.Column("due", sa.DateTime(timezone=True), nullable=True),
        sa.Column(
            "depth",
            sa.Integer(),
            nullable=True,
            comment="how many wishes led to this one since the last timer or client",
        ),
        sa.Column("correlation_id", sa.Text(), nullable=True),
        sa.Column("causation_id", sa.Text(), nullable=True),
        sa.Column("wished_at", sa.DateTime(timezone=True), nullable=True, comment="the broker's time of the event"),
        sa.Column("then_type", sa.Text(), nullable=True),
        sa.Column("then_body", sa.Text(), nullable=True),
        sa.Column("then_fingerprint", sa.Text(), nullable=True),
        sa.Column("otherwise_type", sa.Text(), nullable=True),
        sa.Column("otherwise_body", sa.Text(), nullable=True, comment="JSON, without the refusal"),
        sa.Column(
            "otherwise_fingerprint",
            sa.Text(),
            nullable=True,
            comment="null where the refusal becomes a field of it",
        ),
        sa.Column(
            "outcome", sa.Text(), nullable=True, comment="accepted or rejected; null while only the wish is known"
        ),
        sa.Column("refusal", sa.Text(), nullable=True, comment="the rejection's code"),
        sa.Column("outcome_depth", sa.Integer(), nullable=True),
        sa.Column("outcome_fingerprint", sa.Text(), nullable=True, comment="and the stream that decided it"),
        sa.Column(
            "sent_at",
            sa.DateTime(timezone=True),
            nullable=True,
            comment="acknowledged by Kafka or by the endpoint",
        ),
        sa.Column("attempts", sa.Integer(), server_default="0", nullable=False),
        sa.Column("next_attempt", sa.DateTime(timezone=True), nullable=True),
        sa.Column("dead", sa.Text(), nullable=True, comment="why it is a dead letter: a code and what happened"),
        sa.PrimaryKeyConstraint("id"),
        comment="Wishes of policies under way, and outcomes whose wish has not been read yet",
        postgresql_with={"fillfactor": "50"},
    )
    op.create_index(
        "outbox_unsent",
        "outbox",
        ["policy", "partition", "stream", "version", "number"],
        postgresql_where=sa.text("kind = 'send' and sent_at is null and dead is null and due is null"),
    )
    op.create_index(
        "outbox_timers",
        "outbox",
        ["policy", "partition", "due", "stream", "version", "number"],
        postgresql_where=sa.text("kind = 'send' and sent_at is null and dead is null and due is not null"),
    )
    op.create_index(
        "outbox_posts",
        "outbox",
        ["target", "policy", "stream", "version", "number"],
        postgresql_where=sa.text("kind = 'post' and sent_at is null and dead is null"),
    )
    op.create_table(
        "activations",
        sa.Column("policy", sa.Text(collation="C"), nullable=False),
        sa.Column("number", sa.Integer(), autoincrement=False, nullable=False, comment="1, 2, 3, … of the policy"),
        sa.Column(
            "version",
            sa.Integer(),
            nullable=False,
            comment="in force from the positions on; 0: the policy was removed",
        ),
        sa.Column(
            "positions",
            postgresql.JSONB(),
            nullable=False,
            comment="{partition: [next_offset, epoch, seq, command_offset]}",
        ),
        sa.Column(
            "log_offset",
            sa.BigInteger(),
            nullable=True,
            comment="of its record in the topic of policies; null before it is there",
        ),
        sa.Column("at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.PrimaryKeyConstraint("policy", "number"),
        comment="Which version of a policy reacts to which events: a copy of the topic of policies",
    )
