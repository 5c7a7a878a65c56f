"""A fatal error of an idempotent producer, as the broker's answer would bring it about: by librdkafka's own test function."""

from __future__ import annotations

import ctypes
from pathlib import Path

import confluent_kafka
from confluent_kafka import KafkaError, Producer

_OBJECT = object.__basicsize__


def end(producer: Producer) -> None:
    """From now on it can't go on: what is queued is purged, what is under way may arrive, and nothing more is taken."""
    # what Python's object holds first is librdkafka's
    handle = ctypes.c_void_p.from_address(id(producer) + _OBJECT)
    assert _library().rd_kafka_test_fatal_error(handle, KafkaError.INVALID_PRODUCER_EPOCH, b"a test ends it") == 0


def _library() -> ctypes.CDLL:
    """The one that is loaded, not a second one."""
    [file] = Path(confluent_kafka.__file__).parent.parent.glob("confluent_kafka.libs/librdkafka-*")
    return ctypes.CDLL(str(file))
