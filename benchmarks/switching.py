"""What readers and agents notice of a switch: to another table of the same code, and from old code to new."""

from __future__ import annotations

import heapq
import json
import random
import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain, pairwise
from statistics import median
from types import TracebackType
from typing import Any, NamedTuple

from psycopg import sql

from benchmarks.check import check_rows, require
from benchmarks.fill import fill_commands
from benchmarks.latency import percentile
from benchmarks.newer import VIEW
from benchmarks.processes import Process, wait_until
from benchmarks.project import STATES
from benchmarks.reading import Progressed, progress_of
from benchmarks.results import Aim, Result, Sample
from benchmarks.stage import Bench, World
from benchmarks.workload import Ledger, Order, movements, opening_orders, order_id
from commands.outcomes import live_table
from infra.database.connect import connect
from infra.processes.beside import Beside
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

BALANCES = sql.SQL("select account, transactions + 1, cents from {}")


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
        crew = _Agents(bench, world)
        open_.callback(crew.stop)
        crew.start(1)
        sent = _fill(bench, world, progress, ledger, (handler, *crew.processes))
        with _load(bench, world) as load, _readers(bench, world) as readers, Heard(world) as heard:
            heard.wait_for_batches(0)
            meter = bench.cpu(handler=[handler], agents=crew.processes, readers=readers)
            told = _switch(bench, world, 1, switches, (handler, load, *readers))
            cpu = meter.spent()
            for version in range(2, releases + 2):
                bench.progress.begin(f"switch: to version {version} of the code", None)
                crew.prepare(version)
                _switch(bench, world, version, 1, (handler, load, *readers))
                crew.take_over(heard, switches + version - 1)
        answers = [[Answer(*row) for row in json.loads(_last_line(reader))] for reader in readers]
        others = _replay(ledger, load, bench.options.seed)
        bench.progress.begin("switch: wait for all outcomes", None)
        wait_until(progress.answered, sent + others, (handler, *crew.processes), lambda _: None, every=0.05)
        _check(world, ledger, answers)
    require(len(heard.switches) == switches + releases, f"{len(heard.switches)} switches were heard")
    return _result(answers, heard, switches, told, cpu)


# ── what runs ──


class _Agents:
    """The agents of one version of the code, and those of the next, that wait for it to be live."""

    def __init__(self, bench: Bench, world: World) -> None:
        self._bench = bench
        self._world = world
        self._stack = ExitStack()
        self._next = ExitStack()
        self.processes: tuple[Process, ...] = ()
        self._coming: tuple[Process, ...] = ()

    def start(self, version: int) -> None:
        self.processes = tuple(self._enter(self._stack, version, number) for number in range(1, AGENTS + 1))

    def prepare(self, version: int) -> None:
        """Start those of the next version, until they hold."""
        self._next = ExitStack()
        self._coming = tuple(self._enter(self._next, version, number) for number in range(1, AGENTS + 1))
        for process in self._coming:
            process.wait_for_log("holding")
            process.wait_for_log("has partitions")

    def take_over(self, heard: Heard, switches: int) -> None:
        """Until they fold after so many switches; the old ones, which hold by now, are stopped."""
        heard.wait_for_batches(switches)
        self._stack.close()
        self._stack, self._next = self._next, ExitStack()
        self.processes, self._coming = self._coming, ()

    def stop(self) -> None:
        self._next.close()
        self._stack.close()

    def _enter(self, stack: ExitStack, version: int, number: int) -> Process:
        settings, folder = self._world.settings, self._bench.folder
        name = f"{settings.group_prefix}-agent-{version}-{number}"
        arguments = (str(version), "projections.engine.live.agent", "--name", name)
        return stack.enter_context(Process(settings, folder, name, "benchmarks.newer", *arguments))


def _make_tables(world: World, releases: int) -> None:
    """What the migrations of later versions would make."""
    with connect(world.settings, "samefold bench") as database:
        for version in range(2, releases + 2):
            database.execute(
                f"create table {VIEW}_v{version} (like {VIEW}_v1 including all) with (fillfactor = 70)".encode()
            )


def _fill(bench: Bench, world: World, progress: Progressed, ledger: Ledger, processes: tuple[Process, ...]) -> int:
    """The log before the first switch; the number of commands."""
    count = bench.options.scaled(COMMITS, least=2 * ACCOUNTS)
    chance = bench.chance("switch")
    orders = [*opening_orders(ACCOUNTS, chance), *movements(ACCOUNTS, count - ACCOUNTS, chance)]
    ledger.enter_all(orders)
    fill_commands(world.settings, orders, lambda _: None)
    bench.progress.begin("switch: the log before", count)
    wait_until(progress.answered, count, processes, bench.progress.advance, every=0.05)
    return count


@contextmanager
def _load(bench: Bench, world: World) -> Iterator[Process]:
    given = {"first": 0, "accounts": ACCOUNTS, "rate": LOAD, "seed": bench.options.seed}
    arguments = [text for name, value in given.items() for text in (f"--{name}", str(value))]
    with Process(world.settings, bench.folder, "background", "benchmarks.background", *arguments) as process:
        yield process


@contextmanager
def _readers(bench: Bench, world: World) -> Iterator[list[Process]]:
    with ExitStack() as open_:
        readers = []
        for number, way in enumerate(chain.from_iterable([way] * count for way, count in READERS.items())):
            given = {"by": way, "rate": READS, "accounts": ACCOUNTS, "seed": bench.options.seed + number}
            arguments = [text for name, value in given.items() for text in (f"--{name}", str(value))]
            reader = Process(world.settings, bench.folder, f"reader-{number}", "benchmarks.asking", *arguments)
            readers.append(open_.enter_context(reader))
        yield readers


def _switch(
    bench: Bench, world: World, version: int, count: int, beside: tuple[Process, ...]
) -> list[dict[str, float]]:
    """Switch so many times, in a process of that version of the code; what it told of each."""
    arguments = ("--version", str(version), "--count", str(count))
    if count > 1:
        bench.progress.begin("switch", count)
    with Process(world.settings, bench.folder, "switcher", "benchmarks.switcher", *arguments) as switcher:
        done = 0
        deadline = time.monotonic() + SWITCHED_WITHIN_S
        while True:
            lines = [line for line in switcher.log.read_text().splitlines() if line.endswith("}")]
            if len(lines) > done:
                bench.progress.advance(len(lines) - done)
                done, deadline = len(lines), time.monotonic() + SWITCHED_WITHIN_S
            if done == count:
                break
            for process in (switcher, *beside):
                process.check()
            if time.monotonic() > deadline:
                switcher.fail(f"{done} of {count} switches, and none for {SWITCHED_WITHIN_S:.0f} s.")
            time.sleep(0.05)
        if switcher.wait(SWITCHED_WITHIN_S):
            switcher.fail("The rebuilding process failed.")
    return [json.loads(line) for line in lines]


class Heard(Beside):
    """What agents and switches notify on, each with the time at which it was heard, just after its COMMIT."""

    def __init__(self, world: World) -> None:
        super().__init__("heard")
        self.switches: list[float] = []
        self.batches: dict[int, list[float]] = {partition: [] for partition in range(world.settings.partitions)}
        """Of each partition."""
        self._database = connect(world.settings, "samefold bench")
        self._database.execute(sql.SQL("listen {}").format(sql.Identifier(channel(CORE))))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        self._database.close()
        if self.error is not None and error is None:
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


def _replay(ledger: Ledger, load: Process, seed: int) -> int:
    """Enter what the load has sent, drawn again from its seed; how many."""
    sent = int(_last_line(load).split()[0])
    chance = random.Random(seed)
    for _ in range(sent):
        ledger.enter(Order(chance.randrange(ACCOUNTS), 1, order_id(chance)))
    return sent


def _check(world: World, ledger: Ledger, answers: Iterable[Sequence[Answer]]) -> None:
    """Raises RunVoid."""
    with connect(world.settings, "samefold bench check") as database:
        table = live_table(database, VIEW)
    check_rows(world.settings, BALANCES.format(sql.Identifier(table)), ledger.rows(), table)
    check_rows(world.settings, STATES, ledger.rows(), "states of streams")
    older = older_answers(chain.from_iterable(answers))
    require(not older, f"{len(older)} answers are older than what was seen before, such as {older[:1]}")


def older_answers(answers: Iterable[Answer]) -> list[tuple[Answer, int]]:
    """Those that saw less than somebody had seen before they were asked, and what that was."""
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
        _sample(contender, case, values, seconds)
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
        f"{sample.contender}, {sample.case}": [round(percentile(values, percent), 3) for percent in range(1, 101)]
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


def _sample(contender: str, case: str, values: Sequence[float], seconds: float) -> Sample:
    values = list(values)
    more = {f"p{p}_ms": percentile(values, p) for p in (90, 99)} | {"max_ms": max(values)}
    return Sample(contender, case, 1, median(values), len(values), seconds, {}, more)


def _last_line(process: Process) -> str:
    return process.log.read_text().splitlines()[-1]
