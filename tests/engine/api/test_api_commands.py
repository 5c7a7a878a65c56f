"""make test + test-all: a command takes milliseconds, a wait that passes seconds.

Commands over HTTP: an answer says what is in the log and in the rows, and a request that is refused has done nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import confluent_kafka
import httpx
import pytest
from confluent_kafka import KafkaError, KafkaException

from api import commands as api_commands
from api import waits
from api.commands import REJECTED, router_of
from api.services import Services
from api.waits import Notifications, outcome_after
from commands.append import NotAppended
from commands.outcomes import outcomes_query
from domain.engine.contexts import RECORDED, BadContext, contexts
from infra.access import Access
from infra.database.connect import connect
from infra.log.partitioner import partition_of
from infra.settings import Settings
from projections.engine.store.positions import channel
from projections.engine.views.token import Token
from tests.engine.api.api import Api, Producer, agent, appended, everything, fresh, named, problem, served
from tests.engine.api.raw_http import INTERNALS, SECRET
from tests.engine.spine import commits, handler, project, scalar, send, set_up, withdraw
from tools.testing.waiting import DEADLINE_S, until

Answer = httpx.Response


def deposit(api: Api, name: str, cents: int, key: str = "", **headers: str) -> Answer:
    return api.post(name, "deposit", named(headers), key, cents=cents)


def balance(world: Settings, name: str) -> int:
    return int(scalar(world, "select cents from balances_v2 where account = %s", name))


def of(world: Settings, name: str) -> list[str]:
    """The outcomes in the log of one account, in order."""
    return [commit.outcome for commit in commits(world) if commit.stream == f"accounts/{name}"]


@contextmanager
def appends_nothing(world: Settings) -> Iterator[None]:
    before = appended(world)
    yield
    assert appended(world) == before


def test_an_accepted_command_is_in_the_log_and_in_the_rows_when_it_is_answered(
    api: Api, shared_world: Settings
) -> None:
    name = api.opened()
    answer = deposit(api, name, 250, "d1")
    assert balance(shared_world, name) == 250
    body = answer.json()
    assert answer.status_code == 200
    assert body.keys() == {"outcome", "stream", "command_id", "version", "position", "at"}
    told = (body["outcome"], body["stream"], body["command_id"], body["version"])
    assert told == ("accepted", f"accounts/{name}", "d1", 2)
    assert answer.headers["ETag"] == '"2"'
    assert answer.headers["Idempotency-Key"] == '"d1"'
    assert answer.headers["Samefold-Position"] == body["position"]
    assert of(shared_world, name) == ["accepted", "accepted"]


def test_a_refusal_is_told_in_the_words_of_the_business_and_recorded(api: Api, shared_world: Settings) -> None:
    name, poor = api.opened(), "The balance and the overdraft limit do not cover the amount."
    for _ in range(2):
        answer = api.post(name, "withdraw", key="w1", cents=1)
        told = problem(answer, 409, "insufficient-funds")
        assert told["type"] == "/problems/accounts/insufficient-funds"
        assert told["title"] == poor
        assert (told["outcome"], told["version"], told["command_id"]) == ("rejected", 1, "w1")
        deposit(api, name, 500, "d1")  # what is answered once stays the answer, whatever happened since
    assert of(shared_world, name) == ["accepted", "rejected", "accepted"]
    outcome = api.get(f"/outcomes/accounts/{name}/w1").json()
    assert (outcome["outcome"], outcome["code"], outcome["message"]) == ("rejected", "insufficient-funds", poor)
    positions = Token.parse(outcome["position"]).positions.values()
    assert [len(offsets) for offsets in positions] == [1], "a reader waits for the command's own partition alone"


def test_a_command_sent_again_gets_the_very_same_answer_and_does_nothing_twice(
    api: Api, shared_world: Settings
) -> None:
    name = api.opened()
    first = deposit(api, name, 5, "again")
    deposit(api, name, 7)
    second = deposit(api, name, 5, "again")
    assert first.json() | {"position": ""} == second.json() | {"position": ""}
    assert first.headers["Samefold-Position"] != second.headers["Samefold-Position"], "a later request may read later"
    assert balance(shared_world, name) == 12


def test_a_key_belongs_to_one_command(api: Api, shared_world: Settings) -> None:
    name = api.opened()
    deposit(api, name, 5, "mine")
    for other in (
        deposit(api, name, 6, "mine"),
        deposit(api, name, 5, "mine", If_Match='"1"'),
        api.post(name, "credit-interest", key="mine", cents=5),
    ):
        assert problem(other, 422, "key-reused")["command_id"] == "mine"
    assert balance(shared_world, name) == 5
    assert deposit(api, api.opened(), 5, "mine").status_code == 200, "keys are a stream's own"


def test_without_a_key_each_request_is_a_command_of_its_own(api: Api, shared_world: Settings) -> None:
    name = api.opened()
    one, other = deposit(api, name, 5), deposit(api, name, 5)
    assert one.headers["Idempotency-Key"] != other.headers["Idempotency-Key"]
    assert balance(shared_world, name) == 10


def test_a_command_may_expect_a_version(api: Api, shared_world: Settings) -> None:
    name = fresh()
    first = api.post(name, "open-account", {"If-None-Match": "*"}, overdraft_limit=0)
    assert first.headers["ETag"] == '"1"'
    told = problem(api.post(name, "open-account", {"If-None-Match": "*"}, overdraft_limit=0), 412, "version-conflict")
    assert (told["version"], told["detail"]) == (1, "The stream is at version 1, not 0.")
    assert deposit(api, name, 5, If_Match='"1"').status_code == 200
    problem(deposit(api, name, 5, If_Match='"1"'), 412, "version-conflict")
    assert balance(shared_world, name) == 5


@pytest.mark.slow
def test_when_the_wait_has_passed_the_command_is_in_the_log_and_is_answered_later(world: Settings) -> None:
    set_up(world)
    with served(world) as api:

        def opened(prefer: str) -> Answer:
            return api.post("x", "open-account", {"Prefer": prefer}, "k", overdraft_limit=0)

        answer = opened("wait=0")
        assert (answer.status_code, answer.headers["Preference-Applied"]) == (202, "wait=0")
        assert opened("wait=1").status_code == 202
        problem(api.get(answer.headers["Location"]), 404, "no-outcome")
        with handler(world):
            until(lambda: len(commits(world)) == 1, "the handler decides")
        project(world)
        assert api.get(answer.headers["Location"]).json()["outcome"] == "accepted"
        # a repeated command makes no notification and needs no agent: it is looked up at once
        assert opened("wait=20").status_code == 200
        # and an agent that comes later answers those who wait
        with handler(world), agent(world):
            assert api.post("y", "open-account", {"Prefer": "wait=60"}, overdraft_limit=0).status_code == 200


def test_equal_paths_are_one_path(api: Api) -> None:
    name = api.opened()
    answer = api.client.post(
        f"/%61ccounts/{name}/d%65posit",
        content=b'{"cents": 1, "on": "2026-01-02"}',
        headers={"Content-Type": "Application/JSON; charset=UTF-8"},
    )
    assert answer.json()["version"] == 2


# too much at once


def test_callers_beyond_the_bound_are_told_to_come_back(world: Settings) -> None:
    set_up(world)
    with served(world.model_copy(update={"api_max_waiting": 1, "api_wait_s": 0.5})) as api, appends_nothing(world):
        asyncio.run_coroutine_threadsafe(api.services.places.acquire(), api.loop).result()
        answer = deposit(api, "x", 1)
        assert problem(answer, 429, "too-many-waiting")["appended"] == "no"
        assert answer.headers["Retry-After"] == "1"


def test_callers_beyond_the_bound_wait_for_a_place(world: Settings) -> None:
    small = world.model_copy(update={"api_max_waiting": 1})
    with everything(small) as api, ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(lambda n: api.post(f"x{n}", "open-account", overdraft_limit=0), range(20)))
        assert [answer.status_code for answer in answers] == [200] * 20
        assert api.services.places.taken == 0


@pytest.mark.slow
def test_commands_are_refused_while_the_read_model_is_too_far_behind(
    world: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_commands, "MAX_LAG", 10)
    set_up(world)
    with handler(world):
        send(world, *(withdraw("x", f"w{n}", 1) for n in range(20)))
        until(lambda: len(commits(world)) == 20, "the handler decides")
    with served(world) as api:
        with appends_nothing(world):
            answer = deposit(api, "x", 1)
            assert problem(answer, 429, "read-model-behind")["appended"] == "no"
        project(world)
        until(lambda: deposit(api, "x", 1, Prefer="respond-async").status_code == 202, "it catches up")


@pytest.mark.slow
def test_many_who_wait_cost_a_query_a_beat(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    query = outcomes_query

    def counting(table: str) -> bytes:
        asked.append(1)
        return query(table)

    monkeypatch.setattr("api.waits.outcomes_query", counting)

    with ThreadPoolExecutor(100) as pool:
        assert {answer.status_code for answer in pool.map(api.open, [fresh() for _ in range(100)])} == {200}
    assert 0 < len(asked) < 75


@pytest.mark.slow
def test_a_record_that_unpacks_to_a_thousand_times_its_size_has_no_effect(world: Settings) -> None:
    """No client of the API can send one; who may write to the topics can."""
    size, errors = 64 * 1024 * 1024, list[object]()
    at = "accounts/bomb", partition_of("accounts/bomb", world.partitions)
    of_bombs = {"bootstrap.servers": world.kafka, "compression.type": "gzip", "message.max.bytes": 2 * size}
    producer = confluent_kafka.Producer(of_bombs)
    with everything(world) as api:
        for topic in (world.commands_topic, world.events_topic):
            # as bytes of a record, a thousandth of what the topic's limit looks at
            producer.produce(topic, bytes(size), *at, on_delivery=lambda error, _: errors.append(error))
        assert producer.flush(DEADLINE_S) == 0
        assert errors == [None, None]
        api.post("bomb", "open-account", {"Prefer": "respond-async"}, "b", overdraft_limit=0)
        until(lambda: api.get("/outcomes/accounts/bomb/b").status_code == 200, "what is behind them is decided")
        assert api.get("/views/balances/bomb").json()["row"]["account"] == "bomb"


# appends that fail


DENIED = KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED, SECRET)


@pytest.mark.parametrize("error", [BufferError(SECRET), KafkaException(DENIED)])
def test_an_append_that_fails_at_once_has_no_effect_and_the_next_may_do(
    api: Api, shared_world: Settings, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    name = api.opened()
    with appends_nothing(shared_world), monkeypatch.context() as patch:
        patch.setattr(api.services.appender._producer, "now", Producer(error))
        answer = deposit(api, name, 5, "k")
        assert problem(answer, 503, "not-appended")["appended"] == "no"
        assert answer.headers["Retry-After"] == "1"
    assert deposit(api, name, 5, "k").status_code == 200
    assert balance(shared_world, name) == 5


@pytest.mark.usefixtures("api")
def test_only_commands_that_come_beside_others_are_gathered(api: Api) -> None:
    services = api.services
    for _ in range(40):
        services.round_trip.took(0.03)
    found = {}
    for others in (0, 4, 8, 1_000):
        services.places.taken = 1 + others
        found[others] = services.gather_s()
    services.places.taken = 0
    assert found == {
        0: 0.0,
        4: pytest.approx(0.005, abs=1e-4),
        8: services.round_trip.seconds,
        1_000: services.round_trip.seconds,
    }


def test_an_append_that_gathers_is_sent_though_no_other_comes(
    shared_world: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no client gets 202 before its command is known to be in the log."""
    monkeypatch.setattr(Services, "gather_s", lambda _: 0.05)
    produced: list[bytes] = []

    class Silent(Producer):
        def produce(self, _topic: str, value: bytes, **_: Any) -> None:
            produced.append(value)

    with served(shared_world.model_copy(update={"api_wait_s": 0.2})) as api:
        api.services.appender._producer.now = Silent()
        for prefer in ("respond-async", "wait=1", "wait=0"):
            told = problem(deposit(api, "unheard", 5, Prefer=prefer), 503, "maybe-appended")
            assert told["appended"] == "unknown"
        until(lambda: len(produced) == 3, "all were produced")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (KafkaError._MSG_TIMED_OUT, "maybe-appended"),
        (KafkaError._PURGE_INFLIGHT, "maybe-appended"),
        (KafkaError.NOT_ENOUGH_REPLICAS_AFTER_APPEND, "maybe-appended"),
        (KafkaError._PURGE_QUEUE, "maybe-appended"),  # it may wait to be tried again
        (KafkaError.MSG_SIZE_TOO_LARGE, "not-appended"),
    ],
)
def test_what_is_known_of_an_append_that_fails_later(
    api: Api, monkeypatch: pytest.MonkeyPatch, error: int, code: str
) -> None:
    class Late(Producer):
        def produce(self, *_: Any, on_delivery: Any, **__: Any) -> None:
            on_delivery(KafkaError(error, SECRET), None)
            api.services.appender._wake()

    with monkeypatch.context() as patch:
        patch.setattr(api.services.appender._producer, "now", Late())
        answer = deposit(api, "late", 5, "k1")
    told = problem(answer, 503, code)
    if code == "maybe-appended":
        assert (told["appended"], told["command_id"]) == ("unknown", "k1")
        assert answer.headers["Location"] == told["outcome"] == "/outcomes/accounts/late/k1"
    else:
        assert told["appended"] == "no"


def test_an_append_that_fails_as_the_process_ends_is_not_called_pending() -> None:
    async def both() -> None:
        appended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        appended.set_exception(NotAppended("full"))
        given_up: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        given_up.set_result(None)
        await outcome_after(appended, given_up, 1.0, or_append=False)

    with pytest.raises(NotAppended):
        asyncio.run(both())


# names that would be ambiguous over HTTP are refused at the start


def test_a_context_may_not_be_called_as_something_else_of_the_api() -> None:
    with pytest.raises(BadContext, match="'views'"):
        router_of({"views": replace(contexts()["accounts"], name="views")}, [])


def test_every_code_that_a_handler_rejects_with_is_a_kind_of_problem() -> None:
    assert REJECTED.keys() == RECORDED


# how an outcome is found


@pytest.mark.usefixtures("api")
def test_a_repeated_command_is_looked_up_at_once(shared_world: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "POLL_S", 60.0)
    with served(shared_world) as seldom:
        name = seldom.opened()
        for _ in range(3):
            assert deposit(seldom, name, 5, "again", Prefer="wait=20").status_code == 200


@pytest.mark.parametrize("payload", ["1:" + "9" * 5_000, "x", "1:", "1:2:3", "-1:5", "", "²:1"])
def test_a_notification_of_somebody_elses_ends_nothing(api: Api, shared_world: Settings, payload: str) -> None:
    """Every role of the database may notify."""
    heard: list[object] = []
    api.services.notifications.subscribe(lambda _, moved: heard.append(moved))
    with connect(shared_world, "test") as db:
        db.execute("select pg_notify(%s, %s)", (channel("core"), payload))
    until(lambda: bool(heard), "it is heard")
    assert api.get("/health/ready").status_code == 200


@pytest.mark.slow
@pytest.mark.usefixtures("api")
def test_without_any_notification_the_poll_finds_the_outcome(
    shared_world: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Notifications, "subscribe", lambda *_: None)
    with served(shared_world) as deaf:
        assert deposit(deaf, deaf.opened(), 5, Prefer="wait=20").status_code == 200


def test_a_command_whose_own_checks_fail_is_recorded_as_failed(
    world: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As pydantic's do on a timedelta of a billion days. The handler, where the same checks fail, is the one who says so."""

    def failing(_kind: type) -> Any:
        def validate(_body: bytes) -> Any:
            raise OverflowError(SECRET)

        return validate

    monkeypatch.setattr(api_commands, "validator", failing)
    monkeypatch.setitem(contexts()["accounts"].command_readers, "OpenAccount/2", failing(object))
    with everything(world, access=Access(lambda *_: True, lambda *_: True)) as api:
        unasked = api.post("a", "open-account", {"Caller": "ada"}, overdraft_limit=0)
        problem(unasked, 500, "defect")  # access.py can't be asked about it
        for _ in range(2):
            problem(api.open("a"), 500, "failed")
        told = api.get("/outcomes/accounts/a/a")
        assert (told.json()["code"], INTERNALS.search(told.text)) == ("failed", None)
    assert [commit.outcome for commit in commits(world)] == ["rejected"]
