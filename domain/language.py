"""What every bounded context is built from: `fact`, `upcaster`, `Refusal`, and types for fields, personal ones too.

A command arrives as JSON and is checked once, where it enters, with `TypeAdapter(cls).validate_json(data)`: the classes
are strict, and only pydantic's JSON mode knows that JSON has no dates. Whatever is in the log was checked before it was
written, so `msgspec.json.decode(data, type=cls)` reads the very same class back without checking again.
"""

import dataclasses
import re
import typing
from base64 import b64decode, b64encode
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from types import UnionType
from typing import Annotated, Any, ClassVar, Final, TypeAlias, TypeVar, cast, dataclass_transform

from pydantic import (
    AfterValidator,
    AwareDatetime,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    PlainSerializer,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)
from pydantic.dataclasses import dataclass
from pydantic_core import PydanticCustomError

FactT = TypeVar("FactT")
_WORD = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")

Cents = Annotated[int, Field(ge=1, le=10**14)]
"""An amount of money that moves, in minor units: at least 0.01, at most a million million."""

CentsOrZero = Annotated[int, Field(ge=0, le=10**14)]
"""A limit in minor units, which may be zero."""

Text = Annotated[str, Field(max_length=200, pattern=r"^[^\x00-\x1f\x7f-\x9f]*$")]
"""One line of text, maybe empty: at most 200 characters, no control characters (PostgreSQL refuses NUL)."""


def in_utc(time: datetime) -> datetime:
    """The same time in UTC. Raises ValueError where it has no zone, or is outside the years 1 to 9999 there."""
    if time.utcoffset() is None:
        raise ValueError("it has no time zone: write 2026-12-01T10:00:00Z, or for example +01:00 instead of Z")
    try:
        return time.astimezone(UTC)
    except OverflowError:
        raise ValueError("in UTC it is before the year 1 or after 9999") from None


Moment = Annotated[datetime, AfterValidator(in_utc)]
"""A time with its zone, kept in UTC to the microsecond. Which zone it came in is lost: keep that in a field of its own."""

SubjectId = Annotated[
    str, Field(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f\x7f-\x9f]*$", json_schema_extra={"x-subject": True})
]
"""The command's field that says whose its personal values are. Without one they are its stream's: `customers/ada`."""

TOKEN = re.compile(r"~Personal~1~([0-9a-f]{16})~([A-Za-z0-9_-]+)~([A-Za-z0-9_-]*)~")
"""A sealed value: id of its key, what is encrypted, and its fallback (engine/personal/tokens.py). In another case it is none."""

SEALED: Final = "sealed"
"""As a validation's context: a personal value passes only if it is sealed, or empty."""

REMOVED: Final = "removed"
"""As a validation's context: a personal value becomes an empty text, so that what is left should hold none."""


@dataclasses.dataclass(frozen=True, slots=True)
class PersonalText:
    """Seals a field. `fallback` is shown instead of a forgotten value: `Annotated[Text, PersonalText("a former customer")]`.

    What it does with a value depends on the validation's context. None (in tests, in `decide`, in old bodies): a sealed value
    passes as it is, any other as the plain text that is declared. SEALED, REMOVED: see there. A callable, where clients' commands
    enter: only plain text passes, and is replaced by what the callable makes of it and the fallback.
    """

    fallback: str = ""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        return WrapValidator(self.check).__get_pydantic_core_schema__(source, handler)

    def __get_pydantic_json_schema__(self, schema: Any, handler: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        found = handler(schema)
        return found | {"x-personal": "twice" if "x-personal" in found else True}

    def check(self, value: Any, plain: ValidatorFunctionWrapHandler, info: ValidationInfo) -> Any:
        """The value, or what the context makes of it. Raises ValueError."""
        if not isinstance(value, str) or not value:
            return plain(value)
        if callable(info.context):
            return info.context(plain(value), self.fallback)
        if info.context == REMOVED:
            return ""
        if TOKEN.fullmatch(value):
            return value
        if info.context == SEALED:
            raise PydanticCustomError(
                "unsealed", "it must be sealed: send the command through the API or `samefold send`"
            )
        return plain(value)


PlainT = TypeVar("PlainT")
Personal = Annotated[PlainT, PersonalText()]
"""A text about a person, `Personal[Text]`: encrypted before it is appended anywhere, and gone once the person is forgotten.

For `decide`, `evolve` and `react` it is an opaque text. Equal values of two commands differ, and it can't be shortened or cased. An
empty text is never encrypted.
"""


@dataclass_transform(frozen_default=True, kw_only_default=True)
def fact(cls: type[FactT]) -> type[FactT]:
    """Make a class a command, an event or a part of one: frozen, slotted, keyword only, strict, finite, without unknown fields.

    Making one raises `pydantic.ValidationError` (a `ValueError`) when a value does not fit. It is stored under its
    class name for ever; a class that had to be renamed keeps the old name in `stored_as: ClassVar[str]`. A changed one has
    `VERSION: ClassVar[int] = 2`, and an `upcaster` for each version before. pydantic's AwareDatetime, which only
    pydantic can read, becomes `Moment`.
    """
    declared = cls.__annotations__
    if re.search("AwareDatetime|bytes", repr(declared)):
        with suppress(NameError):  # of a class further down
            hints = typing.get_type_hints(cls, include_extras=True)
            hints = {name: _with(hints[name], AwareDatetime, Moment) for name in declared}
            declared = hints if "AwareDatetime" in repr(declared) else declared
            cls.__annotations__ = {name: _with(hint, bytes, _Base64) for name, hint in hints.items()}
    config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, val_json_bytes="base64")
    made = dataclass(cls, frozen=True, slots=True, kw_only=True, config=config)
    made.__annotations__ = declared  # how JSON is read is no part of a type's shape
    return cast(type[FactT], made)


def _with(hint: Any, kind: Any, other: Any) -> Any:
    """The type with `other` for each `kind` in it."""
    parts, origin = typing.get_args(hint), typing.get_origin(hint)
    if origin is Annotated and kind is bytes is parts[0]:  # bounds come first: they are of the bytes, not of the text
        return Annotated[(hint, *typing.get_args(other)[1:])]
    changed = tuple(_with(part, kind, other) for part in parts)
    if changed == parts:
        return other if hint is kind else hint
    return (typing.Union if origin is UnionType else origin)[changed if len(changed) > 1 else changed[0]]


def _base64(value: bytes) -> str:
    return b64encode(value).decode()


def _of_base64(value: Any, info: ValidationInfo) -> Any:
    """Bytes from the one text that is theirs in the log: pydantic also takes another alphabet, and no padding."""
    if info.mode != "json" or not isinstance(value, str):
        return value
    with suppress(ValueError):
        if _base64(found := b64decode(value)) == value:
            return found
    raise ValueError("it is not base64 with + and /, and with its = at the end: write YQ==")


_Base64 = Annotated[bytes, BeforeValidator(_of_base64), PlainSerializer(_base64, when_used="json")]


Body: TypeAlias = dict[str, Any]
"""A stored event or command, as JSON has it: its dates, for example, are texts."""

Upcaster: TypeAlias = Callable[[Body], Body]


def upcaster(fact: type, version: int) -> Callable[[Upcaster], Upcaster]:
    """Make a function the step from a version of an event or command to the next one. The body is the function's own to change.

        @upcaster(RoomBooked, 1)
        def with_guests(body: Body) -> Body:
            return {**body, "guests": 1}

    It is pure, and never raises for a body of that version.
    """

    def mark(function: Upcaster) -> Upcaster:
        of_others = getattr(function, "upcasts", ())
        setattr(function, "upcasts", (*of_others, (fact, version)))  # noqa: B010 - functions have none for the type checker
        return function

    return mark


class Refusal(Exception):
    """Why a command is refused. A subclass is one reason; its docstring is the message that clients get.

    `code` is the class name in kebab case. Code and message are recorded with each refusal: a change alters new
    answers, never old ones.
    """

    code: ClassVar[str]
    message: ClassVar[str]

    def __init_subclass__(cls) -> None:
        if not cls.__doc__:
            raise TypeError(f"{cls.__qualname__} needs a docstring: it is the message that clients get.")
        cls.code = kebab(cls.__name__)
        cls.message = " ".join(cls.__doc__.split())

    def __init__(self) -> None:
        super().__init__(self.message)


def kebab(name: str) -> str:
    """`RoomAdded` as `room-added`: how the API and recorded refusals write the name of a class."""
    return _WORD.sub("-", name).lower().replace("_", "-")
