"""make test-all + prove: a whole service. `docs/personal-data.md` is walked from the first line to the last."""

from __future__ import annotations

import pytest

from infra.testing.fixtures import ROOT
from tests.engine.pages.pages import Author, author, blocks, check_files  # noqa: F401
from tests.engine.tools.service_trees import Tree

PAGE = (ROOT / "docs" / "personal-data.md").read_text()

pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.xdist_group("services")]


def test_the_pages_files_pass_the_checks_of_a_service(hotel: Tree) -> None:
    check_files(PAGE, hotel)


@pytest.mark.prove(part="new-services")
def test_the_page_from_the_first_line_to_the_last(author: Author) -> None:  # noqa: F811
    for language, block in blocks(PAGE):
        author.walk(language, block.replace(":8000", f":{author.port}"))
