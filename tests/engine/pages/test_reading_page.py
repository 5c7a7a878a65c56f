"""make test: one API.

`docs/reading.md` is sent, block by block, and the answers are what it shows."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

import httpx
import pytest

from api.problems import KINDS, kind_of
from commands.client import read_lines
from infra.errors import SamefoldError
from infra.log import topics
from infra.settings import Settings
from projections.engine.views.token import Token
from tests.engine.api.api import Api, everything
from tests.engine.spine import send
from tools.testing.fixtures import ROOT
from tools.testing.waiting import until

PAGE = (ROOT / "docs" / "reading.md").read_text()
BLOCKS = re.findall(r"^```(http|sse|jsonl)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def api(shared_world: Settings, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """The accounts of the page are there, and all of the log is folded."""
    file = tmp_path_factory.mktemp("page") / "commands.jsonl"
    [lines] = [text for language, text in BLOCKS if language == "jsonl"]
    file.write_text(lines)
    with everything(shared_world) as api:
        commands = list(read_lines(Path(file)).values())
        send(shared_world, *commands)
        until(lambda: all(has_outcome(api, one.stream, one.id) for one in commands), "all have their outcomes")
        yield api


def has_outcome(api: Api, stream: str, key: str) -> bool:
    context, _, name = stream.partition("/")
    return api.client.get(f"/outcomes/{context}/{name.replace('/', '%2F')}/{key}").status_code == 200


def matches(shown: Any, found: Any) -> bool:
    """`…` stands for any text, and as a member for all others."""
    if isinstance(shown, dict) and isinstance(found, dict):
        if "…" in shown:
            return all(name in found and matches(value, found[name]) for name, value in shown.items() if name != "…")
        return shown.keys() == found.keys() and all(matches(value, found[name]) for name, value in shown.items())
    if isinstance(shown, list) and isinstance(found, list):
        return len(shown) == len(found) and all(map(matches, shown, found))
    if isinstance(shown, str) and isinstance(found, str):
        return re.fullmatch(re.escape(shown).replace("…", ".+"), found) is not None
    return type(shown) is type(found) and bool(shown == found)


def headers_of(lines: list[str]) -> dict[str, str]:
    return dict(line.split(": ", 1) for line in lines)


def test_the_page_shows_what_is_answered(api: Api, shared_world: Settings) -> None:
    topic = topics.describe(shared_world, shared_world.events_topic)
    known = {"ahead": str(Token.of(topic.id, {0: 10**12}))}
    for language, text in BLOCKS:
        if language == "jsonl":
            continue
        for name, value in known.items():
            text = text.replace(f"{{{name}}}", value)  # noqa: PLW2901
        if language == "sse":
            check_events(api, text)
        else:
            answer = check(api, text)
            known |= noted(answer)


def noted(answer: httpx.Response) -> dict[str, str]:
    """What later blocks send back."""
    known = {"etag": answer.headers["ETag"]} if "ETag" in answer.headers else {}
    body = answer.json() if answer.content else {}
    return known | {name: body[name] for name in ("next", "position") if body.get(name)}


def check(api: Api, text: str) -> httpx.Response:
    asked, shown = text.split("\n\n", 1)
    first, *sent = asked.splitlines()
    method, _, path = first.partition(" ")
    status, *rest = shown.splitlines()
    headers = list(takewhile(lambda line: not line.startswith("{"), rest))
    answer = api.client.request(method, path, headers=headers_of(sent))
    assert answer.status_code == int(status), f"{path}: {answer.text}"
    for name, value in headers_of(headers).items():
        assert matches(value, answer.headers.get(name)), f"{path}: {name} is {answer.headers.get(name)}"
    body = rest[len(headers) :]
    assert bool(body) == bool(answer.content)
    if body:
        assert matches(json.loads(body[0]), answer.json()), f"{path} answers {answer.text}"
    return answer


def check_events(api: Api, text: str) -> None:
    asked, shown = text.split("\n\n", 1)
    first, *sent = asked.splitlines()
    with api.client.stream("GET", first.removeprefix("GET "), headers=headers_of(sent)) as answer:
        lines = (line for line in answer.iter_lines() if line.partition(":")[0] in ("event", "id", "data"))
        found = headers_of([next(lines) for _ in range(3)])
    wanted = headers_of(shown.splitlines())
    assert matches(json.loads(wanted.pop("data")), json.loads(found.pop("data"))), found
    assert matches(wanted, found), found


def test_each_code_in_the_table_has_the_status_that_it_says() -> None:
    rows = re.findall(r"^\| (\d{3}) \| (.*?) \|", PAGE, re.MULTILINE)
    codes = [(int(status), code) for status, names in rows for code in re.findall(r"`([a-z-]+)`", names)]
    assert len(codes) > 10
    named = {error.code: kind_of(error).status for error in named_errors(SamefoldError)}
    for status, code in codes:
        assert status == (KINDS[code].status if code in KINDS else named[code]), code


def named_errors(root: type[SamefoldError]) -> Iterator[type[SamefoldError]]:
    for error in root.__subclasses__():
        yield error
        yield from named_errors(error)
