"""Records that are far larger than their bytes in Kafka: no client of the API can send one; who may write to the topics can."""

from __future__ import annotations

import pytest
from confluent_kafka import Producer

from infra.log.partitioner import partition_of
from infra.settings import Settings
from tests.engine.api.api import everything

SIZE = 64 * 1024 * 1024


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["gzip", "lz4"])
def test_a_record_that_unpacks_to_a_hundred_times_its_size_has_no_effect(world: Settings, codec: str) -> None:
    wrong: list[object] = []
    with everything(world) as api:
        stream = "accounts/bomb"
        partition = partition_of(stream, world.partitions)
        producer = Producer(
            {"bootstrap.servers": world.kafka, "compression.type": codec, "message.max.bytes": 2 * SIZE}
        )
        for topic in (world.commands_topic, world.events_topic):
            # as bytes of a record, a thousandth of what the topic's limit looks at
            producer.produce(
                topic,
                bytes(SIZE),
                stream,
                partition,
                on_delivery=lambda error, _: wrong.extend([error] if error else []),
            )
        assert producer.flush(60) == 0
        assert wrong == []
        opened = api.client.post(
            "/accounts/bomb/open-account",
            json={"overdraft_limit": 0, "on": "2026-01-01"},
            headers={"Prefer": "wait=30"},
        )
        assert opened.status_code == 200, opened.text
        assert api.client.get("/views/balances/bomb").json()["row"]["account"] == "bomb"
