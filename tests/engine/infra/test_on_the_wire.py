"""make test + test-all + prove: TLS takes another Kafka and a PostgreSQL that npm has to fetch.

Every process over TLS and SCRAM, each with the least rights: what works, and what is refused in which words.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from confluent_kafka import KafkaError, KafkaException, Producer
from confluent_kafka.admin import AclBinding, AclOperation, ResourceType
from cryptography import x509
from psycopg import sql
from pydantic import SecretStr

from domain.engine.personal.keys import Keys
from domain.engine.personal.masters import new_line
from infra.database.connect import DatabaseRefused, connect
from infra.errors import SamefoldError
from infra.log import clients, names, topics
from infra.log.acls import acls
from infra.log.clients import KafkaRefused, KafkaUnavailable, ProducerRefused
from infra.settings import Settings
from infra.tls import expiries, unprotected
from policies.engine.policy import agent_of
from projections.engine.views.core_views import all_views
from tests.engine.api.api import agent, serving
from tests.engine.api.front import free_port, is_ready
from tests.engine.api.test_hooks import MODULES as MODULES_WITH_HOOKS
from tests.engine.api.test_hooks import post, received, signed, with_hooks, with_sources
from tests.engine.infra.role_worlds import RoleWorld
from tests.engine.infra.secure import PASSWORD, Authority, House, Secure, bindings
from tests.engine.policies.test_webhooks import Receiver, put, receiver, with_endpoints  # noqa: F401  # a fixture
from tests.engine.spawned import spawned
from tests.engine.spine import commits, deposit, ended_with, handler, open_account, openings, send, set_up
from tools.dev.kafka import HOST
from tools.testing.fixtures import ROOT, Samefold
from tools.testing.waiting import DEADLINE_S, until

MODULES = {
    "handler": ("commands.handler", "--name", "h1"),
    "policies": ("policies.engine.process", "--name", "p1"),
    "publisher": ("policies.engine.publisher", "--name", "u1"),
    "api": ("api", "--name", "i1", "--port", "0"),
}

pytestmark = [pytest.mark.integration, pytest.mark.xdist_group("secure")]


@pytest.fixture(scope="module")
def visitor(secure: Secure, tmp_path_factory: pytest.TempPathFactory) -> House:
    """A house without topics, for what does not get that far."""
    house = House(secure, tmp_path_factory.mktemp("visitor"))
    house.grant()
    return house


@pytest.mark.slow
def test_an_agent_may_not_write_events(house: House) -> None:
    settings = house.of("agent")
    for idempotent in (True, False):
        forger = Producer(clients._common(settings) | {"enable.idempotence": idempotent, "log_level": 0})
        refused: list[KafkaError] = []
        forger.produce(settings.events_topic, b"forged", on_delivery=lambda error, _: refused.append(error))  # noqa: B023
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


def test_an_operator_may_read_what_sources_read_and_nobody_else_may() -> None:
    """`policies reposition` and `outbox retry` need it."""
    found = [*acls(Settings(), {"core"}, {"policy_a"}, ["billing"], public=True, personal=True)]
    read = {one.process for one in found if one.name == "billing" and "Read" in one.operations}
    assert read == {"policies", "operator"}


def test_no_right_reaches_further_than_its_process() -> None:
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


@pytest.mark.slow
@pytest.mark.parametrize("case", KAFKA)
def test_what_kafka_and_a_client_refuse_has_a_name(
    visitor: House, samefold: Samefold, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    change, words = KAFKA[case]
    monkeypatch.setattr(topics, "TRY_S", 0.5)  # after which it looks why nobody answers
    monkeypatch.setattr(topics, "TIMEOUT_S", 2.0 if words == "kafka-unavailable" else DEADLINE_S)
    refused = samefold("topics", settings=visitor.of("operator").model_copy(update=change(visitor.secure)))
    assert refused.returncode == 1
    said = " ".join(refused.stderr.split())
    assert words in said, said
    assert "SAMEFOLD_KAFKA_" in said
    assert "Traceback" not in said
    for secret in (PASSWORD, "wr0ng"):
        assert secret not in said


@pytest.mark.slow
def test_a_topic_that_is_missing_is_refused_by_name_where_it_may_not_be_created(visitor: House) -> None:
    with pytest.raises(topics.TopicMissing) as refused:
        topics.ensure(visitor.of("handler"))
    assert f"'{visitor.plain.commands_topic}'" in refused.value.message
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


def refusal(url: str) -> str:
    """What PostgreSQL's refusal says; "" if there is none."""
    try:
        connect(Settings(database_url=SecretStr(url)), "test").close()
    except DatabaseRefused as refused:
        return str(refused)
    return ""


@pytest.mark.slow
@pytest.mark.parametrize("case", DATABASE)
def test_what_postgresql_and_a_client_refuse_has_a_name(secure: Secure, case: str) -> None:
    change, words = DATABASE[case]
    said = refusal(change(secure, secure.database()))
    assert words in said.replace('"', "'"), said
    for secret in ("app-secret", "wr0ng"):
        assert secret not in said


@pytest.mark.slow
def test_an_expired_certificate_of_postgresql_is_refused_and_a_renewed_one_needs_no_restart(secure: Secure) -> None:
    try:
        secure.authority.write(secure.certificates, "postgres", expired=True)
        secure.execute("select pg_reload_conf()")
        until(lambda: "certificate has expired" in refusal(secure.database()), "the expired certificate is refused")
    finally:
        secure.authority.write(secure.certificates, "postgres")
        secure.execute("select pg_reload_conf()")
    until(lambda: refusal(secure.database()) == "", "the renewed one is accepted")


CERTIFICATES = {"kafka", "kafka-authorities", "postgresql", "postgresql-authorities"}


@pytest.mark.slow
def test_when_certificates_expire_is_known_also_of_one_that_has_expired(secure: Secure) -> None:
    def written(name: str) -> float:
        certificate = x509.load_pem_x509_certificate((secure.certificates / name).read_bytes())
        return certificate.not_valid_after_utc.timestamp()

    settings = Settings(
        database_url=SecretStr(secure.database()),
        kafka_security_protocol="SSL",
        kafka_ssl_ca_location=secure.ca,
    )
    valid, expired = ((HOST, int(where.rpartition(":")[2])) for where in (secure.tls, secure.expired))
    assert expiries(settings, [valid]) == {
        "kafka": written("tls.crt"),
        "postgresql": written("postgres.crt"),
        **dict.fromkeys(("kafka-authorities", "postgresql-authorities"), written("ca.pem")),
    }
    assert expiries(settings, [valid, (HOST, 9), expired])["kafka"] == written("expired.crt")
    plain = Settings(database_url=SecretStr(secure.postgres.url()))
    assert expiries(plain, [valid]) == {}


@pytest.mark.slow
def test_a_password_is_set_and_stands_nowhere(visitor: House, samefold: Samefold) -> None:
    secret, secure = "correct 'horse\\ battery; stäple", visitor.secure
    place = RoleWorld(secure, visitor.plain, visitor.name)
    place.apply()
    role = place.role("api")
    talkative = f"{visitor.plain.database}&options=-c%20log_statement%3Dall%20-c%20log_min_messages%3Ddebug1"
    settings = visitor.plain.model_copy(update={"database_url": SecretStr(talkative)})
    done = samefold("db", "password", role, settings=settings, given=f"{secret}\n")
    assert (done.returncode, done.stdout) == (0, f"Set the password of {role}.\n"), done.stderr
    logged = secure.postgres.log.read_text()
    assert f'alter role "{role}" password' in logged
    assert "horse" not in logged
    assert refusal(secure.database(visitor.name, role, secret)) == ""
    assert "no password supplied" in refusal(secure.database(visitor.name, role, ""))
    refused = refusal(secure.database(visitor.name, role, secret + "x"))
    assert "password authentication failed" in refused
    assert "horse" not in refused


# ── a missing right ──

Right = tuple[str, ResourceType, Callable[[Settings], str], AclOperation]
COMMANDS, EVENTS, PUBLIC = (lambda s: s.commands_topic), (lambda s: s.events_topic), (lambda s: s.public_topic)
TOPIC, GROUP, TRANSACTIONS = ResourceType.TOPIC, ResourceType.GROUP, ResourceType.TRANSACTIONAL_ID
READ, WRITE, DESCRIBE = AclOperation.READ, AclOperation.WRITE, AclOperation.DESCRIBE

MISSING: dict[str, Right] = {
    "handler-reads-commands": ("handler", TOPIC, COMMANDS, READ),
    "handler-writes-events": ("handler", TOPIC, EVENTS, WRITE),
    "handler-reads-events": ("handler", TOPIC, EVENTS, READ),
    "handler-joins-its-group": ("handler", GROUP, lambda s: names.handlers(s.group_prefix) + ".", READ),
    "handler-sees-settings-of-topics": ("handler", TOPIC, EVENTS, AclOperation.DESCRIBE_CONFIGS),
    "handler-has-a-coordinator": ("handler", GROUP, lambda s: names.readers(s.group_prefix), DESCRIBE),
    "agent-reads-events": ("agent", TOPIC, EVENTS, READ),
    "agent-joins-its-group": ("agent", GROUP, lambda s: names.agents(s.group_prefix, "core"), READ),
    "agent-sees-commands": ("agent", TOPIC, COMMANDS, DESCRIBE),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", MISSING)
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


@pytest.mark.slow
def test_a_right_to_write_another_topic_is_none_for_events(house: House) -> None:
    """With any right to write, the producer gets its id, and each record is refused."""
    events = house.plain.events_topic
    [own] = [one for one in house.granted if one.name == events and one.operation is WRITE]
    house.revoke("handler", TOPIC, events, WRITE)
    house.settle(
        [AclBinding(TOPIC, "other", own.resource_pattern_type, own.principal, "*", WRITE, own.permission_type)]
    )
    error = _ended(house, "handler")
    assert isinstance(error, KafkaRefused), error
    assert f"Write of topic '{events}'" in error.message


@pytest.mark.slow
def test_keys_of_personal_values_need_the_rights_that_are_printed_with_them(house: House, tmp_path: Path) -> None:
    house.grant(personal=True)

    def is_made() -> bool:
        with suppress(KafkaUnavailable):  # a test before this one may have restarted the broker
            topics.ensure_keys(house.of("admin"))
            return True
        return False

    until(is_made, "the topic of keys is there")
    master = master_key(tmp_path)
    for who in ("api", "operator", "send"):
        settings = house.of(who, master_key_file=master)
        with connect(settings, "test") as db:
            keys = Keys(settings)
            keys.start(db)
            assert keys.key_for(db, f"by-{who}")
    with pytest.raises(KafkaRefused, match="keys"):
        topics.describe(house.of("handler"), house.plain.keys_topic)


@pytest.mark.slow
def test_webhooks_need_the_rights_that_are_printed_with_them(house: House, caplog: pytest.LogCaptureFixture) -> None:
    """The API writes the inbox, and policies read it."""
    inbox = house.plain.inbox_topic
    rights = acls(house.plain, {"core"}, {"any"}, [inbox], public=False, personal=False)
    house.settle(
        binding for one in rights if one.name == inbox for binding in bindings(one.command(house.plain, house.name))
    )
    set_up(house.plain)
    with handler(house.of("handler")):
        until(lambda: len(openings(house.plain)) == house.plain.partitions, "the handlers' group is there")
        topics.ensure_inbox(house.of("admin"))
        with with_sources(*MODULES_WITH_HOOKS), serving(with_hooks(house.of("api"))) as api:
            until(lambda: post(api, signed("m1")).status_code == 202, "the API takes a message")
            house.revoke("api", TOPIC, inbox, WRITE)
            until(lambda: post(api, signed("m2")).status_code == 503, "the API takes no message")
            until(lambda: f"Write of topic '{inbox}'" in caplog.text, "it is told why")
    assert "m1" in received(house.of("policies"))
    with pytest.raises(KafkaRefused, match=inbox):
        topics.describe(house.of("handler"), inbox)


def master_key(folder: Path) -> Path:
    (file := folder / "master").touch(0o600)
    file.write_text(new_line("first"))
    return file


LOGGED: dict[str, Right] = {
    "publisher-writes-its-topic": ("publisher", TOPIC, PUBLIC, WRITE),
    "publisher-has-transactions": ("publisher", TRANSACTIONS, lambda s: names.transactions(s.group_prefix), WRITE),
    "publisher-joins-its-group": ("publisher", GROUP, lambda s: names.publisher(s.group_prefix), READ),
    "policies-join-their-groups": (
        "policies",
        GROUP,
        lambda s: names.agents(s.group_prefix, agent_of("transfers")),
        READ,
    ),
    "policies-write-commands": ("policies", TOPIC, COMMANDS, WRITE),
    "api-writes-commands": ("api", TOPIC, COMMANDS, WRITE),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [one if n == 0 else pytest.param(one, marks=pytest.mark.prove(part="chaos")) for n, one in enumerate(LOGGED)],
)
def test_a_process_that_lacks_a_right_logs_which(house: House, case: str, tmp_path: Path) -> None:
    who, resource, name_of, operation = LOGGED[case]
    house.revoke(who, resource, name_of(house.plain), operation)
    set_up(house.plain)
    log = tmp_path / "log"
    with handler(house.of("handler")), process(house.of(who), log, *MODULES[who]):
        send(house.of("send"), open_account("ada"), deposit("ada", "d1", 1))
        said = ("`samefold topics --acls`", f"'{house.name}-{who}'")
        until(lambda: all(words in log.read_text() for words in said), f"it is told in {log}")


# ── every process, as a process ──


def process(
    settings: Settings, log: Path, module: str, *arguments: str
) -> AbstractContextManager[subprocess.Popen[bytes]]:
    """A process of the service, which writes its log there; killed at the end."""
    return spawned(settings, log, sys.executable, "-m", module, *arguments)


def rows(house: House, query: str) -> list[Any]:
    with connect(house.plain, "test") as db:
        return db.execute(query).fetchall()


ROLES_PAGE = (ROOT / "docs" / "database-roles.md").read_text()
ROLES = dict(re.findall(r"^\| `samefold run (\w+)` \| `samefold_(\w+)` \|", ROLES_PAGE, re.MULTILINE))


@pytest.mark.slow
def test_every_process_works_with_the_rights_that_are_printed(
    house: House,
    samefold: Samefold,
    receiver: Receiver,  # noqa: F811
    tmp_path: Path,
) -> None:
    """Each as its user of Kafka and its role in PostgreSQL: command, answer, row, policies, public events, webhooks, rebuild on
    Spark, parked, keys, archive, verify.
    """
    place = RoleWorld(house.secure, house.plain, house.name)
    place.apply()
    house.grant(personal=True)
    port, metrics = free_port(), free_port()
    more = {
        "master_key_file": master_key(tmp_path),
        "webhooks": with_endpoints(house.plain, billing=receiver.url("billing/ok")).webhooks,
        "api_port": port,
        "archive_restore_days": 0,
    }

    def of(user: str, role: str = "operator") -> Settings:
        house.secure.execute(f"""alter role "{place.role(role)}" password 'of {role}'""")
        return house.of(user, **more, database_url=house.secure.database(house.name, place.role(role), f"of {role}"))

    def run(*arguments: str, settings: Settings | None = None) -> None:
        needs_java = "spark" in arguments
        done = samefold(*arguments, settings=settings or of("operator"), process_s=DEADLINE_S if needs_java else None)
        assert done.returncode == 0, (arguments, done.stdout, done.stderr)
        assert PASSWORD not in done.stdout + done.stderr

    topics.ensure_keys(house.of("admin"))
    assert ROLES.keys() == {"handler", "agent", "policies", "publisher", "api", "exporter"}
    send(of("send", "api"), open_account("ada"), deposit("ada", "d1", 300))
    log = tmp_path / "log"
    with ExitStack() as running:
        started = []
        for name, role in ROLES.items():
            line = ["run", name, *(("--metrics-port", str(metrics)) if name == "exporter" else ())]
            program = [sys.executable, "-c", "from tools.cli import main; main()", *line]
            started.append(running.enter_context(spawned(of(name, role), log, *program)))
        client = running.enter_context(httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=DEADLINE_S))
        until(lambda: is_ready(str(client.base_url)), "the service is ready")

        def post(path: str, **body: Any) -> None:
            answer = client.post(path, json=body | {"on": "2026-11-21"}, headers={"Idempotency-Key": f'"{path}"'})
            assert answer.json()["outcome"] == "accepted", answer.text

        run("policies", "switch", "transfers")  # which it does not do by itself where there were commands before
        post("/accounts/bob/open-account", overdraft_limit=0)
        post("/transfers/t1/request-transfer", source="ada", target="bob", cents=100)
        until(lambda: client.get("/views/balances/bob").json()["row"]["cents"] == 100, "a policy moved the money")
        run("rebuild", "balances", "statement", "--engine", "spark", "--master", "local[2,4]")
        run("switch", "balances", str(all_views()["balances"].version))
        post("/accounts/bob/deposit", cents=1)
        assert client.get("/views/balances/bob").json()["row"]["cents"] == 101
        until(lambda: any(topics.describe(house.plain, house.plain.public_topic).end.values()), "it is published")
        put(of("operator"), "billing", "boxes/1", [1], "transfers")
        until(lambda: bool(receiver.got("billing")), "a webhook arrived")
        assert "samefold_lag_events" in client.get("/metrics").text
        told = httpx.get(f"http://127.0.0.1:{metrics}/metrics").text
        assert "samefold_lag_events" in told
        assert set(re.findall(r'certificate_expires_timestamp_seconds\{of="(.*?)"', told)) == CERTIFICATES
        park(of("operator"), "bob")
        run("parked", "replay", "statement", "accounts/bob")
        run("archive", settings=of("archive"))
        run("archive", "trim", "--yes", settings=of("archive"))
        assert any(topics.describe(house.plain, house.plain.events_topic).first.values()), "something was trimmed"
        for arguments in (
            ["archive", "check"],
            ["policies"],
            ["history", "accounts/ada"],
            ["outbox", "list"],
            ["keys", "rotate"],
            ["verify", "--engine", "local"],
            ["doctor"],
        ):
            run(*arguments)
        run("doctor", settings=of("operator", "handler"))
        for verb in ("upgrade", "check"):
            run("db", verb, settings=of("operator", "migrator"))
        for one in started:
            one.send_signal(signal.SIGTERM)
        codes = [one.wait(DEADLINE_S) for one in started]
    told = log.read_text()
    assert codes == [0] * len(started), told
    for words in (" ERROR ", "Traceback", "denied", "authorization", PASSWORD):
        assert words not in told, told


def park(settings: Settings, account: str) -> None:
    """The stream's last event is parked by hand: rows and record as an older code left them."""
    with connect(settings, "older code") as db:
        [(table,)] = db.execute("select table_name from live where view = 'statement'").fetchall()
        newest = "delete from {0} where account = %s and line = (select max(line) from {0} where account = %s) "
        [(line, partition)] = db.execute(
            sql.SQL(newest + "returning line, _partition").format(sql.Identifier(table)), (account, account)
        ).fetchall()
        db.execute(
            "insert into parked (table_name, stream, view, partition, since_offset, since_version, error) "
            "values (%s, %s, 'statement', %s, 1, %s, 'KeyError')",
            (table, f"accounts/{account}", partition, line),
        )


@pytest.mark.prove(part="chaos")
def test_an_agent_on_spark_reads_over_tls_and_shows_no_password(house: House, tmp_path: Path) -> None:
    set_up(house.plain)
    log, settings = tmp_path / "spark.log", house.of("agent")
    with (
        handler(house.of("handler")),
        process(settings, log, "spark_jobs.engine.agent", "--name", "s1", "--master", "local[2,4]"),
    ):
        send(house.of("send"), open_account("ada"), deposit("ada", "d1", 7))
        until(lambda: rows(house, "select cents from balances where account = 'ada'") == [(7,)], "Spark folds")
        lines = [" ".join(one.info["cmdline"] or []) for one in psutil.process_iter(["cmdline"])]
        assert any("spark_jobs.engine.agent" in line for line in lines)
        assert any("org.apache.spark" in line for line in lines)
    for shown in (*lines, log.read_text()):
        assert PASSWORD not in shown
        assert "app-secret" not in shown


@pytest.mark.slow
def test_a_process_with_a_wrong_password_says_so_and_does_not_flood(visitor: House, tmp_path: Path) -> None:
    settings = visitor.of("handler", kafka_sasl_password=SecretStr("wr0ng"))
    log = tmp_path / "handler.log"
    with process(settings, log, *MODULES["handler"]) as running:
        assert running.wait(DEADLINE_S) == 1
    [line] = [line for line in log.read_text().splitlines() if line.strip()]
    for words in ("kafka-refused", f"refuses user '{visitor.name}-handler'", "SAMEFOLD_KAFKA_SASL_PASSWORD"):
        assert words in line
    assert "wr0ng" not in line


# ── new certificates ──


@pytest.mark.slow
def test_certificates_of_a_new_authority_come_by_rolling_restarts(house: House) -> None:
    """First all clients trust both authorities, then the servers change, then the old one is not trusted any more."""
    secure, sent = house.secure, 0
    old, new = secure.authority, Authority("the next one")

    def life() -> None:
        nonlocal sent
        sent += 1
        send(house.of("send"), deposit("ada", f"d{sent}", 1))
        until(lambda: rows(house, "select cents from balances") == [(sent,)], f"{sent} deposits are folded")

    @contextmanager
    def restarted(*trusted: Authority) -> Iterator[None]:
        secure.ca.write_text("".join(authority.pem for authority in trusted))
        with handler(house.of("handler")), agent(house.of("agent")):
            life()
            yield

    set_up(house.plain)
    send(house.of("send"), open_account("ada"))
    with restarted(old, new):
        secure.certify(new)
        secure.kafka.stop()
        secure.kafka.start()
        secure.execute("select pg_reload_conf()")
        life()
    outdated = house.of("operator", kafka_ssl_ca_location=secure.write("old.pem", old.pem))
    with restarted(new), pytest.raises(KafkaRefused):
        topics.describe(outdated, outdated.events_topic)
    assert len(commits(house.plain)) == sent + 1
