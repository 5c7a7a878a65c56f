"""make test: pure. murmur2, as Kafka's Java clients compute it: where a stream lives must not depend on who produces."""

import pytest
from aiokafka import partitioner
from hypothesis import given
from hypothesis import strategies as st

from infra.log.partitioner import murmur2, partition_of

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
