"""make test: bytes alone. The proxies' understanding of the two protocols, and the points of the processes."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import pytest

from infra.processes import faultpoints
from proofs.chaos.kafka_wire import KafkaWire
from proofs.chaos.postgres_wire import PostgresWire

ROOT = Path(__file__).parent.parent.parent


def request(key: int, correlation: int) -> bytes:
    return struct.pack(">ihhi", 12, key, 7, correlation) + b"body"


def answer(correlation: int) -> bytes:
    return struct.pack(">ii", 8, correlation) + b"body"


def message(kind: bytes, *parts: bytes) -> bytes:
    body = b"".join(part + b"\0" for part in parts)
    return kind + struct.pack(">i", 4 + len(body)) + body


STARTUP = struct.pack(">ihh", 38, 3, 0) + b"application_name\0samefold x\0\0\0"


@pytest.mark.parametrize("piece", [1, 3, 1_000])
def test_produce_requests_and_their_answers_are_known(piece: int) -> None:
    wire = KafkaWire()
    out = b"".join([request(0, 5), request(1, 6), request(0, 7)])
    back = b"".join([answer(6), answer(5), answer(7)])
    requests = [frame for n in range(0, len(out), piece) for frame in wire.requests(out[n : n + piece])]
    answers = [frame for n in range(0, len(back), piece) for frame in wire.answers(back[n : n + piece])]
    assert [frame.kind for frame in requests] == ["produce", None, "produce"]
    assert [frame.kind for frame in answers] == [None, "produce answer", "produce answer"]
    assert (b"".join(frame.data for frame in requests), b"".join(frame.data for frame in answers)) == (out, back)


@pytest.mark.parametrize("piece", [1, 3, 1_000])
def test_commits_are_known_whether_they_are_prepared_or_not(piece: int) -> None:
    wire = PostgresWire()
    out = [
        (STARTUP, None),
        (message(b"Q", b"select 'commit'"), None),
        (message(b"Q", b"COMMIT"), "COMMIT"),
        (message(b"P", b"s1", b"commit", b""), None),
        (message(b"P", b"s2", b"begin", b""), None),
        (message(b"B", b"", b"s2", b""), None),
        (message(b"B", b"", b"s1", b""), "COMMIT"),
    ]
    data = b"".join(frame for frame, _ in out)
    assert [frame for n in range(0, len(data), piece) for frame in wire.requests(data[n : n + piece])] == out
    assert wire.name == "samefold x"
    back = [
        (message(b"C", b"SELECT 1"), None),
        (message(b"C", b"ROLLBACK"), None),
        (message(b"C", b"COMMIT"), "COMMIT answer"),
    ]
    data = b"".join(frame for frame, _ in back)
    assert [frame for n in range(0, len(data), piece) for frame in wire.answers(data[n : n + piece])] == back


def test_a_switch_is_known() -> None:
    wire = PostgresWire()
    list(wire.requests(STARTUP))
    list(wire.requests(message(b"P", b"", b"select 1", b"")))
    assert not wire.moves_pointers
    list(wire.requests(message(b"P", b"", b"insert into live (view) values ($1)", b"")))
    assert wire.moves_pointers


def test_each_point_is_on_the_way_of_the_product() -> None:
    files = [*(ROOT / "commands").rglob("*.py"), *(ROOT / "projections").rglob("*.py")]
    reached = re.findall(r'reach\("([^"]+)"\)', "".join(file.read_text() for file in files))
    assert set(reached) == {*faultpoints.HANDLER, *faultpoints.AGENT, *faultpoints.BUILDER}


def test_nothing_in_the_product_but_a_benchmark_arms_a_point() -> None:
    folders = ("commands", "projections", "api", "spark_jobs", "infra", "demo", "benchmarks")
    files = [file for folder in folders for file in (ROOT / folder).rglob("*.py")]
    armed = [file.name for file in files if re.search(r"faultpoints\.hook|import hook", file.read_text())]
    assert (armed, faultpoints.hook) == (["http_marks.py"], None)
