"""make test: writes files, and starts nothing.

What a service's own files are, and what is done again where one of them has changed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.saved import Sources, own_files

CONTEXT = """
\"\"\"Rooms.\"\"\"
from domain.language import Text
from domain.names import short

def decide(command, state):
    return []

def evolve(state, event):
    return short(state)
"""
FILES = {
    "access.py": "",
    "domain/rooms.py": CONTEXT,
    "domain/names.py": "def short(text):\n    return text[:3]\n",
    "domain/guests.py": "def evolve(state, event): ...\n",
    "projections/names.py": "from domain import rooms\nVERSION = 1\n",
    "projections/migrations/2026_11_30_0123_first.py": "",
    "projections/queries/most.py": "",
    "policies/copies.py": "from domain.rooms import decide\n",
}
HANDLERS, AGENTS, POLICIES, API = (
    *("commands.handler", "projections.engine.live.agent"),
    *("policies.engine.process", "api"),
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def code(root: Path) -> dict[str, str]:
    return Sources(root).processes(with_policies=True, with_public=False)


def test_editors_files_and_folders_of_samefold_are_not_the_services_own(root: Path) -> None:
    for name in (
        "domain/.#rooms.py",
        "domain/rooms.py~",
        "domain/4913",
        "domain/engine/x.py",
        "policies/copies.py.swp",
    ):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text("")
    assert {str(file.relative_to(root)) for file in own_files(root)} == FILES.keys()


@pytest.mark.parametrize(
    ("file", "modules"),
    [
        ("domain/rooms.py", {HANDLERS, AGENTS, POLICIES, API}),
        ("projections/names.py", {AGENTS, API}),
        ("projections/queries/most.py", {API}),
        ("access.py", {API}),
        ("policies/copies.py", {POLICIES}),
        ("projections/migrations/2026_11_30_0123_first.py", set()),
    ],
)
def test_the_processes_that_use_a_file_start_again(root: Path, file: str, modules: set[str]) -> None:
    before = code(root)
    with (root / file).open("a") as text:
        text.write("MORE = 1\n")
    assert {module for module, digest in code(root).items() if digest != before[module]} == modules


@pytest.mark.parametrize(
    ("file", "old", "new", "folds"),
    [
        ("domain/rooms.py", "return []", "return [1]", False),
        ("domain/rooms.py", "Rooms.", "All rooms.", False),
        ("domain/rooms.py", "def evolve", "# what is left\ndef evolve", False),
        ("domain/rooms.py", "short(state)", "state", True),
        ("domain/names.py", "3", "4", True),
        ("domain/guests.py", "event", "what", False),
    ],
)
def test_rows_are_folded_again_where_what_makes_them_has_changed(
    root: Path, file: str, old: str, new: str, *, folds: bool
) -> None:
    before = [Sources(root).fold_of(module) for module in ("domain.rooms", "projections.names")]
    (root / file).write_text(FILES[file].replace(old, new))
    after = [Sources(root).fold_of(module) for module in ("domain.rooms", "projections.names")]
    assert [one != other for one, other in zip(before, after, strict=True)] == [folds, folds]
