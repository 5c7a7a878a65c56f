"""A client of the write side: reads commands from JSON lines, appends them to `commands`, waits for their outcomes."""

from __future__ import annotations

import gzip
import itertools
import sys
import time
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import psycopg
from confluent_kafka import KafkaError, KafkaException, Message
from msgspec import UNSET, UnsetType
from pydantic import ValidationError

from commands.append import Report, is_too_large, produce
from commands.intake import bad_client_name, bad_relation, fingerprint_of, require_members_once
from commands.outcomes import ReadModelNotSetUp, outcomes_of
from commands.sealing import Unsealed, holds_token
from domain.engine.contexts import contexts, has_personal_fields
from domain.engine.personal.fields import is_personal
from domain.engine.personal.keys import DataKey, Keys, SubjectForgotten, not_forgotten
from domain.engine.versions import stored_type, summary
from infra.database.connect import connect, session
from infra.errors import SamefoldError
from infra.log import clients
from infra.log.records import Command, encode
from infra.log.topics import describe
from infra.settings import Settings
from projections.engine.store.positions import channel
from projections.engine.views.view import CORE

CHUNK = 5_000
POLL_S = 0.1
QUERY_S = 1.0
REPORT_S = 5.0
"""After the time-out of an append: the producer reports time-outs only now and then."""
MOST_RANGES = 20
CORE_CHANNEL = channel(CORE)


class BadCommandLine(SamefoldError):
    """A line of a file is not a command."""


class NotSent(SamefoldError):
    """Some commands could not be appended."""


class OutcomeMissing(SamefoldError):
    """Some commands have no outcome in time."""


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    """The members of a command that a client may give."""

    stream: str
    id: str
    type: str
    data: msgspec.Raw
    expected_version: int | None = None
    correlation_id: str | UnsetType = UNSET
    causation_id: str | UnsetType = UNSET


@dataclass(slots=True)
class Summary:
    """The outcomes of the commands that were waited for. `other_body`: ids that were used before for another command."""

    accepted: int = 0
    rejected: int = 0
    rejected_by_code: Counter[str] = field(default_factory=Counter)
    other_body: int = 0

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"rejected_by_code": dict(self.rejected_by_code)}


def read_lines(file: Path, by: str | UnsetType = UNSET) -> dict[int, Command]:
    """The commands of a file of JSON lines (`-`: standard input; `.gz` is unpacked), by line number. `by`: who sends them.

    Raises BadCommandLine for the first wrong line.
    """
    try:
        with _opened(file) as opened:
            lines = enumerate(opened, start=1)
            return {
                n: _command(line.removeprefix(BOM_UTF8), f"{file}, line {n}", by) for n, line in lines if line.strip()
            }
    except (OSError, EOFError, gzip.BadGzipFile) as error:
        raise BadCommandLine(
            f"{file} can't be read: {error}.", "Name a file of JSON lines, plain or gzipped."
        ) from error


def sealed(settings: Settings, commands: Mapping[int, Command], file: Path) -> list[Command]:
    """The commands of a file's lines, their personal values sealed. Raises BadCommandLine, and what `Keys` raises."""
    if not has_personal_fields():
        return list(commands.values())
    found = {number: _unsealed(command, f"{file}, line {number}") for number, command in commands.items()}
    subjects = sorted({one.subject for one in found.values() if isinstance(one, Unsealed)})
    keys, known = Keys(settings), dict[str, DataKey | None]()
    with session(settings, "samefold send") as connection:
        keys.start(connection)
        for start in range(0, len(subjects), CHUNK):
            known |= keys.keys_of(connection, {*subjects[start : start + CHUNK]})
    done = []
    for number, one in found.items():
        try:
            done.append(one.sealed(not_forgotten(known, one.subject)) if isinstance(one, Unsealed) else one)
        except ValueError as error:  # NotSealed among them
            raise _wrong(f"{file}, line {number}", error) from None
        except SubjectForgotten as error:
            message = f"{file}, line {number}: {error.message}"
            raise SubjectForgotten(message, f"Nothing was sent. {error.hint}") from None
    return done


def _unsealed(command: Command, where: str) -> Command | Unsealed:
    """The command, ready to be sealed where its class has personal fields. Raises BadCommandLine."""
    context = contexts().get(command.stream.partition("/")[0])
    kind, older = context.command_types.get(command.type, (None, None)) if context else (None, None)
    if kind is None:  # what is personal in it?
        raise _wrong(where, f"this code knows no command '{command.type}' of {command.stream}")
    try:
        if is_personal(kind) and older:
            body = msgspec.Raw(older.body(command.data))
            command = msgspec.structs.replace(command, type=stored_type(kind), data=body)
        found = Unsealed(command, kind) if is_personal(kind) else command
    except ValidationError as error:
        raise _wrong(where, summary(error)) from None
    except Exception as error:  # a defect, whose text may be a personal value
        what = f"the checks or upcasters of {kind.__name__} failed with {type(error).__name__}"
        raise _wrong(where, what) from None
    if holds_token(command):
        raise _wrong(where, "a text holds a sealed value")
    return found


def _wrong(where: str, what: object) -> BadCommandLine:
    return BadCommandLine(f"{where}: {what}.", "Nothing was sent.")


class Sender:
    """Appends commands over one connection. Its constructor raises KafkaUnavailable."""

    def __init__(self, settings: Settings) -> None:
        self._topic = describe(settings, settings.commands_topic)
        self._producer = clients.LastingProducer(settings, "send")
        self._timeout_s = clients.ACK_TIMEOUT_S + REPORT_S

    def send(self, commands: Iterable[Command], progress: Callable[[int], None], lines: Sequence[int] = ()) -> None:
        """Append commands in order and wait for all acknowledgements. `progress` gets the number newly acknowledged.

        Raises NotSent, which names the commands by `lines`, or counts them from 1. It is safe to send the same commands again: an
        id that has an outcome keeps it. One call at a time.
        """
        missing = set(lines)
        too_large: list[int] = []
        failed: list[KafkaError] = []

        def reported(number: int, error: KafkaError | None, _: Message | None) -> None:
            if error is not None and not is_too_large(error):
                failed.append(error)
                return
            missing.discard(number)
            if error is None:
                progress(1)
            else:
                too_large.append(number)

        count = len(lines)
        for number, command in zip(lines or itertools.count(1), commands, strict=bool(lines)):
            missing.add(number)
            count = len(lines) or number
            self._append(command, partial(reported, number), failed)
            self._producer.poll(0)
            if failed:
                break
        deadline = time.monotonic() + self._timeout_s
        while len(self._producer.now) and time.monotonic() < deadline:
            self._producer.poll(POLL_S)
        message, hint = [], []
        if missing:
            why = failed[0].str() if failed else "there is no acknowledgement"
            message.append(f"{len(missing)} of {count} commands may be missing in the log, {_ranges(missing)}: {why}.")
            if failed and clients.is_denied(failed[0]):
                hint.append(f"Add the missing ACL: {clients.ACLS}.")
            hint.append("Send the same file again: commands that are in the log already are not done twice.")
        if too_large:
            message.append(f"{len(too_large)} of {count} commands are too large for the log, {_ranges(too_large)}.")
            hint.append("Make them smaller, or leave them out.")
        if message:
            raise NotSent(" ".join(message), " ".join(hint))

    def _append(self, command: Command, reported: Report, failed: list[KafkaError]) -> None:
        value = encode(command)
        while not failed:
            producer = self._producer.now
            try:
                produce(producer, self._topic, command, value, reported)
            except BufferError:
                self._producer.poll(POLL_S)
            except KafkaException as error:
                if clients.is_finished(error.args[0]):
                    self._producer.renew(producer, error.args[0])
                reported(error.args[0], None)
                return
            else:
                return


def _ranges(lines: Iterable[int]) -> str:
    """`lines 1-40, 57`: the first ones, where there are many."""
    found: list[tuple[int, int]] = []
    for line in sorted(lines):
        if found and found[-1][1] == line - 1:
            found[-1] = (found[-1][0], line)
        else:
            found.append((line, line))
    named = ", ".join(f"{first}-{last}" if last > first else str(first) for first, last in found[:MOST_RANGES])
    more = f" and others up to {found[-1][1]}" if len(found) > MOST_RANGES else ""
    return f"{'lines' if found[0][0] < found[-1][1] else 'line'} {named}{more}"


def answered(settings: Settings, commands: Sequence[Command]) -> int:
    """How many of the commands have an outcome already."""
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
                # a commit right before the query sends no notification after it; then the time-out ends the wait
                for _ in connection.notifies(timeout=QUERY_S, stop_after=1):
                    pass
    return summary


def _take_found(connection: psycopg.Connection[Any], missing: dict[tuple[str, str], Command], summary: Summary) -> int:
    found = 0
    keys = list(missing)
    for start in range(0, len(keys), CHUNK):
        try:
            answers = outcomes_of(connection, keys[start : start + CHUNK])
        except ReadModelNotSetUp:
            break  # no agent has started yet
        if not answers:
            break  # outcomes come roughly in the order of sending: the others are not there yet either
        found += len(answers)
        for key, outcome in answers.items():
            summary.other_body += outcome.fingerprint != fingerprint_of(missing.pop(key))
            if outcome.outcome == "accepted":
                summary.accepted += 1
            else:
                summary.rejected += 1
                summary.rejected_by_code[str(outcome.code)] += 1
    return found


def _opened(file: Path) -> AbstractContextManager[Iterable[bytes]]:
    if str(file) == "-":
        return nullcontext(sys.stdin.buffer)
    return gzip.open(file) if file.suffix == ".gz" else file.open("rb")


def _command(line: bytes, where: str, by: str | UnsetType) -> Command:
    try:
        fields = msgspec.json.decode(line, type=_Line)
        require_members_once(line)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise BadCommandLine(
            f"{where}: not a command: {error}.",
            'A line is {"stream": "<context>/<name>", "id": "…", "type": "…", "data": {…}}. Nothing was sent.',
        ) from error
    problem = bad_client_name(fields.stream, fields.id) or bad_relation(fields.correlation_id, fields.causation_id, by)
    if problem:
        raise _wrong(where, problem)
    fields.data = msgspec.Raw(bytes(fields.data))  # a copy: msgspec's Raw is a view into the line
    command = Command(**msgspec.structs.asdict(fields), by=by)
    try:
        fingerprint_of(command)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise _wrong(where, f"its data can't be read: {error}") from error
    return command
