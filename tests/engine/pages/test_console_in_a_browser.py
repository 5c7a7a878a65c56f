"""make test-all: a browser, and a whole service.

The console in Chromium, while agents are killed: each page and each button, what axe finds, and the pictures of docs/console.md
(`make pictures`).
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from uuid import uuid4

import httpx
import psutil
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect

from infra.database.connect import connect
from infra.settings import Settings
from tools.testing.fixtures import ROOT
from tools.testing.service import Service, running

pytestmark = pytest.mark.slow

PICTURES = os.environ.get("PICTURES")
DAY = "2026-11-20"
BETWEEN_KILLS = 40
"""Commands that are done."""
AGENT = "projections.engine.live.agent"


@dataclass
class Bank:
    """A service that is busy."""

    service: Service
    url: str

    def send(self, stream: str, command: str, **body: object) -> httpx.Response:
        return self.service.client.post(f"/{stream}/{command}", json={"on": DAY, **body})


@contextmanager
def repeated(work: Callable[[], object], pause_s: float) -> Iterator[None]:
    """Done again and again meanwhile, in a thread."""
    ended = threading.Event()

    def repeat() -> None:
        while not ended.wait(pause_s):
            work()

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def kill_an_agent(settings: Settings) -> None:
    """One of this service's."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if AGENT in process.cmdline() and process.environ().get("SAMEFOLD_GROUP_PREFIX") == settings.group_prefix:
                process.send_signal(signal.SIGKILL)
                return


@pytest.fixture(scope="module")
def bank(shared_world: Settings, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bank]:
    settings = shared_world.model_copy(update={"console": True})
    numbers = count(1)
    with running(settings, tmp_path_factory.mktemp("bank")) as service:
        bank = Bank(service, str(service.client.base_url).rstrip("/"))
        for name in ("ada-1", "bob-1"):
            assert bank.send(f"accounts/{name}", "open-account", overdraft_limit=0, owner=name[:3]).is_success
        for cents in (90_000, 2_500, 40_000):
            assert bank.send("accounts/ada-1", "deposit", cents=cents).is_success
        assert bank.send("accounts/ada-1", "withdraw", cents=1_000_000).status_code == httpx.codes.CONFLICT

        def pay() -> None:
            with suppress(httpx.HTTPError):  # while an agent is away, its answer takes longer than this waits
                if (
                    bank.send("accounts/bob-1", "deposit", cents=(cents := next(numbers))).is_success
                    and cents % BETWEEN_KILLS == 0
                ):
                    kill_an_agent(settings)

        with repeated(pay, 0.05):
            yield bank


@pytest.fixture
def screen(browser: Browser) -> Iterator[Page]:
    """A page of a browser that complains of nothing but answers that say what is wrong."""
    errors: list[str] = []
    with browser.new_page(viewport={"width": 1280, "height": 860}) as page:
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda told: errors.append(told.text) if "Content Security Policy" in told.text else None)
        yield page
    assert errors == []


def barriers(page: Page) -> list[str]:
    """What axe finds that keeps somebody from using the page."""
    found = Axe().run(page).response["violations"]
    return [f"{one['id']}: {[node['html'][:200] for node in one['nodes']]}" for one in found]


def picture(page: Page, name: str) -> None:
    if PICTURES:
        page.screenshot(path=Path(ROOT, PICTURES, "console", f"{name}.jpg"), type="jpeg", quality=70)


def test_the_overview_follows_what_happens(bank: Bank, screen: Page) -> None:
    screen.goto(f"{bank.url}/console")
    expect(screen.get_by_role("table", name="Agents")).to_contain_text("core")
    expect(screen.get_by_role("table", name="Processes").get_by_role("row", name="handlers")).to_contain_text("0–3")
    partitions = screen.get_by_role("table", name="Partitions")
    expect(partitions).not_to_contain_text("nobody")
    expect(partitions).not_to_have_text(partitions.inner_text())
    assert barriers(screen) == []


def test_each_view_with_its_table_and_what_was_opened_stays_open(bank: Bank, screen: Page) -> None:
    screen.goto(f"{bank.url}/console")
    screen.get_by_role("link", name="Views").click()
    balances = screen.locator("#balances")
    expect(balances).to_contain_text("balances_v2")
    balances.get_by_text("indexes").click()
    with screen.expect_response(lambda answer: "hx-request" in answer.request.headers and "/views" in answer.url):
        screen.get_by_role("heading", name="Views", exact=True).click()
    expect(balances.locator("details")).to_have_attribute("open", "")
    picture(screen, "views")
    assert barriers(screen) == []


def test_a_stream_is_found_and_its_slider_goes_through_time(bank: Bank, screen: Page) -> None:
    screen.goto(f"{bank.url}/console/streams")
    assert barriers(screen) == []
    screen.get_by_label("begins with").fill("ada")
    screen.get_by_role("button", name="Search").click()
    screen.get_by_role("link", name="accounts/ada-1").click()
    expect(screen.locator("#history")).to_contain_text("insufficient-funds")
    expect(screen.locator("#then")).to_contain_text("132500")
    slider = screen.get_by_label("State after version")
    slider.press("ArrowLeft")
    expect(screen.locator("#then")).to_contain_text("92500")
    slider.press("Home")
    expect(screen.locator("#at")).to_have_text("1")
    slider.press("End")
    picture(screen, "stream")
    assert barriers(screen) == []


def test_a_command_is_tried_by_keyboard_alone(bank: Bank, screen: Page) -> None:
    screen.goto(f"{bank.url}/console/try?command=accounts.Deposit")
    screen.get_by_label("Stream").focus()
    for text in ("ada-1", "0", DAY):
        screen.keyboard.type(text if text != DAY else "11202026")
        screen.keyboard.press("Tab")
    screen.get_by_role("button", name="Send Deposit").press("Enter")
    expect(screen.get_by_role("status")).to_contain_text("cents")
    assert barriers(screen) == []
    screen.get_by_label("cents").fill("1")
    screen.get_by_label("on", exact=True).fill(DAY)
    screen.get_by_role("button", name="Send Deposit").press("Enter")
    expect(screen.get_by_role("status")).to_contain_text("Accepted")
    picture(screen, "try")
    assert barriers(screen) == []
    screen.get_by_role("status").get_by_role("link").click()
    expect(screen.locator("#command")).to_contain_text("MoneyDeposited")


def test_in_the_dark_nothing_is_harder_to_read(bank: Bank, browser: Browser) -> None:
    with browser.new_page(color_scheme="dark") as page:
        for path in (
            "",
            "/views",
            "/streams",
            "/streams?stream=accounts/ada-1",
            "/work",
            "/try?command=accounts.Deposit",
        ):
            page.goto(f"{bank.url}/console{path}")
            assert barriers(page) == [], path


def test_without_javascript_every_page_can_be_read(bank: Bank, browser: Browser) -> None:
    with browser.new_context(java_script_enabled=False) as context:
        page = context.new_page()
        page.goto(f"{bank.url}/console")
        for name, text in (
            ("Views", "balances_v2"),
            ("Streams", "Search"),
            ("Try", "OpenAccount"),
            ("Overview", "core"),
        ):
            page.get_by_role("link", name=name, exact=True).click()
            expect(page.locator("main")).to_contain_text(text)
        page.goto(f"{bank.url}/console/streams?stream=accounts/ada-1")
        expect(page.locator("#history")).to_contain_text("MoneyDeposited")
        expect(page.locator("#travel")).to_be_hidden()


def test_what_waits_is_replayed_retried_and_dropped(bank: Bank, screen: Page) -> None:
    settings = bank.service.settings
    idents = [f"transfers~{uuid4()}" for _ in range(2)]
    with connect(settings, "test") as db:
        db.execute(
            "insert into parked (table_name, stream, view, partition, since_offset, since_version, error) select table_name, "
            "'accounts/ada-1', view, 0, 0, 1000, 'ValueError: a purpose in two lines' from live where view = 'balances'"
        )
        for ident in idents:
            db.execute(
                "insert into outbox (id, policy, kind, partition, stream, version, number, target, type, body, wished_at, dead) "
                "values (%s, 'transfers', 'send', 0, 'transfers/7', 1, 0, 'accounts/bob-1', 'Deposit', '{}', now(), 'gave-up: x')",
                (ident,),
            )
    screen.goto(f"{bank.url}/console")
    look = screen.get_by_role("link", name="Look: Parked streams: 1.")
    expect(look).to_be_visible()
    picture(screen, "overview")
    look.click()
    expect(screen.get_by_role("row", name="balances accounts/ada-1 1000")).to_contain_text("a purpose in two lines")
    picture(screen, "work")
    assert barriers(screen) == []
    for row, button in (("balances accounts/ada-1 1000", "Replay"), (idents[0], "Retry"), (idents[1], "Drop")):
        screen.goto(f"{bank.url}/console/work")
        screen.get_by_role("row", name=row).get_by_role("link", name=button).click()
        assert barriers(screen) == []
        screen.get_by_role("button").last.click()
        expect(screen.locator("main")).to_contain_text("Done", use_inner_text=True)
        assert barriers(screen) == []
    screen.get_by_role("link", name="What waits").click()
    expect(screen.locator("main")).to_contain_text("No stream is parked.")
