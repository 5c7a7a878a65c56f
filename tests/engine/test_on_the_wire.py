"""Every process over TLS and SCRAM, each with the least rights: what works, and what is refused in which words."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
from confluent_kafka import KafkaError
from confluent_kafka.admin import AclOperation, ResourceType
from pydantic import SecretStr

from api.requests import path_of
from infra.database.connect import DatabaseRefused, connect
from infra.errors import SamefoldError
from infra.log import clients, names, topics
from infra.log.clients import KafkaRefused, ProducerRefused
from infra.settings import Settings
from infra.testing.fixtures import Samefold
from tests.engine.api import agent, ready, serving
from tests.engine.secure import HOST, PASSWORD, House, Secure
from tests.engine.spine import ended_with, handler, open_account, send, until

pytestmark = [pytest.mark.integration, pytest.mark.xdist_group("secure"), pytest.mark.timeout(120)]


def test_a_command_goes_all_the_way_round_over_tls(house: House) -> None:
    with ExitStack() as running:
        running.enter_context(agent(house.of("agent")))
        running.enter_context(handler(house.of("handler")))
        api = running.enter_context(serving(house.of("api")))
        ready(api)
        opened = api.client.post(
            path_of("accounts", "ada", "open-account"), json={"overdraft_limit": 0, "on": "2026-01-02"}
        )
        assert opened.status_code == 200, opened.text
        read = api.client.get(path_of("views", "balances", "ada"))
        assert read.status_code == 200, read.text


def test_an_agent_may_not_write_events(house: House) -> None:
    refused: list[KafkaError] = []
    producer = clients.producer(house.of("agent"))
    producer.produce(house.plain.events_topic, b"forged", on_delivery=lambda error, _: refused.append(error))
    producer.flush(10)
    assert [error.code() for error in refused] == [KafkaError.CLUSTER_AUTHORIZATION_FAILED]
    assert not any(topics.describe(house.plain, house.plain.events_topic).end.values())


# ── Kafka refuses, or is refused ──

KAFKA: dict[str, tuple[Callable[[Secure], dict[str, Any]], str]] = {
    "wrong CA": (lambda s: {"kafka_ssl_ca_location": s.wrong_ca}, "unable to get local issuer certificate"),
    "wrong host": (lambda s: {"kafka_bootstrap": s.tls.replace(HOST, "localhost")}, "Hostname mismatch"),
    "expired": (lambda s: {"kafka_bootstrap": s.expired}, "certificate has expired"),
    "wrong password": (lambda _: {"kafka_sasl_password": SecretStr("wr0ng")}, "invalid credentials"),
    "unknown user": (lambda _: {"kafka_sasl_username": "mallory"}, "refuses user 'mallory'"),
    "no TLS": (lambda _: {"kafka_security_protocol": "SASL_PLAINTEXT"}, "expects TLS"),
    "no CA file": (lambda s: {"kafka_ssl_ca_location": s.certificates / "none.pem"}, "ssl.ca.location"),
}


@pytest.mark.parametrize("case", [pytest.param(case, id=case.replace(" ", "-")) for case in KAFKA])
@pytest.mark.slow_but("wrong-host", "wrong-password")
def test_what_kafka_and_a_client_refuse_has_a_name(house: House, samefold: Samefold, case: str) -> None:
    change, words = KAFKA[case]
    refused = samefold("topics", settings=house.of("operator").model_copy(update=change(house.secure)))
    assert refused.returncode == 1
    said = " ".join(refused.stderr.split())
    assert words in said, said
    assert "SAMEFOLD_KAFKA_" in said
    assert "Traceback" not in said
    for secret in (PASSWORD, "wr0ng"):
        assert secret not in said


def test_a_topic_that_is_missing_is_refused_by_name_where_it_may_not_be_created(house: House) -> None:
    with pytest.raises(topics.TopicMissing) as refused:
        topics.ensure(house.of("handler", commands_topic=f"{house.plain.commands_topic}-missing"))
    assert f"'{house.plain.commands_topic}-missing'" in refused.value.message
    assert "samefold topics --create" in refused.value.hint
    assert "samefold topics --acls" in refused.value.hint


# ── PostgreSQL refuses, or is refused ──

DATABASE: dict[str, tuple[Callable[[Secure, str], str], str]] = {
    "wrong CA": (lambda s, url: url.replace(str(s.ca), str(s.wrong_ca)), "unable to get local issuer certificate"),
    "wrong host": (lambda _, url: url.replace(HOST, "localhost"), "Hostname mismatch"),
    "wrong password": (lambda _, url: url.replace("app-secret", "wr0ng"), "password authentication failed"),
    "unknown user": (lambda _, url: url.replace("app:", "mallory:"), "'mallory'"),
    "no TLS": (lambda _, url: url.replace("verify-full", "disable"), "no encryption"),
    "no CA file": (lambda s, url: url.replace(str(s.ca), "/none.pem"), "/none.pem"),
}


@pytest.mark.parametrize("case", [pytest.param(case, id=case.replace(" ", "-")) for case in DATABASE])
def test_what_postgresql_and_a_client_refuse_has_a_name(secure: Secure, case: str) -> None:
    change, words = DATABASE[case]
    settings = Settings(database_url=SecretStr(change(secure, secure.database())))
    with pytest.raises(DatabaseRefused) as refused:
        connect(settings, "test")
    said = str(refused.value)
    assert words in said.replace('"', "'"), said
    for secret in ("app-secret", "wr0ng"):
        assert secret not in said


def test_an_expired_certificate_of_postgresql_is_refused_and_a_renewed_one_needs_no_restart(secure: Secure) -> None:
    settings = Settings(database_url=SecretStr(secure.database()))

    def is_refused() -> str:
        try:
            connect(settings, "test").close()
        except DatabaseRefused as refused:
            return str(refused)
        return ""

    try:
        secure.authority.write(secure.certificates, "postgres", expired=True)
        secure.execute("select pg_reload_conf()")
        until(lambda: "certificate has expired" in is_refused(), "the expired certificate is refused")
    finally:
        secure.authority.write(secure.certificates, "postgres")
        secure.execute("select pg_reload_conf()")
    until(lambda: is_refused() == "", "the renewed one is accepted")


# ── a missing right ──

Right = tuple[str, ResourceType, Callable[[Settings], str], AclOperation]
COMMANDS, EVENTS = (lambda s: s.commands_topic), (lambda s: s.events_topic)
TOPIC, GROUP, TRANSACTIONS = ResourceType.TOPIC, ResourceType.GROUP, ResourceType.TRANSACTIONAL_ID

MISSING: dict[str, Right] = {
    "handler reads commands": ("handler", TOPIC, COMMANDS, AclOperation.READ),
    "handler writes events": ("handler", TOPIC, EVENTS, AclOperation.WRITE),
    "handler reads events": ("handler", TOPIC, EVENTS, AclOperation.READ),
    "handler joins its group": ("handler", GROUP, lambda s: names.handlers(s.group_prefix) + ".", AclOperation.READ),
    "handler sees topics' settings": ("handler", TOPIC, EVENTS, AclOperation.DESCRIBE_CONFIGS),
    "handler has a coordinator": ("handler", GROUP, lambda s: names.readers(s.group_prefix), AclOperation.DESCRIBE),
    "agent reads events": ("agent", TOPIC, EVENTS, AclOperation.READ),
    "agent joins its group": ("agent", GROUP, lambda s: names.agents(s.group_prefix, "core"), AclOperation.READ),
    "agent sees commands": ("agent", TOPIC, COMMANDS, AclOperation.DESCRIBE),
}


@pytest.mark.parametrize("case", [pytest.param(case, id=case.replace(" ", "-")) for case in MISSING])
@pytest.mark.slow_but("handler-writes-events", "agent-joins-its-group")
def test_a_process_that_lacks_a_right_ends_and_says_which(house: House, case: str) -> None:
    who, resource, name_of, operation = MISSING[case]
    name = name_of(house.plain)
    house.revoke(who, resource, name, operation)
    send(house.of("send"), open_account("ada"))
    with ExitStack() as running:
        if who == "handler":
            running.enter_context(agent(house.of("agent")))
        error = _ended(house, who)
    assert isinstance(error, KafkaRefused | ProducerRefused | topics.TopicMissing), error
    assert f"'{house.name}-{who}'" in error.message, error.message
    if not isinstance(error, ProducerRefused):  # without any right to write, an idempotent producer gets no id
        assert name.removesuffix(".").removesuffix("-") in error.message, error.message
    assert "`samefold topics --acls`" in error.hint


def _ended(house: House, who: str) -> BaseException:
    settings = house.of(who)
    with ExitStack() as running:
        if who == "handler":
            return ended_with(running.enter_context(handler(settings)), SamefoldError)
        with pytest.raises(SamefoldError) as ended, agent(settings) as started:
            until(lambda: started.error is not None, "the agent ends")
        return ended.value
