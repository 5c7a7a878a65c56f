"""make test: pure. Which changes of an event's fields its stored bodies survive: the schemas know what the log's decoder knows."""

import dataclasses
from collections.abc import Callable
from decimal import Decimal
from enum import Enum
from typing import Annotated, Any, Literal, NamedTuple

import pytest
from pydantic import Field

from domain.engine.schemas import Change, changes, schema_of
from domain.language import fact


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


def changed(was: Any, now: Any) -> list[Change]:
    """What changes when a field of the one type becomes one of the other."""
    return list(changes(with_default(was, None), with_default(now, None)))


def breaks(was: Any, now: Any) -> bool:
    return any(change.breaks for change in changed(was, now))


@pytest.mark.parametrize(("was", "now"), [(str, str | None), (Literal["a"], Literal["a", "b"])])
def test_a_change_that_the_release_before_could_not_read_widens(was: Any, now: Any) -> None:
    assert [(change.breaks, change.widens) for change in changed(was, now)] == [(False, True)]


@pytest.mark.parametrize(
    ("was", "now"),
    [
        (str, int),
        (str, Decimal),
        (float, Decimal),
        (Annotated[int, Field(ge=1, le=30)], Annotated[int, Field(ge=1, le=7)]),
        (Literal["single", "double"], Literal["single"]),
        (str | None, Decimal | None),
        (Decimal, str),
        (Decimal, float),
        (Decimal | None, float | str | None),
        (Decimal, Annotated[Decimal, Field(ge=0)]),
        (dict[str, int], dict[int, int]),
        (dict[int, int], dict[str, int]),
        (dict[int, int], dict[Decimal, int]),
        (dict[str, int], dict[Decimal, int]),
        (dict[str, int], dict[Colour, int]),
        (dict[Colour, int], dict[Literal["red"], int]),
        (dict[Colour, int], dict[Colour, str]),
        (NamedTuple("Point", [("x", int), ("y", int)]), NamedTuple("Point", [("y", int), ("x", int)])),
    ],
)
def test_a_change_after_which_stored_bodies_are_no_longer_read_or_as_something_else_breaks(was: Any, now: Any) -> None:
    assert breaks(was, now)


@pytest.mark.parametrize(
    ("was", "now"),
    [
        (Decimal, Decimal | None),
        (Annotated[Decimal, Field(ge=0)], Decimal),
        (Annotated[Decimal, Field(ge=1, le=2)], Annotated[Decimal, Field(ge=0, le=3)]),
        (dict[Literal["red"], int], dict[Colour, int]),
        (dict[Colour, int], dict[Colour, int | None]),
        (dict[int, int], dict[int, int]),
    ],
)
def test_a_change_after_which_they_are_read_as_before_does_not(was: Any, now: Any) -> None:
    assert not breaks(was, now)


def with_default(kind: Any, default: Callable[[], Any] | None) -> dict[str, Any]:
    default_ = {"field": dataclasses.field(default_factory=default)} if default else {}
    made: type = fact(type("Happened", (), {"__annotations__": {"field": kind}, **default_}))
    return schema_of(made)


@fact
class Part:
    name: str = ""
    counts: dict[str, int] = dataclasses.field(default_factory=dict)


def test_a_part_in_a_mapping_may_gain_a_field() -> None:
    @fact
    class Newer:
        name: str = ""
        counts: dict[str, int] = dataclasses.field(default_factory=dict)
        more: int = 0

    was, now = (with_default(dict[str, part], lambda part=part: {"a": part()}) for part in (Part, Newer))  # type: ignore[valid-type, misc]
    assert not any(change.breaks for change in changes(was, now))


@pytest.mark.parametrize(
    ("kind", "was", "now"),
    [
        (str, lambda: "single", lambda: "double"),
        (str, lambda: "single", None),
        (list[str], list, lambda: ["towels"]),
        (dict[str, int], dict, lambda: {"breakfast": 1}),
        (dict[str, int] | None, dict, lambda: {"breakfast": 1}),
        (Part, Part, lambda: Part(counts={"breakfast": 1})),
        (Part | None, Part, lambda: Part(counts={"breakfast": 1})),
    ],
)
def test_another_default_breaks_also_one_that_a_mapping_has_more_of(kind: Any, was: Any, now: Any) -> None:
    found = list(changes(with_default(kind, was), with_default(kind, now)))
    assert any(change.breaks for change in found)
