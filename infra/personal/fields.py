"""Which fields are personal: read once per class from what pydantic made of its annotations."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any, get_args, get_type_hints

import msgspec
from pydantic import TypeAdapter, ValidationError

from domain.language import SEALED, SUBJECT, marker_of
from infra.domain_model.versions import summary


class Misplaced(Exception):
    """A personal field, or that of a subject, where it can't be."""


@cache
def is_personal(kind: type) -> bool:
    """Whether a command or event has personal fields, its parts included. Raises Misplaced."""
    found = list(_marked(TypeAdapter(kind).core_schema))
    if wrong := next(filter(None, found), ""):
        raise Misplaced(f"{kind.__name__} {wrong}")
    return bool(found)


@cache
def subject_field(kind: type) -> str | None:
    """The command's field that names the subject. Raises Misplaced."""
    hints = get_type_hints(kind, include_extras=True)
    found = [one.name for one in dataclasses.fields(kind) if SUBJECT in get_args(hints[one.name])]
    if len(found) > 1:
        raise Misplaced(f"{kind.__name__} has two subjects, {found[0]} and {found[1]}: it can have one")
    if deeper := next((name for name, hint in hints.items() if name not in found and _has_subject(hint)), None):
        raise Misplaced(
            f"{kind.__name__} has a SubjectId within {deeper}: it can only be a field of the command, never None"
        )
    return found[0] if found else None


@cache
def sealed_validator(kind: type) -> Callable[[bytes], Any]:
    """From JSON to a command or event whose personal values must be sealed. Raises pydantic.ValidationError."""
    validate = TypeAdapter(kind).validator.validate_json
    return partial(validate, context=SEALED) if is_personal(kind) else validate


def sealed_decoder(kind: type, decode: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The decoder of what `decide` returned: where the class has personal fields, it raises ValueError for plain text in them."""
    if not is_personal(kind):
        return decode
    validate = sealed_validator(kind)

    def read(data: bytes | msgspec.Raw) -> Any:
        try:
            validate(bytes(data))
        except ValidationError as error:  # without any value
            raise ValueError(f"decide returned a {kind.__name__}: {summary(error)}") from None
        return decode(data)

    return read


def _has_subject(hint: Any, within: tuple[Any, ...] = ()) -> bool:
    parts = get_args(hint)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint) and hint not in within:
        parts = tuple(get_type_hints(hint, include_extras=True).values())
    return SUBJECT in parts or any(_has_subject(part, (*within, hint)) for part in parts)


def _marked(node: Any, wrong: str = "") -> Iterator[str]:
    """What is wrong with each personal field in a schema of pydantic's, or the empty text."""
    if isinstance(node, dict):
        if marker := marker_of(node):
            yield (marker.misplaced and f"has a field that {marker.misplaced}") or wrong
        if node.get("default"):
            wrong = "has a personal field with a default that is not empty, which nothing would encrypt"
        if node.get("type") in ("set", "frozenset"):
            wrong = "has a set of personal texts, whose order is not the same each time: write a tuple"
        for name, child in node.items():
            yield from _marked(child, "has personal texts as keys of a mapping" if name == "keys_schema" else wrong)
    elif isinstance(node, list | tuple):
        for child in node:
            yield from _marked(child, wrong)
