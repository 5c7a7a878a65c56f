"""make test: functions without a store.

Whatever stands in `commands` becomes a command or a recorded rejection; nothing that arrives may stop a partition."""

import json
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from commands.decision import Versioned, decide
from commands.intake import (
    MAX_ID_BYTES,
    MAX_MESSAGE,
    Intake,
    Received,
    bad_name,
    command_of,
    fingerprint_of,
    reason,
    receive,
    reserved_stream,
)
from domain.engine.contexts import context_of
from domain.language import Cents, fact
from infra.log.partitioner import partition_of
from infra.log.records import Command, Commit, Record, decode_event, encode
from tests.engine import purse
from tests.engine.purse import PURSE, Fill, Spend, State

PARTITIONS = 4
OFFSET = 7
INTAKE = Intake(topic_id="topic", partitions=PARTITIONS, max_bytes=100_000, contexts={"purse": PURSE})
FILL: dict[str, Any] = {"cents": 5, "note": "found"}


def record(value: bytes | None, stream: str = "purse/1") -> Record:
    """A record with the key and in the partition that belong to the stream."""
    return Record(partition_of(stream, PARTITIONS), OFFSET, 0, stream.encode(), value)


def command(body: str | bytes = b'{"cents":5}', **parts: str) -> bytes:
    """A command record, its parts as raw JSON: what is wrong with it is written by the test."""
    members = {"samefold": '"command/1"', "id": '"a"', "stream": '"purse/1"', "type": '"Fill"'} | parts
    head = ",".join(f'"{name}":{value}' for name, value in members.items())
    return b"{" + head.encode() + b',"data":' + (body.encode() if isinstance(body, str) else body) + b"}"


def received(value: bytes | None, stream: str = "purse/1") -> Received:
    return receive(record(value, stream), INTAKE)


def recordable(received: Received) -> Commit:
    """The commit that the answer becomes; it must be one that every reader can read."""
    decided = decide(received, Versioned(3, State(100)), epoch=1, seq=1, max_bytes=900_000)
    read = decode_event(Record(0, 2, 0, None, decided.value))
    assert read == decided.commit
    assert (decided.commit.outcome == "rejected") == (decided.commit.reason is not None)
    if read.reason is not None:
        assert 0 < len(read.reason.message) <= MAX_MESSAGE
        assert read.reason.message.isprintable()
        assert decided.after == Versioned(3, State(100))
    assert bad_name("purse/1", decided.commit.command_id) is None
    return decided.commit


def rejected(received: Received) -> str:
    """The code of the rejection."""
    assert received.offset == OFFSET
    assert received.fingerprint
    why = recordable(received).reason
    assert why is not None
    return why.code


def under_derived_id(received: Received) -> bool:
    partition = partition_of("purse/1", PARTITIONS)
    return (received.stream, received.id) == (f"-/{partition}", f"topic:{partition}:{OFFSET}")


# A command as it should be.


def test_a_command_is_received_with_its_context_and_its_body_validated() -> None:
    answer = received(command(json.dumps(FILL), expected_version="3"))
    assert answer == Received(
        offset=OFFSET,
        stream="purse/1",
        id="a",
        fingerprint=answer.fingerprint,
        expected_version=3,
        context=PURSE,
        command=answer.command,
    )
    assert command_of(answer) == Fill(cents=5, note="found")
    assert recordable(answer).outcome == "accepted"
    assert command_of(received(command('{"cents":5}', type='"Spend"'))) == Spend(cents=5)


@pytest.mark.parametrize(
    "text", ["'", '"', "\\", "'; drop table live; --", "%s", "{}", "🦊", "e\u0301", "\u202e", "a\u2028b"]
)
def test_odd_text_is_text(text: str) -> None:
    stream, note = f"purse/{text}", json.dumps({"cents": 5, "note": text})
    answer = received(command(note, id=json.dumps(text), stream=json.dumps(stream)), stream)
    assert (answer.stream, answer.id, command_of(answer)) == (stream, text, Fill(cents=5, note=text))


def test_members_in_another_order_and_unknown_members_of_the_envelope_do_not_matter() -> None:
    value = b'{"samefold":"command/1", "trace":[1], "data":{"cents":5}, "type":"Fill", "stream":"purse/1", "id":"a"}'
    assert command_of(received(value)) == Fill(cents=5)


def test_of_a_repeated_member_the_last_one_counts_for_body_and_fingerprint_alike() -> None:
    """The API and `samefold send` refuse it; other writers reach the handler, too."""
    twice = received(command('{"cents":1,"cents":5}'))
    assert command_of(twice) == Fill(cents=5)
    assert twice.fingerprint == received(command('{"cents":5}')).fingerprint


HIDDEN = [
    *("e\u0301", "\u202eabc", "a\u200bb", "a\u00a0b", "a\u2028b", "a\u3000b", "\ufeffa"),
    *(" a", "a ", "a  b", "a\u00a0", "\u00e9 ", "a/\u200d"),
]


@pytest.mark.parametrize("name", HIDDEN, ids=ascii)
def test_no_new_stream_has_a_name_that_looks_like_another_s(name: str) -> None:
    stream = f"purse/{name}"
    answer = received(command(stream=json.dumps(stream)), stream)
    new = decide(answer, Versioned(0, State()), epoch=1, seq=1, max_bytes=900_000).commit
    assert new.reason is not None
    assert (new.reason.code, new.reason.message[:10]) == ("unclear-stream", "the stream")
    assert recordable(answer).outcome == "accepted", "to a stream that is there commands are sent as before"


@pytest.mark.parametrize("name", ["a", "a b", "\u00e9", "\U0001f98a", "\u4f60 \u597d", "a/b", "\U0010ffff"], ids=ascii)
def test_any_other_name_may_be_a_new_stream_s(name: str) -> None:
    stream = f"purse/{name}"
    answer = received(command(stream=json.dumps(stream)), stream)
    assert decide(answer, Versioned(0, State()), epoch=1, seq=1, max_bytes=900_000).commit.outcome == "accepted"


def test_who_sent_it_is_kept_and_is_no_part_of_the_fingerprint() -> None:
    plain, named = received(command()), received(command(by='"ada"'))
    assert (plain.by, named.by) == (msgspec.UNSET, "ada")
    assert named.fingerprint == plain.fingerprint
    assert (recordable(named).by, recordable(plain).by) == ("ada", msgspec.UNSET)
    refused = received(command('{"cents":"many"}', by='"ada"'))
    assert (recordable(refused).outcome, recordable(refused).by) == ("rejected", "ada")
    for by in ("x" * 201, "a\n", "ada\u0085", ""):
        nobody = received(command(by=json.dumps(by)))
        assert (rejected(nobody), recordable(nobody).by) == ("malformed", msgspec.UNSET)
        assert "'by'" in str(nobody.rejection)


# What is no command record at all is rejected under an id derived from where it stands.

NO_COMMAND = {
    "empty": b"",
    "tombstone": None,
    "not JSON": b"deposit 5",
    "not UTF-8": b"\xff\xfe\x00",
    "cut off": command()[:-1],
    "two values": command() + command(),
    "null": b"null",
    "a number": b"7",
    "a list": b"[]",
    "an empty object": b"{}",
    "byte order mark": b"\xef\xbb\xbf" + command(),
    "no envelope": command().replace(b'"samefold":"command/1",', b""),
    "envelope not first": b'{"id":"a","samefold":"command/1","stream":"purse/1","type":"Fill","data":{"cents":5}}',
    "unknown format": command().replace(b"command/1", b"command/2"),
    "an opening": b'{"samefold":"opening/1","writer":"w","commands_topic_id":"t"}',
    "no id": command().replace(b'"id":"a",', b""),
    "no body": b'{"samefold":"command/1","id":"a","stream":"purse/1","type":"Fill"}',
    "id a number": command(id="1"),
    "id empty": command(id='""'),
    "id with NUL": command(id='"a\\u0000"'),
    "id with a control character": command(id='"a\\n"'),
    "id with a C1 control character": command(id='"\\u009b31m"'),
    "id of 10 kB": command(id=json.dumps("x" * 10_000)),
    "id one byte too long": command(id=json.dumps("é" * 100 + "x", ensure_ascii=False)),
    "id with half a surrogate pair": command(id='"\\ud800"'),
    "type a list": command(type="[]"),
    "expected version a string": command(expected_version='"3"'),
    "expected version a bool": command(expected_version="true"),
    "expected version a fraction": command(expected_version="1.5"),
    "expected version of 5000 digits": command(expected_version="9" * 5_000),
    "depth below zero": command(depth="-1"),
    "depth beyond every chain": command(depth="1000001"),
    "NaN": command('{"cents":NaN}'),
    "Infinity": command('{"cents":-Infinity}'),
    "half a surrogate pair": command('{"cents":5,"note":"\\ud800"}'),
    "half a surrogate pair as a member": command('{"cents":5,"\\udc00":1}'),
    "a real NUL": command(b'{"cents":5,"note":"\x00"}'),
    "100,000 brackets": command("[" * 100_000 + "]" * 100_000),
    "100,000 objects": command('{"a":' * 100_000 + "1" + "}" * 100_000),
    "100,000 open brackets": b"[" * 100_000,
    "deep beside the body": command(trace="[" * 100_000 + "]" * 100_000),
}


@pytest.mark.parametrize("value", NO_COMMAND.values(), ids=NO_COMMAND.keys())
def test_what_is_no_command_record_is_malformed_under_a_derived_id(value: bytes | None) -> None:
    answer = received(value)
    assert rejected(answer) == "malformed"
    assert under_derived_id(answer)


@pytest.mark.parametrize(
    "stream",
    [
        *("", "purse", "purse/", "/1", "Purse/1", "pur-se/1", "1purse/1", "-/0", " purse/1"),
        *("purse/\x00", "purse/a\nb", "purse/\x9b", "purse/" + "x" * 10_000, "purse/" + "🦊" * 49),
    ],
)
def test_a_stream_that_can_not_be_one_is_malformed_under_a_derived_id(stream: str) -> None:
    answer = receive(record(command(stream=json.dumps(stream))), INTAKE)
    assert rejected(answer) == "malformed"
    assert under_derived_id(answer)


def test_names_may_be_as_long_as_they_may_be_in_bytes() -> None:
    longest = "é" * (MAX_ID_BYTES // 2)
    assert bad_name(f"purse/{'x' * (MAX_ID_BYTES - 6)}", longest) is None
    assert bad_name("purse/1", longest + "x") == "the id is longer than 200 bytes"


@pytest.mark.parametrize("key", [None, b"", b"purse/2", b"purse/1 ", b"\xff"])
def test_a_record_whose_key_is_not_its_stream_is_misrouted(key: bytes | None) -> None:
    answer = receive(record(command())._replace(key=key), INTAKE)
    assert rejected(answer) == "misrouted"
    assert under_derived_id(answer)


def test_a_record_in_another_partition_than_its_streams_is_misrouted() -> None:
    home = partition_of("purse/1", PARTITIONS)
    for partition in set(range(PARTITIONS)) - {home}:
        answer = receive(record(command())._replace(partition=partition), INTAKE)
        assert rejected(answer) == "misrouted"
        assert (answer.stream, answer.id) == (f"-/{partition}", f"topic:{partition}:{OFFSET}")


def test_no_command_can_name_a_reserved_stream() -> None:
    assert bad_name(reserved_stream(3), "a") is not None


# What has a stream and an id is answered under them.

BAD_BODIES = {
    "amount of nothing": '{"cents":0}',
    "amount below nothing": '{"cents":-5}',
    "amount of 64 bits": f'{{"cents":{2**63}}}',
    "amount of 100 digits": f'{{"cents":{10**99}}}',
    "amount of 5000 digits": '{"cents":' + "9" * 5_000 + "}",
    "amount a float": '{"cents":5.0}',
    "amount in exponents": '{"cents":5e0}',
    "amount beyond floats": '{"cents":1e400}',
    "amount a bool": '{"cents":true}',
    "amount a string": '{"cents":"5"}',
    "amount null": '{"cents":null}',
    "amount a list": '{"cents":[5]}',
    "no amount": "{}",
    "unknown field": '{"cents":5,"tip":1}',
    "unknown field with an escape sequence": '{"cents":5,"\\u009b31m\\u001b[2J":1}',
    "5000 unknown fields": "{" + ",".join(f'"field{n}":1' for n in range(5_000)) + "}",
    "text a number": '{"cents":5,"note":5}',
    "text too long": json.dumps({"cents": 5, "note": "x" * 201}),
    "text with a control character": '{"cents":5,"note":"a\\u0007b"}',
    "NUL": '{"cents":5,"note":"\\u0000"}',
    "NUL as a member": '{"cents":5,"\\u0000":1}',
    "not UTF-8": b'{"cents":5,"note":"\xff"}',
    "null": "null",
    "a list": "[]",
    "a string": '"Fill"',
    "a number": "5",
    "900 brackets": "[" * 900 + "]" * 900,
}


@pytest.mark.parametrize("body", BAD_BODIES.values(), ids=BAD_BODIES.keys())
def test_a_body_that_does_not_fit_is_malformed_under_its_own_id(body: str | bytes) -> None:
    answer = received(command(body))
    assert (rejected(answer), answer.stream, answer.id) == ("malformed", "purse/1", "a")
    assert answer.context is PURSE, "or the stream's state would be taken for nothing"


@pytest.mark.parametrize("type_", ["Burn", "", "fill", "Filled", "__init__", "x" * 10_000, "🦊", "\x00"])
def test_an_unknown_command_is_malformed(type_: str) -> None:
    answer = received(command(type=json.dumps(type_)))
    assert (rejected(answer), answer.stream, answer.id, answer.context) == ("malformed", "purse/1", "a", PURSE)


def test_an_unknown_context_is_malformed() -> None:
    answer = receive(record(command(stream='"safe/1"'), "safe/1"), INTAKE)
    assert (rejected(answer), answer.stream, answer.id, answer.context) == ("malformed", "safe/1", "a", None)


def test_a_command_beyond_its_bound_is_too_large() -> None:
    value = command('{"cents":5}' + " " * (INTAKE.max_bytes - len(command('{"cents":5}'))))
    assert command_of(received(value)) == Fill(cents=5)
    answer = received(value.replace(b'"cents":5', b'"cents":50'))
    assert rejected(answer) == "too-large"
    assert (answer.stream, answer.id) == ("purse/1", "a")


@pytest.mark.parametrize("body", ['{"cents":5,"note":"\\\\u0000"}', '{"cents":5,"note":"\\\\\\\\u0000"}'])
def test_text_that_only_spells_nul_is_text(body: str) -> None:
    assert isinstance(command_of(received(command(body))), Fill)


def test_a_defect_in_a_commands_own_checks_is_recorded() -> None:
    @fact
    class Fragile:
        cents: Cents

        def __post_init__(self) -> None:
            raise LookupError("no such table")

    module = ModuleType("domain.purse")
    vars(module).update(vars(purse), __name__="domain.purse", Command=Fragile)
    intake = replace(INTAKE, contexts={"purse": context_of(module)})
    answer = receive(record(command(type='"Fragile"')), intake)
    assert recordable(answer).reason == reason("failed", "LookupError: no such table")
    assert rejected(answer) == "failed"


def test_a_reason_never_repeats_what_was_sent() -> None:
    secret = "4111111111111111"
    for body in (f'{{"cents":"{secret}"}}', json.dumps({"cents": 5, "note": secret * 20}), f'{{"cents":{secret}}}'):
        why = recordable(received(command(body))).reason
        assert why is not None
        assert secret not in why.message


def test_a_reason_is_one_line_of_bounded_length_whatever_it_is_made_of() -> None:
    made = reason("malformed", "\x1b[2J\r\n\x00\x85\ud800" + "é" * 10_000)
    assert made.message == "\N{REPLACEMENT CHARACTER}[2J" + "\N{REPLACEMENT CHARACTER}" * 5 + "é" * (MAX_MESSAGE - 9)
    msgspec.json.encode(made)


# Whatever the bytes.

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


@given(st.none() | st.binary(max_size=300), st.none() | st.binary(max_size=20), st.integers(0, PARTITIONS - 1))
@example(b'{"samefold":"', b"", 0)
def test_no_bytes_raise(value: bytes | None, key: bytes | None, partition: int) -> None:
    assert rejected(receive(Record(partition, OFFSET, 0, key, value), INTAKE)) in {"malformed", "misrouted"}


@given(JSON, JSON, JSON, JSON)
def test_no_json_raises(id_: Any, type_: Any, body: Any, expected_version: Any) -> None:
    parts = {"id": json.dumps(id_), "type": json.dumps(type_), "expected_version": json.dumps(expected_version)}
    assert rejected(received(command(json.dumps(body), **parts))) == "malformed"


@settings(max_examples=3 * settings().max_examples)
@given(st.data())
def test_no_damage_to_a_good_record_raises(data: st.DataObject) -> None:
    value = command(json.dumps(FILL), expected_version="3")
    at = data.draw(st.integers(0, len(value)))
    until = data.draw(st.integers(at, min(at + 3, len(value))))
    damaged = value[:at] + data.draw(st.binary(max_size=3)) + value[until:]
    answer = received(damaged)
    recordable(answer)
    assert (answer.command is None) != (answer.rejection is None)


# The fingerprint.

SAME: list[str] = [
    '{"cents":5,"note":"found"}',
    '{"note":"found","cents":5}',
    ' { "cents" : 5 ,\n\t"note" : "found" } ',
    '{"cents":5,"note":"\\u0066ound"}',
]


@pytest.mark.parametrize("body", SAME)
def test_a_fingerprint_is_blind_for_order_white_space_and_escapes(body: str) -> None:
    assert received(command(body)).fingerprint == received(command(SAME[0])).fingerprint


def with_body(body: bytes) -> Callable[[Command], Command]:
    return lambda command: msgspec.structs.replace(command, data=msgspec.Raw(body))


TELLING: dict[str, Callable[[Command], Command]] = {
    "type": lambda c: msgspec.structs.replace(c, type="Spend"),
    "value": with_body(b'{"cents":6,"note":"found"}'),
    "type of a value": with_body(b'{"cents":"5","note":"found"}'),
    "float": with_body(b'{"cents":5.0,"note":"found"}'),
    "null instead of nothing": with_body(b'{"cents":5,"note":null}'),
    "less": with_body(b'{"cents":5}'),
    "more": with_body(b'{"cents":5,"note":"found","x":1}'),
    "expected version": lambda c: msgspec.structs.replace(c, expected_version=3),
    "expected version of nothing": lambda c: msgspec.structs.replace(c, expected_version=0),
}


@pytest.mark.parametrize("change", TELLING.values(), ids=TELLING.keys())
def test_a_fingerprint_tells_everything_else(change: Callable[[Command], Command]) -> None:
    original = Command(id="a", stream="purse/1", type="Fill", data=msgspec.Raw(b'{"cents":5,"note":"found"}'))
    assert fingerprint_of(change(original)) != fingerprint_of(original)


def test_a_fingerprint_does_not_depend_on_id_stream_or_place() -> None:
    original = Command(id="a", stream="purse/1", type="Fill", data=msgspec.Raw(b'{"cents":5}'))
    elsewhere = msgspec.structs.replace(original, id="b", stream="purse/2")
    assert fingerprint_of(elsewhere) == fingerprint_of(original)
    assert receive(record(encode(original))._replace(offset=99), INTAKE).fingerprint == fingerprint_of(original)


@pytest.mark.parametrize(
    ("body", "other"),
    [('{"x":[1,2]}', '{"x":[2,1]}'), ('{"cents":1e400}', '{"cents":2e400}')],
    ids=["the order in a list", "what can't be read"],
)
def test_a_fingerprint_tells_other_bodies_apart(body: str, other: str) -> None:
    assert received(command(body)).fingerprint != received(command(other)).fingerprint
