"""Which fields are personal: read once per class from its JSON Schema, where `x-personal` and `x-subject` mark them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import permutations, starmap
from typing import Any

import msgspec
from pydantic import TypeAdapter, ValidationError

from domain.language import SEALED
from infra.domain_model.schemas import schema_of
from infra.domain_model.value_limits import within_limits
from infra.domain_model.versions import summary


class Misplaced(Exception):
    """A personal field, or that of a subject, where it can't be."""


@cache
def is_personal(kind: type) -> bool:
    """Whether a command or event has personal fields, its parts included. Raises Misplaced."""
    found = list(_marked(schema_of(kind)))
    if wrong := next(filter(None, found), ""):
        raise Misplaced(f"{kind.__name__} {wrong}")
    return bool(found)


@cache
def subject_field(kind: type) -> str | None:
    """The command's field that names the subject. Raises Misplaced."""
    whole = schema_of(kind, by_alias=False)
    fields = whole.get("properties", {})
    found = [name for name, schema in fields.items() if "x-subject" in schema]
    if len(found) > 1:
        raise Misplaced(f"{kind.__name__} has two subjects, {found[0]} and {found[1]}: it can have one")
    if deeper := next(
        (name for name, schema in fields.items() if name not in found and "'x-subject'" in repr(schema)), ""
    ):
        raise Misplaced(
            f"{kind.__name__} has a SubjectId within {deeper}: it can only be a field of the command, never None"
        )
    if found and ("x-personal" in fields[found[0]] or found[0] not in whole.get("required", ())):
        raise Misplaced(
            f"{kind.__name__} has a SubjectId, {found[0]}, that is personal itself or has a default: many people would share it"
        )
    return found[0] if found else None


@cache
def sealed_validator(kind: type) -> Callable[[bytes], Any]:
    """From JSON to a command whose personal values must be sealed. Raises pydantic.ValidationError."""
    validate = within_limits(kind, TypeAdapter(kind).validator.validate_json)
    return partial(validate, context=SEALED) if is_personal(kind) else validate


def decided_decoder(kind: type, decode: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The decoder of what `decide` returned. It raises ValueError for plain personal text, and for what no column can hold."""
    checked, is_sealed = within_limits(kind, decode), is_personal(kind)
    if checked is decode and not is_sealed:
        return decode
    # by the names that it is written under: an alias is for what clients send
    validate = partial(TypeAdapter(kind).validator.validate_json, context=SEALED, by_alias=False, by_name=True)

    def read(data: bytes | msgspec.Raw) -> Any:
        try:
            if is_sealed:
                validate(bytes(data))
            return checked(data)
        except ValidationError as error:  # without any value
            raise ValueError(f"decide returned a {kind.__name__}: {summary(error)}") from None

    return read


def _marked(schema: Any, wrong: str = "", field: str = "") -> Iterator[str]:
    """What is wrong with each personal text in a schema, or the empty text. `field` is the innermost one that it is in."""
    if isinstance(schema, list):
        for one in schema:
            yield from _marked(one, wrong, field)
    elif isinstance(schema, dict):
        if schema.get("default"):
            wrong = "has a personal field with a default that is not empty, which nothing would encrypt"
        if schema.get("uniqueItems"):
            wrong = "has a set of personal texts, whose order is not the same each time: write a tuple"
        if "properties" in schema and schema.get("additionalProperties") is not False:
            wrong = "has personal fields in a part that takes unknown ones beside them, in plain text: make it a @fact"
        if any(starmap(_may_pass, permutations(schema.get("anyOf", ()), 2))):
            wrong = "has a union of personal and other texts: what does not fit the one would pass as the other, in plain text"
        if mark := schema.get("x-personal"):
            is_text = schema.get("type") == "string" and schema.keys().isdisjoint({"enum", "const", "format"})
            yield wrong or ("" if is_text else _NO_TEXT.format(field)) or ("" if mark is True else _TWICE)
        for name, child in schema.items():
            # fields may have the names of keywords
            for inner, one in child.items() if name == "properties" else ((field, child),):
                yield from _marked(one, _KEY if name == "propertyNames" else wrong, inner)


def _may_pass(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether a text that is personal in the one may be plain text in the other."""
    if "'x-personal'" not in repr(one) or "$ref" in other:
        return False
    if arms := one.get("anyOf") or one.get("oneOf"):
        return any(_may_pass(arm, other) for arm in arms)
    if arms := other.get("anyOf") or other.get("oneOf"):
        return any(_may_pass(one, arm) for arm in arms)
    if one.get("type") != other.get("type", one.get("type")):
        return False
    if "x-personal" in one:
        return other.get("format") not in _NARROW and other.keys().isdisjoint({"x-personal", "enum", "const"})
    if "properties" in one and "properties" in other:
        names = one["properties"].keys() & other["properties"].keys()
        return any(_may_pass(one["properties"][name], other["properties"][name]) for name in names)
    for parts in ("items", "additionalProperties"):
        if isinstance(one.get(parts), dict) and isinstance(other.get(parts), dict):
            return _may_pass(one[parts], other[parts])
    return "'x-personal'" not in repr(other)


_NARROW = {"uuid", "date", "date-time", "time", "duration", "decimal", "ipv4", "ipv6"}
"""Formats that are no name's."""
_NO_TEXT = "has a field, {}, that is personal, but no text: keep it as a `Personal[Text]`"
_TWICE = "has a field that is personal twice: write `Annotated[Text, PersonalText(…)]`"
_KEY = "has personal texts as keys of a mapping"
