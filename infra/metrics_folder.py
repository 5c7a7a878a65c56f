"""Where processes of one supervisor share their metrics: files in a folder, which the one that is asked adds up.

Apart from `infra/metrics.py`, so that a supervisor need not load Prometheus' client to make it and keep it tidy.
"""

from __future__ import annotations

from pathlib import Path

FOLDER = "PROMETHEUS_MULTIPROC_DIR"
"""The client's own name for it."""
PROCESS = "PROMETHEUS_PROCESS"


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
