"""make test: pure. Personal values in public events: refused, unless the author declares the field personal there: ciphertext."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import field
from types import ModuleType
from typing import Any

import jsonschema_rs
import msgspec
import pytest

from domain.accounts import AccountOpened
from domain.language import Personal, Text, fact
from infra.log.records import Commit, EventRecord
from infra.log.rule import Counted
from infra.personal.tokens import sealed
from infra.settings import Settings
from policies.engine import At, Public
from policies.engine.public_schema import Publication, PublicationFailed, Writer, asyncapi, publication_of

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


def published(data: Any) -> tuple[list[bytes], Exception | None]:
    one = Commit(
        "accounts/a", 1, [EventRecord("AccountOpened", msgspec.Raw(b'{"overdraft_limit":0,"on":"2026-01-01"}'))],
        "c1", 0, "", "accepted", None, 0, 1,
    )  # fmt: skip
    found, _, stop = Writer(Settings(), declared(data), "topic", 10_000).outgoing(0, [Counted(1, 0, one)])
    return [outgoing.value for outgoing in found], stop


def declared(data: Any) -> Publication:
    def publish(event: AccountOpened, at: At) -> Iterable[Public]:
        yield Public("known.v1", data)

    publish.__annotations__ = {"event": AccountOpened, "at": At}
    module = ModuleType("policies.public")
    module.__dict__.update(VERSION=1, TYPES={"known.v1": Known}, publish=publish)
    return publication_of(module)


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
    values, stop = published(data)
    assert values == []
    assert isinstance(stop, PublicationFailed)
    assert "known.v1 has a personal value in a field that is not declared `Personal[…]`" in stop.message


@pytest.mark.parametrize(
    "data", [Known(), Known(name=TOKEN), Known(account="a", parts=(Part(street=TOKEN, town="x"),))]
)
def test_where_the_field_says_so_it_is_published_as_ciphertext(data: Known) -> None:
    [value], stop = published(data)
    assert stop is None
    assert msgspec.json.decode(value)["data"] == msgspec.json.decode(msgspec.json.encode(data))


def test_the_public_schema_takes_the_ciphertext_and_says_that_it_is_personal() -> None:
    [value], _ = published(Known(name=TOKEN))
    document = asyncapi(Settings(), declared(Known()))
    payload = document["components"]["messages"]["known.v1"]["payload"]
    name = payload["properties"]["data"]["properties"]["name"]
    assert name == {"type": "string", "title": "Name", "x-personal": True}
    jsonschema_rs.validate({**payload, "components": document["components"]}, msgspec.json.decode(value))
