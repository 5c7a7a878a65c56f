"""make test + test-all: files only; their checks by other tools take longer.

What `samefold add` writes, into a folder that holds no more than a service's own files."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from domain.language import kebab
from infra.errors import SamefoldError
from tools.cli.new import new
from tools.scaffold import copying
from tools.scaffold.copying import BrokenFile, NotCopied
from tools.scaffold.names import BadName, check_service, names_of
from tools.scaffold.parts import AlreadyThere, Kind, NoPlace, Parts
from tools.testing.fixtures import ROOT


@pytest.fixture
def parts(tmp_path: Path) -> Parts:
    """A service with one context, `rooms`, and the view that comes with it."""
    (tmp_path / "projections" / "engine").mkdir(parents=True)
    made = Parts(tmp_path)
    made.service("rooms")
    return made


def files(root: Path) -> dict[Path, str]:
    return {file: file.read_text() for file in root.rglob("*.py")}


@pytest.mark.slow_but("classes", "room_bookings")
@pytest.mark.parametrize(
    "context", ["classes", "names", "lines", "thing_groups", "counts", "inventory", "room_bookings"]
)
def test_any_context_gets_files_of_python(tmp_path: Path, context: str) -> None:
    made = Parts(tmp_path)
    made.service(context)
    for kind in Kind:
        made.view(f"view_{kind}", None, kind)
    made.policy("reminders", None)
    made.source("billing", None)
    made.query("largest")
    assert "`pytest tests/test_dataset_by_month.py` runs it" in " ".join(made.dataset("by_month", None).next)
    for text in files(tmp_path).values():
        rows = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)]
        for row in rows:
            columns = [
                one.target.id for one in row.body if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
            ]
            assert len(columns) == len(set(columns))
            assert not {"count", "index"} & set(columns)
    assert f"domain.{context} import" in (tmp_path / "tests" / "test_service.py").read_text()


@pytest.mark.parametrize(
    ("context", "one"),
    [
        ("room_bookings", "room-booking"),
        ("tv_series", "tv-series"),
        ("nurseries", "nursery"),
        ("x_rays", "x-ray"),
        ("a_b_cs", "abc"),
        ("top_3s", "top3"),
    ],
)
def test_a_contexts_names_in_urls_and_codes_are_those_that_its_classes_get(context: str, one: str) -> None:
    names = names_of(context)
    assert names.apply("KEBAB-already-added") == kebab(names.apply("ThingAlreadyAdded")) == f"{one}-already-added"
    assert names.apply("add-KEBAB") == kebab(names.apply("AddThing"))


Cases = Sequence[tuple[tuple[Any, ...], str]]
"""Arguments, and why these are refused."""
NOT_A_NAME = "can't be the name|is reserved"
REFUSED: dict[str, tuple[Callable[..., object], Cases]] = {
    "a context": (
        Parts.context,
        [
            *(((name,), NOT_A_NAME) for name in ("engine", "language", "views", "health", "docs", "service", "class")),
            *(((name,), NOT_A_NAME) for name in ("zimmer_ü", "x" * 31)),
            (("rooms",), "exists already"),
        ],
    ),
    "a view": (
        lambda parts, name, context=None: parts.view(name, context, Kind.ENTITY),
        [
            *(((name,), "reserved") for name in ("positions", "live", "streams_rooms", "totals_v2", "engine")),
            (("room_names",), "exists already"),
            (("rooms",), r"tests/test_rooms\.py exists"),
            (("sums", "nowhere"), "There is no context"),
        ],
    ),
    "a query": (
        lambda parts, name: parts.query(name),
        [
            *(
                ((name,), "reserved|can't be")
                for name in ("positions", "sums_v2", "room_names", "No", "class", "x" * 41)
            ),
        ],
    ),
    "a policy": (
        lambda parts, name: parts.policy(name, None),
        [((name,), NOT_A_NAME) for name in ("public", "engine", "Reminders", "no name", "class", "x" * 31)],
    ),
    "a source": (
        lambda parts, name: parts.source(name, None),
        [((name,), NOT_A_NAME) for name in ("Billing", "no name", "class", "x" * 26)],
    ),
    "an event": (
        lambda parts, name, *fields: parts.event(name, None, fields),
        [
            *(((name,), ".") for name in ("Event", "State", "Text", "Decimal", "Exception", "ValueError")),
            (("RoomAdded",), "has the name RoomAdded already"),
            (("NameGiven" * 5,), NOT_A_NAME),
            (("NameGiven", "name:Text", "name:Text"), "."),
            *(
                (("NameGiven", field), ".")
                for field in ("class:Text", "größe:Text", "Name:Text", "names:list[Text]", "name")
            ),
        ],
    ),
    "a command": (
        lambda parts, name, event, *fields: parts.command(name, None, fields, event),
        [
            (("RenameRoom", "State"), "no event State"),
            (("NumberRoom", "RoomAdded", "name:int"), "'name:int' is not of RoomAdded's type, which is Text"),
        ],
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_would_not_work_is_refused_and_changes_nothing(parts: Parts, what: str) -> None:
    (parts.root / "policies" / "engine").mkdir(parents=True)
    before = files(parts.root)
    add, cases = REFUSED[what]
    for arguments, why in cases:
        with pytest.raises((BadName, AlreadyThere, NoPlace), match=why):
            add(parts, *arguments)
        assert files(parts.root) == before, arguments


def test_a_policys_command_is_made_of_its_event(parts: Parts) -> None:
    domain = parts.root / "domain" / "rooms.py"
    domain.write_text(domain.read_text().replace("class AddRoom:\n", "class AddRoom:\n    floor: int\n"))
    with pytest.raises(NoPlace, match="no command whose fields an event has"):
        parts.policy("reminders", None)
    parts.event("RoomRenamed", None, ("name:Text",))
    parts.command("RenameRoom", None, (), "RoomRenamed")
    parts.policy("reminders", None)
    assert "RenameRoom(name=event.name)" in (parts.root / "policies" / "reminders.py").read_text()
    before = files(parts.root)
    with pytest.raises(AlreadyThere, match=r"policies/reminders\.py exists"):
        parts.policy("reminders", None)
    assert files(parts.root) == before


def test_a_sources_command_has_fields_of_types_that_any_file_can_import(parts: Parts) -> None:
    domain = parts.root / "domain" / "rooms.py"
    domain.write_text(domain.read_text().replace("class AddRoom:\n", "class AddRoom:\n    floor: Floor\n"))
    with pytest.raises(NoPlace, match="no command with fields of bool, int"):
        parts.source("billing", None)
    parts.command("BookRoom", None, ("room:Text", "until:date"), None)
    written = parts.source("billing", None)
    assert [str(file) for file in written.files] == ["policies/from_billing.py", "tests/test_from_billing.py"]
    text = (parts.root / written.files[0]).read_text()
    assert "from datetime import date\n" in text
    assert "    room_key: Text\n    room: Text\n    until: date\n" in text
    assert 'f"rooms/{message.room_key}", BookRoom(room=message.room, until=message.until)' in text
    with pytest.raises(AlreadyThere, match=r"policies/from_billing\.py exists"):
        parts.source("billing", None)


def test_a_query_begins_with_the_first_view(parts: Parts) -> None:
    written = parts.query("largest")
    assert [str(file) for file in written.files] == ["projections/queries/largest.py", "tests/test_query_largest.py"]
    text = (parts.root / written.files[0]).read_text()
    assert text.startswith('"""Largest: which question')
    assert "from room_names" in text
    with pytest.raises(AlreadyThere):
        parts.query("largest")
    (parts.root / "projections" / "room_names.py").unlink()
    with pytest.raises(BadName, match="no view to ask"):
        parts.query("other")


def test_without_a_match_nothing_is_written(parts: Parts) -> None:
    file = parts.root / "domain" / "rooms.py"
    file.write_text(file.read_text().replace("    match event:", "    for event in [event]:\n      match event:"))
    before = files(parts.root)
    with pytest.raises(NoPlace) as refused:
        parts.event("RoomRenamed", None, ())
    assert refused.value.hint.startswith("Nothing was written")
    assert files(parts.root) == before


@pytest.mark.slow
@pytest.mark.parametrize("context", ["x" * 30, "this_is_a_name_of_thirty_chars"])
def test_what_is_written_under_the_longest_names_passes_the_linter(tmp_path: Path, context: str) -> None:
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    parts = Parts(tmp_path)
    parts.service(context)
    event, command = ("ThisIsTheNameOfaThingWithAllFortyChars" + end for end in ("Ev", "Co"))
    parts.event(event, None, ("name:Text", "on:date"))
    parts.command(command, None, (), event)
    for kind in Kind:
        parts.view(f"this_is_a_view_with_a_name_of_40_{kind:x<7}", None, kind)
    parts.policy("this_is_a_policy_of_30_letters", None)
    parts.source("this_has_a_name_of_25_let", None)
    parts.query("this_is_a_query_with_a_name_of_40_letter")
    for arguments in (["check"], ["format", "--check"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *arguments, "."], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", ["rich", "faust_streaming", "typing_extensions", "pip", "setuptools", "no name"])
def test_a_service_is_not_named_like_a_package_that_it_installs(name: str) -> None:
    with pytest.raises(BadName):
        check_service(name, ROOT / "requirements")


@pytest.mark.parametrize(
    ("name", "look", "texts"),
    [
        (copying.ANSWERS, copying.answers, [b"", b"[a, b]", b"name: [", b"name: hotel\n", b"\xff"]),
        (copying.MANIFEST, copying.changed, [b"half a line", b"\xff"]),
    ],
)
def test_a_broken_file_of_samefolds_own_is_named(
    tmp_path: Path, name: str, look: Callable[[Path], object], texts: Sequence[bytes]
) -> None:
    for text in texts:
        (tmp_path / name).write_bytes(text)
        with pytest.raises(BrokenFile, match=f"{re.escape(name)} can't be read"):
            look(tmp_path)


@pytest.mark.parametrize("name", ["domain/rooms.py", "tests/test_rooms.py"])
def test_a_file_with_a_syntax_error_is_named_and_all_are_kept(parts: Parts, name: str) -> None:
    file = parts.root / name
    file.write_text(f"{file.read_text()}\ndef half(:\n")
    before = files(parts.root)
    with pytest.raises(NoPlace, match=rf"{file.name} has a syntax error in line \d+"):
        parts.event("RoomRenamed", None, ())
    assert files(parts.root) == before


@pytest.mark.parametrize("was_there", [False, True])
def test_a_service_that_could_not_be_made_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, was_there: bool
) -> None:
    def fail(_root: Path, folder: Path, _name: str) -> None:
        (folder / "infra").mkdir(parents=True)
        raise NotCopied("It failed.", "Again.")

    folder = tmp_path / "hotel"
    if was_there:
        folder.mkdir()
    monkeypatch.setattr(copying, "copy", fail)
    with pytest.raises(NotCopied):
        new(folder, "rooms")
    assert list(tmp_path.iterdir()) == ([folder] if was_there else [])
    assert not (folder / "infra").exists()


def test_a_context_written_by_hand_gets_views_whatever_its_name(tmp_path: Path) -> None:
    parts = Parts(tmp_path)
    parts.context("rooms")
    (tmp_path / "domain" / "rooms.py").rename(tmp_path / "domain" / "service.py")
    parts.view("calls", "service", Kind.ENTITY)
    assert (tmp_path / "projections" / "calls.py").exists()


def test_imports_come_after_those_of_the_future(parts: Parts) -> None:
    file = parts.root / "domain" / "rooms.py"
    docstring, rest = file.read_text().split("\n", 1)
    file.write_text(f"{docstring}\n\nfrom __future__ import annotations\n{rest}")
    parts.event("RoomBooked", None, ("on:date",))
    compile(file.read_text(), file.name, "exec")


def test_what_a_file_has_from_where_an_older_samefold_had_it_is_not_imported_again(parts: Parts) -> None:
    parts.event("RoomBooked", None, ("on:date",))
    file = parts.root / "tests" / "test_rooms.py"
    file.write_text(file.read_text().replace("from tools.testing.facts", "from infra.testing.facts"))
    parts.event("RoomRenamed", None, ("name:Text",))
    imports = [node for node in ast.parse(file.read_text()).body if isinstance(node, ast.ImportFrom)]
    assert [one.module for one in imports if "facts" in {name.name for name in one.names}] == ["infra.testing.facts"]


def test_what_a_file_says_in_other_letters_is_kept(parts: Parts) -> None:
    file = parts.root / "domain" / "rooms.py"
    text = (
        file.read_text()
        .replace("RoomAdded", "ÄnderungHinzugefügtÜber")
        .replace("= ÄnderungHinzugefügtÜber", "= ÄnderungHinzugefügtÜber  # für immer")
    )
    file.write_text(text.replace("AddRoom", "Füge") + "\nSEPARATORS = '\N{LINE SEPARATOR}\N{FORM FEED}'\n")
    parts.event("RoomRenamed", None, ("name:Text",))
    parts.command("RenameRoom", None, (), "RoomRenamed")
    found = file.read_text()
    assert "Event: TypeAlias = ÄnderungHinzugefügtÜber | RoomRenamed  # für immer\n" in found
    assert "Command: TypeAlias = Füge | RenameRoom\n" in found
    assert '"\N{LINE SEPARATOR}\N{FORM FEED}"' in found


@pytest.mark.parametrize("known", [{}, {"user.email": "me@localhost"}], ids=str)
def test_a_commit_needs_no_identity_of_git(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known: dict[str, str]
) -> None:
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    monkeypatch.setenv("GIT_CONFIG_SYSTEM", os.devnull)
    monkeypatch.setenv("GIT_CONFIG_COUNT", str(len(known)))
    for number, (key, value) in enumerate(known.items()):
        monkeypatch.setenv(f"GIT_CONFIG_KEY_{number}", key)
        monkeypatch.setenv(f"GIT_CONFIG_VALUE_{number}", value)
    elsewhere, here = tmp_path / "elsewhere", tmp_path / "here"
    for folder in (elsewhere, here):
        folder.mkdir()
        copying.git(folder, "init", "--quiet")
    subprocess.run(["git", "config", "user.email", "other@localhost"], cwd=elsewhere, check=True)
    subprocess.run(["git", "config", "user.name", "Other"], cwd=elsewhere, check=True)
    monkeypatch.chdir(elsewhere)
    copying.git(here, "commit", "--quiet", "--allow-empty", "--message", "first")
    by = f"Samefold {known.get('user.email', 'samefold@localhost')}"
    assert copying.git(here, "log", "--format=%an %ae").strip() == by


def test_without_git_what_to_install_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SamefoldError, match="git is not installed"):
        copying.git(tmp_path, "status")


def test_a_failure_of_git_is_named_by_its_reason(tmp_path: Path) -> None:
    with pytest.raises(NotCopied, match="git failed: not a git repository"):
        copying.git(tmp_path, "status")
