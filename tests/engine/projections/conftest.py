"""The bank that tests of the read side begin with."""

import pytest

from infra.settings import Settings
from tests.engine.bookkeeper import Bookkeeper, folded_lives
from tests.engine.projections.bankviews import ACCOUNTS


@pytest.fixture
def bank(world: Settings) -> Bookkeeper:
    """Each account has lived five events, all of them folded; and who wrote them."""
    return folded_lives(world, ACCOUNTS, 5)
