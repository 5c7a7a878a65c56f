"""The rings of tests as a plugin of pytest: what is in which ring, which worker runs it, where the time went, what failed.

A test without a mark is in `make test`; `slow` ones are in `make test-all` only, `prove(part=…)` ones in `make prove` only.
"""

import json
import os
import shutil
import signal
from collections import defaultdict
from pathlib import Path

import pytest

from tools.testing.fixtures import RUN, SEED, in_memory
from tools.testing.waiting import SLOWNESS

RINGS = ("test", "test-all", "prove")
"""The fastest first; `make test-all` runs the first two."""
NEEDS_STACK = {"stack", "spark", "service", "world", "shared_world", "empty_world", "own_stack", "ground", "field"}
LIMIT_S = 900
"""For one test, on a good day: none takes a tenth of it."""
PROVE_LIMIT_S = 7_200
SLOWEST = 20
FOLDER = Path(".pytest_cache", "rings")
TIMES = FOLDER / "times.tsv"
FAILURES = FOLDER / "failures.json"

_files: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
_failures: dict[str, str] = {}
_crashes: list[object] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--times", action="store_true", help="print where the time of this run went, a line a file")
    parser.addoption(
        "--rings", type=Path, metavar="FILE", help="write the ring of each collected test, as JSON, into this file"
    )


def pytest_configure(config: pytest.Config) -> None:
    # pytest-xdist 3.8 may wait for ever for a worker in the place of one that crashed (its issues 1323 and 1327)
    config.option.maxworkerrestart = getattr(config.option, "maxworkerrestart", None) or "0"
    # what a script runs in the background ignores interrupts, and so would all processes that tests interrupt
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist looks for groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        quick = item.get_closest_marker("slow_but")
        if quick and item.callspec.id not in quick.args:  # type: ignore[attr-defined]
            item.add_marker(pytest.mark.slow)
        if NEEDS_STACK & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.integration)
        if not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout((PROVE_LIMIT_S if _is(item, "prove") else LIMIT_S) * SLOWNESS))
        if group := _group(item):
            item.add_marker(pytest.mark.xdist_group(group))
        if config.getoption("loadgroup", default=False):
            _show_group(item)
    # Slow tests begin first: at the end no worker waits for the other for long.
    items.sort(key=lambda item: ring(item) == "test")


def pytest_collection_finish(session: pytest.Session) -> None:
    if file := session.config.getoption("rings"):
        file.write_text(json.dumps({item.nodeid: ring(item) for item in session.items}))


def ring(item: pytest.Item) -> str:
    """One of RINGS, by the test's marks."""
    return "prove" if _is(item, "prove") else "test-all" if _is(item, "slow") else "test"


def _is(item: pytest.Item, mark: str) -> bool:
    return item.get_closest_marker(mark) is not None


def _show_group(item: pytest.Item) -> None:
    """Put the group at the end of the test's id, where the scheduler looks for it.

    pytest-xdist 3.8 does so itself by an attribute that pytest has had no more since 9.2: without this, it would ignore groups.
    """
    names = sorted({str(mark.args[0]) for mark in item.iter_markers("xdist_group")})
    suffix = f"@{'_'.join(names)}"
    if names and not item.nodeid.endswith(suffix):
        item._id = type(item._id).parse(item.nodeid + suffix)


def _group(item: pytest.Item) -> str | None:
    """The tests that one worker runs: what they share would be made twice."""
    if item.get_closest_marker("xdist_group"):
        return None
    # the last one starts so many processes that two such tests at once starve each other
    for costly in ("spark", "service", "ground"):
        if costly in getattr(item, "fixturenames", ()):
            return costly
    defined: dict[str, list[pytest.FixtureDef[object]]] = item._fixtureinfo.name2fixturedefs  # type: ignore[attr-defined]
    is_shared = any(fixture.scope == "module" for fixtures in defined.values() for fixture in fixtures)
    return item.nodeid.partition("::")[0] if is_shared else None


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    test = report.nodeid
    if not test.endswith("]"):  # a name in brackets may hold an `@` of its own, and has no group behind it
        test = test.partition("@")[0]
    _files[test.partition("::")[0]][report.when] += report.duration
    if report.failed:
        _failures[test] = f"{report.longreprtext}\n{report.capstdout}{report.capstderr}"


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_testnodedown(error: object | None) -> None:
    """A worker ended. After a crash the others end their tests, and the rest is not run."""
    if error:
        _crashes.append(error)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Keep what failed, and where the time went, for `tools.testing.again` and for people."""
    if str(os.getpid()) != RUN:
        return
    if _crashes:  # no test that passes the second time makes up for those that were not run
        session.exitstatus = pytest.ExitCode.INTERNAL_ERROR
    folder = session.config.rootpath / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    lines = [
        f"{file}\t{spent['setup']:.1f}\t{spent['call']:.1f}\t{spent['teardown']:.1f}\n" for file, spent in _slowest()
    ]
    (session.config.rootpath / TIMES).write_text("".join(["file\tset-up s\ttests s\ttear-down s\n", *lines]))
    outcome = {"exit": int(session.exitstatus), "seed": str(SEED), "failed": _failures}
    (session.config.rootpath / FAILURES).write_text(json.dumps(outcome, indent=1))


def _slowest() -> list[tuple[str, dict[str, float]]]:
    return sorted(_files.items(), key=lambda file: -sum(file[1].values()))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Not in the header, which `-q` leaves out."""
    if config.getoption("times"):
        terminalreporter.write_line(f"set-up, tests, tear-down in seconds (all files: {TIMES})")
        for file, spent in _slowest()[:SLOWEST]:
            terminalreporter.write_line("{setup:7.1f} {call:7.1f} {teardown:7.1f}  ".format(**spent) + file)
    again = f"TEST_SEED={SEED}"
    terminalreporter.write_line(
        f"seed: {SEED} (the same again: {again}); waits are {SLOWNESS} times as long as on a good day"
    )


def pytest_unconfigure() -> None:
    """Workers that are interrupted end without their fixtures: what they left is ended here."""
    from tools.dev.stack import Stack
    from tools.testing.leftovers import SYSTEMS

    if str(os.getpid()) == RUN:
        memory = in_memory()
        places = [memory] if memory else SYSTEMS.glob(f"sf-{RUN}-*")  # the temporary folders of all workers
        for folder in (found for place in places for found in place.glob(f"samefold-{RUN}-*")):
            Stack(folder).down()
            shutil.rmtree(folder, ignore_errors=True)
