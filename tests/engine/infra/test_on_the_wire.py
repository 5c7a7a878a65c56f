"""Every process over TLS and SCRAM, each with the least rights: what works, and what is refused in which words."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import psutil
import pytest
from confluent_kafka import KafkaError, KafkaException, Producer
from confluent_kafka.admin import AclBinding, AclOperation, ResourceType
from pydantic import SecretStr

from api.requests import path_of
from infra.database.connect import DatabaseRefused, connect
from infra.dev.kafka import HOST
from infra.errors import SamefoldError
from infra.log import names, topics
from infra.log.acls import acls
from infra.log.clients import KafkaRefused, ProducerRefused
from infra.personal.keys import Keys
from infra.personal.masters import new_line
from infra.settings import Settings
from infra.testing.fixtures import ROOT, Samefold
from infra.tls import unprotected
from policies.engine.policy import agent_of
from tests.engine.api.api import agent, ready, serving
from tests.engine.infra.certificates import Authority
from tests.engine.infra.secure import PASSWORD, House, Secure, bindings, process
from tests.engine.spine import command, commits, deposit, ended_with, handler, open_account, send, set_up, until

MODULES = {
    "handler": ("commands.handler", "--name", "h1"),
    "agent": ("projections.engine.live.agent", "--agent", "core", "--name", "a1"),
    "policies": ("policies.engine.process", "--name", "p1"),
    "publisher": ("policies.engine.publisher", "--name", "u1"),
    "api": ("api", "--name", "i1", "--port", "0"),
}

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


@pytest.mark.parametrize("idempotent", [True, False])
def test_an_agent_may_not_write_events(house: House, idempotent: bool) -> None:
    settings = house.of("agent")
    forger = Producer(
        {
            "bootstrap.servers": settings.kafka,
            "security.protocol": "SASL_SSL",
            "sasl.mechanism": "SCRAM-SHA-512",
            "sasl.username": settings.kafka_sasl_username,
            "sasl.password": PASSWORD,
            "ssl.ca.location": str(house.secure.ca),
            "enable.idempotence": idempotent,
            "log_level": 0,
        }
    )
    refused: list[KafkaError] = []
    forger.produce(settings.events_topic, b"forged", on_delivery=lambda error, _: refused.append(error))
    with pytest.raises(KafkaException, match="authorization failed") if idempotent else nullcontext():
        forger.flush(10)
        assert [error.code() for error in refused] == [KafkaError.TOPIC_AUTHORIZATION_FAILED]
    assert not any(topics.describe(house.plain, house.plain.events_topic).end.values())


# ── the page ──

PAGE = (ROOT / "docs" / "on-the-wire.md").read_text()


def test_the_pages_settings_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    block = PAGE.partition("```bash\n")[2].partition("```")[0]
    for line in block.splitlines():
        monkeypatch.setenv(*line.split("=", 1))
    settings = Settings()
    assert settings.kafka_security_protocol == "SASL_SSL"
    assert [*unprotected(settings)] == []


def test_the_page_shows_what_is_printed(samefold: Samefold) -> None:
    block = PAGE.partition("```console\n")[2].partition("```")[0]
    typed, *shown = block.splitlines()
    given = Settings(kafka_bootstrap="kafka.example:9093")
    printed = samefold(*typed.split()[2:], settings=given).stdout.splitlines()
    assert [line for line in shown if line.startswith("#")] == [line for line in printed if line.startswith("#")]
    assert shown[1].replace("…", "kafka.example:9093") == printed[1]
    as_data = json.loads(samefold(*typed.split()[2:], "--json", settings=given).stdout)
    assert len(as_data) == len([line for line in printed if line.startswith("kafka-acls")])
    assert {one["process"] for one in as_data} == {line.removeprefix("# ") for line in printed if line.startswith("#")}
    users = PAGE.partition("| user |")[2].partition("\n\n")[0]
    assert all(f"`{one['process']}`" in users for one in as_data)


def test_no_right_reaches_further_than_its_process() -> None:
    """Only the handler may write the log, only admin creates topics, only archive deletes, and no group is another's."""
    found = [*acls(Settings(), {"core"}, {"policy_a"}, public=True, personal=True)]
    by = {(one.name, operation, one.process) for one in found for operation in one.operations}
    assert {who for name, operation, who in by if (name, operation) == ("events", "Write")} == {"handler"}
    assert {who for name, operation, who in by if (name, operation) == ("public", "Write")} == {"publisher"}
    assert {who for name, operation, who in by if operation == "Delete"} == {"archive"}
    assert {who for name, operation, who in by if operation == "Create"} == {"admin"}
    joined = [(one.name, one.process) for one in found if one.resource == "group" and one.operations == ("Read",)]
    assert len({name for name, _ in joined}) == len(joined) == 4
    assert not any(one != other and one.startswith(other) for one, _ in joined for other, _ in joined)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, []),
        ({"kafka_bootstrap": "127.0.0.1:9092,localhost:9093,[::1]:9094"}, []),
        ({"kafka_bootstrap": "localhost:9092,kafka.example:9092"}, ["Kafka at localhost:9092,kafka.example:9092"]),
        ({"kafka_bootstrap": "kafka.example:9092", "kafka_security_protocol": "SSL"}, []),
        ({"database_url": "postgresql://a@/b?host=%2Frun"}, []),
        ({"database_url": "postgresql://a:s3cret@db/b"}, ["sslmode=prefer"]),
        ({"database_url": "postgresql://a:s3cret@db/b?sslmode=require"}, ["sslmode=require"]),
        ({"database_url": "postgresql://a:s3cret@db/b?sslmode=verify-full"}, []),
    ],
)
def test_connections_that_leave_the_machine_in_plain_text_are_named(settings: dict[str, Any], words: list[str]) -> None:
    found = [*unprotected(Settings(**settings))]
    assert len(found) == len(words)
    assert all(word in line and "s3cret" not in line for word, line in zip(words, found, strict=True))


# ── Kafka refuses, or is refused ──

KAFKA: dict[str, tuple[Callable[[Secure], dict[str, Any]], str]] = {
    "wrong-CA": (lambda s: {"kafka_ssl_ca_location": s.wrong_ca}, "unable to get local issuer certificate"),
    "wrong-host": (lambda s: {"kafka_bootstrap": s.tls.replace(HOST, "localhost")}, "Hostname mismatch"),
    "expired": (lambda s: {"kafka_bootstrap": s.expired}, "certificate has expired"),
    "wrong-password": (lambda _: {"kafka_sasl_password": SecretStr("wr0ng")}, "invalid credentials"),
    "unknown-user": (lambda _: {"kafka_sasl_username": "mallory"}, "refuses user 'mallory'"),
    "no-TLS": (lambda _: {"kafka_security_protocol": "SASL_PLAINTEXT"}, "expects TLS"),
    "broker-without-TLS": (lambda s: {"kafka_bootstrap": s.kafka.bootstrap}, "kafka-unavailable"),
    "no-CA-file": (lambda s: {"kafka_ssl_ca_location": s.certificates / "none.pem"}, "ssl.ca.location"),
}


@pytest.mark.parametrize("case", KAFKA)
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
    "wrong-CA": (lambda s, url: url.replace(str(s.ca), str(s.wrong_ca)), "unable to get local issuer certificate"),
    "wrong-host": (lambda _, url: url.replace(HOST, "localhost"), "Hostname mismatch"),
    "wrong-password": (lambda _, url: url.replace("app-secret", "wr0ng"), "password authentication failed"),
    "unknown-user": (lambda _, url: url.replace("app:", "mallory:"), "'mallory'"),
    "no-TLS": (lambda _, url: url.replace("verify-full", "disable"), "no encryption"),
    "no-CA-file": (lambda s, url: url.replace(str(s.ca), "/none.pem"), "/none.pem"),
}


@pytest.mark.parametrize("case", DATABASE)
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
    "handler-reads-commands": ("handler", TOPIC, COMMANDS, AclOperation.READ),
    "handler-writes-events": ("handler", TOPIC, EVENTS, AclOperation.WRITE),
    "handler-reads-events": ("handler", TOPIC, EVENTS, AclOperation.READ),
    "handler-joins-its-group": ("handler", GROUP, lambda s: names.handlers(s.group_prefix) + ".", AclOperation.READ),
    "handler-sees-settings-of-topics": ("handler", TOPIC, EVENTS, AclOperation.DESCRIBE_CONFIGS),
    "handler-has-a-coordinator": ("handler", GROUP, lambda s: names.readers(s.group_prefix), AclOperation.DESCRIBE),
    "agent-reads-events": ("agent", TOPIC, EVENTS, AclOperation.READ),
    "agent-joins-its-group": ("agent", GROUP, lambda s: names.agents(s.group_prefix, "core"), AclOperation.READ),
    "agent-sees-commands": ("agent", TOPIC, COMMANDS, AclOperation.DESCRIBE),
}


@pytest.mark.parametrize("case", MISSING)
@pytest.mark.slow_but("handler-writes-events", "agent-joins-its-group")
def test_a_process_that_lacks_a_right_ends_and_says_which(house: House, case: str) -> None:
    who, resource, name_of, operation = MISSING[case]
    name = name_of(house.plain)
    house.revoke(who, resource, name, operation)
    send(house.of("send"), open_account("ada"))
    error = _ended(house, who)
    assert isinstance(error, KafkaRefused | ProducerRefused | topics.TopicMissing), error
    assert f"'{house.name}-{who}'" in error.message, error.message
    if not isinstance(error, ProducerRefused):  # without any right to write, an idempotent producer gets no id
        assert name.removesuffix(".").removesuffix("-") in error.message, error.message
    assert "`samefold topics --acls`" in error.hint


def _ended(house: House, who: str) -> SamefoldError:
    settings = house.of(who)
    if who == "handler":
        set_up(house.plain)
        with handler(settings) as running:
            error = ended_with(running, SamefoldError)
        assert isinstance(error, SamefoldError)
        return error
    with pytest.raises(SamefoldError) as ended, agent(settings) as started:
        until(lambda: started.error is not None, "the agent ends")
    return ended.value


def test_a_right_to_write_another_topic_is_none_for_events(house: House) -> None:
    """With any right to write, the producer gets its id, and each record is refused."""
    [own] = [
        one for one in house.granted if one.name == house.plain.events_topic and one.operation is AclOperation.WRITE
    ]
    house.revoke("handler", TOPIC, own.name, AclOperation.WRITE)
    house.settle(
        [AclBinding(TOPIC, "other", own.resource_pattern_type, own.principal, "*", own.operation, own.permission_type)]
    )
    error = _ended(house, "handler")
    assert isinstance(error, KafkaRefused), error
    assert f"Write of topic '{own.name}'" in error.message


def test_keys_of_personal_values_need_the_rights_that_are_printed_with_them(house: House, tmp_path: Path) -> None:
    rights = acls(house.plain, {"core"}, set(), public=False, personal=True)
    house.settle(binding for one in rights for binding in bindings(one.command(house.plain, house.name)))
    topics.ensure_keys(house.of("admin"))
    (master := tmp_path / "master").write_text(new_line("first"))
    master.chmod(0o600)
    for who in ("api", "operator", "send"):
        settings = house.of(who, master_key_file=master)
        with connect(settings, "test") as db:
            keys = Keys(settings)
            keys.start(db)
            assert keys.key_for(db, f"by-{who}")
    with pytest.raises(KafkaRefused, match="keys"):
        topics.describe(house.of("handler"), house.plain.keys_topic)


PUBLIC = lambda s: s.public_topic  # noqa: E731
LOGGED: dict[str, Right] = {
    "publisher-writes-its-topic": ("publisher", TOPIC, PUBLIC, AclOperation.WRITE),
    "publisher-has-transactions": (
        "publisher",
        TRANSACTIONS,
        lambda s: names.transactions(s.group_prefix),
        AclOperation.WRITE,
    ),
    "publisher-joins-its-group": ("publisher", GROUP, lambda s: names.publisher(s.group_prefix), AclOperation.READ),
    "policies-join-their-groups": (
        "policies",
        GROUP,
        lambda s: names.agents(s.group_prefix, agent_of("transfers")),
        AclOperation.READ,
    ),
    "policies-write-commands": ("policies", TOPIC, COMMANDS, AclOperation.WRITE),
    "api-writes-commands": ("api", TOPIC, COMMANDS, AclOperation.WRITE),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", LOGGED)
def test_a_process_that_lacks_a_right_logs_which(house: House, case: str, tmp_path: Path) -> None:
    who, resource, name_of, operation = LOGGED[case]
    house.revoke(who, resource, name_of(house.plain), operation)
    set_up(house.plain)
    log = tmp_path / "log"
    with handler(house.of("handler")), process(house.of(who), log, *MODULES[who]):
        send(house.of("send"), open_account("ada"), deposit("ada", "d1", 1))
        until(
            lambda: "`samefold topics --acls`" in log.read_text() and f"'{house.name}-{who}'" in log.read_text(),
            log.read_text(),
        )


# ── every process, as a process ──


def balances(house: House) -> dict[str, int]:
    if _rows(house, "select to_regclass('balances')") == [(None,)]:  # the agent's first start makes it
        return {}
    return dict(_rows(house, "select account, cents from balances"))


def _rows(house: House, query: str) -> list[Any]:
    with connect(house.plain, "test") as db:
        return db.execute(query).fetchall()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_every_process_works_with_the_rights_that_are_printed(house: House, samefold: Samefold, tmp_path: Path) -> None:
    with ExitStack() as running:
        for who, started in MODULES.items():
            running.enter_context(process(house.of(who), tmp_path / f"{who}.log", *started))
        transfer: dict[str, Any] = {"source": "ada", "target": "bob", "cents": 40, "on": "2026-01-02"}
        send(house.of("send"), open_account("ada"), open_account("bob"), deposit("ada", "d1", 100))
        until(lambda: balances(house) == {"ada": 100, "bob": 0}, f"deposits are folded: {tmp_path}", 60)
        live = samefold("policies", "switch", "transfers", settings=house.of("operator"))
        assert live.returncode == 0, live.stderr
        send(house.of("send"), command("transfers/t1", "t1", "RequestTransfer", **transfer))
        until(lambda: balances(house) == {"ada": 60, "bob": 40}, f"the policy moves the money: {tmp_path}", 60)
        public = house.plain.public_topic
        until(lambda: any(topics.describe(house.plain, public).end.values()), f"it is published: {tmp_path}", 60)
        assert topics.describe(house.of("exporter"), house.plain.events_topic).id
        for arguments in (
            ["rebuild", "balances", "--engine", "local"],
            ["rebuild", "balances", "--engine", "spark", "--master", "local[2,4]"],
            ["verify", "--engine", "spark", "--master", "local[2,4]"],
            ["switch"],
            ["policies"],
            ["history", "accounts/ada"],
            ["doctor"],
        ):
            done = samefold(*arguments, settings=house.of("operator"), process_s=120)
            assert done.returncode == 0, (arguments, done.stdout, done.stderr)
            assert PASSWORD not in done.stdout + done.stderr
        for arguments in (["archive"], ["archive", "trim", "--yes"]):
            done = samefold(*arguments, settings=house.of("archive", archive_restore_days=0), process_s=60)
            assert done.returncode == 0, (arguments, done.stdout, done.stderr)
        assert any(topics.describe(house.plain, house.plain.events_topic).first.values()), "something was trimmed"
        for log in tmp_path.glob("*.log"):
            text = log.read_text()
            assert " ERROR " not in text, text
            assert "authorization" not in text, text
            assert PASSWORD not in text


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_an_agent_on_spark_reads_over_tls_and_shows_no_password(house: House, tmp_path: Path) -> None:
    set_up(house.plain)
    log, settings = tmp_path / "spark.log", house.of("agent")
    with (
        handler(house.of("handler")),
        process(settings, log, "spark_jobs.agent", "--name", "s1", "--master", "local[2,4]"),
    ):
        send(house.of("send"), open_account("ada"), deposit("ada", "d1", 7))
        until(lambda: _rows(house, "select cents from balances where account = 'ada'") == [(7,)], "Spark folds", 100)
        lines = [" ".join(one.info["cmdline"] or []) for one in psutil.process_iter(["cmdline"])]
        assert any("spark_jobs.agent" in line for line in lines)
        assert any("org.apache.spark" in line for line in lines)
        assert not any(PASSWORD in line or "app-secret" in line for line in lines)
    said = log.read_text()
    assert PASSWORD not in said
    assert "app-secret" not in said


@pytest.mark.slow
def test_a_process_with_a_wrong_password_says_so_and_does_not_flood(house: House, tmp_path: Path) -> None:
    set_up(house.plain)
    settings = house.of("handler", kafka_sasl_password=SecretStr("wr0ng"))
    log = tmp_path / "handler.log"
    with process(settings, log, "commands.handler", "--name", "h1") as running:
        assert running.wait(30) == 1
    [line] = [line for line in log.read_text().splitlines() if line.strip()]
    assert "kafka-refused" in line
    assert f"refuses user '{house.name}-handler'" in line
    assert "SAMEFOLD_KAFKA_SASL_PASSWORD" in line
    assert "wr0ng" not in line


@pytest.mark.slow
def test_an_api_whose_password_for_postgresql_is_wrong_says_so(house: House) -> None:
    set_up(house.plain)
    wrong = house.of("api").database.replace("app-secret", "wr0ng")
    with serving(house.of("api", database_url=wrong)) as api:
        failures = api.services.stores.failures
        until(lambda: isinstance(failures.get("database"), DatabaseRefused), "the API finds out")
        assert "password authentication failed" in str(failures["database"])
        assert api.client.get("/health/ready").status_code == 503


# ── new certificates ──


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_certificates_of_a_new_authority_come_by_rolling_restarts(house: House, tmp_path: Path) -> None:
    """First all clients trust both authorities, then the servers change, then the old one is not trusted any more."""
    secure = house.secure
    new, trusted = Authority("the next one"), tmp_path / "trusted.pem"
    trusted.write_text(secure.authority.pem)

    def of(who: str) -> Settings:
        url = secure.database(house.name).replace(str(secure.ca), str(trusted))
        return house.of(who, kafka_ssl_ca_location=trusted, database_url=url)

    set_up(house.plain)
    sent = 0

    def life() -> None:
        nonlocal sent
        sent += 1
        send(of("send"), deposit("ada", f"d{sent}", 1))
        until(lambda: _rows(house, "select cents from balances") == [(sent,)], f"{sent} deposits are folded", 60)

    def start(who: str) -> ExitStack:
        running = ExitStack()
        running.enter_context(process(of(who), tmp_path / f"{who}.log", *MODULES[who]))
        return running

    def trust(authorities: str) -> None:
        trusted.write_text(authorities)
        for who, before in [*running.items()]:
            before.close()
            running[who] = start(who)
            life()

    def show_certificates_of(authority: Authority) -> None:
        for name in ("tls", "postgres"):
            authority.write(secure.certificates, name)
        secure.kafka.stop()
        secure.kafka.start()
        secure.execute("select pg_reload_conf()")

    running = {who: start(who) for who in ("handler", "agent")}
    try:
        send(of("send"), open_account("ada"))
        life()
        trust(secure.authority.pem + new.pem)
        show_certificates_of(new)
        life()
        trust(new.pem)
        outdated = of("operator").model_copy(update={"kafka_ssl_ca_location": secure.ca})
        with pytest.raises(KafkaRefused):
            topics.describe(outdated, outdated.events_topic)
    finally:
        for one in running.values():
            one.close()
        show_certificates_of(secure.authority)
    assert len(commits(house.plain)) == sent + 1
