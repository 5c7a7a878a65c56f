"""Reports results: a table, and JSON and a plot in a folder, with the machine and the code that they were measured on."""

from __future__ import annotations

import json
import os
import platform
import re
import sys
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
from rich.table import Table

from benchmarks.plot import draw
from benchmarks.results import Result, rounded
from benchmarks.stage import Options
from tools.dev.jars import KAFKA
from tools.dev.postgres import VERSION
from tools.terminal import print_json, stderr, stdout

QUIET = 0.5
"""A load average above this at the start means that something else runs."""
_PACKAGES = [
    "confluent-kafka",
    "aiokafka",
    "fastapi",
    "uvicorn",
    "faust-streaming",
    "psycopg",
    "msgspec",
    "pydantic",
    "eventsourcing",
    "pyspark",
]


class Report:
    """Results go to `folder` as they come: `<name>.json`, `<name>.svg`."""

    def __init__(self, folder: Path, *, quiet: bool) -> None:
        self.folder = folder
        self._quiet = quiet
        folder.mkdir(parents=True, exist_ok=True)
        self._machine = facts()
        if self._machine["load_average"] > QUIET:
            stderr.print(
                f"[yellow]The load average is {self._machine['load_average']}: something else runs, and figures will be too low."
                "[/yellow]",
                soft_wrap=True,
            )

    def add(self, result: Result, options: Options) -> None:
        """Write the files and print the table, or the JSON."""
        told = {"machine": self._machine, "options": asdict(options)} | result.as_dict()
        (self.folder / f"{result.name}.json").write_text(json.dumps(told, indent=1) + "\n")
        if result.samples:
            draw(result, self.folder / f"{result.name}.svg", line(self._machine, options))
        if self._quiet:
            print_json(told)
        else:
            _show(result)
            stdout.print(f"{self.folder / result.name}.json{' and .svg' if result.samples else ''}", soft_wrap=True)
        sys.stdout.flush()  # the next one takes minutes


def _show(result: Result) -> None:
    table = Table(title=result.title, title_justify="left", box=None, pad_edge=False)
    for column in ("contender", "case"):
        table.add_column(column)
    for column in (result.unit, "rounds", "CPU us each", "also"):
        table.add_column(column, justify="left" if column == "also" else "right")
    for told in result.medians():
        rounds = ", ".join(f"{each:,}" for each in told.rounds)
        table.add_row(
            told.contender, told.case, f"{told.value:,}", rounds, _in_words(told.cpu_us_each), _in_words(told.more)
        )
    stdout.print(table)
    for one in result.not_run:
        stdout.print(f"[yellow]not run: {one}[/yellow]", soft_wrap=True)
    for aim in result.aims:
        colour, sign = ("green" if aim.is_met else "red"), ("≤" if aim.at_most else "≥")
        stdout.print(f"[{colour}]{aim.what}: {rounded(aim.found):,} {aim.unit}[/{colour}], aim {sign} {aim.wanted:,}")


def _in_words(figures: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:,}" for name, value in figures.items())


def facts() -> dict[str, Any]:
    """Cores, memory, versions, date and the load average of the last minute."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cores": os.cpu_count(),
        "processor": _processor(),
        "memory_gb": round(psutil.virtual_memory().total / 2**30),
        "system": f"{platform.system()} {platform.release()}",
        "python": sys.version.split()[0],
        "kafka": KAFKA,
        "postgres": VERSION,
        "packages": {name: version(name) for name in _PACKAGES},
        "load_average": round(os.getloadavg()[0], 2),
    }


def line(found: Mapping[str, Any], options: Options) -> str:
    """The most important of the facts, for the foot of a plot."""
    return (
        f"{found['date'][:10]}, {found['cores']} cores {found['processor']}, Kafka {KAFKA}, PostgreSQL {VERSION}, "
        f"Python {found['python']}; medians of {options.rounds}, scale {options.scale:g}, seed {options.seed}"
    )


def _processor() -> str:
    try:
        found = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1] if found else platform.processor()
