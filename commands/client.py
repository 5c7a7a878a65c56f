"""A client of the write side: reads commands from JSON lines, appends them to `commands`, waits for their outcomes."""

from __future__ import annotations

import gzip
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import psycopg
from confluent_kafka import KafkaError, KafkaException, Message
from msgspec import UNSET, UnsetType

from commands.intake import bad_name, bad_relation, fingerprint_of
from commands.outcomes import ReadModelNotSetUp, outcomes_of
from infra.database.connect import connect
from infra.errors import SamefoldError
from infra.log import clients
from infra.log.partitioner import partition_of
from infra.log.records import Command, encode
from infra.log.topics import describe
from infra.settings import Settings

CHUNK = 5_000
POLL_S = 1.0
CORE_CHANNEL = "samefold_core"


class BadCommandLine(SamefoldError):
    """A line of a file of commands is not a command."""


class NotSent(SamefoldError):
    """Some commands could not be appended."""


class OutcomeMissing(SamefoldError):
    """No outcome came in time."""


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    stream: str
    id: str
    type: str
    data: msgspec.Raw
    expected_version: int | None = None
    correlation_id: str | UnsetType = UNSET
    causation_id: str | UnsetType = UNSET


@dataclass(slots=True)
class Summary:
    """What became of the commands that were waited for."""

    accepted: int = 0
    rejected: int = 0
    rejected_by_code: Counter[str] = field(default_factory=Counter)
    other_body: int = 0

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"rejected_by_code": dict(self.rejected_by_code)}


def read_commands(file: Path) -> list[Command]:
    """The commands of a file of JSON lines (`-`: standard input; `.gz` is unpacked).

    Raises BadCommandLine naming the first wrong line.
    """
    commands = []
    try:
        for number, line in enumerate(_lines(file), start=1):
            if line.strip():
                commands.append(_command(line, f"{file}, line {number}"))
    except (OSError, EOFError, gzip.BadGzipFile) as error:
        raise BadCommandLine(
            f"{file} can't be read: {error}.", "Name a file of JSON lines, plain or gzipped."
        ) from error
    return commands


def send_all(settings: Settings, commands: Iterable[Command], progress: Callable[[int], None]) -> None:
    """Append commands in order and wait for all acknowledgements; `progress` gets the number newly acknowledged.

    Raises NotSent, KafkaAway. Sending the same commands again is safe: ids that have an outcome keep it.
    """
    Sender(settings).send(commands, progress)


class Sender:
    """Appends commands, as often as there are some, over one connection. Raises KafkaAway when it is made."""

    def __init__(self, settings: Settings) -> None:
        self._topic = describe(settings, settings.commands_topic)
        self._producer = clients.producer(settings)
        self._timeout_s = settings.ack_timeout_s

    def send(self, commands: Iterable[Command], progress: Callable[[int], None]) -> None:
        """As `send_all`. One call at a time. Raises NotSent."""
        producer, topic = self._producer, self._topic
        failed: list[KafkaError] = []

        def acknowledged(error: KafkaError | None, _: Message) -> None:
            if error:
                failed.append(error)
            else:
                progress(1)

        for command in commands:
            partition = partition_of(command.stream, topic.partitions)
            value = encode(command)
            while not failed:
                try:
                    producer.produce(
                        topic.name, value, key=command.stream.encode(), partition=partition, on_delivery=acknowledged
                    )
                    break
                except BufferError:
                    producer.poll(0.1)
                except KafkaException as error:
                    failed.append(error.args[0])
            producer.poll(0)
            if failed:
                break
        producer.flush(self._timeout_s)
        if failed:
            raise NotSent(
                f"Not all commands could be appended: {failed[0].str()}.", "Run it again: nothing is done twice."
            )


def answered(settings: Settings, commands: Sequence[Command]) -> int:
    """How many of the commands have an outcome already; 0 where the read model is not set up yet."""
    with connect(settings, "samefold send") as connection:
        keys = [(command.stream, command.id) for command in commands]
        try:
            return sum(len(outcomes_of(connection, keys[n : n + CHUNK])) for n in range(0, len(keys), CHUNK))
        except ReadModelNotSetUp:
            return 0


def wait_for(
    settings: Settings, commands: Sequence[Command], progress: Callable[[int], None], *, timeout_s: float
) -> Summary:
    """Wait for every command's outcome. Raises OutcomeMissing after `timeout_s` seconds without a new one."""
    summary = Summary()
    with connect(settings, "samefold send") as connection:
        connection.execute(f"listen {CORE_CHANNEL}")
        missing = {(command.stream, command.id): command for command in commands}
        deadline = time.monotonic() + timeout_s
        while missing:
            found = _take_found(connection, missing, summary)
            progress(found)
            if found:
                deadline = time.monotonic() + timeout_s
            elif time.monotonic() > deadline:
                raise OutcomeMissing(
                    f"{len(missing)} commands have no outcome after {timeout_s:.0f} s.",
                    "Are a handler and an agent running (`samefold run all`)? The commands are in the log and will be answered.",
                )
            if missing:
                # a notification may be missed by a moment; the time-out makes up for it
                for _ in connection.notifies(timeout=POLL_S, stop_after=1):
                    pass
    return summary


def _take_found(connection: psycopg.Connection[Any], missing: dict[tuple[str, str], Command], summary: Summary) -> int:
    found = 0
    keys = list(missing)
    for start in range(0, len(keys), CHUNK):
        try:
            answers = outcomes_of(connection, keys[start : start + CHUNK])
        except ReadModelNotSetUp:
            break  # nothing can have an outcome before the first agent has started
        for key, outcome in answers.items():
            command = missing.pop(key)
            if outcome.fingerprint != fingerprint_of(command):
                summary.other_body += 1
            if outcome.outcome == "accepted":
                summary.accepted += 1
            else:
                summary.rejected += 1
                summary.rejected_by_code[str(outcome.code)] += 1
        found += len(answers)
        if not answers:
            break  # outcomes come in the order of sending, more or less: the rest is not there yet either
    return found


def _lines(file: Path) -> Iterable[bytes]:
    if str(file) == "-":
        yield from sys.stdin.buffer
    elif file.suffix == ".gz":
        with gzip.open(file) as lines:
            yield from lines
    else:
        with file.open("rb") as lines:
            yield from lines


def _command(line: bytes, where: str) -> Command:
    try:
        fields = msgspec.json.decode(line, type=_Line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadCommandLine(
            f"{where}: not a command: {error}.",
            'A line is {"stream": "accounts/1", "id": "…", "type": "Deposit", "data": {…}}. Nothing was sent.',
        ) from error
    problem = bad_name(fields.stream, fields.id) or bad_relation(fields.correlation_id, fields.causation_id)
    if problem:
        raise BadCommandLine(f"{where}: {problem}.", "Nothing was sent.")
    # a copy: what msgspec calls Raw is a view into the line
    data = msgspec.Raw(bytes(fields.data))
    return Command(
        fields.id,
        fields.stream,
        fields.type,
        data,
        fields.expected_version,
        fields.correlation_id,
        fields.causation_id,
    )
