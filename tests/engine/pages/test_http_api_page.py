"""make test + test-all: one API; what stops it takes longer.

docs/http-api.md is executed: every request on it, in its order, with the answer that its arrows promise."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import pytest
from pydantic import SecretStr

from api import commands, problems
from api.stores import HealthSnapshot
from api.waits import TOO_MANY_WAIT, Slots
from domain.engine.contexts import contexts
from infra.access import Access, Row
from infra.settings import Settings
from projections.engine.views.core_views import all_views
from tests.engine.api.api import Api, Producer, everything, serving
from tools.testing.fixtures import ROOT
from tools.testing.waiting import until

PAGE = (ROOT / "docs" / "http-api.md").read_text()


class Block(NamedTuple):
    """One request of the page, and what its answer must be."""

    arrangement: str
    method: str
    path: str
    headers: list[tuple[str, str]]
    body: bytes
    status: int
    word: str
    answered: list[tuple[str, str]]


def blocks() -> list[Block]:
    return [_block(text) for text in re.findall(r"^```http\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)]


def _block(text: str) -> Block:
    lines = text.splitlines()
    arrangement = lines.pop(0).removeprefix("# ") if lines[0].startswith("# ") else ""
    method, path = lines.pop(0).split(" ")
    arrows = [line.removeprefix("→ ") for line in lines if line.startswith("→ ")]
    head, _, body = "\n".join(["", *(line for line in lines if not line.startswith("→ "))]).partition("\n\n")
    headers = [(name, value) for name, _, value in (line.partition(": ") for line in head.splitlines() if line)]
    status, word = arrows[0].split(" ")
    answered = [(name, value) for name, _, value in (arrow.partition(": ") for arrow in arrows[1:])]
    return Block(arrangement, method, path, headers, body.strip().encode(), int(status), word, answered)


@pytest.mark.slow
def test_every_request_of_the_page_is_answered_as_it_says(world: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    found = blocks()
    assert len(found) > 25
    with everything(world, access=Access(lambda *_: False, lambda *_: False)) as api:
        for block in found:
            with ExitStack() as stack:
                patch = stack.enter_context(monkeypatch.context())
                _answered(*arranged(block, api, world, stack, patch))


def test_the_page_sends_what_leads_to_every_answer_that_the_document_promises_for_commands(api: Api) -> None:
    by_chance = {"stopping", "command-not-live"}
    document = api.client.get("/openapi.json").json()
    promised = [
        response
        for operations in document["paths"].values()
        for response in operations.get("post", {}).get("responses", {}).items()
    ]
    codes = {
        code for status, one in promised if status != "409" for code in re.findall(r"`([a-z-]+)`", one["description"])
    }
    found = blocks()
    assert {int(status) for status, _ in promised} <= {block.status for block in found}
    assert codes - {"code", "appended"} - by_chance <= {block.word for block in found}


def test_people_see_the_document_without_anything_from_elsewhere(api: Api) -> None:
    page = api.client.get("/docs")
    assert page.status_code == 200
    files = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert any(file.endswith(".js") for file in files)
    for file in files:
        assert file.startswith("/")
        assert api.client.get(file).status_code == 200
    assert "url: '/openapi.json'" in page.text


def test_every_kind_of_problem_is_explained() -> None:
    explained = PAGE + "".join((ROOT / "docs" / name).read_text() for name in ("reading.md", "access.md"))
    assert [code for code in problems.KINDS if f"`{code}`" not in explained] == []


def _answered(api: Api, block: Block) -> None:
    headers = list(block.headers)
    if block.method == "POST" and not any(name == "Content-Type" for name, _ in headers):
        headers.append(("Content-Type", "application/json"))
    answer = api.client.request(block.method, block.path, headers=headers, content=block.body)
    told = answer.json()
    word = told.get("outcome") if answer.is_success and "outcome" in told else told.get("code")
    assert (answer.status_code, word) == (block.status, block.word), (block, told)
    for name, value in block.answered:
        assert answer.headers[name] == value, block


def arranged(block: Block, api: Api, world: Settings, stack: ExitStack, patch: pytest.MonkeyPatch) -> tuple[Api, Block]:
    """The API in the situation that the block begins with."""
    match block.arrangement:
        case "":
            return api, block
        case "while no handler decides":
            patch.setattr(api.services.outcomes, "_due", _Nothing())
            return api, block
        case "with a body of 300000 bytes":
            return api, block._replace(body=b" " * 300_000)
        case "while the read model is far behind":
            patch.setattr(HealthSnapshot, "behind", lambda *_: 10**6)
            return api, block
        case "while too many requests wait":
            patch.setattr(api.services, "places", Slots(0, TOO_MANY_WAIT, appended="no"))
            return api, block
        case "as a caller without the right":
            return api, block._replace(headers=[*block.headers, ("Caller", "eve")])
        case "while access.py names a view that does not exist":
            patch.setattr(api.services, "access", Access(lambda *_: Row("nothing"), lambda *_: False))
            return api, block._replace(headers=[*block.headers, ("Caller", "eve")])
        case "while `decide` fails":
            stack.enter_context(_failing_business())
            return api, block
        case "while the API itself fails":
            patch.setattr(commands, "fingerprint_of", _fail)
            return api, block
        case "while Kafka is unavailable":
            return stack.enter_context(_lacking(world, "kafka", kafka_bootstrap="127.0.0.1:1")), block
        case "while PostgreSQL is unavailable":
            nowhere = SecretStr("postgresql://127.0.0.1:1/nowhere")
            return stack.enter_context(_lacking(world, "database", database_url=nowhere)), block
        case "while an append is not acknowledged":
            patch.setattr(api.services.appender._producer, "now", Producer())
            return api, block._replace(headers=[*block.headers, ("Prefer", "wait=1")])
        case "while an append can't be queued":
            patch.setattr(api.services.appender._producer, "now", Producer(BufferError("full")))
            return api, block
        case "while another version of the write model is live":
            stack.enter_context(_other_version(api, patch))
            return api, block
        case other:
            raise AssertionError(f"the page has an unknown situation: {other}")


class _Nothing(dict[Any, None]):
    """Keys that are due and never asked for."""

    def update(self, *_: Any, **__: Any) -> None:
        pass


def _fail(*_: Any) -> None:
    raise RuntimeError("a defect")


@contextmanager
def _failing_business() -> Iterator[None]:
    context = contexts()["accounts"]
    decide = context.decide
    object.__setattr__(context, "decide", _fail)  # frozen, and the handler's too
    try:
        yield
    finally:
        object.__setattr__(context, "decide", decide)


@contextmanager
def _lacking(world: Settings, subject: str, **nowhere: Any) -> Iterator[Api]:
    with serving(world.model_copy(update=nowhere)) as api:
        if subject == "kafka":
            until(api.services.appender._connection.away.is_set, "it notices")
        else:
            until(lambda: subject in api.services.stores.failures, "it notices")
        yield api


@contextmanager
def _other_version(api: Api, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if this process were of older code than what is live; other processes' code stays."""
    newer = {name: view.version + 1 for name, view in all_views().items()}
    patch.setattr(api.services.stores, "_versions", newer)
    until(lambda: "views" in api.services.stores.failures, "it notices")
    yield
    patch.undo()
    until(lambda: "views" not in api.services.stores.failures, "it notices")
