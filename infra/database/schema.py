"""The tables that are not views: each agent's positions, the builds of views, and which build is live.

Declared for Alembic; the hot paths write their own SQL. `projections/engine/views/tables.py` declares the views' tables.
"""

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import JSONB

metadata = sa.MetaData()


def _now() -> sa.Column[object]:
    return sa.Column("at", sa.DateTime(timezone=True), nullable=False, server_default=sa.func.now())


positions = sa.Table(
    "positions",
    metadata,
    sa.Column("agent", sa.Text(collation="C"), primary_key=True),
    sa.Column("topic", sa.Text(collation="C"), primary_key=True),
    sa.Column("partition", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("topic_id", sa.Text, nullable=False),
    sa.Column("next_offset", sa.BigInteger, nullable=False),
    sa.Column("epoch", sa.BigInteger, nullable=False),
    sa.Column("seq", sa.BigInteger, nullable=False),
    sa.Column("command_offset", sa.BigInteger, nullable=False),
    sa.Column("generation", sa.Uuid, nullable=False),
    sa.Column("attempt", sa.JSON, comment="what an agent that started here folded first"),
    comment="How far each agent has folded each partition; the fence of every batch",
    postgresql_with={"fillfactor": "50"},
)

live = sa.Table(
    "live",
    metadata,
    sa.Column("view", sa.Text(collation="C"), primary_key=True),
    sa.Column("agent", sa.Text(collation="C"), nullable=False),
    sa.Column("version", sa.Integer, nullable=False),
    sa.Column("table_name", sa.Text(collation="C"), nullable=False, unique=True),
    comment="The pointer: which table readers of a view see",
)

stopped_views = sa.Table(
    "stopped_views",
    metadata,
    sa.Column("view", sa.Text(collation="C"), primary_key=True),
    sa.Column("agent", sa.Text(collation="C"), nullable=False),
    sa.Column("version", sa.Integer, nullable=False, comment="of the view, as its code had it"),
    sa.Column("table_name", sa.Text(collation="C"), nullable=False, comment="an old build, which a switch catches up"),
    sa.Column("stream", sa.Text(collation="C"), nullable=False),
    sa.Column("stream_version", sa.BigInteger, nullable=False),
    sa.Column("partition", sa.Integer, nullable=False),
    sa.Column("log_offset", sa.BigInteger, nullable=False, comment="of the event that the view can't take"),
    sa.Column("code", sa.Text, nullable=False),
    sa.Column("error", sa.Text, nullable=False),
    sa.Column("stopped_at", sa.DateTime(timezone=True), nullable=False, server_default=sa.func.now()),
    comment="Views that met an event they can't take and left their agent; in force while the view is not live",
)

command_types = sa.Table(
    "command_types",
    metadata,
    sa.Column("context", sa.Text(collation="C"), primary_key=True),
    sa.Column("type", sa.Text(collation="C"), primary_key=True),
    comment="The commands that some release's handlers decide: to those that do not know them, they are not malformed",
)

event_types = sa.Table(
    "event_types",
    metadata,
    sa.Column("type", sa.Text(collation="C"), primary_key=True),
    comment="The stored types of events that some release's agents can fold; handlers append no others",
)

BUILD_STATES = ("loading", "ready", "live", "old", "abandoned", "past-loading", "past")

builds = sa.Table(
    "builds",
    metadata,
    sa.Column("id", sa.Uuid, primary_key=True),
    sa.Column("view", sa.Text(collation="C"), nullable=False, index=True),
    sa.Column("version", sa.Integer, nullable=False),
    sa.Column("agent", sa.Text(collation="C"), nullable=False),
    sa.Column("table_name", sa.Text(collation="C"), nullable=False, unique=True),
    sa.Column("state", sa.Text, nullable=False),
    sa.Column("code_set", JSONB, nullable=False, comment="{view: version} of the code that made it"),
    sa.Column("shape", sa.Text, nullable=False, comment="fingerprint of columns and key, or of the state's fields"),
    sa.Column("created_at", sa.DateTime(timezone=True), nullable=False, server_default=sa.func.now()),
    sa.Column("as_of", sa.Text, comment="the moment that a build of the past shows: a time, or positions"),
    sa.CheckConstraint(sa.column("state").in_(BUILD_STATES), name="builds_state"),
    sa.CheckConstraint("as_of is not null or state not in ('past-loading', 'past')", name="builds_of_the_past"),
    comment="Each table of a view is one fold of one version",
)

build_positions = sa.Table(
    "build_positions",
    metadata,
    sa.Column("build", sa.Uuid, sa.ForeignKey("builds.id", ondelete="CASCADE"), primary_key=True),
    sa.Column("topic", sa.Text(collation="C"), primary_key=True),
    sa.Column("partition", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("next_offset", sa.BigInteger, nullable=False),
    sa.Column("epoch", sa.BigInteger, nullable=False),
    sa.Column("seq", sa.BigInteger, nullable=False),
    sa.Column("command_offset", sa.BigInteger, nullable=False),
    comment="While loading: the pin, up to which the parts fold. Then: how far the table has been folded",
)

build_parts = sa.Table(
    "build_parts",
    metadata,
    sa.Column("build", sa.Uuid, sa.ForeignKey("builds.id", ondelete="CASCADE"), primary_key=True),
    sa.Column("partition", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("rows", sa.BigInteger, nullable=False),
    _now(),
    comment="Parts of a build whose rows are loaded; written in the transaction that loads them",
)

parked = sa.Table(
    "parked",
    metadata,
    sa.Column("table_name", sa.Text(collation="C"), primary_key=True),
    sa.Column("stream", sa.Text(collation="C"), primary_key=True),
    sa.Column("view", sa.Text(collation="C"), nullable=False),
    sa.Column("partition", sa.Integer, nullable=False),
    sa.Column("since_offset", sa.BigInteger, nullable=False),
    sa.Column("since_version", sa.BigInteger, nullable=False),
    sa.Column("error", sa.Text, nullable=False),
    sa.Column("parked_at", sa.DateTime(timezone=True), nullable=False, server_default=sa.func.now()),
    comment="Streams whose events, from since_version on, are not in a table: the log holds them until replay or drop",
)

skips = sa.Table(
    "skips",
    metadata,
    sa.Column("view", sa.Text(collation="C"), primary_key=True),
    sa.Column("stream", sa.Text(collation="C"), primary_key=True),
    sa.Column("version", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("through", sa.BigInteger, nullable=False, comment="last version that is skipped, included"),
    sa.Column("partition", sa.Integer, nullable=False),
    sa.Column("reason", sa.Text, nullable=False),
    _now(),
    comment="Events that a view leaves out for good, in every later build too",
)

topics = sa.Table(
    "topics",
    metadata,
    sa.Column("topic", sa.Text(collation="C"), primary_key=True),
    sa.Column("topic_id", sa.Text, nullable=False),
    sa.Column("partitions", sa.Integer, nullable=False),
    sa.Column("partitioner", sa.Text, nullable=False),
    sa.Column(
        "archive", sa.Text, comment="the identity of its archive, which stands there too; null before there is one"
    ),
    comment="The contract: positions mean nothing in another topic, with other partitions or another partitioner",
)

outbox = sa.Table(
    "outbox",
    metadata,
    sa.Column("id", sa.Text(collation="C"), primary_key=True, comment="of the command: `<policy>~…`"),
    sa.Column("policy", sa.Text(collation="C"), nullable=False),
    sa.Column("kind", sa.Text, comment="send, or dropped; null while only the outcome is known"),
    sa.Column("partition", sa.Integer, comment="of the event that the wish came from, like stream and version"),
    sa.Column("stream", sa.Text(collation="C")),
    sa.Column("version", sa.BigInteger),
    sa.Column("number", sa.Integer, comment="of the wish among those of one event: 0, 1, 2, …"),
    sa.Column("target", sa.Text(collation="C"), comment="the command's stream"),
    sa.Column("type", sa.Text),
    sa.Column("body", sa.Text, comment="JSON"),
    sa.Column("fingerprint", sa.Text, comment="of the command; null where its body is made later"),
    sa.Column("due", sa.DateTime(timezone=True)),
    sa.Column("depth", sa.Integer, comment="how many wishes led to this one since the last timer or client"),
    sa.Column("correlation_id", sa.Text),
    sa.Column("causation_id", sa.Text),
    sa.Column("wished_at", sa.DateTime(timezone=True), comment="the broker's time of the event"),
    sa.Column("then_type", sa.Text),
    sa.Column("then_body", sa.Text),
    sa.Column("then_fingerprint", sa.Text),
    sa.Column("otherwise_type", sa.Text),
    sa.Column("otherwise_body", sa.Text, comment="JSON, without the refusal"),
    sa.Column("otherwise_fingerprint", sa.Text, comment="null where the refusal becomes a field of it"),
    *(sa.Column(name, sa.Text) for name in ("later_type", "later_body", "later_fingerprint")),
    sa.Column("after_ms", sa.BigInteger, comment="from the last answer until `later` is due"),
    sa.Column("expected", sa.Text, comment="codes of rejections that need no follow-up, each after a space; * is all"),
    sa.Column("outcome", sa.Text, comment="accepted or rejected; null while only the wish is known"),
    sa.Column("refusal", sa.Text, comment="the rejection's code"),
    sa.Column("outcome_depth", sa.Integer),
    sa.Column("outcome_fingerprint", sa.Text, comment="and the stream that decided it"),
    sa.Column("sent_at", sa.DateTime(timezone=True), comment="acknowledged by Kafka"),
    sa.Column("dead", sa.Text, comment="why it is a dead letter: a code and what happened"),
    sa.Index(
        "outbox_unsent",
        *("policy", "partition", "stream", "version", "number"),
        postgresql_where=sa.text("kind = 'send' and sent_at is null and dead is null and due is null"),
    ),
    sa.Index(
        "outbox_timers",
        *("policy", "partition", "due", "stream", "version", "number"),
        postgresql_where=sa.text("kind = 'send' and sent_at is null and dead is null and due is not null"),
    ),
    sa.Index("outbox_dead", "policy", "stream", postgresql_where=sa.text("dead is not null")),
    # a process of an older release, which would write posts here, must not do so unnoticed
    sa.CheckConstraint("kind <> 'post'", "outbox_has_no_posts"),
    comment="Wishes of policies under way, and outcomes whose wish has not been read yet",
    postgresql_with={"fillfactor": "50"},
)

relay_leases = sa.Table(
    "relay_leases",
    metadata,
    sa.Column("policy", sa.Text(collation="C"), primary_key=True),
    sa.Column("partition", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("holder", sa.Text, nullable=False),
    sa.Column("until", sa.DateTime(timezone=True), nullable=False),
    comment="Which process sends the commands that a policy wished in a partition; others may when it has ended",
)

posts = sa.Table(
    "posts",
    metadata,
    sa.Column("id", sa.Text(collation="C"), primary_key=True, comment="of the webhook: `<policy>~…`"),
    sa.Column("policy", sa.Text(collation="C"), nullable=False),
    sa.Column("stream", sa.Text(collation="C"), nullable=False, comment="of the event that it came from, like version"),
    sa.Column("version", sa.BigInteger, nullable=False),
    sa.Column("number", sa.Integer, nullable=False, comment="of the wish among those of one event: 0, 1, 2, …"),
    sa.Column("endpoint", sa.Text(collation="C"), comment="null where it is no valid name"),
    sa.Column("body", sa.Text, comment="JSON; null where it can't be sent"),
    sa.Column("wished_at", sa.DateTime(timezone=True), nullable=False, comment="the broker's time of the event"),
    sa.Column("attempts", sa.Integer, nullable=False, server_default="0"),
    sa.Column("dead", sa.Text, comment="why it is a dead letter: a code and what happened"),
    sa.Index(
        "posts_in_order",
        *("endpoint", "policy", "stream", "version", "number"),
        postgresql_where=sa.text("dead is null"),
    ),
    sa.Index("posts_by_age", "wished_at", "id"),
    sa.Index("posts_dead", "wished_at", "id", postgresql_where=sa.text("dead is not null")),
    comment="Webhooks of policies that no endpoint has taken yet, and dead letters",
)

lanes = sa.Table(
    "lanes",
    metadata,
    *(sa.Column(name, sa.Text(collation="C"), primary_key=True) for name in ("endpoint", "policy", "stream")),
    sa.Column("next_attempt", sa.DateTime(timezone=True), nullable=False, comment="or the end of its lease"),
    sa.Column("claimed", sa.Boolean, nullable=False, server_default=sa.false(), comment="it has a lease"),
    sa.Index("lanes_due", "endpoint", "next_attempt"),
    comment="Of one policy, endpoint and stream: when its next post goes out. A row for each that has posts, without dead letters",
)

activations = sa.Table(
    "activations",
    metadata,
    sa.Column("policy", sa.Text(collation="C"), primary_key=True),
    sa.Column("number", sa.Integer, primary_key=True, autoincrement=False, comment="1, 2, 3, … of the policy"),
    sa.Column(
        "version", sa.Integer, nullable=False, comment="in force from the positions on; 0: the policy was removed"
    ),
    sa.Column("positions", JSONB, nullable=False, comment="{partition: [next_offset, epoch, seq, command_offset]}"),
    sa.Column("log_offset", sa.BigInteger, comment="of its record in the topic of policies; null before it is there"),
    _now(),
    sa.Column(
        "posts_from",
        sa.DateTime(timezone=True),
        server_default=sa.text("'-infinity'"),
        comment="posts are made of events since then; null: held, as the database is new",
    ),
    comment="Which version of a policy reacts to which events: a copy of the topic of policies",
)

personal_keys = sa.Table(
    "personal_keys",
    metadata,
    sa.Column("id", sa.Text(collation="C"), primary_key=True, comment="random"),
    sa.Column("subject", sa.Text(collation="C"), nullable=False),
    sa.Column("master", sa.Text, nullable=False, comment="the master key's name"),
    sa.Column("wrapped", sa.LargeBinary, comment="the key, encrypted with the master key; null: destroyed"),
    sa.Column("at_offset", sa.BigInteger, nullable=False, comment="a subject's first key seals"),
    sa.Index("personal_keys_subject", "subject", "at_offset"),
    comment="A copy of the topic of keys: what personal values are sealed with",
)

forgotten_subjects = sa.Table(
    "forgotten_subjects",
    metadata,
    sa.Column("subject", sa.Text(collation="C"), primary_key=True),
    sa.Column("at_offset", sa.BigInteger, nullable=False),
    comment="A copy of the topic of keys: who is forgotten, for good",
)

keys_position = sa.Table(
    "keys_position",
    metadata,
    sa.Column("topic_id", sa.Text, primary_key=True),
    sa.Column("next_offset", sa.BigInteger, nullable=False),
    comment="How far the topic of keys is copied; one row",
)

archive_files = sa.Table(
    "archive_files",
    metadata,
    sa.Column("topic", sa.Text(collation="C"), primary_key=True),
    sa.Column("partition", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("first_offset", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("end_offset", sa.BigInteger, nullable=False),
    sa.Column("follows", sa.BigInteger, comment="end_offset of the file before it; null in the first"),
    sa.Column("topic_id", sa.Text, nullable=False),
    sa.Column("path", sa.Text, nullable=False, comment="below archive_url"),
    sa.Column("rows", sa.BigInteger, nullable=False),
    sa.Column("bytes", sa.BigInteger, nullable=False),
    sa.Column("sha256", sa.Text, nullable=False, comment="of the file"),
    sa.Column("last_ms", sa.BigInteger, comment="newest record's time, ms since the epoch; null without records"),
    sa.Column("epoch", sa.BigInteger, nullable=False, comment="reading state before the first record"),
    sa.Column("seq", sa.BigInteger, nullable=False),
    sa.Column("command_offset", sa.BigInteger, nullable=False),
    sa.Column("end_epoch", sa.BigInteger, nullable=False, comment="reading state after the last record"),
    sa.Column("end_seq", sa.BigInteger, nullable=False),
    sa.Column("end_command_offset", sa.BigInteger, nullable=False),
    _now(),
    # with the primary key, these make a chain out of a partition's files: no gap, no overlap, no second one from anywhere
    sa.UniqueConstraint("topic", "partition", "end_offset", name="archive_files_end"),
    sa.ForeignKeyConstraint(
        ["topic", "partition", "follows"],
        ["archive_files.topic", "archive_files.partition", "archive_files.end_offset"],
        name="archive_files_chain",
    ),
    sa.CheckConstraint("follows IS NOT DISTINCT FROM nullif(first_offset, 0)", name="archive_files_follows"),
    sa.CheckConstraint("end_offset > first_offset", name="archive_files_range"),
    comment="The archive's manifest: which files hold the log's records, partition by partition from offset 0 on",
)
