"""make test: a query takes milliseconds. `docs/queries.md` shows the sample's query, and its test passes."""

from typing import Any

from infra.settings import Settings
from tests.engine.pages.pages import files
from tools.testing.fixtures import ROOT

SHOWN = dict(files((ROOT / "docs" / "queries.md").read_text()))


def test_the_page_shows_the_samples_query() -> None:
    name = "projections/queries/largest_accounts.py"
    assert SHOWN[name] == (ROOT / name).read_text()


def test_the_test_on_the_page_passes(world: Settings) -> None:
    names: dict[str, Any] = {}
    exec(SHOWN["tests/test_who_holds_most.py"], names)
    names["test_small_owners_do_not_come"](world)
