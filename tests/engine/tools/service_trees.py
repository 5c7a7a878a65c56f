"""Checkouts to run commands in: Samefold's repository, of this very tree with what is not committed, and services made from it."""

from __future__ import annotations

import compileall
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from infra.settings import PREFIX
from tools.testing.fixtures import ROOT

SAMEFOLD = "from tools.cli import main; main()"


def copy_of_this_tree(folder: Path, *, without: Collection[str] = ()) -> Path:
    """All files but those below these names at the top."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True)
    for name in listed.stdout.decode().splitlines():
        if name.partition("/")[0] not in without and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def copy_of_the_image(folder: Path) -> Path:
    """What the Dockerfile takes by `COPY . .` and compiles."""
    ignored = {line.removesuffix("/") for line in (ROOT / ".dockerignore").read_text().splitlines()}
    compileall.compile_dir(copy_of_this_tree(folder, without=ignored), quiet=1)
    return folder


class Tree:
    """A checkout whose code processes run, with no other settings, and a home where nothing is."""

    def __init__(self, folder: Path, home: Path) -> None:
        self.folder = folder
        others = {name: value for name, value in os.environ.items() if not name.startswith((PREFIX, "GIT_", "PYTHON"))}
        self.environment = others | {
            "HOME": str(home),
            "PYTHONPATH": str(folder),
            "PYTHONSAFEPATH": "1",
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "MYPY_CACHE_DIR": str(home / "mypy"),  # of all trees of a home: they differ in a few files
        }

    def use(self, data: Path, port: int = 8000) -> None:
        """From now on the development stack in this folder, and an API on this port."""
        self.environment |= {"SAMEFOLD_DATA_DIR": str(data), "SAMEFOLD_API_PORT": str(port)}

    def run(self, *command: str, code: int | None = 0) -> CompletedProcess[str]:
        """Run it there; it must end with this exit code, or with any."""
        done = subprocess.run(
            command, cwd=self.folder, env=self.environment, capture_output=True, text=True, check=False
        )
        assert code in (None, done.returncode), f"{command}: {done.stdout}{done.stderr}"
        return done

    def samefold(self, *arguments: str, code: int | None = 0) -> CompletedProcess[str]:
        return self.run(sys.executable, "-c", SAMEFOLD, *arguments, code=code)

    def git(self, *arguments: str) -> str:
        identity = ("-c", "user.name=Test", "-c", "user.email=test@localhost")
        return self.run("git", *identity, *arguments).stdout

    def commit(self, message: str) -> None:
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message", message)

    def check(self, *tests: str) -> None:
        """What `make check` runs, and its tests, or these."""
        for command in (
            ("ruff", "check", "."),
            ("ruff", "format", "--check", "."),
            ("mypy",),
            ("pytest", "-q", *tests),
        ):
            self.run(sys.executable, "-m", *command)

    def write(self, name: str, old: str, new: str) -> None:
        text = (self.folder / name).read_text()
        assert text.count(old) == 1, f"{name} has {old!r} {text.count(old)} times"
        (self.folder / name).write_text(text.replace(old, new))

    def digests(self) -> dict[str, str]:
        files = (name for name in self.git("ls-files").splitlines() if (self.folder / name).is_file())
        return {name: hashlib.sha256((self.folder / name).read_bytes()).hexdigest() for name in files}


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory, home: Path) -> Tree:
    """Samefold's repository."""
    tree = Tree(copy_of_this_tree(tmp_path_factory.mktemp("samefold")), home)
    tree.git("init", "--quiet", "--initial-branch", "main")
    tree.commit("Samefold")
    return tree


@pytest.fixture(scope="session")
def made(source: Tree, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It is made where git signs commits, which fails, and has a hook that refuses them."""
    place = tmp_path_factory.mktemp("made")
    (hook := place / "hooks" / "pre-commit").parent.mkdir()
    hook.write_text("#!/bin/sh\nexit 1\n")
    hook.chmod(0o700)
    config = f"[commit]\n\tgpgsign = true\n[gpg]\n\tprogram = false\n[core]\n\thooksPath = {hook.parent}\n"
    (place / ".gitconfig").write_text(config)
    folder = place / "hotel"
    told = Tree(source.folder, place).samefold("new", str(folder), "--context", "rooms").stdout
    assert "make run" in told
    return folder


@pytest.fixture
def hotel(made: Path, home: Path, tmp_path: Path) -> Tree:
    """A copy of the service for each test, as it was made."""
    return Tree(Path(shutil.copytree(made, tmp_path / "hotel", symlinks=True)), home)


@pytest.fixture
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder that PostgreSQL gets into where it has to run as another user."""
    folder = tmp_path_factory.mktemp("data")
    folder.chmod(0o711)
    for parent in folder.parents[:2]:
        parent.chmod(0o711)
    return folder
