"""make test: counted in seconds.

The gate on the hot paths: what a commit costs, counted, may not grow by more than 3 % without the figure being raised.
"""

import json
import subprocess
import sys

import pytest

from tests.engine.projections.hot_path import FIGURES, VERSION, Cost

ALLOWED = 1.03


@pytest.fixture(scope="module")
def now() -> dict[str, Cost]:
    """Counted in a process of its own: what other tests traced, cached or patched is no matter."""
    count = (
        "import json; from tests.engine.projections.hot_path import costs; "
        "print(json.dumps({name: list(cost) for name, cost in costs().items()}))"
    )
    done = subprocess.run([sys.executable, "-c", count], capture_output=True, text=True, check=True)
    return {name: Cost(*cost) for name, cost in json.loads(done.stdout).items()}


@pytest.mark.parametrize("path", ["read", "write"])
def test_a_commit_costs_no_more_than_it_did(now: dict[str, Cost], path: str) -> None:
    figures = json.loads(FIGURES.read_text())[VERSION]
    for what, was in figures[path].items():
        is_now = getattr(now[path], what)
        assert is_now <= ALLOWED * was, (
            f"{path}: {is_now:.3f} times the {what} of the reference, {was:.3f} before; "
            "if it is worth that, `python -m tests.engine.projections.hot_path` writes the new figure down"
        )
