"""How a long-running process ends: with a log line that gives the reason, and an exit code for its supervisor.

No thread or task ends unnoticed. Those that run as long as the process are `Parts`. An error in any other thread, or in a callback
of the event loop, ends the process too.
"""

import asyncio
import logging
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from infra.errors import PartEnded, SamefoldError

AGAIN = "`samefold run` starts the process again. If that does not help, report the log to its authors."
T = TypeVar("T")


class Thread:
    """For what blocks, in a process that serves in an event loop: makes calls in the order in which they came."""

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)

    async def run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def close(self, last: Callable[[], None]) -> None:
        """End after this last call, without waiting for it."""
        self._pool.submit(last)
        self._pool.shutdown(wait=False)


class Parts:
    """The threads and tasks of one process. `report` gets the first end, by an error or a return, once."""

    def __init__(self, who: str, report: Callable[[SamefoldError], None]) -> None:
        self._who = who
        self._report = report
        self._is_over = False
        self._tasks: set[asyncio.Task[None]] = set()

    def thread(self, name: str, work: Callable[[], None]) -> threading.Thread:
        def run() -> None:
            try:
                work()
            except BaseException as error:
                self.ended(name, error)
            else:
                self.ended(name)

        thread = threading.Thread(target=run, name=name, daemon=True)
        thread.start()
        return thread

    def task(self, name: str, work: Coroutine[Any, Any, None], *, may_return: bool = False) -> asyncio.Task[None]:
        """Start a task for the work. `may_return`: only an error is an end."""
        task = asyncio.get_running_loop().create_task(self.within(name, work, may_return=may_return), name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: work.close())  # which may not have begun
        return task

    async def within(self, name: str, work: Awaitable[None], *, may_return: bool = False) -> None:
        """Do the work within the current task. Raises CancelledError only."""
        try:
            await work
        except BaseException as error:
            self.ended(name, error)
            if isinstance(error, asyncio.CancelledError):
                raise
        else:
            if not may_return:
                self.ended(name)

    def callbacks(self) -> None:
        """Treat callbacks of the running event loop as a part: an error in one leaves its work half done."""
        asyncio.get_running_loop().set_exception_handler(self._on_loop)

    def ended(self, name: str, error: BaseException | None = None) -> None:
        """Report that a part raised this error, or returned."""
        if not self._is_over:
            self._is_over = True
            self._report(_ended(self._who, name, error))

    def over(self) -> None:
        """The process is ending: parts may end from now on."""
        self._is_over = True

    async def cancel(self) -> None:
        """Cancel the tasks and wait for their end."""
        self.over()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _on_loop(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        # broken connections and futures without a reader are reported here too; they end nothing
        if "handle" in context and isinstance(error := context.get("exception"), Exception):
            self.ended("callback", error)
        else:
            loop.default_exception_handler(context)


def _ended(who: str, name: str, error: BaseException | None) -> SamefoldError:
    if isinstance(error, SamefoldError):
        return error
    how = f"raised {type(error).__name__}: {error}" if error else "returned"
    ended = PartEnded(f"'{name}' of {who}, which must run as long as the process, {how}.", AGAIN)
    ended.__cause__ = error
    return ended


def exit_code_of(work: Callable[[], object], log: logging.Logger, who: str) -> int:
    """Do the work of a process and log what ended it. Returns 0, a named error's exit code, or 1 for a defect.

    Meanwhile an error that ends any other thread ends the process at once. Logging is shut down. The caller ends the process by
    `os._exit`: `sys.exit` would wait for requests to unavailable services.
    """

    def thread_ended(hooked: threading.ExceptHookArgs) -> None:
        name = hooked.thread.name if hooked.thread else "a thread"
        os._exit(_say(_ended(who, name, hooked.exc_value), log, who))

    threading.excepthook = thread_ended
    try:
        work()
    except BaseException as error:
        return _say(error, log, who)
    finally:
        threading.excepthook = threading.__excepthook__
    return _say(None, log, who)


def _say(error: BaseException | None, log: logging.Logger, who: str) -> int:
    code = 0
    if isinstance(error, SamefoldError):
        defect = error.__cause__ if isinstance(error, PartEnded) else None
        log.error("%s stops: %s: %s", who, error.code, error, exc_info=defect)
        code = error.exit_code
    elif error is not None:
        log.error("%s stops: a defect", who, exc_info=error)
        code = 1
    logging.shutdown()
    return code
