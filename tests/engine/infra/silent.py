"""Runs a process of ours one part of which ends: `python -m tests.engine.infra.silent MODULE PART raise|return [ARGUMENT…]`.

`PART` is `module:Class.method` of what the part does, or `thread`: one that some library started.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import sys
import threading
import time
from typing import Any

THREAD = "thread"


def sabotage(part: str, how: str) -> None:
    if part == THREAD:
        threading.Thread(target=_raise_once_served, name="a library's", daemon=True).start()
        return
    module, _, path = part.partition(":")
    owner: Any = importlib.import_module(module)
    *classes, name = path.split(".")
    for one in classes:
        owner = getattr(owner, one)

    async def later(*_: Any, **__: Any) -> None:
        await asyncio.sleep(0)
        _end(how)

    def now(*_: Any, **__: Any) -> None:
        _end(how)

    setattr(owner, name, later if inspect.iscoroutinefunction(getattr(owner, name)) else now)


def _raise_once_served() -> None:
    while threading.excepthook is threading.__excepthook__:
        time.sleep(0.02)
    _end("raise")


def _end(how: str) -> None:
    if how == "raise":
        raise ZeroDivisionError("a test ends it")


if __name__ == "__main__":
    _, module, part, how, *arguments = sys.argv
    sys.argv = [module, *arguments]
    sabotage(part, how)
    importlib.import_module(module).main()
