"""Copy, update and compare Samefold's own files in a service. Copier does the work; copier.yml lists the files.

Copier takes them from Samefold's public address, which the service's `.samefold.yml` names. If a clone on this machine is given,
git reads the clone instead: no network is needed, and no path of this machine is written down.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from infra.errors import SamefoldError

UNFINISHED = ("MERGE_HEAD", "CHERRY_PICK_HEAD", "REVERT_HEAD", "rebase-merge", "rebase-apply")
PUBLIC = "https://github.com/samefold/samefold.git"
ANSWERS = ".samefold.yml"
MANIFEST = ".samefold.sha256"
"""The hashes of Samefold's files as they were copied, in the format of `sha256sum`."""


class NotAService(SamefoldError):
    """The folder was not made by `samefold new`."""


class BrokenFile(SamefoldError):
    """One of Samefold's own notes in a service can't be read."""


class NotCopied(SamefoldError):
    """Samefold's files could not be copied or updated."""


@dataclass(frozen=True, slots=True)
class Updated:
    """What an update did: from which commit of Samefold to which, and the local changes that were not merged."""

    before: str
    after: str
    conflicts: list[str]
    """Files with marks where a local change and a newer one conflict."""
    removed: list[str]
    """Files that were changed here and that the newer Samefold does not have."""


def copy(clone: Path, folder: Path, name: str) -> None:
    """Copy Samefold's files, as of the clone's last commit, into a new folder. Raises NotCopied."""
    _copier(clone, "copy", "--vcs-ref", "HEAD", "--data", f"name={name}", PUBLIC, str(folder))
    (folder / MANIFEST).write_text(_manifest(folder))


def update(root: Path, ref: str | None, clone: Path | None) -> Updated:
    """Update Samefold's files to `ref`, by default the newest release.

    Replaces unchanged files and merges changed ones. Raises NotAService, BrokenFile, NotCopied; files are then as before.
    """
    before = answers(root)
    if git(root, "status", "--porcelain", "--untracked-files=all"):
        raise NotCopied(f"{root} has changes that are not committed.", "Commit or stash them, then update again.")
    if any((root / git(root, "rev-parse", "--git-path", name).strip()).exists() for name in UNFINISHED):
        raise NotCopied(f"{root} is in the middle of a merge or a rebase.", "Finish or abort it, then update again.")
    if git(root, "rev-parse", "--is-shallow-repository").strip() == "true":
        raise NotCopied(
            f"{root} is a shallow clone: it does not know which files of Samefold you have deleted.",
            "Run `git fetch --unshallow`, then update again.",
        )
    mine = [name for name in changed(root) or () if (root / name).exists()]
    wanted = ("--vcs-ref", ref) if ref else ()
    try:
        _copier(clone, "update", "--conflict", "inline", "--answers-file", ANSWERS, *wanted, cwd=root)
        after = answers(root)
        with tempfile.TemporaryDirectory() as scratch:
            fresh = Path(scratch) / "fresh"
            _copier(clone, "copy", "--vcs-ref", after["_commit"], "--data", f"name={after['name']}", PUBLIC, str(fresh))
            _add_newly_given(fresh, root)
            (root / MANIFEST).write_text(_manifest(fresh))
    except BaseException as error:
        git(root, "reset", "--quiet", "--hard")
        git(root, "clean", "--quiet", "-d", "--force")
        if ref is None and isinstance(error, NotCopied) and "downgrad" in error.message.lower():
            raise NotCopied(
                "This service is newer than Samefold's newest release.",
                "Wait for the next release, or take what is newer: `samefold update --to main`, with `--from` where it was given.",
            ) from None
        raise
    conflicts = sorted({line.partition("\t")[2] for line in git(root, "ls-files", "--unmerged").splitlines()})
    removed = [name for name in mine if not (root / name).exists()]
    return Updated(before["_commit"], after["_commit"], conflicts, removed)


def answers(root: Path) -> Mapping[str, str]:
    """What `.samefold.yml` holds: the service's name, and its commit of Samefold. Raises NotAService, BrokenFile."""
    import yaml  # comes with Copier, which a production image does not hold

    try:
        found = yaml.safe_load((root / ANSWERS).read_text())
    except FileNotFoundError:
        raise NotAService(
            f"{root} has no {ANSWERS}: `samefold new` did not make it.", "Run this in a service's folder."
        ) from None
    except (yaml.YAMLError, ValueError):
        found = None
    if not isinstance(found, dict) or not {"name", "_commit"} <= found.keys():
        raise _broken(ANSWERS)
    return {key: str(value) for key, value in found.items()}


def changed(root: Path) -> list[str] | None:
    """Samefold's files that were changed or removed here; None without a manifest, as in Samefold itself. Raises BrokenFile."""
    if not (root / MANIFEST).exists():
        return None
    return [name for digest, name in _entries(root) if not (root / name).is_file() or _digest(root / name) != digest]


def _entries(root: Path) -> list[tuple[str, str]]:
    """Hash and name of each file in the manifest. Raises BrokenFile."""
    try:
        lines = (root / MANIFEST).read_text().splitlines()
        return [(digest, name) for digest, name in (line.split("  ", 1) for line in lines)]
    except ValueError:
        raise _broken(MANIFEST) from None


def _add_newly_given(fresh: Path, root: Path) -> None:
    """Copy files that Samefold had before, but gives to services only now: Copier takes them for files that were deleted here.

    A deleted file is in the service's history. The manifest of an earlier release also lists files that it did not copy.
    """
    for file in fresh.rglob("*"):
        name = file.relative_to(fresh)
        if file.is_file() and not (root / name).exists():
            if git(root, "log", "-1", "--full-history", "--format=%h", "--", f":(literal){name}"):
                continue
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(file, root / name)


def _broken(name: str) -> BrokenFile:
    return BrokenFile(
        f"{name} can't be read.",
        f"Restore it from a commit in which it was right: `git log -- {name}`, then `git checkout COMMIT -- {name}`.",
    )


def git(folder: Path, *arguments: str) -> str:
    """Run git in a folder and return its output. Raises NotCopied."""
    return run(["git", *arguments], folder, _environment(folder))


def run(command: list[str], folder: Path | None, environment: Mapping[str, str]) -> str:
    """Run a program and return its output. Raises NotCopied with its error."""
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        output = (done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}").splitlines()
        error = next((line for line in output if "fatal:" in line), output[-1])
        text = re.sub(r"^.*fatal: ", "", error).strip().rstrip(".")
        program = next((name for name in ("copier", "git") if name in command), Path(command[0]).name)
        raise NotCopied(f"{program} failed: {text}.", _hint(text))
    return done.stdout


def _hint(error: str) -> str:
    if "downgrad" in error.lower():
        return "An update goes forward only. To go back, revert the commit of the update."
    return "Nothing was changed. Correct that, then run the command again."


def _copier(clone: Path | None, act: str, *arguments: str, cwd: Path | None = None) -> None:
    # a cache of its own: the public address may stand for another clone the next time
    with tempfile.TemporaryDirectory() as cache:
        command = [sys.executable, "-m", "copier", act, "--quiet", "--defaults", *arguments]
        run(command, cwd, _environment(Path("/"), clone) | {"XDG_CACHE_HOME": cache})


def _environment(folder: Path, clone: Path | None = None) -> dict[str, str]:
    """The environment for git: an identity if the folder has none, and the clone in place of the public address."""
    config = {"safe.directory": "*"}
    if clone is not None:
        config[f"url.{clone.resolve()}.insteadOf"] = PUBLIC
    for key, value in (("user.name", "Samefold"), ("user.email", "samefold@localhost")):
        try:
            known = subprocess.run(["git", "config", key], cwd=folder, capture_output=True, check=False)
        except FileNotFoundError:
            raise NotCopied(
                "git is not installed.", "Install it: `apt-get install git` or `brew install git`."
            ) from None
        if known.returncode:
            config[key] = value
    first = int(os.environ.get("GIT_CONFIG_COUNT") or 0)
    numbered = {"GIT_CONFIG_COUNT": str(first + len(config))}
    for number, (key, value) in enumerate(config.items(), first):
        numbered |= {f"GIT_CONFIG_KEY_{number}": key, f"GIT_CONFIG_VALUE_{number}": value}
    return os.environ | numbered


def _manifest(folder: Path) -> str:
    names = sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())
    return "".join(f"{_digest(folder / name)}  {name}\n" for name in names if name not in (ANSWERS, MANIFEST))


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
