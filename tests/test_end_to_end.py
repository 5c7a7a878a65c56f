"""From a file of commands to rows, through real handlers and agents: two of each, killed and frozen in turn."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import pytest
from psycopg import sql

from commands.client import answered, send_all, wait_for
from commands.outcomes import live_table
from infra.database import migrate
from infra.database.connect import connect
from infra.demo import generate
from infra.demo.bank import Bank, bank
from infra.demo.crew import Crew, thaw
from infra.demo.data import real_data
from infra.demo.proof import Key, counted_in, prove, rows_of
from infra.demo.watch import Watch
from infra.log import topics
from infra.log.partitioner import partition_of
from infra.log.records import Command
from infra.settings import Settings
from infra.supervisor import Child
from projections.engine.rebuild import rebuild
from projections.engine.system import all_views
from projections.engine.verify import verify
from tests.oracle import judge

FILES = ["generated", *(["real"] if real_data() else [])]
SHORT = {"session_timeout_ms": 1_500, "idle_in_transaction_timeout_ms": 1_000, "lock_timeout_ms": 1_000}

pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    real = real_data()
    if request.param == "real" and real:
        return real
    made = tmp_path / "generated.csv.gz"
    generate.write(made, generate.generate())
    return made


@pytest.fixture
def place(world: Settings) -> Settings:
    """Tables and topics, and timeouts short enough to freeze somebody past all of them."""
    place = world.model_copy(update=SHORT)
    migrate.upgrade(place)
    topics.ensure(place)
    return place


@contextmanager
def work(place: Settings, folder: Path) -> Iterator[tuple[Crew, Watch]]:
    with Crew(place, folder / "logs") as crew, Watch(place) as watch:
        until(crew, watch, lambda: watch.is_ready(crew.handlers, crew.agents))
        yield crew, watch


def until(crew: Crew, watch: Watch, holds: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "\n".join(file.read_text()[-2_000:] for file in crew.folder.iterdir())
        crew.check()
        watch.wait(0.05)
        watch.look()


def send(place: Settings, commands: Sequence[Command]) -> None:
    send_all(place, commands, lambda _count: None)


def outcomes(place: Settings) -> dict[Key, tuple[str, str | None]]:
    with connect(place, "test") as connection:
        table = sql.Identifier(live_table(connection, "command_outcomes"))
        found = connection.execute(sql.SQL("select stream, command_id, outcome, code from {}").format(table))
        return {(stream, id_): (outcome, code) for stream, id_, outcome, code in found}


def everything(place: Settings) -> dict[str, list[Any]]:
    """All rows of all views."""
    with connect(place, "test") as connection:
        tables = {name: sql.Identifier(live_table(connection, name)) for name in all_views()}
        return {
            name: connection.execute(sql.SQL("select t::text from {} t order by 1").format(table)).fetchall()
            for name, table in tables.items()
        }


def proven(of: Bank, place: Settings) -> None:
    proof = prove(of.transactions, of.commands, counted_in(place), rows_of(place), of.expected)
    assert (proof.lost, proof.doubled, proof.disagreements) == (0, 0, ())
    assert verify(place, all_views()).differences == 0


@pytest.mark.parametrize("file", FILES, indirect=True)
def test_without_overdraft_the_oracle_predicts_each_rejection(file: Path, place: Settings, tmp_path: Path) -> None:
    of = bank(tmp_path, file, overdraft_limit=0, seed=None)
    with work(place, tmp_path):
        send(place, of.commands)
        wait_for(place, of.commands, lambda _count: None, timeout_s=60)
    verdict = judge(file, Decimal(0))
    found = outcomes(place)
    assert {id_: answer for (_, id_), answer in found.items() if id_.startswith("berka-")} == {
        f"berka-{id_}": ("accepted", None) if accepted else ("rejected", "insufficient-funds")
        for id_, accepted in verdict.accepted.items()
    }
    assert {id_: answer for (_, id_), answer in found.items() if id_.startswith("open-")} == {
        f"open-{account}": ("accepted", None) for account in verdict.balances
    }
    if file == real_data():
        assert sum(not accepted for accepted in verdict.accepted.values()) == 12
    proven(of, place)


def test_sending_the_same_again_changes_nothing(place: Settings, tmp_path: Path) -> None:
    generate.write(tmp_path / "few.csv.gz", generate.generate(accounts=60, transactions=2_500))
    of = bank(tmp_path, tmp_path / "few.csv.gz", overdraft_limit=0, seed=None)
    with work(place, tmp_path):
        send(place, of.commands)
        first = wait_for(place, of.commands, lambda _count: None, timeout_s=60)
        assert first.rejected > 0, "a repeated rejection must get its first answer too"
        before, log = everything(place), counted_in(place)
        assert answered(place, of.commands) == len(of.commands)

        send(place, of.commands)
        last = one_for_each_partition(place)
        send(place, last)
        # in each partition these come after the repeated ones, so those have been dealt with when these have an answer
        wait_for(place, last, lambda _count: None, timeout_s=60)
        again = wait_for(place, of.commands, lambda _count: None, timeout_s=60)

    assert again == first
    assert again.other_body == 0
    new = {(command.stream, command.id): 1 for command in last}
    assert counted_in(place) == log + Counter(new)
    after = everything(place)
    assert set(before) == set(after)
    for view, rows in before.items():
        added = [row for row in after[view] if row not in set(rows)]
        assert [row for row in rows if row not in set(after[view])] == [], view
        assert len(added) == (len(last) if view in ("balances", "command_outcomes", "streams_accounts") else 0), view


def one_for_each_partition(place: Settings) -> list[Command]:
    """A new account in each partition."""
    found: dict[int, Command] = {}
    number = 0
    while len(found) < place.partitions:
        number += 1
        stream = f"accounts/last-{number}"
        body = b'{"overdraft_limit":0,"on":"1995-01-01"}'
        opening = Command(f"open-last-{number}", stream, "OpenAccount", msgspec.Raw(body))
        found.setdefault(partition_of(stream, place.partitions), opening)
    return list(found.values())


def test_killed_and_frozen_in_turn_with_a_rebuild_in_the_middle(place: Settings, tmp_path: Path) -> None:
    """Frozen past every timeout: until the others have done all that was sent while it was frozen."""
    generate.write(tmp_path / "bank.csv.gz", generate.generate(accounts=300, transactions=9_000))
    of = bank(tmp_path, tmp_path / "bank.csv.gz", overdraft_limit=5_000_00, seed=None)
    share = -(-len(of.commands) // 17)
    slices = [of.commands[n : n + share] for n in range(0, len(of.commands), share)]
    with work(place, tmp_path) as (crew, watch), ThreadPoolExecutor(1) as aside:
        sent = 0

        def send_next() -> None:
            nonlocal sent
            if slices:
                send(place, slices[0])
                sent += len(slices.pop(0))

        def visible_is(count: int) -> Callable[[], bool]:
            return lambda: watch.visible() >= count

        def kill(child: Child) -> None:
            until(crew, watch, lambda: crew.kill(child) is not None)
            seen = watch.before(child)
            send_next()
            until(crew, watch, lambda: watch.is_at_its_place(child, seen))

        def freeze(child: Child) -> None:
            until(crew, watch, lambda: child.pid is not None)
            process = crew.freeze(child)
            assert process
            send_next()
            until(crew, watch, visible_is(sent))
            seen = watch.before(child)
            thaw(process)
            if child in crew.handlers:
                until(crew, watch, lambda: watch.is_at_its_place(child, seen))

        turns = [(harm, n) for n in range(2) for harm in (kill, freeze)]
        rebuilding = None
        for number, (harm, n) in enumerate(turns):
            for child in (crew.handlers[n], crew.agents[n]):
                begin = watch.visible()
                send_next()
                until(crew, watch, lambda begin=begin: watch.visible() > begin)  # type: ignore[misc]
                harm(child)
            if number == 1:
                rebuilding = aside.submit(rebuild, place, ["balances"], all_views())
        assert rebuilding
        rebuilt = rebuilding.result(60)
        while slices:
            send_next()
        until(crew, watch, visible_is(len(of.commands)))
    with connect(place, "test") as connection:
        assert live_table(connection, "balances") == rebuilt.tables["balances"] != "balances_v1"
    proven(of, place)
