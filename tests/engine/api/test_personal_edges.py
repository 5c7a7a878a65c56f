"""make test + test-all: main ways first. Edges open personal values, and show their fallbacks once a subject is forgotten.

The bank's texts are not declared personal: here the log gets sealed values in them, as a policy's commands would bring them.
"""

from __future__ import annotations

import json
import re
import threading
from base64 import urlsafe_b64decode
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import Mock, patch
from urllib.parse import parse_qs, quote, urlsplit

import pytest

from api import app as api_app
from api import services as api_services
from domain.engine.contexts import contexts
from domain.engine.personal.keys import Keys
from domain.engine.personal.masters import MasterKeyUnusable, new_line
from domain.engine.personal.tokens import FALLBACK, PREFIX, sealed
from infra.access import Access, Caller, Right
from infra.database.connect import connect
from infra.log.partitioner import partition_of
from infra.log.records import encode
from infra.settings import Settings
from policies.engine import webhooks as webhooks_engine
from projections.engine.rebuild.rebuild import resume
from projections.engine.views.core_views import agent_views, all_views
from tests.engine.api.api import Api, served, serving, unfolded
from tests.engine.api.test_api_views import folded, get, subscribed
from tests.engine.domain.customers import CUSTOMERS
from tests.engine.policies.test_webhooks import Receiver, posting, put, receiver, with_endpoints  # noqa: F401  # a fixture
from tests.engine.projections.bankviews import stop_as_older_code_would
from tests.engine.projections.querykit import query
from tests.engine.spine import command, open_account, outcomes, produce, project
from tools.testing.fixtures import Samefold, world_of
from tools.testing.waiting import DEADLINE_S, until

NAME = 'Zephyrine "Zoë" Quill\\feather'
"""It has what JSON escapes."""
SOMEONE = "a former customer"


class Bank(NamedTuple):
    """An API over views of a log, in which some texts are sealed."""

    world: Settings
    api: Api

    def sealed(self, subject: str, plain: str = NAME, *, command_id: str = "c", fallback: str = SOMEONE) -> str:
        with connect(self.world, "test") as db:
            key = Keys(self.world).key_for(db, subject)
        return sealed(plain, key.id, key.key, command_id=command_id, number=0, fallback=fallback)

    def forget(self, subject: str) -> None:
        with connect(self.world, "test") as db:
            Keys(self.world).forget(db, subject)

    def wish(self, endpoint: str, body: Any, settings: Settings | None = None) -> str:
        """A post; its id."""
        [post] = put(settings or self.world, endpoint, f"customers/{endpoint}", [1])
        with connect(self.world, "test") as db:
            db.execute("update posts set body = %s where id = %s", (json.dumps(body, ensure_ascii=False), post))
        return post

    def deposit(self, account: str, purpose: str) -> None:
        folded(self.world, open_account(account))
        self.folded(f"accounts/{account}", "Deposit", cents=5, on="2026-01-02", details={"purpose": purpose})

    def folded(self, stream: str, kind: str, **data: Any) -> None:
        """A command as the relay appends it: what is sealed passes."""
        one = command(stream, "d", kind, **data)
        partition = partition_of(stream, self.world.partitions)
        produce(self.world, self.world.commands_topic, partition, stream.encode(), encode(one))

        def is_there() -> bool:
            project(self.world)
            return len(outcomes(self.world, [(stream, "d")])) == 1

        until(is_there, "it is folded")


@pytest.fixture(scope="module")
def bank(stack: Any, migrated: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bank]:
    file = tmp_path_factory.mktemp("keys") / "master.keys"
    file.write_text(new_line("first"))
    file.chmod(0o600)
    with pytest.MonkeyPatch.context() as patches, world_of(stack, migrated) as plain:
        for module in (api_services, webhooks_engine):
            patches.setattr(module, "has_personal_fields", lambda: True)
        patches.setattr(api_app, "contexts", lambda: contexts() | {"customers": CUSTOMERS})
        world = plain.model_copy(update={"master_key_file": file})
        with unfolded(world) as api:
            yield Bank(world, api)


@pytest.fixture
def asked() -> Iterator[Mock]:
    """The query for keys."""
    with patch.object(Keys, "keys_for_async", autospec=True, side_effect=Keys.keys_for_async) as spy:
        yield spy


@pytest.mark.slow
def test_a_process_that_has_not_read_the_keys_is_not_ready(bank: Bank, monkeypatch: pytest.MonkeyPatch) -> None:
    copying, may_begin = Keys.keep_copying, threading.Event()

    def later(keys: Keys, closing: threading.Event) -> None:
        may_begin.wait(DEADLINE_S)
        copying(keys, closing)

    def failing() -> dict[str, str]:
        checks = api.client.get("/health/ready").json()["checks"]
        return {name: check["code"] for name, check in checks.items() if not check["ok"]}

    monkeypatch.setattr(Keys, "keep_copying", later)
    with serving(bank.world, "late") as api:
        try:
            until(lambda: failing() == {"keys": "keys-not-read"}, "all but the keys is well")
        finally:
            may_begin.set()
        until(lambda: failing() == {}, "the keys are read")


# ── rows and pages ──


@pytest.mark.parametrize("path", ["/views/statement/row/2", "/views/statement?cents=5&limit=1000"], ids=["row", "page"])
def test_what_is_shown_and_its_tag_change_when_the_subject_is_forgotten(bank: Bank, path: str, asked: Mock) -> None:
    account = "page" if "?" in path else "row"
    bank.deposit(account, f"for {bank.sealed(f'customers/{account}')}!")
    bank.deposit(f"beside-{account}", bank.sealed("customers/bob", "Bob"))

    def shown(answer: Any) -> dict[str, str]:
        body = answer.json()
        return {row["account"]: row["purpose"] for row in body.get("items") or [body["row"]]}

    before = get(bank.api, path)
    assert asked.call_count == 1, "one query for the keys of all rows"
    assert shown(before)[account] == f"for {NAME}!"
    tag = before.headers["ETag"]
    assert get(bank.api, path, If_None_Match=tag).status_code == 304
    bank.forget(f"customers/{account}")
    after = get(bank.api, path, If_None_Match=tag)
    assert after.status_code == 200, "the client has what is not shown any more"
    assert shown(after) == shown(before) | {account: f"for {SOMEONE}!"}
    assert after.json().get("position") == before.json().get("position")
    assert get(bank.api, path, If_None_Match=after.headers["ETag"]).status_code == 304


def test_a_query_shows_what_it_selects_as_it_is(bank: Bank, tmp_path: Path) -> None:
    text = """
        class Row(NamedTuple):
            account: str
            purpose: str
            many: int
        SQL = "select account, purpose, count(*) over () as many from statement where account = 'asked'"
    """
    asked = query(tmp_path, text, all_views())
    bank.deposit("asked", f"for {bank.sealed('customers/asked')}!")
    with patch.object(api_app, "discover", lambda: {"asked": asked}), served(bank.world, "asked") as api:
        before = get(api, "/queries/asked")
        assert before.json()["items"] == [{"account": "asked", "purpose": f"for {NAME}!", "many": 1}]
        bank.forget("customers/asked")
        after = get(api, "/queries/asked", If_None_Match=before.headers["ETag"])
        assert after.json()["items"] == [{"account": "asked", "purpose": f"for {SOMEONE}!", "many": 1}]


def test_the_console_shows_them_to_those_who_may_see_them(bank: Bank) -> None:
    token = bank.sealed("customers/looked-at")
    bank.deposit("looked-at", f"for {token}!")

    def may_operate(caller: Caller, right: Right) -> bool:
        return right == "look" or caller.subject == "olga"

    def shown(caller: str, page: str = "streams?stream=accounts/looked-at") -> set[str]:
        answer = api.client.get(f"/console/{page}", headers={"Caller": caller})
        return {*re.findall(r"for ([^!]*)!", unescape(answer.text))}

    world = bank.world.model_copy(update={"console": True})
    with served(world, "console", Access(lambda *_: False, lambda *_: False, may_operate)) as api:
        as_json = json.dumps(NAME, ensure_ascii=False)[1:-1]
        assert shown("olga") == {as_json}
        assert shown("vera") == {"(hidden)"}
        stop_as_older_code_would(world, "balances", f"for {token}!")
        assert (shown("olga", "views"), shown("vera", "views")) == ({NAME}, {"(hidden)"})
        resume(world, ["balances"], agent_views("core"))
        bank.forget("customers/looked-at")
        assert shown("olga") == {SOMEONE}
        assert shown("vera") == {"(hidden)"}


def test_what_holds_nothing_personal_asks_for_no_key(bank: Bank, asked: Mock) -> None:
    bank.deposit("plain", "rent")
    assert get(bank.api, "/views/statement/plain/2").json()["row"]["purpose"] == "rent"
    assert get(bank.api, "/views/statement?account=plain").json()["items"][0]["purpose"] == "rent"
    assert get(bank.api, "/views/balances").status_code == 200
    assert asked.call_count == 0


@pytest.mark.slow
def test_pages_by_a_key_that_is_personal_go_on_and_their_addresses_hold_no_name(bank: Bank) -> None:
    """A mistake of an author's, but no client must run in a circle for it."""
    tokens = [
        bank.sealed("customers/k", f"{NAME} {number}", command_id=f"k{number}", fallback=FALLBACK)
        for number in (1, 2, 3)
    ]
    for token in tokens:
        bank.folded(f"transfers/{token}", "RequestTransfer", source="a", target="b", cents=7, on="2026-01-02")
    seen, place = [], "/views/transfers?cents=7&limit=1"
    while place:
        page = get(bank.api, place).json()
        seen += [row["transfer"] for row in page["items"]]
        place = page["next"]
        assert len(seen) <= 3
        if place:
            [cursor] = parse_qs(urlsplit(place).query)["cursor"]
            assert b"Quill" not in urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4))
    assert sorted(seen) == [f"{NAME} {number}" for number in (1, 2, 3)]
    assert get(bank.api, f"/views/transfers/{quote(tokens[0])}").json()["row"]["transfer"] == f"{NAME} 1"


# ── live rows ──


def test_a_watched_row_changes_when_the_subject_is_forgotten(bank: Bank) -> None:
    bank.deposit("live", bank.sealed("customers/live"))
    with subscribed(bank.api, "/views/statement/live/2/live") as live:
        first = live.next()
        assert first.data["row"]["purpose"] == NAME
        assert first.id == get(bank.api, "/views/statement/live/2").headers["ETag"].strip('W/"')
        bank.forget("customers/live")
        then = live.next()
        assert (then.event, then.data["row"]["purpose"]) == ("row", SOMEONE)
        assert then.id != first.id
    with subscribed(bank.api, "/views/statement/live/2/live", Last_Event_ID=first.id) as again:
        assert again.next().data["row"]["purpose"] == SOMEONE, "the client that saw the name learns that it is gone"


# ── webhooks ──


def test_a_webhook_shows_the_value_and_a_later_attempt_the_fallback(bank: Bank, receiver: Receiver) -> None:  # noqa: F811
    settings = with_endpoints(bank.world, good=receiver.url("good/ok"), busy=receiver.url("busy/status/503"))
    token = bank.sealed("customers/w")
    for endpoint in ("good", "busy"):
        bank.wish(endpoint, {"to": token, "text": f"Dear {token}, zwölf"}, settings)

    def got(endpoint: str) -> list[str]:
        for request in receiver.got(endpoint):
            assert request["verified"]
            assert request["body"]["text"] == f"Dear {request['body']['to']}, zwölf"
        return [request["body"]["to"] for request in receiver.got(endpoint)]

    with posting(settings):
        until(lambda: got("good") and got("busy"), "both were tried")
        bank.forget("customers/w")
        tried = len(got("busy"))
        until(lambda: len(got("busy")) > tried + 1, "the other is tried again")
    assert got("good") == [NAME]
    assert (got("busy")[0], got("busy")[-1]) == (NAME, SOMEONE)
    assert len({request["headers"]["webhook-id"] for request in receiver.got("busy")}) == 1


@pytest.mark.parametrize("step", ["start", "keys_for"])
def test_a_webhook_without_personal_values_waits_for_no_key(
    bank: Bank,
    receiver: Receiver,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    step: str,
) -> None:
    """Keys are in Kafka, which may be away."""
    asked, is_back, answer = threading.Event(), threading.Event(), getattr(Keys, step)

    def waiting(*arguments: Any, **named: Any) -> Any:
        asked.set()
        is_back.wait(DEADLINE_S)
        return answer(*arguments, **named)

    token = bank.sealed("customers/k")
    monkeypatch.setattr(Keys, step, waiting)
    monkeypatch.setattr(webhooks_engine, "TURN_S", 0.3)
    settings = with_endpoints(bank.world, mail=receiver.url("mail/ok"), plain=receiver.url("plain/ok"))
    settings.webhooks["mail"] = settings.webhooks["mail"].model_copy(update={"in_flight": 1})
    bank.wish("mail", {"to": token}, settings)
    with posting(settings):
        try:
            until(asked.is_set, "it waits for the key")
            put(settings, "plain", "boxes/1", range(1, 6))
            until(lambda: len(receiver.got("plain")) == 5, "the other endpoint has its posts")
            put(settings, "mail", "boxes/2", range(1, 6))
            until(lambda: len(receiver.got("mail")) == 5, "other posts to the same endpoint have their turn")
            assert {one["body"].get("to") for one in receiver.got("mail")} == {None}
        finally:
            is_back.set()
        until(lambda: len(receiver.got("mail")) == 6, "it is posted")
    assert receiver.got("mail")[5]["body"]["to"] == NAME


# ── the command line ──


def test_history_and_outbox_show_it_and_then_the_fallback(bank: Bank, samefold: Samefold) -> None:
    token = bank.sealed("customers/cli")
    bank.deposit("cli", token)
    post = bank.wish("nowhere", {"to": token})

    def printed(*arguments: str) -> str:
        done = samefold(*arguments, settings=bank.world)
        assert done.returncode == 0, done.stderr
        return done.stdout

    for text in (NAME, SOMEONE):
        entries = [json.loads(line) for line in printed("history", "accounts/cli", "--json").splitlines()]
        assert entries[-1]["events"][0]["data"]["details"]["purpose"] == text
        assert json.loads(printed("outbox", "show", post, "--json"))["body"] == {"to": text}
        for command_line in (["history", "accounts/cli"], ["outbox", "show", post]):
            as_text = printed(*command_line)
            assert (PREFIX in as_text, "Quill" in as_text) == (False, text == NAME)
        assert "Quill" not in printed("outbox", "list", "--json")
        bank.forget("customers/cli")


@pytest.mark.slow
@pytest.mark.parametrize("key", [None, "another"])
def test_without_the_master_key_nothing_starts_or_shows_what_is_sealed(
    bank: Bank, samefold: Samefold, tmp_path: Path, key: str | None
) -> None:
    bank.deposit(f"sealed-{key}", bank.sealed("customers/sealed"))
    bank.deposit(f"open-{key}", "rent")
    file, wrong = (tmp_path / "other.keys", "'first' is not the one") if key else (None, "names no file")
    if file:
        file.write_text(new_line("first"))
    world = bank.world.model_copy(update={"master_key_file": file})
    refused = samefold("history", f"accounts/sealed-{key}", settings=world)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "master-key-unusable" in refused.stderr
    assert "rent" in samefold("history", f"accounts/open-{key}", settings=world).stdout
    with pytest.raises(MasterKeyUnusable, match=wrong), serving(world, "wrong") as api:
        until(lambda: api.services.failure, "it ends")


@pytest.mark.slow
def test_without_its_file_samefold_run_ends_at_once(
    bank: Bank, samefold: Samefold, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tools.cli.run.has_personal_fields", lambda: True)
    monkeypatch.setattr("infra.observability.logs.configure", lambda *_: None)
    refused = samefold("run", "api", settings=bank.world.model_copy(update={"master_key_file": tmp_path / "none"}))
    assert refused.returncode == 2
    assert "SAMEFOLD_MASTER_KEY_FILE" in refused.stderr


# ── new keys ──


def test_a_command_that_can_not_be_appended_asks_for_no_key(bank: Bank) -> None:
    """While Kafka is away, requests would wait for it, one after the other."""
    answer = bank.api.client.post("/customers/q/register", json={"name": NAME}).json()
    assert (answer["code"], answer["appended"]) == ("command-not-live", "no")
    with connect(bank.world, "test") as db:
        assert db.execute("select from personal_keys where subject = 'customers/q'").fetchall() == []
