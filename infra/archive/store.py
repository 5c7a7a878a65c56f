"""The store of the archive's files, and what any store has: a folder, or any file system of fsspec.

Credentials come from the environment of fsspec's libraries, so no setting and no message holds them.
"""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from infra.database.connect import Connection
from infra.errors import SamefoldError, in_words
from infra.processes.faultpoints import reach
from infra.settings import Settings


class ArchiveAway(SamefoldError):
    """The archive's store is unavailable, refuses access, or is not known to fsspec."""


class WrongArchive(SamefoldError):
    """A process reaches another archive than the database's."""


IDENTITY = "_samefold-archive"
"""The file with the archive's id, which the database has too. Tools that read Parquet skip such names."""


class Files:
    """Files by their path below a URL: a folder, or any file system of fsspec. Every method raises `away`."""

    def __init__(self, url: str, what: str, away: type[SamefoldError]) -> None:
        """`what` is `archive` or `lake`."""
        import fsspec
        from fsspec.implementations.local import LocalFileSystem

        self.url, self._what, self._away = url, what, away
        with self._naming():
            self._files, root = fsspec.core.url_to_fs(url)
        self._root = str(root).rstrip("/")
        self.is_local = isinstance(self._files, LocalFileSystem)

    def read(self, path: str) -> bytes | None:
        """None where there is no such file."""
        with self._naming(), suppress(FileNotFoundError, NotADirectoryError):
            return bytes(self._files.cat_file(self._at(path)))
        return None

    def names(self, folder: str) -> list[str]:
        """The names of a folder's files, temporary ones too; none where there is no folder."""
        with self._naming(), suppress(FileNotFoundError):
            self._files.invalidate_cache()
            return [str(one).rsplit("/", 1)[-1] for one in self._files.ls(self._at(folder), detail=False)]
        return []

    def remove(self, path: str) -> None:
        """Remove a file if it exists."""
        with self._naming(), suppress(FileNotFoundError):
            self._files.rm_file(self._at(path))

    def _at(self, *path: str) -> str:
        return "/".join((self._root, *filter(None, path)))

    @contextmanager
    def _naming(self) -> Iterator[None]:
        try:
            yield
        except SamefoldError:
            raise
        except Exception as error:  # each of fsspec's libraries has errors of its own
            raise self._away(
                f"The {self._what} at {self.url} is unavailable: {in_words(error)}.",
                f"Is SAMEFOLD_{self._what.upper()}_URL right, is its library installed, does the store run, has it room, and does "
                "it grant access? The library reads credentials from its own environment.",
            ) from error


class Store(Files):
    """The archive's files. A file is written completely or not at all."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings.archive, "archive", ArchiveAway)

    def put(self, path: str, content: bytes) -> bool:
        """Write a file durably. Two processes may put the same content at once.

        False where another archiver swept the file before it had its name. Raises ArchiveAway.
        """
        with self._naming():
            if self.is_local:
                placed = _place(Path(self._root), path, content)
            else:
                # not every store replaces a file in one step
                placed = self.read(path) == content or self._files.pipe_file(self._at(path), content) is None
        reach("file placed")
        return placed


def opened(settings: Settings, connection: Connection, topic: str) -> Store:
    """The store of a topic's archive, checked to be the one that the database knows.

    Raises WrongArchive, ArchiveAway, psycopg.Error.
    """
    store = Store(settings)
    known = _known(connection, topic)
    found = (store.read(IDENTITY) or b"").strip() if known else b""  # a file written by hand ends with a newline
    if known and found != known.encode():
        raise WrongArchive(
            f"The archive at {settings.archive}, as a process on {socket.gethostname()} reaches it, is not the database's, "
            f"{known}: its file {IDENTITY} {'has another id' if found else 'is missing'}.",
            "Set SAMEFOLD_ARCHIVE_URL to the database's archive on every machine. If only that file was lost, write it again.",
        )
    return store


def adopt(settings: Settings, connection: Connection, topic: str, *, empty: bool) -> None:
    """Record this archive's id in the database, unless it has one. `empty`: the manifest lists no file yet.

    Raises ArchiveAway, psycopg.Error.
    """
    store = Store(settings)
    found = (store.read(IDENTITY) or b"").strip()
    identity = found.decode(errors="replace") if found else uuid4().hex
    updated = connection.execute(
        "update topics set archive = %s where topic = %s and archive is null", (identity, topic)
    )
    # several processes may start at once, or one may have died right here: only the database's id counts
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
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)  # its entries
        finally:
            os.close(handle)
    return True
