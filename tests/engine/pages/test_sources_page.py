"""make test: files and functions. What `docs/sources.md` shows is a source, its tests pass, and its webhook is well signed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from datetime import date
from types import ModuleType

import pytest
from pydantic import TypeAdapter
from standardwebhooks.webhooks import Webhook

from infra.settings import Settings, Source
from policies import public
from policies.engine.policy import BadPolicy, policy_of
from policies.engine.source import source_of
from tests.engine.pages.pages import blocks, files
from tools.testing.fixtures import ROOT

PAGE = (ROOT / "docs" / "sources.md").read_text()
SHOWN = dict(files(PAGE))
HEAD = """
import hashlib, hmac
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from domain.language import Text
from policies.engine import Received, Send, message
"""


@pytest.fixture
def billing(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The page's modules, imported."""
    for name in ("domain.orders", "policies.from_billing"):
        monkeypatch.setitem(sys.modules, name, made(name, SHOWN[f"{name.replace('.', '/')}.py"]))
    return sys.modules["policies.from_billing"]


def made(name: str, text: str) -> ModuleType:
    module = ModuleType(name)
    exec(compile(text, name, "exec", dont_inherit=True), vars(module))
    return module


def fragment(contains: str) -> ModuleType:
    """A block of the page that is no whole file."""
    [text] = [text for language, text in blocks(PAGE) if language == "python" and contains in text]
    return made("policies.from_elsewhere", HEAD + text)


def test_the_page_shows_a_source(billing: ModuleType) -> None:
    policy = policy_of(billing)
    assert policy.source is not None
    assert (policy.name, policy.version, policy.source.name) == ("from_billing", 1, "billing")
    assert {*policy.source.types} == {"invoice-paid.v1", "invoice-withdrawn.v1"}


def test_the_tests_on_the_page_pass(billing: ModuleType) -> None:
    module = vars(made("test_from_billing", SHOWN["tests/test_from_billing.py"]))
    tests: list[Callable[[], None]] = [test for name, test in module.items() if name.startswith("test_")]
    assert len(tests) == 2
    for test in tests:
        test()


@pytest.mark.usefixtures("billing")
def test_each_of_the_two_services_takes_what_the_other_publishes() -> None:
    [text] = [text for _, text in blocks(PAGE) if text.startswith("# bank: policies/from_shop.py\n")]
    bank, shop = made("policies.from_shop", text), made("policies.from_bank", SHOWN["policies/from_bank.py"])
    shops = made("policies.public_of_shop", SHOWN["policies/public.py"])
    moved = public.Moved(account="order-4712", cents=1999, on=date(2026, 12, 1))
    for receiver, publisher, fact in ((bank, shops, shops.Paid(order="4712", cents=1999)), (shop, public, moved)):
        [(kind, adapter)] = source_of(receiver, BadPolicy).types.items()
        assert kind is not None
        assert publisher.TYPES[kind] is type(fact)
        assert adapter.validate_json(TypeAdapter(type(fact)).dump_json(fact))


def test_a_topic_without_types_has_one_class_and_another_format_a_decode() -> None:
    stock, module = fragment("class Stock"), fragment("def decode")
    source = source_of(stock, BadPolicy)
    assert {*source.types} == {None}
    assert source.types[None].validate_json(json.dumps(module.decode(b"bolt;7"))) == stock.Stock(sku="bolt", left=7)


def test_the_example_of_another_scheme_knows_githubs_signature() -> None:
    """Secret, body and signature are those of GitHub's own documentation."""
    module = fragment("def verify")
    secret, body = "It's a Secret to Everybody", b"Hello, World!"
    headers = {"x-hub-signature-256": "sha256=757107ea0eb2509fc211221cce984b8a37570b6d7586c22c46f4379c8b043e17"}
    assert (ident := module.verify(headers, body, ["another", secret]))
    assert ident == module.verify(headers, body, [secret]), "sent again, it has the same id"
    assert module.verify(headers, body + b"!", [secret]) is None
    assert module.verify(headers, body, ["another"]) is None
    assert module.verify({"x-hub-signature-256": "é"}, body, [secret]) is None
    assert module.verify({}, body, [secret]) is None


def test_what_is_typed_sends_a_webhook_with_a_signature_that_is_right() -> None:
    [typed] = [text for language, text in blocks(PAGE) if language == "sh" and "curl" in text]
    told = subprocess.run(
        ["sh", "-ec", "curl() { printf '%s\\n' \"$@\"; }\n" + typed], capture_output=True, text=True, check=True
    )
    *_, body = told.stdout.splitlines()
    headers = dict(re.findall(r"^(webhook-\w+): (.*)$", told.stdout, re.MULTILINE))
    [secret] = re.findall(r"^secret=(.*)$", typed, re.MULTILINE)
    assert Webhook(secret).verify(body, headers)["type"] == "invoice-paid.v1"
    assert "http://127.0.0.1:8000/hooks/billing" in told.stdout.splitlines()


def test_each_setting_on_the_page_is_one_and_each_field_has_a_row() -> None:
    shown = re.findall(r"^SAMEFOLD_SOURCES=(.*)$", PAGE, re.MULTILINE)
    assert len(shown) == 4
    for value in shown:
        assert "billing" in Settings(sources=value).sources, value
    [table] = re.findall(r"^\| field \| what \|\n\|[-|]+\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    names = {name for line in table.splitlines() for name in re.findall(r"`(\w+)`", line.split("|")[1])}
    assert names == {*Source.model_fields}
