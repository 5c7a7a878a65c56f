"""The tables that are not views: each agent's positions, the builds of views, and which build is live.

Declared for Alembic; the hot paths write their own SQL. `projections/engine/views/tables.py` declares the views' tables.
"""

from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import JSONB

metadata = sa.MetaData()

NAME = sa.Text(collation="C")
"""Names and ids, whose order is that of their bytes in every database."""
INTEGER, BIG, TEXT, TIME = sa.Integer, sa.BigInteger, sa.Text, sa.DateTime(timezone=True)
READING = ("next_offset", "epoch", "seq", "command_offset")
"""The columns of a `Reading` (`infra/log/rule.py`)."""


def table(name: str, *parts: Any, **options: Any) -> sa.Table:
    flat = (one for part in parts for one in (part if isinstance(part, list) else [part]))
    return sa.Table(name, metadata, *flat, **options)


def key(kind: Any, *names: str, **options: Any) -> list[sa.Column[Any]]:
    """Columns of the primary key."""
    return [sa.Column(name, kind, primary_key=True, autoincrement=False, **options) for name in names]


def required(kind: Any, *names: str, **options: Any) -> list[sa.Column[Any]]:
    """Columns that are never null."""
    return [sa.Column(name, kind, nullable=False, **options) for name in names]


def nullable(kind: Any, *names: str, **options: Any) -> list[sa.Column[Any]]:
    """Columns that may be null."""
    return [sa.Column(name, kind, **options) for name in names]


def now(name: str = "at") -> list[sa.Column[Any]]:
    """When the row was written."""
    return required(TIME, name, server_default=sa.func.now())


positions = table(
    "positions",
    key(NAME, "agent", "topic"),
    key(INTEGER, "partition"),
    required(TEXT, "topic_id"),
    required(BIG, *READING),
    required(sa.Uuid, "generation"),
    nullable(sa.JSON, "attempt", comment="what an agent that started here folded first"),
    comment="How far each agent has folded each partition; the fence of every batch",
    postgresql_with={"fillfactor": "50"},
)

live = table(
    "live",
    key(NAME, "view"),
    required(NAME, "agent"),
    required(INTEGER, "version"),
    required(NAME, "table_name", unique=True),
    comment="The pointer: which table readers of a view see",
)

stopped_views = table(
    "stopped_views",
    key(NAME, "view"),
    required(NAME, "agent"),
    required(INTEGER, "version", comment="of the view, as its code had it"),
    required(NAME, "table_name", comment="an old build, which a switch catches up"),
    required(NAME, "stream"),
    required(BIG, "stream_version"),
    required(INTEGER, "partition"),
    required(BIG, "log_offset", comment="of the event that the view can't take"),
    required(TEXT, "code", "error"),
    now("stopped_at"),
    comment="Views that met an event they can't take and left their agent; in force while the view is not live",
)

command_types = table(
    "command_types",
    key(NAME, "context", "type"),
    comment="The commands that some release's handlers decide: to those that do not know them, they are not malformed",
)

event_types = table(
    "event_types",
    key(NAME, "type"),
    comment="The stored types of events that some release's agents can fold; handlers append no others",
)

BUILD_STATES = ("loading", "ready", "live", "old", "abandoned", "past-loading", "past")

builds = table(
    "builds",
    key(sa.Uuid, "id"),
    required(NAME, "view", index=True),
    required(INTEGER, "version"),
    required(NAME, "agent"),
    required(NAME, "table_name", unique=True),
    required(TEXT, "state"),
    required(JSONB, "code_set", comment="{view: version} of the code that made it"),
    required(TEXT, "shape", comment="fingerprint of columns and key, or of the state's fields"),
    now("created_at"),
    nullable(TEXT, "as_of", comment="the moment that a build of the past shows: a time, or positions"),
    sa.CheckConstraint(sa.column("state").in_(BUILD_STATES), name="builds_state"),
    sa.CheckConstraint("as_of is not null or state not in ('past-loading', 'past')", name="builds_of_the_past"),
    comment="Each table of a view is one fold of one version",
)

build_positions = table(
    "build_positions",
    sa.Column("build", sa.Uuid, sa.ForeignKey("builds.id", ondelete="CASCADE"), primary_key=True),
    key(NAME, "topic"),
    key(INTEGER, "partition"),
    required(BIG, *READING),
    comment="While loading: the pin, up to which the parts fold. Then: how far the table has been folded",
)

build_parts = table(
    "build_parts",
    sa.Column("build", sa.Uuid, sa.ForeignKey("builds.id", ondelete="CASCADE"), primary_key=True),
    key(INTEGER, "partition"),
    key(INTEGER, "share", server_default="0"),
    key(INTEGER, "shares", server_default="1"),
    required(BIG, "rows"),
    now(),
    comment="Parts of a build whose rows are loaded; written in the transaction that loads them",
)

parked = table(
    "parked",
    key(NAME, "table_name", "stream"),
    required(NAME, "view"),
    required(INTEGER, "partition"),
    required(BIG, "since_offset", "since_version"),
    required(TEXT, "error"),
    now("parked_at"),
    comment="Streams whose events, from since_version on, are not in a table: the log holds them until replay or drop",
)

skips = table(
    "skips",
    key(NAME, "view", "stream"),
    key(BIG, "version"),
    required(BIG, "through", comment="last version that is skipped, included"),
    required(INTEGER, "partition"),
    required(TEXT, "reason"),
    now(),
    comment="Events that a view leaves out for good, in every later build too",
)

topics = table(
    "topics",
    key(NAME, "topic"),
    required(TEXT, "topic_id"),
    required(INTEGER, "partitions"),
    required(TEXT, "partitioner"),
    nullable(TEXT, "archive", comment="the identity of its archive, which stands there too; null before there is one"),
    comment="The contract: positions mean nothing in another topic, with other partitions or another partitioner",
)

outbox = table(
    "outbox",
    key(NAME, "id", comment="of the command: `<policy>~…`"),
    required(NAME, "policy"),
    nullable(
        TEXT, "kind", comment="send, or dropped; message: can't be received; null while only the outcome is known"
    ),
    nullable(
        INTEGER,
        "partition",
        comment="of the event that the wish came from, like stream and version; of a source's: target's",
    ),
    nullable(NAME, "stream", comment="of a source's wish: target; of a message: topic and partition"),
    nullable(BIG, "version", comment="of a source's wish, and of a message: the message's offset"),
    nullable(INTEGER, "number", comment="of the wish among those of one event: 0, 1, 2, …"),
    nullable(NAME, "target", comment="the command's stream"),
    nullable(TEXT, "type"),
    nullable(TEXT, "body", comment="JSON"),
    nullable(TEXT, "fingerprint", comment="of the command; null where its body is made later"),
    nullable(TIME, "due"),
    nullable(INTEGER, "depth", comment="how many wishes led to this one since the last timer or client"),
    nullable(TEXT, "correlation_id", "causation_id"),
    nullable(TEXT, "trace", comment="of a source's wish: its message's traceparent"),
    nullable(TIME, "wished_at", comment="the broker's time of the event"),
    nullable(TEXT, "then_type", "then_body", "then_fingerprint"),
    nullable(TEXT, "otherwise_type"),
    nullable(TEXT, "otherwise_body", comment="JSON, without the refusal"),
    nullable(TEXT, "otherwise_fingerprint", comment="null where the refusal becomes a field of it"),
    nullable(TEXT, "later_type", "later_body", "later_fingerprint"),
    nullable(BIG, "after_ms", comment="from the last answer until `later` is due"),
    nullable(TEXT, "expected", comment="codes of rejections that need no follow-up, each after a space; * is all"),
    nullable(TEXT, "outcome", comment="accepted or rejected; null while only the wish is known"),
    nullable(TEXT, "refusal", comment="the rejection's code"),
    nullable(INTEGER, "outcome_depth"),
    nullable(TEXT, "outcome_fingerprint", comment="and the stream that decided it"),
    nullable(TIME, "sent_at", comment="acknowledged by Kafka"),
    nullable(TEXT, "dead", comment="why it is a dead letter: a code and what happened"),
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

relay_leases = table(
    "relay_leases",
    key(NAME, "policy"),
    key(INTEGER, "partition"),
    required(TEXT, "holder"),
    required(TIME, "until"),
    comment="Which process sends the commands that a policy wished in a partition; others may when it has ended",
)

posts = table(
    "posts",
    key(NAME, "id", comment="of the webhook: `<policy>~…`"),
    required(NAME, "policy"),
    required(NAME, "stream", comment="of the event that it came from, like version"),
    required(BIG, "version"),
    required(INTEGER, "number", comment="of the wish among those of one event: 0, 1, 2, …"),
    nullable(NAME, "endpoint", comment="null where it is no valid name"),
    nullable(TEXT, "body", comment="JSON; null where it can't be sent"),
    required(TIME, "wished_at", comment="the broker's time of the event"),
    required(INTEGER, "attempts", server_default="0"),
    nullable(TEXT, "dead", comment="why it is a dead letter: a code and what happened"),
    sa.Index(
        "posts_in_order",
        *("endpoint", "policy", "stream", "version", "number"),
        postgresql_where=sa.text("dead is null"),
    ),
    sa.Index("posts_by_age", "wished_at", "id"),
    sa.Index("posts_dead", "wished_at", "id", postgresql_where=sa.text("dead is not null")),
    comment="Webhooks of policies that no endpoint has taken yet, and dead letters",
)

lanes = table(
    "lanes",
    key(NAME, "endpoint", "policy", "stream"),
    required(TIME, "next_attempt", comment="or the end of its lease"),
    required(sa.Boolean, "claimed", server_default=sa.false(), comment="it has a lease"),
    sa.Index("lanes_due", "endpoint", "next_attempt"),
    comment="Of one policy, endpoint and stream: when its next post goes out. A row for each that has posts, without dead letters",
)

activations = table(
    "activations",
    key(NAME, "policy"),
    key(INTEGER, "number", comment="1, 2, 3, … of the policy"),
    required(INTEGER, "version", comment="in force from the positions on; 0: the policy was removed"),
    required(JSONB, "positions", comment="{partition: [next_offset, epoch, seq, command_offset]}"),
    nullable(BIG, "log_offset", comment="of its record in the topic of policies; null before it is there"),
    now(),
    nullable(
        TIME,
        "posts_from",
        server_default=sa.text("'-infinity'"),
        comment="posts are made of events since then; null: held, as the database is new",
    ),
    nullable(JSONB, "messages", comment="of a source: the same in its topic, {topic_id, offsets: {partition: offset}}"),
    comment="Which version of a policy reacts to which events: a copy of the topic of policies",
)

source_positions = table(
    "source_positions",
    key(NAME, "policy"),
    key(INTEGER, "partition"),
    required(TEXT, "topic_id"),
    required(BIG, "next_offset"),
    required(INTEGER, "activation", comment="the policy's newest that its last reader knew: a later one fences it"),
    nullable(sa.JSON, "attempt", comment="what a process that began here received first: [from, to, number, code]"),
    comment="How far each source has received each partition of its topic; the fence of every batch",
    postgresql_with={"fillfactor": "50"},
)

received_messages = table(
    "received_messages",
    key(NAME, "policy"),
    key(sa.LargeBinary, "id", comment="a digest of the message's own id"),
    comment="Messages whose own id counts: one that is repeated leads to nothing",
)

personal_keys = table(
    "personal_keys",
    key(NAME, "id", comment="random"),
    required(NAME, "subject"),
    required(TEXT, "master", comment="the master key's name"),
    nullable(sa.LargeBinary, "wrapped", comment="the key, encrypted with the master key; null: destroyed"),
    required(BIG, "at_offset", comment="a subject's first key seals"),
    sa.Index("personal_keys_subject", "subject", "at_offset"),
    comment="A copy of the topic of keys: what personal values are sealed with",
)

forgotten_subjects = table(
    "forgotten_subjects",
    key(NAME, "subject"),
    required(BIG, "at_offset"),
    comment="A copy of the topic of keys: who is forgotten, for good",
)

keys_position = table(
    "keys_position",
    key(TEXT, "topic_id"),
    required(BIG, "next_offset"),
    comment="How far the topic of keys is copied; one row",
)

archive_files = table(
    "archive_files",
    key(NAME, "topic"),
    key(INTEGER, "partition"),
    key(BIG, "first_offset"),
    required(BIG, "end_offset"),
    nullable(BIG, "follows", comment="end_offset of the file before it; null in the first"),
    required(TEXT, "topic_id"),
    required(TEXT, "path", comment="below archive_url"),
    required(BIG, "rows", "bytes"),
    required(TEXT, "sha256", comment="of the file"),
    nullable(BIG, "last_ms", comment="newest record's time, ms since the epoch; null without records"),
    required(BIG, "epoch", comment="reading state before the first record"),
    required(BIG, "seq", "command_offset"),
    required(BIG, "end_epoch", comment="reading state after the last record"),
    required(BIG, "end_seq", "end_command_offset"),
    now(),
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

log_marks = table(
    "log_marks",
    key(NAME, "topic"),
    key(TEXT, "topic_id"),
    key(INTEGER, "partition"),
    key(BIG, "number"),
    required(BIG, *READING),
    comment="Reading states at offsets of the log, from which a reader may begin",
)

operator_actions = table(
    "operator_actions",
    key(sa.Uuid, "id", comment="of the form: one that is sent twice acts once"),
    now(),
    nullable(TEXT, "by", comment="the caller's subject; null without SAMEFOLD_AUTH"),
    required(TEXT, "command", comment="as one types it"),
    nullable(TIME, "ended_at"),
    nullable(INTEGER, "exit_code", comment="null while it runs, and where nobody saw its end"),
    nullable(TEXT, "output"),
    sa.Index("operator_actions_at", "at", "id"),
    comment="What callers of the console had done: commands of samefold, by whom, and what became of them",
)
