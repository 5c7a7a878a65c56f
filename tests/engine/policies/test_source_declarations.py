"""make test: modules in memory. A file of `policies/` with SOURCE is a source, or is named with what to write."""

from __future__ import annotations

from types import ModuleType

import pytest
from pydantic import TypeAdapter, ValidationError

from domain.language import Cents
from policies.engine import Received, message
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
