"""The options of Spark's connector to Kafka: what to read, from where, and how to log in without a secret in them.

Spark's plans, event log and web pages show a query's options. So they only name the environment variables that hold user and
password (Kafka's `EnvVarConfigProvider`), and each JVM, the driver's and the executors', reads its own environment.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from infra.errors import SamefoldError
from infra.log.rule import Reading
from infra.settings import PREFIX, Settings
from spark_jobs.engine.session import submitted
from tools.dev.jars import connector

MOST_OFFSETS = 100_000
"""Of one micro-batch, which should not take minutes. Its tasks commit in small transactions in any case."""
POLL_TIMEOUT_MS = 10_000
API_TIMEOUT_MS = 15_000
"""After that, a query ends whose broker is unavailable, and the agent waits for the broker."""

_MODULES = {
    "PLAIN": "org.apache.kafka.common.security.plain.PlainLoginModule",
    "SCRAM-SHA-256": "org.apache.kafka.common.security.scram.ScramLoginModule",
    "SCRAM-SHA-512": "org.apache.kafka.common.security.scram.ScramLoginModule",
}
_USERNAME, _PASSWORD = f"{PREFIX}KAFKA_SASL_USERNAME", f"{PREFIX}KAFKA_SASL_PASSWORD"


class SecretUnfit(SamefoldError):
    """Kafka's Java client can't be given this user name or password safely."""


def session_conf() -> dict[str, str]:
    """What a session needs to read from Kafka; spark-submit has it from `--jars`. Raises JarsMissing."""
    return {} if submitted() else {"spark.jars": ",".join(map(str, connector()))}


def options(settings: Settings, readings: Mapping[int, Reading]) -> dict[str, str]:
    """The connector's options to read `events` from these positions on, all partitions. Raises SecretUnfit."""
    topic = settings.events_topic
    return {
        "assign": json.dumps({topic: sorted(readings)}),
        "startingOffsets": json.dumps(
            {topic: {str(p): reading.next_offset for p, reading in sorted(readings.items())}}
        ),
        # records that are missing in the log must end the query, not be skipped
        "failOnDataLoss": "true",
        "maxOffsetsPerTrigger": str(MOST_OFFSETS),
        "groupIdPrefix": f"{settings.group_prefix}-spark",
        "kafkaConsumer.pollTimeoutMs": str(POLL_TIMEOUT_MS),
        "kafka.bootstrap.servers": settings.kafka,
        "kafka.isolation.level": "read_committed",
        "kafka.default.api.timeout.ms": str(API_TIMEOUT_MS),
        "kafka.request.timeout.ms": str(API_TIMEOUT_MS - 1),
        # the connector asks for a partition's ends after each poll
        "kafka.max.poll.records": "10000",
        "kafka.max.partition.fetch.bytes": str(8 * 1024 * 1024),
        **{f"kafka.{name}": value for name, value in security(settings).items()},
    }


def security(settings: Settings) -> dict[str, str]:
    """The login settings of Kafka's Java client, with names of environment variables in place of secrets.

    Raises SecretUnfit.
    """
    found: dict[str, str] = {"security.protocol": settings.kafka_security_protocol}
    mechanism = settings.kafka_sasl_mechanism
    if mechanism and settings.kafka_security_protocol.startswith("SASL"):
        _require_plain(settings)
        found |= {
            "sasl.mechanism": mechanism,
            "sasl.jaas.config": f'{_MODULES[mechanism]} required username="${{env:{_USERNAME}}}" '
            f'password="${{env:{_PASSWORD}}}";',
            "config.providers": "env",
            "config.providers.env.class": "org.apache.kafka.common.config.provider.EnvVarConfigProvider",
            "config.providers.env.param.allowlist.pattern": f"{_USERNAME}|{_PASSWORD}",
        }
    if settings.kafka_ssl_ca_location and settings.kafka_security_protocol.endswith("SSL"):
        found |= {"ssl.truststore.type": "PEM", "ssl.truststore.location": str(settings.kafka_ssl_ca_location)}
    return found


def _require_plain(settings: Settings) -> None:
    """Both are quoted in a JAAS entry, where a quote would end the value and a backslash begins an escape. Raises SecretUnfit."""
    password = settings.kafka_sasl_password.get_secret_value() if settings.kafka_sasl_password else ""
    for name, value in ((_USERNAME, settings.kafka_sasl_username or ""), (_PASSWORD, password)):
        if any(sign in value for sign in '"\\\n\r'):
            raise SecretUnfit(
                f"{name} has a quote, a backslash or a line break, which Kafka's Java client can't be given safely.",
                "Choose one without these, or run the agent with `--on faust`.",
            )
