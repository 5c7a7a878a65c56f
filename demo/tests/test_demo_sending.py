"""make test: an API and a log of the test's own. The demo's sending keeps each account's order, and repeats what has no answer."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from urllib.parse import unquote

import msgspec
import pytest

from demo import sending as module
from demo.sending import Answer, Sending, Unanswered, Unexpected
from infra.log.records import Command
from infra.settings import Settings
from proofs.kit import posts_answered
from tools.testing.waiting import DEADLINE_S, until

Log = list[tuple[str, str]]
"""What came into the log, as (account, id), by whichever way."""
# an account's name may hold anything, and stays in its segment of the path
COMMANDS = [
    Command(f"c{number}", f"accounts/{number % 7}/ %?#", "ChargeFee", msgspec.Raw(b"{}")) for number in range(200)
]


class Door:
    """An API that notes what it is sent. `says` has a status for each request, or None to hang up; at its end all is accepted."""

    def __init__(self, log: Log) -> None:
        self.says: list[int | None] = []
        self.log = log
        self.port = 0
        self.keys: list[str] = []
        self.held = threading.Event()
        self.held.set()
        self.lock = threading.Lock()

    def answer(self, path: str, key: str) -> tuple[int, dict[str, str], bytes] | None:
        with self.lock:
            self.keys.append(key)
            status = self.says.pop(0) if self.says else 200
        self.held.wait(DEADLINE_S)
        if status is None:
            return None
        _, context, account, kind = path.split("/")
        assert (context, kind) == ("accounts", "charge-fee")
        if status in (200, 409):
            with self.lock:
                self.log.append((unquote(account), key))
        told = {"version": len(self.log), "code": "no" if status == 409 else "x", "detail": "words"}
        return status, {}, msgspec.json.encode(told)

    def sending(self, every: int) -> Sending:
        return Sending(Settings(), "127.0.0.1", self.port, every)


@pytest.fixture
def door(monkeypatch: pytest.MonkeyPatch) -> Iterator[Door]:
    log: Log = []

    class Sender:
        def __init__(self, _settings: Settings) -> None: ...

        def send(self, commands: Sequence[Command], _progress: object) -> None:
            log.extend(map(named, commands))

    monkeypatch.setattr(module, "Sender", Sender)
    door = Door(log)
    with posts_answered(door.answer) as door.port:
        yield door
        door.held.set()


def named(command: Command) -> tuple[str, str]:
    return command.stream.partition("/")[2], command.id


def order(log: Log) -> dict[str, list[str]]:
    found = defaultdict(list)
    for account, id_ in log:
        found[account].append(id_)
    return found


def test_each_account_s_commands_get_into_the_log_in_their_order(door: Door) -> None:
    with door.sending(every=3) as sending:
        for start in range(0, len(COMMANDS), 50):
            sending.send(COMMANDS[start : start + 50])
        sending.finish()
    assert order(door.log) == order([*map(named, COMMANDS)])
    assert sorted(door.keys) == sorted(one.id for one in COMMANDS[2::3])
    assert {id_ for _, id_ in sending.answers} == set(door.keys)


def test_others_go_on_while_one_account_waits_for_its_answer(door: Door) -> None:
    door.held.clear()
    with door.sending(every=8) as sending:
        sending.send(COMMANDS[:15])
        waiting = COMMANDS[7]
        assert sending.is_asking()
        assert {account for account, _ in door.log} == {named(one)[0] for one in COMMANDS[:7]}
        assert named(COMMANDS[14]) not in door.log, "it stands behind the one that is under way"
        assert sending.answers == {(waiting.stream, waiting.id): None}
        assert sending.held == 2
        door.held.set()
        sending.finish()
        assert sending.held == 0
        assert order(door.log)[named(waiting)[0]] == ["c0", "c7", "c14"]


def test_a_request_is_repeated_under_its_key_until_it_is_answered(door: Door) -> None:
    door.says = [None, 503, 429, 202, None, 409]
    with door.sending(every=1) as sending:
        sending.send(COMMANDS[:1])
        sending.finish()
        assert len(sending.broken_off) == 2
        assert sending.answered_at > 0
    assert Counter(door.keys) == {"c0": 6}
    assert list(sending.answers.values()) == [Answer("rejected", 1, "no")]


def test_an_answer_that_should_not_come_ends_the_demo(door: Door) -> None:
    door.says = [422]
    door.held.clear()
    with door.sending(every=1) as sending:
        sending.send(COMMANDS[:1])
        door.held.set()
        with pytest.raises(Unexpected, match=r"c0 of accounts/0/.* was answered 422 x: words"):
            sending.finish()
        with pytest.raises(Unexpected):
            sending.send(COMMANDS[1:2])


def test_answers_are_not_waited_for_for_ever(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ANSWERED_WITHIN_S", 0.1)
    door.held.clear()
    with door.sending(every=1) as sending:
        sending.send(COMMANDS[:2])
        until(lambda: len(door.keys) == 2, "both are under way")
        with pytest.raises(Unanswered, match="2 commands"):
            sending.finish()
