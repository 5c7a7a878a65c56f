"""The model of PostgreSQL against PostgreSQL: the same schedules, step by step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psycopg
import pytest

from infra.settings import Settings
from infra.testing.fixtures import SEED
from proofs.model_read.scenarios import SCENARIOS

if TYPE_CHECKING:
    from infra.dev.stack import Stack

# without those where a session is ended by another, an agent has two connections, or three wait for one lock: at which step one
# that waited is seen to go on is then the real server's affair
COMPARED = ("two agents", "switch", "going back", "drop")
SCHEDULES = 4


@pytest.mark.parametrize("name", COMPARED)
def test_the_model_answers_waits_and_fails_as_postgresql_does(stack: Stack, name: str) -> None:
    from proofs.model_read.real import compare

    for number in range(SCHEDULES):
        database = f"model_{name.replace(' ', '_')}_{number}"
        with psycopg.connect(stack.postgres.url(), autocommit=True) as connection:
            connection.execute(f'create database "{database}"')
        settings = Settings(
            database_url=stack.postgres.url(database), kafka_bootstrap="model:9092", events_topic="events"
        )
        steps, _ = compare(settings, SCENARIOS[name], f"{SEED} {name} {number}")
        assert steps > 10
        with psycopg.connect(stack.postgres.url(), autocommit=True) as connection:
            connection.execute(f'drop database "{database}" with (force)')
