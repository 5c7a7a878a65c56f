"""make test: needs no store. Settings: where they come from, what they refuse, what they never show."""

import os
import re
from pathlib import Path
from unittest.mock import patch

import pytest
from confluent_kafka import KafkaError
from hypothesis import example
from hypothesis import given as for_all
from hypothesis import strategies as st

from infra.errors import BadSettings, NotConfigured
from infra.log import clients
from infra.settings import PATHS, PREFIX, REMOVED, Settings, service_links
from tools.testing.fixtures import ROOT

SECRET = "p-a-s-s"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_nearer_source_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lines(value: int, *names: str) -> str:
        return "".join(f"SAMEFOLD_{name}={value}\n" for name in names)

    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "dev.env").write_text(lines(1, "PARTITIONS", "RUN_AHEAD", "BATCH", "API_PORT"))
    (tmp_path / ".env").write_text(lines(2, "PARTITIONS", "RUN_AHEAD", "BATCH") + "SAMEFOLD_DATA_DIR=data\n")
    monkeypatch.setenv("SAMEFOLD_PARTITIONS", "3")
    monkeypatch.setenv("SAMEFOLD_RUN_AHEAD", "3")
    found = Settings(partitions=4)
    assert (found.partitions, found.run_ahead, found.batch, found.api_port) == (4, 3, 2, 1)


def test_an_error_of_another_teams_kafka_names_its_settings_not_ours() -> None:
    given = {"topic": "billing.public", "bootstrap": "theirs:9092", "security_protocol": "SSL"}
    ours = Settings(kafka_bootstrap="ours:9092", sources={"billing": given})
    theirs, topic = ours.of_source("billing")
    away = KafkaError(KafkaError._ALL_BROKERS_DOWN)
    assert (topic, "theirs:9092" in clients.away(theirs, away).message) == ("billing.public", True)
    assert "`bootstrap` of 'billing' in SAMEFOLD_SOURCES" in clients.away(theirs, away).hint
    assert "SAMEFOLD_KAFKA_BOOTSTRAP" in clients.away(ours, away).hint
    refused = KafkaError(KafkaError._AUTHENTICATION, "sasl_ssl://theirs:9092/1: wrong password (after 3ms)")
    assert "`sasl_password` of 'billing' in SAMEFOLD_SOURCES" in str(clients.refusal(theirs, refused))


def test_dev_env_is_looked_for_in_the_data_folder_that_the_caller_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "dev.env").write_text("SAMEFOLD_KAFKA_BOOTSTRAP=there:1\n")
    assert Settings(data_dir=tmp_path / "data").kafka == "there:1"
    assert Settings().kafka_bootstrap is None
    monkeypatch.setenv("HOME", str(tmp_path))
    settings = Settings(data_dir=Path("~/data"))
    assert (settings.kafka, settings.data_dir) == ("there:1", tmp_path / "data")


def test_each_path_of_the_environment_may_begin_with_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "secret").write_text("postgresql://of-a-file")
    monkeypatch.setenv("HOME", str(tmp_path))
    others = "kafka_sasl_password_file", "webhooks_file", "sources_file", "jwt_keys"
    paths = [name for name in PATHS if name not in others]
    for name in paths:
        monkeypatch.setenv(f"SAMEFOLD_{name.upper()}", "~/secret")
    settings = Settings()
    assert {name: str(getattr(settings, name)) for name in paths} == dict.fromkeys(paths, str(tmp_path / "secret"))


@pytest.mark.parametrize("named", ["ISSUER", "AUDIENCE", "KEYS"])
def test_another_issuer_gets_nothing_of_the_development_stacks(tmp_path: Path, named: str) -> None:
    names = ("ISSUER", "AUDIENCE", "KEYS")
    folder = tmp_path / ".samefold"
    folder.mkdir()
    (folder / "dev.env").write_text("".join(f"SAMEFOLD_JWT_{name}=https://dev\n" for name in names))

    def found() -> list[str | None]:
        settings = Settings()
        return [settings.jwt_issuer, settings.jwt_audience, settings.jwt_keys]

    assert found() == ["https://dev"] * 3
    (tmp_path / ".env").write_text(f"SAMEFOLD_JWT_{named}=https://mine\n")
    assert found() == ["https://mine" if name == named else None for name in names]


def test_a_folder_in_the_service_has_the_settings_of_its_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infra.settings.SERVICE", tmp_path / "pyproject.toml")
    (tmp_path / ".samefold").mkdir()
    (tmp_path / ".samefold" / "dev.env").write_text("SAMEFOLD_KAFKA_BOOTSTRAP=there:1\n")
    (tmp_path / ".env").write_text("SAMEFOLD_PARTITIONS=5\nSAMEFOLD_ARCHIVE_URL=archive\n")
    (tmp_path / "domain").mkdir()
    monkeypatch.chdir(tmp_path / "domain")
    found = Settings()
    assert (found.kafka, found.partitions, found.data_dir) == ("there:1", 5, tmp_path / ".samefold")
    assert found.archive == str(tmp_path / "archive")
    (tmp_path / ".env").write_text("SAMEFOLD_DATA_DIR=data\n")
    assert Settings().data_dir == tmp_path / "data"
    monkeypatch.setenv("SAMEFOLD_DATA_DIR", "mine")
    assert Settings().data_dir.absolute() == tmp_path / "domain" / "mine"


def test_the_data_folder_of_pyproject_is_where_dev_env_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infra.settings.SERVICE", tmp_path / "pyproject.toml")
    (tmp_path / "pyproject.toml").write_text('[tool.samefold]\ndata_dir = "data"\n')
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "dev.env").write_text("SAMEFOLD_KAFKA_BOOTSTRAP=there:1\n")
    assert (Settings().kafka, Settings().data_dir) == ("there:1", tmp_path / "data")


def test_settings_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("SAMEFOLD_ARCHIVE_URL=~nobody-has-this-name/archive\n")
    with pytest.raises(BadSettings, match="can't be read"):
        Settings()


def test_a_working_directory_that_is_gone_is_no_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert Settings(data_dir=tmp_path, partitions=3).partitions == 3


def test_a_misspelt_name_is_refused_with_the_nearest_one_and_other_programs_lines_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".env").write_text("POSTGRES_PASSWORD=x\nSAMEFOLD_PARTITIONS=5\n")
    assert Settings().partitions == 5
    (tmp_path / ".env").write_text("SAMEFOLD_RUN_AHED=5\n")
    with pytest.raises(BadSettings, match=r"SAMEFOLD_RUN_AHED .*SAMEFOLD_RUN_AHEAD\?"):
        Settings()
    monkeypatch.setenv("SAMEFOLD_PARTITON", "3")
    with pytest.raises(BadSettings, match=r"SAMEFOLD_PARTITON .*SAMEFOLD_PARTITIONS\?"):
        Settings()


@st.composite
def of_a_service(draw: st.DrawFn) -> dict[str, str]:
    """What Kubernetes puts into each pod of a namespace for a Service whose name begins with `samefold`."""
    labels = st.from_regex(r"[a-z0-9]([-a-z0-9]{0,8}[a-z0-9])?", fullmatch=True)
    more = st.sampled_from(("", "-api", "-metrics")) | labels.map(lambda one: f"-{one}")
    name = f"samefold{draw(more)}".upper().replace("-", "_")
    address = draw(st.ip_addresses())
    host = f"[{address}]" if address.version == 6 else str(address)
    port = st.tuples(labels, st.integers(1, 65_535), st.sampled_from(("tcp", "udp", "sctp")))
    ports = draw(st.lists(port, min_size=1, max_size=3))
    _, number, protocol = ports[0]
    found = {f"{name}_SERVICE_HOST": str(address), f"{name}_SERVICE_PORT": str(number)}
    found[f"{name}_PORT"] = f"{protocol}://{host}:{number}"
    for label, number, protocol in ports:
        found[f"{name}_SERVICE_PORT_{label.upper().replace('-', '_')}"] = str(number)
        link = f"{name}_PORT_{number}_{protocol.upper()}"
        found[link] = f"{protocol}://{host}:{number}"
        found |= {f"{link}_PROTO": protocol, f"{link}_PORT": str(number), f"{link}_ADDR": str(address)}
    return found


@for_all(of_a_service())
def test_variables_that_kubernetes_sets_for_a_service_are_left_out(variables: dict[str, str]) -> None:
    before = Settings()
    with patch.dict(os.environ, variables):
        assert service_links() == sorted(variables)
        assert Settings() == before


@for_all(st.sampled_from(sorted(Settings.model_fields)), st.text(st.characters(exclude_characters="\0", codec="utf-8")))
@example("api_port", "8000")
@example("api_host", "10.0.0.1")
@example("kafka_bootstrap", "tcp://10.0.0.1:9092")
@example("metrics_port", "tcp://")
def test_no_value_of_a_setting_is_left_out_as_if_kubernetes_had_set_it(name: str, value: str) -> None:
    with patch.dict(os.environ, {PREFIX + name.upper(): value}):
        assert service_links() == []


@pytest.mark.parametrize(
    ("name", "value"), [("PORT", "8000"), ("SERVICE_HOST", "here"), ("API_PORT_8000_TCP", "8000"), ("HOST", "10.0.0.1")]
)
def test_what_kubernetes_does_not_set_is_refused(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PREFIX + name, value)
    with pytest.raises(BadSettings, match=f"{PREFIX}{name} is unknown"):
        Settings()


def test_a_setting_of_an_earlier_release_that_is_empty_is_as_good_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """So docker compose writes those that stand nowhere: `SAMEFOLD_API_HSTS_S: ${SAMEFOLD_API_HSTS_S:-}`."""
    monkeypatch.setenv("SAMEFOLD_API_HSTS_S", "")
    Settings()  # or it is refused


@pytest.mark.parametrize("name", REMOVED)
def test_a_setting_of_an_earlier_release_is_refused_with_what_holds_now(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert name not in Settings.model_fields
    told = re.escape(f"SAMEFOLD_{name.upper()} is no setting any more: {REMOVED[name]}. Remove it")
    (tmp_path / ".env").write_text(f"SAMEFOLD_{name.upper()}=5\n")
    with pytest.raises(BadSettings, match=told):
        Settings()
    (tmp_path / ".env").unlink()
    monkeypatch.setenv(f"SAMEFOLD_{name.upper()}", "5")
    with pytest.raises(BadSettings, match=told):
        Settings()


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"partitions": 0}, "SAMEFOLD_PARTITIONS"),
        ({"partitions": "many"}, "SAMEFOLD_PARTITIONS"),
        ({"events_topic": "a b"}, "SAMEFOLD_EVENTS_TOPIC"),
        ({"kafka_security_protocol": "TLS"}, "SAMEFOLD_KAFKA_SECURITY_PROTOCOL"),
        ({"log_level": "LOUD"}, "SAMEFOLD_LOG_LEVEL"),
        ({"events_topic": "commands"}, "must differ"),
        ({"kafka_security_protocol": "SASL_SSL", "kafka_sasl_mechanism": "PLAIN"}, "_username and _password"),
        (
            {"sources": {"shop": {"secrets": ["s"], "bootstrap": "k:9092"}}},
            "SAMEFOLD_SOURCES, shop: .* leave out bootstrap",
        ),
        (
            {"sources": {"shop": {"topic": "t", "begin": "1969-12-31T23:59:59.999Z"}}},
            "SAMEFOLD_SOURCES, shop: .* before 1970",
        ),
        (
            {"sources": {"shop": {"topic": "t", "ssl_ca_location": "ca"}}},
            "SAMEFOLD_SOURCES, shop: .* topic and bootstrap",
        ),
    ],
)
def test_a_wrong_value_is_refused_by_name(wrong: dict[str, object], named: str) -> None:
    with pytest.raises(BadSettings, match=named):
        Settings(**wrong)


def test_what_is_not_configured_says_both_cures() -> None:
    with pytest.raises(NotConfigured, match=r"samefold dev up.*SAMEFOLD_KAFKA_BOOTSTRAP"):
        _ = Settings().kafka
    with pytest.raises(NotConfigured, match=r"samefold dev up.*SAMEFOLD_DATABASE_URL"):
        _ = Settings().database


def test_secrets_are_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAMEFOLD_DATABASE_URL", f"postgresql://u:{SECRET}@h/d")
    monkeypatch.setenv("SAMEFOLD_KAFKA_SASL_PASSWORD", SECRET)
    found = Settings()
    assert SECRET in found.database
    assert SECRET not in f"{found!r} {found} {found.model_dump()} {found.model_dump_json()}"
    monkeypatch.setenv("SAMEFOLD_PARTITIONS", SECRET)
    with pytest.raises(BadSettings) as refusal:
        Settings()
    assert SECRET not in f"{refusal.value} {refusal.value!r} {refusal.value.__cause__!r}"


def test_the_example_file_names_every_setting_with_its_default() -> None:
    text = (ROOT / ".env.example").read_text()
    example = dict(
        line.removeprefix("#").split("=", 1) for line in text.splitlines() if re.match(rf"#?{PREFIX}\w+=", line)
    )
    assert set(example) == {PREFIX + name.upper() for name in Settings.model_fields}
    for name, field in Settings.model_fields.items():
        default = field.get_default(call_default_factory=True)
        if default is not None:
            assert example[PREFIX + name.upper()] == str(default).removeprefix(f"{Path.cwd()}/")
        assert (field.description or "") in text, "what it is for"
