"""What a figure was measured on."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

from benchmarks.stage import Options
from infra.dev.jars import locked
from infra.dev.postgres import VERSION

QUIET = 0.5
"""A load average above this at the start means that something else runs."""

_PACKAGES = (
    "confluent-kafka",
    "aiokafka",
    "faust-streaming",
    "psycopg",
    "msgspec",
    "pydantic",
    "eventsourcing",
    "pyspark",
)


def facts() -> dict[str, Any]:
    """Cores, memory, versions, date and the load average of the last minute."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cores": os.cpu_count(),
        "processor": _processor(),
        "memory_gb": round(psutil.virtual_memory().total / 2**30),
        "system": f"{platform.system()} {platform.release()}",
        "python": sys.version.split()[0],
        "kafka": _kafka(),
        "postgres": VERSION,
        "packages": {name: version(name) for name in _PACKAGES},
        "load_average": round(os.getloadavg()[0], 2),
    }


def line(found: Mapping[str, Any], options: Options) -> str:
    """The most important of the facts, for the foot of a plot."""
    return (
        f"{found['date'][:10]}, {found['cores']} cores {found['processor']}, Kafka {found['kafka']}, PostgreSQL {VERSION}, "
        f"Python {found['python']}; medians of {options.rounds}, scale {options.scale:g}, seed {options.seed}"
    )


def _processor() -> str:
    try:
        found = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1] if found else platform.processor()


def _kafka() -> str:
    found = re.search(r"kafka_2\.13-([0-9.]+)\.jar", " ".join(locked()))
    return found[1] if found else "unknown"
