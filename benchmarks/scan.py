"""How many commits a second a question in Spark gets through: by the source `samefold`, and by Spark's own connector to Kafka."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.check import require
from benchmarks.fill import fill_log
from benchmarks.results import Aim, Result, Sample, middle
from benchmarks.scanning import COUNTED, SUMMED, connector
from benchmarks.stage import Bench, World
from benchmarks.workload import OPEN, Order, history

STREAMS = 200_000
COMMITS = 5_000_000
OURS, PEER = "samefold, the source", "Spark's connector, from_json"
CONTENDERS = {OURS: "samefold", PEER: "connector"}
TURNS = ("first", "warm")
"""Of a question, in one session. Aims are stated for the second: the connector is parsed by the JVM's compiled code then."""
WITHIN_S = 1_200.0
Answers = dict[str, list[list[Any]]]
AIMS = {COUNTED: 1.5, SUMMED: 1.0}


def run(bench: Bench) -> Result:
    count, streams = bench.options.scaled(COMMITS), bench.options.scaled(STREAMS)
    connector()
    samples: list[Sample] = []
    types, cents = Counter[str](), 0
    with bench.world() as world:
        bench.progress.begin("scan: load events", count)

        def entered() -> Iterator[Order]:
            nonlocal cents
            for order in history(streams, count, bench.chance("scan")):
                deposited = order.cents > 0
                types[
                    "AccountOpened" if order.cents == OPEN else "MoneyDeposited" if deposited else "MoneyWithdrawn"
                ] += 1
                cents += order.cents if deposited else 0
                yield order

        fill_log(world.settings, world.commands.id, entered(), bench.progress.advance)
        answers: Answers = {COUNTED: sorted(map(list, types.items())), SUMMED: [[cents]]}
        for number in range(1, bench.options.rounds + 1):
            for contender in CONTENDERS:
                samples += _asked(bench, world, contender, number, count, answers)
    aims = [
        Aim(f"{what}: the source beside the connector, warm", least, _ratio(samples, what), unit="x")
        for what, least in AIMS.items()
    ]
    title = "Commits that a question in Spark reads, per second"
    return Result("scan", title, "commits/s", samples, aims, {"commits": count, "streams": streams})


def case_of(what: str, turn: str) -> str:
    return f"{what}, {turn}"


def _ratio(samples: Sequence[Sample], what: str) -> float:
    case = case_of(what, "warm")
    return middle(samples, OURS, case) / middle(samples, PEER, case)


def _asked(bench: Bench, world: World, contender: str, number: int, count: int, answers: Answers) -> Iterator[Sample]:
    """Each question twice, in one session."""
    bench.progress.begin(f"round {number}: {contender}", None)
    given = {"of": CONTENDERS[contender], "times": len(TURNS)}
    with bench.process(world, f"scan-{given['of']}-{number}", "benchmarks.scanning", **given) as process:
        if code := process.wait(WITHIN_S):
            process.fail(f"The scan ended with exit code {code}.")
    told = [json.loads(line) for line in process.log.read_text().splitlines() if line.startswith("{")]
    require(len(told) == len(TURNS) * len(answers), f"{contender} gave {len(told)} answers")
    for n, one in enumerate(told):
        what, seconds = one["what"], one["seconds"]
        require(one["answer"] == answers[what], f"{contender}: {what} is {one['answer']}, not {answers[what]}")
        case, cpu = case_of(what, TURNS[n % len(TURNS)]), {"scan": one["cpu_s"]}
        yield Sample(contender, case, number, count / seconds, count, seconds, cpu)
