"""make test: pure. What `publish` yields: what can't be public stops it by name; personal values are ciphertext, where declared."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import field
from itertools import repeat
from types import ModuleType
from typing import Any

import jsonschema_rs
import msgspec
import pytest

from domain.accounts import AccountOpened
from domain.engine.personal.tokens import sealed
from domain.language import Personal, Text, fact
from infra.log.records import Commit, EventRecord
from infra.log.rule import Counted
from infra.settings import Settings
from policies.engine import At, Public
from policies.engine.public_schema import (
    Publication,
    PublicationFailed,
    PublicEventTooLarge,
    Writer,
    asyncapi,
    publication_of,
)
from projections.engine.fold.errors import EngineStop

TOKEN = sealed("Ada " + "Lovelace " * 20, "0" * 16, bytes(32), command_id="c", number=0)
"""Longer than a `Text` may be, as its plain text is not."""


@fact
class Part:
    """Of an address."""

    street: Personal[Text] = ""
    town: str = ""


@fact
class Known:
    """A person, as other teams may know them."""

    name: Personal[Text] = ""
    account: str = ""
    parts: tuple[Part, ...] = ()
    notes: dict[str, str] = field(default_factory=dict)
    digest: bytes = b""


@fact
class Measured:
    value: float


UNCHECKED = Measured(value=0.0)
object.__setattr__(UNCHECKED, "value", float("nan"))
OPENED = EventRecord("AccountOpened", msgspec.Raw(b'{"overdraft_limit":0,"on":"2026-01-01"}'))


def published(yields: Iterable[Any], second: EventRecord = OPENED) -> tuple[list[bytes], EngineStop | None]:
    """What a stream's two events make public where the second one yields this, and the error."""
    commits = [
        Commit("accounts/a", version, [event], "c", 0, "", "accepted", None, 0, version)
        for version, event in enumerate((OPENED, second), start=1)
    ]
    counted = [Counted(offset, 0, commit) for offset, commit in enumerate(commits, start=1)]
    found, _, stop = Writer(Settings(), declared(yields), "topic", 10_000).outgoing(0, counted)
    return [outgoing.value for outgoing in found], stop


def declared(yields: Iterable[Any]) -> Publication:
    def publish(event: AccountOpened, at: At) -> Iterable[Public]:
        yield from [Public("known.v1", Known())] if at.version == 1 else yields

    publish.__annotations__ = {"event": AccountOpened, "at": At}
    module = ModuleType("policies.public")
    module.__dict__.update(VERSION=1, TYPES={"known.v1": Known, "measured.v1": Measured}, publish=publish)
    return publication_of(module)


def raising(error: BaseException) -> Iterable[Any]:
    yield Public("known.v1", Known())
    raise error


@pytest.mark.parametrize(
    ("yields", "why"),
    [
        (raising(RuntimeError("thirteen")), "thirteen"),
        (raising(MemoryError()), "MemoryError"),
        (raising(SystemExit(1)), "SystemExit: 1"),
        (["hello"], "not a Public"),
        ([Public("known.v1", object())], "is a object, not a Known"),
        ([Public("secrets.v1", Known())], "'secrets.v1', which is not in TYPES"),
        ([Public("measured.v1", UNCHECKED)], "Expected `float`, got `null`"),
        (repeat(Public("known.v1", Known())), "yields more than"),
    ],
    ids=["raises", "no-memory", "exits", "no-public", "no-data", "unknown-type", "not-a-number", "endless"],
)
def test_what_can_not_be_public_stops_right_before_its_event(yields: Iterable[Any], why: str) -> None:
    values, stop = published(yields)
    assert len(values) == 1
    assert isinstance(stop, PublicationFailed)
    assert stop.message.startswith("Event 2 of accounts/a can't be published")
    assert why in stop.message


def test_what_is_too_large_and_an_event_that_is_unknown_stop_it_too() -> None:
    values, stop = published([Public("known.v1", Known(account="x" * 10_000))])
    assert (len(values), type(stop)) == (1, PublicEventTooLarge)
    values, stop = published([], EventRecord("MoneyPrinted", msgspec.Raw(b"{}")))
    assert (len(values), stop and stop.code) == (1, "unknown-event")


@pytest.mark.parametrize(
    "data",
    [
        Known(account=TOKEN),
        Known(account=f"of {TOKEN}"),
        Known(name=TOKEN, account=TOKEN),
        Known(parts=(Part(street=TOKEN), Part(town=TOKEN))),
        Known(notes={"note": TOKEN}),
        Known(notes={TOKEN: "note"}),
    ],
    ids=["field", "part-of-a-text", "beside-one-that-may", "nested", "mapping", "key"],
)
def test_a_personal_value_where_none_is_declared_is_not_published(data: Known) -> None:
    values, stop = published([Public("known.v1", data)])
    assert len(values) == 1
    assert isinstance(stop, PublicationFailed)
    assert "known.v1 has a personal value in a field that is not declared `Personal[…]`" in stop.message


@pytest.mark.parametrize(
    "data", [Known(), Known(name=TOKEN), Known(account="a", parts=(Part(street=TOKEN, town="x"),))]
)
def test_where_the_field_says_so_it_is_published_as_ciphertext(data: Known) -> None:
    [_, value], stop = published([Public("known.v1", data)])
    assert stop is None
    assert msgspec.json.decode(value)["data"] == msgspec.json.decode(msgspec.json.encode(data))


def test_the_public_schema_takes_the_ciphertext_and_says_that_it_is_personal() -> None:
    [_, value], _ = published([Public("known.v1", Known(name=TOKEN))])
    document = asyncapi(Settings(), declared([]))
    payload = document["components"]["messages"]["known.v1"]["payload"]
    fields = payload["properties"]["data"]["properties"]
    assert fields["name"] == {"type": "string", "title": "Name", "x-personal": True}
    assert fields["digest"]["contentEncoding"] == "base64"
    event = msgspec.json.decode(value)
    jsonschema_rs.validate({**payload, "components": document["components"]}, event)
    older = {name: one for name, one in event.items() if name not in ("correlationid", "samefolddepth")}
    jsonschema_rs.validate({**payload, "components": document["components"]}, older)
