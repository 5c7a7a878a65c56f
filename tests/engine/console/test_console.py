"""make test + test-all: real Kafka and PostgreSQL.

The console's pages over HTTP: what they show, who may see and send what, and what no page may do.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from uuid import uuid4

import httpx
import pytest
from pydantic import SecretStr

from access import may_operate, may_read, may_send
from api.console.streams import exact
from infra.access import Access
from infra.settings import Settings
from tests.engine.api.api import DAY, Api, everything, fresh, served, serving
from tests.engine.api.tokens import Keys, key_file, locked
from tests.engine.service.test_two_releases import write_tree
from tests.engine.spine import set_up
from tools.testing.fixtures import ROOT
from tools.testing.waiting import until

PAGES = ("", "/views", "/streams", "/try")
OWN = {"Sec-Fetch-Site": "same-origin"}
"""As a browser says of a form of the same site."""
TELLER, AUDITOR, OPERATOR = (
    {"Caller": f"{name} {role}"}
    for name, role in (("tom", "teller operator"), ("una", "auditor"), ("olga", "operator"))
)


def with_console(world: Settings) -> Settings:
    return world.model_copy(update={"console": True})


@pytest.fixture(scope="module")
def api(shared_world: Settings) -> Iterator[Api]:
    with everything(with_console(shared_world), access=Access(may_send, may_read, may_operate)) as found:
        yield found


def shown(answer: httpx.Response, status: int = 200) -> str:
    """The page's text, as people read it."""
    assert answer.status_code == status, answer.text
    assert answer.headers["Content-Type"] == "text/html; charset=utf-8"
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", answer.text)).split())


def form(command: str, stream: str, ident: str = "", **fields: object) -> dict[str, str]:
    given = {"command": command, "stream": stream, "id": ident or str(uuid4())}
    return given | {f"field.{name}": str(value) for name, value in fields.items()}


def sent(api: Api, given: dict[str, str], caller: dict[str, str] | None = None, **headers: str) -> httpx.Response:
    return api.client.post("/console/try", data=given, headers=OWN | (caller or {}) | headers)


def stream(api: Api, name: str, **query: str) -> str:
    return shown(api.client.get("/console/streams", params={"stream": f"accounts/{name}"} | query))


def test_every_page_has_no_script_and_no_style_of_its_own(api: Api) -> None:
    name = api.opened()
    for path in (*PAGES, "/try?command=accounts.Deposit", f"/streams?stream=accounts/{name}"):
        answer = api.get(f"/console{path}")
        shown(answer)
        assert "default-src 'self'; img-src" in answer.headers["Content-Security-Policy"]
        assert not re.search(r"<script(?![^>]* src=)|<style| style=| on\w+=|https?://(?!www\.w3\.org)", answer.text)
        for address in re.findall(r'(?:href|src)="(/console/static/[^"]*)"', answer.text):
            assert api.get(address).status_code == 200


def test_the_overview_names_who_owns_what_and_what_does_not_run(api: Api) -> None:
    until(lambda: "No process runs the policies" in shown(api.get("/console")), "the overview knows the processes")
    page = shown(api.get("/console"))
    assert "samefold run policies" in page
    assert not re.search("No handler|of agent|nobody", page), page
    assert re.search(r"handlers \S+ \S+ 0–\d+", page), page


def test_a_history_has_events_refusals_states_and_rows(api: Api) -> None:
    name = api.opened()
    api.post(name, "deposit", key="first", cents=700)
    api.post(name, "withdraw", key="second", cents=1_000)
    page = stream(api, name, command="second")
    assert re.search(r"1 AccountOpened .* 2 MoneyDeposited .* – insufficient-funds ", page), page
    assert "balance 0 700" in page  # the state's change
    assert f"balances {name} cents 0 700" in page
    assert f"daily_totals {DAY}, deposit, adds count 1 cents 700" in page
    assert "Command second rejected: insufficient-funds" in page
    assert "by tom" not in page


def test_a_long_history_has_pages_and_its_states_are_of_the_whole_stream(api: Api) -> None:
    name = api.opened()
    for cents in range(1, 121):
        api.post(name, "deposit", key=f"{cents}", cents=cents)
    last = stream(api, name)
    assert " 22 MoneyDeposited" in last
    assert " 21 MoneyDeposited" not in last
    assert "Later versions" not in last
    assert f"balance {sum(range(1, 120))} {sum(range(1, 121))}" in last
    assert api.post(name, "withdraw", key="last", cents=1_000_000).status_code == httpx.codes.CONFLICT
    assert "insufficient-funds" in stream(api, name)
    of_command = stream(api, name, command="3")
    assert "Command 3 accepted" in of_command
    assert " 4 MoneyDeposited" in of_command
    first = stream(api, name, **{"from": "1"})
    assert "1 AccountOpened" in first
    assert " 101 MoneyDeposited" not in first
    assert "Later versions" in first


def test_streams_are_found_by_what_they_begin_with(api: Api) -> None:
    name = api.opened()
    for text in (name, f"accounts/{name}"):
        assert f"accounts/{name}" in shown(api.client.get("/console/streams", params={"begins": text}))
    assert f"accounts/{api.opened()}" in shown(api.client.get("/console/streams", params={"begins": "accou"}))
    for text in (f"{name}-not", "transfers/" + name, "\U0010ffff", "nothing/x"):
        assert "No stream with an event" in shown(api.client.get("/console/streams", params={"begins": text}))


@pytest.mark.parametrize(
    "name", ["<script>alert(1)</script>", "\N{PILE OF POO}" * 47, "a&b=c#d?e", '"><img src=x>', "sl/ash"]
)
def test_a_name_is_a_text_wherever_it_is_shown(api: Api, name: str) -> None:
    name = f"{name}{uuid4().hex[:2]}"
    assert api.post(name, "open-account", key=uuid4().hex, overdraft_limit=0).status_code == 200
    found = api.client.get("/console/streams", params={"begins": f"accounts/{name}"})
    [address] = re.findall(r'href="(/console/streams\?stream=accounts[^"]*)"', found.text)
    page = api.get(unescape(address))
    assert f"accounts/{name}" in shown(page)
    assert "1 AccountOpened" in shown(page)
    assert not re.search(r"<script(?![^>]* src=)|<img", page.text + found.text)


def test_a_name_that_no_stream_can_have_is_refused(api: Api) -> None:
    for name in ("accounts", "nothing/7", "accounts/", "accounts/" + "x" * 300, "a\0b/1"):
        assert "No stream can have that name" in shown(api.client.get("/console/streams", params={"stream": name}), 422)


def test_a_form_sends_a_command_as_its_caller_and_once(api: Api) -> None:
    name = fresh()
    opened = form("accounts.OpenAccount", name, overdraft_limit=5, on=DAY, owner="ada")
    assert "Accepted" in shown(sent(api, opened, TELLER))
    deposit = form("accounts.Deposit", name, cents=250, on=DAY)
    assert "version 2" in shown(sent(api, deposit, TELLER))
    assert "version 2" in shown(sent(api, deposit, TELLER))
    page = stream(api, name)
    assert page.count("MoneyDeposited") == 1
    assert page.count("by tom") == 2


def test_a_form_shows_what_is_wrong_and_keeps_what_was_written(api: Api) -> None:
    name = api.opened()
    wrong = sent(api, form("accounts.Deposit", name, cents="<b>12</b>", on="never"))
    assert {"cents", "on"} <= {*re.findall(r"<code>(\w+)</code>", wrong.text)}
    assert 'value="&lt;b&gt;12&lt;/b&gt;"' in wrong.text
    assert wrong.status_code == 422
    assert "overdraft limit do not cover" in shown(sent(api, form("accounts.Withdraw", name, cents=1, on=DAY)), 409)
    assert "is not at the version" in shown(
        sent(api, form("accounts.Deposit", name, cents=1, on=DAY) | {"expected": "9"}), 412
    )
    shown(sent(api, form("accounts.Nothing", name)), 404)


def test_an_empty_input_is_left_out(api: Api) -> None:
    answer = sent(api, form("transfers.RequestTransfer", fresh(), target="b", cents=1, on=DAY, source=""))
    assert "source Field required" in shown(answer, 422)


def test_a_number_of_a_row_is_shown_as_it_is() -> None:
    row = '{"large": 12345678901234567890.123456789, "scaled": 12.50, "whole": 7}'
    assert exact((row,)) == {"large": "12345678901234567890.123456789", "scaled": "12.50", "whole": 7}


def test_who_may_look_and_send(api: Api) -> None:
    name = api.opened()
    for path in PAGES:
        shown(api.client.get(f"/console{path}", headers=AUDITOR))
        shown(api.client.get(f"/console{path}", headers=OPERATOR))
        assert "The caller may not do that" in shown(
            api.client.get(f"/console{path}", headers={"Caller": "tom teller"}), 403
        )
    shown(sent(api, form("accounts.Deposit", name, cents=1, on=DAY), AUDITOR), 403)
    assert "MoneyDeposited" not in stream(api, name)


@pytest.mark.parametrize(
    "headers",
    [
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Origin": "https://evil.example"},
        {"Origin": "http://["},
        {},
    ],
)
def test_a_form_of_another_site_is_refused(api: Api, headers: dict[str, str]) -> None:
    name = api.opened()
    answer = api.client.post("/console/try", data=form("accounts.Deposit", name, cents=1, on=DAY), headers=headers)
    assert "another site" in shown(answer, 403)
    assert "MoneyDeposited" not in stream(api, name)


def test_a_host_that_is_not_this_machine_is_refused(api: Api) -> None:
    assert "this machine's own names" in shown(api.client.get("/console", headers={"Host": "evil.example"}), 403)


def test_a_form_of_ten_megabytes_is_refused(api: Api) -> None:
    shown(sent(api, form("accounts.Deposit", "x" * 10_000_000)), 413)


def test_a_page_is_loaded_again_when_the_code_is_another(api: Api) -> None:
    same = re.search(r'hx-get="(/console/code\?is=[^"]*)"', api.get("/console").text)
    assert same is not None
    assert "HX-Refresh" not in api.get(same[1]).headers
    assert api.get("/console/code?is=other").headers["HX-Refresh"] == "true"
    answered = sent(api, form("accounts.Deposit", api.opened(), cents=1, on=DAY))
    assert "/console/code" not in answered.text, "to load an answer again is to send the form again"


def test_there_is_no_console_unless_it_is_on(shared_world: Settings, api: Api) -> None:
    with serving(shared_world.model_copy(update={"console": False}), "without") as without:
        assert without.get("/console").status_code == 404


EVOLVE = "def evolve(row: Balance | None, event: AccountOpened | Movement | AccountClosed, at: At) -> Balance | None:\n"
FAULTS = """    if at.id.startswith("endless"):
        __import__("re").match(r"(a+)+$", "a" * 60 + "b")
    if at.id.startswith("exits"):
        __import__("os")._exit(3)
"""


@pytest.mark.slow
def test_a_fold_that_never_ends_or_ends_its_process_harms_one_history(
    shared_world: Settings, api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    endless, exits, well = f"endless{fresh()}", f"exits{fresh()}", api.opened()
    for name in (endless, exits):
        assert api.post(name, "open-account", key=name, overdraft_limit=0).status_code == 200
    api.post(endless, "deposit", key=f"{endless}-2", cents=700)
    code = write_tree(tmp_path / "code", ROOT, {"projections/balances.py": [(EVOLVE, EVOLVE + FAULTS)]})
    monkeypatch.chdir(code)
    with serving(with_console(shared_world).model_copy(update={"decide_limit_s": 1}), "other code") as other:
        for name, says in (
            (endless, "balances stops here"),
            (endless, "statement, a new line"),
            (exits, "The process that reads it has ended (3)"),
            (well, f"balances {well} "),
        ):
            assert says in stream(other, name)


def test_an_address_without_a_page_says_so(api: Api) -> None:
    assert api.get("/console/").headers["Location"] == "/console"
    assert "There is nothing under this path" in shown(api.get("/console/nothing/here"), 404)


def test_without_stores_each_page_stands_and_says_so(world: Settings) -> None:
    gone = world.model_copy(
        update={"database_url": SecretStr("postgresql://nobody@127.0.0.1:1/none"), "kafka_bootstrap": "127.0.0.1:1"}
    )
    with serving(with_console(gone), "alone") as alone:
        for path in ("", "/views", "/streams?begins=a", "/streams?stream=accounts/a"):
            assert "PostgreSQL" in shown(alone.get(f"/console{path}"))
        shown(alone.get("/console/try?command=accounts.Deposit"))


def test_a_browser_signs_in_with_a_token_and_out(world: Settings, tmp_path) -> None:  # type: ignore[no-untyped-def]
    keys = Keys("https://issuer.test", first="ES256")
    set_up(world)
    with served(with_console(locked(world, keys, key_file(tmp_path, keys)))) as api:
        assert api.get("/console/views").headers["Location"] == "/console/sign-in"
        assert "Token" in shown(api.get("/console/sign-in"))
        assert "No browser keeps" in shown(
            api.client.post("/console/sign-in", data={"token": "x" * 4_000}, headers=OWN), 401
        )
        part = api.get("/console", HX_Request="true")
        assert (part.status_code, part.headers["HX-Redirect"]) == (200, "/console/sign-in")
        assert "not a JWT" in shown(api.client.post("/console/sign-in", data={"token": "x"}, headers=OWN), 401)
        token = keys.token(roles=["operator"])
        assert api.client.post("/console/sign-in", data={"token": token}).status_code == 403
        answer = api.client.post("/console/sign-in", data={"token": f" {token}\n"}, headers=OWN)
        assert (answer.status_code, answer.headers["Location"]) == (303, "/console")
        cookie = answer.headers["Set-Cookie"]
        assert {"HttpOnly", "SameSite=lax", "Path=/console"} <= {*cookie.split("; ")}
        shown(api.get("/console/views"))
        assert api.get("/views", Cookie=cookie.partition(";")[0]).status_code == 401
        api.client.post("/console/sign-out", headers=OWN)
        assert api.get("/console/views").status_code == 303
