"""Every direct dependency is pinned with hashes, and says what it is for."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def named(text: str, pattern: str) -> set[str]:
    return set(re.findall(pattern, text, re.MULTILINE))


def test_each_is_explained_and_nothing_else_is() -> None:
    wanted = "".join((ROOT / name).read_text() for name in ("requirements.in", "requirements-build.in"))
    rows = named((ROOT / "docs" / "dependencies.md").read_text(), r"^\| ([a-z][a-z0-9, -]+) \| [^|]{20,} \|$")
    explained = {name for row in rows for name in row.split(", ")}
    assert explained == named(wanted, r"^([a-z][a-z0-9-]*)")


def test_each_file_that_is_installed_is_pinned_with_its_hashes() -> None:
    for name in ("requirements", "requirements-build"):
        pinned = (ROOT / f"{name}.txt").read_text()
        blocks = re.split(r"\n(?=[a-z])", pinned.replace("\\\n", ""))[1:]
        assert all(re.match(r"[a-z0-9-]+==\S+ .*--hash=sha256:[0-9a-f]{64}", block) for block in blocks)
        assert named((ROOT / f"{name}.in").read_text(), r"^([a-z][a-z0-9-]*)") <= named(pinned, r"^([a-z0-9-]+)==")
