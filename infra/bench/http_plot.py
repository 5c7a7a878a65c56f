"""The plot of the HTTP benchmark: latencies, where their time goes, and answers per second."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from infra.bench.plot import OURS, THEIRS, bars_of, curves_of
from infra.bench.results import Result


def divided(result: Result) -> Figure:
    """Curves of the cases that have some, then the parts of the idle one, then bars of the last."""
    contenders = list(dict.fromkeys(contender for contender, _ in result.contenders))
    cases = list(dict.fromkeys(case for _, case in result.contenders))
    figure = Figure(figsize=(9, 9), layout=ConstrainedLayoutEngine(rect=(0, 0.03, 1, 0.95)))
    grid = figure.add_gridspec(3, len(cases) - 1, height_ratios=[4, 4, 1.2])
    for column, case in enumerate(cases[:-1]):
        curves_of(figure.add_subplot(grid[0, column]), result, case)
    _parts(figure.add_subplot(grid[1, :]), result)
    axis = figure.add_subplot(grid[2, :])
    bars_of(axis, result, cases[-1], contenders)
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
