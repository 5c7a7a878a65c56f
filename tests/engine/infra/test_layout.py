"""make test: reads files. Where things live, and who may know whom: read from the imports of every file."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter

import pytest

from domain.engine.contexts import contexts
from projections.engine.views.core_views import all_views
from tools.testing.fixtures import ROOT

pytestmark = pytest.mark.xdist_group("layout")  # every file is parsed once

YOURS = ("access.py", "domain", "policies", "projections", "spark_jobs", "tests")
ENGINES = ("domain/engine", "policies/engine", "projections/engine", "spark_jobs/engine")
SAMEFOLD = ("commands", *ENGINES, "api", "infra", "tools")
BESIDE = ("demo", "benchmarks", "proofs", "tests/engine")
FLOORS = (("tools",), ("api", "spark_jobs"), ("policies",), ("commands",), ("projections",), ("domain",), ("infra",))
"""From the top downwards."""
PROGRAMS = ("spark_jobs/engine/rebuild.py", "spark_jobs/engine/verify.py")
"""What `spark-submit` runs: the command line, by another name."""
ROOMS = ("views", "queries", "fold", "store", "live", "rebuild", "operate")


@cache
def tracked() -> tuple[str, ...]:
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True)
    return tuple(name for name in listed.stdout.decode().splitlines() if (ROOT / name).is_file())


@cache
def modules() -> dict[str, str]:
    """Files of Python by the name that they are imported under."""
    folders = {folder.partition("/")[0] for folder in (*YOURS, *SAMEFOLD, *BESIDE)}
    files = [name for name in tracked() if name.endswith(".py") and name.partition("/")[0] in folders]
    return {name.removesuffix(".py").removesuffix("/__init__").replace("/", "."): name for name in files}


@cache
def imports() -> dict[str, set[str]]:
    """Which modules of this tree each of them imports, at its top or within a function; not for types alone."""
    return {
        module: set(_imported(ast.parse((ROOT / file).read_text()))) - {module} for module, file in modules().items()
    }


def _imported(tree: ast.AST) -> Iterator[str]:
    if isinstance(tree, ast.If) and isinstance(tree.test, ast.Name) and tree.test.id == "TYPE_CHECKING":
        return
    names = [alias.name for alias in tree.names] if isinstance(tree, ast.Import | ast.ImportFrom) else []
    for name in [f"{tree.module}.{name}" for name in names] if isinstance(tree, ast.ImportFrom) else names:
        while name and name not in modules():
            name = name.rpartition(".")[0]  # noqa: PLW2901
        if name:
            yield name
    for child in ast.iter_child_nodes(tree):
        yield from _imported(child)


def within(module: str, folders: tuple[str, ...]) -> bool:
    file = modules()[module]
    return file in folders or file.startswith(tuple(f"{folder}/" for folder in folders))


def test_samefold_imports_nothing_of_yours() -> None:
    """It finds contexts and views by their being there."""
    yours = {module for module in modules() if within(module, YOURS) and not within(module, (*SAMEFOLD, *BESIDE))}
    yours -= {"domain", "domain.language", "policies", "projections", "spark_jobs"}
    assert {"access", "domain.accounts", "projections.balances", "spark_jobs.monthly_turnover"} <= yours
    assert [
        (module, found & yours) for module, found in imports().items() if within(module, SAMEFOLD) and found & yours
    ] == []


def test_samefold_names_no_context_event_or_view() -> None:
    events = {event.__name__ for context in contexts().values() for event in context.events.values()}
    assert events
    words = re.compile(rf"\b({'|'.join(sorted(events | set(contexts())))})\b")
    core = {"command_outcomes"} | {f"streams_{context}" for context in contexts()}
    views = {view for view in all_views() if view not in core}
    assert views
    quoted = re.compile(rf"""(?<![\w.])([`'"])({"|".join(sorted(views))})\1""")
    found = [
        (file, match.group())
        for module, file in modules().items()
        if within(module, SAMEFOLD)
        for pattern in (words, quoted)
        for match in pattern.finditer((ROOT / file).read_text())
    ]
    assert found == []


def test_what_a_new_service_holds_imports_nothing_beside_it() -> None:
    beside = {module for module in modules() if within(module, BESIDE)}
    assert [
        (module, found & beside) for module, found in imports().items() if not within(module, BESIDE) and found & beside
    ] == []


def test_each_floor_imports_only_those_below() -> None:
    for number, floor in enumerate(FLOORS):
        for folder in floor:
            beside = tuple(name for name in floor if name != folder)
            above = tuple(name for higher in FLOORS[:number] for name in higher)
            mine = [module for module in modules() if within(module, (folder,)) and not within(module, PROGRAMS)]
            assert mine
            assert [(one, name) for one in mine for name in imports()[one] if within(name, (*above, *beside))] == []


def test_a_context_imports_nothing_of_what_samefold_makes_of_it() -> None:
    contexts_files = [module for module in modules() if module.startswith("domain.") and module.count(".") == 1]
    assert {"domain.accounts", "domain.language"} < set(contexts_files)
    below = ("domain/engine", "infra")
    mine = [module for module in contexts_files if not within(module, ("domain/engine",))]
    assert [(one, name) for one in mine for name in imports()[one] if within(name, below)] == []


def test_rooms_of_the_engine_import_one_way_only_and_there_are_no_others() -> None:
    names = [file.split("/") for file in modules().values() if file.startswith("projections/engine/")]
    assert {parts[2] for parts in names if len(parts) > 3} == set(ROOMS)
    for number, room in enumerate(ROOMS):
        later = tuple(f"projections/engine/{name}" for name in ROOMS[number + 1 :])
        mine = [module for module in modules() if within(module, (f"projections/engine/{room}",))]
        assert [(module, name) for module in mine for name in imports()[module] if within(name, later)] == []


def test_imports_go_round_in_no_circle() -> None:
    try:
        TopologicalSorter(imports()).prepare()
    except CycleError as error:
        pytest.fail(f"a circle: {' <- '.join(error.args[1])}")


PAGES = ROOT / "docs"
Arrows = frozenset[tuple[str, str]]


def room(module: str, folder: str) -> str:
    """The file or folder of it right below this folder, without its ending; nothing where it is elsewhere, or beside the house."""
    file = modules()[module]
    if not file.startswith(folder) or file in PROGRAMS or (not folder and within(module, (*BESIDE, "tests"))):
        return ""
    return file.removeprefix(folder).partition("/")[0].removesuffix(".py").removesuffix("__init__")


def arrows(folder: str) -> Arrows:
    """Who imports whom among the rooms of a folder, without what the others lead to already."""
    found = frozenset((room(one, folder), room(name, folder)) for one, names in imports().items() for name in names)
    found = frozenset((one, other) for one, other in found if one and other and one != other)
    for one, other in sorted(found):
        rest = found - {(one, other)}
        if other in reached(one, rest):
            found = rest
    return found


def reached(start: str, ways: Arrows) -> set[str]:
    seen = {start}
    while more := {other for one, other in ways if one in seen} - seen:
        seen |= more
    return seen


@pytest.mark.parametrize("folder", ["", "infra/", "domain/engine/", "projections/engine/", "policies/engine/"])
def test_the_page_on_the_architecture_draws_each_room_and_each_arrow(folder: str) -> None:
    title = f"`{folder}`" if folder else "The folders"
    page = (PAGES / "architecture.md").read_text()
    [diagram] = re.findall(rf"^## {title}$.*?^```mermaid\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    lines = re.findall(r"^  (\w+) --> (.*)$", diagram, re.MULTILINE)
    drawn = {(one, other) for one, others in lines for other in others.split(" & ")}
    ways = arrows(folder)
    assert [(one, other) for one, other in ways if one in reached(other, ways)] == [], "rooms import each other"
    missing, excess = sorted(ways - drawn), sorted(drawn - ways)
    assert (missing, excess) == ([], []), f"docs/architecture.md, {title}: missing {missing}, too many {excess}"
    assert set(re.findall(r"^  (\w+)\[", diagram, re.MULTILINE)) == {room(module, folder) for module in modules()} - {
        ""
    }


@pytest.mark.parametrize(("page", "most"), [("way-of-a-command", 14), ("way-of-a-commit", 10)])
def test_a_walk_names_files_that_there_are_and_not_too_many(page: str, most: int) -> None:
    text = (PAGES / f"{page}.md").read_text()
    named = re.findall(r"`([\w/]+\.py)`", text)
    assert [file for file in named if not (ROOT / file).is_file()] == []
    steps = re.findall(r"^\d+\. \*\*`([\w/]+\.py)`", text, re.MULTILINE)
    assert 0 < len(steps) <= most
    assert len(steps) == len(set(steps)), "one step for each file"


PACKAGES = sorted(file.removesuffix("/__init__.py") for file in modules().values() if file.endswith("/__init__.py"))


@pytest.mark.parametrize("folder", [name for name in PACKAGES if "/" not in name or not name.startswith(BESIDE)])
def test_each_folder_says_what_lives_there_and_who_may_change_it(folder: str) -> None:
    doc = ast.get_docstring(ast.parse((ROOT / folder / "__init__.py").read_text())) or ""
    assert re.search(r"Samefold's|Yours|[Nn]ot part of a new service", doc), folder


def test_nothing_names_what_a_reader_does_not_have() -> None:
    """Our own papers and lists of work are not in the repository."""
    unknown = re.compile(r"DESIGN(\.md)?( §|\.md)|\b[Ii]ssue \d{1,2}\b")
    files = [file for file in tracked() if file != "tests/engine/infra/test_layout.py"]
    assert [file for file in files if unknown.search((ROOT / file).read_bytes().decode(errors="ignore"))] == []
