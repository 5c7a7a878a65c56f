"""sources: positions in other services' topics, and the ids of messages that were received"""

from alembic import op

revision = "5b7d20c4e9a1"
down_revision = "d81f4b06a7c3"

COMMENTS = {
    "table source_positions": "How far each source has received each partition of its topic; the fence of every batch",
    "column source_positions.activation": "the policy's newest that its last reader knew: a later one fences it",
    "table received_messages": "Messages whose own id counts: one that is repeated leads to nothing",
    "column received_messages.id": "a digest of the message's own id",
    "column activations.messages": "of a source: the same in its topic, {topic_id, offsets: {partition: offset}}",
    "column outbox.trace": "of a source's wish: its message's traceparent",
    "column outbox.kind": "send, or dropped; message: can't be received; null while only the outcome is known",
    "column outbox.partition": "of the event that the wish came from, like stream and version; of a source's: target's",
    "column outbox.stream": "of a source's wish: target; of a message: topic and partition",
    "column outbox.version": "of a source's wish, and of a message: the message's offset",
}


def upgrade() -> None:
    op.execute("""
        create table source_positions (
          policy text collate "C", partition int, topic_id text not null, next_offset bigint not null,
          activation int not null, primary key (policy, partition)) with (fillfactor = 50)""")
    op.execute('create table received_messages (policy text collate "C", id bytea, primary key (policy, id))')
    op.execute("alter table activations add messages jsonb")
    op.execute("alter table outbox add trace text")
    for what, comment in COMMENTS.items():
        op.execute(f"comment on {what} is $${comment}$$")
