"""Builders in processes of their own, which are killed, frozen or interrupted at a stage of their work."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import psutil

from infra.settings import Settings
from projections.engine.rebuild.builds import Pin
from projections.engine.rebuild.shares import Share
from tools.testing.waiting import DEADLINE_S, until

LOADED = "projections.engine.rebuild.load.PartWriter.finish"
"""Inside a part, its rows copied."""
READY = "projections.engine.rebuild.rebuild.switch"
"""Before the switch."""
SWITCHED = "projections.engine.rebuild.switch.set_generation"
"""Under the locks, all written."""
STAGES = {"inside a part": LOADED, "before the switch": READY, "under the locks": SWITCHED}

STRUCK = """
import os, pydoc, signal, sys
from infra.database import connect
from infra.processes import faultpoints
how, stage, *arguments = sys.argv[1:]
name, is_function, attribute = stage.rpartition(".")
owner, attribute = (pydoc.locate(name), attribute) if is_function else (faultpoints, "hook")
goes_on = getattr(owner, attribute)

def strike(*given, **named):
    if is_function or given == (stage,):
        setattr(owner, attribute, goes_on)
        os.kill(os.getpid(), int(how))
    return goes_on(*given, **named) if is_function else None

setattr(owner, attribute, strike)
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests in the background has it ignored
connect.STATEMENT_TIMEOUT_MS = 600_000  # long enough that only who abandons it, no timeout, gets the locks that it holds
sys.argv = ["samefold", *arguments]
from tools.cli import main
main()
"""


def shared(pin: Pin, counts: Mapping[int, int]) -> Pin:
    """A pin whose partitions are split into so many shares."""
    return replace(pin, shares={at: [Share(number, of) for number in range(of)] for at, of in counts.items()})


@contextmanager
def struck(world: Settings, how: signal.Signals, stage: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """`samefold` with these arguments, struck once: before a function, or at a fault point."""
    patient = world.model_copy(update={"idle_in_transaction_timeout_ms": 600_000})
    with subprocess.Popen(
        [sys.executable, "-c", STRUCK, str(int(how)), stage, *arguments],
        env=os.environ | patient.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            if how is signal.SIGSTOP:
                until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED, "the builder stops")
            yield process
        finally:
            process.kill()


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """How it ends, what it says, and what it complains of; one that is frozen wakes up."""
    process.send_signal(signal.SIGCONT)
    said, complained = process.communicate(timeout=DEADLINE_S)
    return process.returncode, said.strip(), complained.strip()


def killed(world: Settings, stage: str, *arguments: str) -> None:
    with struck(world, signal.SIGKILL, stage, *arguments) as process:
        assert ended(process)[0] == -signal.SIGKILL
