"""Processes that start in a moment: forked from one that has imported the libraries, and none of the service's code.

Importing the libraries takes a process seconds, which an author who waits for a saved file would wait each time. They are forked
while nothing runs in the process that they are forked from: no thread, no connection. For development: in production each process
imports what it needs, and no more.
"""

import importlib
import multiprocessing
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from typing import Any

from infra.processes.supervised import run

LIBRARIES = """
aiokafka alembic.autogenerate alembic.command confluent_kafka.admin cryptography.fernet fastapi fastapi_offline faust httpx
mode msgspec
prometheus_client psutil psycopg psycopg_pool pydantic pydantic_settings rich.progress sqlalchemy.dialects.postgresql sqlglot
standardwebhooks starlette.routing typer uvicorn
"""
"""What takes long to import. One that is not installed is left out."""


def prepare() -> None:
    """Start the process that the others are forked from; it imports the libraries meanwhile."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(LIBRARIES.split())
    Warm(int)


class Warm(ForkServerProcess):
    """Such a process, started, which a supervisor handles like a `subprocess.Popen`. It ends with this process."""

    stdin = None

    def __init__(self, work: Callable[..., object], *arguments: Any) -> None:
        super().__init__(target=_begin, args=(work, *arguments))
        self.start()

    @property
    def returncode(self) -> int | None:
        return self.exitcode

    def poll(self) -> int | None:
        return self.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self.join(timeout)
        if self.exitcode is None:
            raise subprocess.TimeoutExpired(self.name, timeout or 0)
        return self.exitcode

    def send_signal(self, number: int) -> None:
        if self.exitcode is None:
            os.kill(self.pid or 0, number)


def start_module(module: str, arguments: Sequence[str], environment: Mapping[str, str]) -> Warm:
    """Run a module as a program."""
    return Warm(_run, module, arguments, dict(environment))


def _begin(work: Callable[..., object], *arguments: Any) -> None:
    os.setsid()  # Ctrl-C reaches the parent only, which then ends this one
    importlib.invalidate_caches()  # files may be new since the libraries were imported
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=end_with_parent, daemon=True, name="parent-watch").start()
    work(*arguments)


def _run(module: str, arguments: Sequence[str], environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    run(module, arguments)
