"""Deposits of one cent over HTTP: `python -m benchmarks.http_load --port 8000 --connections 64 --count 1000 …`.

Each as soon as a connection is free or, with `--rate`, so many per second. Prints one JSON object at its end: `exchanges`, for each
of its orders when it was due, sent and answered (seconds of the system's monotonic clock, which all processes share), the status
and the stream's version, and `cpu_s`, this process's own processor time meanwhile.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time


def main() -> None:
    from benchmarks.http_client import ask_all, deposit, orders_of

    parser = argparse.ArgumentParser(prog="python -m benchmarks.http_load")
    for name in ("--port", "--connections", "--count", "--first", "--accounts", "--seed"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--rate", type=float, default=0)
    given = parser.parse_args()
    requests = [deposit(order) for order in orders_of(given.first, given.accounts, given.count, given.seed)]
    gc.freeze()
    gc.disable()
    began = time.process_time()
    exchanges = ask_all(requests, given.connections, given.rate, given.port)
    cpu_s = time.process_time() - began
    sys.stdout.write(json.dumps({"exchanges": exchanges, "cpu_s": cpu_s}) + "\n")


if __name__ == "__main__":
    main()
