"""make test: pure. The bodies in the record of releases stand for what the log may hold, and the same class gives the same ones."""

import os
import subprocess
import sys
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field, TypeAdapter

from domain.engine.storable import encode
from domain.language import Cents, Text, fact
from tools.testing.fixtures import ROOT
from tools.testing.golden import NoExample, golden


class Bed(Enum):
    SINGLE = "single"
    DOUBLE = "double"
    KING = "king"


@dataclass(frozen=True, slots=True)
class Plain:
    """It checks nothing itself."""

    at: float
    cents: Cents
    share: Annotated[float, Field(ge=0)]


@fact
class Booked:
    bed: Bed
    guest: Text | None
    nights: Annotated[int, Field(ge=-5, le=5)]
    who: int | Literal["nobody"]
    tags: frozenset[str]
    part: Plain
    parts: tuple[Plain, ...] = field(default=())


@fact
class Optional:
    a: int = 0
    b: int = 0
    c: str = ""
    d: str | None = None


def test_each_value_of_an_enum_none_and_the_bounds_are_in_few_bodies() -> None:
    bodies = golden(Booked)
    assert {body["bed"] for body in bodies} == {one.value for one in Bed}
    assert {body["guest"] is None for body in bodies} == {True, False}
    assert {-5, 0, 5} <= {body["nights"] for body in bodies}
    assert "nobody" in {body["who"] for body in bodies}
    assert len(bodies) < 15


def test_the_class_reads_them_all() -> None:
    for body in golden(Booked):
        TypeAdapter(Booked).validate_json(encode(body))


def test_they_are_the_same_each_time_and_sets_have_an_order() -> None:
    bodies = golden(Booked)
    assert bodies == golden(Booked)
    assert all(body["tags"] == sorted(body["tags"]) for body in bodies)
    script = f"from {__name__} import Optional, golden; print(golden(Optional))"
    environments = [{**os.environ, "PYTHONHASHSEED": seed} for seed in "123"]
    made = {subprocess.check_output([sys.executable, "-c", script], env=one, cwd=ROOT) for one in environments}
    assert len(made) == 1, "whatever the process"


def test_a_class_that_gives_none_is_named() -> None:
    @fact
    class Alias:
        name: Annotated[str, Field(alias="n")]

    @fact
    class Never:
        number: Annotated[int, Field(multiple_of=10**9 + 7, ge=1, le=10**9)]

    kinds: list[Any] = [Alias, Never]
    for kind in kinds:
        with pytest.raises(NoExample, match=kind.__name__):
            golden(kind)
