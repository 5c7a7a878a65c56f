"""posts in a table of their own, what follows a refusal, timers that guard, leases of relays, and from when on posts are made"""

import sqlalchemy as sa
from alembic import op

revision = "c30f5e7a9d43"
down_revision = "d3a90f57be16"


def upgrade() -> None:
    op.create_table(
        "posts",
        sa.Column("id", sa.Text(collation="C"), nullable=False, comment="of the webhook: `<policy>~…`"),
        sa.Column("policy", sa.Text(collation="C"), nullable=False),
        sa.Column(
            "stream", sa.Text(collation="C"), nullable=False, comment="of the event that it came from, like version"
        ),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False, comment="of the wish among those of one event: 0, 1, 2, …"),
        sa.Column("endpoint", sa.Text(collation="C"), comment="null where it is no valid name"),
        sa.Column("body", sa.Text(), comment="JSON; null where it can't be sent"),
        sa.Column("wished_at", sa.DateTime(timezone=True), nullable=False, comment="the broker's time of the event"),
        sa.Column("attempts", sa.Integer(), server_default="0", nullable=False),
        sa.Column("dead", sa.Text(), comment="why it is a dead letter: a code and what happened"),
        sa.PrimaryKeyConstraint("id"),
        comment="Webhooks of policies that no endpoint has taken yet, and dead letters",
    )
    op.create_table(
        "lanes",
        *(sa.Column(name, sa.Text(collation="C"), nullable=False) for name in ("endpoint", "policy", "stream")),
        sa.Column("next_attempt", sa.DateTime(timezone=True), nullable=False, comment="or the end of its lease"),
        sa.Column("claimed", sa.Boolean(), server_default=sa.false(), nullable=False, comment="it has a lease"),
        sa.PrimaryKeyConstraint("endpoint", "policy", "stream"),
        comment="Of one policy, endpoint and stream: when its next post goes out. "
        "A row for each that has posts, without dead letters",
    )
    op.execute("""
        with moved as (delete from outbox where kind = 'post' returning *),
        heads as (
          insert into lanes (endpoint, policy, stream, next_attempt)
          select distinct on (target, policy, stream) target, policy, stream, coalesce(next_attempt, least(wished_at, now()))
            from moved where dead is null order by target, policy, stream, version, number)
        insert into posts (id, policy, stream, version, number, endpoint, body, wished_at, attempts, dead)
        select id, policy, stream, version, number, target, body, wished_at, attempts, dead from moved""")
    op.create_index(
        "posts_in_order",
        "posts",
        ["endpoint", "policy", "stream", "version", "number"],
        postgresql_where=sa.text("dead is null"),
    )
    op.create_index("posts_by_age", "posts", ["wished_at", "id"])
    op.create_index("posts_dead", "posts", ["wished_at", "id"], postgresql_where=sa.text("dead is not null"))
    op.create_index("lanes_due", "lanes", ["endpoint", "next_attempt"])
    op.drop_index("outbox_posts", "outbox")
    op.drop_column("outbox", "attempts")
    op.drop_column("outbox", "next_attempt")
    op.create_check_constraint("outbox_has_no_posts", "outbox", "kind <> 'post'")
    for column, comment in (
        ("id", "of the command: `<policy>~…`"),
        ("kind", "send, or dropped; null while only the outcome is known"),
        ("target", "the command's stream"),
        ("sent_at", "acknowledged by Kafka"),
    ):
        op.alter_column("outbox", column, comment=comment)
    expected = "codes of rejections that need no follow-up, each after a space; * is all"
    for column in (
        *(sa.Column(name, sa.Text(), nullable=True) for name in ("later_type", "later_body", "later_fingerprint")),
        sa.Column("after_ms", sa.BigInteger(), nullable=True, comment="from the last answer until `later` is due"),
        sa.Column("expected", sa.Text(), nullable=True, comment=expected),
    ):
        op.add_column("outbox", column)
    # what is under way ends as it was written: without a word where it is rejected
    op.execute("update outbox set expected = '*' where kind is not null")
    op.create_index("outbox_dead", "outbox", ["policy", "stream"], postgresql_where=sa.text("dead is not null"))
    op.create_table(
        "relay_leases",
        sa.Column("policy", sa.Text(collation="C"), nullable=False),
        sa.Column("partition", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("holder", sa.Text(), nullable=False),
        sa.Column("until", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("policy", "partition"),
        comment="Which process sends the commands that a policy wished in a partition; others may when it has ended",
    )
    at = sa.DateTime(timezone=True)
    comment = "posts are made of events since then; null: held, as the database is new"
    op.add_column("activations", sa.Column("posts_from", at, server_default=sa.text("'-infinity'"), comment=comment))
