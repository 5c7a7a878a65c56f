"""Log lines: one an event, whatever the input holds."""

import logging

import pytest

from infra import logs


def test_input_can_not_forge_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    before = logging.root.handlers[:], logging.root.level
    try:
        logs.configure("INFO")
        logging.getLogger("x").info("stream %s", "accounts/a\n2026-01-01 00:00:00,000 ERROR   all is lost\r")
    finally:
        logging.root.handlers[:], logging.root.level = before
    assert capsys.readouterr().err.count("\n") == 1
