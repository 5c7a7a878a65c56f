"""Flink and Kafka Streams: programs in Java that fold the same log. `make bench-jvm` builds them, with Maven."""

import sys
from pathlib import Path


def jar_of(peer: str) -> Path:
    """The jar of "flink" or "streams", among those that it needs. It is there once it was built."""
    return Path(sys.prefix, "jvm-peers", peer, f"{peer}-1.jar")
