"""make test: counted in seconds.

The gate on the hot paths: what a commit costs, counted, may not grow by more than 3 % without the figure being raised.
"""

import json
import subprocess
import sys

import pytest

CALLS = {"reading": 47.25, "writing": 58.79}
"""Per commit."""
ALLOWED = 1.03


@pytest.fixture(scope="module")
def now() -> dict[str, float]:
    """Counted in a process of its own: what other tests traced, cached or patched is no matter."""
    program = [sys.executable, "-m", "tests.engine.projections.hot_path"]
    counted: dict[str, float] = json.loads(subprocess.run(program, capture_output=True, text=True, check=True).stdout)
    return counted


@pytest.mark.parametrize("path", CALLS)
def test_a_commit_costs_no_more_than_it_did(now: dict[str, float], path: str) -> None:
    assert now[path] <= ALLOWED * CALLS[path], "if it is worth that, raise the figure"
