"""Where archive files lie: a folder, or what else fsspec knows. Which of them count says the manifest, never a listing.

Credentials come from the environment of fsspec's own libraries, so they are in no setting and no message of ours.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from infra.database.connect import Connection
from infra.errors import SamefoldError
from infra.processes.faultpoints import reach
from infra.settings import Settings


class ArchiveAway(SamefoldError):
    """The archive's store does not answer, refuses, or is not known."""


class WrongArchive(SamefoldError):
    """A process has another archive than the one that the database knows."""


IDENTITY = "_samefold-archive"
"""The file that says which archive this is; the database knows it by the same. Tools that read Parquet pass such names over."""


class Store:
    """Files by their path below `archive_url`, each put wholly or not at all."""

    def __init__(self, settings: Settings) -> None:
        """Raises ArchiveAway for a URL that fsspec does not know."""
        import fsspec
        from fsspec.implementations.local import LocalFileSystem

        self._url = settings.archive
        try:
            self._files, root = fsspec.core.url_to_fs(self._url)
        except (ImportError, ValueError) as error:
            raise ArchiveAway(
                f"fsspec can't open {self._url}: {error}.", "Correct SAMEFOLD_ARCHIVE_URL, or install what it names."
            ) from error
        self._root = str(root).rstrip("/")
        self._is_local = isinstance(self._files, LocalFileSystem)

    def put(self, path: str, content: bytes) -> bool:
        """Write a file under its name, durably. Two that put the same content at once do no harm.

        False where somebody swept it away before it had its name. Raises ArchiveAway.
        """
        with self._naming():
            if self._is_local:
                placed = _place(Path(self._root), path, content)
            else:
                placed = self._has(path, content) or self._files.pipe_file(self._at(path), content) is None
        reach("file placed")
        return placed

    def read(self, path: str) -> bytes | None:
        """None where there is no such file. Raises ArchiveAway."""
        with self._naming(), suppress(FileNotFoundError):
            return bytes(self._files.cat_file(self._at(path)))
        return None

    def names(self, folder: str) -> list[str]:
        """The names of a folder's files, temporary ones too; none where there is no folder. Raises ArchiveAway."""
        with self._naming(), suppress(FileNotFoundError):
            self._files.invalidate_cache()
            return [str(one).rsplit("/", 1)[-1] for one in self._files.ls(self._at(folder), detail=False)]
        return []

    def remove(self, path: str) -> None:
        """It may be gone already. Raises ArchiveAway."""
        with self._naming(), suppress(FileNotFoundError):
            self._files.rm_file(self._at(path))

    def _at(self, path: str) -> str:
        return f"{self._root}/{path}"

    def _has(self, path: str, content: bytes) -> bool:
        """Whether it is there already: not every store replaces a file in one step."""
        return self.read(path) == content

    @contextmanager
    def _naming(self) -> Iterator[None]:
        try:
            yield
        except SamefoldError:
            raise
        except Exception as error:  # each of fsspec's libraries has errors of its own
            why = (error.strerror if isinstance(error, OSError) else None) or type(error).__name__
            raise ArchiveAway(
                f"The archive at {self._url} does not answer as it should: {why}.",
                "Look whether the store is there and lets you in; its library reads credentials from its own environment.",
            ) from error


def opened(settings: Settings, connection: Connection, topic: str) -> Store:
    """The archive of a topic: the one that the database knows, whatever the same URL means on this machine.

    Raises WrongArchive, ArchiveAway, psycopg.Error.
    """
    store = Store(settings)
    known = _known(connection, topic)
    found = (store.read(IDENTITY) or b"").strip() if known else b""  # written by hand, it ends with a line's end
    if known and found != known.encode():
        raise WrongArchive(
            f"The archive at {settings.archive}, as a process on {socket.gethostname()} reaches it, is not the one that the "
            f"database knows, {known}: its file {IDENTITY} {'says otherwise' if found else 'is not there'}.",
            "Set SAMEFOLD_ARCHIVE_URL, wherever a process runs, to what leads to that one. If only that file was lost, write it.",
        )
    return store


def adopt(settings: Settings, connection: Connection, topic: str, *, empty: bool) -> None:
    """Let the database know this archive from now on, unless it knows one. `empty`: none of its files counts yet.

    Raises ArchiveAway, psycopg.Error.
    """
    store = Store(settings)
    found = (store.read(IDENTITY) or b"").strip()
    identity = found.decode(errors="replace") if found else uuid4().hex
    updated = connection.execute(
        "update topics set archive = %s where topic = %s and archive is null", (identity, topic)
    )
    # of several that begin at once, or after one that died right here, one identity counts
    if not found and (known := _known(connection, topic)) and (empty or updated.rowcount == 1):
        store.put(IDENTITY, known.encode())


def _known(connection: Connection, topic: str) -> str | None:
    row = connection.execute("select archive from topics where topic = %s", (topic,)).fetchone()
    return row[0] if row else None


def _place(root: Path, path: str, content: bytes) -> bool:
    target = root / path
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f"{target.name}.{uuid4().hex}.tmp")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    reach("file written")
    try:
        temporary.replace(target)
    except FileNotFoundError:
        return False
    for folder in (parent for parent in target.parents if parent.is_relative_to(root)):
        _sync(folder)
    return True


def _sync(folder: Path) -> None:
    """Make a folder's entries last through a power failure."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
