"""make test: needs no store. Bytes from outside are never unpickled, which would run whatever code they hold."""

from __future__ import annotations

import ast
import pickle
import re
from base64 import b64encode
from contextlib import suppress
from pathlib import Path
from typing import Any

import faust
import pytest
from faust.exceptions import KeyDecodeError, ValueDecodeError
from faust.serializers import codecs

from projections.engine.live import agent as _agent  # noqa: F401  # the process, which removes codecs
from tools.testing.fixtures import ROOT

OWN = {
    "spark_jobs.engine.task",
    "spark_jobs.engine.stream",
    "spark_jobs.engine.agent",
    "tools.testing.test_every_service",
}
"""Spark's driver and its executors pass each other tasks and results; a test passes an event from itself to itself."""
RUNS_CODE = re.compile(r"\b(pickle|_pickle|cloudpickle|dill|joblib|jsonpickle|marshal|shelve)\b")
CALLS = re.compile(r"\b(read_pickle|allow_pickle|unsafe_load|full_load)\b|yaml\.load\(")
FAUSTS = [
    "pickle",
    "pickle_restricted",
    "pickle_fickling",
    "binary",
    "yaml",
    "json|pickle",
    "pickle|json",
    "raw|pickle",
]


def test_only_what_spark_passes_between_its_own_processes_is_unpickled() -> None:
    from tests.engine.infra.test_layout import BESIDE, modules, within  # asks git, which copies of the tree have not

    found = set()
    for module, file in modules().items():
        if within(module, BESIDE) or file.startswith("tests/"):
            continue
        text = (ROOT / file).read_text()
        assert not CALLS.search(text), file
        for node in ast.walk(ast.parse(text)):
            names = [one.name for one in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if any(map(RUNS_CODE.search, names)):
                found.add(module)
    assert found == OWN


class Touch:
    """What makes a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.file,)


def bombs(file: Path) -> list[bytes]:
    plain = pickle.dumps(Touch(file))
    return [plain, b64encode(plain), b64encode(b64encode(plain))]


def test_an_agents_process_has_no_codec_of_fausts_that_unpickles() -> None:
    assert codecs.codecs.keys() == {"json", "raw"}
    for serializer in FAUSTS:
        with pytest.raises((KeyError, TypeError)):
            codecs.loads(serializer, b"")


@pytest.mark.parametrize("serializer", [*FAUSTS, "json", "raw"])
def test_no_serializer_runs_what_a_record_holds(serializer: str, tmp_path: Path) -> None:
    app = faust.App("no-pickle", broker="kafka://", web_enabled=False)
    file = tmp_path / "run"
    for bomb in bombs(file):
        for loads in (app.serializers.loads_value, app.serializers.loads_key):
            with suppress(KeyDecodeError, ValueDecodeError):
                loads(None, bomb, serializer=serializer)
    assert not file.exists()
    pickle.loads(bombs(file)[0])
    assert file.exists(), "such a record does run code where it is unpickled"
