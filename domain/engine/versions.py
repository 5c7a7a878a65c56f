"""Versions of stored types: `Deposited` is version 1 of an event or a command, `Deposited/2` is version 2.

A body of an older version is led to the class's own by the context's upcasters, one step after the other, before it is decoded. A
body of the class's own version meets none of this.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple, TypeAlias, get_args

import msgspec
from pydantic import TypeAdapter, ValidationError
from pydantic_core.core_schema import ErrorType

from domain.engine import storable
from domain.language import kebab
from infra.errors import SamefoldError, in_words
from infra.processes.time_limit import FAULTS, watched

Upcaster: TypeAlias = Callable[[dict[str, Any]], dict[str, Any]]
Steps: TypeAlias = Mapping[int, Upcaster]
"""A class's upcasters by the version that they start from."""

UPCASTER_IMPORT = "from domain.language import Body, upcaster"
"""What the lines that hints show need."""

MOST_PROBLEMS = 3
"""Of one value, in a log."""

_TOLD = {"beyond", "unsealed", *get_args(ErrorType)} - {"value_error", "assertion_error", "union_tag_invalid"}
"""Types of problems whose texts hold no value."""
_FORMAT = re.compile(r'"format": "([^"]*)"')
_NAME = re.compile(r"[A-Za-z_]\w*")
_decode = msgspec.json.Decoder(dict[str, Any]).decode


class BadContext(SamefoldError):
    """A module of `domain/` does not have the shape of a bounded context."""


class UpcastFailed(ValueError):
    """A body of an older version can't be led to the class's own."""


class Older(NamedTuple):
    """The way from a stored type of an older version to the class: raises UpcastFailed, and what the JSON's decoder raises."""

    type: str
    version: int
    body: Callable[[bytes | msgspec.Raw], bytes]
    """The JSON of the class's own version, which nothing has validated yet."""


def stored_name(fact: type) -> str:
    """The name of an event or command in the log: its class name, or `stored_as` where the class was renamed."""
    return str(getattr(fact, "stored_as", fact.__name__))


def version_of(fact: type) -> int:
    """Its `VERSION`, by default 1. Raises BadContext."""
    version = getattr(fact, "VERSION", 1)
    if type(version) is not int or not 1 <= version < 1_000:
        raise BadContext(
            f"{fact.__name__} has VERSION = {version!r}.",
            "It is a whole number: 1 (the default), 2, …, as in `VERSION: ClassVar[int] = 2`.",
        )
    return version


def stored_type(fact: type) -> str:
    """Name and version as new records hold them: `Deposited`, `Deposited/2`. Raises BadContext."""
    return type_of(stored_name(fact), version_of(fact))


def type_of(name: str, version: int) -> str:
    return name if version == 1 else f"{name}/{version}"


def upcasters_of(module: ModuleType, facts: Sequence[type]) -> dict[type, Steps]:
    """The upcasters that a context's module has, by class. Raises BadContext for a gap, an orphan or two of one step."""
    found: dict[type, dict[int, Upcaster]] = {fact: {} for fact in facts}
    marked = [(function, *mark) for function in vars(module).values() for mark in getattr(function, "upcasts", ())]
    for function, fact, version in marked:
        where = f"{module.__name__}: the upcaster `{function.__name__}`"
        if fact not in found:
            raise BadContext(
                f"{where} is for {fact.__name__}, which is no event or command of this context.",
                "Remove it, or add the class to `Event` or `Command`.",
            )
        if not 1 <= version < version_of(fact):
            raise BadContext(
                f"{where} starts from version {version} of {fact.__name__}, which is at version {version_of(fact)}.",
                f"Write `VERSION = {version + 1}` into {fact.__name__}, or correct the upcaster's version.",
            )
        if found[fact].setdefault(version, function) is not function:
            raise BadContext(
                f"{where} and `{found[fact][version].__name__}` both start from version {version} of {fact.__name__}.",
                "Remove one of them.",
            )
    for fact, steps in found.items():
        if not _NAME.fullmatch(stored_name(fact)):
            raise BadContext(
                f"{module.__name__}: {fact.__name__} is stored as '{stored_name(fact)}'.",
                "Write letters, digits and underscores into `stored_as`.",
            )
        for version in range(1, version_of(fact)):
            if version not in steps:
                raise BadContext(
                    f"{module.__name__}: {fact.__name__} is at version {version_of(fact)}, but nothing leads from version "
                    f"{version} to {version + 1}.",
                    f"Write, with `{UPCASTER_IMPORT}`,\n@upcaster({fact.__name__}, {version})\n"
                    f"def {kebab(fact.__name__).replace('-', '_')}_{version}(body: Body) -> Body:\n    return {{**body, …}}",
                )
    return dict(found)


def older(fact: type, steps: Steps) -> Iterator[Older]:
    """The stored types of a class's older versions."""
    name, version = stored_name(fact), version_of(fact)
    for start in range(1, version):
        yield Older(
            type_of(name, start), start, partial(_lead, name, start, [steps[one] for one in range(start, version)])
        )


def reader(fact: type, step: Older) -> Callable[[bytes | msgspec.Raw], Any]:
    """The function from a stored event of an older version to the class. Raises UpcastFailed, msgspec.DecodeError."""
    adapter = TypeAdapter[Any](fact)
    validate: Callable[..., Any] = adapter.validator.validate_json
    schema = adapter.json_schema(by_alias=False)
    if schema != adapter.json_schema():  # by the names that bodies are written under: an alias is for what clients send
        validate = partial(validate, by_alias=False, by_name=True)
    decode = storable.decoder(fact)
    # pydantic's times, for example, have another time zone than decoded ones, which are equal, but not the same
    is_same = set(_FORMAT.findall(json.dumps(schema))) <= {"date"}

    @watched(lambda local: f"reading an event {local['step'].type}")
    def read(data: bytes | msgspec.Raw) -> Any:
        body = step.body(data)
        try:
            event = validate(body)  # events of the class's own version were validated before they were written
        except (MemoryError, KeyboardInterrupt):
            raise
        except FAULTS as error:
            why = summary(error) if isinstance(error, ValidationError) else in_words(error)
            raise UpcastFailed(f"the upcasters from version {step.version} return no {fact.__name__}: {why}") from error
        return event if is_same else decode(body)

    return read


def summary(error: ValidationError) -> str:
    """Where and what, but not the value: it may be long or confidential."""
    return "; ".join(f"{where}: {what}" for where, what in problems(error))


def outline(error: ValidationError) -> str:
    """The first problems without what may be of a value: the keys of a dict, and the text of an author's check."""
    found = []
    for one in error.errors(include_url=False, include_context=False, include_input=False)[:MOST_PROBLEMS]:
        kind, last = one["type"], len(one["loc"]) - 1
        place = [
            str(name) if isinstance(name, int) or at == 0 or (kind, at) == ("missing", last) else "[…]"
            for at, name in enumerate(one["loc"])
        ]
        found.append(f"{'.'.join(place) or 'body'}: {one['msg'] if kind in _TOLD else 'a check refuses it'}")
    more = error.error_count() - len(found)
    return "; ".join(found) + (f"; and {more} more" if more else "")


def problems(error: ValidationError) -> Iterator[tuple[str, str]]:
    """The same, one by one."""
    for one in error.errors(include_url=False, include_context=False, include_input=False):
        is_unknown = one["type"] == "unexpected_keyword_argument"
        yield ".".join(map(str, one["loc"])) or "body", "There is no such field" if is_unknown else one["msg"]


@watched(lambda local: f"an upcaster of {local['name']} from version {local['start']} on")
def _lead(name: str, start: int, steps: Sequence[Upcaster], data: bytes | msgspec.Raw) -> bytes:
    body = _decode(data)
    try:
        for step in steps:
            body = step(body)
            if type(body) is not dict:
                raise TypeError(f"`{step.__name__}` returned a {type(body).__name__}, not a dict")
        if b"null" in (encoded := storable.encode(body)):  # which is how it writes NaN, too
            storable.require_same(body, body)
        return encoded
    except (MemoryError, KeyboardInterrupt):
        raise
    except FAULTS as error:
        raise UpcastFailed(f"the upcasters from version {start} of {name} failed: {in_words(error)}") from error
