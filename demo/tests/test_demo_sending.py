"""The demo's sending keeps each account's order, repeats what is not answered under the same key, and tells the answers."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec
import pytest

from demo import sending as module
from demo.sending import Answer, Sending, Unanswered, Unexpected, path_of
from infra.log.records import Command
from infra.settings import Settings
from tests.engine.spine import until


def command(stream: str, number: int) -> Command:
    return Command(f"c{number}", stream, "ChargeFee", msgspec.Raw(b'{"n": %d}' % number))


class Door:
    """An API that notes what it is sent. `says` has a status for each request, or None to hang up; at its end all is accepted."""

    def __init__(self, log: list[tuple[str, str]]) -> None:
        self.says: list[int | None] = []
        self.log = log
        self.keys: list[str] = []
        self.held = threading.Event()
        self.held.set()
        self.lock = threading.Lock()
        door = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            wbufsize = -1  # head and body in two packets would wait for an acknowledgement between them

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                key = self.headers["Idempotency-Key"].strip('"')
                with door.lock:
                    door.keys.append(key)
                    status = door.says.pop(0) if door.says else 200
                door.held.wait(20)
                if status is None:
                    self.close_connection = True
                    return
                if status in (200, 409):
                    with door.lock:
                        door.log.append((self.path.split("/")[2], key))
                told = {"version": len(door.log), "code": "no" if status == 409 else "x", "detail": "words"}
                body = msgspec.json.encode(told)
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """What came into the log, as (account, id), by whichever way."""
    found: list[tuple[str, str]] = []

    class Sender:
        def __init__(self, _settings: Settings) -> None: ...

        def send(self, commands: Sequence[Command], _progress: object) -> None:
            found.extend((one.stream.partition("/")[2], one.id) for one in commands)

    monkeypatch.setattr(module, "Sender", Sender)
    return found


@pytest.fixture
def door(log: list[tuple[str, str]]) -> Iterator[Door]:
    door = Door(log)
    thread = threading.Thread(target=door.server.serve_forever, args=(0.01,))
    thread.start()
    yield door
    door.held.set()
    door.server.shutdown()
    thread.join()
    door.server.server_close()


COMMANDS = [command(f"accounts/{number % 7}", number) for number in range(200)]


def order(log: Sequence[tuple[str, str]]) -> dict[str, list[str]]:
    found = defaultdict(list)
    for account, id_ in log:
        found[account].append(id_)
    return found


IN_ORDER = order([(one.stream.partition("/")[2], one.id) for one in COMMANDS])


def test_each_account_s_commands_get_into_the_log_in_their_order(door: Door) -> None:
    with Sending(Settings(), "127.0.0.1", door.server.server_port, every=3) as sending:
        for start in range(0, len(COMMANDS), 50):
            sending.send(COMMANDS[start : start + 50])
        sending.finish()
    assert order(door.log) == IN_ORDER
    assert sorted(door.keys) == sorted(one.id for one in COMMANDS[2::3])
    assert {id_ for _, id_ in sending.answers} == set(door.keys)


def test_others_go_on_while_one_account_waits_for_its_answer(door: Door) -> None:
    door.held.clear()
    with Sending(Settings(), "127.0.0.1", door.server.server_port, every=8) as sending:
        sending.send(COMMANDS[:15])
        waiting = COMMANDS[7]
        assert sending.is_asking()
        assert {account for account, _ in door.log} == {str(n) for n in range(7)}
        assert ("0", "c14") not in door.log, "it stands behind the one that is under way"
        assert sending.answers == {(waiting.stream, waiting.id): None}
        assert sending.held == 2
        door.held.set()
        sending.finish()
        assert sending.held == 0
        assert [id_ for account, id_ in door.log if account == "0"] == ["c0", "c7", "c14"]


def test_a_request_is_repeated_under_its_key_until_it_is_answered(door: Door) -> None:
    door.says = [None, 503, 429, 202, None, 409]
    with Sending(Settings(), "127.0.0.1", door.server.server_port, every=1) as sending:
        sending.send(COMMANDS[:1])
        sending.finish()
        assert len(sending.broken_off) == 2
        assert sending.answered_at > 0
    assert Counter(door.keys) == {"c0": 6}
    assert list(sending.answers.values()) == [Answer("rejected", 1, "no")]


def test_an_answer_that_should_not_come_ends_the_demo(door: Door) -> None:
    door.says = [422]
    with Sending(Settings(), "127.0.0.1", door.server.server_port, every=1) as sending:
        sending.send(COMMANDS[:1])
        with pytest.raises(Unexpected, match="c0 of accounts/0 was answered 422 x: words"):
            sending.finish()
        with pytest.raises(Unexpected):
            sending.send(COMMANDS[1:2])


def test_answers_are_not_waited_for_for_ever(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ANSWERED_WITHIN_S", 0.1)
    door.held.clear()
    with Sending(Settings(), "127.0.0.1", door.server.server_port, every=1) as sending:
        sending.send(COMMANDS[:2])
        until(lambda: len(door.keys) == 2, "both are under way")
        with pytest.raises(Unanswered, match="2 commands"):
            sending.finish()


@pytest.mark.parametrize(
    ("stream", "path"),
    [("accounts/7", "/accounts/7/charge-fee"), ("accounts/a/b %?#", "/accounts/a%2Fb%20%25%3F%23/charge-fee")],
)
def test_a_stream_s_id_stays_in_its_segment(stream: str, path: str) -> None:
    assert path_of(command(stream, 1)) == path
