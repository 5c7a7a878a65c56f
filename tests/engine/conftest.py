"""What Samefold's own tests share beside `tools.testing.fixtures`."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from infra.settings import Settings
from tests.engine.tools.service_trees import data, home, hotel, made, source  # noqa: F401  # fixtures
from tools.testing.fixtures import Samefold, started
from tools.testing.waiting import until

if TYPE_CHECKING:
    from tests.engine.api.api import Api
    from tests.engine.infra.secure import House, Secure


@pytest.fixture(scope="module")
def api(shared_world: Settings) -> Iterator["Api"]:
    """The HTTP API that the tests of a module share, with a handler and an agent behind it."""
    from tests.engine.api.api import everything

    with everything(shared_world) as running:
        yield running


@pytest.fixture(scope="session")
def secure() -> Iterator["Secure"]:
    """Kafka with TLS, SCRAM and ACLs, PostgreSQL with TLS and SCRAM, for the whole run."""
    from tests.engine.infra.secure import Secure
    from tools.migrations import migrate

    with started(Secure) as stack:
        stack.execute("create role app login superuser password 'app-secret'")
        stack.execute('create database "migrated"')
        migrate.upgrade(stack.settings(database_url=stack.postgres.url("migrated")))
        yield stack


@pytest.fixture
def house(secure: "Secure", samefold: Samefold, tmp_path: Path) -> Iterator["House"]:
    """A piece of the secure stack: topics, and for each process a user with exactly the rights that are printed."""
    from tests.engine.infra.secure import House

    house = House(secure, tmp_path)
    house.settle(house.printed(samefold))
    create = partial(samefold, "topics", "--create", settings=house.of("admin"))
    until(lambda: create().returncode == 0, "a broker that has just started makes the topics")
    yield house
    secure.execute(f'drop database "{house.name}" with (force)')
