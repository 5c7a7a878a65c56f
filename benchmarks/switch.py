"""What readers and agents notice of a switch: to another table of the same code, and from old code to new."""

from __future__ import annotations

import heapq
import json
import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import chain, pairwise
from statistics import median
from typing import Any, NamedTuple

from psycopg import sql

from benchmarks.check import BALANCES_IN, STATES, check_rows, require
from benchmarks.other_code import FIRST, VIEW
from benchmarks.processes import Process, wait_until
from benchmarks.reading import Progressed, progress_of
from benchmarks.results import Aim, Result, curve, latency_sample, percentile
from benchmarks.stage import Background, Bench, World, background
from benchmarks.workload import Ledger, deposits, movements, opening_orders
from commands.outcomes import live_table
from demo.background_thread import BackgroundThread
from infra.database.connect import connect
from projections.engine.store.positions import channel
from projections.engine.views.view import CORE

SWITCHES = 100
RELEASES = 5
"""Switches from old code to new."""
COMMITS = 20_000
"""Before the first switch; the load adds to them."""
ACCOUNTS = 200
"""Few, so that each answer is soon out of date, and one that is older than another is seen to be."""
LOAD = 1_000
"""Commands per second, all the time."""
READERS = {"pointer": 2, "view": 1, "total": 1}
READS = 150
"""Of each reader, per second."""
AGENTS = 2
NEAR_S = 0.1
"""Before and after a switch: answers that were under way then are those that may have waited for it."""
SWITCHED_WITHIN_S = 180.0

AT, BETWEEN = "samefold, at a switch", "between two switches"
WAIT, GAP, RELEASE = "readers' longest wait", "agents' gap, same code", "agents' gap, old to new code"


class Answer(NamedTuple):
    """What a reader saw, in seconds of the monotonic clock. `since` is when it began to wait."""

    since: float
    asked: float
    answered: float
    account: int
    seen: int


def run(bench: Bench) -> Result:
    switches, releases = bench.options.scaled(SWITCHES, least=3), bench.options.scaled(RELEASES, least=1)
    ledger = Ledger(ACCOUNTS)
    with bench.world() as world, progress_of(world) as progress, ExitStack() as open_:
        _make_tables(world, releases)
        handler = open_.enter_context(bench.handler(world))
        running, agents = _agents(bench, world, FIRST, open_)
        sent = _fill(bench, progress, ledger, (handler, *agents))
        with (
            background(bench, world, 0, ACCOUNTS, LOAD, bench.options.seed) as load,
            _readers(bench, world) as readers,
            Heard(world) as heard,
        ):
            heard.wait_for_batches(0)
            meter = bench.cpu(handler=[handler], agents=agents, readers=readers)
            told = _switch(bench, world, FIRST, switches, (handler, load.process, *readers))
            cpu = meter.spent()
            for version in range(FIRST + 1, FIRST + releases + 1):
                bench.progress.begin(f"switch: to version {version} of the code", None)
                older = running
                running, agents = _agents(bench, world, version, open_)
                for agent in agents:  # they wait for their version to be live
                    agent.wait_for_log("holding")
                    agent.wait_for_log("has partitions")
                _switch(bench, world, version, 1, (handler, load.process, *readers))
                heard.wait_for_batches(switches + version - FIRST)
                older.close()
        answers = [[Answer(*row) for row in json.loads(reader.last_line())] for reader in readers]
        others = _replay(ledger, load, bench.options.seed)
        bench.progress.begin("switch: wait for all outcomes", None)
        wait_until(progress.answered, sent + others, (handler, *agents), lambda _: None, every=0.05)
        _check(world, ledger, answers)
    require(len(heard.switches) == switches + releases, f"{len(heard.switches)} switches were heard")
    return _result(answers, heard, switches, told, cpu)


# ── what runs ──


def _agents(bench: Bench, world: World, version: int, open_: ExitStack) -> tuple[ExitStack, tuple[Process, ...]]:
    """The agents of a version of the code, with what ends them; `open_` does at the latest."""
    stack = open_.enter_context(ExitStack())
    agents = (bench.agent(world, [VIEW], f"agent-{version}-{number}", version) for number in range(1, AGENTS + 1))
    return stack, tuple(map(stack.enter_context, agents))


def _make_tables(world: World, releases: int) -> None:
    """What the migrations of later versions would make."""
    with connect(world.settings, "samefold bench") as database:
        for version in range(FIRST + 1, FIRST + releases + 1):
            database.execute(
                f"create table {VIEW}_v{version} (like {VIEW}_v{FIRST} including all) with (fillfactor = 70)".encode()
            )


def _fill(bench: Bench, progress: Progressed, ledger: Ledger, processes: tuple[Process, ...]) -> int:
    """The log before the first switch; the number of commands."""
    count = bench.options.scaled(COMMITS, least=2 * ACCOUNTS)
    chance = bench.chance("switch")
    orders = [*opening_orders(ACCOUNTS, chance), *movements(ACCOUNTS, count - ACCOUNTS, chance)]
    ledger.enter_all(orders)
    progress.carry_out(bench, orders, "switch: the log before", *processes)
    return count


@contextmanager
def _readers(bench: Bench, world: World) -> Iterator[list[Process]]:
    with ExitStack() as open_:
        readers = []
        for number, way in enumerate(chain.from_iterable([way] * count for way, count in READERS.items())):
            given = {"by": way, "rate": READS, "accounts": ACCOUNTS, "seed": bench.options.seed + number}
            reader = bench.process(world, f"reader-{number}", "benchmarks.asking", **given)
            readers.append(open_.enter_context(reader))
        yield readers


def _switch(
    bench: Bench, world: World, version: int, count: int, beside: tuple[Process, ...]
) -> list[dict[str, float]]:
    """Switch so many times, in a process of that version of the code; what it told of each."""
    if count > 1:
        bench.progress.begin("switch", count)
    with bench.process(world, "switcher", "benchmarks.switcher", version=version, count=count) as switcher:

        def lines() -> list[str]:
            return [line for line in switcher.log.read_text().splitlines() if line.endswith("}")]

        wait_until(lambda: len(lines()), count, (switcher, *beside), bench.progress.advance, every=0.05)
        if switcher.wait(SWITCHED_WITHIN_S):
            switcher.fail("The rebuilding process failed.")
    return [json.loads(line) for line in lines()]


class Heard(BackgroundThread):
    """What agents and switches notify on, each with the time at which it was heard, just after its COMMIT."""

    def __init__(self, world: World) -> None:
        super().__init__("heard")
        self.switches: list[float] = []
        self.batches: dict[int, list[float]] = {partition: [] for partition in range(world.settings.partitions)}
        """Of each partition."""
        self._database = connect(world.settings, "samefold bench")
        self._database.execute(sql.SQL("listen {}").format(sql.Identifier(channel(CORE))))

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._database.close()
        if self.error is not None and error[1] is None:
            raise self.error

    def wait_for_batches(self, switches: int) -> None:
        """Of each partition, after so many switches: a gap is measured from a batch before one to a batch after it."""
        deadline = time.monotonic() + SWITCHED_WITHIN_S
        while not self._folds_after(switches):
            require(time.monotonic() < deadline, f"some partition is not folded for {SWITCHED_WITHIN_S:.0f} s")
            time.sleep(0.02)

    def _folds_after(self, switches: int) -> bool:
        if len(self.switches) < switches:
            return False
        last = self.switches[switches - 1] if switches else 0.0
        return all(times and times[-1] > last for times in self.batches.values())

    def gap_at(self, moment: float) -> float:
        """The longest time around it during which nothing of some partition was committed."""
        return max(_around(times, moment) for times in self.batches.values())

    def _work(self) -> None:
        while not self._ended.is_set():
            for told in self._database.notifies(timeout=0.2):
                now = time.monotonic()
                if told.payload == "switch":
                    self.switches.append(now)
                    continue
                for moved in told.payload.split(","):
                    self.batches[int(moved.partition(":")[0])].append(now)


def _around(times: Sequence[float], moment: float) -> float:
    after = bisect_right(times, moment)
    require(0 < after < len(times), "a partition's batches begin after a switch or end before it")
    return times[after] - times[after - 1]


# ── whether it counts ──


def _replay(ledger: Ledger, load: Background, seed: int) -> int:
    """Enter what the load has sent, drawn again from its seed; how many."""
    ledger.enter_all(deposits(0, ACCOUNTS, load.sent(), seed))
    return load.sent()


def _check(world: World, ledger: Ledger, answers: Iterable[Sequence[Answer]]) -> None:
    """Raises RunVoid."""
    with connect(world.settings, "samefold bench check") as database:
        table = live_table(database, VIEW)
    check_rows(world.settings, BALANCES_IN.format(sql.Identifier(table)), ledger.rows(), table)
    check_rows(world.settings, STATES, ledger.rows(), "states of streams")
    older = older_answers(chain.from_iterable(answers))
    require(not older, f"{len(older)} answers are older than what was seen before, such as {older[:1]}")


def older_answers(answers: Iterable[Answer]) -> list[tuple[Answer, int]]:
    """Reads that saw less than an earlier read, and what that one saw."""
    newest: dict[int, int] = {}
    finished: list[tuple[float, int, int]] = []
    older = []
    for answer in sorted(answers, key=lambda one: one.asked):
        while finished and finished[0][0] < answer.asked:
            _, account, seen = heapq.heappop(finished)
            newest[account] = max(newest.get(account, 0), seen)
        if answer.seen < newest.get(answer.account, 0):
            older.append((answer, newest[answer.account]))
        heapq.heappush(finished, (answer.answered, answer.account, answer.seen))
    return older


# ── figures ──


def longest_waits(answers: Sequence[Answer], moments: Iterable[float]) -> list[float]:
    """Milliseconds: of each moment, the longest wait of one reader's answers that were under way near it."""
    ended = [answer.answered for answer in answers]
    found = []
    for moment in moments:
        waits = []
        for answer in answers[bisect_left(ended, moment - NEAR_S) :]:
            if answer.since > moment + NEAR_S:
                break
            waits.append(1000 * (answer.answered - answer.since))
        if waits:
            found.append(max(waits))
    return found


def _result(
    answers: Sequence[Sequence[Answer]],
    heard: Heard,
    same: int,
    told: Sequence[Mapping[str, float]],
    cpu: dict[str, float],
) -> Result:
    at, released = heard.switches[:same], heard.switches[same:]
    between = [(one + other) / 2 for one, other in pairwise(at)]
    waits = {
        AT: [wait for reader in answers for wait in longest_waits(reader, at)],
        BETWEEN: [wait for reader in answers for wait in longest_waits(reader, between)],
    }
    gaps = {AT: [1000 * heard.gap_at(moment) for moment in at], BETWEEN: [1000 * heard.gap_at(m) for m in between]}
    releases = {AT: [1000 * heard.gap_at(moment) for moment in released]}
    seconds = at[-1] - at[0]
    every = [1000 * (answer.answered - answer.since) for reader in answers for answer in reader]
    samples = [
        replace(latency_sample(contender, case, 1, values), seconds=seconds)
        for case, of in ((WAIT, waits), (GAP, gaps), (RELEASE, releases))
        for contender, values in of.items()
    ]
    samples[0].more.update(reads=len(every), reads_per_s=len(every) / (answers[0][-1].answered - answers[0][0].asked))
    samples[0].more.update({f"any_read_p{p:g}_ms": percentile(every, p) for p in (50, 99, 99.9, 100)})
    samples[2].more.update({f"{name}_p50": median(one[name] for one in told) for name in told[0] if name != "rebuilt"})
    samples[2].cpu.update(cpu)
    aims = [
        Aim("p99 of readers' longest waits at a switch", 20, percentile(waits[AT], 99), at_most=True, unit="ms"),
        Aim("longest gap of the agents, same code", 250, max(gaps[AT]), at_most=True, unit="ms"),
        Aim("longest gap from old code to new", 3_000, max(releases[AT]), at_most=True, unit="ms"),
    ]
    curves = {
        f"{sample.contender}, {sample.case}": curve(values)
        for sample, values in zip(samples, chain(waits.values(), gaps.values(), releases.values()), strict=True)
    }
    size: dict[str, Any] = {
        "switches": len(at),
        "releases": len(released),
        "rebuilds": sum(one["rebuilt"] for one in told),
        "accounts": ACCOUNTS,
        "commands_per_s": LOAD,
        "readers": READERS,
        "agents": AGENTS,
    }
    title = "What readers and agents notice of a switch under 1,000 commands/s"
    return Result("switch", title, "ms, p50", samples, aims, size, {"curves": curves})
