"""What tests of the models share."""

import pytest


@pytest.fixture(scope="session")
def model_database() -> None:
    """The PostgreSQL of the read side's model: it belongs to the run, not to the test that needs it first."""
    from proofs.model_read.database import database

    database()
