"""`python -m api --name NAME`: serve until SIGTERM or SIGINT. Exit code 1 after a named error."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys

from api.server import server_of
from infra.observability import logs
from infra.processes.garbage_collector import collect_seldom
from infra.processes.process_end import exit_code_of
from infra.processes.time_limit import limit_calls
from infra.settings import Settings

log = logging.getLogger(__name__)

SWITCH_INTERVAL_S = 0.001
"""With Python's default an answer may wait 5 ms for the interpreter's lock while another thread works."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m api")
    parser.add_argument("--name", default="api")
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    arguments = parser.parse_args()
    settings = Settings()
    logs.configure(settings.log_level, settings.log_format)
    if settings.log_level != "DEBUG":
        # lost connections are logged by Samefold, once
        logging.getLogger("psycopg").setLevel(logging.CRITICAL)
        logging.getLogger("uvicorn").setLevel(logging.WARNING)

    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until it can end in order

    def work() -> None:
        port = settings.api_port if arguments.port is None else arguments.port
        server = server_of(settings, arguments.name, arguments.host or settings.api_host, port)
        for number in (signal.SIGTERM, signal.SIGINT):
            # before it serves, and at its end, where uvicorn raises them once more
            signal.signal(number, server.handle_exit)
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        collect_seldom()
        limit_calls(settings.decide_limit_s)
        server.run()

    # not sys.exit, which would wait for an unavailable broker; to end at any point is safe
    os._exit(exit_code_of(work, log, arguments.name))


if __name__ == "__main__":
    main()
