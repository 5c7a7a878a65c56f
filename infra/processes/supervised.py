"""Runs a module as a child of the supervisor: it ends when its parent does, even when that was killed.

The parent holds the other end of the child's standard input and never writes to it, so its end is the parent's end. That works
on every POSIX system, unlike a death signal. Used as `python -m infra.processes.supervised MODULE [ARGUMENT…]`.
"""

import gc
import os
import runpy
import signal
import sys
import threading
from collections.abc import Sequence


def _end_with_parent() -> None:
    try:
        while os.read(0, 1):
            pass
    finally:  # also when it can't be watched any more
        os.kill(os.getpid(), signal.SIGTERM)


def run(module: str, arguments: Sequence[str]) -> None:
    """Run a module as a program."""
    gc.set_threshold(200_000, 10, 10)  # imports make hundreds of thousands of objects, and no garbage
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True, name="parent-watch").start()
    run(sys.argv[1], sys.argv[2:])
