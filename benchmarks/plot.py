"""A benchmark's plot as SVG: bars with their values, the aim as a line; for latencies, every percentile."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from benchmarks.results import Result, middle

OURS, THEIRS, AIM, INK = "#1f6f8b", "#b8b8b8", "#c0392b", "#333333"
STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "samefold",
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": "#999999",
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def draw(result: Result, file: Path, machine: str) -> None:
    """Write the plot of a result. `machine` goes below it."""
    with mpl.rc_context(STYLE):
        figure = (_divided if "parts" in result.plots else _curves if "curves" in result.plots else _bars)(result)
        figure.suptitle(result.title, x=0.01, ha="left", fontsize=13, fontweight="bold")
        figure.text(0.01, 0.01, machine, fontsize=8, color="#777777", ha="left", va="bottom")
        # without its date, the same figures make the same file
        figure.savefig(file, metadata={"Date": None})


def _bars(result: Result) -> Figure:
    cases = list(dict.fromkeys(case for _, case in result.contenders))
    rows = [[contender for contender, of in result.contenders if of == case] for case in cases]
    figure = Figure(
        figsize=(9, 1.1 + 0.38 * sum(map(len, rows)) + 0.55 * len(cases)),
        layout=ConstrainedLayoutEngine(rect=(0, 0.06, 1, 0.94)),
    )
    axes = figure.subplots(
        len(cases), 1, sharex=True, squeeze=False, height_ratios=[len(names) + 0.6 for names in rows]
    )
    for axis, case, names in zip(axes[:, 0], cases, rows, strict=True):
        _bars_of(axis, result, case, names)
    axes[-1, 0].set_xlabel(result.unit)
    return figure


def _bars_of(axis: Axes, result: Result, case: str, contenders: Sequence[str]) -> None:
    """The medians of these contenders in one case, with the lowest and the highest round."""
    values = [middle(result.samples, contender, case) for contender in contenders]
    spans = [[sample.value for sample in result.of(contender, case)] for contender in contenders]
    pairs = list(zip(values, spans, strict=True))
    errors = [[value - min(span) for value, span in pairs], [max(span) - value for value, span in pairs]]
    colours = [OURS if contender.startswith("samefold") else THEIRS for contender in contenders]
    axis.barh(contenders, values, color=colours, xerr=errors, error_kw={"ecolor": INK, "elinewidth": 0.8}, height=0.7)
    for row, (value, span) in enumerate(pairs):
        axis.annotate(f"{value:,.0f}", (max(span), row), xytext=(5, 0), textcoords="offset points", va="center")
    for aim in result.aims:
        if aim.case == case and aim.unit == result.unit:
            axis.axvline(aim.wanted, color=AIM, linestyle="--", linewidth=1)
            above: dict[str, Any] = {
                "transform": axis.get_xaxis_transform(),
                "va": "bottom",
                "color": AIM,
                "fontsize": 9,
            }
            axis.text(aim.wanted, 1.0, f" aim {aim.wanted:,.0f}", **above)
    axis.set_title(case, loc="left", fontsize=11)
    axis.invert_yaxis()
    axis.margins(x=0.12)
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axis.tick_params(axis="y", length=0)


def _curves(result: Result) -> Figure:
    """Milliseconds over percentiles, a panel for each case."""
    cases = list(dict.fromkeys(case for _, case in result.contenders))
    figure = Figure(figsize=(9, 4), layout=ConstrainedLayoutEngine(rect=(0, 0.06, 1, 0.94)))
    for axis, case in zip(figure.subplots(1, len(cases), squeeze=False)[0], cases, strict=True):
        _curves_of(axis, result, case)
    return figure


def _curves_of(axis: Axes, result: Result, case: str) -> None:
    """Milliseconds over percentiles of each contender in one case; the last percentiles get the most room."""
    curves: dict[str, list[float]] = result.plots["curves"]
    styles = cycle(("-", "--", ":"))
    for contender, of in result.contenders:
        if of != case:
            continue
        curve = curves[f"{contender}, {case}"][:99]
        colour = OURS if contender.startswith("samefold") else "#777777"
        line: dict[str, Any] = {"color": colour, "linestyle": "-" if colour == OURS else next(styles), "linewidth": 1.8}
        axis.plot([1 / (1 - n / 100) for n in range(1, 100)], curve, label=contender, **line)
        for percent in (50, 99):
            ms = curve[percent - 1]
            told = f"{ms:.2g} ms" if ms < 10 else f"{ms:.0f} ms"
            axis.text(1 / (1 - percent / 100), ms, told, ha="center", va="bottom", fontsize=9, color=colour)
    axis.set_xscale("log")
    axis.set_xticks([1 / (1 - p / 100) for p in (1, 50, 90, 99)], ["p1", "p50", "p90", "p99"])
    axis.minorticks_off()
    axis.set_ylim(bottom=0)
    axis.margins(y=0.15)
    axis.set_title(case, loc="left", fontsize=11)
    axis.set_ylabel("ms")
    axis.legend(frameon=False, fontsize=9, loc="upper left")


def _divided(result: Result) -> Figure:
    """HTTP: curves of the cases that have some, then the parts of the idle one, then bars of the last."""
    cases = list(dict.fromkeys(case for _, case in result.contenders))
    contenders = [contender for contender, case in result.contenders if case == cases[-1]]
    figure = Figure(figsize=(9, 9), layout=ConstrainedLayoutEngine(rect=(0, 0.03, 1, 0.95)))
    grid = figure.add_gridspec(3, len(cases) - 1, height_ratios=[4, 4, 1.2])
    for column, case in enumerate(cases[:-1]):
        _curves_of(figure.add_subplot(grid[0, column]), result, case)
    _parts(figure.add_subplot(grid[1, :]), result)
    axis = figure.add_subplot(grid[2, :])
    _bars_of(axis, result, cases[-1], contenders)
    axis.set_xlabel("answers/s")
    return figure


def _parts(axis: Axes, result: Result) -> None:
    parts = result.plots["parts"]
    for shift, (name, label, colour) in enumerate(
        (("middle", "mean of the fifth in the middle", OURS), ("slowest", "mean of the slowest hundredth", THEIRS))
    ):
        rows = [number + 0.4 * shift for number in range(len(parts[name]))]
        bars = axis.barh(rows, list(parts[name].values()), height=0.38, color=colour, label=label)
        axis.bar_label(bars, fmt="%.2f", fontsize=8, padding=3)
    axis.set_yticks([number + 0.2 for number in range(len(parts["middle"]))], list(parts["middle"]))
    axis.set_title("idle: where the time goes", loc="left", fontsize=11)
    axis.set_xlabel("ms")
    axis.invert_yaxis()
    axis.margins(x=0.12)
    axis.tick_params(axis="y", length=0)
    axis.legend(frameon=False, fontsize=9, loc="lower right")
