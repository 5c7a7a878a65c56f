"""make test-all: what needs Spark anyway.

`docs/analytics.md` is executed on the demo's bank. Its picture is made, and its SQL finds what plain Python sums up."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from demo.bank import command_for
from demo.generate import generate
from domain.accounts import AccountOpened, Deposit, MoneyDeposited, MoneyWithdrawn, Withdraw
from infra.settings import Settings
from spark_jobs.engine import lake
from tests.engine.bookkeeper import Bookkeeper
from tests.engine.pages.pages import blocks, matches, typed
from tests.engine.spine import set_up
from tools.testing.fixtures import ROOT, Samefold, dev_env

PAGE = (ROOT / "docs" / "analytics.md").read_text()
PICTURE = "monthly-turnover.svg"


@pytest.mark.slow
def test_the_page(
    world: Settings,
    spark: SparkSession,
    spark_place: Path,
    samefold: Samefold,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = world.model_copy(update={"lake_url": str(tmp_path / "lake")})
    (spark_place / "dev.env").write_text(dev_env(world))
    for name, value in world.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(lake, "lake_session", that(spark))
    sums = write_bank(world)

    for line, output in (one for language, block in blocks(PAGE) if language == "console" for one in typed(block)):
        done = samefold(*line.split()[2:], settings=world)
        assert done.returncode == 0, (line, done.stderr)
        assert matches(done.stdout, f"…{output}"), (line, done.stdout)
    known: dict[str, Any] = {"lake": world.lake}
    for code in (block for language, block in blocks(PAGE) if language == "python"):
        if code.startswith("# "):
            path, _, text = code.removeprefix("# ").partition("\n")
            assert (ROOT / path).read_text() == text
        else:
            exec(code, known)

    turnover = known["turnover"]
    found = zip(turnover["month"].dt.date, turnover["turnover"], turnover["movements"], strict=True)
    assert list(found) == [(month, cents / 100, count) for month, (cents, count) in sorted(sums.items())]
    assert len(sums) == 24
    assert (tmp_path / PICTURE).stat().st_size > 10_000
    assert (ROOT / "docs" / PICTURE).is_file()


def write_bank(world: Settings) -> dict[date, tuple[int, int]]:
    """The demo's bank in the log; cents and movements by month, by plain Python."""
    set_up(world)
    keeper = Bookkeeper(world)
    sums: dict[date, tuple[int, int]] = defaultdict(lambda: (0, 0))
    opened = set()
    for one in generate():
        command = command_for(one)
        if one.account not in opened:
            opened.add(one.account)
            keeper.commit(one.account, AccountOpened(overdraft_limit=0, on=one.on))
        match command:
            case Deposit():
                keeper.commit(one.account, MoneyDeposited(cents=one.cents, on=one.on))
            case Withdraw():
                keeper.commit(one.account, MoneyWithdrawn(cents=one.cents, on=one.on))
            case _:
                continue
        cents, count = sums[month := one.on.replace(day=1)]
        sums[month] = cents + one.cents, count + 1
    keeper.flush()
    return sums


def that(spark: SparkSession) -> Any:
    @contextmanager
    def session(_settings: Settings, _master: str | None) -> Iterator[SparkSession]:
        yield spark

    return session
