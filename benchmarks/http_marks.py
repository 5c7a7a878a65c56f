"""Runs a module that notes when it reaches its points: `python -m benchmarks.http_marks FILE MODULE [ARGUMENT…]`.

The points are those of `infra.processes.faultpoints` and, in the API, those of a request. A note costs about a microsecond.
At its end it writes FILE: a JSON array of [point, seconds of the system's monotonic clock, which all processes share].
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, cast

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

    from api.server import Server
    from api.waits import Answer

API = "api"
ASKED, APPENDING, NOTIFIED, RECORDED = "request read", "command appending", "notified", "outcome read"

_marks: list[tuple[str, float]] = []


def mark(point: str) -> None:
    _marks.append((point, time.monotonic()))


def main() -> None:
    from infra.processes import faultpoints

    file, module = Path(sys.argv[1]), sys.argv[2]
    sys.argv = sys.argv[2:]
    faultpoints.hook = mark
    if module == API:
        from api import server

        make = server.server_of
        vars(server)["server_of"] = lambda *given: marked(make(*given))
    leave = os._exit

    def write_and_leave(status: int) -> NoReturn:
        _write(file)
        leave(status)

    os._exit = write_and_leave
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        _write(file)


def _write(file: Path) -> None:
    file.write_text(json.dumps(_marks))


def marked(server: Server) -> Server:
    """An API that notes a request's points; nothing else of its work is changed."""
    services = server.services
    app: ASGIApp = cast(Any, server.config.app)
    append, waiting = services.appender.append, services.outcomes.waiting

    async def asked(scope: Scope, receive: Receive, send: Send) -> None:
        mark(ASKED)
        await app(scope, receive, send)

    def appending(*given: Any) -> Any:
        mark(APPENDING)
        return append(*given)

    @contextmanager
    def recorded(*given: Any, **named: Any) -> Iterator[Answer]:
        with waiting(*given, **named) as outcome:
            outcome.add_done_callback(lambda _: mark(RECORDED))
            yield outcome

    vars(server.config)["app"] = asked
    vars(services.appender)["append"] = appending
    vars(services.outcomes)["waiting"] = recorded
    services.notifications.subscribe(lambda *_: mark(NOTIFIED))
    return server


if __name__ == "__main__":
    main()
