"""docker-compose.yml, checked without Docker: it names only what exists, keeps to loopback, and holds no secret."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from infra.cli import build
from infra.settings import PREFIX, Settings

ROOT = Path(__file__).parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OURS = {name: service for name, service in SERVICES.items() if "build" in service}
FOREIGN = {name: service for name, service in SERVICES.items() if "build" not in service}


def test_all_services_are_there() -> None:
    assert set(OURS) == {"topics", "migrate", "handler", "agent", "policies", "publisher", "api"}
    assert set(FOREIGN) == {"kafka", "postgres"}


@pytest.mark.parametrize("name", OURS)
def test_a_services_command_is_one_of_the_command_lines(name: str) -> None:
    """Parsed by the command line itself, options too; `--help` at the end keeps it from being run."""
    done = CliRunner().invoke(build(), [*SERVICES[name]["command"], "--help"])
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize("name", OURS)
def test_a_services_settings_exist(name: str) -> None:
    environment: dict[str, str] = SERVICES[name]["environment"]
    ours = {key.removeprefix(PREFIX).lower() for key in environment if key.startswith(PREFIX)}
    assert {"kafka_bootstrap", "database_url"} <= ours <= set(Settings.model_fields)
    Settings(**{key: environment[PREFIX + key.upper()] for key in ours})


def test_the_services_reach_kafka_and_the_database_under_the_names_that_these_have() -> None:
    environment = SERVICES["handler"]["environment"]
    advertised = SERVICES["kafka"]["environment"]["KAFKA_ADVERTISED_LISTENERS"].split(",")
    assert f"INSIDE://{environment['SAMEFOLD_KAFKA_BOOTSTRAP']}" in advertised
    postgres = SERVICES["postgres"]["environment"]
    wanted = f"host=postgres dbname={postgres['POSTGRES_DB']} user={postgres['POSTGRES_USER']}"
    assert environment["SAMEFOLD_DATABASE_URL"] == wanted


def test_ports_are_open_to_this_machine_only() -> None:
    ports = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert len(ports) == 3
    assert all(re.fullmatch(r"127\.0\.0\.1:\d+:\d+", port) for port in ports)


def test_images_are_pinned() -> None:
    used = [service["image"] for service in SERVICES.values()]
    stages = re.findall(r"^FROM (\S+)(?: AS (\S+))?", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    used += [image for image, _ in stages if image not in [name for _, name in stages]]
    assert len(used) == len(SERVICES) + 1
    assert all(re.fullmatch(r"[a-z/]+:\d+(\.\d+)*(-[a-z-]+)?", image) for image in used)


def test_kafka_and_the_postgres_image_are_those_that_the_tests_run_on() -> None:
    from infra.dev.jars import KAFKA
    from infra.dev.postgres import VERSION

    assert SERVICES["kafka"]["image"] == f"apache/kafka:{KAFKA}"
    assert SERVICES["postgres"]["image"] == f"postgres:{VERSION}"


def test_no_password_has_a_default() -> None:
    passwords = [
        value
        for service in SERVICES.values()
        for key, value in service["environment"].items()
        if re.search("PASSWORD|SECRET|TOKEN", key)
    ]
    assert len(passwords) == 1 + len(OURS)
    assert all(re.fullmatch(r"\$\{POSTGRES_PASSWORD:\?.+\}", value) for value in passwords)


@pytest.mark.parametrize("name", OURS)
def test_a_service_starts_after_what_it_needs_is_ready(name: str) -> None:
    for needed, how in SERVICES[name]["depends_on"].items():
        if "healthcheck" in SERVICES[needed]:
            assert how == {"condition": "service_healthy"}
        else:
            assert how == {"condition": "service_completed_successfully"}
            assert "restart" not in SERVICES[needed]  # one that is restarted never completes
    assert SERVICES[name]["depends_on"]
