"""Processes of the service, for tests that end them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from demo import tree
from infra.settings import Settings
from tools.testing.fixtures import ROOT


@contextmanager
def spawned(settings: Settings, log: Path, *command: str, code: Path = ROOT) -> Iterator[subprocess.Popen[bytes]]:
    """A process of the code in that folder, which works in its log's folder; it is killed at the end of the block."""
    with log.open("ab") as output:
        running = subprocess.Popen(
            command,
            env=os.environ | settings.environment() | tree.environment(code),
            cwd=log.parent,
            stdout=output,
            stderr=output,
        )
    try:
        yield running
    finally:
        running.kill()
        running.wait(30)
