"""The lake's files: a folder of Parquet files for each dataset, and its manifest, which says which files those are.

A run writes its files where no reader looks, below `_samefold`. In a folder, a dataset is a link to the newest run's folder, which
also has the files that stay, by hard links. To move the link is one step: whatever reads Parquet has the dataset before the run or
after it. An object store has no links: there the manifest, one object, says which files a dataset has.

The files of the run before stay until the next run, for those who read them.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from uuid import uuid4

import msgspec
import pyarrow.parquet as pq

from infra.errors import SamefoldError, in_words
from infra.log.rule import Reading
from infra.processes.faultpoints import reach
from infra.settings import Settings

HIDDEN = "_samefold"
MANIFEST = "_manifest.json"
LINK = ".link"
"""What the name of a link ends with before it is moved."""


class LakeUnavailable(SamefoldError):
    """The lake's store can't be reached, refuses access, or is not known to fsspec."""


class File(msgspec.Struct, frozen=True):
    run: str
    """The run that wrote it."""
    path: str
    """Below the dataset's folder."""
    rows: int
    size: int
    """In bytes."""

    @property
    def folder(self) -> str:
        return posixpath.dirname(self.path)


class Manifest(msgspec.Struct, frozen=True):
    """A dataset as its last run left it. It holds the log up to `positions`."""

    version: str
    code: str
    """Digest of the code that made it."""
    topic_id: str
    positions: Mapping[int, Reading]
    columns: str
    partitioned_by: tuple[str, ...]
    files: tuple[File, ...]
    run: str
    at: datetime = msgspec.field(default_factory=lambda: datetime.now(UTC))


class Lake:
    """Datasets by their names below `lake_url`."""

    def __init__(self, settings: Settings) -> None:
        """Raises LakeUnavailable for a URL that fsspec does not know."""
        import fsspec
        from fsspec.implementations.local import LocalFileSystem

        self.url = settings.lake
        try:
            self._files, root = fsspec.core.url_to_fs(self.url)
        except (ImportError, ValueError) as error:
            raise LakeUnavailable(
                f"fsspec can't open {self.url}: {error}.", "Correct SAMEFOLD_LAKE_URL, or install what it names."
            ) from error
        self._root = str(root).rstrip("/")
        self.has_links = isinstance(self._files, LocalFileSystem)

    def names(self) -> list[str]:
        """The datasets that are there."""
        with self._naming():
            self._files.invalidate_cache()
            found = [path for depth in ("*", "*/*") for path in self._files.glob(f"{self._root}/{depth}/{MANIFEST}")]
        return sorted(posixpath.dirname(path)[len(self._root) + 1 :] for path in found)

    def manifest(self, name: str) -> Manifest | None:
        with self._naming():
            try:
                return msgspec.json.decode(self._files.cat_file(self._at(name, MANIFEST)), type=Manifest)
            except FileNotFoundError:
                return None

    def where(self, name: str, file: File, *, hidden: bool = False) -> str:
        """What Spark opens to read a dataset's file, and so can others; `hidden`: before the run that writes it is committed."""
        return (
            self.url_of(name, file.path) if self.has_links and not hidden else self.run_url(name, file.run, file.path)
        )

    def run_url(self, name: str, run: str, path: str = "") -> str:
        return self.url_of(HIDDEN, name, run, *filter(None, [path]))

    def url_of(self, *path: str) -> str:
        """Spark's own URL of a path below the lake."""
        at = str(self._files.unstrip_protocol(self._at(*path)))
        return at.replace("s3://", "s3a://", 1) if at.startswith("s3://") else at

    def new_run(self, name: str) -> tuple[str, str]:
        """A run's name, and the URL of the folder that it writes to."""
        run = f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{uuid4().hex[:8]}"
        return run, self.run_url(name, run)

    def written(self, name: str, run: str, folder: str = "") -> list[File]:
        """The files that a run has written, made durable, as far as the store is this machine's."""
        base, found = self._at(HIDDEN, name, run), []
        with self._naming():
            self._files.invalidate_cache()
            for path, about in sorted(self._files.find(posixpath.join(base, folder), detail=True).items()):
                if path.endswith(".parquet"):
                    with self._files.open(path) as file:
                        rows = pq.ParquetFile(file).metadata.num_rows
                        if self.has_links:
                            os.fsync(file.fileno())
                    found.append(File(run, path[len(base) + 1 :], rows, about["size"]))
        return found

    def commit(self, name: str, manifest: Manifest) -> None:
        """Make a run's dataset the one that readers see, in one step."""
        content = msgspec.json.encode(manifest)
        with self._naming():
            if self.has_links:
                self._link(name, manifest, content)
            else:
                self._files.pipe_file(self._at(name, MANIFEST), content)

    def _link(self, name: str, manifest: Manifest, content: bytes) -> None:
        target, run = Path(self._at(name)), Path(self._at(HIDDEN, name, manifest.run))
        run.mkdir(parents=True, exist_ok=True)
        for file in manifest.files:
            if file.run != manifest.run:
                (run / file.folder).mkdir(parents=True, exist_ok=True)
                (run / file.path).hardlink_to(target / file.path)
        with (run / MANIFEST).open("wb") as out:
            out.write(content)
            out.flush()
            os.fsync(out.fileno())
        reach("dataset assembled")
        link = run.with_name(run.name + LINK)
        target.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(run, target.parent))
        link.replace(target)

    def sweep(self, name: str) -> None:
        """Remove what the dataset does not need: runs that were killed, and the one before the last."""
        manifest = self.manifest(name)
        needed = {one.run for one in manifest.files} if manifest and not self.has_links else set()
        needed |= {manifest.run} if manifest else set()
        with self._naming():
            try:
                runs = self._files.ls(self._at(HIDDEN, name), detail=False)
            except FileNotFoundError:
                return
            for path in runs:
                if posixpath.basename(path) not in needed:
                    Path(path).unlink() if path.endswith(LINK) else self._files.rm(path, recursive=True)

    def remove(self, name: str, file: File) -> None:
        """Remove a file that a run has written and does not need."""
        with self._naming():
            self._files.rm_file(self._at(HIDDEN, name, file.run, file.path))

    def drop(self, name: str) -> None:
        """Readers lose it in one step; then its files are removed."""
        with self._naming():
            Path(self._at(name)).unlink() if self.has_links else self._files.rm_file(self._at(name, MANIFEST))
            self._files.rm(self._at(HIDDEN, name), recursive=True)

    def _at(self, *path: str) -> str:
        return "/".join((self._root, *path))

    @contextmanager
    def _naming(self) -> Iterator[None]:
        try:
            yield
        except SamefoldError:
            raise
        except Exception as error:  # each of fsspec's libraries has errors of its own
            raise LakeUnavailable(
                f"The lake at {self.url} is unavailable: {in_words(error)}",
                "Check that the store is running, has room and grants access; its library reads credentials from its environment.",
            ) from error
