"""Tells results: a table for people, JSON and a plot in a folder."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from rich.table import Table

from benchmarks import machine
from benchmarks.plot import draw
from benchmarks.results import Result, rounded
from benchmarks.stage import Options
from infra.terminal import print_json, stderr, stdout


class Report:
    """Results go to `folder` as they come: `<name>.json`, `<name>.svg`."""

    def __init__(self, folder: Path, *, quiet: bool) -> None:
        self.folder = folder
        self._quiet = quiet
        folder.mkdir(parents=True, exist_ok=True)
        self._machine = machine.facts()
        if self._machine["load_average"] > machine.QUIET:
            stderr.print(
                f"[yellow]The load average is {self._machine['load_average']}: something else runs, and figures will be too low."
                "[/yellow]",
                soft_wrap=True,
            )

    def add(self, result: Result, options: Options) -> None:
        """Write the files and print the table, or the JSON."""
        told = {"machine": self._machine, "options": asdict(options)} | result.as_dict()
        (self.folder / f"{result.name}.json").write_text(json.dumps(told, indent=1) + "\n")
        draw(result, self.folder / f"{result.name}.svg", machine.line(self._machine, options))
        if self._quiet:
            print_json(told)
        else:
            _show(result)
            stdout.print(f"{self.folder / result.name}.json and .svg", soft_wrap=True)
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
    for aim in result.aims:
        colour, sign = ("green" if aim.is_met else "red"), ("≤" if aim.at_most else "≥")
        stdout.print(f"[{colour}]{aim.what}: {rounded(aim.found):,} {aim.unit}[/{colour}], aim {sign} {aim.wanted:,}")


def _in_words(figures: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:,}" for name, value in figures.items())
