"""Starting, finding and stopping the stack's processes.

A process is recognised by an argument that only this data folder's process has (the absolute path of its configuration
or data), never by a remembered pid: a recycled pid can't be mistaken for it, and one whose starter was killed half-way
is still found.
"""

import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import psutil

from infra.errors import SamefoldError

_HERE = Path(__file__).parent


class Service(Protocol):
    """What `start` needs to know of Kafka or PostgreSQL."""

    name: str
    log: Path

    def process(self) -> psutil.Process | None: ...

    def answers(self) -> bool:
        """A real client got a real answer from this very server."""

    def launch(self) -> None:
        """Clear what a killed predecessor left behind, and start it detached."""


class StartFailed(SamefoldError):
    """A process of the stack ended, or was not ready, in the time that it had."""


class StopFailed(SamefoldError):
    """A process of the stack could not be ended."""


def python_script(name: str, *arguments: str | Path) -> list[str]:
    """A command that runs one of this folder's scripts in a bare interpreter (15 ms)."""
    return [sys.executable, "-I", "-S", str(_HERE / name), *map(str, arguments)]


def start_detached(command: list[str], log: Path) -> None:
    """Returns when the process exists; it may not be ready, and may have failed (the log says why)."""
    subprocess.run(python_script("detach.py", log, *command), check=True)


def find(program: str, marker: str | Path) -> psutil.Process | None:
    """The living process that runs `program` with `marker` as one of its arguments.

    `program` may stand behind an interpreter: so it is found already while `detach.py` is about to become it.
    """
    for process in psutil.process_iter(["cmdline"]):
        arguments: list[str] = process.info["cmdline"] or []
        if str(marker) in arguments and any(Path(argument).name == program for argument in arguments):
            return process
    return None


def stop(process: psutil.Process, first: signal.Signals, patience: float = 15) -> None:
    """Send `first`, wait, and kill what has not ended after `patience` seconds."""
    for number in (first, signal.SIGKILL):
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)
        deadline = time.monotonic() + patience
        while _lives(process):
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)
        else:
            return
    raise StopFailed(f"Process {process.pid} survived SIGKILL.", "It hangs in the kernel: look at its disk.")


def _lives(process: psutil.Process) -> bool:
    """A zombie does not: where PID 1 never reaps (some containers), an ended orphan stays one for ever."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def start(service: Service, seconds: float = 60) -> None:
    """Returns when it answers. Raises StartFailed, with the end of its log, when it dies or `seconds` pass."""
    deadline = time.monotonic() + seconds
    launched = False
    while not service.answers():
        if service.process() is None:
            # Not there, or just dying of somebody's kill -9 when we first looked.
            if launched:
                raise _failed(service, "ended")
            service.launch()
            launched = True
        elif time.monotonic() > deadline:
            raise _failed(service, f"did not answer within {seconds:.0f} s")
        time.sleep(0.05)


def _failed(service: Service, how: str) -> StartFailed:
    tail = service.log.read_text(errors="replace").splitlines()[-8:] if service.log.exists() else []
    return StartFailed(
        f"{service.name} {how}. {service.log} ends with:\n" + "\n".join(tail), "Check with `samefold doctor`."
    )
