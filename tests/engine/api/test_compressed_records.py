"""make test-all: 64 MB take seconds.

Records that are far larger than their bytes in Kafka: no client of the API can send one; who may write to the topics can.
"""

from __future__ import annotations

import pytest
from confluent_kafka import Producer

from infra.log.partitioner import partition_of
from infra.settings import Settings
from infra.testing.waiting import DEADLINE_S, until
from tests.engine.api.api import everything

SIZE = 64 * 1024 * 1024


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["gzip", "lz4"])
def test_a_record_that_unpacks_to_a_hundred_times_its_size_has_no_effect(world: Settings, codec: str) -> None:
    stream, errors = "accounts/bomb", list[object]()
    partition = partition_of(stream, world.partitions)
    producer = Producer({"bootstrap.servers": world.kafka, "compression.type": codec, "message.max.bytes": 2 * SIZE})
    with everything(world) as api:
        for topic in (world.commands_topic, world.events_topic):
            # as bytes of a record, a thousandth of what the topic's limit looks at
            producer.produce(topic, bytes(SIZE), stream, partition, on_delivery=lambda error, _: errors.append(error))
        assert producer.flush(DEADLINE_S) == 0
        assert errors == [None, None]
        api.post("bomb", "open-account", {"Prefer": "respond-async"}, "b", overdraft_limit=0)
        until(lambda: api.get("/outcomes/accounts/bomb/b").status_code == 200, "what is behind them is decided")
        assert api.get("/views/balances/bomb").json()["row"]["account"] == "bomb"
