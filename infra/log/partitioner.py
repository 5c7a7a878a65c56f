"""The partition of a stream: murmur2, as in Kafka's Java clients, so that all clients agree. librdkafka's own default is CRC32."""

import struct
from functools import lru_cache

NAME = "murmur2"
LIBRDKAFKA_NAME = "murmur2_random"


@lru_cache(maxsize=200_000)
def partition_of(stream: str, partitions: int) -> int:
    """The partition of a stream (its name in UTF-8 is the record's key)."""
    return (murmur2(stream.encode()) & 0x7FFFFFFF) % partitions


def murmur2(key: bytes) -> int:
    """Kafka's `Utils.murmur2`, unsigned. In twice the speed of aiokafka's, as a handler computes it for every new stream."""
    mixed = 0x9747B28C ^ len(key)
    words = len(key) >> 2
    for word in struct.unpack_from(f"<{words}I", key):
        word = word * _M & _BITS  # noqa: PLW2901 - the name of what it becomes
        word ^= word >> 24  # noqa: PLW2901
        mixed = mixed * _M & _BITS ^ word * _M & _BITS
    if rest := key[words << 2 :]:
        mixed = (mixed ^ int.from_bytes(rest, "little")) * _M & _BITS
    mixed ^= mixed >> 13
    mixed = mixed * _M & _BITS
    return mixed ^ mixed >> 15


_M = 0x5BD1E995
_BITS = 0xFFFFFFFF
