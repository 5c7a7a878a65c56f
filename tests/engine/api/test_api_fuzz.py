"""make test-all: hundreds of generated requests take seconds.

schemathesis reads the API's own document and asks what it allows, and what it does not: answers must be those it promises.
"""

from __future__ import annotations

import json
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from typing import Any
from urllib.parse import quote, unquote, urlsplit

import hypothesis
import jsonschema_rs
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase
from hypothesis.errors import Unsatisfiable
from hypothesis.strategies import SearchStrategy
from schemathesis import Case, GenerationMode
from schemathesis.core.result import Ok
from schemathesis.core.transport import Response
from schemathesis.schemas import APIOperation, BaseSchema

from infra.settings import Settings
from tests.engine.api.api import Api
from tests.engine.api.evidence import Told, contradictions, told, witnesses
from tests.engine.api.test_api_views import subscribed
from tools.testing.fixtures import SEED
from tools.testing.waiting import DEADLINE_S

EXAMPLES = 6
"""Of each operation, valid and invalid each."""
LONGEST = 190
"""Bytes, with room for a context before them."""
EVENT_STREAM = "text/event-stream"

TAKEN = ["2xx", "3xx", "404", "409", "412", "429"]
"""What may be answered to what the document allows: 412, because a version may be expected that is not there."""
CONFIG = {"checks": {"positive_data_acceptance": {"expected-statuses": TAKEN}}}

MARKS = pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings(
        # handler, agent and API draw from it meanwhile, in their threads
        "ignore:Do not use the `random` module inside strategies:hypothesis.errors.HypothesisDeprecationWarning"
    ),
]

Operation = APIOperation[Any, Any, Any, Any]
Document = dict[str, Any]


class Asked:
    """Sends generated cases over one connection; keeps the answers to commands."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.session = requests.Session()
        self.session.trust_env = False
        self.told: list[Told] = []
        self.statuses: Counter[int] = Counter()

    def call(self, case: Case[Any]) -> Response:
        if case.method == "GET":
            case.headers.pop("Prefer", None)  # to wait for what never comes
        _as_meant(case)
        response = case.call(base_url=self.url, session=self.session, timeout=DEADLINE_S)
        self.statuses[response.status_code] += 1
        key = response.headers.get("idempotency-key")
        if response.request.method == "POST" and key:
            _, context, stream_id, *_ = urlsplit(str(response.request.url)).path.split("/")
            stream = f"{context}/{unquote(stream_id)}"
            self.told.append(told(stream, json.loads(key[0]), response.status_code, json.loads(response.content)))
        return response

    def validate(self, case: Case[Any]) -> None:
        """Raises FailureGroup when the answer is not as the document has it."""
        case.validate_response(self.call(case))


def _as_meant(case: Case[Any]) -> None:
    """What no schema can say of a valid case.

    These headers exclude each other; a key belongs to one command; a cursor is that of an earlier answer; pages are sorted by a
    column once; a name's length is
    counted in bytes, and must look like no other; and 991.0, an integer to JSON Schema, is none to us: money is never a float.
    """
    if case.meta is None or not case.meta.generation.mode.is_positive:
        return
    for name, value in case.path_parameters.items():
        if isinstance(value, str):
            plain = unquote(value)
            cut = plain[: LONGEST // 4] if len(value.encode(errors="replace")) > LONGEST else plain
            clear = _clear(cut)
            if clear != plain:
                case.path_parameters[name] = clear if value == plain else quote(clear, safe="")
    if "If-Match" in case.headers:
        case.headers.pop("If-None-Match", None)
    if "Idempotency-Key" in case.headers:
        case.headers["Idempotency-Key"] = f'"{next(_keys)}"'
    case.query.pop("cursor", None)
    if sort := case.query.get("sort"):  # as a list, or with commas already
        names = sort if isinstance(sort, list) else str(sort).split(",")
        once = {name.removeprefix("-"): name for name in names}.values()
        case.query["sort"] = list(once) if isinstance(sort, list) else ",".join(once)
    if isinstance(case.body, dict):
        case.body = {name: _whole(value) for name, value in case.body.items()}


def _clear(name: str) -> str:
    """A name that looks like no other."""
    seen = "".join(one for one in name if unicodedata.category(one) != "Cf")
    return unicodedata.normalize("NFC", " ".join(seen.split())) or "x"


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


_keys = count()


def each(strategy: SearchStrategy[Case[Any]], check: Callable[[Case[Any]], None], examples: int = EXAMPLES) -> None:
    health, phases = list(HealthCheck), [Phase.generate]

    @hypothesis.seed(SEED)
    @hypothesis.settings(
        max_examples=examples, deadline=None, database=None, phases=phases, suppress_health_check=health
    )
    @hypothesis.given(case=strategy)
    def one(case: Case[Any]) -> None:
        check(case)

    one()


@pytest.fixture(scope="module")
def asked(api: Api, shared_world: Settings) -> Iterator[Asked]:
    """All answers are compared with the log in the end: no refused request had an effect."""
    asked = Asked(api.url)
    yield asked
    asked.session.close()
    assert contradictions(asked.told, witnesses(shared_world)) == []


@pytest.fixture(scope="module")
def document(api: Api) -> Document:
    found: Document = api.get("/openapi.json").json()
    return found


def schema_of(document: Document) -> BaseSchema:
    """Without what never ends, streams of server-sent events, and without position tokens.

    The pattern of a token repeats what repeats, and to make one up takes a generator longer than all the rest.
    """
    paths = {path: item for path, item in document["paths"].items() if EVENT_STREAM not in str(item)}
    config = schemathesis.Config.from_dict(CONFIG | {"seed": SEED})
    return schemathesis.openapi.from_dict(document | {"paths": _without_tokens(paths)}, config=config)


def _without_tokens(paths: Document) -> Document:
    copy: Document = json.loads(json.dumps(paths))
    for path in copy.values():
        for operation in path.values():
            operation["parameters"] = [one for one in operation.get("parameters", ()) if one["name"] != "after"]
    return copy


def operations(document: Document) -> Iterator[Operation]:
    for result in schema_of(document).get_all_operations():
        assert isinstance(result, Ok)
        yield result.ok()


def has_input(document: Document, operation: Operation) -> bool:
    return bool({"parameters", "requestBody"} & document["paths"][operation.path][operation.method].keys())


def test_what_the_document_allows_is_answered_as_it_promises(document: Document, asked: Asked) -> None:
    before = asked.statuses.copy()
    for operation in operations(document):
        each(operation.as_strategy(generation_mode=GenerationMode.POSITIVE), asked.validate)
    statuses = (asked.statuses - before).keys()
    assert {200, 404} <= statuses
    assert {409, 412} & statuses


def test_what_the_document_does_not_allow_is_refused_as_it_promises(document: Document, asked: Asked) -> None:
    before = asked.statuses.copy()
    tried = set()
    for operation in operations(document):
        if has_input(document, operation):
            with suppress(Unsatisfiable):  # it found nothing that would be wrong
                each(operation.as_strategy(generation_mode=GenerationMode.NEGATIVE), asked.validate)
                tried.add(operation.path)
    assert {path for path, item in document["paths"].items() if "post" in item} <= tried
    assert {400, 422} <= (asked.statuses - before).keys()


def test_the_document_s_own_examples_work(document: Document, asked: Asked) -> None:
    before, shown = asked.statuses.copy(), 0
    for operation in operations(document):
        for strategy in operation.get_strategies_from_examples():
            each(strategy, asked.validate, 1)
            shown += 1
    assert shown >= sum("post" in path for path in document["paths"].values()), "every command has an example"
    assert not {400, 422} & (asked.statuses - before).keys()


def test_states_that_are_sent_live_are_as_the_document_has_them(document: Document, api: Api, asked: Asked) -> None:
    opened = api.open("somebody")
    asked.told.append(told("accounts/somebody", "somebody", opened.status_code, opened.json()))
    content = document["paths"]["/views/balances/{account}/live"]["get"]["responses"]["200"]["content"]
    schema = content[EVENT_STREAM]["itemSchema"]["properties"]["data"]["contentSchema"]
    schema |= {"components": document["components"]}  # which it refers to
    states = {}
    for who in ("somebody", "nobody"):
        with subscribed(api, f"/views/balances/{who}/live") as live:
            states[who] = live.next().data
    assert states["somebody"]["row"]["cents"] == 0
    assert "row" not in states["nobody"]
    for state in states.values():
        jsonschema_rs.validate(schema, state)
    assert not jsonschema_rs.is_valid(schema, {"row": {}, "position": "1"})
