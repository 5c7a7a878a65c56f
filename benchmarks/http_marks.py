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
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

API = "api"
ASKED, APPENDING, NOTIFIED = "request read", "command appending", "notified"
RECORDED, ANSWERED = "outcome read", "answer begun"

_marks: list[tuple[str, float]] = []


def mark(point: str) -> None:
    _marks.append((point, time.monotonic()))


def main() -> None:
    from infra.processes import faultpoints

    file, module = Path(sys.argv[1]), sys.argv[2]
    sys.argv = sys.argv[2:]
    faultpoints.hook = mark
    if module == API:
        _mark_requests()
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


def _mark_requests() -> None:
    """Of a request's way through the API; of the event loop's work, nothing else is changed."""
    from api import app, outcome_waits, server
    from api.append import Appender
    from api.notifications import Notifications

    _before(Appender, "append", APPENDING)
    _before(Notifications, "_notify", NOTIFIED)
    _before(outcome_waits, "_recorded", RECORDED)
    create = app.create_app

    def create_marked(*given: Any) -> Any:
        made = create(*given)
        made.add_middleware(_Marked)
        return made

    vars(server)["create_app"] = create_marked


def _before(owner: Any, name: str, point: str) -> None:
    """Note `point` whenever a function is called."""
    call: Callable[..., Any] = getattr(owner, name)

    def marked(*given: Any, **named: Any) -> Any:
        mark(point)
        return call(*given, **named)

    setattr(owner, name, marked)


class _Marked:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        mark(ASKED)

        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                mark(ANSWERED)
            await send(message)

        await self._app(scope, receive, sent)


if __name__ == "__main__":
    main()
