"""Seals the personal values of clients' commands, before they are appended anywhere.

What is sealed is the body as the client wrote it: all but the personal values stays as it is, so that a command that is sent again
has the same body, and with it the same fingerprint.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import count
from typing import Any

import msgspec
from pydantic import TypeAdapter, ValidationError

from commands.intake import require_members_once
from domain.engine.personal.fields import sealed_validator, subject_field
from domain.engine.personal.keys import DataKey
from domain.engine.personal.tokens import FALLBACK, PREFIX, sealed
from domain.engine.value_limits import within_limits
from domain.engine.versions import summary
from infra.log.records import Command

_adapter: Callable[[type], TypeAdapter[Any]] = cache(TypeAdapter)


class NotSealed(ValueError):
    """A command's personal values can't be sealed where they stand. It says where, never what."""


class Unsealed:
    """A client's command of a class with personal fields."""

    def __init__(self, command: Command, kind: type) -> None:
        """Checks it: raises pydantic.ValidationError, and what the command's own checks raise."""
        self._command = command
        self._kind = kind
        self._values: list[tuple[str, str]] = []
        """Plain text and fallback, in the order of the checks, whose number changes with pydantic."""
        adapter = _adapter(kind)
        checked = within_limits(kind, adapter.validator.validate_json)(bytes(command.data), context=self._mark)
        self._marked = adapter.dump_python(checked, mode="json", by_alias=True)
        field = subject_field(kind)
        self.subject: str = getattr(checked, field) if field else command.stream

    def sealed(self, key: DataKey) -> Command:
        """The command with sealed values. Raises ValueError, where plain text would stay in the body."""
        numbers = count()  # a validator may have copied a value to another field

        def seal(plain: str, fallback: str) -> str:
            # of commands with the same id in several streams each has another nonce
            whose = f"{self._command.stream} {self._command.id}"
            number, fallback = next(numbers), fallback or FALLBACK
            return plain and sealed(plain, key.id, key.key, command_id=whose, number=number, fallback=fallback)

        require_members_once(bytes(self._command.data))
        body = self._replaced(msgspec.Raw(self._command.data), self._marked, seal)
        try:
            sealed_validator(self._kind)(bytes(body))  # as the handler will
        except ValidationError as error:  # a field with two aliases, or a validator around it, or one that is excluded
            raise NotSealed(summary(error)) from None
        return msgspec.structs.replace(self._command, data=body)

    def _mark(self, plain: object, fallback: str) -> str:
        if not isinstance(plain, str):
            raise ValueError("a personal text stays a text: its checks may not make another type of it")
        self._values.append((plain, fallback))
        return f"{PREFIX}{len(self._values) - 1}"

    def _replaced(self, raw: msgspec.Raw, marked: Any, seal: Callable[[str, str], str]) -> msgspec.Raw:
        """The JSON with each marked value sealed. Members are visited by name, since their order does not matter to a client."""
        match marked:
            case str() if (number := marked.removeprefix(PREFIX)) != marked and number.isdecimal():
                return msgspec.Raw(msgspec.json.encode(seal(*self._values[int(number)])))
            case dict() if PREFIX in repr(marked):
                members = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
                for name in sorted(members.keys() & marked.keys()):
                    members[name] = self._replaced(members[name], marked[name], seal)
                return msgspec.Raw(msgspec.json.encode(members))
            case list() if PREFIX in repr(marked):
                items = msgspec.json.decode(raw, type=list[msgspec.Raw])
                both = zip(items, marked, strict=True)
                return msgspec.Raw(msgspec.json.encode([self._replaced(one, other, seal) for one, other in both]))
            case _:
                return raw


def holds_token(command: Command) -> bool:
    """Whether any text of a client's command has a sealed value in it: an edge would open it and show another person's value."""
    names = command.stream, command.id, command.correlation_id, command.causation_id, command.by
    if any(isinstance(name, str) and PREFIX in name for name in names):
        return True
    body = bytes(command.data)
    if b"\\u" in body:  # a prefix may be escaped
        body = msgspec.json.encode(msgspec.json.decode(body))
    return PREFIX.encode() in body
