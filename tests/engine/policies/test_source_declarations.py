"""make test: modules in memory. A file of `policies/` with SOURCE is a source, or is named with what to write."""

from __future__ import annotations

import json
import traceback
from types import ModuleType

import pytest
from pydantic import TypeAdapter, ValidationError

from domain.language import Cents
from infra.settings import Settings, Source
from policies.engine import Received, message
from policies.engine.messages import Message, MessageFailed, Raw, Reception, read
from policies.engine.policy import BadPolicy, policy_of

HEAD = """
from collections.abc import Iterable
from domain.language import Text
from policies.engine import Received, Send, message

VERSION = 1
SOURCE = "billing"

@message("a.v1")
class A:
    what: Text

@message("a.v1")
class B:
    what: Text

@message()
class C:
    what: Text
"""


def source(text: str) -> ModuleType:
    module = ModuleType("policies.from_billing")
    exec(compile(HEAD + text, module.__name__, "exec", dont_inherit=True), vars(module))
    return module


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no function `receive`"),
        ("def receive(event: A, at: Received) -> Iterable[Send]: ...", "has other parameters"),
        ("async def receive(message: A, at: Received) -> Iterable[Send]: ...", "is async"),
        ("def receive(message: list[A], at: Received) -> Iterable[Send]: ...", "takes list, which is no message"),
        ('SOURCE = "Billing"\ndef receive(message: A, at: Received) -> Iterable[Send]: ...', "SOURCE = 'Billing'"),
        ("def receive(message: int, at: Received) -> Iterable[Send]: ...", "takes int, which is no message"),
        ("def receive(message: A | None, at: Received) -> Iterable[Send]: ...", "takes NoneType, which is no message"),
        ("def receive(message: A | B, at: Received) -> Iterable[Send]: ...", r'two classes with @message\("a.v1"\)'),
        ("def receive(message: A | C, at: Received) -> Iterable[Send]: ...", "a class without a message type"),
        ("DEDUP = True\ndef receive(message: A, at: Received) -> Iterable[Send]: ...", "has DEDUP = True"),
        (
            "def decode(raw): ...\ndef receive(message: A, at: Received) -> Iterable[Send]: ...",
            "`decode` of .* has other",
        ),
        ("ON_POISON = 'skip'\ndef receive(message: A, at: Received) -> Iterable[Send]: ...", "ON_POISON = 'skip'"),
    ],
)
def test_a_file_that_is_no_source_is_named(text: str, why: str) -> None:
    with pytest.raises(BadPolicy, match=why) as refused:
        policy_of(source(text))
    assert "from_billing" in refused.value.message


@message()
class Line:
    cents: Cents


@message("ordered.v1")
class Ordered:
    lines: list[Line]


def test_a_message_and_its_parts_ignore_what_they_do_not_name_and_refuse_other_types() -> None:
    read = TypeAdapter(Ordered).validate_json
    assert read('{"lines": [{"cents": 3, "sku": "a"}], "by": "Ada"}') == Ordered(lines=[Line(cents=3)])
    for body in ('{"lines": [{"cents": "3"}]}', '{"lines": [{"cents": -3}]}', '{"lines": [{}]}', "{}", "[]"):
        with pytest.raises(ValidationError):
            read(body)


FAILING = """
from domain.accounts import Deposit

@message("d.v1")
class D:
    what: str
    prices: dict[str, int]

    def __post_init__(self):
        if self.what == "check":
            raise ValueError("secret")

def receive(message: D, at: Received) -> Iterable[Send]:
    if message.what == "receive":
        raise KeyError("secret")
    yield Send(message.what, Deposit(cents=1, on=at.time.date()))
"""


def test_what_is_said_of_a_message_has_no_value_of_it_and_an_end() -> None:
    def said(what: str, prices: object, on_poison: str = "park") -> str:
        policy = policy_of(source(f"{FAILING}\nON_POISON = {on_poison!r}"))
        body = json.dumps({"type": "d.v1", "data": {"what": what, "prices": prices}}).encode()
        reception = Reception(Settings(sources={"billing": Source(topic="t")}), policy, "topic", 3)
        [(wish, _)] = reception.handled(Raw("t", 0, 0, 0, None, body, {})).wishes
        return str(wish.dead)

    line = (HEAD + FAILING).split("\n").index('        raise KeyError("secret")') + 1
    assert said("receive", {}) == f"bad-message: `receive` failed: KeyError at policies/from_billing.py:{line}"
    with pytest.raises(MessageFailed) as failed:
        said("receive", {}, "stop")
    assert f"KeyError at policies/from_billing.py:{line}." in failed.value.message
    assert "secret" not in "".join(traceback.format_exception(failed.value))
    assert said("check", {}) == "bad-message: D: body: a check refuses it"
    found = said("x", {f"secret{number}": "x" for number in range(100)})
    assert found.startswith("bad-message: D: prices.[…]: Input should be a valid integer;")
    assert found.endswith("; and 97 more")
    assert "secret" not in found + said("secret/1", {})


def test_a_source_reacts_to_no_event_and_a_test_names_its_source_alone() -> None:
    policy = policy_of(source("def receive(message: C, at: Received) -> Iterable[Send]: ..."))
    assert (policy.name, policy.version, policy.subscription, policy.on_poison) == (
        "from_billing",
        1,
        frozenset(),
        "stop",
    )
    assert policy.source is not None
    assert (policy.source.name, {*policy.source.types}, policy.source.by_id) == ("billing", {None}, False)
    assert Received(source="billing").id is None


IN_HEADERS = {"ce_specversion": "1.0", "ce_id": "1", "ce_source": "/x", "ce_type": "a.v1"}
IN_BODY = {"specversion": "1.0", "id": "1", "source": "/x"}
STRUCTURED = {"content-type": "application/cloudevents+json"}


@pytest.mark.parametrize(
    ("headers", "event", "ident"),
    [
        (IN_HEADERS | {"ce_type": "b.v1"}, {}, None),
        (STRUCTURED, IN_BODY, "/x 1"),
        ({}, IN_BODY, "/x 1"),
        ({}, {}, None),
    ],
)
def test_a_webhook_has_the_id_and_the_type_that_are_signed(
    headers: dict[str, str], event: dict[str, str], ident: str | None
) -> None:
    """Of a topic's record, which nobody else can write, all headers count."""
    one = policy_of(source("def receive(message: A, at: Received) -> Iterable[Send]: ...")).source
    assert one is not None
    body = json.dumps(event | {"type": "a.v1", "data": {"what": "x"}}).encode()
    raw = Raw("inbox", 0, 0, 0, None, body, headers | {"samefold-hook": "billing", "webhook-id": "msg_1"})
    signed = read(one, raw)
    assert isinstance(signed, Message)
    assert (signed.at.id, signed.at.type, signed.fact.what) == ("msg_1", "a.v1", "x")
    if "ce_type" not in headers:
        read_in_topic = read(one, raw._replace(headers=headers))
        assert isinstance(read_in_topic, Message)
        assert read_in_topic.at.id == ident


def test_a_webhook_of_a_name_that_neither_a_file_nor_the_setting_has_is_told_apart() -> None:
    settings = Settings(sources={name: Source(topic=name) for name in ("billing", "shop")})
    policy = policy_of(source("def receive(message: A, at: Received) -> Iterable[Send]: return []"))
    reception = Reception(settings, policy, "an-id", 4)
    body, names = b'{"type": "a.v1", "data": {"what": "x"}}', ("billing", "shop", "renamed")
    raws = [Raw("inbox", 0, 0, 0, None, body, {"samefold-hook": name, "webhook-id": "1"}) for name in names]
    assert [reception.handled(raw).result for raw in raws] == ["received", "other-type", "other-source"]
