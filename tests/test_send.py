"""`samefold send`, as a script runs it."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from commands.client import BadCommandLine, NotSent, OutcomeMissing, answered, read_commands, send_all, wait_for
from infra.settings import Settings
from tests.conftest import Samefold
from tests.spine import commits, deposit, handler, open_account, project, records_of, send, set_up, until

LINE = {"stream": "accounts/ada", "id": "1", "type": "OpenAccount", "data": {"overdraft_limit": 0, "on": "2026-01-01"}}


def written(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines))
    return path


def test_plain_and_gzipped_files_read_alike(tmp_path: Path) -> None:
    plain = written(tmp_path / "c.jsonl", json.dumps(LINE), "", json.dumps(LINE | {"id": "2", "expected_version": 1}))
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(plain.read_bytes()))
    commands = read_commands(plain)
    assert commands == read_commands(tmp_path / "c.jsonl.gz")
    assert [(c.id, c.expected_version) for c in commands] == [("1", None), ("2", 1)]


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
    ],
)
def test_a_wrong_line_is_named_and_nothing_is_sent(tmp_path: Path, line: str) -> None:
    file = written(tmp_path / "c.jsonl", json.dumps(LINE), line)
    with pytest.raises(BadCommandLine, match=r"c\.jsonl, line 2") as wrong:
        read_commands(file)
    assert "Nothing was sent" in wrong.value.cure


def test_a_file_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "c.jsonl.gz").write_bytes(b"not gzip")
    for name in ("missing.jsonl", "c.jsonl.gz"):
        with pytest.raises(BadCommandLine, match=name):
            read_commands(tmp_path / name)


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
        assert (done.returncode, json.loads(done.stdout)["other_body"]) == (0, 0), "the order of members tells nothing"
        file = written(tmp_path / "other.jsonl", json.dumps(same | {"data": {"cents": 6, "on": "2026-01-02"}}))
        done = samefold("send", str(file), "--wait", "--json", settings=world)
        assert (done.returncode, json.loads(done.stdout)["other_body"]) == (1, 1)
    assert [c.command_id for c in commits(world)] == ["open-ada", "d1"]


def test_outcomes_that_do_not_come_are_told(world: Settings) -> None:
    set_up(world)
    commands = [open_account("ada")]
    send_all(world, commands, lambda _: None)
    assert answered(world, commands) == 0
    with pytest.raises(OutcomeMissing, match="1 commands have no outcome"):
        wait_for(world, commands, lambda _: None, timeout_s=0.1)


def test_a_record_that_the_topic_refuses_is_told(world: Settings) -> None:
    set_up(world)
    huge = deposit("ada", "d1", 5)
    from infra.log.records import Command

    too_large = Command(huge.id, huge.stream, huge.type, type(huge.data)(b'{"x":"' + b"x" * 1_100_000 + b'"}'))
    with pytest.raises(NotSent):
        send_all(world, [too_large], lambda _: None)
