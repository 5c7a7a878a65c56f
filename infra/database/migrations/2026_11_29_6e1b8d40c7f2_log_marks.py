"""marks: reading states at offsets of the log"""

from alembic import op

revision = "6e1b8d40c7f2"
down_revision = "c30f5e7a9d43"


def upgrade() -> None:
    op.execute("""
        create table log_marks (
          topic text collate "C", topic_id text, partition int, number bigint,
          next_offset bigint not null, epoch bigint not null, seq bigint not null, command_offset bigint not null,
          primary key (topic, topic_id, partition, number))""")
    op.execute("comment on table log_marks is 'Reading states at offsets of the log, from which a reader may begin'")
