"""make test + test-all: tasks end in one process, parts of processes in one each.

No thread and no task of a process ends unseen: its end is the process's, with a named error and an exit code other than 0.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from infra.errors import PartEnded, SamefoldError
from infra.processes.process_end import Parts
from infra.settings import Settings
from tests.engine.infra.silent import THREAD
from tests.engine.spine import set_up
from tools.testing.fixtures import ROOT
from tools.testing.waiting import DEADLINE_S

API, AGENT, HANDLER = "api.__main__", "projections.engine.live.agent", "commands.handler"
EXPORTER = "projections.engine.live.exporter"
PORT = {API: ("--port", "0")}
THREADS = (THREAD, "raise")
PARTS = {
    API: [
        ("api.waits:Notifications.listen", "return"),
        ("api.stores:StoreChecks.keep_checking", "raise"),
        ("api.waits:OutcomeWaits.answer", "return"),
        ("commands.append:Appender._poll", "return"),
        THREADS,
    ],
    AGENT: [
        ("projections.engine.live.agent:Agent._serve", "return"),
        ("projections.engine.live.agent:Agent._watch", "return"),
        ("projections.engine.live.membership:Membership.stay", "return"),
        ("projections.engine.live.agent:Agent._fetching", "raise"),
        ("projections.engine.live.agent:Agent._folding", "return"),
        ("projections.engine.live.agent:Agent._read_positions", "raise"),
        ("projections.engine.live.membership:_Rebalance._take", "raise"),
        ("projections.engine.live.agent:_App.should_stop", "return"),
        THREADS,
    ],
    HANDLER: [
        ("commands.handler:Handler._turn", "raise"),
        ("socketserver:BaseServer.serve_forever", "return"),
        THREADS,
    ],
    EXPORTER: [
        ("projections.engine.live.exporter:Exporter._query", "raise"),
        ("socketserver:BaseServer.serve_forever", "return"),
        THREADS,
    ],
}
AT_ONCE = 4


@pytest.mark.slow
@pytest.mark.parametrize("module", PARTS)
def test_the_end_of_any_part_is_the_end_of_its_process(world: Settings, module: str) -> None:
    set_up(world)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        wrong = list(filter(None, pool.map(lambda n: _lingers(world, module, n), range(len(PARTS[module])))))
    assert wrong == []


def _lingers(world: Settings, module: str, number: int) -> str | None:
    """What is wrong with the end of a process whose part ends."""
    part, how = PARTS[module][number]
    command = [sys.executable, "-m", "tests.engine.infra.silent", module, part, how, "--name", f"p{number}"]
    environment = os.environ | world.environment() | {"SAMEFOLD_METRICS_PORT": "0"}
    try:
        done = subprocess.run(
            [*command, *PORT.get(module, ())],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        return f"{part} {how}s, and the process goes on: {error.stderr!r}"
    is_told = " stops: " in done.stderr and ("ZeroDivisionError" in done.stderr) is (how == "raise")
    return None if is_told and done.returncode == 1 else f"{part} {how}s: {done.returncode}, {done.stderr}"


NAMED = SamefoldError("By name.")


@pytest.mark.parametrize("end", [ZeroDivisionError(), None, asyncio.CancelledError(), NAMED], ids=repr)
def test_however_a_task_ends_it_is_told(end: BaseException | None) -> None:
    told: list[SamefoldError] = []

    async def work() -> None:
        if end:
            raise end

    async def serve() -> None:
        await asyncio.wait([Parts("a process", told.append).task("a task", work())])

    asyncio.run(serve())
    [error] = told
    assert error is NAMED if end is NAMED else isinstance(error, PartEnded)


def test_what_may_return_may_and_at_the_end_all_may() -> None:
    told: list[SamefoldError] = []

    async def serve() -> None:
        parts = Parts("a process", told.append)
        await parts.task("a short one", asyncio.sleep(0), may_return=True)
        parts.task("a long one", asyncio.sleep(DEADLINE_S))
        ended = threading.Event()
        thread = parts.thread("a thread", lambda: (ended.wait(DEADLINE_S), None)[1])
        await parts.cancel()
        ended.set()
        await asyncio.to_thread(thread.join)

    asyncio.run(serve())
    assert told == []


def test_a_callback_that_raises_is_told_and_what_a_connection_says_is_not() -> None:
    told: list[SamefoldError] = []

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        Parts("a process", told.append).callbacks()
        loop.call_exception_handler({"message": "broken", "exception": OSError(), "transport": None})
        over = asyncio.Event()
        loop.call_soon(lambda: 1 / 0)
        loop.call_soon(over.set)  # behind it
        await over.wait()

    asyncio.run(serve())
    assert [error.code for error in told] == ["part-ended"]
    assert isinstance(told[0].__cause__, ZeroDivisionError)


@pytest.mark.slow
@pytest.mark.parametrize("module", [HANDLER, AGENT])
def test_a_process_that_waits_for_kafka_ends_cleanly(module: str) -> None:
    """Nothing listens on port 9."""
    nowhere = {
        "SAMEFOLD_KAFKA_BOOTSTRAP": "127.0.0.1:9",
        "SAMEFOLD_DATABASE_URL": "postgresql://nobody@127.0.0.1:9/none",
    }
    command = [sys.executable, "-m", module, "--name", "waiting"]
    with subprocess.Popen(command, env=os.environ | nowhere, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            assert any("does not answer" in line for line in process.stderr)
            process.terminate()
            assert process.wait(DEADLINE_S) == 0
        finally:
            process.kill()
