"""make test + prove: files are compared; a service's checks of them and each walk take minutes.

The guides are walked from the first line to the last, and the files that they show are good."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.engine.pages.pages import Author, at_work, author, blocks, files  # noqa: F401
from tests.engine.tools.service_trees import Tree
from tools.scaffold.names import names_of
from tools.scaffold.parts import SKELETON
from tools.testing.fixtures import ROOT

PAGES = {
    name: (ROOT / "docs" / f"{name}.md").read_text()
    for name in ("personal-data", "policies", "unique", "change-an-event")
}


SOURCES = (ROOT / "docs" / "sources.md").read_text()


def test_the_page_on_access_shows_the_files_as_they_are() -> None:
    assert dict(files((ROOT / "docs" / "access.md").read_text())) == {
        "access.py": (ROOT / "access.py").read_text(),
        "rooms/access.py": names_of("rooms").apply((SKELETON / "access.txt").read_text()),
    }


@pytest.mark.prove(part="new-services")
@pytest.mark.integration
@pytest.mark.xdist_group("services")
def test_the_pages_files_pass_the_checks_of_a_service(hotel: Tree) -> None:
    shown = [file for page in (*PAGES.values(), SOURCES) for file in files(page)]
    assert len(shown) == len(dict(shown)) > 8, "no page changes a file of another"
    for path, text in shown:
        (hotel.folder / path).write_text(text)
    hotel.check("-m", "not integration", "tests", "tools/testing")


@pytest.mark.prove(part="new-services")
@pytest.mark.integration
@pytest.mark.xdist_group("services")
@pytest.mark.parametrize("page", PAGES)
def test_a_page_from_the_first_line_to_the_last(page: str, author: Author) -> None:  # noqa: F811
    author.restarts = page != "change-an-event"  # there the release before runs on
    for language, block in blocks(PAGES[page]):
        author.walk(language, block.replace(":8000", f":{author.port}"))
    if page == "policies":
        leave = '{"stream": "rooms/14", "id": "leave", "type": "CheckOut", "data": {}}\n'
        (author.service.folder / "commands.jsonl").write_text(leave)
        author.type("samefold send commands.jsonl --wait", "…accepted 1, rejected 0")
        author.type("samefold history rooms/14", "…GuestLeft…RoomCleaned…moves~…")


@pytest.mark.prove(part="new-services")
@pytest.mark.integration
@pytest.mark.xdist_group("services")
def test_the_page_on_sources_from_the_first_line_to_the_last(author: Author) -> None:  # noqa: F811
    [webhook] = [block for language, block in blocks(SOURCES) if language == "sh"]
    for language, block in blocks(SOURCES):
        if "samefold history" in block:
            sent = author.service.run("sh", "-ec", webhook.replace(":8000", f":{author.port}"))
            assert " 202 " in sent.stdout, sent.stdout
        author.walk(language, block)


@pytest.mark.prove(part="new-services")
@pytest.mark.integration
@pytest.mark.xdist_group("services")
def test_the_page_on_a_service_of_ones_own_from_the_first_line_to_the_last(
    source: Tree, home: Path, data: Path, tmp_path: Path
) -> None:
    (_, making), *then = blocks((ROOT / "docs" / "own-service.md").read_text())
    [made] = re.findall(r"^\$ \.venv/bin/samefold new \.\./library (.*)$", making, re.MULTILINE)
    source.samefold("new", str(tmp_path / "library"), *made.split())
    with at_work(Tree(tmp_path / "library", home), data) as author:  # noqa: F811
        author.watches = True
        author.restart()
        author.restarts = False  # what runs follows
        for language, block in then:
            author.walk(language, block.replace(":8000", f":{author.port}"))
