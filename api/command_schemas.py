"""The JSON schema of a command, under names that are its context's own, and an example that its validation accepts."""

from __future__ import annotations

import re
from typing import Any

from pydantic import TypeAdapter, ValidationError

from api.openapi import EXAMPLES, REF, SCHEMAS, Json
from commands.intake import validator
from infra.domain_model.contexts import Context


def schema_of(context: Context, name: str, kind: type) -> Json:
    """The JSON schema of a command; it and its parts are put into SCHEMAS under names that are the context's own."""
    prefix = _camel(context.name)
    schema: Json = TypeAdapter(kind).json_schema(ref_template=f"{REF}{prefix}{{model}}")
    for part, described in schema.pop("$defs", {}).items():
        SCHEMAS[prefix + part] = _readable(described)
    SCHEMAS[component(context, name)] = _readable(schema) | {"title": component(context, name)}
    return schema


def _readable(schema: Json) -> Json:
    """Without what makes generators stumble: titles that repeat the name, and objects as defaults."""
    properties = {
        name: {
            key: value
            for key, value in described.items()
            if key != "title" and not (key == "default" and isinstance(value, dict | list))
        }
        for name, described in schema.get("properties", {}).items()
    }
    return schema | {"properties": properties}


def example(schema: Json, kind: type) -> Json:
    """An example that the command's own validation accepts; nothing where none can be made up."""
    made = {
        name: _value(described)
        for name, described in schema.get("properties", {}).items()
        if name in schema.get("required", ())
    }
    try:
        validator(kind)(TypeAdapter(dict[str, Any]).dump_json(made))
    except ValidationError:
        return {}
    return {"example": made}


def _value(schema: Json) -> Any:
    """A plain value of a property."""
    if given := schema.get("examples"):
        return given[0]
    if choices := schema.get("enum"):
        return choices[0]
    match schema.get("type"), schema.get("format"):
        case "string", "date":
            return "2026-01-31"
        case "string", "date-time":
            return "2026-01-31T12:00:00Z"
        case "string", "uuid":
            return EXAMPLES["key"]
        case "string", _:
            return "text"[: schema.get("maxLength", 4)]
        case "integer" | "number", _:
            return max(schema.get("minimum", 0), min(100, schema.get("maximum", 100)))
        case "boolean", _:
            return True
        case "array", _:
            return []
        case _:
            return {}


def component(context: Context, name: str) -> str:
    """Under which a command's schema is found."""
    return _camel(context.name) + name


def _camel(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))


def words(name: str) -> str:
    """`OpenAccount` as `Open account`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", name).capitalize()


def kebab(name: str) -> str:
    """`OpenAccount` as `open-account`."""
    return _HUMP.sub("-", name).lower().replace("_", "-")


_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
