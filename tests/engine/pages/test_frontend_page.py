"""make test-all: a browser, and packages from npm.

docs/frontend.md: its page in Chromium, from another origin than the API's. `make pictures` takes the guide's pictures.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from playwright.sync_api import Locator, Page, expect

from api import views
from api.server import CORS_SENT
from infra.log.records import Command
from infra.settings import Settings
from tests.engine.api.api import Api, agent, ready, served, serving
from tests.engine.api.front import free_port
from tests.engine.api.tokens import Keys, bearer, key_file, locked
from tests.engine.spine import command, deposit, handler, outcomes, send, set_up
from tools.testing.fixtures import ROOT
from tools.testing.waiting import DEADLINE_S, until

pytestmark = pytest.mark.slow

GUIDE = (ROOT / "docs" / "frontend.md").read_text()
HTML = (ROOT / "docs" / "frontend" / "balances.html").read_text()
BLOCKS = re.findall(r"^```js\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)
WITH_A_TOKEN = BLOCKS[-1]
ADDRESS = 'content="http://127.0.0.1:8000"'
PICTURES = os.environ.get("PICTURES")
OWNERS = {
    "ada-1": "ada",
    "ada-2": "ada",
    "ada-3": "ada",
    "bob-1": "bob",
    "bob-2": "bob",
    "eve-1": "eve",
    "eve-2": "eve",
}
"""Each has a hundred cents more than the one before it; the first one has a hundred."""


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


class Site:
    """Serves the page, for an API at `api`. `world`: what the API needs to let the page read."""

    def __init__(self, world: Settings, folder: Path, port: int) -> None:
        api_port = free_port()
        self.api = f"http://127.0.0.1:{api_port}"
        self.url = f"http://127.0.0.1:{port}"
        self.world = world.model_copy(update={"api_cors_origins": self.url, "api_port": api_port})
        assert HTML.count(ADDRESS) == 1
        (folder / "balances.html").write_text(HTML.replace(ADDRESS, f'content="{self.api}"'))
        (folder / "token.html").write_text(f"<script>{WITH_A_TOKEN}</script>")

    @contextmanager
    def served(self) -> Iterator[Api]:
        with serving(self.world, port=self.world.api_port) as api:
            ready(api)
            yield api


@pytest.fixture(scope="module")
def site(shared_world: Settings, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("site")
    set_up(shared_world)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever).start()
    try:
        with handler(shared_world), agent(shared_world):
            opened = [
                command(
                    f"accounts/{name}", f"open-{name}", "OpenAccount", overdraft_limit=0, owner=owner, on="2026-11-20"
                )
                for name, owner in OWNERS.items()
            ]
            folded(shared_world, *opened, *(deposit(name, "first", 100 * at) for at, name in enumerate(OWNERS, 1)))
            yield Site(shared_world, folder, server.server_port)
    finally:
        server.shutdown()
        server.server_close()


def folded(world: Settings, *sent: Command) -> None:
    """Send commands, and wait until all have their outcomes."""
    send(world, *sent)
    keys = [(one.stream, one.id) for one in sent]
    until(lambda: len(outcomes(world, keys)) == len(keys), "the commands are folded")


def shown(page: Page, *accounts: str) -> None:
    """The page shows these accounts, in this order."""
    expect(page.locator("tbody td:first-child")).to_have_text(list(accounts))


def row(page: Page, account: str) -> Locator:
    return page.locator("tr", has=page.get_by_role("cell", name=account, exact=True))


def says(page: Page, text: str | re.Pattern[str], where: str = "#answer") -> None:
    expect(page.locator(where)).to_have_text(text)


def pay_in(page: Page, account: str, cents: int) -> None:
    page.get_by_label("Account", exact=True).fill(account)
    page.get_by_label("Cents", exact=True).fill(str(cents))
    page.get_by_role("button", name="Deposit").click()


def picture(page: Page, name: str) -> None:
    if PICTURES:
        page.screenshot(path=Path(ROOT, PICTURES, "frontend", name), type="jpeg", quality=80)


def test_a_reader_filters_sorts_and_turns_pages(site: Site, page: Page) -> None:
    with site.served():
        page.goto(f"{site.url}/balances.html")
        shown(page, "ada-1", "ada-2", "ada-3", "bob-1", "bob-2")
        page.get_by_role("button", name="Next page").click()
        shown(page, "eve-1", "eve-2")
        page.get_by_role("button", name="First page").click()
        shown(page, "ada-1", "ada-2", "ada-3", "bob-1", "bob-2")
        cents = page.get_by_role("columnheader", name="cents")
        cents.click()
        expect(cents).to_have_attribute("aria-sort", "ascending")
        cents.click()
        shown(page, "eve-2", "eve-1", "bob-2", "bob-1", "ada-3")
        page.get_by_role("button", name="Next page").click()
        shown(page, "ada-2", "ada-1")
        page.get_by_label("Owner").fill("bob")
        shown(page, "bob-2", "bob-1")
        page.get_by_label("Cents at least").fill("500")
        shown(page, "bob-2")
        page.get_by_label("Owner").fill("")
        page.get_by_label("Account begins with").fill("e")
        shown(page, "eve-2", "eve-1")


def test_a_list_follows_others_and_a_deposit_is_seen_at_once(site: Site, page: Page) -> None:
    with site.served() as api:
        page.goto(f"{site.url}/balances.html")
        page.get_by_label("Account begins with").fill("ada")
        page.get_by_role("columnheader", name="cents").click()
        shown(page, "ada-1", "ada-2", "ada-3")
        says(page, "live", "#live")
        picture(page, "balances.jpg")
        api.post("ada-1", "deposit", key="moves", cents=1_000)
        shown(page, "ada-2", "ada-3", "ada-1")
        expect(row(page, "ada-1")).to_contain_text("1100")
        pay_in(page, "ada-2", 400)
        says(page, "ada-2 has 600 cents")
        shown(page, "ada-3", "ada-2", "ada-1")
        picture(page, "deposit.jpg")
        pay_in(page, "nobody", 1)
        says(page, re.compile("account", re.IGNORECASE))


def test_a_page_goes_on_when_the_api_is_back(site: Site, page: Page) -> None:
    headers: list[dict[str, str]] = []
    network = page.context.new_cdp_session(page)
    network.send("Network.enable")
    network.on("Network.requestWillBeSentExtraInfo", lambda sent: headers.append(sent["headers"]))
    with ExitStack() as before:
        before.enter_context(site.served())
        page.goto(f"{site.url}/balances.html")
        page.get_by_label("Owner").fill("bob")
        says(page, "live", "#live")
        shown(page, "bob-1", "bob-2")
        before.close()
        says(page, "connecting", "#live")
        folded(site.world, deposit("bob-1", "meanwhile", 7))
        pay_in(page, "bob-2", 30)
        says(page, "No answer: trying again")
    with site.served() as api:
        says(page, "bob-2 has 530 cents")
        expect(row(page, "bob-1")).to_contain_text("407")
        expect(row(page, "bob-2")).to_contain_text("530")
        api.post("bob-1", "deposit", key="after", cents=3)
        expect(row(page, "bob-1")).to_contain_text("410")
    assert [one for one in headers if "Last-Event-ID" in one]


def test_a_question_that_the_api_refuses_shows_why_and_no_rows_of_another(
    site: Site, page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    with site.served() as api:
        page.goto(f"{site.url}/balances.html")
        page.get_by_label("Owner").fill("bob")
        shown(page, "bob-1", "bob-2")
        monkeypatch.setattr(api.services.views, "small_view", 0)
        page.get_by_label("Owner").fill("")
        shown(page, "ada-1", "ada-2", "ada-3", "bob-1", "bob-2")
        page.get_by_label("Cents at least").fill("100")
        says(page, re.compile("no index .* cents .*`sort=cents`"), "#live")
        shown(page)
        page.get_by_role("columnheader", name="cents").click()
        says(page, "live", "#live")
        expect(page.locator("tbody tr")).to_have_count(5)
        page.goto(f"{site.url}/token.html")
        path = f"{api.url}/views/balances/live?transactions=0"
        assert page.evaluate("async (url) => (await follow(url, () => '', () => {})).code", path) == "no-index"


def test_a_page_with_a_token_follows_a_list(
    site: Site, page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its stream ends again and again, and it goes on behind the last event."""
    monkeypatch.setattr(views, "LONGEST_FEED_S", 0.2)
    keys = Keys("https://issuer.example", one="ES256")
    token = keys.token()
    with served(locked(site.world, keys, key_file(tmp_path, keys), api_port=0)) as api:
        until(lambda: api.get("/health/ready").status_code == 200, "the issuer's keys are read")
        page.goto(f"{site.url}/token.html")
        with page.expect_response(lambda response: "last-event-id" in response.request.headers) as again:
            page.evaluate(
                """([url, token]) => {
                    window.seen = [];
                    follow(url, () => token, (_, data) => seen.push(data.items ?? data.enter.map((one) => one.row)));
                }""",
                [f"{api.url}/views/balances/live?owner=eve", token],
            )
        assert again.value.status == 200
        assert api.post("eve-1", "deposit", bearer(token), key="token", cents=11).status_code == 200
        page.wait_for_function("seen.length > 1", timeout=DEADLINE_S * 1_000)
        first, second = page.evaluate("seen")
        assert [one["cents"] for one in first] == [600, 700]
        assert second[0]["cents"] == 611  # alone, or with the other one if the stream had just ended


def test_a_script_sends_and_reads_the_headers_of_the_guides(site: Site, page: Page) -> None:
    headers = dict.fromkeys(CORS_SENT.split(), "a") | {"Content-Type": "application/json"}
    read = "async ([url, request]) => Object.fromEntries((await fetch(url, request)).headers)"
    with site.served() as api:
        page.goto(f"{site.url}/token.html")
        first = page.evaluate(read, [f"{api.url}/views/balances?limit=1", {"headers": {"Last-Event-ID": "a"}}])
        assert first.keys() >= {"etag", "link", "samefold-position"}
        body = '{"cents": 1, "on": "2026-11-21"}'
        path = f"{api.url}/accounts/eve-2/deposit"
        of_command = {"Content-Type": "application/json", "Idempotency-Key": '"read"', "Prefer": "respond-async"}
        sent = page.evaluate(read, [path, {"method": "POST", "headers": of_command, "body": body}])
        assert sent.keys() >= {"idempotency-key", "location", "preference-applied", "retry-after"}
        refused = page.evaluate(read, [path, {"method": "POST", "headers": headers, "body": body}])
        assert refused["content-type"] == "application/problem+json"


def test_the_pages_script_fits_the_apis_types(site: Site, tmp_path: Path) -> None:
    npx, npm = shutil.which("npx"), shutil.which("npm")
    if npx is None or npm is None:
        pytest.fail("npm is not installed: `apt-get install npm` (Debian, Ubuntu), `brew install node`")
    with site.served() as api:
        (tmp_path / "openapi.json").write_bytes(api.get("/openapi.json").content)
    [script] = re.findall(r'<script type="module">\n(.*)</script>', HTML, re.DOTALL)

    [generate] = re.findall(r"^npx (openapi-typescript@.*?) http\S+ (.*)$", GUIDE, re.MULTILINE)
    [tsc] = re.findall(r"^npx (--package typescript.*)$", GUIDE, re.MULTILINE)
    [client] = re.findall(r"^```ts\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)
    [version] = re.findall(r"`openapi-fetch` \((.*?)\)", GUIDE)

    def checked(text: str, client: str = "") -> str:
        (tmp_path / "balances.js").write_text(text)
        (tmp_path / "client.ts").write_text(client)
        done = subprocess.run(
            [npx, "--yes", *tsc.split(), *(["client.ts"] if client else [])],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        return done.stdout + done.stderr

    program, options = generate
    subprocess.run([npx, "--yes", program, "openapi.json", *options.split()], cwd=tmp_path, check=True)
    (tmp_path / "package.json").write_text("{}")
    subprocess.run([npm, "install", "--no-save", f"openapi-fetch@{version}"], cwd=tmp_path, check=True)
    reads = "export const cents: number = data!.items[0].cents, problem: string | undefined = error?.detail;"
    sends = (
        "export const sent: components['schemas']['AccountsOpenAccount'] = { overdraft_limit: 0, on: '2026-11-20' };"
    )
    uses = f"{client.replace('{ paths }', '{ components, paths }')}{reads}\n{sends}"
    assert checked(script, uses) == ""
    assert "error TS" in checked(script, uses.replace(', "application/json" | "application/problem+json"', ""))
    for right, wrong in (("found.row.cents", "found.row.cent"), ("{ cents, on:", "{ cents, date:")):
        assert script.count(right) == 1
        assert "error TS" in checked(script.replace(right, wrong))


def test_the_guide_shows_lines_of_the_page() -> None:
    assert [block for block in BLOCKS[:-1] if block not in HTML] == []
