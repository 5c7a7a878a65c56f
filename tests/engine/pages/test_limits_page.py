"""make test: files only.

docs/limits.md: each row's default is that of the setting or constant it names, and each limit of the API has a row."""

from __future__ import annotations

import re
from importlib import import_module

import pytest

from api import server
from api.problems import KINDS, UNAVAILABLE, kind_of
from api.view_reader import PositionNotReached
from infra.settings import Settings
from tools.testing.fixtures import ROOT

PAGE = (ROOT / "docs" / "limits.md").read_text()
ROWS = re.findall(r"^\| (.+?) \| ([\d,.]+) \| `([\w.]+)` \| (.+?) \|$", PAGE, re.MULTILINE)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[2])
def test_each_default_is_that_of_the_code(row: tuple[str, str, str, str]) -> None:
    _, default, name, _ = row
    module, _, constant = name.rpartition(".")
    found = getattr(import_module(module), constant) if module else Settings.model_fields[name].default
    assert float(default.replace(",", "")) == found


def test_each_code_that_is_named_is_a_problem() -> None:
    codes = {code for *_, beyond in ROWS for code in re.findall(r"\d{3} `([a-z-]+)`", beyond)}
    assert len(codes) >= 10
    assert codes <= KINDS.keys() | {kind.code for kind in (*UNAVAILABLE, kind_of(PositionNotReached))}


def test_no_limit_of_the_api_is_left_out() -> None:
    names = {name for _, _, name, _ in ROWS}
    limits = {name for name in Settings.model_fields if name.startswith("api_max_")}
    limits |= {f"api.server.{name}" for name in vars(server) if name.startswith("MAX_")}
    assert limits <= names
    assert len(ROWS) == len(re.findall(r"^\| [^|]+ \| \d", PAGE, re.MULTILINE)), "each row can be read"
