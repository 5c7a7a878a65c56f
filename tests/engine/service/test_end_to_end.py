"""From a file of commands to rows, through real handlers and agents: two of each, killed and frozen in turn."""

import subprocess
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
from commands.outcomes import live_table, outcomes_of
from demo import generate
from demo.bank import Bank, bank
from demo.crew import Crew, thaw
from demo.data import real_data
from demo.proof import Key, counted_in, prove, rows_of
from demo.watch import Watch
from infra.database import migrate
from infra.database.connect import connect
from infra.log import topics
from infra.log.partitioner import partition_of
from infra.log.records import Command
from infra.processes.supervisor import Child
from infra.settings import Settings
from projections.engine.rebuild.rebuild import rebuild
from projections.engine.verify.verify import verify
from projections.engine.views.core_views import all_views
from tests.engine.service.oracle import judge

FILES = ["generated", *(["real"] if real_data() else [])]
SHORT = {
    "session_timeout_ms": 1_500,
    "statement_timeout_ms": 3_000,
    "idle_in_transaction_timeout_ms": 1_000,
    "lock_timeout_ms": 1_000,
    "handler_batch": 50,
    "agent_batch": 50,
}

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
    """Tables and topics; timeouts short enough to freeze somebody past all of them, batches to freeze him between two."""
    place = world.model_copy(update=SHORT)
    migrate.upgrade(place)
    topics.ensure(place)
    return place


@contextmanager
def work(place: Settings, folder: Path) -> Iterator[tuple[Crew, Watch]]:
    with Crew(place, folder / "logs") as crew, Watch(place) as watch:
        until(crew, watch, lambda: watch.is_ready(crew.handlers, crew.agents))
        yield crew, watch


def until(crew: Crew, watch: Watch, holds: Callable[[], bool], seconds: float = 120) -> None:
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
        found = outcomes_of(connection, list(counted_in(place)))
        return {key: (outcome.outcome, outcome.code) for key, outcome in found.items()}


def everything(place: Settings) -> dict[str, list[Any]]:
    """All rows of all views."""
    with connect(place, "test") as connection:
        tables = {name: sql.Identifier(live_table(connection, name)) for name in all_views()}
        return {
            name: connection.execute(sql.SQL("select t::text from {} t order by 1").format(table)).fetchall()
            for name, table in tables.items()
        }


def proven(of: Bank, place: Settings) -> None:
    log = counted_in(place)
    proof = prove(of.transactions, of.commands, log, rows_of(place, log), of.expected, {})
    assert (proof.lost, proof.doubled, proof.disagreements) == (0, 0, ())
    assert verify(place, all_views()).differences == 0


@pytest.mark.slow
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


@pytest.mark.slow
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


class Scene:
    """Two handlers and two agents, and a bank's commands in slices, sent one by one while something happens to them."""

    def __init__(self, place: Settings, commands: Sequence[Command], crew: Crew, watch: Watch, slices: int) -> None:
        share = -(-len(commands) // slices)
        self.place, self.crew, self.watch = place, crew, watch
        self.left = [commands[n : n + share] for n in range(0, len(commands), share)]
        self.sent = 0

    def send(self) -> None:
        batch = self.left.pop(0)
        send(self.place, batch)
        self.sent += len(batch)

    def until(self, holds: Callable[[], bool]) -> None:
        until(self.crew, self.watch, holds)

    def until_visible(self) -> None:
        self.until(lambda: self.watch.visible() == self.sent)

    def trouble(self, handler: Child, agent: Child) -> None:
        self.kill(handler)
        self.freeze_agent(agent)
        self.kill(agent)
        self.freeze_handler(handler)

    def kill(self, child: Child) -> None:
        """In the midst of its work; its successor finds some more."""
        self.send()
        self.until(lambda: self.crew.kill(child) is not None)
        before = self.watch.before(child)
        self.send()
        self.until(lambda: self.watch.is_at_its_place(child, before))

    def freeze_handler(self, child: Child) -> None:
        """In the midst of its work, until the other one has done all of it; then it wakes up with what it had in hand."""
        process = self.freeze_at(child, self.let_handlers_begin, self.watch.decided)
        self.send()
        self.until_visible()
        before = self.watch.before(child)
        thaw(process)
        self.until(lambda: self.watch.is_at_its_place(child, before))

    def freeze_agent(self, child: Child) -> None:
        """The same."""
        process = self.freeze_at(child, self.let_agents_begin, self.watch.visible)
        self.send()
        self.until_visible()
        thaw(process)

    def freeze_at(self, child: Child, begin: Callable[[], None], done: Callable[[], int]) -> subprocess.Popen[bytes]:
        """Frozen while some of the work is done and some is not; tried again until that is so."""
        while True:
            self.until_visible()
            begin()
            process = self.freeze(child)
            self.watch.look()
            if done() < self.sent:
                return process
            thaw(process)

    def let_handlers_begin(self) -> None:
        decided = self.watch.decided()
        self.send()
        self.until(lambda: self.watch.decided() > decided)

    def let_agents_begin(self) -> None:
        """All agents are held back until there is enough work in the log to be in the midst of it."""
        held = [self.freeze(agent) for agent in self.crew.agents]
        self.send()
        self.until(lambda: self.watch.decided() == self.sent)
        visible = self.watch.visible()
        for process in held:
            thaw(process)
        self.until(lambda: self.watch.visible() > visible)

    def freeze(self, child: Child) -> subprocess.Popen[bytes]:
        self.until(lambda: child.pid is not None)
        process = self.crew.freeze(child)
        assert process
        return process


def test_killed_and_frozen_in_turn_with_a_rebuild_in_the_middle(place: Settings, tmp_path: Path) -> None:
    """Frozen past every timeout: until the others have done all that was sent while it was frozen."""
    generate.write(tmp_path / "bank.csv.gz", generate.generate(accounts=300, transactions=12_000))
    of = bank(tmp_path, tmp_path / "bank.csv.gz", overdraft_limit=5_000_00, seed=None)
    with work(place, tmp_path) as (crew, watch), ThreadPoolExecutor(1) as aside:
        scene = Scene(place, of.commands, crew, watch, slices=24)
        scene.trouble(crew.handlers[0], crew.agents[0])
        rebuilding = aside.submit(rebuild, place, ["balances"], all_views())
        scene.trouble(crew.handlers[1], crew.agents[1])
        while scene.left:
            scene.send()
        scene.until_visible()
        rebuilt = rebuilding.result(60)
    with connect(place, "test") as connection:
        assert live_table(connection, "balances") == rebuilt.tables["balances"] != "balances_v2"
    proven(of, place)
