"""make test: no store. Whoever asks a Kafka that does not answer, again and again, keeps no client but the last."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from weakref import ref

import pytest
from confluent_kafka import TopicCollection
from confluent_kafka.admin import AdminClient

from infra.log import topics
from infra.log.clients import KafkaUnavailable
from infra.settings import Settings


@pytest.fixture
def no_collection() -> Iterator[None]:
    """A handler's or agent's collections are hours apart, and one in a client's own thread ends the process."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collection")
def test_a_client_that_was_given_up_ends_at_once_with_its_threads() -> None:
    given: list[ref[AdminClient]] = []

    def question(client: AdminClient, _within_s: float) -> None:
        given.append(ref(client))
        client.describe_topics(TopicCollection(["events"]), request_timeout=0.05)["events"].result()

    admin = topics.Admin(Settings(kafka_bootstrap="127.0.0.1:1"), 1.0)
    with pytest.raises(KafkaUnavailable):
        admin.ask(question)
    assert len(given) > 2
    assert len({client() for client in given} - {None}) <= 1
