"""What Samefold's own tests share beside `infra.testing.fixtures`."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from infra.settings import Settings
from tests.engine.service_trees import data, home, hotel, made, source  # noqa: F401  # fixtures

if TYPE_CHECKING:
    from tests.engine.api import Api


@pytest.fixture(scope="module")
def api(shared_world: Settings) -> Iterator["Api"]:
    """The HTTP API that the tests of a module share, with a handler and an agent behind it."""
    from tests.engine.api import everything

    with everything(shared_world) as running:
        yield running
