"""make test: pure. What stands in the topics: written and read back the same, the envelope first, everything else refused; and in
which partition: as Kafka's Java clients compute it, since where a stream lives must not depend on who produces.
"""

import json
from datetime import UTC, datetime

import msgspec
import pytest
from aiokafka import partitioner
from hypothesis import given
from hypothesis import strategies as st

from infra.log.partitioner import murmur2, partition_of
from infra.log.records import (
    ENVELOPE,
    Command,
    Commit,
    EventRecord,
    Opening,
    Reason,
    Record,
    decode_command,
    decode_event,
    encode,
    time_of,
)

COMMIT = Commit(
    stream="accounts/576",
    version=3,
    events=[EventRecord("MoneyDeposited", msgspec.Raw(b'{"cents":100}'))],
    command_id="t171812",
    command_offset=41,
    fingerprint="f",
    outcome="accepted",
    reason=None,
    epoch=17,
    seq=2,
)
REJECTED = msgspec.structs.replace(
    COMMIT, events=[], outcome="rejected", reason=Reason("insufficient-funds", "Not enough.")
)
OPENING = Opening(writer="handler-1", commands_topic_id="id")
COMMAND = Command(id="t171812", stream="accounts/576", type="Deposit", data=msgspec.Raw(b'{"cents":100}'))

text = st.text(st.characters(exclude_categories=["Cs"]))
bodies = st.dictionaries(text, st.integers() | text | st.none()).map(
    lambda body: msgspec.Raw(msgspec.json.encode(body))
)
commits = st.builds(
    Commit,
    stream=text,
    version=st.integers(0, 2**63 - 1),
    events=st.lists(st.builds(EventRecord, text, bodies)),
    command_id=text,
    command_offset=st.integers(0, 2**63 - 1),
    fingerprint=text,
    outcome=st.sampled_from(["accepted", "rejected"]),
    reason=st.none() | st.builds(Reason, text, text),
    epoch=st.integers(-1, 2**63 - 1),
    seq=st.integers(0, 2**63 - 1),
)


def at(value: bytes | None) -> Record:
    return Record(partition=0, offset=0, time_ms=0, key=None, value=value)


@given(commits | st.builds(Opening, text, text))
def test_what_is_written_to_events_is_read_back_the_same(record: Commit | Opening) -> None:
    assert decode_event(at(encode(record))) == record


@given(st.builds(Command, text, text, text, bodies, st.none() | st.integers()))
def test_what_is_written_to_commands_is_read_back_the_same(command: Command) -> None:
    assert decode_command(encode(command)) == command


@pytest.mark.parametrize(
    ("record", "stored"),  # a topic written today is read for ever: a changed form needs a new number
    [
        (
            COMMIT,
            '{"samefold":"commit/1","stream":"accounts/576","version":3,'
            '"events":[{"type":"MoneyDeposited","data":{"cents":100}}],"command_id":"t171812","command_offset":41,'
            '"fingerprint":"f","outcome":"accepted","reason":null,"epoch":17,"seq":2}',
        ),
        (
            REJECTED,
            '{"samefold":"commit/1","stream":"accounts/576","version":3,"events":[],"command_id":"t171812",'
            '"command_offset":41,"fingerprint":"f","outcome":"rejected",'
            '"reason":{"code":"insufficient-funds","message":"Not enough."},"epoch":17,"seq":2}',
        ),
        (OPENING, '{"samefold":"opening/1","writer":"handler-1","commands_topic_id":"id"}'),
        (
            COMMAND,
            '{"samefold":"command/1","id":"t171812","stream":"accounts/576","type":"Deposit",'
            '"data":{"cents":100},"expected_version":null}',
        ),
    ],
)
def test_stored_forms_never_change(record: Commit | Opening | Command, stored: str) -> None:
    assert encode(record).decode() == stored
    assert encode(record).startswith(ENVELOPE)


def test_unknown_members_of_a_known_format_are_ignored_and_a_command_may_leave_out_its_expected_version() -> None:
    later = json.loads(encode(COMMIT)) | {"trace": "4bf92f"}
    assert decode_event(at(msgspec.json.encode(later))) == COMMIT
    assert decode_command(encode(COMMAND).replace(b',"expected_version":null', b"")) == COMMAND


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"null",
        b"[]",
        b'{"id":"a","stream":"accounts/1","type":"Deposit","data":{}}',
        encode(COMMAND).replace(b"command/1", b"command/2"),
        encode(COMMIT),
        encode(OPENING),
    ],
)
def test_nothing_else_is_a_command(value: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_command(value)


def test_the_brokers_time_is_aware_and_in_utc() -> None:
    assert time_of(757_382_400_123) == datetime(1994, 1, 1, 0, 0, 0, 123_000, tzinfo=UTC)
    assert time_of(0).tzinfo is UTC


# Kafka's own UtilsTest.testMurmur2
GOLDEN = {
    "21": -973932308,
    "foobar": -790332482,
    "a-little-bit-long-string": -985981536,
    "a-little-bit-longer-string": -1486304829,
    "lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
    "abc": 479470107,
}


@pytest.mark.parametrize(("key", "expected"), GOLDEN.items())
def test_the_hash_is_javas_and_the_partition_is_the_positive_one_modulo_their_number(key: str, expected: int) -> None:
    assert (murmur2(key.encode()) + 2**31) % 2**32 - 2**31 == expected
    for partitions in (1, 2, 3, 8, 4096):
        assert partition_of(key, partitions) == (expected & 0x7FFFFFFF) % partitions


@given(st.binary())
def test_it_is_the_hash_that_agents_would_produce_with(key: bytes) -> None:
    assert murmur2(key) == partitioner.murmur2(key) & 0xFFFFFFFF
