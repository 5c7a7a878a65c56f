"""make test-all + prove: a service of one copy of the tree; the checks of that copy take a minute.

A new command is one file in `domain/` and its test: the API has its route, fields, refusals and their pages."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from api.app import create_app
from demo import tree
from demo.crew import Crew
from infra.settings import Settings
from tests.engine.api.front import free_port, is_ready
from tests.engine.pages.test_readme import blocks, section
from tests.engine.spine import set_up
from tests.engine.tools.service_trees import Tree
from tools.testing.waiting import DEADLINE_S, until

pytestmark = pytest.mark.slow

ROUTE = "/accounts/{stream_id}/change-overdraft-limit"
REFUSAL = "balance-below-limit"
SENTENCE = "The account is overdrawn by more than the new limit allows."


@pytest.fixture
def changed(source: Tree, home: Path, tmp_path: Path) -> Tree:
    """A copy of the tree to which the diff of docs/first-event.md was applied."""
    copy = Tree(Path(shutil.copytree(source.folder, tmp_path / "changed", symlinks=True)), home)
    [diff] = blocks(section("Add an event"), "diff")
    assert re.findall(r"^\+\+\+ b/(.*)$", diff, re.MULTILINE) == ["domain/accounts.py", "tests/test_overdraft_limit.py"]
    subprocess.run(["git", "apply", "-"], cwd=copy.folder, input=diff, text=True, check=True)
    return copy


def test_its_route_is_described_does_it_and_says_why_not(world: Settings, changed: Tree, tmp_path: Path) -> None:
    before = create_app(world).openapi()
    assert ROUTE not in before["paths"]
    assert REFUSAL not in str(before)
    set_up(world)
    port, code = free_port(), tree.environment(changed.folder)
    with (
        Crew(world, tmp_path / "logs", handler_count=1, agent_count=1, api_port=port, environment=code),
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=DEADLINE_S) as client,
    ):
        until(lambda: is_ready(str(client.base_url)), "the API is ready")
        _require_described(client.get("/openapi.json").json())

        def post(command: str, **data: Any) -> httpx.Response:
            return client.post(f"/accounts/ada/{command}", json=data | {"on": "2026-11-21"})

        assert post("open-account", overdraft_limit=500).status_code == 200
        assert post("withdraw", cents=300).status_code == 200
        assert post("change-overdraft-limit", overdraft_limit=300).json()["version"] == 3
        refused = post("change-overdraft-limit", overdraft_limit=299)
        assert (refused.status_code, refused.json()["code"]) == (409, REFUSAL)
        assert SENTENCE in refused.text
        assert post("withdraw", cents=1).json()["code"] == "insufficient-funds", "the new limit holds"
        assert post("change-overdraft-limit", overdraft_limit=-1).status_code == 422, "its bounds hold"
        assert post("change-overdraft-limit").status_code == 422, "its fields are required"

        changed.environment |= world.environment()
        line = {"stream": "accounts/ada", "id": "sent", "type": "ChangeOverdraftLimit"}
        (file := tmp_path / "more.jsonl").write_text(
            json.dumps(line | {"data": {"overdraft_limit": 400, "on": "2026-11-22"}})
        )
        assert "accepted 1, rejected 0" in changed.samefold("send", str(file), "--wait").stdout
        assert changed.samefold("history", "accounts/ada").stdout.count("OverdraftLimitChanged") == 2
        changed.samefold("verify", "--engine", "local")


def _require_described(document: dict[str, Any]) -> None:
    operation = document["paths"][ROUTE]["post"]
    body = operation["requestBody"]["content"]["application/json"]["schema"]
    while reference := body.get("$ref"):
        body = document
        for name in reference.removeprefix("#/").split("/"):
            body = body[name]
    field = {"type": "integer", "minimum": 0, "maximum": 10**14, "title": ""}
    assert body["properties"]["overdraft_limit"] | {"title": ""} == field
    assert (sorted(body["required"]), body["additionalProperties"]) == (["on", "overdraft_limit"], False)
    assert operation["summary"] == "Change overdraft limit"
    assert REFUSAL in str(operation)
    assert SENTENCE in str(document)


@pytest.mark.prove(part="new-services")
def test_its_own_test_and_the_checks_pass(changed: Tree) -> None:
    for checked in (
        ("pytest", "-q", "tests/test_overdraft_limit.py", "tests/test_accounts.py"),
        ("mypy", "domain", "tests/test_overdraft_limit.py"),
        ("ruff", "check", "domain", "tests/test_overdraft_limit.py"),
    ):
        changed.run(sys.executable, "-m", *checked)
