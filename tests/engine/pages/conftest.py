"""What tests in a browser share."""

import shutil
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tools.testing.waiting import DEADLINE_S

expect.set_options(timeout=DEADLINE_S * 1_000)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        pytest.fail("Chromium is not installed: `apt-get install chromium` (Debian), `brew install chromium`")
    with sync_playwright() as playwright, playwright.chromium.launch(executable_path=program) as browser:
        yield browser


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """What a script raises in it fails the test."""
    errors: list[object] = []
    with browser.new_page(viewport={"width": 880, "height": 320}) as page:
        page.on("pageerror", lambda error: errors.append(error))  # noqa: PLW0108 - it sets an attribute on what it is given
        yield page
    assert errors == []
