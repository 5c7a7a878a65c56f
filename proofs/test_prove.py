"""make test-all: it starts pytest's workers. What `make prove` prints, and keeps, of what it runs."""

from pathlib import Path

import pytest

import proofs.__main__ as prove

pytestmark = pytest.mark.slow
PROGRAM = """
import sys
if "--minutes" in sys.argv: print("FOUND a promise that is broken")
print("12 walks", *sys.argv[1:])
"""


@pytest.mark.parametrize(
    ("arguments", "code", "found"), [((), 0, "nothing"), (("--minutes", "5"), 1, "FOUND a promise that is broken")]
)
def test_each_program_has_a_row_in_the_table_that_stays(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    code: int,
    found: str,
) -> None:
    (tmp_path / "a_search.py").write_text(PROGRAM)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PYTEST_ADDOPTS", "proofs/test_prove.py")  # not all tests are collected
    monkeypatch.setattr(prove, "PROGRAMS", {"some": {"a_search": r"\d+ walks", "proofs.removed_from_this_clone": ""}})
    monkeypatch.setattr("sys.argv", ["proofs", "some", *arguments, "--seed", "7", "--report", str(tmp_path)])
    assert prove.main() == code
    rows = [line.split(" | ") for line in capfd.readouterr().out.splitlines() if line.startswith("| some |")]
    assert [[*row[1:4], row[5]] for row in rows] == [
        ["a_search", "7", "12 walks", f"{found} |"],
        ["pytest", "7", "none", "nothing |"],
    ]
    [report] = tmp_path.glob("*-7/report.md")
    assert found in report.read_text()
