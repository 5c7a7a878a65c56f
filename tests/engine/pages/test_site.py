"""make test + test-all: files are compared; the site takes seconds to build.

Each page is listed in mkdocs.yml, links lead somewhere, and neither building nor reading the site needs a network."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools.testing.fixtures import ROOT

MKDOCS = Path(sys.prefix, "docs", "bin", "mkdocs")
LOADED = re.compile(
    r"""<(?:script|img|iframe)\b[^>]*\bsrc="([^"]+)|<link\b[^>]*\brel="?(?:stylesheet|icon)\b[^>]*\bhref="([^"]+)"""
)
"""The files that a page loads."""
PRE = re.compile("<pre>.*?</pre>", re.DOTALL)


@pytest.mark.slow
def test_the_site_is_built_strictly_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    assert MKDOCS.is_file(), "run `make docs` first: it installs mkdocs"
    nowhere = dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:9")
    done = subprocess.run(
        [MKDOCS, "build", "--strict", "--site-dir", tmp_path],
        cwd=ROOT,
        env={**os.environ, **nowhere, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    pages = {page: page.read_text() for page in tmp_path.rglob("*.html") if page.name != "404.html"}
    loaded = [(page, file) for page, text in pages.items() for pair in LOADED.findall(text) for file in pair if file]
    assert loaded
    assert [(page, file) for page, file in loaded if not (page.parent / file).is_file()] == []
    # GitHub begins a list without an empty line before it, mkdocs does not
    assert [page for page, text in pages.items() if re.search(r"^(- |\d\. )", PRE.sub("", text), re.MULTILINE)] == []


def test_a_page_that_a_service_gets_links_to_no_page_that_it_does_not_get() -> None:
    """It names those by their address at GitHub."""
    excluded = set(re.findall(r'^  - "/docs/([\w-]+\.md)"$', (ROOT / "copier.yml").read_text(), re.MULTILINE))
    assert "benchmarks.md" in excluded
    pages = [page for page in (ROOT / "docs").glob("*.md") if page.name not in excluded]
    links = [(page, link) for page in pages for link in re.findall(r"\]\(([^)#:]+\.md)(?:#[^)]*)?\)", page.read_text())]
    assert links
    assert [
        (page.name, link) for page, link in links if Path(link).name in excluded or Path(link).parent.name == "adr"
    ] == []


def test_links_of_the_readme_lead_to_files() -> None:
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", (ROOT / "README.md").read_text())
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []
