"""make test + test-all: files only; their checks by other tools take longer.

What `samefold add` writes, into a folder that holds no more than a service's own files."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from domain.language import kebab
from infra.errors import SamefoldError
from infra.scaffold import copying
from infra.scaffold.copying import BrokenFile, NotCopied
from infra.scaffold.names import BadName, check_service, names_of
from infra.scaffold.parts import AlreadyThere, Kind, NoPlace, Parts
from infra.testing.fixtures import ROOT


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
    ("context", "one"), [("room_bookings", "room-booking"), ("x_rays", "x-ray"), ("a_b_cs", "abc"), ("top_3s", "top3")]
)
def test_a_contexts_names_in_urls_and_codes_are_those_that_its_classes_get(context: str, one: str) -> None:
    names = names_of(context)
    assert names.apply("KEBAB-already-added") == kebab(names.apply("ThingAlreadyAdded")) == f"{one}-already-added"
    assert names.apply("add-KEBAB") == kebab(names.apply("AddThing"))


@pytest.mark.parametrize("context", ["language", "views", "health", "docs", "service", "class", "zimmer_ü", "x" * 31])
def test_a_context_whose_name_would_not_work_is_refused(tmp_path: Path, context: str) -> None:
    with pytest.raises(BadName):
        Parts(tmp_path).context(context)
    assert files(tmp_path) == {}


@pytest.mark.parametrize("view", ["positions", "live", "streams_rooms", "totals_v2", "engine"])
def test_a_view_whose_name_would_not_work_is_refused(parts: Parts, view: str) -> None:
    before = files(parts.root)
    with pytest.raises(BadName, match="reserved"):
        parts.view(view, None, Kind.ENTITY)
    assert files(parts.root) == before


def test_a_view_whose_test_has_no_place_is_not_written_either(parts: Parts) -> None:
    before = files(parts.root)
    with pytest.raises(AlreadyThere, match=r"tests/test_rooms\.py exists"):
        parts.view("rooms", None, Kind.ENTITY)
    assert files(parts.root) == before


@pytest.mark.parametrize("name", ["public", "engine", "Reminders", "no name", "class", "x" * 31])
def test_a_policy_whose_name_would_not_work_is_refused(parts: Parts, name: str) -> None:
    (parts.root / "policies" / "engine").mkdir(parents=True)
    before = files(parts.root)
    with pytest.raises(BadName):
        parts.policy(name, None)
    assert files(parts.root) == before


def test_a_policy_is_written_once(parts: Parts) -> None:
    assert parts.policy("reminders", None).files == [
        Path("policies/reminders.py"),
        Path("tests/test_policy_reminders.py"),
    ]
    before = files(parts.root)
    with pytest.raises(AlreadyThere, match=r"policies/reminders\.py exists"):
        parts.policy("reminders", None)
    assert files(parts.root) == before


def test_a_policys_command_is_made_of_its_event(parts: Parts) -> None:
    domain = parts.root / "domain" / "rooms.py"
    domain.write_text(domain.read_text().replace("class AddRoom:\n", "class AddRoom:\n    floor: int\n"))
    with pytest.raises(NoPlace, match="no command whose fields an event has"):
        parts.policy("reminders", None)
    parts.event("RoomRenamed", None, ("name:Text",))
    parts.command("RenameRoom", None, (), "RoomRenamed")
    parts.policy("reminders", None)
    assert "RenameRoom(name=event.name)" in (parts.root / "policies" / "reminders.py").read_text()


@pytest.mark.slow_but("Text-()")
@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("Event", ()),
        ("State", ()),
        ("Text", ()),
        ("Decimal", ()),
        ("Exception", ()),
        ("ValueError", ()),
        ("NameGiven" * 5, ()),
        ("NameGiven", ("class:Text",)),
        ("NameGiven", ("name:Text", "name:Text")),
        ("NameGiven", ("größe:Text",)),
        ("NameGiven", ("Name:Text",)),
        ("NameGiven", ("names:list[Text]",)),
        ("NameGiven", ("name",)),
    ],
    ids=str,
)
def test_an_event_that_would_break_its_file_is_refused(parts: Parts, name: str, fields: tuple[str, ...]) -> None:
    before = files(parts.root)
    with pytest.raises((BadName, AlreadyThere)):
        parts.event(name, None, fields)
    assert files(parts.root) == before


def test_a_command_leads_to_an_event_and_to_no_other_class(parts: Parts) -> None:
    with pytest.raises(NoPlace, match="no event State"):
        parts.command("RenameRoom", None, (), "State")


def test_a_field_of_another_type_than_the_events_is_refused(parts: Parts) -> None:
    before = files(parts.root)
    with pytest.raises(BadName, match="'name:int' is not of RoomAdded's type, which is Text"):
        parts.command("NumberRoom", None, ("name:int",), "RoomAdded")
    assert files(parts.root) == before


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
    for arguments in (["check"], ["format", "--check"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *arguments, "."], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", ["rich", "faust_streaming", "typing_extensions", "pip", "setuptools", "no name"])
def test_a_service_is_not_named_like_a_package_that_it_installs(name: str) -> None:
    with pytest.raises(BadName):
        check_service(name, ROOT / "requirements")


def test_other_names_of_services_are_taken() -> None:
    check_service("hotel", ROOT / "requirements")


@pytest.mark.parametrize("text", [b"", b"[a, b]", b"name: [", b"name: hotel\n", b"\xff"], ids=repr)
def test_broken_answers_are_named(tmp_path: Path, text: bytes) -> None:
    (tmp_path / copying.ANSWERS).write_bytes(text)
    with pytest.raises(BrokenFile, match=r"\.samefold\.yml can't be read"):
        copying.answers(tmp_path)


@pytest.mark.parametrize("text", [b"half a line", b"\xff"], ids=repr)
def test_a_broken_manifest_is_named(tmp_path: Path, text: bytes) -> None:
    (tmp_path / copying.MANIFEST).write_bytes(text)
    with pytest.raises(BrokenFile, match=r"\.samefold\.sha256 can't be read"):
        copying.changed(tmp_path)


def test_a_file_with_a_syntax_error_is_named_and_kept(parts: Parts) -> None:
    file = parts.root / "domain" / "rooms.py"
    file.write_text(text := file.read_text() + "\ndef half(:\n")
    with pytest.raises(NoPlace, match=r"rooms\.py has a syntax error in line \d+"):
        parts.event("RoomRenamed", None, ())
    assert file.read_text() == text


def test_a_broken_test_file_keeps_the_domain_as_it_is(parts: Parts) -> None:
    test, before = parts.root / "tests" / "test_rooms.py", (parts.root / "domain" / "rooms.py").read_text()
    test.write_text("def half(:\n")
    with pytest.raises(NoPlace, match=r"test_rooms\.py has a syntax error"):
        parts.event("RoomRenamed", None, ())
    assert (parts.root / "domain" / "rooms.py").read_text() == before


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


@pytest.mark.parametrize("known", [{}, {"user.email": "me@localhost"}], ids=str)
def test_a_commit_needs_no_identity_of_git(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known: dict[str, str]
) -> None:
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    for name, value in {
        "HOME": str(tmp_path),
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_SYSTEM": os.devnull,
    }.items():
        monkeypatch.setenv(name, value)
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
    assert (
        copying.git(here, "log", "--format=%an %ae").strip()
        == f"Samefold {known.get('user.email', 'samefold@localhost')}"
    )


def test_without_git_what_to_install_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SamefoldError, match="git is not installed"):
        copying.git(tmp_path, "status")


def test_a_failure_of_git_is_named_by_its_reason(tmp_path: Path) -> None:
    with pytest.raises(NotCopied, match="git failed: not a git repository"):
        copying.git(tmp_path, "status")
