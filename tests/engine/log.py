"""Short ways to write records of `events` down in a test."""

from collections.abc import Sequence

from infra.log.records import Commit, EventRecord, Opening, Reason, Record, encode

TOPIC_ID = "topic-of-commands"


def opening(writer: str = "w", topic_id: str = TOPIC_ID) -> bytes:
    return encode(Opening(writer=writer, commands_topic_id=topic_id))


def commit(
    epoch: int,
    seq: int,
    *,
    stream: str = "purse/1",
    version: int = 0,
    events: Sequence[EventRecord] = (),
    command_id: str = "",
    command_offset: int = 0,
    reason: Reason | None = None,
) -> bytes:
    return encode(
        Commit(
            stream=stream,
            version=version,
            events=list(events),
            command_id=command_id or f"{epoch}/{seq}",
            command_offset=command_offset,
            fingerprint="f" * 32,
            outcome="rejected" if reason else "accepted",
            reason=reason,
            epoch=epoch,
            seq=seq,
        )
    )


def records(values: Sequence[bytes | None], start: int = 0) -> list[Record]:
    """The values as records of partition 0 with the offsets from `start` on; the broker's time is 1000 ms per offset."""
    return [Record(0, offset, offset * 1000, None, value) for offset, value in enumerate(values, start)]
