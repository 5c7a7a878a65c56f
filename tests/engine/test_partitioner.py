"""murmur2, as Kafka's Java clients compute it: where a stream lives must not depend on who produces."""

from typing import Any

import pytest
from aiokafka import partitioner
from confluent_kafka import KafkaError, Message, Producer
from hypothesis import given
from hypothesis import strategies as st

from infra.log.partitioner import LIBRDKAFKA_NAME, murmur2, partition_of

# Kafka's own UtilsTest.testMurmur2
GOLDEN = {
    "21": -973932308,
    "foobar": -790332482,
    "a-little-bit-long-string": -985981536,
    "a-little-bit-longer-string": -1486304829,
    "lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
    "abc": 479470107,
}
# every length modulo four, bytes above 127, and enough of them that no other hash could agree by chance
STREAMS = [
    *GOLDEN,
    *(f"accounts/{'x' * (n % 5)}{n}" for n in range(60)),
    "accounts/Žofie",
    "accounts/🦊",
    "a/ÿ",
    "ab/ÿÿ",
]
MOCK_PARTITIONS = 4  # of a topic that librdkafka's mock broker makes by itself


@pytest.mark.parametrize(("key", "expected"), GOLDEN.items())
def test_the_hash_is_javas(key: str, expected: int) -> None:
    signed = (murmur2(key.encode()) + 2**31) % 2**32 - 2**31
    assert signed == expected


@pytest.mark.parametrize(("key", "expected"), GOLDEN.items())
@pytest.mark.parametrize("partitions", [1, 2, 3, 8, 4096])
def test_the_partition_is_the_positive_hash_modulo_their_number(key: str, expected: int, partitions: int) -> None:
    assert partition_of(key, partitions) == (expected & 0x7FFFFFFF) % partitions


@given(st.binary())
def test_it_is_the_hash_that_agents_would_produce_with(key: bytes) -> None:
    assert murmur2(key) == partitioner.murmur2(key) & 0xFFFFFFFF


@given(st.text(), st.integers(1, 4096))
def test_every_stream_has_a_partition(stream: str, partitions: int) -> None:
    assert 0 <= partition_of(stream, partitions) < partitions


def delivered(settings: dict[str, Any]) -> dict[str, int]:
    """Partition by key, as a producer with these settings chooses it; the brokers are librdkafka's own mock."""
    found: dict[str, int] = {}

    def on_delivery(error: KafkaError | None, message: Message) -> None:
        assert error is None
        found[message.key().decode()] = message.partition()

    producer = Producer({"test.mock.num.brokers": 1, "log_level": 0, **settings})
    for stream in STREAMS:
        producer.produce("commands", b"", key=stream.encode(), on_delivery=on_delivery)
    assert producer.flush(20) == 0
    return found


def test_our_producers_put_a_stream_where_our_readers_look_for_it() -> None:
    found = delivered({"partitioner": LIBRDKAFKA_NAME})
    assert found == {stream: partition_of(stream, MOCK_PARTITIONS) for stream in STREAMS}


def test_librdkafkas_default_would_not() -> None:
    strays = [
        stream for stream, partition in delivered({}).items() if partition != partition_of(stream, MOCK_PARTITIONS)
    ]
    assert len(strays) > len(STREAMS) // 3
