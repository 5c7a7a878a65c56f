"""make test + test-all: stores without processes; faults take longer. `samefold send`, as a script runs it."""

from __future__ import annotations

import gzip
import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from commands.client import (
    BadCommandLine,
    NotSent,
    OutcomeMissing,
    Sender,
    _ranges,
    answered,
    read_lines,
    sealed,
    wait_for,
)
from infra.database.connect import connect
from infra.settings import Settings
from tests.engine.infra import fatal
from tests.engine.spine import commits, deposit, handler, open_account, project, records_of, scalar, send, set_up
from tools.testing.fixtures import Samefold
from tools.testing.waiting import until

if TYPE_CHECKING:
    from tools.dev.stack import Stack

LINE = {"stream": "accounts/ada", "id": "1", "type": "OpenAccount", "data": {"overdraft_limit": 0, "on": "2026-01-01"}}


def written(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines))
    return path


def test_plain_and_gzipped_files_read_alike(tmp_path: Path) -> None:
    plain = written(tmp_path / "c.jsonl", json.dumps(LINE), "", json.dumps(LINE | {"id": "2", "expected_version": 1}))
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(plain.read_bytes()))
    commands = read_lines(plain)
    assert commands == read_lines(tmp_path / "c.jsonl.gz")
    plain.write_bytes(b"\xef\xbb\xbf" + plain.read_bytes())  # the byte order mark of many editors
    assert commands == read_lines(plain)
    assert {n: (c.id, c.expected_version) for n, c in commands.items()} == {1: ("1", None), 3: ("2", 1)}


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        '"text"',
        json.dumps({key: value for key, value in LINE.items() if key != "id"}),
        json.dumps(LINE | {"extra": 1}),
        json.dumps(LINE | {"stream": "no-context"}),
        json.dumps(LINE | {"id": ""}),
        json.dumps(LINE | {"id": "x" * 201}),
        json.dumps(LINE | {"stream": "accounts/a\x00b"}),
        "[" * 100_000,
        json.dumps(LINE | {"data": {"overdraft_limit": float("nan")}}),
        '{"id": "2", ' + json.dumps(LINE)[1:],
        json.dumps(LINE).replace('{"overdraft_limit"', '{"overdraft_limit": 5, "overdraft_limit"'),
        json.dumps(LINE | {"data": {"overdraft_limit": 5}}).replace("5", "1e400"),
        json.dumps(LINE | {"data": {"overdraft_limit": 5}}).replace("5", "0.1000000000000000055"),
    ],
)
def test_a_wrong_line_is_named_and_nothing_is_sent(tmp_path: Path, line: str) -> None:
    file = written(tmp_path / "c.jsonl", json.dumps(LINE), line)
    with pytest.raises(BadCommandLine, match=r"c\.jsonl, line 2") as wrong:
        read_lines(file)
    assert "Nothing was sent" in wrong.value.hint


def test_an_unknown_command_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("commands.client.has_personal_fields", lambda: True)
    file = written(tmp_path / "c.jsonl", json.dumps(LINE | {"type": "Depositt"}))
    with pytest.raises(BadCommandLine, match=r"line 1: .*'Depositt' of accounts/"):
        sealed(Settings(), read_lines(file), file)


def test_a_file_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "c.jsonl.gz").write_bytes(b"not gzip")
    for name in ("missing.jsonl", "c.jsonl.gz"):
        with pytest.raises(BadCommandLine, match=name):
            read_lines(tmp_path / name)


def test_nothing_of_a_file_with_a_wrong_line_reaches_the_log(
    world: Settings, samefold: Samefold, tmp_path: Path
) -> None:
    set_up(world)
    file = written(tmp_path / "c.jsonl", json.dumps(LINE), "{")
    assert samefold("send", str(file), settings=world).returncode == 1
    assert records_of(world, world.commands_topic) == []


def test_the_same_id_with_another_body_is_told_and_exits_1(world: Settings, samefold: Samefold, tmp_path: Path) -> None:
    set_up(world)
    with handler(world):
        send(world, open_account("ada"), deposit("ada", "d1", 5))
        until(lambda: len(commits(world)) == 2, "decided")
        project(world)
        same = {"stream": "accounts/ada", "id": "d1", "type": "Deposit", "data": {"on": "2026-01-02", "cents": 5}}
        file = written(tmp_path / "same.jsonl", json.dumps(same))
        done = samefold("send", str(file), "--wait", "--json", settings=world)
        assert (done.returncode, json.loads(done.stdout)["other_body"]) == (0, 0), (
            "the order of members does not matter"
        )
        file = written(tmp_path / "other.jsonl", json.dumps(same | {"data": {"cents": 6, "on": "2026-01-02"}}))
        done = samefold("send", str(file), "--wait", "--json", settings=world)
        assert (done.returncode, json.loads(done.stdout)["other_body"]) == (1, 1)
    assert [c.command_id for c in commits(world)] == ["open-ada", "d1"]


@pytest.mark.parametrize("release", ["this one", "of_another_release"])
def test_outcomes_that_do_not_come_are_told(world: Settings, release: str) -> None:
    set_up(world)
    commands = [open_account("ada")]
    Sender(world).send(commands, lambda _: None)
    if release == "of_another_release":
        with connect(world, "test") as db:
            db.execute(
                "update live set version = 2, table_name = 'command_outcomes_v2' where view = 'command_outcomes'"
            )
    assert answered(world, commands) == 0
    with pytest.raises(OutcomeMissing, match="1 commands have no outcome"):
        wait_for(world, commands, lambda _: None, timeout_s=0.1)


def test_a_line_that_is_too_large_names_itself_and_keeps_no_other_back(
    world: Settings, samefold: Samefold, tmp_path: Path
) -> None:
    set_up(world)
    huge = json.dumps(LINE | {"id": "2", "data": {"x": "x" * 1_100_000}})
    lines = [json.dumps(LINE), "", huge, json.dumps(LINE | {"id": "3"})]
    done = samefold("send", str(written(tmp_path / "c.jsonl", *lines)), settings=world)
    error = " ".join(done.stderr.split())
    assert (done.returncode, done.stdout) == (1, "")
    assert "1 of 3 commands are too large for the log, line 3." in error
    assert len(records_of(world, world.commands_topic)) == 2


@contextmanager
def frozen(stack: Stack) -> Iterator[None]:
    """The broker stands still."""
    broker = stack.kafka.process()
    assert broker is not None
    broker.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        broker.send_signal(signal.SIGCONT)


@pytest.mark.slow
def test_what_is_not_acknowledged_is_named_and_the_same_file_sent_again_does_nothing_twice(
    world: Settings, stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_up(world)
    commands = [open_account("ada"), *(deposit("ada", f"d{n}", 1) for n in range(40))]
    with monkeypatch.context() as soon:  # the second sending has its full time
        soon.setattr("infra.log.clients.ACK_TIMEOUT_S", 1.0)
        sender = Sender(world)
    acknowledged: list[int] = []
    missing = r"41 of 41 commands may be missing in the log, lines 1, 3-42: "
    with frozen(stack), pytest.raises(NotSent, match=missing) as not_sent:
        sender.send(commands, acknowledged.append, [1, *range(3, 43)])
    assert "Send the same file again" in not_sent.value.hint
    assert acknowledged == []
    send(world, *commands)
    with handler(world):
        until(lambda: len(commits(world)) == 41, "each is decided once")
    project(world)
    assert scalar(world, "select cents from balances_v2") == 40


def test_a_producer_that_cannot_go_on_is_told_and_the_next_sending_takes_another(world: Settings, stack: Stack) -> None:
    set_up(world)
    sender = Sender(world)
    with frozen(stack), ThreadPoolExecutor(1) as pool:
        first = sender._producer.now
        sending = pool.submit(sender.send, [open_account("ada"), open_account("bob")], lambda _: None)
        until(lambda: len(first) == 2, "both are under way")
        fatal.end(first)
        with pytest.raises(NotSent, match=r"2 of 2 commands may be missing in the log, lines 1-2"):
            sending.result()
    sender.send([open_account("ada")], lambda _: None)


def test_many_gaps_are_told_in_a_few_words() -> None:
    assert _ranges([7]) == "line 7"
    assert _ranges([3, 1, 2, 9]) == "lines 1-3, 9"
    assert _ranges(range(1, 1_000, 2)).endswith("37, 39 and others up to 999")
