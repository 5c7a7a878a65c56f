"""One wall clock for all processes of a run, which jumps: `clock.c`, built with the machine's C compiler."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

FILE, SOURCE = "CLOCK_FILE", Path(__file__).with_name("clock.c")


def start_under_the_clock() -> None:
    """Start this program again, so that it and all that it starts have the clock; returns where they have."""
    if FILE in os.environ:
        return
    folder = Path(tempfile.mkdtemp(prefix="samefold-clock-"))
    folder.chmod(0o755)  # where this is root, PostgreSQL runs as nobody
    library, file = folder / "clock.so", folder / "seconds"
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, SOURCE, "-ldl", "-lpthread"], check=True)
    file.write_bytes(struct.pack("q", 0))
    os.execve(sys.executable, sys.orig_argv, os.environ | {"LD_PRELOAD": str(library), FILE: str(file)})


def remove_clock() -> None:
    """Remove its files; this program keeps the time that it has."""
    shutil.rmtree(Path(os.environ[FILE]).parent)


def jump(time: timedelta) -> None:
    """Let so much time have passed, for all processes at once."""
    with Path(os.environ[FILE]).open("r+b") as file:
        (ahead,) = struct.unpack("q", file.read(8))
        file.seek(0)
        file.write(struct.pack("q", ahead + round(time.total_seconds())))
