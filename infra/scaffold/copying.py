"""Samefold's own files in a service: copied, updated and compared. Copier does the work (copier.yml says which files).

Copier takes them from Samefold's public address, which the service's `.samefold.yml` names. Where a clone on this machine is given,
git reads that clone in its place, so that no network is needed and no path of this machine is written down.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from infra.errors import SamefoldError

PUBLIC = "https://github.com/samefold/samefold.git"
ANSWERS = ".samefold.yml"
MANIFEST = ".samefold.sha256"
"""Samefold's files as they came, in the format of `sha256sum`."""


class NotAService(SamefoldError):
    """The folder was not made by `samefold new`."""


class NotClean(SamefoldError):
    """There are changes that are not committed."""


class NotCopied(SamefoldError):
    """Samefold's files could not be copied or updated."""


@dataclass(frozen=True, slots=True)
class Updated:
    """From which commit of Samefold to which, and the files in which a local change and a newer one conflict."""

    before: str
    after: str
    conflicts: list[str]


def copy(clone: Path, folder: Path, name: str) -> None:
    """Samefold's files, as the clone's last commit has them, into a folder that is not there yet. Raises NotCopied."""
    _copier(clone, "copy", "--vcs-ref", "HEAD", "--data", f"name={name}", PUBLIC, str(folder))
    (folder / MANIFEST).write_text(_manifest(folder))


def update(root: Path, ref: str | None, clone: Path | None) -> Updated:
    """Take over a newer Samefold: the newest release, or what `ref` names.

    Files that nobody changed are replaced; in others both changes are merged. Raises NotAService, NotClean, NotCopied.
    """
    before = answers(root)
    if git(root, "status", "--porcelain"):
        raise NotClean(f"{root} has changes that are not committed.", "Commit or stash them, then update again.")
    wanted = ("--vcs-ref", ref) if ref else ()
    _copier(clone, "update", "--conflict", "inline", "--answers-file", ANSWERS, *wanted, cwd=root)
    after = answers(root)
    with tempfile.TemporaryDirectory() as scratch:
        fresh = Path(scratch) / "fresh"
        _copier(clone, "copy", "--vcs-ref", after["_commit"], "--data", f"name={after['name']}", PUBLIC, str(fresh))
        (root / MANIFEST).write_text(_manifest(fresh))
    conflicts = sorted({line.partition("\t")[2] for line in git(root, "ls-files", "--unmerged").splitlines()})
    return Updated(before["_commit"], after["_commit"], conflicts)


def answers(root: Path) -> Mapping[str, str]:
    """What `.samefold.yml` says: the service's name, and the commit of Samefold that it stands at. Raises NotAService."""
    import yaml  # comes with Copier, which a production image does not hold

    try:
        told: dict[str, str] = yaml.safe_load((root / ANSWERS).read_text())
    except FileNotFoundError:
        raise NotAService(
            f"{root} has no {ANSWERS}: `samefold new` did not make it.", "Run this in a service's folder."
        ) from None
    return {key: str(value) for key, value in told.items()}


def changed(root: Path) -> list[str] | None:
    """Samefold's files that were changed or removed here; None where there is no list of them, as in Samefold itself."""
    if not (root / MANIFEST).exists():
        return None
    lines = (line.split("  ", 1) for line in (root / MANIFEST).read_text().splitlines())
    return [name for digest, name in lines if not (root / name).is_file() or _digest(root / name) != digest]


def git(folder: Path, *arguments: str) -> str:
    """Run git there; what it printed. Raises NotCopied with what it said."""
    return _run(["git", *arguments], folder, _environment(None))


def _copier(clone: Path | None, act: str, *arguments: str, cwd: Path | None = None) -> None:
    with (
        tempfile.TemporaryDirectory() as cache
    ):  # of its own: the public address may stand for another clone the next time
        command = [sys.executable, "-m", "copier", act, "--quiet", "--defaults", *arguments]
        _run(command, cwd, _environment(clone) | {"XDG_CACHE_HOME": cache})


def _environment(clone: Path | None) -> dict[str, str]:
    """For git where HOME may be empty: who commits, and, for a clone on this machine, that it stands for the public address."""
    config = {"safe.directory": "*"}
    if clone is not None:
        config[f"url.{clone.resolve()}.insteadOf"] = PUBLIC
    if subprocess.run(["git", "config", "user.email"], capture_output=True, check=False).returncode:
        config |= {"user.name": "Samefold", "user.email": "samefold@localhost"}
    told = {"GIT_CONFIG_COUNT": str(len(config))}
    for number, (key, value) in enumerate(config.items()):
        told |= {f"GIT_CONFIG_KEY_{number}": key, f"GIT_CONFIG_VALUE_{number}": value}
    return os.environ | told


def _run(command: list[str], cwd: Path | None, environment: dict[str, str]) -> str:
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()
        program = "Copier" if "copier" in command else "git"
        raise NotCopied(
            f"{program} failed: {said[-1] if said else 'it said nothing'}.", "Look at what it says; nothing was kept."
        )
    return done.stdout


def _manifest(folder: Path) -> str:
    names = sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())
    return "".join(f"{_digest(folder / name)}  {name}\n" for name in names if name not in (ANSWERS, MANIFEST))


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
