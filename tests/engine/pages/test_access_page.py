"""make test: reads files. `docs/access.md` shows the sample's access.py, and that of a new service, as they are."""

from infra.scaffold.names import names_of
from infra.scaffold.parts import SKELETON
from infra.testing.fixtures import ROOT
from tests.engine.pages.pages import files

PAGE = (ROOT / "docs" / "access.md").read_text()


def test_it_shows_the_files_as_they_are() -> None:
    assert dict(files(PAGE)) == {
        "access.py": (ROOT / "access.py").read_text(),
        "rooms/access.py": names_of("rooms").apply((SKELETON / "access.txt").read_text()),
    }
