"""Kafka and PostgreSQL together, under one data folder.

    stack = Stack(Path(".samefold"))
    stack.up()               # may be called by several processes at once, and after kill -9 of anything
    settings = stack.settings(partitions=4)
    stack.down()

The folder holds `kafka/`, `postgres/`, and while the stack is up `dev.env`, where `Settings` finds the endpoints.
"""

import errno
import os
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import Any

from domain.engine.personal.masters import new_line
from infra.errors import SamefoldError
from infra.processes.locks import locked
from infra.settings import DEV_ENV, PREFIX, Settings
from tools.dev.issuer import AUDIENCE, ISSUER, DevIssuer
from tools.dev.kafka import Kafka
from tools.dev.postgres import Postgres
from tools.dev.process import runs


class FolderUnusable(SamefoldError):
    """The data folder can't be created, or not be written to."""


class OtherServices(SamefoldError):
    """The settings name services that are not the development stack's."""


class Stack:
    """One data folder's broker and database server."""

    def __init__(
        self, data_dir: Path, *, settings: Mapping[str, str] = MappingProxyType({}), programs: Path | None = None
    ) -> None:
        """`settings` and `programs` are PostgreSQL's."""
        self.folder = data_dir.expanduser().resolve()
        self.kafka = Kafka(self.folder / "kafka")
        self.postgres = Postgres(self.folder / "postgres", programs=programs, more=settings)
        self._master_key = self.folder / "master-key"
        self.issuer = DevIssuer(self.folder / "issuer")

    def up(self) -> None:
        """Start what does not run; 0.1 s when both do.

        Raises FolderUnusable, StartFailed, JavaMissing, JarsMissing.
        """
        with self._alone(), ThreadPoolExecutor(2) as pool:
            # Both at once: each of them waits mostly for itself.
            for start in [pool.submit(self.kafka.start), pool.submit(self.postgres.start)]:
                start.result()
            self._write_dev_env()

    def down(self) -> None:
        """Stop what runs, even where the folder was removed under it; the data stays."""
        with self._alone() if self.folder.is_dir() else nullcontext():
            self._down()

    def reset(self) -> None:
        """Stop, and remove the data of both. What else lies in the folder stays."""
        with self._alone() if self.folder.is_dir() else nullcontext():
            self._down()
            for part in (self.kafka.folder, self.postgres.folder, self.issuer.keys.parent):
                shutil.rmtree(part, ignore_errors=True)
            self._master_key.unlink(missing_ok=True)

    def status(self) -> dict[str, Any]:
        return {
            "data_dir": str(self.folder),
            "kafka": _status(self.kafka, self.kafka.bootstrap),
            "postgres": _status(self.postgres, self.postgres.url()),
        }

    def settings(self, **overrides: Any) -> Settings:
        """Settings that point at this stack."""
        endpoints = {"kafka_bootstrap": self.kafka.bootstrap, "database_url": self.postgres.url()}
        return Settings(**{"data_dir": self.folder, **endpoints, **overrides})

    def dev_env(self) -> list[str]:
        """The values in `dev.env`, which is there while the stack is up, and after it was killed."""
        file = self.folder / DEV_ENV
        return [line.partition("=")[2] for line in file.read_text().splitlines()] if file.exists() else []

    def _down(self) -> None:
        # dev.env goes first: commands that start now get the hint "run `samefold dev up`", not a refused connection
        (self.folder / DEV_ENV).unlink(missing_ok=True)
        self.kafka.stop()
        self.postgres.stop()

    def _write_dev_env(self) -> None:
        self._master_key.touch(0o600)
        if not self._master_key.read_text():
            self._master_key.write_text(new_line("development") + "\n")
        endpoints = {"KAFKA_BOOTSTRAP": self.kafka.bootstrap, "DATABASE_URL": self.postgres.url()}
        self.issuer.make()
        tokens = {"JWT_ISSUER": ISSUER, "JWT_AUDIENCE": AUDIENCE, "JWT_KEYS": str(self.issuer.keys)}
        values = endpoints | {"MASTER_KEY_FILE": str(self._master_key), "CONSOLE": "true"} | tokens
        text = "".join(f"{PREFIX}{name}={value}\n" for name, value in values.items())
        new = self.folder / f"{DEV_ENV}.new"
        new.write_text("# Written by `samefold dev up`, removed by `samefold dev down`.\n" + text)
        new.replace(self.folder / DEV_ENV)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """One process at a time changes the stack."""
        make_folder(self.folder)
        with locked(self.folder / "lock", wait=True):
            yield


def development_stack(settings: Settings) -> Stack:
    """The stack that these settings name. Raises OtherServices where they name another Kafka or database."""
    stack = Stack(settings.data_dir)
    configured = {settings.kafka_bootstrap, settings.database_url and settings.database}
    if not configured <= {None, stack.kafka.bootstrap, stack.postgres.url(), *stack.dev_env()}:
        raise OtherServices(
            "The settings name another Kafka or database than the development stack's.",
            "Remove SAMEFOLD_KAFKA_BOOTSTRAP and SAMEFOLD_DATABASE_URL from the environment and .env; to use those services, "
            "`samefold run all`.",
        )
    return stack


def make_folder(folder: Path) -> None:
    """Create the data folder if it is not there. Raises FolderUnusable."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise FolderUnusable(
            f"The data folder {folder} can't be written to: {error.strerror}.",
            "Set SAMEFOLD_DATA_DIR to a folder of yours.",
        ) from None


def _status(service: Kafka | Postgres, endpoint: str) -> dict[str, Any]:
    main = service.process()
    return {
        "running": runs(service.folder),
        "answers": service.answers(),
        "pid": main.pid if main else None,
        "endpoint": endpoint,
        "log": str(service.log),
    }
