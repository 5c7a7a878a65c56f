"""make test-all: hundreds of generated requests take seconds.

schemathesis asks all that the API's document allows, and what it does not, as several callers: no data without a right.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import cycle
from typing import Any

import pytest
from schemathesis import Case, GenerationMode

from infra.settings import Settings
from tests.engine.api.api import Api, everything
from tests.engine.api.test_api_fuzz import MARKS, Asked, Document, each, has_input, operations
from tests.engine.api.tokens import Keys, bearer, key_file, locked
from tools.testing.waiting import until

HOLDERS = ("ada", "bob")
EXAMPLES = 3

pytestmark = MARKS


@pytest.fixture(scope="module")
def keys() -> Keys:
    return Keys("https://issuer.example", one="ES256")


@pytest.fixture(scope="module")
def api(shared_world: Settings, keys: Keys, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """With an account of each holder, called as the holder, and a payment into it."""
    file = key_file(tmp_path_factory.mktemp("keys"), keys)
    with everything(locked(shared_world, keys, file, api_docs=True)) as api:
        until(lambda: api.get("/health/ready").status_code == 200, "the issuer's keys are read")
        for name in HOLDERS:
            teller = bearer(keys.token(sub="tess"))
            for sent in (
                api.post(name, "open-account", teller, overdraft_limit=0, owner=name),
                api.post(name, "deposit", teller, cents=5),
            ):
                assert sent.status_code == 200, sent.text
        yield api


@pytest.fixture(scope="module")
def document(api: Api) -> Document:
    found: Document = api.get("/openapi.json").json()
    return found


class AsCaller(Asked):
    """Asks about existing accounts, too; keeps the operations and what was shown."""

    def __init__(self, url: str, headers: dict[str, str]) -> None:
        super().__init__(url)
        self.headers = headers
        self.shown: list[tuple[str, Any]] = []
        self._accounts = cycle([*HOLDERS, None])

    def look(self, case: Case[Any]) -> None:
        case.headers.pop("Authorization", None)  # one that the generator has made up
        case.headers.update(self.headers)
        case.query.pop("fields", None)  # rows are shown whole, so that each names its owner
        account = next(self._accounts)
        for name in {"account", "account_id", "stream_id"} & case.path_parameters.keys() if account else ():
            case.path_parameters[name] = account
        response = self.call(case)
        assert response.status_code < 500, (case.path, response.status_code, response.content)
        if response.status_code == 200 and "/health/" not in case.path:
            self.shown.append((case.path, response.json()))


def rows(path: str, shown: Any) -> list[dict[str, Any]]:
    """What an answer shows of a view."""
    found = shown.get("items", [shown["row"]] if "row" in shown else []) if path.startswith("/views/") else []
    return list(found)


def asked_as(api: Api, document: Document, headers: dict[str, str]) -> AsCaller:
    asked = AsCaller(api.url, headers)
    for operation in operations(document):
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
            if mode.is_positive or has_input(document, operation):
                each(operation.as_strategy(generation_mode=mode), asked.look, EXAMPLES)
    asked.session.close()
    return asked


def test_without_a_token_of_the_issuer_nothing_is_told(api: Api, document: Document) -> None:
    """Signed by somebody else. What is no token at all is asked for in `test_door.py`."""
    asked = asked_as(api, document, bearer(Keys("https://issuer.example", one="ES256").token()))
    assert asked.shown == []
    assert asked.statuses.keys() <= {200, 401, 431}, "200 is that of the health checks"
    assert asked.statuses[401] > 100


def test_a_holder_is_told_of_its_own_accounts_only(api: Api, document: Document, keys: Keys) -> None:
    asked = asked_as(api, document, bearer(keys.token(sub="ada", roles=[])))
    owners = Counter(row["owner"] for path, shown in asked.shown for row in rows(path, shown))
    assert owners.keys() == {"ada"}
    assert {path.split("/")[2] for path, _ in asked.shown if path.startswith("/views/")} <= {"balances", "statement"}
    assert asked.statuses[403] > 0
