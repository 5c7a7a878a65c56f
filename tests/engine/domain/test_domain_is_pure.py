"""make test: pure. What the check of a pure domain catches."""

from pathlib import Path

import pytest

import domain
from tools.testing.test_every_service import FORMATS, PURE, impurities


@pytest.mark.parametrize(
    "line",
    [
        "import time",
        "import os.path",
        "import random as chance",
        "from uuid import uuid4",
        "import logging",
        "from infra.settings import Settings",
        "import msgspec",
        "day = date.today()",
        "at = datetime.now(UTC)",
        "clock = datetime.now",
        "print(state)",
        "text = open('rates.json').read()",
        "__import__('os')",
    ],
)
def test_the_check_catches(line: str) -> None:
    source = Path(domain.__path__[0], "accounts.py").read_text() + f"\ndef decide_otherwise():\n    {line}\n"
    assert len(list(impurities(source))) == 1


def test_a_field_with_a_builtins_name_is_no_call() -> None:
    assert list(impurities("@fact\nclass HouseOpened:\n    open: bool\n    print: Text\n")) == []


def test_a_source_may_read_other_formats_and_no_file() -> None:
    pure = PURE | FORMATS
    assert list(impurities("import csv, json, zlib\nfrom struct import unpack\n", pure)) == []
    assert list(impurities("import gzip\nfrom io import open\n", pure)) == ["line 1: gzip", "line 2: io"]
