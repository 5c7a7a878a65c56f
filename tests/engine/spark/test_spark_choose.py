"""make test: no Spark is started. Which engine `auto` takes, and what it says of it."""

from __future__ import annotations

import pytest

from infra.processes.engines import Local
from spark_jobs.engine.choose import CORE_PER_S, WORTH_S, WrongEngine, choose, engine_for

FEW = int(CORE_PER_S * WORTH_S)
MANY = FEW * 10
MASTER = "spark://somewhere:7077"


@pytest.mark.parametrize(
    ("engine", "master", "records", "use_spark", "why"),
    [
        ("auto", None, MANY, False, "no cluster is named"),
        ("auto", "local[8]", MANY, False, "no cluster is named"),
        ("auto", MASTER, FEW, False, "too little to be worth a cluster"),
        ("auto", MASTER, MANY, True, f"spark ({MASTER}); {MANY:,} records take this machine about 10 min"),
        ("auto", None, 1, False, "1 records take this machine less than a second"),
        ("local", None, MANY, False, "as asked"),
        ("spark", None, 1, True, "as asked"),
        ("spark", MASTER, 1, True, MASTER),
    ],
)
def test_auto_takes_spark_for_a_long_log_and_a_cluster(
    engine: str, master: str | None, records: int, use_spark: bool, why: str
) -> None:
    found, told = choose(engine, master, 1, records)
    assert found is use_spark
    assert why in told


def test_what_was_chosen_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    told: list[str] = []
    with engine_for("local", None, 3, tell=told.append) as engines:
        engine = engines(5)
    assert isinstance(engine, Local)
    assert engine.processes == 3
    assert told == ["engine: local, as asked"]


@pytest.mark.parametrize(("engine", "master"), [("sparkle", None), ("local", MASTER)])
def test_what_does_not_go_together_is_wrong_usage(engine: str, master: str | None) -> None:
    with pytest.raises(WrongEngine) as refused, engine_for(engine, master, tell=print):
        pass
    assert refused.value.exit_code == 2
