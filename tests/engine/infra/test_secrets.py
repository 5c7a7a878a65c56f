"""make test: settings and commands need one process, and what a process shows is quickly seen.

Secrets come from files, each process gets its own, and nothing that is printed holds one.
"""

from __future__ import annotations

import json
import sys
import traceback
from base64 import b64encode
from pathlib import Path

import psutil
import pytest
from pydantic import SecretStr

from infra.errors import BadSettings
from infra.processes.supervisor import Child, Supervisor
from infra.settings import PREFIX, SECRETS, Settings
from tests.engine.api.front import free_port, is_ready
from tests.engine.api.raw_http import ask
from tests.engine.spine import beside
from tools import doctor
from tools.testing.fixtures import ROOT, Samefold
from tools.testing.waiting import DEADLINE_S, until

CANARY = "c4n4ry-s3cret"
SIGNING = "whsec_" + b64encode(f"{CANARY}-signs-webhooks".encode()).decode()
SOURCE = {"shop": {"secrets": [SIGNING]}}
ENDPOINT = {"billing": {"url": f"https://hooks.example.com/{CANARY}", "secret": SIGNING}}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def file_of(folder: Path, name: str, text: str) -> Path:
    file = folder / name
    file.write_text(text)
    file.chmod(0o600)
    return file


def test_every_secret_may_come_from_a_file() -> None:
    secret = {name for name, field in Settings.model_fields.items() if "SecretStr" in repr(field.annotation)}
    assert secret | {"webhooks", "sources"} == set(SECRETS), "an endpoint holds two, and a source some"
    assert {f"{name}_file" for name in SECRETS} <= set(Settings.model_fields)


@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_a_secret_is_the_whole_file_without_its_last_newline(
    end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "password"
    file.write_bytes(f" {CANARY} \nä{end}".encode())
    monkeypatch.setenv("SAMEFOLD_KAFKA_SASL_PASSWORD_FILE", str(file))
    monkeypatch.setenv("SAMEFOLD_KAFKA_SASL_USERNAME", f"handler{end}")
    assert Settings().kafka_sasl_password == SecretStr(f" {CANARY} \nä")
    assert Settings().kafka_sasl_username == "handler", "it comes from a Secret of Kubernetes, as a variable"


def test_a_file_in_dot_env_is_relative_to_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infra.settings.SERVICE", tmp_path / "pyproject.toml")
    file_of(tmp_path, "url", "host=h")
    (tmp_path / ".env").write_text("SAMEFOLD_DATABASE_URL_FILE=url\n")
    (tmp_path / "domain").mkdir()
    monkeypatch.chdir(tmp_path / "domain")
    assert (Settings().database, Settings().database_url_file) == ("host=h", tmp_path / "url")


URL, URL_FILE, HOOKS_FILE = "DATABASE_URL", "DATABASE_URL_FILE", "WEBHOOKS_FILE"
HERE = {
    "good": CANARY,
    "empty": "\n",
    "binary": f"{CANARY}\xff",
    "hooks": json.dumps({"billing": {"url": CANARY, "secret": CANARY, "timeout_s": CANARY}}),
    "folder/file": CANARY,
}
"""Files in the working directory, in Latin-1."""
WRONG = {
    "a value and a file": (
        {URL: CANARY, URL_FILE: "good"},
        "SAMEFOLD_DATABASE_URL is given twice: by the file .* and as a value",
    ),
    "no file": ({URL_FILE: "none"}, "none can't be read: No such file"),
    "a folder as the file": ({URL_FILE: "folder"}, "can't be read: Is a directory"),
    "empty": ({URL_FILE: "empty"}, "is empty"),
    "not text": ({URL_FILE: "binary"}, "is not text in UTF-8"),
    "not JSON": ({HOOKS_FILE: "good"}, "SAMEFOLD_WEBHOOKS: it is not JSON"),
    "a wrong endpoint": ({HOOKS_FILE: "hooks"}, "SAMEFOLD_WEBHOOKS, billing, url: "),
    "no list": (
        {"SOURCES": json.dumps({"shop": {"secrets": CANARY}})},
        "SAMEFOLD_SOURCES, shop, secrets: write a list",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_file_is_refused_and_never_quoted(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, samefold: Samefold
) -> None:
    for name, content in HERE.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content.encode("latin-1"))
        (tmp_path / name).chmod(0o600)
    given, why = WRONG[case]
    for name, value in given.items():
        monkeypatch.setenv(PREFIX + name, value)
    with pytest.raises(BadSettings, match=why) as refused:
        Settings()
    told = traceback.TracebackException.from_exception(refused.value, capture_locals=False)
    assert CANARY not in f"{refused.value!r} {''.join(told.format())}"
    done = samefold("doctor", "--json")
    assert done.returncode != 0
    assert CANARY not in done.stdout + done.stderr


def test_the_doctor_names_a_file_that_everybody_may_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = file_of(tmp_path, "hooks", json.dumps(ENDPOINT))
    monkeypatch.setenv("SAMEFOLD_WEBHOOKS_FILE", str(file))

    def finding() -> doctor.Finding:
        return next(found for found in doctor.examine() if found.name == "files of secrets")

    assert finding().ok
    file.chmod(0o644)
    assert not finding().ok
    assert str(file) in finding().found
    assert "chmod 600" in finding().hint


def test_a_file_of_webhooks_that_only_an_earlier_release_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, samefold: Samefold
) -> None:
    """Where a deployment's other secrets are in the folder that was SAMEFOLD_SECRETS_DIR."""
    url = file_of(tmp_path, "samefold_database_url", "host=127.0.0.1 port=1")
    hooks = file_of(tmp_path, "samefold_webhooks", json.dumps(ENDPOINT))
    monkeypatch.setenv("SAMEFOLD_DATABASE_URL_FILE", str(url))
    monkeypatch.setenv("SAMEFOLD_KAFKA_BOOTSTRAP", "127.0.0.1:1")
    done = samefold("run", "policies", process_s=DEADLINE_S)
    assert done.returncode == 2
    assert f"bad-settings: The file {hooks} is not read" in done.stderr
    assert f"→ Set SAMEFOLD_WEBHOOKS_FILE={hooks}, or remove the file." in done.stderr
    assert f"The file {hooks} is not read" in samefold("doctor").stdout
    monkeypatch.setenv("SAMEFOLD_WEBHOOKS_FILE", str(hooks))
    Settings().require_webhooks_read()  # or it is refused


def test_another_process_is_told_the_file_and_not_the_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAMEFOLD_DATABASE_URL_FILE", str(file_of(tmp_path, "url", CANARY)))
    environment = Settings().environment()
    assert CANARY not in repr(environment)
    monkeypatch.chdir("/")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert Settings().database == CANARY


SHOWS = """
import os, time
print(*sorted(name for name, value in os.environ.items() if name.startswith("SAMEFOLD_") and value), flush=True)
time.sleep(600)
"""


def test_each_process_gets_only_the_secrets_that_it_uses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = file_of(tmp_path, "url", f"host=h password={CANARY}")
    monkeypatch.setenv("SAMEFOLD_DATABASE_URL_FILE", str(url))
    monkeypatch.setenv("SAMEFOLD_WEBHOOKS_FILE", str(file_of(tmp_path, "webhooks", json.dumps(ENDPOINT))))
    monkeypatch.setenv("SAMEFOLD_SOURCES_FILE", str(file_of(tmp_path, "sources", json.dumps(SOURCE))))
    monkeypatch.setenv("SAMEFOLD_MASTER_KEY_FILE", str(tmp_path / "master"))
    modules = {
        "commands.handler": set(),
        "projections.engine.live.agent": set(),
        "policies.engine.publisher": set(),
        "api": {"SAMEFOLD_MASTER_KEY_FILE", "SAMEFOLD_SOURCES_FILE"},
        "policies.engine.process": {"SAMEFOLD_MASTER_KEY_FILE", "SAMEFOLD_SOURCES_FILE", "SAMEFOLD_WEBHOOKS_FILE"},
    }
    programs = tmp_path / "programs"
    # a program in each one's place, which says what it was given
    for module in modules:
        path = programs.joinpath(*module.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(SHOWS)
        for package in path.relative_to(programs).parents:
            (programs / package / "__init__.py").touch()
    (programs / "infra").symlink_to(ROOT / "infra")
    children = [Child(module, module) for module in modules]
    supervisor = Supervisor(children, Settings().secret_files() | {"PYTHONPATH": str(programs)}, tmp_path)
    with beside(supervisor.run, supervisor.stop):
        for module, own in modules.items():
            log = tmp_path / f"{module}.log"
            until(lambda: log.is_file() and log.read_text().endswith("\n"), module)  # noqa: B023
            assert set(log.read_text().split()) == own | {"SAMEFOLD_DATABASE_URL_FILE"}


COMMANDS = [
    *("doctor", "doctor --json", "dev status --json", "dev run", "db upgrade", "views --json", "outbox list --json"),
    *("policies --json", "parked list --json", "verify --json", "run handler --name x --metrics-port none"),
]


@pytest.mark.parametrize("words", COMMANDS)
def test_no_command_shows_a_secret(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, samefold: Samefold
) -> None:
    """With services that are unreachable, so that libraries' own errors are shown as well."""
    values = {
        "KAFKA_BOOTSTRAP": "127.0.0.1:1",
        "KAFKA_SECURITY_PROTOCOL": "SASL_PLAINTEXT",
        "KAFKA_SASL_MECHANISM": "PLAIN",
        "KAFKA_SASL_USERNAME": "samefold",
        "KAFKA_SASL_PASSWORD": CANARY,
        "DATABASE_URL": f"postgresql://u:{CANARY}@127.0.0.1:1/d",
        "WEBHOOKS": json.dumps(ENDPOINT),
        "SOURCES": json.dumps(SOURCE),
        "DATA_DIR": str(tmp_path),
    }
    for name, value in values.items():
        monkeypatch.setenv(PREFIX + name, value)
    done = samefold(*words.split())
    shown = done.stdout + done.stderr
    assert shown
    assert CANARY not in shown
    assert SIGNING not in shown


def test_a_running_process_shows_no_secret(world: Settings, tmp_path: Path) -> None:
    """Neither in its arguments nor in its environment nor in its log, which holds events alone, if the secret is in a file."""
    url = file_of(tmp_path, "url", f"{world.database}&password={CANARY}")
    others = world.model_dump(include=world.model_fields_set - {"database_url"})
    settings = Settings(
        **others | {"database_url_file": url, "data_dir": tmp_path, "log_level": "DEBUG", "log_format": "json"}
    )
    port = free_port()
    children = [
        Child("handler", "commands.handler", ("--name", "h")),
        Child("agent", "projections.engine.live.agent", ("--agent", "core", "--name", "a")),
        Child("api", "api", ("--name", "i", "--port", str(port))),
    ]
    logs = [tmp_path / f"{child.name}.log" for child in children]
    environment = settings.environment() | {"PYTHONPATH": str(ROOT)}
    supervisor = Supervisor(children, environment, tmp_path, metrics_port=0)
    with beside(supervisor.run, supervisor.stop):
        until(lambda: is_ready(f"http://127.0.0.1:{port}"), "all work")
        assert ask(port, f"GET / HTTP/1.1\r\n{CANARY}\r\n\r\n".encode()).status == 400
        for child in children:
            process = psutil.Process(child.pid)
            assert sys.executable in process.cmdline()[0]
            assert CANARY not in repr(process.cmdline()) + repr(process.environ())
    lines = [line for log in logs for line in log.read_text().splitlines()]
    assert [line for line in lines if CANARY in line] == []
    events = [json.loads(line) for line in lines]
    assert all({"time", "level", "logger", "message"} <= event.keys() for event in events)
    assert {"uvicorn.error", "commands.handler", "projections.engine.live.agent"} <= {one["logger"] for one in events}
