"""make test + test-all: an API in a thread starts in a second; processes and stores that go take longer.

The API's process: starts without the stores, finds them, refuses inconsistent ones, and stops in order.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from confluent_kafka.admin import AdminClient

from api import stores
from api.server import server_of
from infra.database.connect import connect
from infra.errors import PartEnded
from infra.log import clients, topics
from infra.settings import Settings
from projections.engine.views.token import Token
from tests.engine.api.api import everything, problem, ready, served, serving
from tests.engine.api.front import api_process, listening_port
from tests.engine.api.raw_http import answer, connection, head, post
from tests.engine.spine import handler, scalar, set_up
from tools.dev.process import Service
from tools.testing.fixtures import ROOT
from tools.testing.waiting import DEADLINE_S, until

if TYPE_CHECKING:
    from tools.dev.stack import Stack


JSON = ("Content-Type", "application/json")
SESSIONS = """
select count(*) from pg_stat_activity
where datname = current_database() and starts_with(application_name, 'samefold front')
"""


def answered(answer: httpx.Response, *expected: str) -> bool:
    """Whether this command is refused by one of these codes, and was not appended."""
    return (
        answer.status_code == 503
        and problem(answer, 503, answer.json()["code"])["code"] in expected
        and answer.json().get("appended") == "no"
    )


@pytest.mark.slow
def test_stores_that_go_away_are_told_at_once_and_found_again(world: Settings, stack: Stack) -> None:
    """One after the other, and both, also by a process that starts meanwhile."""

    def kill(service: Service) -> None:
        server = service.process()
        assert server is not None
        server.kill()
        server.wait(DEADLINE_S)

    with everything(world) as api, ExitStack() as afterwards:
        afterwards.callback(stack.up)
        assert api.open("one").status_code == 200
        kill(stack.postgres)
        until(lambda: answered(api.open("two"), "database-unavailable"), "it notices")
        stack.up()
        until(lambda: api.open("two").status_code == 200, "it takes commands again")
        gc.collect()  # librdkafka ends this process if one of its threads frees its own client, as garbage of a test before
        kill(stack.kafka)
        until(lambda: answered(api.open("three"), "kafka-unavailable"), "it notices")
        kill(stack.postgres)
        with serving(world, "late") as late:
            assert late.client.get("/health/live").status_code == 200
            until(lambda: "database" in late.services.stores.failures, "it notices")
            assert answered(late.open("three"), "kafka-unavailable", "database-unavailable")
            stack.up()
            for one in (api, late):
                until(lambda one=one: one.open("three").status_code == 200, "it takes commands")  # type: ignore[misc]


def clients_of_kafka() -> list[AdminClient]:
    return [one for one in gc.get_objects() if isinstance(one, AdminClient)]


def test_while_kafka_is_away_checks_leave_no_client_of_it_behind(
    world: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has three threads or more, and garbage collections are far apart where a process does little."""
    monkeypatch.setattr(topics, "TRY_S", 0.1)
    checks: list[None] = []
    others = clients_of_kafka()  # of tests before
    gc.disable()
    try:
        with serving(world.model_copy(update={"kafka_bootstrap": "127.0.0.1:1"})) as api:
            api.services.stores.subscribe(lambda: checks.append(None))
            until(lambda: len(checks) >= 6, "Kafka was checked again and again")
            assert "kafka" in api.services.stores.failures
            kept = len(clients_of_kafka()) - len(others)
    finally:
        gc.enable()
    assert kept <= 3, "the checks' own, and those of a check that is under way"


@pytest.mark.slow
def test_a_topic_that_was_recreated_is_refused(world: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "COMPARE_S", 0.2)
    set_up(world)
    with served(world) as api:
        admin = clients.admin(world)
        for future in admin.delete_topics([world.commands_topic]).values():
            future.result(10)
        until(lambda: not admin.list_topics(timeout=DEADLINE_S).topics.get(world.commands_topic), "it is gone")
        topics.ensure(world)
        until(lambda: "topics" in api.services.stores.failures, "it is noticed")
        assert answered(api.open("x"), "topic-changed")
        assert api.client.get("/outcomes/accounts/x/x").json()["code"] == "topic-changed"
    # a process that starts now sees another contract than the database's
    with connect(world, "test") as db:
        db.execute("update topics set topic_id = 'another' where topic = %s", [world.events_topic])
    with serving(world) as api:
        until(lambda: answered(api.open("x"), "contract-broken"), "it is noticed")


def test_a_database_without_tables_is_refused_until_it_has_them(empty_world: Settings) -> None:
    with serving(empty_world) as api:
        until(lambda: answered(api.open("x"), "database-behind"), "it is noticed")
        set_up(empty_world)
        ready(api)


def test_a_part_of_the_process_that_fails_ends_the_process(world: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests would wait for ever: the supervisor restarts the process."""

    async def failing(*_: Any) -> None:
        raise ZeroDivisionError

    set_up(world)
    failed = server_of(world, "api", "127.0.0.1", 0)
    monkeypatch.setattr(failed.services.outcomes, "answer", failing)
    with pytest.raises(PartEnded, match=r"'outcomes' of api, .* raised ZeroDivisionError"):
        failed.run()


@pytest.mark.slow
def test_it_ends_soon_when_told_and_answers_every_request_that_waits(world: Settings, tmp_path: Path) -> None:
    set_up(world)
    never = Token.of(topics.describe(world, world.events_topic).id, {0: 10**12})
    prefer = ("Prefer", "wait=60")
    late = post("/accounts/x/deposit", b'{"cents": 1, "on": "2026-01-02"}')
    waiting = {
        head("GET", "/outcomes/accounts/x/x", [prefer]): (404, "no-outcome"),
        head("GET", f"/views/balances?after={never}", [prefer]): (503, "stopping"),
        late[:-1]: (503, "stopping"),
        late[:-2]: (503, "stopping"),
    }
    with handler(world), api_process(world, tmp_path / "api.log") as running, ExitStack() as clients:
        port = listening_port(running)
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=DEADLINE_S) as client:
            until(lambda: client.get("/health/ready").status_code == 200, "it is ready")
            opened = [clients.enter_context(connection(port)) for _ in waiting]
            for one, request in zip(opened, waiting, strict=True):
                one.sendall(request)
            in_progress = f"samefold_http_requests_in_progress {len(waiting) + 1}.0"
            until(lambda: in_progress in client.get("/metrics").text, "all of them wait")
        assert scalar(world, SESSIONS) >= 4
        running.send_signal(signal.SIGTERM)
        until(lambda: not listens(port), "it stops")
        opened[2].sendall(late[-1:])
        replies = [answer(one) for one in opened]
        assert replies[2].json["appended"] == "no", "a process that stops appends nothing"
        for reply, expected in zip(replies, waiting.values(), strict=True):
            assert (reply.status, reply.is_problem, reply.json["code"]) == (expected[0], True, expected[1])
            assert reply.headers["retry-after"] == "1"
        assert running.wait(DEADLINE_S) == 0
        # PostgreSQL takes a moment to end a session whose client has gone
        until(lambda: scalar(world, SESSIONS) == 0, "no connection is left")
    assert "Traceback" not in (tmp_path / "api.log").read_text()


@pytest.mark.parametrize("step", ["server_of", "collect_seldom", "limit_calls"])
def test_a_signal_before_it_serves_ends_it(world: Settings, step: str) -> None:
    """While it is made, nothing has begun: the signal itself may end the process, as in the moments before."""
    code = f"""
import os, signal, sys
import api.__main__ as process
step = process.{step}
def signalled(*arguments):
    os.kill(os.getpid(), signal.SIGTERM)
    return step(*arguments)
process.{step} = signalled
sys.argv = ["api", "--port", "0"]
process.main()
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | world.environment(), timeout=DEADLINE_S, check=False)
    assert done.returncode == (-signal.SIGTERM if step == "server_of" else 0)


def listens(port: int) -> bool:
    with suppress(ConnectionRefusedError), connection(port):
        return True
    return False


def test_a_request_that_gets_its_place_at_the_end_is_answered_too(world: Settings) -> None:
    set_up(world)
    small = world.model_copy(update={"api_max_waiting": 1, "api_wait_s": 30.0})
    with served(small) as api, ExitStack() as clients:
        opened = [clients.enter_context(connection(api.server.port)) for _ in range(2)]
        for one in opened:
            one.sendall(head("GET", "/outcomes/accounts/x/x", [("Prefer", "wait=60")]))
        in_progress = "samefold_http_requests_in_progress 3.0"  # one has the place, one waits for it, one asks this
        until(lambda: in_progress in httpx.get(f"{api.url}/metrics").text, "one waits for its place")
        api.server.should_exit = True
        assert [answer(one).json["code"] for one in opened] == ["no-outcome"] * 2


@pytest.mark.slow
def test_a_port_that_is_taken_is_named(world: Settings, tmp_path: Path) -> None:
    log = tmp_path / "api.log"
    with socket.create_server(("127.0.0.1", 0)) as taken, api_process(world, log, taken.getsockname()[1]) as running:
        assert running.wait(DEADLINE_S) == 1
    assert "can't listen on port" in log.read_text()
