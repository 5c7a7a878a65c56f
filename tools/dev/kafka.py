"""Kafka itself, from its own jars: one KRaft process that is broker and controller, on loopback only."""

import json
import re
import shutil
import signal
import socket
import tempfile
import uuid
from base64 import urlsafe_b64encode
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import psutil

from infra.processes.java import find_java
from tools.dev import process
from tools.dev.jars import FOLDER, KAFKA, classpath
from tools.dev.process import StartFailed

HOST = "127.0.0.1"
HEAP = "512m"
SERVER = "kafka.Kafka"
FORMATTER = "kafka.tools.StorageTool"
CLASSES = FOLDER / "classes.jsa"
_UNNAMED = "4.3.1"
"""What made the folders that do not say it."""

_LOGGING = """\
<Configuration status="error">
  <Appenders>
    <Console name="out"><PatternLayout pattern="[%d] %p %m (%c)%n"/></Console>
  </Appenders>
  <Loggers>
    <Root level="warn"><AppenderRef ref="out"/></Root>
    <Logger name="kafka.server.KafkaRaftServer" level="info"/>
    <Logger name="org.apache.kafka.storage" level="error"/>
  </Loggers>
</Configuration>
"""


class Front(NamedTuple):
    """A further listener: its own port, and the one that it advertises, a proxy's for one."""

    port: int
    advertised: int
    name: str = "FRONT"
    protocol: str = "PLAINTEXT"


class Kafka:
    """The broker of one data folder."""

    name = "Kafka"

    def __init__(
        self,
        folder: Path,
        jvm: Sequence[str] = (f"-XX:SharedArchiveFile={CLASSES}",),
        *,
        fronts: Sequence[Front] = (),
        more: Mapping[str, object] = MappingProxyType({}),
    ) -> None:
        """`folder` is this broker's own, absolute; made by `start`. A JVM does without an archive that does not fit it.

        `more` are further lines of its configuration.
        """
        self.folder = folder
        self.jvm = jvm
        self.fronts = fronts
        self.more = more
        self.log = folder / "broker.log"
        self.configuration = folder / "broker.properties"
        self._formatted = folder / "cluster-id"
        self._made_by = folder / "version"

    @property
    def bootstrap(self) -> str:
        """Where it listens, "" before the first start. Its ports stay the same, unless another process takes them."""
        port = self._ports()[0]
        return f"{HOST}:{port}" if port else ""

    def process(self) -> psutil.Process | None:
        return process.find(SERVER, self.configuration)

    def orphans(self) -> list[psutil.Process]:
        formatter = process.find(FORMATTER, self.configuration)
        return [formatter] if formatter else []

    def start(self) -> None:
        """Returns when it answers a client. Raises StartFailed, JavaMissing, JarsMissing."""
        process.start(self)

    def stop(self) -> None:
        process.stop(self, signal.SIGTERM)

    def launch(self, claim: int) -> None:
        broker, controller = self._ports()
        if not (broker and _is_free(broker) and _is_free(controller)):
            broker, controller = process.free_ports(2)
        self.configuration.write_text(_configuration(self.folder / "data", broker, controller, self.fronts, self.more))
        (self.folder / "log4j2.xml").write_text(_LOGGING)
        if not self._formatted.exists():
            self._format(claim)
        self._require_readable()
        command = self._java(*self.jvm, SERVER, str(self.configuration))
        process.start_detached(command, self.log, claim)

    def answers(self) -> bool:
        """Whether this cluster answers: another Kafka on this port has another cluster id."""
        from confluent_kafka import KafkaException
        from confluent_kafka.admin import AdminClient

        port = self._ports()[0]
        if not (port and self._formatted.exists()) or _is_free(port):
            return False
        try:
            # A broker that is only starting makes librdkafka complain on stderr; we ask again anyway.
            cluster = AdminClient({"bootstrap.servers": self.bootstrap, "log_level": 0}).list_topics(timeout=1)
        except KafkaException:
            return False
        return bool(cluster.brokers) and cluster.cluster_id == self._formatted.read_text()

    def _ports(self) -> tuple[int, int]:
        """Of clients and of the controller, out of the configuration; 0, 0 when there is none yet."""
        if not self.configuration.exists():
            return 0, 0
        found = re.search(
            r"^listeners=PLAINTEXT://[^,\n]*:(\d+),CONTROLLER://[^,\n]*:(\d+)",
            self.configuration.read_text(),
            re.MULTILINE,
        )
        return (int(found[1]), int(found[2])) if found else (0, 0)

    def _java(self, *arguments: str) -> list[str]:
        logging = f"-Dlog4j2.configurationFile={self.folder / 'log4j2.xml'}"
        # No com.sun.management property, whatever its value: one is enough for the JVM to open a port to all the world.
        jvm = [f"-Xmx{HEAP}", "-XX:+ExitOnOutOfMemoryError", "-Djava.awt.headless=true"]
        return [str(find_java().path), *jvm, logging, "-cp", classpath(), *arguments]

    def _format(self, claim: int) -> None:
        shutil.rmtree(self.folder / "data", ignore_errors=True)  # formatted to its end, or not at all
        cluster = urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        if cluster.startswith("-"):  # would be taken for an option
            cluster = "A" + cluster[1:]
        # Too short a run for the JVM's second compiler to pay.
        command = self._java(
            "-XX:TieredStopAtLevel=1", FORMATTER, "format", "-t", cluster, "-c", str(self.configuration), "--standalone"
        )
        done = process.run(command, claim)
        if done.returncode:
            raise StartFailed(
                f"Kafka could not format its folder: {(done.stderr or done.stdout).strip()[-800:]}", "Use another."
            )
        self._made_by.write_text(KAFKA)
        self._formatted.write_text(cluster)

    def _require_readable(self) -> None:
        """Raises StartFailed where a newer Kafka made the folder: none reads what that wrote."""
        made_by = self._made_by.read_text() if self._made_by.exists() else _UNNAMED
        if [*map(int, made_by.split("."))] > [*map(int, KAFKA.split("."))]:
            raise StartFailed(
                f"{self.folder} was made by Kafka {made_by}, and {KAFKA} can't read it.",
                "Run `samefold dev reset`: it removes the data of this development stack.",
            )


def archive_classes() -> None:
    """Start and stop a broker once, to keep the classes that this loads ready-made: a start then costs 40 % less."""
    new = CLASSES.with_suffix(".new")
    with tempfile.TemporaryDirectory(prefix="samefold-") as folder:
        broker = Kafka(Path(folder), [f"-XX:ArchiveClassesAtExit={new}"])
        broker.start()
        broker.stop()
    if new.exists():  # not where it took too long and was killed
        new.chmod(0o644)
        new.replace(CLASSES)


def _configuration(
    data: Path, broker: int, controller: int, fronts: Sequence[Front], more: Mapping[str, object]
) -> str:
    listeners = advertised = f"PLAINTEXT://{HOST}:{broker},CONTROLLER://{HOST}:{controller}"
    protocols = "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT"
    for front in fronts:
        listeners += f",{front.name}://{HOST}:{front.port}"
        advertised += f",{front.name}://{HOST}:{front.advertised}"
        protocols += f",{front.name}:{front.protocol}"
    values: dict[str, object] = {
        "process.roles": "broker,controller",
        "node.id": 1,
        "controller.quorum.bootstrap.servers": f"{HOST}:{controller}",
        "controller.listener.names": "CONTROLLER",
        "listeners": listeners,
        "advertised.listeners": advertised,
        "listener.security.protocol.map": protocols,
        "log.dirs": data,
        # A topic is made on purpose, with its partitions and settings, or not at all.
        "auto.create.topics.enable": "false",
        # The log is the truth: nothing in it expires unless a topic says so.
        "log.retention.ms": -1,
        # One broker, few partitions: quick to start.
        "offsets.topic.replication.factor": 1,
        "offsets.topic.num.partitions": 4,
        "transaction.state.log.replication.factor": 1,
        "transaction.state.log.min.isr": 1,
        "transaction.state.log.num.partitions": 4,
        "share.coordinator.state.topic.replication.factor": 1,
        "share.coordinator.state.topic.min.isr": 1,
        "share.coordinator.state.topic.num.partitions": 1,
        # Tests want rebalances at once, and killed members noticed within a second.
        "group.initial.rebalance.delay.ms": 0,
        "group.min.session.timeout.ms": 1000,
        # After kill -9 the broker's registration must not linger.
        "broker.heartbeat.interval.ms": 500,
        "broker.session.timeout.ms": 2000,
        # Shares a small machine with everything else.
        "num.network.threads": 2,
        "num.io.threads": 4,
        "log.cleaner.dedupe.buffer.size": 16 * 1024 * 1024,
        **more,
    }
    # Java reads such files as Latin-1, with JSON's escapes
    return "".join(f"{name}={json.dumps(str(value))[1:-1]}\n" for name, value in values.items())


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
        return True


if __name__ == "__main__":
    archive_classes()
