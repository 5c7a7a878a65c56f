"""`wrk`, the load generator of the benchmarks beside an API written by hand: one thread, and a script that both sides get."""

from __future__ import annotations

import json
import resource
import subprocess
from pathlib import Path
from typing import NamedTuple

from benchmarks.check import require
from benchmarks.http_client import HOST

TIMEOUT_S = 30
SCRIPTS = Path(__file__).with_name("peers")


class Load(NamedTuple):
    """What one run sent and got. Times in the script's last line are in microseconds."""

    sent: int
    succeeded: int
    seconds: float
    cpu_s: float
    """Of `wrk` itself."""
    more: dict[str, float]
    """Percentiles in milliseconds, answers other than 200, and those that took longer than TIMEOUT_S."""


def version(wrk: str) -> str:
    return subprocess.run([wrk, "-v"], capture_output=True, text=True, check=False).stdout.split(" [")[0]


def load(wrk: str, script: str, who: str, port: int, connections: int, seconds: int, *given: str) -> Load:
    """Each connection sends its next request when the last one is answered. Raises RunVoid where connections fail."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    options = ("-t1", f"-c{connections}", f"-d{seconds}s", f"--timeout={TIMEOUT_S}s", "-s", str(SCRIPTS / script))
    command = [wrk, *options, f"http://{HOST}:{port}", "--", *given]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=seconds + 60)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    require(done.returncode == 0, f"wrk ended with exit code {done.returncode}: {done.stderr}")
    told = json.loads(done.stdout.splitlines()[-1])
    require(not told["errors"], f"{who}: {told['errors']} connections failed")
    more = {f"{name}_ms": told[f"{name}_us"] / 1000 for name in ("p50", "p99", "max")}
    more |= {"other_answers": told["others"], "timeouts": told["timeouts"]}
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Load(told["sent"], told["succeeded"], told["us"] / 1e6, cpu_s, more)
