"""The same request beside plain CRUD: a deposit with an idempotency key, answered when it is done.

Ours goes through both topics and the read models; the peer is FastAPI with three statements in one transaction. `wrk` asks both.
All processes that `make run` starts are running; with the fewest connections it is measured without policies and publisher, too.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import count
from statistics import median
from typing import LiteralString, NamedTuple
from uuid import UUID

import psycopg

from benchmarks import wrk
from benchmarks.check import BALANCES, require
from benchmarks.http import Server, reacted_to, served, settle, wait_for
from benchmarks.peers.crud import TABLES
from benchmarks.processes import Process, free_port
from benchmarks.reading import progress_of
from benchmarks.results import Aim, Result, Sample, middle
from benchmarks.stage import Bench, World
from benchmarks.workload import Ledger, Order, name_of, opening_orders

OURS = "samefold, all that `make run` starts"
WITHOUT = "samefold, without policies and publisher"
PEER = "FastAPI and psycopg, 2 workers"
WORKERS = 2
AIMS = {64: 1.0, 256: 1.4, 1_000: 2.0}
"""By connections, how many times as many answers as the peer."""
COST, RATE_OF_ALL, BROKER = 1.4, 0.9, 1.3
"""Processor time of all processes for a deposit, with the fewest connections beside the next; there, with policies and publisher
beside without them, deposits per second and the broker's processor time for one.
"""
IDLE = "idle"
"""The processes of the system whose turn it is not."""
SECONDS, WARM_UP_S = 12, 3
ACCOUNTS = 1_000
STRIDE = 7_919
"""As in the script: what its nth request is for."""
INSTALL = (
    "install `wrk` (apt-get or brew install wrk). Other load generators send the same headers with each request, "
    "so that all would have one idempotency key."
)
OUTCOMES = "select command from command_outcomes_v3 where code is null"
KEYS = "select trim(both '\"' from key) from keys"
ROWS = "select id, version, balance from accounts"
LINES = """
select id, 1 + count(cents), coalesce(sum(cents), 0)::bigint from accounts left join statement on account = id group by id
"""


class Turn(NamedTuple):
    """Deposits that were sent, and that were answered as done."""

    sent: int
    succeeded: int


@dataclass(slots=True)
class _Contender:
    server: Server
    database_url: str
    keys: LiteralString
    rows: tuple[LiteralString, ...]
    world: World | None = None
    """Where it is ours."""
    turns: dict[str, Turn] = field(default_factory=dict)


def run(bench: Bench) -> Result:
    title = "Deposits answered when done, per second"
    program = shutil.which("wrk")
    if program is None:
        return Result("crud", title, "answers/s", [], [], {}, {}, [f"{OURS}, {WITHOUT}, {PEER}: {INSTALL}"])
    samples: list[Sample] = []
    warm_up_s, seconds = (bench.options.scaled(each, least=2) for each in (WARM_UP_S, SECONDS))
    turns = (f"t{number}" for number in count(1))
    running: list[str] = []

    def take(contender: _Contender, name: str, connections: int, number: int, idle: Server) -> None:
        bench.progress.begin(f"crud, {connections} connections, round {number}: {name}", None)
        _, sample = (
            _take(bench, program, contender, name, connections, number, next(turns), lasts, idle)
            for lasts in (warm_up_s, seconds)
        )
        require(sample.count > 0, f"{name}: no deposit was answered within {seconds} s")
        if contender.world is not None:  # what it left undone would burden the next turn
            sample.more.update(settle(contender.world, contender.server))
        samples.append(sample)

    fewest, next_more = [*AIMS][:2]
    with bench.world() as world, _ours(bench, world) as without, _crud(bench) as peer:
        for name, contender in ((WITHOUT, without), (PEER, peer)):  # the broker compiles what it does often
            _take(bench, program, contender, name, 256, 0, next(turns), seconds, Server(0, {}))
        for number in range(1, bench.options.rounds + 1):
            take(without, WITHOUT, fewest, number, peer.server)
            with reacted_to(bench, world, without.server) as server:
                running = [*server.processes]
                for connections in AIMS:
                    take(replace(without, server=server), OURS, connections, number, peer.server)
                    take(peer, PEER, connections, number, server)
        _check(bench, without, OURS)
        _check(bench, peer, PEER)
    aims = []
    for connections, wanted in AIMS.items():
        case = _case(connections)
        found = middle(samples, OURS, case) / middle(samples, PEER, case)
        aims.append(Aim(f"beside {PEER}, {case}", wanted, found, unit="x"))
    few, more = _case(fewest), _case(next_more)
    cost = _cost(samples, OURS, few) / _cost(samples, OURS, more)
    rate = middle(samples, OURS, few) / middle(samples, WITHOUT, few)
    broker = _cost(samples, OURS, few, "kafka") / _cost(samples, WITHOUT, few, "kafka")
    beside = f"beside the same without policies and publisher, {few}"
    aims += [
        Aim(f"processor time of all processes for a deposit, {few} beside {more}", COST, cost, at_most=True, unit="x"),
        Aim(beside, RATE_OF_ALL, rate, unit="x"),
        Aim(f"the broker's processor time for a deposit, {beside}", BROKER, broker, at_most=True, unit="x"),
    ]
    version = wrk.version(program)
    size = {"accounts": ACCOUNTS, "seconds": seconds, "load_generator": version, "running": running}
    return Result("crud", f"{title} ({version})", "answers/s", samples, aims, size)


def _cost(samples: Iterable[Sample], contender: str, case: str, group: str = "") -> float:
    """Processor time for an answer, the median of the rounds: of one group of processes, or of all that take part in it."""
    return median(
        sum(spent for name, spent in one.cpu.items() if (name == group if group else name not in ("client", IDLE)))
        / one.count
        for one in samples
        if (one.contender, one.case) == (contender, case)
    )


def _case(connections: int) -> str:
    return f"{connections:,} connections"


@contextmanager
def _ours(bench: Bench, world: World) -> Iterator[_Contender]:
    """Without policies and publisher."""
    with served(bench, world, reacting=False) as server, progress_of(world) as progress:
        progress.carry_out(bench, _openings(bench), "crud: open accounts", *server.processes.values())
        yield _Contender(server, world.settings.database, OUTCOMES, (BALANCES,), world)


@contextmanager
def _crud(bench: Bench) -> Iterator[_Contender]:
    with bench.database() as url:
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(TABLES)
            connection.execute(
                "insert into accounts select to_char(n, 'FM000000'), 0, 1 from generate_series(0, %s) n", [ACCOUNTS - 1]
            )
            connection.execute("vacuum analyze")
        port = free_port()
        flags = ("--port", str(port), "--workers", str(WORKERS))
        settings = bench.stack.settings(database_url=url)
        with Process(settings, bench.folder, "crud", "benchmarks.peers.crud", *flags) as process:
            server = Server(port, {"crud": process})
            wait_for(server, "/", 404)
            yield _Contender(server, url, KEYS, (ROWS, LINES))


def _take(
    bench: Bench,
    program: str,
    to: _Contender,
    contender: str,
    connections: int,
    number: int,
    turn: str,
    seconds: int,
    idle: Server,
) -> Sample:
    """One turn: what was answered with success, other answers apart. Raises RunVoid where connections fail."""
    groups = {group: [process] for group, process in to.server.processes.items()}
    meter = bench.cpu(**groups, **{IDLE: [*idle.processes.values()]})
    port = to.server.port
    load = wrk.load(program, "deposits.lua", contender, port, connections, seconds, turn, str(ACCOUNTS))
    cpu = meter.spent() | {"client": round(load.cpu_s, 2)}
    to.server.check()
    to.turns[turn] = Turn(load.sent, load.succeeded)
    rate = load.succeeded / load.seconds
    return Sample(contender, _case(connections), number, rate, load.succeeded, load.seconds, cpu, load.more)


def _check(bench: Bench, of: _Contender, name: str) -> None:
    """Each deposit that was answered is there, none that was not sent, and the rows are their sums. Raises RunVoid."""
    ledger, openings = Ledger(ACCOUNTS), _openings(bench)
    ledger.enter_all(openings)
    with psycopg.connect(of.database_url) as connection:
        # what is still under way is in all of these or in none
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        keys = [key for [key] in connection.execute(of.keys)]
        found = [{account: tuple(row) for account, *row in connection.execute(query)} for query in of.rows]
    if of.keys is OUTCOMES:
        names = _names(openings, of.turns)
        require(names.keys() >= set(keys), f"{name}: something was deposited that was never sent")
        keys = [names[key] for key in keys]
    enter(keys, of.turns, ledger, name)
    require(all(rows == ledger.rows() for rows in found), f"{name}: rows are not the deposits' sums")


def _names(openings: Iterable[Order], turns: Mapping[str, Turn]) -> dict[UUID, str]:
    """What was sent, by what stands for it in the outcomes: a digest of stream and command id."""
    orders = [(order.account, order.id) for order in openings]
    orders += [(n * STRIDE % ACCOUNTS, f"{turn}-{n}") for turn, told in turns.items() for n in range(1, told.sent + 1)]
    digests = (blake2b(f"accounts/{name_of(account)}\0{id_}".encode(), digest_size=16) for account, id_ in orders)
    return {UUID(digest.hexdigest()): id_ for digest, (_, id_) in zip(digests, orders, strict=True)}


def enter(keys: Iterable[str], turns: Mapping[str, Turn], ledger: Ledger, name: str) -> None:
    """The deposits with these keys, into the ledger; keys of no turn are openings. Raises RunVoid."""
    deposits: dict[str, set[int]] = {turn: set() for turn in turns}
    for key in keys:
        turn, _, digits = key.partition("-")
        if turn not in turns:
            continue
        number = int(digits)
        require(number not in deposits[turn], f"{name}: {key} was deposited twice")
        require(1 <= number <= turns[turn].sent, f"{name}: {key} was never sent")
        deposits[turn].add(number)
        ledger.enter(Order(number * STRIDE % ACCOUNTS, 1 + number % 100, key))
    for turn, found in deposits.items():
        answered = turns[turn].succeeded
        require(len(found) >= answered, f"{name}: {answered} deposits of {turn} were answered, {len(found)} are there")


def _openings(bench: Bench) -> list[Order]:
    return opening_orders(ACCOUNTS, bench.chance("open"))
