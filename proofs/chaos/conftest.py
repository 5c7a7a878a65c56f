"""One ground and one field for all tests of the slice; at the field's end its whole log and all its rows are judged."""

from collections.abc import Iterator

import pytest

from proofs.chaos.armed import STUMBLING
from proofs.chaos.field import Field
from proofs.chaos.ground import Ground, ground_in
from tools.testing.fixtures import SEED
from tools.testing.waiting import DEADLINE_S


# of the package, not of the session: what runs in it must have ended before other tests put models in the place of psycopg
@pytest.fixture(scope="package")
def ground() -> Iterator[Ground]:
    with ground_in() as (ground, _folder):
        yield ground


@pytest.fixture(scope="module")
def field(ground: Ground, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Field]:
    folder = tmp_path_factory.mktemp("field")
    with Field(ground, folder, SEED, rate=100, patience_s=DEADLINE_S, lacking=STUMBLING) as field:
        yield field
        field.finish()
        assert field.all_violations() == []
