"""Examples of events and commands for the record of releases: the same class gives the same one."""

from collections.abc import Iterator
from typing import Any

import msgspec
from hypothesis import HealthCheck, Phase, given, reject, seed, settings
from hypothesis.errors import HypothesisException
from pydantic import TypeAdapter, ValidationError

from domain.engine.schemas import Schema, schema_of
from domain.engine.storable import encode
from infra.errors import SamefoldError, in_words
from infra.processes.time_limit import TooSlow
from tools.testing.facts import facts

EXAMPLES = 100
MOST_BYTES = 600


class NoExample(SamefoldError):
    """Too few of the values that the fields' types allow make an event or command."""


def golden(fact: type) -> list[Any]:
    """Bodies of it. In the first as many fields as possible have a value of their own: of several, the longest of a readable size.

    The others show what it does not: the other values of an Enum, None, nothing in a list, the least number. An upcaster that
    suits one of them may fail for another. Raises NoExample.
    """
    found: list[Any] = []
    check = TypeAdapter(fact).validator.validate_json

    @seed(14)
    @settings(
        max_examples=EXAMPLES,
        database=None,
        phases=[Phase.generate],
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(facts(fact))
    def draw(example: Any) -> None:
        body = msgspec.json.encode(example, order="deterministic")  # which sets have not
        try:
            check(body, by_alias=True, by_name=True)
        except ValidationError:
            reject()  # a part that checks nothing itself
        found.append(msgspec.json.decode(body))

    try:
        draw()
    except (HypothesisException, TypeError, RecursionError, TooSlow) as error:
        raise NoExample(
            f"No example of {fact.__name__} could be made: {in_words(error)}.",
            "Write types and bounds that Hypothesis knows into its fields, or a validator that takes more of them. Fields with "
            "an alias, and types within themselves, have no examples.",
        ) from error
    readable = [one for one in found if len(encode(one)) <= MOST_BYTES and encode(one).isascii()] or found
    schema = schema_of(fact, by_alias=False)
    chosen: list[Any] = []
    shown: set[tuple[str, str]] = set()
    for bodies, sign in ((readable, -1), (found, 1)):
        left = [(body, set(_traits(schema, body))) for body in sorted(bodies, key=lambda one: sign * len(encode(one)))]
        if not chosen:
            chosen, shown = [left[0][0]], left[0][1]
        while (best := max(left, key=lambda one: len(one[1] - shown)))[1] - shown:
            chosen.append(best[0])
            shown |= best[1]
    return chosen


def _traits(schema: Schema, value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """What of a value an upcaster may have to treat in a way of its own, each with its path."""
    listed = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if value is None or isinstance(value, bool) or not value or value in listed:
        yield path, repr(value)
    elif isinstance(value, int | float):
        bounds = {schema.get("minimum"): "least", schema.get("maximum"): "most"}
        yield path, bounds.get(value, "below zero" if value < 0 else "any")
    else:
        yield path, type(value).__name__
    for other in schema.get("anyOf", []):
        yield from _traits(other, value, path)
    if isinstance(value, dict):
        fields, rest = schema.get("properties", {}), schema.get("additionalProperties")
        for name, one in value.items():
            yield from _traits(fields.get(name) or rest or {}, one, f"{path}.{name}" if name in fields else f"{path}[]")
    elif isinstance(value, list):
        for number, one in enumerate(value):
            first = schema.get("prefixItems", [])
            inner = first[number] if number < len(first) else schema.get("items") or {}
            yield from _traits(inner, one, f"{path}[{number if first else ''}]")
