"""Where processes of one supervisor share their metrics: files in a folder, which the one that is asked adds up.

Apart from `infra/observability/metrics.py`, so that a supervisor need not load Prometheus' client to make it and keep it tidy.
"""

from __future__ import annotations

import fcntl
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FOLDER = "PROMETHEUS_MULTIPROC_DIR"
"""The client's own name for it."""
PROCESS = "PROMETHEUS_PROCESS"
NAME = "samefold-metrics-"
LOCK = "supervisor.lock"


@contextmanager
def made() -> Iterator[Path]:
    """A folder for as long as the block runs. Those of supervisors that were killed are removed first."""
    _sweep()
    hidden = Path(tempfile.mkdtemp(prefix=f".{NAME}"))
    with (hidden / LOCK).open("w") as lock:
        # held until the process ends, however it ends; found by others only from now on
        fcntl.flock(lock, fcntl.LOCK_EX)
        folder = hidden.rename(hidden.with_name(hidden.name[1:]))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _sweep() -> None:
    for lock in Path(tempfile.gettempdir()).glob(f"{NAME}*/{LOCK}"):
        try:
            with lock.open("r+") as handle:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent, ignore_errors=True)
        except OSError:
            continue  # its supervisor lives, or it is somebody else's


def environment(folder: Path, process: str) -> dict[str, str]:
    """For a process that is to share its metrics with others in `folder`. No two that run at once may have the same name."""
    return {FOLDER: str(folder), PROCESS: process}


def ended(folder: Path, process: str) -> None:
    """What the process was at the moment (gauges) it is no more; what it counted stays, and is counted on when it starts again."""
    for file in folder.glob(f"gauge_live*_{stem(process)}.db"):
        file.unlink(missing_ok=True)


def stem(process: str) -> str:
    """A process's name in those of its files, which underscores divide."""
    return process.replace("_", "-")
