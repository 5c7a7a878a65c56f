"""A row by its key beside FastAPI and psycopg written by hand: answers per second of one process each. `wrk` asks both.

Both have the same rows in the same kind of table, and as many connections to PostgreSQL. Ours is `GET /views/balances/…`, with
handler and agent beside it, which have nothing to do.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any, LiteralString

import httpx
import psycopg

from benchmarks import wrk
from benchmarks.check import require
from benchmarks.http import Server, served, wait_for
from benchmarks.http_client import HOST
from benchmarks.peers.rows import TABLE
from benchmarks.processes import Process, free_port
from benchmarks.reading import progress_of
from benchmarks.results import Aim, Result, Sample, middle
from benchmarks.stage import Bench, World
from benchmarks.workload import deposits, name_of, opening_orders

OURS = "samefold, one API process"
PEER = "FastAPI and psycopg, 1 worker"
AIMS = {8: 1.2, 64: 1.2}
"""By connections, how many times as many answers as the peer."""
SECONDS, WARM_UP_S = 10, 3
ACCOUNTS = 10_000
DEPOSITS = 20_000
SAMPLE, AT_ONCE = 2_000, 32
"""Answers that are compared with the table, asked for by so many threads."""
COLUMNS = "account, cents, overdraft_limit, opened_on, last_on, transactions, closed_on, owner"
ROWS: LiteralString = f"select account, row_to_json(t) from (select {COLUMNS} from balances_v2) t"  # noqa: S608


@dataclass(frozen=True, slots=True)
class _Contender:
    server: Server
    prefix: str
    """Of a row's path, before its key."""
    rows: Mapping[str, Any]
    """As they stand in its table, by key."""

    def row(self, answer: Any) -> Any:
        """What an answer has of the row."""
        return answer.get("row", answer)


def run(bench: Bench) -> Result:
    title = "Rows by their key, per second"
    program = shutil.which("wrk")
    if program is None:
        return Result("reads", title, "answers/s", [], [], {}, {}, [f"{OURS}, {PEER}: install `wrk`."])
    samples: list[Sample] = []
    accounts = bench.options.scaled(ACCOUNTS)
    warm_up_s, seconds = (bench.options.scaled(each, least=1) for each in (WARM_UP_S, SECONDS))
    seeds = count(bench.options.seed)
    with bench.world() as world, ExitStack() as open_:
        ours = open_.enter_context(_ours(bench, world, accounts))
        contenders = {OURS: ours, PEER: open_.enter_context(_peer(bench, world, ours.rows))}
        for name, contender in contenders.items():
            _check(contender, name, accounts)
        for number in range(1, bench.options.rounds + 1):
            for connections in AIMS:
                for name, contender in contenders.items():
                    bench.progress.begin(f"reads, {connections} connections, round {number}: {name}", None)
                    given = (contender.prefix, str(accounts))
                    turn = (program, "rows.lua", name, contender.server.port, connections)
                    wrk.load(*turn, warm_up_s, *given, str(next(seeds)))
                    meter = bench.cpu(**{group: [one] for group, one in contender.server.processes.items()})
                    load = wrk.load(*turn, seconds, *given, str(next(seeds)))
                    cpu = meter.spent() | {"client": round(load.cpu_s, 2)}
                    contender.server.check()
                    require(
                        not load.more["other_answers"], f"{name}: {load.more['other_answers']} answers were not 200"
                    )
                    rate, case = load.succeeded / load.seconds, _case(connections)
                    samples.append(Sample(name, case, number, rate, load.succeeded, load.seconds, cpu, load.more))
        for name, contender in contenders.items():
            _check(contender, name, accounts)
    aims = []
    for connections, wanted in AIMS.items():
        case = _case(connections)
        found = middle(samples, OURS, case) / middle(samples, PEER, case)
        aims.append(Aim(f"beside {PEER}, {case}", wanted, found, unit="x"))
    version = wrk.version(program)
    size = {"accounts": accounts, "seconds": seconds, "load_generator": version}
    return Result("reads", f"{title} ({version})", "answers/s", samples, aims, size)


def _case(connections: int) -> str:
    return f"{connections:,} connections"


@contextmanager
def _ours(bench: Bench, world: World, accounts: int) -> Iterator[_Contender]:
    orders = opening_orders(accounts, bench.chance("open"))
    orders += deposits(0, accounts, bench.options.scaled(DEPOSITS), bench.options.seed)
    with served(bench, world, reacting=False) as server, progress_of(world) as progress:
        progress.carry_out(bench, orders, "reads: open accounts", *server.processes.values())
        progress.vacuum()
        with psycopg.connect(world.settings.database) as connection:
            rows: dict[str, Any] = dict(connection.execute(ROWS).fetchall())
        yield _Contender(server, "/views/balances/", rows)


@contextmanager
def _peer(bench: Bench, world: World, rows: Mapping[str, Any]) -> Iterator[_Contender]:
    with bench.database() as url:
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(TABLE)
            with connection.cursor().copy("copy balances from stdin") as copy:
                for row in rows.values():
                    copy.write_row(list(row.values()))
            connection.execute("vacuum analyze")
        port = free_port()
        flags = ("--port", str(port), "--connections", str(world.settings.api_connections))
        settings = bench.stack.settings(database_url=url)
        with Process(settings, bench.folder, "rows", "benchmarks.peers.rows", *flags) as process:
            server = Server(port, {"by hand": process})
            wait_for(server, "/", 404)
            yield _Contender(server, "/balances/", rows)


def _check(of: _Contender, name: str, accounts: int) -> None:
    """Many are asked at once, and each gets the row that it asked for. Raises RunVoid."""
    with httpx.Client(base_url=f"http://{HOST}:{of.server.port}") as client, ThreadPoolExecutor(AT_ONCE) as threads:

        def is_right(number: int) -> bool:
            key = name_of(number * 7 % accounts)
            answer = client.get(of.prefix + key)
            return answer.status_code == 200 and bool(of.row(answer.json()) == of.rows[key])

        wrong = sum(not right for right in threads.map(is_right, range(min(SAMPLE, accounts))))
    require(not wrong, f"{name}: {wrong} answers were not 200 with the row that was asked for")
