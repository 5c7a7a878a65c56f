"""make test + prove: files are compared; a service's checks of them and each walk take minutes.

The guides are walked from the first line to the last, and the files that they show are good."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.engine.pages.pages import Author, at_work, author, blocks, files, typed  # noqa: F401
from tests.engine.policies.test_sources import traces_of
from tests.engine.spine import commits
from tests.engine.tools.service_trees import Tree
from tools.dev.stack import Stack
from tools.scaffold.names import names_of
from tools.scaffold.parts import SKELETON
from tools.testing.fixtures import ROOT

PAGES = {
    name: (ROOT / "docs" / f"{name}.md").read_text()
    for name in ("personal-data", "policies", "unique", "change-an-event")
}


SOURCES = (ROOT / "docs" / "sources.md").read_text()
TRACE = "0af7651916cd43dd8448eb211c80319c"
"""Of the payment on that page."""


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
def test_the_page_on_sources_from_the_first_line_to_the_last(
    author: Author,  # noqa: F811
    source: Tree,
    home: Path,
    data: Path,
    tmp_path: Path,
) -> None:
    one, two = SOURCES.split("## Two services")
    [webhook] = [block for language, block in blocks(one) if language == "sh"]
    for language, block in blocks(one):
        if "samefold history" in block:
            sent = author.service.run("sh", "-ec", webhook.replace(":8000", f":{author.port}"))
            assert " 202 " in sent.stdout, sent.stdout
        author.walk(language, block)
    (banks := data / "bank").mkdir()
    with at_work(Tree(Path(shutil.copytree(source.folder, tmp_path / "bank")), home), banks) as other:
        two_services(two, {"bank": other, "shop": author})


def two_services(page: str, authors: Mapping[str, Author]) -> None:
    """Each types what follows their prompt. A payment has its effect in both services, once, in one conversation and trace."""
    for language, block in blocks(page):
        if file := re.match(r"# bank: (\S+)\n", block):
            (authors["bank"].service.folder / file[1]).write_text(block.removeprefix(file[0]))
        elif language == "python":
            authors["shop"].walk(language, block)
    stacks = {name: Stack(one.log.parent) for name, one in authors.items()}
    for one in authors.values():
        one.service.samefold("dev", "up")
    here = {"shop.public": f"{authors['shop'].service.folder.name}.public"}
    for name, broker, api in (("bank", "41001", "8000"), ("shop", "42001", "8001")):
        here |= {broker: stacks[name].kafka.bootstrap.rpartition(":")[2], api: str(authors[name].port)}
    for _, block in blocks(re.sub("|".join(here), lambda found: here[found[0]], page)):
        for line, expected in typed(block):
            name, _, words = line.partition("$ ")
            authors[name].type(words, expected)
    for name, topic, payment in (
        ("bank", "events", ["FeeCharged", "MoneyDeposited"]),
        ("shop", here["shop.public"].replace("public", "events"), ["OrderPaid"]),
    ):
        settings = stacks[name].settings(events_topic=topic)
        paid = [one for one in commits(settings) if one.correlation_id == "payment-1"]
        assert sorted(event.type for one in paid for event in one.events) == payment
        assert [trace.split("-")[1] for trace in traces_of(settings)] == [TRACE] * len(payment)


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
