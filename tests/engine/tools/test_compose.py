"""make test: files only.

docker-compose.yml, checked without Docker: it names only what exists, keeps to loopback, and holds no secret."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from infra.settings import PREFIX, Settings
from tools.cli import build
from tools.dev.jars import KAFKA
from tools.dev.postgres import VERSION, binaries

ROOT = Path(__file__).parents[3]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OURS = {name: service for name, service in SERVICES.items() if "build" in service}
ROLES = "migrator", "handler", "agent", "policy", "api"


def mounted(name: str) -> dict[str, str]:
    """A service's secrets: the file in /run/secrets, and which one it is."""
    listed = [
        one if isinstance(one, dict) else {"source": one, "target": one} for one in SERVICES[name].get("secrets", [])
    ]
    return {one["target"]: one["source"] for one in listed}


def test_all_services_are_there_and_kafka_has_the_name_under_which_they_look_for_it() -> None:
    assert set(OURS) == {"topics", "roles", "migrate", "handler", "agent", "policies", "publisher", "api"}
    assert set(SERVICES) - set(OURS) == {"kafka", "postgres"}
    advertised = SERVICES["kafka"]["environment"]["KAFKA_ADVERTISED_LISTENERS"].split(",")
    assert f"INSIDE://{SERVICES['handler']['environment']['SAMEFOLD_KAFKA_BOOTSTRAP']}" in advertised


@pytest.mark.parametrize("name", [name for name in OURS if "entrypoint" not in OURS[name]])
def test_a_services_command_is_one_of_the_command_lines(name: str) -> None:
    """Parsed by the command line itself, options too; `--help` at the end keeps it from being run."""
    done = CliRunner().invoke(build(), [*SERVICES[name]["command"], "--help"])
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize("name", OURS)
def test_a_services_settings_exist(name: str) -> None:
    environment: dict[str, str] = SERVICES[name]["environment"]
    ours = {key.removeprefix(PREFIX).lower() for key in environment if key.startswith(PREFIX)}
    assert {"kafka_bootstrap"} <= ours <= set(Settings.model_fields)
    file = "database_url_file"
    Settings(**{key: environment[PREFIX + key.upper()] for key in ours - {file}})
    assert (file in ours) == bool(mounted(name))


def test_each_service_gets_its_own_secret_and_no_other() -> None:
    url = "samefold_database_url"
    assert {name: mounted(name) for name in SERVICES} == {
        "kafka": {},
        "postgres": {"postgres": "postgres"},
        "topics": {},
        "roles": {url: "admin"} | {role: role for role in ROLES},
        "migrate": {url: "migrator"},
        "handler": {url: "handler"},
        "agent": {url: "agent"},
        "policies": {url: "policy"},
        "publisher": {url: "policy"},
        "api": {url: "api"},
    }
    assert COMPOSE["secrets"] == {name: {"file": f".secrets/{name}"} for name in ("postgres", "admin", *ROLES)}
    for ignored in (".gitignore", ".dockerignore"):
        assert {".secrets", ".secrets/"} & set((ROOT / ignored).read_text().splitlines())


def test_the_commands_above_make_the_secrets(tmp_path: Path) -> None:
    files = make_secrets(tmp_path)
    assert set(files) == set(COMPOSE["secrets"])
    postgres = SERVICES["postgres"]["environment"]
    target = f"host=postgres dbname={postgres['POSTGRES_DB']} user="
    assert files["admin"].read_text() == f"{target}{postgres['POSTGRES_USER']} password={files['postgres'].read_text()}"
    for role in ROLES:
        assert re.fullmatch(rf"{target}samefold_{role} password=[0-9a-f]{{48}}\n", files[role].read_text())
        assert files[role].stat().st_mode & 0o077 == 0


def make_secrets(folder: Path) -> dict[str, Path]:
    """By the commands in the file's head."""
    lines = [line[6:] for line in (ROOT / "docker-compose.yml").read_text().splitlines() if line.startswith("#     ")]
    assert lines.pop() == "docker compose up --build"
    subprocess.run(["sh", "-ec", "\n".join(lines)], cwd=folder, check=True)
    return {file.name: file for file in (folder / ".secrets").iterdir()}


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_has_no_right_that_it_does_not_need(name: str) -> None:
    service = SERVICES[name]
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert "privileged" not in service
    if name in OURS:
        assert (service["read_only"], service["tmpfs"]) == (True, ["/tmp"])
        assert re.fullmatch(r"\$\{SAMEFOLD_USER:-[1-9]\d+:[1-9]\d+\}", service["user"])
    assert ("cap_add" in service) == (name == "postgres")


def test_the_image_runs_as_a_user_without_rights_and_holds_no_tool_and_no_secret() -> None:
    last = (ROOT / "Dockerfile").read_text().split("\nFROM ")[-1]
    assert re.search(r"^USER [1-9]\d*:[1-9]\d*$", last, re.MULTILINE)
    assert re.search(r"^RUN pip uninstall .*setuptools wheel pip$", last, re.MULTILINE)
    assert not re.search("(PASSWORD|SECRET|TOKEN|KEY)", last)
    ignored = set((ROOT / ".dockerignore").read_text().splitlines())
    assert {".git", ".env", ".secrets", ".samefold", ".venv", "tests"} <= ignored


def test_ports_are_open_to_this_machine_only_since_nobody_is_asked_who_he_is() -> None:
    ports = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert len(ports) == 3
    assert all(re.fullmatch(r"127\.0\.0\.1:\d+:\d+", port) for port in ports)
    assert {name for name in OURS if "SAMEFOLD_AUTH" in OURS[name]["environment"]} == {"api"}
    Settings(api_host="0.0.0.0", auth=OURS["api"]["environment"]["SAMEFOLD_AUTH"])


def test_images_are_pinned_and_those_of_kafka_and_postgres_are_what_the_tests_run_on() -> None:
    used = [service["image"] for service in SERVICES.values()]
    stages = re.findall(r"^FROM (\S+)(?: AS (\S+))?", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    used += [image for image, _ in stages if image not in [name for _, name in stages]]
    assert len(used) == len(SERVICES) + 1
    assert all(re.fullmatch(r"[a-z/]+:\d+(\.\d+)*(-[a-z-]+)?", image) for image in used)
    assert SERVICES["kafka"]["image"] == f"apache/kafka:{KAFKA}"
    assert SERVICES["postgres"]["image"] == f"postgres:{VERSION}"


def test_the_databases_settings_exist_and_are_explained() -> None:
    program, *options = SERVICES["postgres"]["command"]
    assert (program, set(options[::2])) == ("postgres", {"-c"})
    known = subprocess.run([binaries() / "postgres", "--describe-config"], capture_output=True, text=True, check=True)
    assert {one.partition("=")[0] for one in options[1::2]} <= {
        line.partition("\t")[0] for line in known.stdout.splitlines()
    }
    page = (ROOT / "docs" / "operating.md").read_text()
    assert [one for one in options[1::2] if f"`{one}`" not in page] == []


def test_no_secret_is_in_an_environment() -> None:
    names = [key for service in SERVICES.values() for key in service["environment"]]
    assert [name for name in names if re.search("PASSWORD|SECRET|TOKEN|URL", name)] == [
        "POSTGRES_PASSWORD_FILE",
        *["SAMEFOLD_DATABASE_URL_FILE"] * (len(OURS) - 1),
    ]


@pytest.mark.parametrize("name", OURS)
def test_a_service_starts_after_what_it_needs_is_ready(name: str) -> None:
    for needed, how in SERVICES[name]["depends_on"].items():
        if "healthcheck" in SERVICES[needed]:
            assert how == {"condition": "service_healthy"}
        else:
            assert how == {"condition": "service_completed_successfully"}
            assert "restart" not in SERVICES[needed]  # one that is restarted never completes
    assert SERVICES[name]["depends_on"]
