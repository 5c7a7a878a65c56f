"""What grows with the length of the log, the number of views, of partitions, processes and indexes, though the work is the same."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from statistics import median
from typing import Any

import psutil
from psycopg import sql

from benchmarks.check import BALANCES, OUTCOMES, STATES, check_count, check_rows, require
from benchmarks.fill import Standing, fill_commands, fill_log
from benchmarks.latency import client_of, repeat
from benchmarks.other_code import FIRST, VIEW
from benchmarks.processes import Process, wait_until
from benchmarks.project import release, start_held, wait_for_assignment
from benchmarks.reading import Progressed, progress_of
from benchmarks.results import Aim, Result, Sample, middle, percentile
from benchmarks.stage import Bench, World
from benchmarks.workload import Ledger, Order, deposits, history, opening_orders
from infra.database.connect import connect
from projections.engine import Index
from projections.engine.views.core_views import all_views
from projections.engine.views.indexes import orders_of
from projections.engine.views.tables import to_add_indexes
from projections.engine.views.view import CORE

MILLION = 1_000_000
MARKS = (2, 8)
"""Millions of commits; `--commits` may end before the last of them, or add one."""
STREAMS = MILLION
STRETCH = MILLION
"""The last commits before a mark, whose rate is told."""
AGENTS = 2
EVENTS, WIDE = 600_000, 200_000
"""Of the other parts, and its streams."""
VIEWS = (1, 20)
PARTITIONS = (1, 8, 64)
PROCESSES = (1, 2, 4, 8)
INDEXES = {
    "no index": (),
    "1 index, of a column that stays": ("owner",),
    "1 index, of one that changes": ("cents",),
    "3 indexes": ("owner", "cents", "last_on"),
}
ALONE = "balances"
"""An agent that has nothing but the view."""
FEW = 100
"""Commands, for a start and a takeover."""
COMMANDS = 300
"""One at a time, for the latency; as many before that do not count."""
LOOK_S = 0.02
WITHIN_S = 1_800.0
REBUILDING = ("benchmarks.rebuilding", "--engine", "local", "--times", "1")
OURS = "samefold"

_SUMS = "select concat_ws(' ', count(*), sum({version}), sum({balance})) from {table}"
_QUIET = '''"""Is the account closed?"""

from typing import NamedTuple

from domain.accounts import AccountClosed
from projections.engine import At, Key

VERSION = 1


class Closed(NamedTuple):
    account: Key[str]
    times: int


def evolve(row: Closed | None, event: AccountClosed, at: At) -> Closed | None:
    return Closed(at.id, row.times + 1 if row else 1)
'''
"""A view that subscribes to nothing of what the log has."""
_QUIET_TABLE = """
create table {name}_v1 (account text collate "C" primary key, times bigint not null, _partition smallint not null)
"""


def run(bench: Bench) -> Result:
    parts: dict[str, Callable[[Bench], Result]] = {
        "commits": _commits,
        "views": _views,
        "partitions": _partitions,
        "processes": _processes,
        "indexes": _indexes,
    }
    return parts[bench.options.part](bench)


# ── the log's length ──


def _commits(bench: Bench) -> Result:
    most = bench.options.commits
    marks = sorted({MARKS[0], most, *(mark for mark in MARKS if mark < most)})
    names = {mark: f"{bench.options.scaled(mark * MILLION) / MILLION:g} million" for mark in marks}
    samples: list[Sample] = []
    for number in range(1, bench.options.rounds + 1):
        with bench.world() as world, progress_of(world) as progress:
            log = _Log(bench, world, progress, number)
            samples += [log.grow_to(mark, names[mark]) for mark in marks]
    first = names[marks[0]]
    rates = {case: middle(samples, OURS, case) for case in names.values()}
    aims = [
        Aim(
            f"{names[mark]} beside {first}",
            0.95 if mark <= MARKS[-1] else 0.85,
            rates[names[mark]] / rates[first],
            unit="x",
        )
        for mark in marks[1:]
    ]
    bytes_each = max(one.more["outcome_bytes"] for one in samples)
    aims.append(Aim("a command in command_outcomes, index and all", 130, bytes_each, at_most=True, unit="bytes"))
    title = "Events folded by two agents at the end of a long log, per second"
    size = {"streams": bench.options.scaled(STREAMS), "stretch": bench.options.scaled(STRETCH), "marks": marks}
    return Result("growth-commits", title, "events/s", samples, aims, size)


@dataclass(slots=True)
class _Log:
    """One log that grows, with all that was folded of it. `ledger` knows what must have become of it."""

    bench: Bench
    world: World
    progress: Progressed
    round: int
    ledger: Ledger = field(init=False)
    versions: dict[str, int] = field(default_factory=dict)
    count: int = 0
    """Of commits."""
    commands: int = 0
    """Of them, those that a handler has decided."""
    _orders: Iterator[Order] = field(init=False)

    def __post_init__(self) -> None:
        options = self.bench.options
        streams = options.scaled(STREAMS, least=200)
        self.ledger = Ledger(streams)
        chance = self.bench.chance("growth", self.round)
        opened = history(streams, 10**9, chance, opened=True)
        self._orders = chain(opening_orders(streams, chance), opened)

    def grow_to(self, mark: int, case: str) -> Sample:
        """The log made that long and folded: its last stretch's rate, and what else there is to know there."""
        options = self.bench.options
        wanted = options.scaled(mark * MILLION, least=400 * mark)
        self._fill(wanted - self.count, f"growth {case}, round {self.round}: load events")
        stretch = min(options.scaled(STRETCH, least=200), wanted // 2)
        more: dict[str, float] = {}
        with ExitStack() as running:
            agents = [running.enter_context(self.bench.agent(self.world, [VIEW], f"agent-{n}")) for n in range(AGENTS)]
            done, seconds, cpu = _fold(
                self.bench, self.progress, agents, stretch, f"growth {case}, round {self.round}: fold"
            )
            more["agent_mb"] = max(_resident(agent) for agent in agents)
        self._check()
        more |= self._sizes()
        more |= self._at_work(case)
        self._check()
        more |= self._compared(case)
        return Sample(OURS, case, self.round, done / seconds, done, seconds, cpu, more)

    def _fill(self, count: int, what: str) -> None:
        """Append as the next writer would, who opens each partition."""
        self.bench.progress.begin(what, count)
        ends = self.world.ends()
        with connect(self.world.settings, "samefold bench") as database:
            found: dict[int, int] = dict(
                database.execute("select partition, command_offset from positions where agent = 'core'").fetchall()
            )
        standing = {partition: Standing(end, found.get(partition, -1)) for partition, end in ends.items()}

        def entered() -> Iterator[Order]:
            for order in islice(self._orders, count):
                self.ledger.enter(order)
                yield order

        fill_log(
            self.world.settings,
            self.world.commands.id,
            entered(),
            self.bench.progress.advance,
            standing=standing,
            versions=self.versions,
        )
        self.count += count

    def _check(self) -> None:
        """Counts and plain sums of the three live tables. Raises RunVoid."""
        settings, tables = self.world.settings, self._tables()
        sums = f"{sum(map(bool, self.ledger.version))} {sum(self.ledger.version)} {sum(self.ledger.balance)}"
        states = tables["streams_accounts"], "version", "(state->>'balance')::bigint"
        balances = tables[VIEW], "transactions + 1", "cents"
        for what, (table, version, balance) in (("states of streams", states), (VIEW, balances)):
            given = {"table": sql.Identifier(table), "version": sql.SQL(version), "balance": sql.SQL(balance)}
            check_count(settings, sql.SQL(_SUMS).format(**given), sums, f"{what}, how many, versions, cents")
        outcomes = sql.SQL("select count(*) from {} where code is null").format(
            sql.Identifier(tables["command_outcomes"])
        )
        check_count(settings, outcomes, self.count, "outcomes")

    def _tables(self) -> dict[str, str]:
        with connect(self.world.settings, "samefold bench") as database:
            return dict(database.execute("select view, table_name from live").fetchall())

    def _sizes(self) -> dict[str, float]:
        """Megabytes of each live table that has rows, and of its indexes."""
        found: dict[str, float] = {}
        with connect(self.world.settings, "samefold bench") as database:
            tables = self._tables()
            for view in ("command_outcomes", "streams_accounts", VIEW):
                row = database.execute(
                    "select pg_table_size(%s::regclass), pg_indexes_size(%s::regclass)", [tables[view]] * 2
                )
                size, index = row.fetchone() or (0, 0)
                found |= {f"{view}_mb": size / 2**20, f"{view}_index_mb": index / 2**20}
                if view == "command_outcomes":
                    found["outcome_bytes"] = (size + index) / self.count
        return found

    def _at_work(self, case: str) -> dict[str, float]:
        """Starts, takeovers and latency on what is there, while nothing else is to do."""
        self.bench.progress.begin(f"growth {case}, round {self.round}: starts, takeovers, latency", None)
        world, told = self.world, {}
        with ExitStack() as running:
            start = running.enter_context
            before = self.progress.folded()
            self._fill(FEW, f"growth {case}, round {self.round}: a few events")
            began = time.monotonic()
            agents = [start(self.bench.agent(world, [VIEW], "agent-0"))]
            _wait(lambda: self.progress.folded() - before, 1, agents)
            told["agent_start_s"] = time.monotonic() - began
            _wait(self.progress.folded, self.progress.appended(), agents)
            self._send()
            began = time.monotonic()
            handlers = [start(self.bench.handler(world, "handler-a"))]
            self._all_answered([*agents, *handlers])
            told["handler_start_s"] = time.monotonic() - began
            told |= _latency(self.bench, self.world, case, self.round, self._enter)
            agents.append(start(self.bench.agent(world, [VIEW], "agent-1")))
            handlers.append(start(self.bench.handler(world, "handler-b")))
            agents[-1].wait_for_log("has partitions")
            handlers[-1].wait_for_log(", serving")
            for kind, processes in (("agent", agents), ("handler", handlers)):
                self._send()
                self._all_answered([*agents, *handlers])
                began = time.monotonic()
                processes.pop(0).end()
                self._send()
                self._all_answered([*agents, *handlers])
                told[f"{kind}_takeover_s"] = time.monotonic() - began
        return told

    def _send(self) -> None:
        """A few commands for all partitions."""
        orders = list(deposits(0, len(self.ledger.version), FEW, self.commands))
        fill_commands(self.world.settings, orders, lambda _: None)
        for order in orders:
            self._enter(order)

    def _enter(self, order: Order) -> None:
        """A command that a handler decides."""
        require(self.ledger.enter(order).accepted, f"order {order.id} is one that is refused")
        stream = f"accounts/{order.account:06d}"
        self.versions[stream] = self.versions.get(stream, 0) + 1
        self.count += 1
        self.commands += 1

    def _all_answered(self, processes: Sequence[Process]) -> None:
        _wait(self.progress.answered, self.commands, processes)

    def _compared(self, case: str) -> dict[str, float]:
        """Microseconds an event of `verify` of all views, and of a rebuild of one."""
        told = {}
        for what, module in (("verify", ("benchmarks.verifying",)), ("rebuild", REBUILDING)):
            self.bench.progress.begin(f"growth {case}, round {self.round}: {what}", None)
            command = (VIEW, str(FIRST), CORE, *module)
            began = time.monotonic()
            with self.bench.process(self.world, what, "benchmarks.other_code", *command) as process:
                if process.wait(WITHIN_S):
                    process.fail(f"{what} failed.")
            told[f"{what}_us_each"] = 1e6 * (time.monotonic() - began) / self.count
            found = json.loads(process.last_line())
            require(found["commits"] == self.count, f"{what} folded {found['commits']} commits, not {self.count}")
            require(found.get("differences", 0) == 0, f"verify found {found.get('differences')} differences")
        return told


# ── views, partitions, processes ──


def _views(bench: Bench) -> Result:
    folder = bench.folder / "views"
    folder.mkdir()
    quiet = [f"quiet_{number}" for number in range(1, max(VIEWS))]
    for name in quiet:
        (folder / f"{name}.py").write_text(_QUIET)
    samples: list[Sample] = []
    with _wide_log(bench, "views") as (log, ledger):
        for number in range(1, bench.options.rounds + 1):
            for count in VIEWS:
                here = quiet[: count - 1]
                with bench.world(beside=log) as world:
                    with connect(world.settings, "samefold bench") as database:
                        for name in here:
                            database.execute(_QUIET_TABLE.format(name=name).encode())
                    known = [VIEW, *here, *([str(folder)] if here else ())]
                    case = f"{count} view{'s' * (count > 1)}"
                    samples.append(_turn(bench, world, ledger, case, number, views=known, held=False))
    ratio = middle(samples, OURS, f"{VIEWS[-1]} views") / middle(samples, OURS, "1 view")
    aims = [Aim(f"{VIEWS[-1]} views of which one subscribes, beside 1", 0.9, ratio, unit="x")]
    return _result(bench, "views", "by one agent with more and more views", samples, aims)


def _partitions(bench: Bench) -> Result:
    samples: list[Sample] = []
    for number in range(1, bench.options.rounds + 1):
        for count in PARTITIONS:
            case = f"{count} partition{'s' * (count > 1)}"
            with _wide_log(bench, case, number, partitions=count) as (world, ledger):
                samples.append(_turn(bench, world, ledger, case, number, latency=True))
    return _result(bench, "partitions", "by one agent out of more and more partitions", samples, [])


def _processes(bench: Bench) -> Result:
    samples: list[Sample] = []
    with _wide_log(bench, "processes") as (log, ledger):
        for number in range(1, bench.options.rounds + 1):
            for count in PROCESSES:
                with bench.world(beside=log) as world:
                    case = f"{count} agent{'s' * (count > 1)}"
                    samples.append(_turn(bench, world, ledger, case, number, processes=count))
    return _result(bench, "processes", "by more and more agents", samples, [])


def _indexes(bench: Bench) -> Result:
    samples: list[Sample] = []
    view = all_views()[VIEW]
    with _wide_log(bench, "indexes") as (log, ledger):
        for number in range(1, bench.options.rounds + 1):
            for case, columns in INDEXES.items():
                orders = orders_of(tuple(map(Index, columns)), VIEW, view.columns, is_summary=False)
                with bench.world(beside=log) as world:
                    with connect(world.settings, "samefold bench") as database:
                        for statement in to_add_indexes(replace(view, indexes=orders), view.table_name).values():
                            database.execute(statement)
                    samples.append(_turn(bench, world, ledger, case, number, agent=ALONE))
    title = "by one agent with one view and more and more indexes"
    return _result(bench, "indexes", title, samples, [])


_HOT = """
select n_tup_hot_upd::float8 / greatest(n_tup_upd, 1), pg_relation_size(relid)::float8, pg_indexes_size(relid)::float8
  from pg_stat_user_tables where relname = %s
"""


@contextmanager
def _wide_log(bench: Bench, part: str, number: int = 1, **settings: Any) -> Iterator[tuple[World, Ledger]]:
    """A world whose log has the events of the parts, and what they come to."""
    count, streams = bench.options.scaled(EVENTS), bench.options.scaled(WIDE, least=200)
    ledger = Ledger(streams)

    def entered() -> Iterator[Order]:
        chance = bench.chance("growth", part, number)
        for order in islice(
            chain(opening_orders(streams, chance), history(streams, count, chance, opened=True)), count
        ):
            ledger.enter(order)
            yield order

    with bench.world(**settings) as world:
        bench.progress.begin(f"growth, {part}: load events", count)
        standing = dict.fromkeys(world.ends(), Standing(0, -1))
        fill_log(world.settings, world.commands.id, entered(), bench.progress.advance, standing=standing)
        yield world, ledger


def _turn(
    bench: Bench,
    world: World,
    ledger: Ledger,
    case: str,
    number: int,
    *,
    views: Sequence[str] = (VIEW,),
    processes: int = 1,
    held: bool = True,
    latency: bool = False,
    agent: str = CORE,
) -> Sample:
    """The whole log, folded by agents that have their partitions; or, not `held` before it, all but its first third."""
    count = sum(ledger.version)
    what = f"growth {case}, round {number}"
    more: dict[str, float] = {}
    with progress_of(world) as progress, ExitStack() as running:
        if held:
            start_held(world, agent)
        began = time.monotonic()
        agents = [running.enter_context(bench.agent(world, views, f"agent-{n}", agent=agent)) for n in range(processes)]
        if held:
            wait_for_assignment(agents, world.settings.partitions)
            more["start_s"] = time.monotonic() - began
            meter, began = bench.cpu(agent=agents), release(world)
            _wait(lambda: progress.folded(agent), progress.appended(), agents)
            done, seconds, cpu = count, time.monotonic() - began, meter.spent()
        else:
            done, seconds, cpu = _fold(bench, progress, agents, 2 * count // 3, what)
        resident = [_resident(agent) for agent in agents]
        more |= {"agent_mb": max(resident), "agents_mb": sum(resident)}
        if latency:
            agents.append(running.enter_context(bench.handler(world)))
            more |= _latency(bench, world, case, number, ledger.enter)
        running.pop_all().close()
    check_rows(world.settings, BALANCES, ledger.rows(), "balances")
    if agent == CORE:
        check_rows(world.settings, STATES, ledger.rows(), "states of streams")
        check_count(world.settings, OUTCOMES, sum(ledger.version), "outcomes")
    else:
        with connect(world.settings, "samefold bench") as database:
            [(hot, table, indexes)] = database.execute(_HOT, [all_views()[VIEW].table_name])
        more |= {"hot": hot, "table_mb": table / MILLION, "indexes_mb": indexes / MILLION}
    return Sample(OURS, case, number, done / seconds, done, seconds, cpu, more)


def _result(bench: Bench, part: str, title: str, samples: list[Sample], aims: list[Aim]) -> Result:
    size = {"events": bench.options.scaled(EVENTS), "streams": bench.options.scaled(WIDE, least=200)}
    return Result(f"growth-{part}", f"Events folded {title}, per second", "events/s", samples, aims, size)


# ── what they have in common ──


def _fold(
    bench: Bench, progress: Progressed, agents: Sequence[Process], stretch: int, what: str
) -> tuple[int, float, dict[str, float]]:
    """Until all is folded: the events of about the last `stretch`, their seconds, and processor time meanwhile."""
    total = progress.appended()
    bench.progress.begin(what, total)
    was, began = progress.folded(), time.monotonic()

    def look() -> int:
        nonlocal was, began
        folded = progress.folded()
        if folded <= total - stretch:
            was, began = folded, time.monotonic()
        return folded

    wait_until(look, total - stretch + 1, tuple(agents), bench.progress.advance, every=LOOK_S)
    meter = bench.cpu(agent=agents)
    wait_until(progress.folded, total, tuple(agents), lambda _: None, every=LOOK_S)
    seconds = time.monotonic() - began
    return total - was, seconds, meter.spent()


def _latency(bench: Bench, world: World, case: str, number: int, enter: Callable[[Order], object]) -> dict[str, float]:
    """Of commands one at a time, from sending until the outcome is visible."""
    count = bench.options.scaled(COMMANDS, least=20)
    with client_of(world, bench.chance("growth latency", case, number), enter) as client:
        repeat(client.step, count)
        times = repeat(client.step, count)
    return {"command_p50_ms": median(times), "command_p99_ms": percentile(times, 99)}


def _wait(done: Callable[[], int], total: int, processes: Sequence[Process]) -> None:
    wait_until(done, total, tuple(processes), lambda _: None, every=LOOK_S)


def _resident(process: Process) -> float:
    """Megabytes."""
    found: int = psutil.Process(process.pid).memory_info().rss
    return found / 2**20
