"""What a test leaves behind fails the test itself: processes, listening ports, files. Without this its neighbours would fail.

A world's topics, database and groups are gone with the world (`tools.testing.fixtures`).
"""

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tools.testing.fixtures import RUN
from tools.testing.waiting import until

MARK = "TEST_STARTED_BY"
"""A process that a test starts inherits this variable; what fixtures of a module or of the run start does not have it."""
PROC = Path("/proc")
KEEPERS = {"cluster", "field", "front", "ground", "misled", "own_stack", "releases", "service", "spark"}
"""Fixtures of a module or of the run, for which a test may start something that they end."""
NOT_ITS_OWN = (f"/samefold-{RUN}-", "multiprocessing.resource_tracker", "multiprocessing.forkserver")
"""In the command lines of servers of the run's stacks, which a test may restart, and of what Python starts once for a process."""
LISTENING = "0A"
LOCKS = "samefold-*.lock"
"""They stay: of two processes that each lock a file of the same name, one before and one after its removal, both would hold it."""
SYSTEMS = Path(os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir()))
"""Where pytest has the folders of `tmp_path`, which stay for those who look why a test failed."""
TEMPORARY = SYSTEMS / f"sf-{RUN}-{os.getpid()}"
"""All other temporary files of this process and of those that it starts; the name is short: sockets live below it."""


def pytest_configure() -> None:
    TEMPORARY.mkdir(exist_ok=True)
    TEMPORARY.chmod(0o711)  # where root may not make a user namespace, PostgreSQL runs as nobody and must get in
    os.environ["TMPDIR"] = tempfile.tempdir = str(TEMPORARY)
    os.environ["RUFF_NO_CACHE"] = "true"  # it would be where the test runs


@pytest.hookimpl(trylast=True)
def pytest_unconfigure() -> None:
    is_whole_run = str(os.getpid()) == RUN  # a worker that is interrupted leaves its folder
    for folder in SYSTEMS.glob(f"sf-{RUN}-*") if is_whole_run else [TEMPORARY]:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(autouse=True)
def _leaves_nothing_behind(
    _nowhere: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[None]:
    """Begins before and ends after what only this test uses."""
    if not PROC.is_dir() or KEEPERS & set(request.fixturenames):  # the former on macOS
        yield
        return
    mark = f"{os.getpid()} {request.node.nodeid}"
    monkeypatch.setenv(MARK, mark)
    pids, sockets, files = _pids(), _sockets(), _files(TEMPORARY)
    yield
    left = _processes(_pids() - pids, mark)
    if left:
        with suppress(AssertionError):
            until(lambda: not _processes(set(left), mark), "what a test was told to end has ended")
        left = _processes(set(left), mark)
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    found = [f"process {pid}: {line}" for pid, line in left.items()]
    if not request.node.get_closest_marker("keeps_its_port"):
        found += [f"a port that this process listens on: {port}" for port in _ports(_sockets() - sockets)]
    found += [f"file {file}" for file in (_files(TEMPORARY) - files) | _files(_nowhere)]
    for file in _files(_nowhere):
        shutil.rmtree(file) if file.is_dir() else file.unlink()
    assert not found, "the test left behind " + "; ".join(found)


def _pids() -> set[int]:
    return {int(name) for name in os.listdir(PROC) if name.isdigit()}  # noqa: PTH208  # much faster than `iterdir`, before each test


def _processes(pids: set[int], mark: str) -> dict[int, str]:
    """The command lines of those of these processes that live and that this test has started."""
    found = {}
    for pid in pids:
        with suppress(OSError):
            line = _command_line(PROC / str(pid)).replace(b"\0", b" ").decode(errors="replace").strip()
            variables = (PROC / str(pid) / "environ").read_bytes().split(b"\0")
            if f"{MARK}={mark}".encode() in variables and line and not any(part in line for part in NOT_ITS_OWN):
                found[pid] = line[:300]
    return found


def _command_line(process: Path) -> bytes:
    """Raises OSError where the process has ended. One that has just been started has neither arguments nor variables yet."""
    while not (line := (process / "cmdline").read_bytes()):
        (process / "exe").readlink()
    return line


def _sockets() -> set[str]:
    """Those that this process has open, by their inodes."""
    own = set()
    for number in os.listdir(PROC / "self" / "fd"):  # noqa: PTH208
        with suppress(OSError):
            own.add(os.readlink(f"{PROC}/self/fd/{number}"))  # noqa: PTH115
    return {one.removeprefix("socket:[").removesuffix("]") for one in own if one.startswith("socket:")}


def _ports(sockets: set[str]) -> set[int]:
    """The ports on which these sockets listen. To ask the system for them takes long."""
    found = set()
    for table in ("tcp", "tcp6") if sockets else ():
        with suppress(OSError):
            for line in (PROC / "self" / "net" / table).read_text().splitlines()[1:]:
                _, address, _, state, *rest = line.split()
                if state == LISTENING and rest[5] in sockets:
                    found.add(int(address.rpartition(":")[2], 16))
    return found


def _files(folder: Path) -> set[Path]:
    return {file for file in folder.iterdir() if not file.match(LOCKS)}
