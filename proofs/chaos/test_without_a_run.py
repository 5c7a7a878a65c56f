"""make test: without a run. A run holds only where faults took effect, work came back in time and snapshots were compared.

The points at which processes are killed and frozen are on the product's way, and nothing else acts there."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable

import pytest

from infra.processes import faultpoints
from proofs.chaos.mix import KINDS
from proofs.chaos.report import SNAPSHOTS, Result
from proofs.patches import ROOT


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda run: run.violations.append("C: rows differ"), "- C: rows differ"),
        (lambda run: run.effects.by_kind.subtract(KINDS[-1:]), f"- too few: {KINDS[-1]} (1)"),
        (
            lambda run: run.effects.seconds["API, once the store answers"].append(61),
            "- late: API, once the store answers, 61.0 s",
        ),
        (lambda run: run.counts.clear(), ""),
    ],
    ids=["a violation", "too few of a kind", "late", "no snapshot"],
)
def test_a_run_that_lacks_something_does_not_hold(spoil: Callable[[Result], object], told: str) -> None:
    run = Result(7, KINDS, counts=Counter({SNAPSHOTS: 10}), seconds=970.0)
    run.effects.by_kind.update(KINDS * 2)
    assert run.holds
    spoil(run)
    text = run.as_markdown()
    assert not run.holds
    assert "seed 7: **does not hold**" in text
    assert told in text


def test_each_point_is_on_the_way_of_the_product() -> None:
    files = [file for folder in ("commands", "projections") for file in (ROOT / folder).rglob("*.py")]
    reached = re.findall(r'reach\("([^"]+)"\)', "".join(file.read_text() for file in files))
    assert set(reached) == {*faultpoints.HANDLER, *faultpoints.AGENT, *faultpoints.BUILDER, *faultpoints.TRIMMER}


def test_nothing_in_the_product_but_a_benchmark_arms_a_point() -> None:
    folders = ("commands", "projections", "api", "spark_jobs", "infra", "tools", "demo", "benchmarks")
    files = [file for folder in folders for file in (ROOT / folder).rglob("*.py")]
    armed = [file.name for file in files if re.search(r"faultpoints\.hook\b|import hook\b", file.read_text())]
    assert (armed, faultpoints.hook) == (["http_marks.py"], None)
