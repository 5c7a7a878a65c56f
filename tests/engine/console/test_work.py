"""make test + test-all: an action is a process of `samefold`, which takes seconds; several run at once.

The console's page of what waits, and its actions: each asks once more, is done once however often it is sent, and is recorded.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any
from uuid import uuid4

import httpx
import pytest
from markupsafe import escape
from pydantic import SecretStr

from api.console import actions, work
from domain.accounts import AccountOpened, Details, MoneyDeposited
from infra.access import Access, Caller, Right
from infra.database.connect import connect
from infra.settings import Settings
from projections.engine.views.core_views import agent_views
from tests.engine.api.api import Api, served, serving
from tests.engine.bookkeeper import DAY, Bookkeeper, fold_all
from tests.engine.projections.bankviews import live_table, stop_as_older_code_would
from tests.engine.spine import scalar, set_up
from tools.migrations.migrate import upgrade
from tools.testing.waiting import until

OPERATOR, VIEWER = "ada operator", "eve"
OWN = {"Sec-Fetch-Site": "same-origin"}
SCRIPT = "<script>alert(1)</script>"
BALANCE = "select cents from balances where account = %s"


def may_operate(caller: Caller, right: Right) -> bool:
    return right == "look" or "operator" in caller.roles


ACCESS = Access(lambda *_: False, lambda *_: False, may_operate)


@pytest.fixture(scope="module")
def api(shared_world: Settings) -> Iterator[Api]:
    """An API whose code can fold what was parked by the code before, in two accounts."""
    world = shared_world.model_copy(update={"console": True})
    set_up(world)
    keeper = Bookkeeper(world)
    for account in (f"re{SCRIPT}", "dropped"):
        keeper.commit(account, AccountOpened(overdraft_limit=0, on=DAY))
        for cents in (1, 10, 100):
            keeper.commit(account, MoneyDeposited(cents=cents, on=DAY, details=Details(purpose=f"{cents} cents")))
    keeper.life(["3"], 3)
    views = dict(agent_views("core"))
    balances = views["balances"]

    def broken(row: Any, event: Any, at: Any) -> Any:
        if isinstance(event, MoneyDeposited) and event.details.purpose == "10 cents":
            raise ValueError(f"can't take {SCRIPT}")
        return balances.function(row, event, at)

    fold_all(world, views | {"balances": replace(balances, function=broken, on_poison="park")})
    with served(world, access=ACCESS) as api:
        yield api


@pytest.fixture
def world(api: Api) -> Settings:
    return api.services.settings


def get(api: Api, path: str, caller: str = OPERATOR, **query: str) -> httpx.Response:
    return api.client.get(f"/console{path}", params=query, headers={"Caller": caller})


def asked(api: Api, name: str, **given: str) -> dict[str, str]:
    """The fields of the form on the page that asks once more."""
    answer = get(api, f"/do/{name}", **given)
    assert answer.status_code == 200, answer.text
    hidden = re.findall(r'type="hidden" name="([^"]*)" value="([^"]*)"', answer.text)
    return {field: html.unescape(value) for field, value in hidden}


def send(
    api: Api, name: str, fields: Mapping[str, str], headers: Mapping[str, str] = OWN, caller: str = OPERATOR
) -> httpx.Response:
    return api.client.post(f"/console/do/{name}", data=dict(fields), headers={"Caller": caller} | dict(headers))


def done(api: Api, *wanted: tuple[str, dict[str, str]]) -> None:
    """These actions, all at once, each sent twice, have ended well, and are recorded once, with who had them done."""
    fields, was = [asked(api, name, **given) for name, given in wanted], recorded(api.services.settings)
    for (name, _), form in [*zip(wanted, fields, strict=True)] * 2:
        answer = send(api, name, form)
        assert (answer.status_code, answer.headers["Location"]) == (303, f"/console/done/{form['form']}"), answer.text
    assert recorded(api.services.settings) == was + len(wanted)
    query = "select ended_at is not null from operator_actions where id = %s"
    for form in fields:
        until(lambda form=form: scalar(api.services.settings, query, form["form"]), f"{form} has ended")  # type: ignore[misc]
        page = get(api, f"/done/{form['form']}").text
        assert "Done</p>" in page, page
        assert scalar(api.services.settings, "select by from operator_actions where id = %s", form["form"]) == "ada"
        assert form["form"] in get(api, "/work").text


def dead_letter(world: Settings, kind: str = "send", stream: str = "accounts/1") -> str:
    ident = f"standing_orders~{uuid4()}"
    with connect(world, "test") as db:
        db.execute(
            "insert into outbox (id, policy, kind, partition, stream, version, number, target, type, body, wished_at, dead) "
            "values (%s, 'standing_orders', %s, 0, %s, 1, 0, 'accounts/2', 'Deposit', '{\"cents\": 77}', now(), %s)",
            (ident, kind, stream, f"gave-up: {SCRIPT}"),
        )
    return ident


def recorded(world: Settings) -> int:
    count: int = scalar(world, "select count(*) from operator_actions")
    return count


def test_a_message_that_is_a_dead_letter_has_its_place_and_no_stream(api: Api, world: Settings) -> None:
    dead_letter(world, "message", "billing/3")
    page = get(api, "/work").text
    assert "billing/3@1" in page
    assert "stream=billing" not in page


def test_parked_streams_and_dead_letters(api: Api, world: Settings) -> None:
    stream, retried, dropped = f"accounts/re{SCRIPT}", dead_letter(world), dead_letter(world)
    page = get(api, "/work").text
    for text in (stream, "accounts/dropped", f"can't take {SCRIPT}", f"gave-up: {SCRIPT}"):
        assert escape(text) in page
    assert "<script>alert" not in page
    for place in ("[]", "x", '["a"]', '["\\ud800", "x", "y"]', '[{}, "x", "y"]'):
        assert get(api, "/work", dead=place).status_code == 422
    now = get(api, "/streams", stream=stream).text
    assert "Parked since version 3" in now
    asks = get(api, "/do/parked-drop", view="balances", stream=stream).text
    assert escape(f"samefold parked drop --yes --version=3 balances '{stream}'") in asks
    assert "MoneyDeposited" in asks
    assert "10 cents" in asks
    assert "<script>alert" not in asks
    assert "cents&#34;: 77" in get(api, "/do/outbox-retry", id=retried).text
    done(
        api,
        ("parked-replay", {"view": "balances", "stream": stream}),
        ("parked-drop", {"view": "balances", "stream": "accounts/dropped"}),
        ("outbox-retry", {"id": retried}),
        ("outbox-drop", {"id": dropped}),
    )
    assert scalar(world, BALANCE, f"re{SCRIPT}") == 111
    assert scalar(world, BALANCE, "dropped") == 101
    assert scalar(world, "select version from skips where stream = 'accounts/dropped'") == 3
    with connect(world, "test") as db:
        left = db.execute("select id, dead from outbox where id in (%s, %s)", (retried, dropped)).fetchall()
    assert left == [(retried, None)]
    assert get(api, "/do/parked-replay", view="balances", stream=stream).status_code == 404
    assert get(api, "/do/outbox-drop", id=dropped).status_code == 404


@pytest.mark.slow
def test_views_and_policies(api: Api, world: Settings) -> None:
    first = live_table(world, "daily_totals")
    version = str(agent_views("core")["daily_totals"].version)
    done(api, ("rebuild", {"view": "daily_totals"}), ("policies-switch", {"policy": "transfers"}))
    second = live_table(world, "daily_totals")
    assert second != first
    policy = "select version from activations where policy = 'transfers' order by number desc limit 1"
    assert scalar(world, policy) > 0
    with connect(world, "test") as db:  # as a new database over an old log has it
        db.execute("update activations set posts_from = null where policy = 'transfers'")
    assert "Go on</a>" in get(api, "/work").text
    done(api, ("policies-resume", {"policy": "transfers"}))
    assert scalar(world, "select posts_from > now() - interval '1 day' from activations where policy = 'transfers'")
    done(
        api,
        ("switch", {"view": "daily_totals", "version": version}),
        ("policies-remove", {"policy": "transfers"}),
    )
    assert live_table(world, "daily_totals") == first
    assert scalar(world, policy) == 0
    stop_as_older_code_would(world, "balances")
    assert "Resume balances" in get(api, "/views").text
    # by another version than this code's, it has no build to go on with
    with connect(world, "test") as db:
        db.execute("update stopped_views set version = version - 1")
        assert "Rebuild balances" in get(api, "/views").text
        db.execute("update stopped_views set version = version + 1")
    done(api, ("views-drop", {"view": "daily_totals", "table": second}), ("views-resume", {"view": "balances"}))
    assert scalar(world, "select state from builds where table_name = %s", second) == "abandoned"
    assert scalar(world, "select count(*) from live where view = 'balances'") == 1
    assert get(api, "/do/rebuild-needed").status_code == 404
    with connect(world, "test") as db:
        db.execute("update live set version = version - 1 where view in ('balances', 'statement')")
        assert get(api, "/views").text.count("Rebuild what this code needs</a>") == 2
        asks = get(api, "/do/rebuild-needed").text
        db.execute("update live set version = version + 1 where view in ('balances', 'statement')")
    assert "samefold rebuild --processes=1<" in asks
    assert ">statement<" in asks


def test_an_action_that_fails_says_so_in_the_commands_own_words(api: Api, world: Settings) -> None:
    """And a stream whose name looks like an option is a name."""
    with connect(world, "test") as db:
        db.execute(
            "insert into parked (table_name, stream, view, partition, since_offset, since_version, error) "
            "values (%s, '--help', 'balances', 0, 0, 1, 'e')",
            (live_table(world, "balances"),),
        )
    form = asked(api, "switch", view="balances", version="99")
    assert send(api, "switch", form).status_code == 303
    done(api, ("parked-replay", {"view": "balances", "stream": "--help"}))
    assert scalar(world, "select count(*) from parked where stream = '--help'") == 0
    until(lambda: "exit code 2" in get(api, f"/done/{form['form']}").text, "it has failed")
    assert "run the code that has it" in get(api, f"/done/{form['form']}").text


def test_a_form_that_is_sent_twice_acts_once(api: Api, world: Settings) -> None:
    form = asked(api, "outbox-drop", id=dead_letter(world)) | {"form": str(uuid4())}
    with connect(world, "test") as db:
        db.execute("insert into operator_actions (id, command) values (%s, 'samefold sent before')", (form["form"],))
    was = recorded(world)
    assert send(api, "outbox-drop", form).headers["Location"] == f"/console/done/{form['form']}"
    page = get(api, f"/done/{form['form']}").text
    assert "samefold sent before" in page
    assert "not known" in page
    assert recorded(world) == was


def test_to_switch_to_an_older_version_of_a_policy_is_named_and_confirmed(api: Api, world: Settings) -> None:
    with connect(world, "test") as db:
        columns = "policy, number, version, positions, log_offset"
        db.execute(f"insert into activations ({columns}) values ('standing_orders', 1, 99, '{{}}', 0)".encode())
        page = get(api, "/do/policies-switch", policy="standing_orders").text
        db.execute("delete from activations where policy = 'standing_orders'")
    assert "to switch is to go back" in page
    assert "samefold policies switch --yes standing_orders" in page
    assert "--yes" not in get(api, "/do/policies-switch", policy="standing_orders").text


def test_nothing_is_done_without_the_right_from_elsewhere_or_by_a_bad_form(
    api: Api, world: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    ident = dead_letter(world)
    given = {"id": ident}
    assert get(api, "/do/outbox-drop", VIEWER, **given).status_code == 200
    assert "<button>Drop" not in get(api, "/do/outbox-drop", VIEWER, **given).text
    form, was = asked(api, "outbox-drop", **given), recorded(world)
    bad = {
        "viewer": send(api, "outbox-drop", form, caller=VIEWER),
        "elsewhere": send(api, "outbox-drop", form, {"Sec-Fetch-Site": "cross-site"}),
        "origin": send(api, "outbox-drop", form, {"Origin": "https://elsewhere.example"}),
        "nowhere": send(api, "outbox-drop", form, {}),
        "large": send(api, "outbox-drop", form | {"more": "x" * 10_000_000}),
        "no id": send(api, "outbox-drop", form | {"form": "1"}),
        "nul": send(api, "rebuild", form | {"view": "bal\0ances"}),
        "unknown": send(api, "drop-everything", form),
        "no view": send(api, "rebuild", form | {"view": "nothing"}),
        "changed": send(api, "outbox-drop", form | {"seen": "other"}),
    }
    monkeypatch.setattr(actions, "MOST", 0)
    bad["too many"] = send(api, "outbox-drop", form)
    assert {name: answer.status_code for name, answer in bad.items()} == {
        **dict.fromkeys(("viewer", "elsewhere", "origin", "nowhere"), 403),
        **dict.fromkeys(("no id", "nul"), 422),
        **dict.fromkeys(("unknown", "no view"), 404),
        **dict.fromkeys(("changed", "too many"), 503),
        "large": 413,
    }
    assert recorded(world) == was


def test_the_page_stands_without_a_database(api: Api, world: Settings) -> None:
    away = world.model_copy(update={"database_url": SecretStr("postgresql://samefold@127.0.0.1:1/away")})
    with serving(away, access=ACCESS) as api:
        page = get(api, "/work")
        assert page.status_code == 200
        assert page.text.count('class="trouble"') == len(work.LISTS) + 3
        assert "OpenAccount/2" in page.text
        assert get(api, "/do/rebuild", view="balances").status_code == 503


def most_read(node: dict[str, Any]) -> float:
    """Rows that a plan has read of one table."""
    own = node["Actual Rows"] * node["Actual Loops"] if "Relation Name" in node else 0
    return max([own, *map(most_read, node.get("Plans", ()))])


def test_no_list_reads_a_whole_table(empty_world: Settings) -> None:
    upgrade(empty_world)
    with connect(empty_world, "test", by_key=True) as db:
        for statement in MANY:
            db.execute(statement.encode())
        for name, listing in work.LISTS.items():
            place: list[Any] = []
            seen: list[Any] = []
            for _ in range(2):
                text = listing.text(is_later=bool(place))
                rows = work.rows_of(db, text, place)
                [([plan],)] = db.execute(b"explain (analyze, format json) " + text, place)
                assert most_read(plan["Plan"]) < 2_000, f"{name}\n{plan}"
                assert len(rows) == work.SHOWN + 1, name
                shown = [tuple(row[column] for column in listing.key) for row in rows[: work.SHOWN]]
                assert shown == sorted({*shown} - {*seen}), name
                place, seen = [*shown[-1]], shown


MANY = (
    "insert into activations (policy, number, version, positions) select 'p' || n, 1, 1, '{}' from generate_series(1, 3) n",
    "insert into positions (agent, topic, partition, topic_id, next_offset, epoch, seq, command_offset, generation) "
    "select 'core', 'events', n, '', 0, 0, 0, 0, gen_random_uuid() from generate_series(0, 7) n",
    "insert into live (view, agent, version, table_name) values ('v', 'core', 1, 'v_v1'), ('w', 'core', 1, 'w_v1')",
    "insert into parked (table_name, stream, view, partition, since_offset, since_version, error) "
    "select 'v_v1', 's/' || lpad(n::text, 9, '0'), 'v', 0, 0, 1, 'e' from generate_series(1, 1000) n",
    # dead letters, sent wishes, timers of one moment and wishes to be sent
    "insert into outbox (id, policy, kind, partition, stream, version, number, target, type, due, sent_at, dead) "
    "select 'p1~' || n, 'p' || n % 3 + 1, 'send', n % 8, 's/' || lpad((n % 1000)::text, 9, '0'), n, 0, 't', 'T', "
    "case when n % 100 = 2 then timestamptz '2026-01-01' end, case when n % 100 = 1 then now() end, "
    "case when n % 100 > 3 then 'gone: x' end from generate_series(1, 105000) n",
    "insert into posts (id, policy, stream, version, number, endpoint, wished_at, dead) "
    "select 'p1~' || n, 'p1', 's/' || lpad((n % 100)::text, 9, '0'), n, 0, 'crm', now(), case when n % 2 = 0 then 'gone: x' end "
    "from generate_series(1, 20000) n",
    "insert into lanes (endpoint, policy, stream, next_attempt) "
    "select distinct endpoint, policy, stream, now() from posts where dead is null",
    "analyze",
)
