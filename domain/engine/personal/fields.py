"""Which fields are personal, and whether each is sealed: read once per class.

Annotations declare them, the JSON Schema shows them (`x-personal`, `x-subject`), and pydantic's core schema seals them. A field
that is not personal in all three would let plain text pass: it is refused.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from itertools import permutations, starmap
from typing import Any, get_args, get_origin, get_type_hints

import msgspec
from pydantic import TypeAdapter, ValidationError

from domain.engine.schemas import schema_of
from domain.engine.value_limits import within_limits
from domain.engine.versions import BadContext, summary
from domain.language import SEALED, PersonalText


@cache
def is_personal(kind: type) -> bool:
    """Whether a command or event has personal fields, its parts included. Raises BadContext."""
    schema = schema_of(kind, by_alias=False)
    if wrong := next(filter(None, _marked(schema)), ""):
        raise _misplaced(kind, wrong)
    hints, fields = get_type_hints(kind, include_extras=True), schema.get("properties", {})
    declared = Counter(name for name, hint in hints.items() for _ in range(_declared(hint, (kind,))))
    shown = Counter[str](name for name, one in fields.items() for _ in _marked(one))
    personal = declared | shown
    if personal and (hidden := personal - (shown & Counter(_sealed(TypeAdapter(kind).core_schema, {})))):
        raise _misplaced(kind, _HIDDEN.format(min(hidden)))
    return bool(personal)


@cache
def subject_field(kind: type) -> str | None:
    """The command's field that names the subject. Raises BadContext."""
    whole = schema_of(kind, by_alias=False)
    fields = whole.get("properties", {})
    found = [name for name, schema in fields.items() if "x-subject" in schema]
    if len(found) > 1:
        raise _misplaced(kind, f"has two subjects, {found[0]} and {found[1]}: it can have one")
    if deeper := next(
        (name for name, schema in fields.items() if name not in found and "'x-subject'" in repr(schema)), ""
    ):
        raise _misplaced(kind, f"has a SubjectId within {deeper}: it can only be a field of the command, never None")
    for name, hint in get_type_hints(kind, include_extras=True).items():
        if name not in found and "x-subject" in repr(hint):
            raise _misplaced(kind, f"has a SubjectId, {name}, that SkipJsonSchema or its like hides: leave it out")
    if found and ("x-personal" in fields[found[0]] or found[0] not in whole.get("required", ())):
        raise _misplaced(
            kind, f"has a SubjectId, {found[0]}, that is personal itself or has a default: many people would share it"
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


def _misplaced(kind: type, what: str) -> BadContext:
    return BadContext(
        f"{kind.__module__}: {kind.__name__} {what}.", "docs/personal-data.md shows where personal values can be."
    )


def _declared(hint: Any, within: tuple[Any, ...]) -> int:
    """How many personal texts an annotation declares. A class within itself counts none."""
    if isinstance(hint, PersonalText):
        return 1
    if any(hint is one for one in within):
        return 0
    parts = [*get_args(hint), get_origin(hint), *(getattr(hint, name, None) for name in ("__value__", "__supertype__"))]
    if isinstance(hint, type) and any(hasattr(hint, name) for name in _FIELDS):
        parts += get_type_hints(hint, include_extras=True).values()
    return sum(_declared(part, (*within, hint)) for part in parts)


def _sealed(schema: Any, known: Mapping[str, Any], field: str = "", within: tuple[str, ...] = ()) -> Iterator[str]:
    """The field of each text that a core schema seals, if nothing around it gets the value first, or may leave it out."""
    match schema:
        case {"type": "definitions", "schema": inner, "definitions": of}:
            yield from _sealed(inner, {one["ref"]: one for one in of}, field, within)
        case {"type": "definition-ref", "schema_ref": ref}:
            if ref not in within:
                yield from _sealed(known[ref], known, field, (*within, ref))
        case {"type": "function-wrap", "function": {"function": function}}:
            if isinstance(getattr(function, "__self__", None), PersonalText):
                yield field
        case {"type": "function-after", "schema": inner} if inner["type"] != "function-wrap":
            yield from _sealed(inner, known, field, within)
        case {"type": str(kind)} if kind in _TRANSPARENT and schema.get("on_error", "raise") == "raise":
            for part, inner in schema.items():
                if part not in ("serialization", "python_schema"):
                    yield from _sealed(inner, known, field or schema.get("name", ""), within)
        case dict() if not isinstance(schema.get("type"), str):  # fields or arms, by name
            for name, inner in schema.items():
                yield from _sealed(inner, known, field or name, within)
        case _:
            for inner in schema if isinstance(schema, list | tuple) else ():
                yield from _sealed(inner, known, field, within)


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
_HIDDEN = (
    "has a field, {}, that is personal, but its plain text could stay: something around it hides the mark, or gets the value "
    "first. Write what the text must be within, `Personal[Annotated[Text, …]]`. Leave out validators, SkipValidation, OnErrorOmit "
    "and WithJsonSchema around it, and `before` and `wrap` validators of the class"
)
_FIELDS = ("__dataclass_fields__", "_fields", "__total__", "model_fields")
"""What classes have whose annotations are fields."""
_TRANSPARENT = {
    *("nullable", "default", "union", "tagged-union", "json-or-python"),
    *("list", "tuple", "set", "frozenset", "deque", "dict"),
    *("dataclass", "dataclass-args", "dataclass-field", "typed-dict", "typed-dict-field", "model", "model-fields"),
    *("model-field", "named-tuple", "named-tuple-field"),
}
"""Parts of a core schema that pass each value on as it is in the body, and drop none."""
