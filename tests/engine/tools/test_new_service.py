"""make test-all + prove: one service that is made once.

A service of one's own: made by `samefold new`, grown by `samefold add`, run, and updated to a newer Samefold."""

from __future__ import annotations

import json
import re
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from projections.engine.views.core_views import OUTCOMES_VERSION
from tests.engine.pages.pages import Author, author  # noqa: F401
from tests.engine.tools.service_trees import Tree
from tests.engine.tools.test_kubernetes import OVERLAY, kustomized
from tools.testing.fixtures import ROOT
from tools.testing.waiting import DEADLINE_S, until

pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.xdist_group("services")]

ENGINE_FILE = "projections/engine/live/reader.py"


def yours(tree: Tree) -> dict[str, str]:
    """The files that are the service's own."""
    own = re.compile(
        r"README\.md|access\.py|domain/(?!engine/|__init__|language)|(projections|policies|spark_jobs)/(?!engine/|__init__)|tests/(?!__init__)"
    )
    return {name: digest for name, digest in tree.digests().items() if own.match(name)}


def test_a_new_service_is_committed_and_its_checks_and_tests_pass(hotel: Tree) -> None:
    assert hotel.git("status", "--porcelain") == ""
    assert "github.com" in (hotel.folder / ".samefold.yml").read_text()
    assert str(ROOT) not in (hotel.folder / ".samefold.yml").read_text()
    hotel.check()


def test_a_new_service_has_nothing_of_the_bank_and_its_own_name(hotel: Tree) -> None:
    mine = yours(hotel)
    assert {
        "access.py",
        "domain/rooms.py",
        "projections/room_names.py",
        "tests/test_rooms.py",
        "tests/test_service.py",
    } <= mine.keys()
    for name in mine:
        assert not re.search(
            r"account|balance|bank|transfer|standing|\bthings?\b", (hotel.folder / name).read_text(), re.IGNORECASE
        ), name
    assert {path.name for path in hotel.folder.iterdir() if path.is_dir() and not path.name.startswith(".")} == {
        *(
            "api",
            "commands",
            "docs",
            "domain",
            "infra",
            "ops",
            "policies",
            "projections",
            "spark_jobs",
            "tests",
            "tools",
        ),
        *(name for name in ("requirements",) if (ROOT / name).is_dir()),
    }
    assert [file.name for file in (hotel.folder / "projections" / "queries").iterdir()] == ["__init__.py"]
    assert "  policies/engine/policy.py\n" in (hotel.folder / ".samefold.sha256").read_text()
    assert 'name = "hotel"' in (hotel.folder / "pyproject.toml").read_text()
    for file, named in {
        "prometheus/alerts.yml": 'up{job="hotel"}',
        "grafana/overview.json": '"uid": "hotel-overview"',
    }.items():
        told = (hotel.folder / "ops" / file).read_text()
        assert named in told
        assert '"samefold"}' not in told
    assert "image: hotel:" in (hotel.folder / "docker-compose.yml").read_text()
    manifests = kustomized(hotel.folder / OVERLAY.relative_to(ROOT))
    assert {
        (one["metadata"]["namespace"], one["metadata"]["labels"]["app.kubernetes.io/name"]) for one in manifests
    } == {("hotel", "hotel")}
    assert "image: registry.example.com/hotel:" in yaml.safe_dump_all(manifests)
    program = "from infra.settings import Settings as S; s = S(); print(s.group_prefix, *s.topics)"
    assert hotel.run(sys.executable, "-c", program).stdout == (
        "hotel hotel.commands hotel.events hotel.policies hotel.public hotel.inbox hotel.keys\n"
    )


@pytest.mark.prove(part="new-services")
def test_the_readmes_context_and_view_are_a_service(hotel: Tree) -> None:
    shown = re.findall(r"^```python\n# (\S+)\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert [name for name, _ in shown] == ["domain/rooms.py", "projections/room_names.py"]
    for name, text in shown:
        (hotel.folder / name).write_text(text)
    hotel.check()


@pytest.mark.prove(part="new-services")
def test_without_the_bank_checks_and_tests_pass(source: Tree, home: Path, tmp_path: Path) -> None:
    """README's list of what to delete, and nothing else."""
    clone = Tree(Path(shutil.copytree(source.folder, tmp_path / "clone", symlinks=True)), home)
    [listed] = re.findall(r"^```\n(access\.py\n.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    paths = listed.split()
    assert len(paths) <= 19
    for path in paths:
        place = clone.folder / path
        shutil.rmtree(place) if place.is_dir() else place.unlink()
    assert clone.run("make", "help").stdout.count("make demo") == 0
    clone.check()
    clone.samefold("add", "context", "rooms")
    clone.samefold("add", "view", "room_list")
    clone.run(sys.executable, "-m", "pytest", "-q", "tests")


@pytest.mark.prove(part="new-services")
def test_what_the_readme_says_to_type_grows_a_running_service(author: Author) -> None:  # noqa: F811
    hotel = author.service
    growing = (hotel.folder / "README.md").read_text().split("## Grow it")[1]
    [typed] = re.findall(r"^```console\n(.*?)^```", growing, re.MULTILINE | re.DOTALL)
    adding = typed.replace("$ source .venv/bin/activate\n", "").replace("$ ", "")
    author.watches = True
    author.restart()
    with httpx.Client(base_url=f"http://127.0.0.1:{author.port}", timeout=DEADLINE_S) as client:

        def post(command: str, key: str, name: str) -> dict[str, Any]:
            headers = {"Idempotency-Key": f'"{key}"'}
            found: dict[str, Any] = client.post(f"/rooms/12/{command}", json={"name": name}, headers=headers).json()
            return found

        assert post("add-room", "1", "Room 12")["outcome"] == "accepted"
        assert client.get("/views/room_names/12").json()["row"] == {"room": "12", "name": "Room 12"}
        hotel.run("sh", "-ec", adding)

        def changes() -> list[str]:
            with suppress(httpx.TransportError):  # while the API starts again
                post("rename-room", "2", "Twelve")
                answer = client.get("/views/room_changes")
                return [line["what"] for line in answer.json()["items"]] if answer.is_success else []
            return []

        until(lambda: changes() == ["RoomAdded", "RoomRenamed"], "what runs has followed")


@pytest.mark.prove(part="new-services")
def test_what_is_added_runs_and_a_newer_samefold_is_taken_over(source: Tree, hotel: Tree, data: Path) -> None:
    told = [
        hotel.samefold("add", "event", "RoomRenamed", "name:Text"),
        hotel.samefold("add", "command", "RenameRoom", "--event", "RoomRenamed"),
        hotel.samefold("add", "event", "TestTaken", "open:bool"),
        *(hotel.samefold("add", "view", f"room_{kind}", "--kind", kind) for kind in ("entity", "journal", "summary")),
        hotel.samefold("add", "context", "guests"),
        hotel.samefold("add", "view", "guest_list", "--context", "guests"),
        hotel.samefold("add", "query", "most_rooms"),
        hotel.samefold("add", "policy", "copies", "--context", "rooms"),
        hotel.samefold("add", "source", "billing", "--context", "rooms"),
        hotel.samefold("add", "dataset", "rooms_by_name", "--context", "rooms"),
    ]
    assert all("Next:" in one.stdout for one in told)
    hotel.use(data)
    hotel.samefold("dev", "up")
    try:
        hotel.samefold("db", "upgrade")
        written = hotel.samefold("db", "revision", "-m", "renaming").stdout
        assert "projections/migrations" in written
    finally:
        hotel.samefold("dev", "down")
    hotel.write(
        "access.py",
        'return "operator" in caller.roles\n    return False',
        'return "desk" in caller.roles\n    return False',
    )
    hotel.commit("Rooms are renamed")
    mine = yours(hotel)

    newer = Tree(Path(shutil.copytree(source.folder, data / "newer", symlinks=True)), data)
    newer.write(ENGINE_FILE, '"""How an agent reads the log', '"""A newer word on how an agent reads the log')
    newer.commit("A newer engine")
    done = hotel.samefold("update", "--from", str(newer.folder), "--to", "HEAD")

    assert "A newer word" in (hotel.folder / ENGINE_FILE).read_text()
    assert "samefold db upgrade" in done.stdout
    assert "samefold doctor, with the environment of each deployment" in done.stdout
    assert yours(hotel) == mine
    hotel.check()
    assert "none changed here" in hotel.samefold("doctor", code=None).stdout
    hotel.commit("A newer Samefold")
    assert "already" in hotel.samefold("update", "--from", str(newer.folder), "--to", "HEAD").stdout


def test_an_update_merges_local_changes_and_lists_conflicts(source: Tree, hotel: Tree, tmp_path: Path) -> None:
    hotel.write(ENGINE_FILE, '"""How an agent reads the log', '"""Our own word on how an agent reads the log')
    merged = "projections/engine/live/worker.py"
    with (hotel.folder / merged).open("a") as file:
        file.write("\n\nOURS = 1\n")
    (hotel.folder / "access.py").unlink()  # a service from before there was one
    (not_wanted := hotel.folder / "docs" / "limits.md").unlink()
    refused = hotel.samefold("update", "--from", str(source.folder), "--to", "HEAD", code=1)
    assert "not committed" in refused.stderr
    hotel.commit("Changes of our own to Samefold's files")
    merging = hotel.folder / ".git" / "MERGE_HEAD"
    merging.write_text(hotel.run("git", "rev-parse", "HEAD").stdout)
    refused = hotel.samefold("update", "--from", str(source.folder), "--to", "HEAD", code=1)
    assert "middle of a merge" in refused.stderr
    merging.unlink()
    (shallow := hotel.folder / ".git" / "shallow").write_text(hotel.run("git", "rev-parse", "HEAD").stdout)
    refused = hotel.samefold("update", "--from", str(source.folder), "--to", "HEAD", code=1)
    assert "git fetch --unshallow" in refused.stderr
    shallow.unlink()
    told = hotel.samefold("doctor", code=None).stdout
    assert f"3 changed here: docs/limits.md, {ENGINE_FILE}, {merged}" in told

    newer = Tree(Path(shutil.copytree(source.folder, tmp_path / "newer", symlinks=True)), tmp_path)
    newer.write(ENGINE_FILE, '"""How an agent reads the log', '"""A newer word on how an agent reads the log')
    with (newer.folder / "infra" / "errors.py").open("a") as file:
        file.write("\n\nNEWER = 1\n")
    (newer.folder / merged).write_text("# newer\n" + (newer.folder / merged).read_text())
    newer.write("copier.yml", '  - "/docs/first-event.md"\n', "")  # services get it from now on
    with (hotel.folder / ".samefold.sha256").open("a") as file:
        file.write(f"{'0' * 64}  docs/first-event.md\n")  # as an earlier release, which did not bring it
    hotel.commit("An earlier update")
    newer.commit("A newer engine")
    done = hotel.samefold("update", "--from", str(newer.folder), "--to", "HEAD", code=1)

    assert [line.strip() for line in done.stderr.splitlines() if line.startswith("  ") and "→" not in line] == [
        ENGINE_FILE
    ]
    assert "<<<<<<<" in (hotel.folder / ENGINE_FILE).read_text()
    both = (hotel.folder / merged).read_text()
    assert both.startswith("# newer")
    assert both.endswith("OURS = 1\n")
    assert "NEWER = 1" in (hotel.folder / "infra" / "errors.py").read_text()
    assert (hotel.folder / "docs" / "first-event.md").exists()
    assert not not_wanted.exists()

    assert "write access.py" in done.stdout
    assert not (hotel.folder / "access.py").exists()
    missing = hotel.run(sys.executable, "-S", "-c", "from infra.access import access; access()", code=1).stderr
    assert "There is no access.py" in missing


@pytest.mark.prove(part="new-services")
def test_a_changed_file_that_is_gone_in_the_newer_samefold_is_listed(source: Tree, hotel: Tree, tmp_path: Path) -> None:
    gone = "tools/dev/prerequisites.sh"
    (hotel.folder / gone).write_text((hotel.folder / gone).read_text() + "\n# ours\n")
    hotel.commit("A change of our own")
    before = hotel.digests()
    newer = Tree(Path(shutil.copytree(source.folder, tmp_path / "newer", symlinks=True)), tmp_path)
    newer.git("rm", "--quiet", gone)
    newer.commit("One file less")
    newer.git("tag", "v1.0.0", "HEAD~1")

    refused = hotel.samefold("update", "--from", str(newer.folder), "--to", "nowhere", code=1).stderr
    assert "invalid reference: nowhere" in refused
    assert hotel.digests() == before
    assert hotel.git("status", "--porcelain") == ""

    hotel.git("config", "status.showUntrackedFiles", "no")
    (notes := hotel.folder / "notes.txt").write_text("not in git")
    refused = hotel.samefold("update", "--from", str(newer.folder), "--to", "nowhere", code=1).stderr
    assert "not committed" in refused
    notes.unlink()

    done = hotel.samefold("update", "--from", str(newer.folder), "--to", "HEAD", code=1)
    assert gone in done.stderr
    assert "git show HEAD:FILE" in done.stdout
    hotel.commit("A newer Samefold")
    older = hotel.samefold("update", "--from", str(newer.folder), "--to", "HEAD~1", code=1).stderr
    assert "revert the commit of the update" in " ".join(older.split())
    unreleased = hotel.samefold("update", "--from", str(newer.folder), code=1).stderr
    assert "newer than Samefold's newest release" in " ".join(unreleased.split())
    assert hotel.git("status", "--porcelain") == ""


@pytest.mark.prove(part="new-services")
def test_a_core_table_that_is_new_comes_along(source: Tree, hotel: Tree, data: Path) -> None:
    newer = Tree(Path(shutil.copytree(source.folder, data / "newer", symlinks=True)), data)
    versions = newer.folder / "infra" / "database" / "migrations"
    program = "from infra.database.revisions import heads; print(heads()['core'])"
    head = newer.run(sys.executable, "-c", program).stdout.strip()
    (versions / "2026_12_01_0123456789ab_more.py").write_text(
        '"""more"""\n\nfrom alembic import op\n\nrevision = "0123456789ab"\n'
        f'down_revision = "{head}"\n\n\ndef upgrade() -> None:\n    op.execute("create table more_v1 (a int)")\n'
    )
    newer.write(
        "projections/engine/views/core_views.py",
        f"OUTCOMES_VERSION = {OUTCOMES_VERSION} ",
        f"OUTCOMES_VERSION = {OUTCOMES_VERSION + 1} ",
    )
    newer.commit("A core migration")
    hotel.use(data)
    hotel.samefold("dev", "up")
    try:
        hotel.samefold("db", "upgrade")
        done = hotel.samefold("update", "--from", str(newer.folder), "--to", "HEAD")
        assert "samefold rebuild" in done.stdout
        assert f"'command_outcomes' is at version {OUTCOMES_VERSION + 1}" in done.stdout
        behind = hotel.samefold("db", "check", code=1)
        assert "samefold db upgrade" in behind.stderr
        upgraded = json.loads(hotel.samefold("db", "upgrade", "--json").stdout)
        assert "0123456789ab" in upgraded["after"]
    finally:
        hotel.samefold("dev", "down")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("new", "{here}", "--context", "rooms"), "is not empty"),
        (("new", "{empty}", "--context", "Rooms"), "can't be the name of a context"),
        (("new", "{empty}", "--context", "rooms", "--name", "rich"), "name of a package"),
        (("add", "event", "NameGiven", "name:Wrong", "--context", "accounts"), "is not a type"),
        (("update",), "has no .samefold.yml"),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, tuple) else "",
)
def test_what_can_not_be_done_is_told_and_changes_nothing(
    source: Tree, tmp_path: Path, arguments: tuple[str, ...], told: str
) -> None:
    before = source.digests()
    places = {"here": source.folder, "empty": tmp_path / "empty"}
    said = source.samefold(*(one.format(**places) for one in arguments), code=1).stderr
    assert told in " ".join(said.split())
    assert "→" in said
    assert "Traceback" not in said
    assert source.digests() == before
    assert not (tmp_path / "empty").exists()
