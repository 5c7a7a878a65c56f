"""make test: functions without a store.

Commands with values of every type: what the document says of them is taken, and what is not taken is refused by its field.
"""

import asyncio
import re
from dataclasses import dataclass, field, fields
from datetime import time, timedelta
from typing import Annotated, Any, ClassVar, NamedTuple

import httpx
import msgspec
import pytest
from fastapi import FastAPI
from pydantic import Field, TypeAdapter

from api.commands import router_of
from api.openapi import Body
from api.problems import HANDLERS
from commands.intake import validator
from commands.sealing import Unsealed
from domain.engine.contexts import Context
from domain.engine.personal.keys import DataKey
from domain.engine.schemas import schema_of
from domain.language import Personal, Text, fact
from infra.log.records import Command
from projections.engine.views.core_views import shape_of


@dataclass(frozen=True, slots=True)
class Plain:
    sha: bytes


class Pair(NamedTuple):
    sha: bytes
    at: time


@fact
class OpenRoom:
    opens: time | None = None
    due: timedelta | None = None
    sha: Annotated[bytes, Field(max_length=3)] = b""
    by_sha: dict[bytes, str] = field(default_factory=dict)
    plain: Plain | None = None
    pair: Pair | None = None


@fact
class Sign:
    FORM: ClassVar[bytes] = b"1"
    FORMS: ClassVar[tuple[bytes, ...]] = (b"1",)
    name: Personal[Text]
    sha: bytes


@dataclass(frozen=True, slots=True)
class State:
    last: OpenRoom | None = None


ROOMS = Context(
    "rooms", {"OpenRoom": OpenRoom}, {"OpenRoom": OpenRoom}, State, 1, lambda *_: [], lambda state, _: state
)


def read(**values: Any) -> OpenRoom:
    found: OpenRoom = validator(OpenRoom)(msgspec.json.encode(values))
    return found


def test_bytes_are_base64_in_a_command_as_they_are_in_an_event() -> None:
    made = read(sha="YWJj", by_sha={"+/8=": "a"}, plain={"sha": "YWJj"}, pair=["YWJj", "08:00"])
    assert made == OpenRoom(sha=b"abc", by_sha={b"\xfb\xff": "a"}, plain=Plain(b"abc"), pair=Pair(b"abc", time(8)))
    assert validator(OpenRoom)(msgspec.json.encode(made)) == made
    assert b'"sha":"+/8="' in TypeAdapter(OpenRoom).dump_json(OpenRoom(sha=b"\xfb\xff"))


def test_how_bytes_are_read_is_no_part_of_what_was_released() -> None:
    """Neither of the schema, nor of the shape of a state."""
    assert schema_of(OpenRoom)["properties"]["sha"] == {
        "type": "string",
        "format": "binary",
        "maxLength": 3,
        "default": "",
    }
    assert shape_of(Sign).endswith(",sha:bytes=}")


def test_a_personal_command_may_have_bytes_that_are_no_text() -> None:
    body = {"name": "Ada", "sha": "+/8="}
    sent = Command("a", "rooms/1", "Sign", msgspec.Raw(msgspec.json.encode(body)))
    sealed = msgspec.json.decode(Unsealed(sent, Sign).sealed(DataKey("0" * 16, bytes(32))).data)
    assert (sealed["sha"], "Ada" in sealed["name"]) == ("+/8=", False)


def refused(body: dict[str, Any]) -> list[dict[str, str]]:
    """What an API answers that can refuse commands, and no more."""
    app = FastAPI(exception_handlers=HANDLERS)
    app.state.services = None
    app.include_router(router_of({"rooms": ROOMS}, []))

    async def post() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            return await client.post("/rooms/1/open-room", json=body)

    answer = asyncio.run(post())
    assert answer.status_code == 422
    found: list[dict[str, str]] = answer.json()["errors"]
    return found


@pytest.mark.parametrize(
    ("field", "body", "why"),
    [
        ("opens", {"opens": "08:00Z"}, "time zone"),
        ("pair.at", {"pair": ["", "08:00:00+01:00"]}, "time zone"),
        ("sha", {"sha": "!!!"}, "base64"),
        ("sha", {"sha": "YWI"}, "base64"),
        ("sha", {"sha": "-_-_"}, "base64"),
        ("sha", {"sha": "YWI\0"}, "base64"),
        ("sha", {"sha": "YWJjYWJj"}, "at most 3 bytes"),
        ("plain.sha", {"plain": {"sha": "!!!"}}, "base64"),
        ("until", {"until": 1}, "There is no such field"),
        ("by_sha.YWJj", {"by_sha": {"YWJj": "a\0"}}, "NUL"),
    ],
)
def test_a_value_that_is_not_taken_is_refused_by_its_field(field: str, body: dict[str, Any], why: str) -> None:
    [error] = refused(body)
    assert (error["at"], why in error["problem"]) == (field, True), error


def test_the_document_says_what_is_taken() -> None:
    body = Body(ROOMS, "OpenRoom", OpenRoom)
    assert {*body.schema["properties"]} == {one.name for one in fields(OpenRoom)}
    patterns = {name: body.schema["properties"][name]["anyOf"][0]["pattern"] for name in ("opens", "due")}
    for name, taken, refused in (
        ("opens", ["08:00", "23:59:59.5"], ["08:00Z", "24:00", "08:00:60"]),
        ("due", ["PT1H", "P1DT90.5S", "-PT1M"], ["P", "PT", "P1DT", "P1MT"]),
    ):
        assert [re.search(patterns[name], text) is not None for text in [*taken, *refused]] == [
            *[True] * len(taken),
            *[False] * len(refused),
        ]
        assert all(getattr(read(**{name: text}), name) is not None for text in taken)
    assert body.schema["properties"]["sha"] == {"type": "string", "contentEncoding": "base64", "default": ""}
