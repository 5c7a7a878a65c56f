"""The next release's command line, as whoever deploys it would type it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from infra.errors import SamefoldError

WITHIN_S = 180.0
GRACE_S = 15.0
DIFFERENCES = 1
"""The exit code of a verify that found some, which it told."""


class CommandFailed(SamefoldError):
    """A command of the next release did not do what it should."""


class CommandLine:
    """`samefold` of the tree in `folder`."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self._folder = folder
        self._environment = os.environ | environment

    def told(self, *arguments: str) -> dict[str, Any]:
        """What the command says with `--json`. Raises CommandFailed."""
        found: dict[str, Any] = json.loads(self.run(*arguments, "--json").splitlines()[-1])
        return found

    def run(self, *arguments: str) -> str:
        """What the command prints. It ends, with all that it started, when this is interrupted. Raises CommandFailed."""
        typed = f"samefold {' '.join(arguments)}"
        with subprocess.Popen(
            [sys.executable, "-c", "from infra.cli import main; main()", *arguments],
            cwd=self._folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C reaches the demo only, which then ends this in order
        ) as process:
            try:
                output, errors = process.communicate(timeout=WITHIN_S)
            except subprocess.TimeoutExpired as error:
                raise CommandFailed(f"`{typed}` did not end within {WITHIN_S:.0f} s.") from error
            finally:
                if process.poll() is None:
                    _end(process)
        if process.returncode and not (process.returncode == DIFFERENCES and output):
            raise CommandFailed(
                f"`{typed}` ended with exit code {process.returncode}.",
                "It said: " + " | ".join([*output.splitlines(), *errors.splitlines()][-8:]),
            )
        return output


def _end(process: subprocess.Popen[str]) -> None:
    """With all that it started: a Spark driver has a JVM, which has workers, all of its session."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, number)
            process.wait(GRACE_S)
