"""What tests of the read side begin with."""

from collections.abc import Iterator

import pytest

from infra.database.connect import Connection
from infra.settings import Settings
from tests.engine.bookkeeper import Bookkeeper, folded_lives
from tests.engine.projections import viewkit
from tests.engine.projections.bankviews import ACCOUNTS


@pytest.fixture
def bank(world: Settings) -> Bookkeeper:
    """Each account has lived five events, all of them folded; and who wrote them."""
    return folded_lives(world, ACCOUNTS, 5)


@pytest.fixture
def db(world: Settings) -> Iterator[Connection]:
    """The tables of nothing yet, and a connection."""
    viewkit.make_tables(world, {})
    with viewkit.open_connection(world) as connection:
        yield connection
