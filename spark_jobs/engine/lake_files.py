"""The lake's files: Parquet files of each dataset below `_samefold`, and its manifest, which says which of them count.

In a folder, a dataset is a link to a folder with hard links to its files, and the manifest. To move that link is one step: whatever
reads Parquet has the dataset before a run or after it. An object store has no links: there the manifest, one object, says it.
What a run does not need any more stays until the next one, for those who read it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from uuid import uuid4

import msgspec
import pyarrow.parquet as pq

from infra.archive.store import Files
from infra.errors import SamefoldError
from infra.processes.faultpoints import reach
from infra.settings import Settings

SILVER = "events"
"""The folder of the datasets of event classes."""
HIDDEN, DATA, MANIFEST = "_samefold", "data", "_manifest.json"


class LakeUnavailable(SamefoldError):
    """The lake's store can't be reached, refuses access, or is not known to fsspec."""


class File(msgspec.Struct, frozen=True):
    path: str
    """The run that wrote it, and its place in the dataset: `5f0c…/day=2026-11-29/part-….parquet`."""
    rows: int
    size: int
    """In bytes."""

    @property
    def place(self) -> str:
        return self.path.partition("/")[2]


class Manifest(msgspec.Struct, frozen=True):
    """A dataset as its last run left it. It holds the log up to `ends`, an offset of each partition."""

    version: str
    code: str
    """Digest of the code that made it."""
    topic_id: str
    ends: Mapping[int, int]
    columns: str
    partitioned_by: tuple[str, ...]
    incremental: bool
    files: tuple[File, ...]
    at: datetime
    """When the run took the log's end."""


class Lake(Files):
    """Datasets by their names below `lake_url`. In a folder, `is_local`, they are links. Every method raises LakeUnavailable."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings.lake, "lake", LakeUnavailable)

    def datasets(self, *, left: bool = False) -> list[str]:
        """The datasets that are there; with `left` also those of which a killed run left files."""

        def below(base: str) -> list[str]:
            return [f"{folder}{name}" for folder in ("", f"{SILVER}/") for name in sorted(self.names(base + folder))]

        there = [name for name in below("") if not name.startswith(HIDDEN) and self.manifest(name)]
        return sorted({*there, *below(f"{HIDDEN}/")} - {SILVER}) if left else there

    def manifest(self, name: str) -> Manifest | None:
        """None also where another release wrote one that this one does not know: then the dataset is made again."""
        with suppress(msgspec.DecodeError):
            return msgspec.json.decode(self.read(f"{name}/{MANIFEST}") or b"", type=Manifest)
        return None

    def seen(self, name: str, file: File) -> tuple[str, str]:
        """Where readers find a file, and below which folder its place is."""
        base = self._at(name) if self.is_local else self.url_of(name, file.path.partition("/")[0])
        return f"{base}/{file.place}", base

    def folder(self, name: str) -> str:
        """The dataset as it is now: with links, a folder that does not change until the run after the next one begins."""
        return str(Path(self._at(name)).resolve()) if self.is_local else self._at(name)

    def url_of(self, name: str, path: str = "") -> str:
        """What Spark, and others, open to read or write a file of a dataset, or a folder of them."""
        at = str(self._files.unstrip_protocol(self._at(HIDDEN, name, DATA, path)))
        return at.replace("s3://", "s3a://", 1) if at.startswith("s3://") else at

    def _paths(self, name: str, run: str = "") -> list[str]:
        """All files that a run has written, or any run, and no run has removed since."""
        base = self._at(HIDDEN, name, DATA)
        with self._naming():
            self._files.invalidate_cache()
            return sorted(path[len(base) + 1 :] for path in self._files.find(self._at(HIDDEN, name, DATA, run)))

    def files(self, name: str, run: str) -> list[File]:
        """The Parquet files of a run, made durable where the store is this machine's."""
        found = []
        with self._naming():
            # a task that Spark gave up may still write, below `_temporary`
            for path in (one for one in self._paths(name, run) if one.endswith(".parquet") and "/_" not in one):
                with self._files.open(at := self._at(HIDDEN, name, DATA, path)) as file:
                    found.append(File(path, pq.ParquetFile(file).metadata.num_rows, self._files.size(at)))
                    if self.is_local:
                        os.fsync(file.fileno())
        return found

    def commit(self, name: str, manifest: Manifest) -> None:
        """Make it the dataset that readers see, in one step."""
        content = msgspec.json.encode(manifest)
        with self._naming():
            if not self.is_local:
                self._files.pipe_file(self._at(name, MANIFEST), content)
                return
            target, hidden = Path(self._at(name)), Path(self._at(HIDDEN, name))
            folder = hidden / uuid4().hex
            for file in manifest.files:
                (folder / file.place).parent.mkdir(parents=True, exist_ok=True)
                (folder / file.place).hardlink_to(hidden / DATA / file.path)
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / MANIFEST).open("wb") as out:
                out.write(content)
                out.flush()
                os.fsync(out.fileno())
            reach("dataset assembled")
            target.parent.mkdir(parents=True, exist_ok=True)
            (link := folder / ".link").symlink_to(os.path.relpath(folder, target.parent))
            link.replace(target)

    def sweep(self, name: str) -> None:
        """Remove what killed runs left, and what the last one did not need any more."""
        manifest, hidden = self.manifest(name), self._at(HIDDEN, name)
        if manifest is None and self.read(f"{name}/{MANIFEST}"):
            return  # another release's: readers have its files until this one's are there
        needed = {file.path for file in manifest.files} if manifest else set()
        with self._naming():
            for run in {*self.names(f"{HIDDEN}/{name}/{DATA}")} - {path.partition("/")[0] for path in needed}:
                self._files.rm(f"{hidden}/{DATA}/{run}", recursive=True)
            for path in {*self._paths(name)} - needed:
                self._files.rm_file(f"{hidden}/{DATA}/{path}")
            if self.is_local:
                kept = {DATA, Path(self._at(name)).resolve().name}
                for folder in {*self.names(f"{HIDDEN}/{name}")} - kept:
                    self._files.rm(f"{hidden}/{folder}", recursive=True)

    def drop(self, name: str) -> None:
        """Readers lose it in one step; then its files are removed."""
        self.remove(name if self.is_local else f"{name}/{MANIFEST}")
        with self._naming(), suppress(FileNotFoundError):  # an object store has no folder without files
            self._files.rm(self._at(HIDDEN, name), recursive=True)
