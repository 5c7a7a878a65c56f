"""make test + test-all: files only; other tools take longer.

What a service is made of is written down, and "no vulnerability is known" is said only where that was asked and answered."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import yaml

from tools.dev import audit, jars, sbom
from tools.testing.fixtures import ROOT

LOCKED = jars.locked()
VALID = """
import sys
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

sys.exit(JsonStrictValidator(SchemaVersion.V1_6).validate_str(sys.stdin.read()))
"""


def test_each_jar_has_one_licence() -> None:
    known = {
        name: [jar for jar in LOCKED if re.match(rf"{re.escape(name)}-\d[\d.-]*\.jar$", jar)]
        for name in sbom.licences()
    }
    assert {name for name, found in known.items() if len(found) != 1} == set()
    assert sorted(jar for [jar] in known.values()) == sorted(LOCKED)


def test_the_page_names_each_jar_that_is_not_under_apaches_licence() -> None:
    page = (ROOT / "docs" / "dependencies.md").read_text()
    others = {name: licence for name, (_, licence) in sbom.licences().items() if licence != "Apache-2.0"}
    assert dict(re.findall(r"^\| `([\w-]+)\.jar` \| ([^|]+) \|$", page, re.MULTILINE)) == others


@pytest.mark.slow
def test_the_sbom_names_each_package_and_jar_with_hashes_and_licence(tmp_path: Path) -> None:
    written = tmp_path / "sbom.cdx.json"
    command = [sys.executable, "-m", "tools.dev.sbom", str(written)]
    subprocess.run(command, cwd=ROOT, check=True, env={"PATH": "", "HTTPS_PROXY": "http://127.0.0.1:9"})
    text = written.read_text()
    valid = subprocess.run(
        [sbom.TOOLS / "python", "-c", VALID], input=text, text=True, check=False, capture_output=True
    )
    assert (valid.returncode, valid.stderr) == (0, "")
    components = {one["purl"]: one for one in json.loads(text)["components"]}
    pins = re.findall(
        r"^([a-z0-9-]+)==([^\s;]+)(?: ; (\S+ == 'win32'))?",
        (ROOT / "requirements" / "spark.txt").read_text(),
        re.MULTILINE,
    )
    assert len(components) == len(pins) + len(LOCKED)
    for name, version, _ in pins:
        component = components[f"pkg:pypi/{name}@{version}"]
        [files] = component["externalReferences"]
        assert files["hashes"], name
    unlicensed = {one["name"] for one in components.values() if not one["licenses"]}
    assert unlicensed <= {name for name, _, only in pins if only}, "they are installed nowhere here"
    by_hash = {one["hashes"][0]["content"]: one for one in components.values() if one["purl"].startswith("pkg:maven/")}
    assert set(by_hash) == set(LOCKED.values())
    assert {one["scope"] for one in by_hash.values()} == {"excluded"}, "they are for development and tests"
    assert json.loads(text)["metadata"]["component"]["name"] == "samefold"


def package(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "version": "1.0", "vulns": [], **more}


SKIPPED = {"name": "psycopg", "skip_reason": "Dependency not found on PyPI and could not be audited: psycopg (3.3.9)"}
VULNERABLE = package("typer", vulns=[{"id": "PYSEC-1", "fix_versions": ["1.1"]}])
ANSWERS = {
    "none": (
        0,
        json.dumps({"dependencies": [package("typer"), package("rich")]}),
        "2 packages: no vulnerability is known",
    ),
    "one": (1, json.dumps({"dependencies": [VULNERABLE]}), "typer 1.0: PYSEC-1, fixed in 1.1"),
    "one, and one was not checked": (
        1,
        json.dumps({"dependencies": [VULNERABLE, SKIPPED]}),
        "not checked: 1 of 2 packages: psycopg",
    ),
    "not one was checked": (2, json.dumps({"dependencies": [SKIPPED]}), "not checked: 1 of 1 packages: psycopg"),
    "there are no packages": (2, json.dumps({"dependencies": []}), "not checked: 0 of 0"),
    "no answer": (2, "", "not checked: the advisory service can't be reached"),
    "another answer": (2, "[1]", "not checked: the advisory service can't be reached"),
}


@pytest.mark.parametrize("answer", ANSWERS)
def test_only_what_was_asked_and_answered_is_called_checked(
    answer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, says, told = ANSWERS[answer]
    (tmp_path / "says").write_text(says)
    program = tmp_path / "pip-audit"
    program.write_text(f"#!/bin/sh\ncat {tmp_path / 'says'}\nexit 0\n")
    program.chmod(0o755)
    monkeypatch.setattr(audit, "TOOLS", tmp_path)
    assert audit.main([]) == code
    shown = capsys.readouterr().out
    assert told in shown
    assert ("no vulnerability is known" in shown) == (code == 0)


@contextmanager
def advisories(answer: bytes) -> Iterator[str]:
    """A service like OSV, which answers each question like this."""

    class Answers(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1/query"
        finally:
            server.shutdown()
            thread.join()


RANGE = {"type": "ECOSYSTEM", "events": [{"introduced": "0"}, {"fixed": "99"}]}
ADVISORY = {
    "id": "PYSEC-2026-1",
    "summary": "x",
    "affected": [{"package": {"name": "setuptools", "ecosystem": "PyPI"}, "ranges": [RANGE]}],
}


BUILD = ["-r", str(ROOT / "requirements" / "build.txt")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answer", "code"), [(b"{}", 0), (json.dumps({"vulns": [ADVISORY]}).encode(), 1), (b"<html>", 2)]
)
def test_the_audit_asks_the_service_that_it_is_given(
    answer: bytes, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with advisories(answer) as url:
        assert audit.main([*BUILD, "--osv-url", url]) == code
    assert ("fixed in 99" in capsys.readouterr().out) == (code == 1)


@pytest.mark.slow
def test_without_a_service_nothing_is_called_checked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    assert audit.main(BUILD) == 2
    assert "not checked" in capsys.readouterr().out


def test_updates_are_proposed_for_all_that_is_pinned() -> None:
    found = yaml.safe_load((ROOT / ".github" / "dependabot.yml").read_text())
    assert {(one["package-ecosystem"], one["directory"]) for one in found["updates"]} == {
        ("pip", "/requirements"),
        ("github-actions", "/"),
        ("docker", "/"),
        ("docker-compose", "/"),
    }
