"""One ground and one field for all tests of the slice; at the field's end its whole log and all its rows are judged."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.settings import PREFIX
from infra.testing.fixtures import SEED
from infra.testing.waiting import DEADLINE_S
from proofs.chaos.field import Field
from proofs.chaos.ground import Ground


# of a module, not of the session: what runs in it must have ended before other tests put models in the place of psycopg
@pytest.fixture(scope="module")
def ground() -> Iterator[Ground]:
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    folder.chmod(0o711)  # where root may not make a user namespace, PostgreSQL runs as nobody and must get in
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith(PREFIX)]:
            patch.delenv(name)
        patch.chdir(folder)
        try:
            with Ground(folder / "ground") as ground:
                yield ground
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def field(ground: Ground, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Field]:
    with Field(ground, tmp_path_factory.mktemp("field"), SEED, rate=200, patience_s=DEADLINE_S) as field:
        yield field
        field.finish()
        assert field.all_violations() == []
