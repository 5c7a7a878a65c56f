"""make test + test-all: one API for all, and a broker that is gone takes seconds.

Webhooks in: who is signed is in the inbox before it is answered, and nobody else is.
"""

from __future__ import annotations

import gc
import hashlib
import hmac
import json
import logging
import time
from base64 import b64encode
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import httpx
import pytest
from confluent_kafka import KafkaError, KafkaException
from pydantic import SecretStr
from standardwebhooks.webhooks import Webhook

from api import stores
from api.app import create_app
from infra.errors import BadSettings
from infra.log import clients, topics
from infra.log.partitioner import partition_of
from infra.log.records import Headers
from infra.log.source import read_held
from infra.settings import Settings, Source
from policies.engine import inbox
from policies.engine.policy import BadPolicy, policy_of
from policies.engine.source import Received, message
from tests.engine.api.api import Api, Producer, agent, problem, serving
from tests.engine.api.tokens import Keys, key_file, locked
from tests.engine.service.test_topics_settings import alter
from tests.engine.spine import handler, openings, set_up
from tools.cli import topics as cli
from tools.testing.fixtures import world_of
from tools.testing.waiting import DEADLINE_S, SLOWNESS, until

if TYPE_CHECKING:
    from tools.dev.stack import Stack


def whsec(word: str) -> str:
    return "whsec_" + b64encode((word * 24)[:32].encode()).decode()


OLD, NEW, OTHERS, AUTHORS = whsec("old"), whsec("new"), whsec("others"), "no-base64!"
BODY = '{"order": "o1", "note": "\N{BANK} canary"}'.encode()
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@message("order-shipped.v1")
class OrderShipped:
    order: str


def receive(message: OrderShipped, at: Received) -> Iterator[Any]:
    yield from ()


def verify(headers: Mapping[str, str], body: bytes, secrets: Sequence[str]) -> str | None:
    """As GitHub signs."""
    given = headers.get("x-hub-signature-256", "")
    for secret in secrets:
        wanted = f"sha256={hmac.digest(secret.encode(), body, hashlib.sha256).hex()}"
        if hmac.compare_digest(wanted, given):
            return headers["x-github-delivery"]
    return None


def source(name: str, **more: Any) -> ModuleType:
    """A module of `policies/`."""
    module = ModuleType(f"policies.from_{name}")
    vars(module).update({"VERSION": 1, "SOURCE": name, "receive": receive} | more)
    return module


@contextmanager
def with_sources(*modules: ModuleType) -> Iterator[None]:
    """This process runs code that has these policies alone."""
    found = {one.name: one for one in map(policy_of, modules)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inbox, "discover", lambda: found)
        yield


def broken(headers: Mapping[str, str], body: bytes, secrets: Sequence[str]) -> str | None:
    if not headers["x-github-delivery"]:
        raise ValueError(body, *secrets)
    return body  # type: ignore[return-value]  # that is what is wrong


MODULES = (
    *(source("shop"), source("others"), source("billing")),
    *(source("forge", verify=verify, TYPE="X-GitHub-Event"), source("broken", verify=broken)),
)


def with_hooks(world: Settings) -> Settings:
    secrets = {"shop": (OLD, NEW), "others": (OTHERS,), "forge": (AUTHORS,), "broken": (AUTHORS,), "unheard": (OLD,)}
    hooks = {name: Source(secrets=tuple(map(SecretStr, given))) for name, given in secrets.items()}
    return world.model_copy(update={"sources": hooks | {"billing": Source(topic="billing.public")}})


@pytest.fixture(scope="module")
def world(stack: Stack, migrated: str) -> Iterator[Settings]:
    with world_of(stack, migrated) as world:
        set_up(world)
        # else the API may ask before a group's coordinator is known: librdkafka ends the process then (its issue 5040)
        with handler(world):
            until(lambda: len(openings(world)) == world.partitions, "the handlers' group is there")
        yield with_hooks(world)


@pytest.fixture(scope="module")
def api(world: Settings) -> Iterator[Api]:
    with with_sources(*MODULES), serving(world) as api:
        until(lambda: post(api, signed("first")).status_code == 202, "the inbox is found")
        yield api


@pytest.fixture(autouse=True)
def _no_value_is_logged(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    caplog.set_level(logging.DEBUG)
    yield
    logged = caplog.text
    assert not [secret for secret in (OLD, NEW, OTHERS, AUTHORS, "canary") if secret in logged]


def signed(ident: str, body: bytes = BODY, *secrets: str, at: float = 0) -> dict[str, str]:
    """By a client's library; `at` is in seconds from now."""
    then = datetime.fromtimestamp(int(time.time() + at), UTC)
    signatures = [Webhook(secret).sign(ident, then, body.decode()) for secret in secrets or (NEW,)]
    sent, all_of_them = str(int(then.timestamp())), " ".join(signatures)
    return {"webhook-id": ident, "webhook-timestamp": sent, "webhook-signature": all_of_them}


def post(api: Api, headers: Mapping[str, str], body: bytes = BODY, name: str = "shop") -> httpx.Response:
    given = [(key.encode(), value.encode("latin-1")) for key, value in headers.items()]
    return api.client.post(f"/hooks/{name}", content=body, headers=given)


class Inbox(NamedTuple):
    """A record."""

    partition: int
    value: bytes | None
    headers: Mapping[str, bytes | None]


def received(world: Settings) -> dict[str, list[Inbox]]:
    """What is in the inbox, by key."""
    topic, found = topics.describe(world, world.inbox_topic), dict[str, list[Inbox]]()
    for partition, end in topic.end.items():
        headers: dict[int, Headers] = {}
        for batch, _ in read_held(world, topic.name, partition, 0, end, headers=headers):
            for one in batch:
                record = Inbox(partition, one.value, dict(headers.get(one.offset, ())))
                found.setdefault((one.key or b"").decode(), []).append(record)
    return found


def test_a_message_is_in_the_inbox_as_it_came_with_what_a_receiver_needs(api: Api, world: Settings) -> None:
    body = BOM_UTF8 + BODY
    sent = signed("in", body)
    others = {"traceparent": PARENT, "x-github-event": "no type of this webhook", "cookie": "canary"}
    unsigned = {"ce-specversion": "1.0", "ce-id": "4711", "ce-source": "/x", "ce-type": "other.v1"}
    answer = post(api, sent | others | unsigned | {"content-type": "application/json"}, body)
    assert (answer.status_code, answer.json()) == (202, {})
    [record] = received(world)["in"]
    headers = {
        "samefold-hook": b"shop",
        "webhook-id": b"in",
        "webhook-timestamp": sent["webhook-timestamp"].encode(),
        "content-type": b"application/json",
        "traceparent": PARENT.encode(),
    }
    assert record == Inbox(partition_of("in", world.partitions), body, headers)


@pytest.mark.parametrize("secrets", [(OLD,), (NEW,), (OTHERS, NEW)], ids=["old", "new", "one-of-two"])
def test_each_of_a_webhooks_secrets_will_do_while_they_are_rotated(
    api: Api, world: Settings, secrets: tuple[str, ...], request: pytest.FixtureRequest
) -> None:
    ident = request.node.name
    assert post(api, signed(ident, BODY, *secrets)).status_code == 202
    assert ident in received(world)


UNSIGNED = 401, "wrong-signature"
BAD = 400, "bad-header"
ZERO = f"v1,{b64encode(bytes(32)).decode()}"
WRONG: dict[str, tuple[tuple[int, str], Callable[[], dict[str, str]]]] = {
    "an old time": (UNSIGNED, lambda: signed("x", at=-310)),
    "a time in the future": (UNSIGNED, lambda: signed("x", at=310 * SLOWNESS)),
    "a time that was not signed": (
        UNSIGNED,
        lambda: signed("x", at=-310) | {"webhook-timestamp": str(int(time.time()))},
    ),
    "a wrong signature": (UNSIGNED, lambda: signed("x") | {"webhook-signature": ZERO}),
    "many wrong signatures": (UNSIGNED, lambda: signed("x") | {"webhook-signature": " ".join([ZERO] * 500)}),
    "a signature beyond 8 kB": (
        UNSIGNED,
        lambda: signed("x") | {"webhook-signature": "a " * 4_096 + signed("x")["webhook-signature"]},
    ),
    "no signature at all": (UNSIGNED, lambda: signed("x") | {"webhook-signature": "v1 , \xe9 v1,\xff"}),
    "another scheme": (UNSIGNED, lambda: {key: one.replace("v1,", "v1a,") for key, one in signed("x").items()}),
    "a body altered by one byte": (UNSIGNED, lambda: signed("x", BODY.replace(b"o1", b"o2"))),
    "another id": (UNSIGNED, lambda: signed("y") | {"webhook-id": "x"}),
    "another source's secret": (UNSIGNED, lambda: signed("x", BODY, OTHERS)),
    "no headers": (BAD, dict),
    "no signature": (BAD, lambda: signed("x") | {"webhook-signature": ""}),
    "no id": (BAD, lambda: signed("x") | {"webhook-id": ""}),
    "a time that is none": (BAD, lambda: signed("x") | {"webhook-timestamp": "-1e3"}),
    "a long id": (BAD, lambda: signed("x") | {"webhook-id": "x" * 256}),
    "an id that can't be printed": (BAD, lambda: signed("x\ty")),
    "a compressed body": ((415, "compressed"), lambda: signed("x") | {"content-encoding": "gzip"}),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_not_as_it_must_be_is_refused_and_not_in_the_inbox(api: Api, world: Settings, case: str) -> None:
    (status, code), headers = WRONG[case]
    before = topics.describe(world, world.inbox_topic).end
    answer = post(api, headers())
    problem(answer, status, code)
    assert ("WWW-Authenticate" in answer.headers) == (status == 401)
    assert "whsec" not in answer.text
    documented = api.get("/openapi.json").json()["paths"]["/hooks/shop"]["post"]["responses"]
    assert f"`{code}`" in documented[str(status)]["description"]
    assert topics.describe(world, world.inbox_topic).end == before


def test_the_largest_message_is_taken_and_a_larger_one_is_not(api: Api, world: Settings) -> None:
    body = b"x" * clients.MAX_COMMAND_BYTES
    assert post(api, signed("largest", body), body).status_code == 202
    [record] = received(world)["largest"]
    assert record.value == body
    for more in (b"x" * (len(body) + 1), b"x" * 900_000):
        told = problem(post(api, signed("larger", more), more), 413, "too-large")
        assert told["limit"] == len(body)
    assert "larger" not in received(world)


def test_a_message_that_is_sent_twice_at_once_is_answered_twice_and_there_twice(api: Api, world: Settings) -> None:
    headers = signed("twice")
    with ThreadPoolExecutor(2) as pool:
        answers = [*pool.map(lambda _: post(api, headers).status_code, range(2))]
    assert answers == [202, 202]
    assert [one.value for one in received(world)["twice"]] == [BODY, BODY]


def test_a_thousand_messages_in_a_row_are_all_there(api: Api, world: Settings) -> None:
    idents = {f"row-{number}" for number in range(1_000)}
    with ThreadPoolExecutor(8) as pool:
        answers = [*pool.map(lambda ident: post(api, signed(ident)).status_code, idents)]
    assert answers == [202] * 1_000
    assert {ident for ident in received(world) if ident.startswith("row-")} == idents


def of_github(ident: str, secret: str, body: bytes = BODY) -> dict[str, str]:
    signature = hmac.digest(secret.encode(), body, "sha256").hex()
    return {"X-Hub-Signature-256": f"sha256={signature}", "X-GitHub-Delivery": ident, "X-GitHub-Event": "push"}


def test_the_author_may_verify_another_senders_signatures(api: Api, world: Settings) -> None:
    assert post(api, of_github("g1", AUTHORS), name="forge").status_code == 202
    [record] = received(world)["g1"]
    assert record.value == BODY
    assert record.headers == {"samefold-hook": b"forge", "webhook-id": b"g1", "x-github-event": b"push"}
    for wrong in (of_github("g2", "other"), of_github("g2", AUTHORS, b"other"), signed("g2", BODY, NEW), {}):
        problem(post(api, wrong, name="forge"), 401, "wrong-signature")
    problem(post(api, of_github("g2" * 200, AUTHORS), name="forge"), 400, "bad-header")
    assert "g2" not in received(world)


@pytest.mark.parametrize("given", ["a KeyError", "no text"])
def test_an_author_s_verify_that_fails_is_told_without_any_value(
    api: Api, world: Settings, caplog: pytest.LogCaptureFixture, given: str
) -> None:
    headers = of_github("canary", AUTHORS) | ({} if given == "no text" else {"X-GitHub-Delivery": ""})
    told = problem(post(api, headers, name="broken"), 500, "defect")
    [line] = [one.getMessage() for one in caplog.records if "verify" in one.getMessage()]
    assert line == f"the `verify` of webhook 'broken' failed: {'TypeError' if given == 'no text' else 'ValueError'}"
    assert told["correlation_id"]
    assert "canary" not in received(world)


def test_there_are_no_other_webhooks(api: Api) -> None:
    for name in ("nobody", "billing", "unheard", "shop/", "shop/x", ""):
        problem(post(api, signed("x"), name=name), 404, "not-found")
    problem(api.get("/hooks/shop"), 405, "method-not-allowed")


def test_with_tokens_the_signature_is_the_right_and_opens_nothing_else(world: Settings, tmp_path: Path) -> None:
    keys = Keys("https://issuer.example", one="ES256")
    with with_sources(*MODULES), serving(locked(world, keys, key_file(tmp_path, keys))) as api:
        until(lambda: post(api, signed("locked")).status_code == 202, "the inbox is found")
        problem(post(api, signed("x", BODY, OTHERS)), 401, "wrong-signature")
        for path in ("/hooks/nobody", "/hooks/shop/", "/hooks/shop/x", "/hooks%2Fshop", "//hooks/shop", "/HOOKS/shop"):
            problem(api.client.post(path, content=BODY, headers=signed("x")), 401, "not-authenticated")
        for path in ("/accounts/shop/open-account", "/views/balances/shop", "/hooks/../views", "/metrics"):
            problem(api.client.post(path, content=BODY, headers=signed("x")), 401, "not-authenticated")
    assert "locked" in received(world)


@pytest.mark.parametrize("error", [None, BufferError("full"), KafkaException(KafkaError(KafkaError._FATAL))])
def test_nothing_is_acknowledged_that_kafka_has_not(
    world: Settings, monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    with with_sources(*MODULES), serving(world.model_copy(update={"api_wait_s": 0.2})) as api:
        until(lambda: api.services.stores._inbox is not None, "the inbox is found")
        with monkeypatch.context() as patch:
            patch.setattr(api.services.appender._producer, "now", Producer(error))
            answer = post(api, signed("unheard"))
        problem(answer, 503, "not-received")
        assert answer.headers["Retry-After"] == "1"
    assert "unheard" not in received(world)


def test_an_inbox_that_loses_messages_takes_none_and_commands_go_on(
    world: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "COMPARE_S", 0.2)
    world = world.model_copy(update={"inbox_topic": f"unfit-{world.inbox_topic}"})
    with with_sources(*MODULES), agent(world):
        topics.ensure_inbox(world)
        alter(world, world.inbox_topic, cleanup_policy="compact")
        with handler(world), serving(world) as api:
            until(lambda: post(api, signed("lost")).json().get("code") == "topic-unfit", "it is told")
            until(lambda: api.open("a").status_code == 200, "commands go on")
            until(lambda: api.client.get("/health/ready").status_code == 200, "it is ready")
            alter(world, world.inbox_topic, cleanup_policy="delete")
            until(lambda: post(api, signed("kept")).status_code == 202, "it is corrected")
    assert received(world).keys() == {"kept"}


@pytest.mark.slow
def test_while_kafka_is_away_nothing_is_taken_and_afterwards_it_is(world: Settings, stack: Stack) -> None:
    with with_sources(*MODULES), serving(world) as api, ExitStack() as afterwards:
        afterwards.callback(stack.up)
        until(lambda: post(api, signed("before")).status_code == 202, "the inbox is found")
        server = stack.kafka.process()
        assert server is not None
        gc.collect()  # librdkafka ends this process if one of its threads frees its own client, as garbage of a test before
        server.kill()
        server.wait(DEADLINE_S)
        until(lambda: post(api, signed("away")).json().get("code") == "kafka-unavailable", "it is told at once")
        refused = post(api, signed("refused"))
        problem(refused, 503, "kafka-unavailable")
        assert refused.headers["Retry-After"] == "1"
        stack.up()
        until(lambda: post(api, signed("after")).status_code == 202, "it takes messages again")
    found = received(world)
    assert {"before", "after"} <= found.keys()
    assert "refused" not in found


def test_a_secret_that_signs_nothing_is_refused_at_the_start(world: Settings) -> None:
    other = world.model_copy(update={"sources": {"shop": Source(secrets=(SecretStr(AUTHORS),))}})
    with with_sources(source("shop")), pytest.raises(BadSettings, match="SAMEFOLD_SOURCES, shop, secrets: ") as refused:
        create_app(other)
    assert AUTHORS not in str(refused.value)
    with with_sources(source("shop", verify=verify)):
        create_app(other)


def test_two_receivers_of_a_webhook_must_verify_alike(world: Settings) -> None:
    one, two = source("shop", verify=verify), source("shop")
    two.__name__ = "policies.from_shop_too"
    with with_sources(one, two), pytest.raises(BadPolicy, match="'shop'"):
        create_app(world)
    vars(two)["verify"] = verify
    with with_sources(one, two):
        assert "/hooks/shop" in create_app(world).openapi()["paths"]


def test_the_rights_for_the_inbox_are_printed_where_a_source_may_be_a_webhook(
    world: Settings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in world.environment().items():
        monkeypatch.setenv(name, value)

    def rights(*modules: ModuleType) -> set[tuple[str, str, str]]:
        found = {one.name: one for one in map(policy_of, modules)}
        monkeypatch.setattr(cli, "discover", lambda: found)
        cli.topics(acls=True, as_json=True)
        printed = json.loads(capsys.readouterr().out)
        return {(one["process"], one["name"], right) for one in printed for right in one["operations"]}

    inbox = world.inbox_topic
    of_inbox = {("api", inbox, "Write"), ("policies", inbox, "Read"), ("admin", inbox, "Create")}
    for name in ("shop", "unknown"):
        assert of_inbox <= rights(source(name))
    billing = rights(source("billing"))
    assert ("policies", "billing.public", "Read") in billing
    assert not {one for one in billing if one[1] == inbox or one[:2] == ("admin", "billing.public")}
