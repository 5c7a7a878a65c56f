"""Pages of 5 million rows, filtered and sorted by an index, beside the same SQL in psql; and a query of the author's.

Ours is `GET /views/balances?…` of one API process, asked by `wrk` over one connection, then over 50. psql runs as many statements,
one after the other, on the same table, and tells the time of each.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import NamedTuple

import httpx
import psycopg

from benchmarks import wrk
from benchmarks.check import require
from benchmarks.http import Server, served
from benchmarks.http_client import HOST
from benchmarks.reading import progress_of
from benchmarks.results import Aim, Result, Sample, middle, percentile
from benchmarks.stage import Bench, World
from benchmarks.workload import opening_orders
from tools.migrations import migrate

OURS, CROWD, PSQL = "samefold, one connection", "samefold, 50 connections", "psql"
ROWS, OWNERS, VALUES = 5_000_000, 250_000, 1_000_000
SECONDS, WARM_UP_S, STATEMENTS, SLOW = 10, 3, 2_000, 5


class Question(NamedTuple):
    """A path that ends with a number of six digits below `most`, and its SQL."""

    path: str
    sql: str
    most: int
    is_slow: bool = False


QUESTIONS = {
    "one owner's, by key": Question(
        "/views/balances?limit=20&owner=o",
        "select * from balances_v2 where left(owner, 100) collate \"C\" = 'o{0:06}' order by account limit 20",
        OWNERS,
    ),
    "the largest below an amount": Question(
        "/views/balances?limit=100&sort=-cents&cents.lt=",
        "select * from balances_v2 where cents < {0} order by cents desc, account desc limit 100",
        VALUES,
    ),
    "a query of the author's, over all rows": Question(
        "/queries/largest_accounts?limit=100&at_least=",
        "select owner, count(*) as accounts, sum(cents) as cents from balances group by owner "
        "having sum(cents) >= {0} order by cents desc limit 100",
        VALUES,
        is_slow=True,
    ),
}


def run(bench: Bench) -> Result:
    title = "A page of 5 million rows, ms in the median"
    program, psql = shutil.which("wrk"), shutil.which("psql")
    if program is None or psql is None:
        return Result("pages", title, "ms", [], [], {}, {}, [f"{OURS}, {PSQL}: install `wrk` and `psql`."])
    samples: list[Sample] = []
    rows, seconds = bench.options.scaled(ROWS), bench.options.scaled(SECONDS, least=1)
    with bench.world() as world, _loaded(bench, world, rows) as server:
        for number in range(1, bench.options.rounds + 1):
            for case, one in QUESTIONS.items():
                bench.progress.begin(f"pages, round {number}: {case}", None)
                random = Random(f"{bench.options.seed} {number} {case}")
                statements = bench.options.scaled(SLOW if one.is_slow else STATEMENTS, least=3)
                asked = [one.sql.format(random.randrange(one.most)) for _ in range(statements)]
                samples.append(_sample(PSQL, case, number, _psql(psql, world.settings.database, asked)))
                if one.is_slow:
                    samples.append(_sample(OURS, case, number, _one_by_one(server, one, random, statements)))
                    continue
                for contender, connections in ((OURS, 1), (CROWD, 50)):
                    given = (one.path, str(one.most), str(random.randrange(10**6)))
                    turn = (program, "rows.lua", contender, server.port, connections)
                    wrk.load(*turn, WARM_UP_S, *given)
                    load = wrk.load(*turn, seconds, *given)
                    require(not load.more["other_answers"], f"{load.more['other_answers']} answers were not 200")
                    more = load.more | {"answers_per_s": load.succeeded / load.seconds}
                    samples.append(
                        Sample(contender, case, number, load.more["p50_ms"], load.succeeded, load.seconds, {}, more)
                    )
    aims = [
        Aim(
            f"{case}: twice {PSQL} and 2 ms",
            2 * middle(samples, PSQL, case) + 2,
            middle(samples, OURS, case),
            True,
            " ms",
        )
        for case in QUESTIONS
    ]
    return Result("pages", title, "ms", samples, aims, {"rows": rows, "owners": OWNERS, "seconds": seconds})


def _sample(contender: str, case: str, number: int, times_ms: list[float]) -> Sample:
    p50, p99 = (percentile(times_ms, share) for share in (50, 99))
    return Sample(contender, case, number, p50, len(times_ms), sum(times_ms) / 1000, {}, {"p50_ms": p50, "p99_ms": p99})


@contextmanager
def _loaded(bench: Bench, world: World, rows: int) -> Iterator[Server]:
    """An API whose live view has so many rows, which no event made."""
    with served(bench, world, reacting=False) as server, progress_of(world) as progress:
        orders = opening_orders(1, bench.chance("open"))
        progress.carry_out(bench, orders, "pages: open an account", *server.processes.values())
        bench.progress.begin("pages: insert rows", None)
        with psycopg.connect(world.settings.database, autocommit=True) as connection:
            connection.execute(
                "insert into balances_v2 (account, cents, overdraft_limit, opened_on, last_on, transactions, closed_on, owner, "
                "_partition) select 'a' || n, hashint4(n)::bigint & 1048575, 0, '2026-01-01', '2026-01-01', 1, null, "
                "'o' || lpad((n %% %s)::text, 6, '0'), 0 from generate_series(1, %s) n",
                (OWNERS, rows),
            )
        migrate.upgrade(world.settings)  # makes the view's indexes, which no world of a benchmark has
        progress.vacuum()
        yield server


def _psql(psql: str, database: str, statements: list[str]) -> list[float]:
    """The time of each statement in ms, as psql tells it."""
    script = "\\timing on\n\\o /dev/null\n" + "".join(f"{one};\n" for one in statements)
    done = subprocess.run([psql, "-q", "-d", database], input=script, capture_output=True, text=True, check=False)
    times = [float(one) for one in re.findall(r"^Time: ([0-9.]+) ms", done.stdout, re.MULTILINE)]
    require(len(times) == len(statements), f"psql told {len(times)} of {len(statements)} times: {done.stderr[:500]}")
    return times


def _one_by_one(server: Server, one: Question, random: Random, count: int) -> list[float]:
    with httpx.Client(base_url=f"http://{HOST}:{server.port}", timeout=60) as client:

        def timed(ask: Callable[[], httpx.Response]) -> float:
            began = time.perf_counter()
            answer = ask()
            require(answer.status_code == 200, f"{answer.status_code}: {answer.text[:300]}")
            return 1000 * (time.perf_counter() - began)

        paths = [f"{one.path}{random.randrange(one.most):06}" for _ in range(count)]
        return [timed(lambda path=path: client.get(path)) for path in paths]  # type: ignore[misc]
