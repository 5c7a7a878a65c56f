"""All settings, in one class: `Settings()` reads them, `Settings(partitions=4)` overrides them.

The first source that has a value counts: an argument, the environment (`SAMEFOLD_PARTITIONS=4`), the file `.env`,
the file `dev.env` in the data folder (written by `samefold dev up`), the service's own defaults in pyproject.toml
(`[tool.samefold]`), the default.

A secret may come from a file instead: `SAMEFOLD_DATABASE_URL_FILE=/run/secrets/database_url`. The file's whole content counts,
without the newline at its end. A secret that is given twice, as a value and by a file, is refused, from whichever sources.

`.env` and the default data folder `.samefold` are in the service's root, from whichever of its folders a command is run; outside of
the service, in the working directory. Relative paths in a file are relative to the file's folder, those of
arguments and the environment to the working directory.
"""

import base64
import difflib
import json
import os
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NoReturn, Self
from urllib.parse import urlsplit

from pydantic import (
    AwareDatetime,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    SecretStr,
    StringConstraints,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails
from pydantic_settings import (
    BaseSettings,
    DotEnvSettingsSource,
    InitSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    PyprojectTomlConfigSettingsSource,
    SettingsConfigDict,
)

from infra.errors import BadSettings, NotConfigured

PREFIX = "SAMEFOLD_"
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
DEV_ENV = "dev.env"
OF_ISSUER = frozenset({"jwt_issuer", "jwt_audience", "jwt_keys"})
"""They belong together: where one is named, the development stack gives none of the others."""
SERVICE = Path(__file__).resolve().parents[1] / "pyproject.toml"
SECRETS = "kafka_sasl_password", "database_url", "webhooks", "sources"
"""Each has a setting `<name>_file` beside it."""
PATHS = (
    *("data_dir", "archive_url", "lake_url", "kafka_ssl_ca_location", "master_key_file", "jwt_keys"),
    *(f"{name}_file" for name in SECRETS),
)
HINT = "All settings, with what they mean: .env.example."
REMOVED: Final = {
    "ack_timeout_s": "an append without an answer counts as lost after 30 s",
    "agent_batch": "SAMEFOLD_BATCH is the limit of agents and handlers",
    "agent_max_age_ms": "under load a batch grows for twice as long as one takes, and for 50 ms at most",
    "api_caller_rate": "the proxy limits how much one address or token may ask (docs/behind-a-proxy.md)",
    "api_caller_requests": "the proxy limits how much one address or token may ask (docs/behind-a-proxy.md)",
    "api_hsts_s": "the proxy sends Strict-Transport-Security (docs/behind-a-proxy.md)",
    "api_max_connections": "the proxy limits connections (docs/behind-a-proxy.md)",
    "api_max_lag": "commands are refused while the read model is more than 50,000 commits behind",
    "api_max_live": "1,000 clients may be subscribed to one API process",
    "api_max_wait_s": "a caller may ask for a wait of up to 60 s",
    "api_read_timeout_s": "the proxy limits how long a request may take to arrive (docs/behind-a-proxy.md)",
    "api_stall_s": "/health/ready fails when the read model has stood still behind the log for 30 s",
    "auth_in_front": "SAMEFOLD_AUTH=in-front says it",
    "handler_batch": "SAMEFOLD_BATCH is the limit of agents and handlers",
    "lock_timeout_ms": "a statement waits 5 s for a lock",
    "max_command_bytes": "a command may have 262,144 bytes",
    "max_commit_bytes": "the events of one command may have 900,000 bytes",
    "min_insync_replicas": "half of SAMEFOLD_REPLICATION_FACTOR, rounded up: 2 of 3 replicas must acknowledge each record",
    "secrets_dir": "SAMEFOLD_DATABASE_URL_FILE, SAMEFOLD_KAFKA_SASL_PASSWORD_FILE and SAMEFOLD_WEBHOOKS_FILE name the files",
    "spark_master": "--master names the cluster",
    "statement_timeout_ms": "a statement may take 30 s",
    "task_memory_mb": "a task may use memory until 5 % is free; on a cluster spark.executor.pyspark.memory limits it",
}
"""Settings of earlier releases, and what holds now. A process that still has one does not start; the error says why."""

_CREDENTIALS = re.compile(r"://[^/@]*:[^@]*@|\?")
"""`user:password@` in a URL, or a query, which may be a signature."""

_OF_KAFKA = "bootstrap", "security_protocol", "sasl_mechanism", "sasl_username", "sasl_password", "ssl_ca_location"

_SERVICE_LINK = re.compile(
    rf"{PREFIX}([A-Z0-9_]+_)?"
    r"(SERVICE_HOST=[0-9a-f.:]+|SERVICE_PORT(_[A-Z0-9_]+)?=\d+|PORT(_\d+_(TCP|UDP|SCTP))?=(tcp|udp|sctp)://\S+"
    r"|PORT_\d+_(TCP|UDP|SCTP)_(PROTO=(tcp|udp|sctp)|PORT=\d+|ADDR=[0-9a-f.:]+))"
)
"""What Kubernetes sets in every pod for a Service `samefold` or `samefold-…`. No value of a setting has this form."""

Topic = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-]{1,249}$")]
SecurityProtocol = Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"]
SaslMechanism = Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"]
_ORIGIN = r"https?://[a-z0-9.\[\]:-]+"
"""As browsers send it: no path, and in lower case. `*` is not allowed: it would be any page."""

ENDPOINT_NAME = r"^[a-z0-9][a-z0-9_-]{0,62}$"
EndpointName = Annotated[str, StringConstraints(pattern=ENDPOINT_NAME)]


class Endpoint(BaseModel):
    """Where webhooks are posted to, and the secret that signs them. Some URLs are secrets themselves, so no URL is shown."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: SecretStr
    secret: SecretStr
    timeout_s: float = Field(15.0, gt=0, le=300)
    in_flight: int = Field(4, ge=1, le=100, description="Requests at once, of each process")

    @field_validator("url")
    @classmethod
    def _require_url(cls, url: SecretStr) -> SecretStr:
        text = url.get_secret_value()
        try:
            parts = urlsplit(text)
            _ = parts.port
        except ValueError:
            raise ValueError("it is not a URL") from None
        if parts.scheme not in ("http", "https") or not parts.hostname or not text.isascii() or re.search(r"\s", text):
            raise ValueError("write http://… or https://…, in ASCII and without spaces")
        if "@" in parts.netloc or "#" in text:
            raise ValueError("it must hold no user, password or fragment")
        return url

    @field_validator("secret")
    @classmethod
    def _require_secret(cls, secret: SecretStr) -> SecretStr:
        signing_key(secret)
        return secret


def signing_key(secret: SecretStr) -> bytes:
    """The key of Standard Webhooks that a secret holds. Raises ValueError."""
    prefix, text = secret.get_secret_value()[:6], secret.get_secret_value()[6:]
    try:
        key = base64.b64decode(text, validate=True)
    except ValueError:
        key = b""
    if prefix != "whsec_" or not 24 <= len(key) <= 64:
        raise ValueError("write whsec_ and 24 to 64 random bytes in base64")
    return key


class Source(BaseModel):
    """Where messages come from: a topic, by default of this service's Kafka, or a webhook, whose secrets check signatures."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    topic: Topic | None = None
    bootstrap: str | None = Field(None, description="The brokers of another Kafka, to which the next settings belong")
    security_protocol: SecurityProtocol = "PLAINTEXT"
    sasl_mechanism: SaslMechanism | None = None
    sasl_username: str | None = None
    sasl_password: SecretStr | None = None
    ssl_ca_location: Path | None = None
    begin: Literal["earliest", "end"] | AwareDatetime = Field(
        "earliest", description="Where the first version begins to receive: earliest, end, or a time"
    )
    secrets: tuple[Annotated[SecretStr, Field(min_length=1)], ...] = Field((), max_length=10)
    tolerance_s: float = Field(300.0, gt=0, le=86_400, description="How old a webhook's signature may be")

    @model_validator(mode="after")
    def _require_consistent(self) -> Self:
        if (self.topic is None) == (not self.secrets):
            raise ValueError("it has either a topic, or the secrets of a webhook")
        if isinstance(self.begin, datetime) and self.begin < EPOCH:
            raise ValueError("begin is before 1970: write a later time, or earliest")
        others = self.model_fields_set & {*_OF_KAFKA}
        if others and self.secrets:
            raise ValueError(f"a webhook's messages are in this service's Kafka: leave out {', '.join(sorted(others))}")
        if (others - {"bootstrap"} or self.bootstrap) and not (self.topic and self.bootstrap):
            raise ValueError(f"a topic of another Kafka has {', '.join(sorted(others))}: give topic and bootstrap, too")
        if self.security_protocol.startswith("SASL") and not (
            self.sasl_mechanism and self.sasl_username and self.sasl_password
        ):
            raise ValueError(f"{self.security_protocol} needs sasl_mechanism, sasl_username and sasl_password")
        return self


def _json(value: object) -> object:
    """A text of the environment or a file as the object that it holds. Its own error would quote the text, secrets and all."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        raise ValueError("it is not JSON") from None


class Settings(BaseSettings):
    """Read once at the edge (the CLI, a test) and passed on; nothing else reads the environment."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        dotenv_filtering="match_prefix",  # others keep their variables in .env too, docker compose for one
        env_file_encoding="utf-8",
        env_ignore_empty=True,
        extra="forbid",
        frozen=True,
        pyproject_toml_table_header=("tool", "samefold"),
    )

    data_dir: Path = Field(
        default_factory=lambda: _root() / ".samefold",
        description="Where the development stack keeps its data and dev.env",
    )

    kafka_bootstrap: str | None = Field(None, description="Kafka's brokers: host:port, several with commas")
    kafka_security_protocol: SecurityProtocol = "PLAINTEXT"
    kafka_sasl_mechanism: SaslMechanism | None = None
    # a Secret of Kubernetes that was made of a file ends with a newline
    kafka_sasl_username: Annotated[str, StringConstraints(strip_whitespace=True)] | None = None
    kafka_sasl_password: SecretStr | None = None
    kafka_sasl_password_file: Path | None = None
    kafka_ssl_ca_location: Path | None = Field(None, description="File with the certificates of the brokers' authority")

    database_url: SecretStr | None = Field(None, description="PostgreSQL: postgresql://… or a libpq conninfo string")
    database_url_file: Path | None = None
    idle_in_transaction_timeout_ms: int = Field(
        10_000, ge=100, le=86_400_000, description="How long a frozen process may keep its locks"
    )

    commands_topic: Topic = Field("commands", description="The topic of commands")
    events_topic: Topic = Field("events", description="The topic of commits: the log")
    policies_topic: Topic = Field("policies", description="The topic that records when policies were made live")
    public_topic: Topic = Field("public", description="The topic that the publisher writes for other teams")
    inbox_topic: Topic = Field("inbox", description="The topic of webhooks that other services sent")
    keys_topic: Topic = Field("keys", description="The topic of the keys of personal values, and of who is forgotten")
    partitions: int = Field(
        8, ge=1, le=4096, description="Partitions of both topics; can't be changed once there is data"
    )
    replication_factor: int = Field(
        1, ge=1, le=9, description="Replicas of each topic; 3 in production. Half of them must acknowledge each record"
    )
    group_prefix: Topic = Field("samefold", description="What the names of consumer groups begin with")
    session_timeout_ms: int = Field(
        10_000, ge=1_000, le=300_000, description="Until a consumer group removes a silent process"
    )

    decide_limit_s: float = Field(
        10, ge=0.1, le=60, description="Time limit of a decision, and of the fold of one event into one view"
    )
    run_ahead: int = Field(
        20_000, ge=1, description="Commits that a handler may be ahead of the read model, per partition"
    )
    batch: int = Field(
        2_000,
        ge=1,
        le=100_000,
        description="Most commands that a handler decides at once, and most records that an agent commits in one transaction",
    )

    api_host: str = Field("127.0.0.1", description="The address that the HTTP API listens on")
    api_port: int = Field(8000, ge=0, le=65_535, description="Its port; 0 takes a free one")
    api_connections: int = Field(
        8, ge=2, le=1_000, description="Most connections to PostgreSQL on which one API process reads for clients"
    )
    api_wait_s: float = Field(
        10, gt=0, le=60, description="How long a request waits for its outcome; then it is answered with 202"
    )
    api_max_waiting: int = Field(
        2_000, ge=1, description="Most requests that wait at once; others wait api_wait_s for a place, then get 429"
    )
    api_small_view: int = Field(
        10_000,
        ge=0,
        description="Up to so many rows, by the planner's estimate, a view is searched also where no index serves a question",
    )
    api_cors_origins: Annotated[str, StringConstraints(pattern=rf"^{_ORIGIN}(,{_ORIGIN})*$")] | None = Field(
        None, description="Pages whose scripts may read the answers: their origins, several with commas"
    )

    auth: Literal["off", "jwt", "in-front"] = Field(
        "off",
        description="Which callers the API accepts. jwt: those with a token; off: all on this machine; in-front: all that reach "
        "it, because a gateway in front of it decides who may pass",
    )
    jwt_issuer: str | None = Field(None, description="The issuer of the tokens: exactly their iss")
    jwt_audience: str | None = Field(None, description="The audience of the tokens: their aud")
    jwt_keys: str | None = Field(
        None, description="URL or file of the issuer's keys (JWKS); by default the URL in the issuer's metadata"
    )
    jwt_roles_claim: str = Field("roles", description="The claim with the caller's roles, like realm_access.roles")
    api_docs: bool | None = Field(
        None, description="Whether the API serves /docs and /openapi.json; by default not with auth=jwt"
    )
    console: bool = Field(
        False, description="Whether the API serves the console, its pages for those who run the service"
    )

    archive_url: str | None = Field(
        None,
        description="Where the archive is: a folder, or a URL that fsspec knows; by default archive in the data folder",
    )
    archive_restore_days: float = Field(
        30,
        ge=0,
        description="How many days back a database may be restored: records that were archived later stay in Kafka",
    )

    lake_url: str | None = Field(
        None,
        description="Where the lake is: a folder, or a URL that both fsspec and Spark know; by default lake in the data folder",
    )

    webhooks: Annotated[dict[EndpointName, Endpoint], NoDecode, BeforeValidator(_json)] = Field(
        default_factory=dict,
        description='Endpoints of webhooks by name, as JSON: {"billing": {"url": "https://…", "secret": "whsec_…"}}',
    )
    webhooks_file: Path | None = None

    sources: Annotated[dict[EndpointName, Source], NoDecode, BeforeValidator(_json)] = Field(
        default_factory=dict,
        description='What other services say, by name, as JSON: {"billing": {"topic": "billing.public", "bootstrap": "…"}}, or '
        '{"shop": {"secrets": ["whsec_…"]}} for a webhook',
    )
    sources_file: Path | None = None

    master_key_file: Path | None = Field(
        None, description="File with the master key, which personal values need: `samefold keys new` prints its line"
    )

    metrics_port: int | None = Field(
        None,
        ge=0,
        le=65_535,
        description="Port for metrics of handlers and agents. Processes that are started together take this port and the following "
        "ones. Without it they serve no metrics. The API serves its metrics on its own port",
    )
    metrics_host: str = Field("127.0.0.1", description="The address that this port listens on")

    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    log_format: Literal["text", "json"] = "text"

    _source: str = PrivateAttr("")
    """Whose Kafka it is, if it is another one than the service's own."""

    def __init__(self, **values: Any) -> None:
        """Raises BadSettings, which names every wrong value and every unknown SAMEFOLD_ variable."""
        ours = {name.upper() for name, value in os.environ.items() if name.upper().startswith(PREFIX) and value}
        ours.difference_update(service_links())
        if unknown := [
            name for name in sorted(ours) if name.removeprefix(PREFIX).lower() not in type(self).model_fields
        ]:
            # typos: the defaults would be used instead
            raise BadSettings(f"Wrong settings: {'; '.join(map(_unknown, unknown))}.", HINT)
        try:
            super().__init__(**values)
        except ValidationError as error:
            # Not its own text, and `from None`: pydantic quotes the input, which may be a secret.
            told = "; ".join(_told(wrong) for wrong in error.errors(include_input=False))
            raise BadSettings(f"Wrong settings: {told}.", HINT) from None
        except (OSError, RuntimeError) as error:  # a file that may not be read, or `~` of nobody
            raise BadSettings(f"The settings can't be read: {error}.", HINT) from None

    @model_validator(mode="before")
    @classmethod
    def _read_files(cls, given: dict[str, Any]) -> dict[str, Any]:
        """Paths from any source with their `~` expanded, and secrets from their files."""
        given = {name: value for name, value in given.items() if value is not None}
        for name in PATHS:
            if str(given.get(name, "")).startswith("~"):
                given[name] = str(Path(given[name]).expanduser())
        for name in SECRETS:
            if f"{name}_file" in given:
                file = given[f"{name}_file"] = Path(given[f"{name}_file"]).absolute()
                if name in given:
                    raise ValueError(
                        f"{PREFIX}{name.upper()} is given twice: by the file {file} and as a value, in the environment, "
                        f".env or the data folder's {DEV_ENV}"
                    )
                given[name] = _secret_of(file)
        return given

    @model_validator(mode="after")
    def _require_consistent(self) -> Self:
        if len({*self.topics}) < len(self.topics):
            raise ValueError("the names of the service's topics (commands_topic, events_topic, …) must differ")
        for name in ("archive_url", "lake_url"):
            if _CREDENTIALS.search(getattr(self, name) or ""):
                raise ValueError(f"{name} holds credentials: give them in the environment of the store's own library")
        sasl = self.kafka_security_protocol.startswith("SASL")
        if sasl and not (self.kafka_sasl_mechanism and self.kafka_sasl_username and self.kafka_sasl_password):
            raise ValueError(f"{self.kafka_security_protocol} needs kafka_sasl_mechanism, _username and _password")
        return self

    @property
    def topics(self) -> list[str]:
        """All names of topics."""
        own = self.commands_topic, self.events_topic, self.policies_topic, self.public_topic, self.inbox_topic
        return [*own, self.keys_topic]

    @property
    def kafka(self) -> str:
        """The brokers to connect to. Raises NotConfigured."""
        return self.kafka_bootstrap or self._not_configured("Kafka", "kafka_bootstrap")

    def source(self, name: str) -> Source:
        """Raises NotConfigured."""
        if (source := self.sources.get(name)) is None:
            raise NotConfigured(
                f"No source '{name}' is configured.",
                f'Add it to {PREFIX}SOURCES, the same for all processes of policies and the API: {{"{name}": '
                '{"topic": "…", "bootstrap": "…"}} (docs/sources.md).',
            )
        return source

    def of_source(self, name: str) -> tuple[Self, str]:
        """These settings with the Kafka of a source, and its topic. Raises NotConfigured."""
        source, theirs = self.source(name), self
        if source.bootstrap:
            theirs = self.model_copy(update={f"kafka_{key}": getattr(source, key) for key in _OF_KAFKA})
            theirs._source = name
        return theirs, source.topic or self.inbox_topic

    @property
    def is_others(self) -> bool:
        """Whether its Kafka is that of a source."""
        return bool(self._source)

    def of_kafka(self, key: str) -> str:
        """What the setting is called that has `key` of this Kafka: `bootstrap`, `ssl_ca_location` and others."""
        return f"`{key}` of '{self._source}' in {PREFIX}SOURCES" if self._source else f"{PREFIX}KAFKA_{key.upper()}"

    @property
    def archive(self) -> str:
        """The archive's folder or URL, without any secret."""
        return self.archive_url or str((self.data_dir / "archive").absolute())

    @property
    def lake(self) -> str:
        """The lake's folder or URL, without any secret."""
        return self.lake_url or str((self.data_dir / "lake").absolute())

    @property
    def database(self) -> str:
        """The connection string, secrets and all. Raises NotConfigured."""
        if self.database_url is None:
            self._not_configured("PostgreSQL", "database_url")
        return self.database_url.get_secret_value()

    @property
    def shows_docs(self) -> bool:
        """Whether the API serves its documentation."""
        return self.auth != "jwt" if self.api_docs is None else self.api_docs

    def _not_configured(self, what: str, field: str) -> NoReturn:
        raise NotConfigured(
            f"No {what} is configured.",
            f"Run `samefold dev up` (data folder: {self.data_dir.absolute()}), or set {PREFIX}{field.upper()} "
            "to an existing one.",
        )

    def environment(self) -> dict[str, str]:
        """These very settings, secrets too, as the environment of another process. What is in a file stays there."""
        values = {name: getattr(self, name) for name in type(self).model_fields}
        filed = {name for name in SECRETS if values[f"{name}_file"]}
        return {
            PREFIX + name.upper(): _plain(value)
            for name, value in values.items()
            if value is not None and name not in filed
        }

    def secret_files(self) -> dict[str, str]:
        """The files that secrets came from, as an environment in which each process may be given its own."""
        files = {f"{name}_file": getattr(self, f"{name}_file") for name in SECRETS}
        return {PREFIX + name.upper(): str(file) for name, file in files.items() if file}

    def exposed_files(self) -> list[Path]:
        """Files of secrets that every user of this machine may read."""
        files = [getattr(self, f"{name}_file") for name in SECRETS] + [self.master_key_file]
        return [file for file in files if file and file.exists() and file.stat().st_mode & 0o004]

    def require_webhooks_read(self) -> None:
        """Raises BadSettings if only an earlier release would have read the endpoints of webhooks.

        It read all files of the folder SAMEFOLD_SECRETS_DIR. Now processes would start, and all posts would wait.
        """
        if self.webhooks or self.webhooks_file:
            return
        others = [file for name in SECRETS if (file := getattr(self, f"{name}_file"))]
        for file in (other.parent / f"{PREFIX.lower()}webhooks" for other in others):
            if file.exists():
                raise BadSettings(
                    f"The file {file} is not read: {PREFIX}SECRETS_DIR is no setting any more.",
                    f"Set {PREFIX}WEBHOOKS_FILE={file}, or remove the file.",
                )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        links = {name.removeprefix(PREFIX).lower() for name in service_links()}
        own = {name: value for name, value in env_settings().items() if name not in links}
        environment = InitSettingsSource(settings_cls, own)
        dot_env = DotEnvSettingsSource(settings_cls, env_file=_root() / ".env")
        project = PyprojectTomlConfigSettingsSource(settings_cls, SERVICE)
        before = (init_settings, environment, _paths(dot_env, _root()), dot_env)
        after = (_paths(project, SERVICE.parent), project)
        # the data folder, where dev.env is, may come from any of the sources
        data_dir = next((found for source in (*before, *after) if (found := source().get("data_dir"))), None)
        folder = Path(data_dir).expanduser() if data_dir else _root() / ".samefold"
        stack = DotEnvSettingsSource(settings_cls, env_file=folder / DEV_ENV)()
        if any(OF_ISSUER & source().keys() for source in before):  # another issuer's tokens, with the development keys
            stack = {name: value for name, value in stack.items() if name not in OF_ISSUER}
        return (*before, InitSettingsSource(settings_cls, stack), *after)


def service_links() -> list[str]:
    """Variables of the environment that are no settings: Kubernetes sets them, as SAMEFOLD_PORT=tcp://10.0.0.1:8000."""
    return sorted(name for name, value in os.environ.items() if _SERVICE_LINK.fullmatch(f"{name}={value}"))


def _plain(value: object) -> str:
    """A setting as text, secrets too."""
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    if isinstance(value, dict):
        return json.dumps({name: one.model_dump(exclude_unset=True) for name, one in value.items()}, default=_plain)
    return str(value.absolute() if isinstance(value, Path) else value)


def _secret_of(file: Path) -> str:
    """The text of a file, without its last newline. No error quotes it."""
    try:
        text = file.read_text(encoding="utf-8").removesuffix("\n").removesuffix("\r")
    except OSError as error:
        raise ValueError(f"the file {file} can't be read: {error.strerror}") from None
    except ValueError:
        raise ValueError(f"the file {file} is not text in UTF-8") from None
    if not text.strip():
        raise ValueError(f"the file {file} is empty")
    return text


def _paths(source: PydanticBaseSettingsSource, root: Path) -> InitSettingsSource:
    """The source's paths, relative ones below `root`."""
    values = source()
    paths = {name: str(values[name]) for name in PATHS if name in values and "://" not in str(values[name])}
    absolute = {name: str(root / Path(path).expanduser()) for name, path in paths.items()}
    return InitSettingsSource(source.settings_cls, absolute)


def _root() -> Path:
    """The service's root for a working directory in it, else the working directory."""
    try:
        here = Path.cwd()
    except FileNotFoundError:  # it was removed
        return SERVICE.parent
    return SERVICE.parent if here.is_relative_to(SERVICE.parent) else here


def _told(error: ErrorDetails) -> str:
    if not error["loc"]:
        return error["msg"].removeprefix("Value error, ")
    name, *inside = map(str, error["loc"])
    if error["type"] == "extra_forbidden" and not inside:
        return _unknown(name)
    where = ", ".join([PREFIX + name.upper(), *inside])
    why = "write a list" if error["type"] == "tuple_type" else error["msg"].removeprefix("Value error, ")
    return f"{where}: {why}"


def _unknown(name: str) -> str:
    name = name.lower().removeprefix(PREFIX.lower())
    if name in REMOVED:
        return f"{PREFIX}{name.upper()} is no setting any more: {REMOVED[name]}. Remove it"
    [nearest] = difflib.get_close_matches(name, Settings.model_fields, n=1, cutoff=0)
    return f"{PREFIX}{name.upper()} is unknown (did you mean {PREFIX}{nearest.upper()}?)"
