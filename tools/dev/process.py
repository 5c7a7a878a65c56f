"""Starting, finding and stopping the stack's processes.

A service runs as long as the file `alive` in its folder is locked. All of its processes inherit the lock, and the kernel frees it
when the last one ends. So the answer is right even if the process that started the service was killed, and there is no stale pid
file. The process to signal is found by an argument that only this folder's process has.
"""

import fcntl
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Protocol

import psutil

from infra.errors import SamefoldError
from infra.processes.java import utf8

_HERE = Path(__file__).parent


class Service(Protocol):
    """Kafka or PostgreSQL, as this module handles them."""

    name: str
    folder: Path
    log: Path

    def launch(self, claim: int) -> None:
        """Prepare and start it. Every process gets the file descriptor `claim`, which holds the lock."""

    def answers(self) -> bool:
        """Whether a client gets an answer from this server."""

    def process(self) -> psutil.Process | None:
        """Its main process."""

    def orphans(self) -> list[psutil.Process]:
        """The processes that its killed main process left behind."""


class StartFailed(SamefoldError):
    """A service of the stack ended, or did not answer in the time that it had."""


class StopFailed(SamefoldError):
    """A service of the stack could not be ended."""


def start(service: Service, seconds: float = 180) -> None:
    """Returns when it answers. Raises StartFailed, with the end of its log, when it dies or `seconds` pass."""
    service.folder.mkdir(parents=True, exist_ok=True, mode=0o711)
    deadline = time.monotonic() + seconds
    next_look = time.monotonic() + 1
    launched = False
    while not service.answers():
        claim = _claim(service.folder)
        if claim is not None:
            try:
                if launched:
                    raise _failed(service, "ended")
                _end_strays(service)
                service.launch(claim)
                launched = True
            finally:
                os.close(claim)
        elif time.monotonic() > deadline:
            raise _failed(service, f"did not answer within {seconds:.0f} s")
        elif time.monotonic() > next_look:  # not each time: it lists all processes of the machine
            next_look = time.monotonic() + 1
            if service.process() is None:
                for orphan in service.orphans():
                    _send(orphan, signal.SIGKILL)
        time.sleep(0.05)


def stop(service: Service, first: signal.Signals, patience: float = 15) -> None:
    """Send `first`, and kill what has not ended after `patience` seconds. Raises StopFailed."""
    for number in (first, signal.SIGKILL):
        signalled: set[psutil.Process] = set()
        deadline = time.monotonic() + patience
        next_look = 0.0
        while runs(service.folder) and time.monotonic() < deadline:
            if time.monotonic() > next_look:
                next_look = time.monotonic() + 0.5
                main = service.process()
                for process in ({main} if main else set(service.orphans())) - signalled:
                    _send(process, number)
                    signalled.add(process)
            time.sleep(0.02)
    if runs(service.folder):
        raise StopFailed(f"{service.name} survived SIGKILL.", "It hangs in the kernel: look at its disk.")
    _end_strays(service)


def runs(folder: Path) -> bool:
    """Whether any process of this folder's service is alive, answering or not."""
    claim = _claim(folder)
    if claim is None:
        return folder.is_dir()
    os.close(claim)
    return False


def find(program: str, marker: str | Path) -> psutil.Process | None:
    """The process that has `program`, with or without a path, and `marker` among its arguments.

    It may stand behind an interpreter: so it is found already while `unprivileged.py` is about to become it.
    """
    for process in psutil.process_iter(["cmdline"]):
        arguments: list[str] = process.info["cmdline"] or []
        if str(marker) in arguments and any(Path(argument).name == program for argument in arguments):
            return process
    return None


def start_detached(command: list[str], log: Path, claim: int) -> None:
    """Start a program that outlives this process, in a session of its own: a Ctrl-C in the terminal does not reach it.

    Returns when the process exists; it may not be ready, and may have failed (the log says why).
    """
    log.touch(0o600)
    with log.open("ab") as output:
        started = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=[claim],
            env=utf8(os.environ),
            start_new_session=True,
            umask=0o077,
        )
    threading.Thread(
        target=started.wait, name=f"end of {command[0]}", daemon=True
    ).start()  # it leaves no zombie behind


def run(command: list[str], claim: int) -> subprocess.CompletedProcess[str]:
    """A step before the start, to its end, whatever its exit code. Killed half-way, we are still waited for."""
    return subprocess.run(command, capture_output=True, text=True, check=False, pass_fds=[claim], env=utf8(os.environ))


def python_script(name: str, *arguments: str | Path) -> list[str]:
    """A command that runs one of this folder's scripts in a bare interpreter (15 ms)."""
    return [sys.executable, "-I", "-S", str(_HERE / name), *map(str, arguments)]


def _claim(folder: Path) -> int | None:
    """The lock, as a file descriptor, or None where a process holds it."""
    try:
        handle = os.open(folder / "alive", os.O_RDWR | os.O_CREAT, 0o600)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    return handle


def _end_strays(service: Service) -> None:
    """End processes without the lock: they belong to a folder of this name that was removed while they ran."""
    while (stray := service.process()) or service.orphans():
        for process in [stray] if stray else service.orphans():
            _send(process, signal.SIGKILL)
        time.sleep(0.05)


def _send(process: psutil.Process, number: signal.Signals) -> None:
    with suppress(psutil.NoSuchProcess):
        process.send_signal(number)


def _failed(service: Service, how: str) -> StartFailed:
    tail = service.log.read_text(errors="replace").splitlines()[-8:] if service.log.exists() else []
    message = "\n".join([f"{service.name} {how}. {service.log} ends with:", *tail])
    return StartFailed(message, "Check with `samefold doctor`.")


def free_ports(count: int) -> list[int]:
    """So many, on which no process listens."""
    with ExitStack() as held:
        servers = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [server.getsockname()[1] for server in servers]
