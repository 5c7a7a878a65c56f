"""The edges open personal values, and show their fallbacks from the moment on at which a subject is forgotten.

The bank's texts are not declared personal: here the log gets sealed values in them, as a policy's commands would bring them.
"""

from __future__ import annotations

import json
import re
import threading
from base64 import urlsafe_b64decode
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, quote, urlsplit

import psycopg
import pytest

from api import services as api_services
from infra.database.connect import connect
from infra.log.partitioner import partition_of
from infra.log.records import encode
from infra.personal.keys import Keys
from infra.personal.masters import new_line
from infra.personal.tokens import FALLBACK, PREFIX, sealed
from infra.settings import Settings
from infra.testing.fixtures import Samefold, world_of
from policies.engine import webhooks as webhooks_engine
from tests.engine.api.api import Api, serving, unfolded
from tests.engine.api.test_api_live import subscribed
from tests.engine.api.test_api_views import folded, get
from tests.engine.policies.test_webhooks import Receiver, posting, put, receiver, waiting, with_endpoints  # noqa: F401  # a fixture
from tests.engine.spine import command, commits, open_account, outcomes, produce, project, until

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

    def deposit(self, account: str, purpose: str) -> None:
        """Open an account, and pay in for that purpose."""
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
    with pytest.MonkeyPatch.context() as patch, world_of(stack, migrated) as plain:
        for module in (api_services, webhooks_engine):
            patch.setattr(module, "has_personal_fields", lambda: True)
        world = plain.model_copy(update={"master_key_file": file})
        with unfolded(world) as api:
            yield Bank(world, api)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[set[str]]:
    """The key ids of each query for keys."""
    found: list[set[str]] = []
    ask = Keys.keys_for_async

    async def counted(
        self: Keys, connection: psycopg.AsyncConnection[Any], ids: Collection[str]
    ) -> dict[str, bytes | None]:
        found.append({*ids})
        return await ask(self, connection, ids)

    monkeypatch.setattr(Keys, "keys_for_async", counted)
    return found


def test_a_process_that_has_not_read_the_keys_is_not_ready(bank: Bank, monkeypatch: pytest.MonkeyPatch) -> None:
    copying, may_begin = Keys.keep_copying, threading.Event()

    def later(keys: Keys, closing: threading.Event) -> None:
        may_begin.wait(60)
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


def test_a_row_shows_the_value_and_its_fallback_once_the_subject_is_forgotten(bank: Bank) -> None:
    bank.deposit("ada", f"for {bank.sealed('customers/ada')}!")
    place = "/views/statement/ada/2"
    shown = get(bank.api, place)
    assert shown.json()["row"]["purpose"] == f"for {NAME}!"
    tag = shown.headers["ETag"]
    assert get(bank.api, place, If_None_Match=tag).status_code == 304
    bank.forget("customers/ada")
    after = get(bank.api, place, If_None_Match=tag)
    assert after.status_code == 200, "the client has what is not shown any more"
    assert after.json()["row"] == shown.json()["row"] | {"purpose": f"for {SOMEONE}!"}
    assert after.json()["position"] == shown.json()["position"]
    assert get(bank.api, place, If_None_Match=after.headers["ETag"]).status_code == 304


def test_a_page_shows_values_and_its_tag_changes_too(bank: Bank, asked: list[set[str]]) -> None:
    for account, subject in (("p1", "customers/p1"), ("p2", "customers/p2"), ("p3", "customers/p1")):
        bank.deposit(account, bank.sealed(subject, f"{NAME} {account}"))
    place = "/views/statement?cents=5&limit=1000"

    def purposes(answer: Any) -> dict[str, str]:
        return {row["account"]: row["purpose"] for row in answer.json()["items"] if row["account"][0] == "p"}

    before = get(bank.api, place)
    assert purposes(before) == {account: f"{NAME} {account}" for account in ("p1", "p2", "p3")}
    assert len(asked) == 1, "one query for the keys of all of them"
    assert len(asked[0]) >= 2
    bank.forget("customers/p1")
    after = get(bank.api, place, If_None_Match=before.headers["ETag"])
    assert purposes(after) == {"p1": SOMEONE, "p2": f"{NAME} p2", "p3": SOMEONE}
    assert get(bank.api, place, If_None_Match=after.headers["ETag"]).status_code == 304


def test_what_holds_nothing_personal_asks_for_no_key(bank: Bank, asked: list[set[str]]) -> None:
    bank.deposit("plain", "rent")
    assert get(bank.api, "/views/statement/plain/2").json()["row"]["purpose"] == "rent"
    assert get(bank.api, "/views/statement?account=plain").json()["items"][0]["purpose"] == "rent"
    assert get(bank.api, "/views/balances").status_code == 200
    assert asked == []


@pytest.mark.parametrize("subject", ["nobody", "altered"])
def test_what_can_not_be_opened_shows_its_fallback(bank: Bank, subject: str) -> None:
    token = bank.sealed(f"customers/{subject}")
    if subject == "nobody":
        token = re.sub(r"[0-9a-f]{16}", "0" * 16, token, count=1)
    else:
        [*head, data, tail, end] = token.split("~")
        token = "~".join([*head, data[:-4] + ("AAAA" if data[-4:] != "AAAA" else "BBBB"), tail, end])
    bank.deposit(subject, token)
    assert get(bank.api, f"/views/statement/{subject}/2").json()["row"]["purpose"] == SOMEONE


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
    body = json.dumps(
        {"to": bank.sealed("customers/w"), "text": f"Dear {bank.sealed('customers/w')}, zwölf"}, ensure_ascii=False
    )
    with connect(settings, "test") as db:
        for endpoint in ("good", "busy"):
            [post] = put(settings, endpoint, f"customers/{endpoint}", [1])
            db.execute("update outbox set body = %s where id = %s", (body, post))

    def got(endpoint: str) -> list[dict[str, Any]]:
        return [request["body"] for request in receiver.got(endpoint)]

    with posting(settings):
        until(lambda: bool(got("good") and got("busy")), "both were tried")
        bank.forget("customers/w")
        tried = len(got("busy"))
        until(lambda: len(got("busy")) > tried + 1, "the other is tried again")
    before, after = ({"to": text, "text": f"Dear {text}, zwölf"} for text in (NAME, SOMEONE))
    assert got("good") == [before]
    assert got("busy")[0] == before
    assert got("busy")[-1] == after
    assert all(request["verified"] for request in receiver.got())
    assert len({request["headers"]["webhook-id"] for request in receiver.got("busy")}) == 1
    with connect(settings, "test") as db:
        db.execute("delete from outbox")


# ── the command line ──


def test_history_and_outbox_show_it_and_then_the_fallback(bank: Bank, samefold: Samefold) -> None:
    token = bank.sealed("customers/cli")
    bank.deposit("cli", token)
    [post] = put(bank.world, "nowhere", "accounts/cli", [1])
    with connect(bank.world, "test") as db:
        db.execute("update outbox set body = %s where id = %s", (json.dumps({"to": token}), post))

    def printed(*arguments: str) -> str:
        done = samefold(*arguments, settings=bank.world)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def require(text: str) -> None:
        entries = [json.loads(line) for line in printed("history", "accounts/cli", "--json").splitlines()]
        assert entries[-1]["events"][0]["data"]["details"]["purpose"] == text
        wish = json.loads(printed("outbox", "show", post, "--json"))
        assert wish["body"] == {"to": text}
        for command_line in (["history", "accounts/cli"], ["outbox", "show", post]):
            as_text = printed(*command_line)
            assert PREFIX not in as_text
            assert ("Quill" in as_text) == ("Quill" in text)
        assert "Quill" not in printed("outbox", "list", "--json")

    require(NAME)
    bank.forget("customers/cli")
    require(SOMEONE)
    with connect(bank.world, "test") as db:
        db.execute("delete from outbox")


def test_without_the_master_key_the_command_line_refuses_what_is_sealed_and_shows_the_rest(
    bank: Bank, samefold: Samefold, tmp_path: Path
) -> None:
    bank.deposit("sealed", bank.sealed("customers/sealed"))
    bank.deposit("open", "rent")
    other = tmp_path / "other.keys"
    other.write_text(new_line("first"))
    for world in (bank.world.model_copy(update={"master_key_file": file}) for file in (None, other)):
        refused = samefold("history", "accounts/sealed", settings=world)
        assert (refused.returncode, refused.stdout) == (2, "")
        assert "master-key-unusable" in refused.stderr
        assert "rent" in samefold("history", "accounts/open", settings=world).stdout


def test_the_log_and_the_tables_hold_none_of_it(bank: Bank) -> None:
    bank.deposit("nowhere", bank.sealed("customers/nowhere"))
    assert "Quill" not in repr(commits(bank.world))
    with connect(bank.world, "test") as db:
        for table in ("statement_v2", "streams_accounts_v3", "command_outcomes_v3"):
            if db.execute("select to_regclass(%s)", (table,)).fetchall() != [(None,)]:
                assert "Quill" not in str(db.execute(f"select * from {table}").fetchall())
    assert not waiting(bank.world)
