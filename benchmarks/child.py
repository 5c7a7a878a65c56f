"""What the benchmarks' own processes have in common: whole numbers as flags, lines of JSON, work until SIGTERM."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import threading
from typing import Any


def flags(*required: str, **choices: tuple[str, ...]) -> Any:
    """The command line's: whole numbers, and one of some words each; the rest is refused."""
    parser = argparse.ArgumentParser(prog=f"python -m {sys.modules['__main__'].__spec__.name}")  # type: ignore[union-attr]
    for name in required:
        parser.add_argument(f"--{name}", type=int, required=True)
    for name, among in choices.items():
        parser.add_argument(f"--{name}", choices=among, required=True)
    return parser.parse_args()


def until_terminated() -> threading.Event:
    """Set by SIGTERM or SIGINT."""
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: threading.Thread(target=ended.set).start())
    return ended


def tell(value: Any) -> None:
    """A line of JSON on standard output."""
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()
