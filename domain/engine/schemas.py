"""The JSON Schema of an event or command, and what a later one changes: whether it still takes all bodies of the earlier one."""

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple, TypeAlias

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, NoDefault

Schema: TypeAlias = Mapping[str, Any]

_PROSE = {"title", "description", "examples"}
_AT_LEAST = {"minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties"}
_AT_MOST = {"maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties"}
_BOUNDS = {*_AT_LEAST, *_AT_MOST, "pattern", "uniqueItems", "multipleOf"}
_WITHIN = {"items": "[]", "additionalProperties": "[]", "propertyNames": " key"}
"""What a field's path gains where its schema holds another one."""
_OBJECT = {"type", "properties", "required", "additionalProperties"}


class Change(NamedTuple):
    """A difference between two schemas. `breaks`: the later one refuses bodies of the earlier one, or reads another thing."""

    breaks: bool
    what: str
    widens: bool = False
    """Code of the earlier one can't decode all bodies of the later one. Beyond its bounds it can: it does not check them."""


class _AsStored(GenerateJsonSchema):
    """With the defaults that a `default_factory` makes, and types that have one form in the log and two elsewhere."""

    def get_default_value(self, schema: Any) -> Any:
        found = super().get_default_value(schema)
        return schema["default_factory"]() if found is NoDefault and "default_factory" in schema else found

    def decimal_schema(self, schema: Any) -> dict[str, Any]:
        number, _text = super().decimal_schema(schema)["anyOf"]
        return {**number, "type": "string", "format": "decimal"}

    def dict_schema(self, schema: Any) -> dict[str, Any]:
        """pydantic leaves out what keys are, unless they are texts."""
        keys, values = (self.generate_inner(schema[part]) for part in ("keys_schema", "values_schema"))
        found = {"type": "object", "propertyNames": keys, "additionalProperties": values}
        self.update_with_validations(found, schema, self.ValidationsMapping.object)
        return found

    def named_tuple_schema(self, schema: Any) -> dict[str, Any]:
        """A list in the log: the order of its fields says which is which."""
        return super().named_tuple_schema(schema) | {"x-fields": [field["name"] for field in schema["fields"]]}


@cache  # several checks at each start read it
def schema_of(fact: type, *, by_alias: bool = True) -> dict[str, Any]:
    """The class's schema in one piece and without prose. A type within itself stays a reference. Raises PydanticUserError."""
    made = TypeAdapter(fact).json_schema(by_alias=by_alias, schema_generator=_AsStored)
    found: dict[str, Any] = _plain(made, made.get("$defs", {}), ())
    return found


def _plain(schema: Any, models: Mapping[str, Any], within: tuple[str, ...], *, names: bool = False) -> Any:
    """`names`: the members are names of fields, which may be called `title`."""
    if isinstance(schema, list):
        return [_plain(one, models, within) for one in schema]
    if not isinstance(schema, dict):
        return schema
    name = str(schema.get("$ref", "")).removeprefix("#/$defs/")
    if not names and name in models and name not in within:
        rest = {key: value for key, value in schema.items() if key != "$ref"}
        return _plain(models[name] | rest, models, (*within, name))
    return {
        key: value
        if key in ("default", "enum", "const") and not names
        else _plain(value, models, within, names=key == "properties" and not names)
        for key, value in schema.items()
        if names or key not in _PROSE | {"$defs"}
    }


def changes(was: Schema, now: Schema, path: str = "") -> Iterator[Change]:
    """What is different in `now`, field by field."""
    if was == now:
        return
    if "properties" in was and "properties" in now:
        yield from _fields(was, now, path)
        return
    where = f"field '{path}'" if path else "it"
    if "anyOf" in was or "anyOf" in now:
        old, new = was.get("anyOf", [was]), now.get("anyOf", [now])
        lost = [one for one in old if all(any(change.breaks for change in changes(one, other)) for other in new)]
        gained = [one for one in new if all(any(map(_is_noticed, changes(other, one))) for other in old)]
        said = f"{where} takes other types: {_said(was)} became {_said(now)}"
        yield Change(bool(lost), said, widens=bool(gained))
        return
    old_values, new_values = _values(was), _values(now)
    if old_values != new_values:
        said = f"{where} takes other values: {old_values} became {new_values}"
        yield Change(not _has_all(new_values, old_values), said, widens=not _has_all(old_values, new_values))
    for key in sorted({*was, *now} - {"default", "enum", "const"}):
        old, new = was.get(key), now.get(key)
        if old == new:
            continue
        if key == "x-personal":
            now_is = (
                "personal now, but values in the log stay plain text, which `forget` can't reach"
                if new
                else "not personal now"
            )
            yield Change(True, f"{where} is {now_is}", widens=True)
        elif key in _WITHIN and isinstance(old, dict) and isinstance(new, dict):
            yield from changes(old, new, f"{path}{_WITHIN[key]}")
        else:
            yield Change(_is_narrower(key, old, new), f"{where} has another {key}: {old!r} became {new!r}")


def _fields(was: Schema, now: Schema, path: str) -> Iterator[Change]:
    before, after, required = was["properties"], now["properties"], now.get("required", [])
    for name in sorted({*before, *after}):
        field = f"{path}.{name}" if path else name
        if name not in after:
            yield Change(True, f"field '{field}' was removed")
        elif name not in before:
            missing = name in required
            yield Change(missing, f"field '{field}' is new, {'without' if missing else 'with'} a default")
        else:
            yield from changes(before[name], after[name], field)
            default = before[name].get("default", NoDefault)
            if default is not NoDefault and not _is_same_default(
                default, after[name].get("default", NoDefault), before[name]
            ):
                yield Change(True, f"field '{field}' had the default {default!r}, which older bodies rely on")
    before, after = ({key: value for key, value in one.items() if key not in _OBJECT} for one in (was, now))
    yield from changes(before, after, path)


def _is_noticed(change: Change) -> bool:
    return change.breaks or change.widens


def _has_all(values: list[Any] | None, of: list[Any] | None) -> bool:
    return values is None or (of is not None and all(one in values for one in of))


def _is_narrower(key: str, old: Any, new: Any) -> bool:
    if key not in _BOUNDS:
        return True
    if old is None or new is None:
        return new is not None
    return key not in _AT_LEAST | _AT_MOST or bool(new > old if key in _AT_LEAST else new < old)


def _values(schema: Schema) -> list[Any] | None:
    """The values that it lists; None where it lists none."""
    return [schema["const"]] if "const" in schema else schema.get("enum")


def _is_same_default(was: Any, now: Any, schema: Schema) -> bool:
    """A default that is an object may have gained members: those of new fields, with their defaults. A mapping's are no fields."""
    fields = [one["properties"] for one in (schema, *schema.get("anyOf", [])) if "properties" in one]
    if fields and isinstance(was, dict) and isinstance(now, dict):
        return all(name in now and _is_same_default(was[name], now[name], fields[0].get(name, {})) for name in was)
    if (values := schema.get("additionalProperties")) and isinstance(was, dict) and isinstance(now, dict):
        return was.keys() == now.keys() and all(_is_same_default(was[name], now[name], values) for name in was)
    return bool(was == now)


def _said(schema: Schema) -> str:
    if "anyOf" in schema:
        return " | ".join(map(_said, schema["anyOf"]))
    return str(schema.get("format") or schema.get("type") or schema.get("const") or schema.get("enum") or "an object")
