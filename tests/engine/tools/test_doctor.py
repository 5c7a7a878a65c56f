"""make test + test-all: commands in this process; stores that are away take longer.

The doctor: what is missing gets a hint, and it is never right about a broken machine."""

import json
import re
from pathlib import Path

import pytest

from domain.engine.personal.masters import new_line
from infra.processes.java import JavaMissing, find_java
from infra.settings import Settings
from tools import doctor
from tools.dev import jars
from tools.dev.kafka import Kafka
from tools.testing.fixtures import Samefold


def finding(name: str) -> doctor.Finding:
    return next(found for found in doctor.examine() if found.name == name)


def test_all_is_well_where_the_tests_run() -> None:
    assert [found for found in doctor.examine() if not found.ok or found.hint] == []


@pytest.mark.parametrize(
    ("says", "major"),
    [
        ('openjdk version "25" 2025-09-16', 25),
        ('openjdk version "11.0.2" 2019-01-15', None),
        ('java version "1.8.0_202"', None),
        ("Unable to locate a Java Runtime.", None),
        ("", None),
    ],
)
def test_a_java_that_will_not_do_or_is_not_there_is_named(
    says: str, major: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    if says:
        (java := tmp_path / "bin" / "java").parent.mkdir()
        java.write_text(f"#!/bin/sh\necho '{says}' >&2\n")
        java.chmod(0o755)
        monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    if major:
        assert find_java().major == major
        return
    with pytest.raises(JavaMissing):
        find_java()
    found = finding("Java")
    assert not found.ok
    assert {"apt-get install", "brew install"} <= set(re.findall(r"(?:apt-get|brew) install", found.hint))


def test_a_missing_jar_is_noticed_before_java_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jars, "FOLDER", tmp_path)
    for name in list(jars.locked())[1:]:
        (tmp_path / name).touch()
    found = finding("Kafka's jars")
    assert (found.ok, found.hint) == (False, "Run `make setup`.")
    with pytest.raises(jars.JarsMissing, match=r"^1 of Kafka's"):
        Kafka(tmp_path / "kafka").start()


def test_too_little_disk_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "MIN_DISK_GB", 10**9)
    assert not finding("data folder").ok


def test_wrong_settings_are_a_finding_not_a_crash(samefold: Samefold, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAMEFOLD_PARTITON", "3")
    done = samefold("doctor", "--json")
    assert done.returncode == 1
    found = json.loads(done.stdout)
    assert not found["ok"]
    assert "SAMEFOLD_PARTITIONS" in next(f for f in found["findings"] if f["name"] == "settings")["found"]


def test_what_is_configured_is_asked(samefold: Samefold, world: Settings) -> None:
    found = {f["name"]: f for f in json.loads(samefold("doctor", "--json", settings=world).stdout)["findings"]}
    assert found["Kafka"]["ok"]
    assert found["personal values"]["found"] == "no field is personal"
    assert f"not yet made: {world.commands_topic}, {world.events_topic}" in found["Kafka"]["found"]
    assert found["PostgreSQL"]["found"] == (
        "answers, version 18; samefold is a superuser: `samefold db roles` makes a role for each process"
    )


def of_personal_values() -> doctor.Finding:
    """Without the others, which take seconds."""
    return doctor._look("personal values", lambda: doctor._personal(Settings()))


@pytest.fixture
def configured(world: Settings, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setenv("SAMEFOLD_KAFKA_BOOTSTRAP", str(world.kafka_bootstrap))
    monkeypatch.setenv("SAMEFOLD_DATABASE_URL", world.database)
    monkeypatch.setenv("SAMEFOLD_KEYS_TOPIC", world.keys_topic)
    return world


@pytest.mark.slow
def test_what_personal_values_need_is_looked_at(
    configured: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "has_personal_fields", lambda: True)
    missing = of_personal_values()
    assert not missing.ok
    assert "SAMEFOLD_MASTER_KEY_FILE" in missing.found
    (file := tmp_path / "master-key").write_text(new_line("first"))
    file.chmod(0o600)
    monkeypatch.setenv("SAMEFOLD_MASTER_KEY_FILE", str(file))
    assert of_personal_values().found == "master key 'first'"


def test_code_that_can_not_be_imported_is_a_finding_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> bool:
        raise NameError("name 'Tetx' is not defined")

    monkeypatch.setattr(doctor, "has_personal_fields", broken)
    found = of_personal_values()
    assert not found.ok
    assert "Tetx" in found.found


@pytest.mark.slow
def test_what_does_not_answer_is_a_fault(samefold: Samefold) -> None:
    nobody = Settings(kafka_bootstrap="127.0.0.1:9", database_url="host=127.0.0.1 port=9 connect_timeout=2")
    done = samefold("doctor", "--json", settings=nobody)
    assert done.returncode == 1
    wrong = {f["name"]: f["hint"] for f in json.loads(done.stdout)["findings"] if not f["ok"]}
    assert set(wrong) == {"Kafka", "PostgreSQL"}
    assert all("samefold dev up" in hint for hint in wrong.values())
