"""make test-all: one copy of the tree; its service takes longer.

A new command is one file in `domain/` and its test: such a tree's API has its route, fields, refusals and their pages."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from api.app import create_app
from demo import tree
from demo.crew import Crew
from infra.settings import Settings
from infra.testing.fixtures import ROOT
from infra.testing.waiting import until
from tests.engine.api.front import free_port, is_ready
from tests.engine.pages.test_readme import blocks, section
from tests.engine.spine import set_up

pytestmark = pytest.mark.slow

ROUTE = "/accounts/{stream_id}/change-overdraft-limit"
REFUSAL = "balance-below-limit"
SENTENCE = "The account is overdrawn by more than the new limit allows."


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree to which the diff of docs/first-event.md was applied."""
    folder = tmp_path_factory.mktemp("changed")
    for package in tree.PACKAGES:
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    [diff] = blocks(section("Add an event"), "diff")
    assert re.findall(r"^\+\+\+ b/(.*)$", diff, re.MULTILINE) == [
        "domain/accounts.py",
        "tests/test_overdraft_limit.py",
    ]
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    subprocess.run(["git", "apply", "-"], cwd=folder, input=diff, text=True, check=True)
    return folder


@pytest.fixture(scope="module")
def client(shared_world: Settings, changed: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """Of a handler, an agent and an API that run the changed tree."""
    set_up(shared_world)
    logs, port = tmp_path_factory.mktemp("logs"), free_port()
    code = tree.environment(changed)
    with Crew(shared_world, logs, handler_count=1, agent_count=1, api_port=port, environment=code):
        url = f"http://127.0.0.1:{port}"
        until(lambda: is_ready(url), "the API is ready")
        with httpx.Client(base_url=url, timeout=20) as client:
            yield client


def test_nothing_of_it_is_there_before(shared_world: Settings) -> None:
    document = create_app(shared_world).openapi()
    assert ROUTE not in document["paths"]
    assert REFUSAL not in str(document)


def test_its_route_does_it_and_says_why_not(client: httpx.Client) -> None:
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


def test_the_document_has_its_fields_its_bounds_and_its_refusals(client: httpx.Client) -> None:
    document = client.get("/openapi.json").json()
    operation = document["paths"][ROUTE]["post"]
    body = resolved(document, operation["requestBody"]["content"]["application/json"]["schema"])
    assert body["properties"]["overdraft_limit"] | {"title": ""} == {
        "type": "integer",
        "minimum": 0,
        "maximum": 10**14,
        "title": "",
    }
    assert (sorted(body["required"]), body["additionalProperties"]) == (["on", "overdraft_limit"], False)
    assert operation["summary"] == "Change overdraft limit"
    assert REFUSAL in str(operation)
    assert SENTENCE in str(document)


def resolved(document: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    while reference := schema.get("$ref"):
        schema = document
        for name in reference.removeprefix("#/").split("/"):
            schema = schema[name]
    return schema
