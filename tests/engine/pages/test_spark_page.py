"""make test-all: the page's queries run one after the other, on the Spark of the other tests.

What `docs/spark.md` shows is run, in the order of the page.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from infra.settings import Settings
from tests.engine.bookkeeper import Bookkeeper
from tests.engine.pages.pages import blocks
from tests.engine.spine import set_up
from tools.testing.fixtures import ROOT

if TYPE_CHECKING:
    from spark_jobs.engine.spark import Spark


@pytest.mark.slow
def test_the_page_on_spark_runs(
    world: Settings, spark_engine: Spark, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    set_up(world)
    Bookkeeper(world).life(["1", "2", "3"], 5)
    for name, value in world.environment().items():
        monkeypatch.setenv(name, value)
    names: dict[str, Any] = {}
    shown = [block for language, block in blocks((ROOT / "docs" / "spark.md").read_text()) if language == "python"]
    for block in shown:
        exec(block, names)
    said = capsys.readouterr().out
    assert "movements" in said
    assert "2026-01-01" in said
    assert names["stream"].isStreaming
    assert len(shown) == 3
    spark_engine.session.sql("drop view deposits")
