"""make test-all + prove: an event that ends its agent each time, as a crash in native code does, stops one view alone.

Ends of other kinds, and at other moments, are in make prove.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from confluent_kafka.admin import NewTopic
from psycopg.types.json import Json

from demo import tree
from demo.crew import Crew
from domain.accounts import AccountOpened
from infra.database.connect import connect
from infra.log import clients
from infra.log.partitioner import partition_of
from infra.settings import Settings, Source
from projections.engine.operate.verify import verify
from projections.engine.rebuild.rebuild import resume
from projections.engine.store.positions import Attempt
from projections.engine.views.core_views import agent_views, all_views
from tests.engine.bookkeeper import DAY
from tests.engine.projections.test_agent import Log, rows, transactions
from tests.engine.projections.test_slow_folds import EVOLVE
from tests.engine.service.test_two_releases import write_tree
from tests.engine.spine import commits, deposit, open_account, send, set_up
from tools.testing.fixtures import ROOT
from tools.testing.waiting import until

pytestmark = pytest.mark.slow
OTHERS = pytest.mark.prove(part="chaos")

KILL = '__import__("os").kill(__import__("os").getpid(), 9)'
CRASH = '__import__("ctypes").string_at(0)'
HANG = "sum(range(10**15))"
STATES = "def evolve(state: State, event: Event) -> State:\n    {}\n"
EVENT = "class AccountOpened:\n    def __post_init__(self) -> None:\n        self.overdraft_limit == 606 and {}\n\n"
AT_CALLS = """\
    global calls
    calls += 1
    ends = __import__("pathlib").Path("{}")
    if ends.read_text().startswith(str(calls)):
        ends.write_text(ends.read_text()[1:])
        {}
"""
"""Each process ends at the call whose number is the file's first digit, and removes that."""
FORWARD = """
from domain.accounts import Deposit, MoneyDeposited
from policies.engine import At, Send

VERSION = 1


def react(event: MoneyDeposited, at: At) -> list[Send]:
    if at.version == 3 and __import__("pathlib").Path("{}").exists():
        __import__("os").kill(__import__("os").getpid(), 9)
    return [Send(f"accounts/{{at.id}}-{{at.version}}", Deposit(cents=event.cents, on=event.on))]
"""

HEAR = """
import os
from datetime import date

from domain.accounts import Deposit
from domain.language import Cents, Text
from policies.engine import Received, Send, message

VERSION = 1
SOURCE = "billing"


@message()
class Paid:
    account: Text
    cents: Cents


def receive(message: Paid, at: Received) -> list[Send]:
    {}
    return [Send(f"accounts/{{message.account}}", Deposit(cents=message.cents, on=date(2026, 1, 1)))]
"""


def running(world: Settings, folder: Path, file: str, *edit: str, policies: bool = False) -> Crew:
    """An agent with this edit, supervised; with `policies`, all that a service needs."""
    code = write_tree(folder / f"code-{len([*folder.iterdir()])}", ROOT, {file: [edit]} if edit else {})  # type: ignore[list-item]
    more = int(policies)
    limited = world.model_copy(update={"decide_limit_s": 1})
    return Crew(
        limited, folder, handler_count=more, agent_count=1, policies_count=more, environment=tree.environment(code)
    )


@pytest.mark.parametrize("fault", [KILL, *(pytest.param(one, marks=OTHERS) for one in (CRASH, HANG))])
def test_a_view_that_ends_its_agent_stops_alone_and_goes_on_with_corrected_code(
    world: Settings, tmp_path: Path, fault: str
) -> None:
    log = Log(world)
    log.deposit("a", 4)
    log.deposit("b", 2)
    at_3 = f'    if at.version == 3 and at.id == "a":\n        {fault}\n'
    with running(world, tmp_path, "projections/balances.py", EVOLVE, EVOLVE + at_3) as crew:
        until(lambda: rows(world, "select count(*) from statement_v2") == [(4,)], "the other views go on")
        assert crew.agents[0].starts <= 7
    stopped = rows(world, "select view, code, stream, stream_version from stopped_views")
    assert stopped == [("balances", "ended-the-agent", "accounts/a", 3)]
    resume(world, ["balances"], agent_views("core"))
    partition = partition_of("accounts/a", world.partitions)
    [(at,)] = rows(world, f"select next_offset from positions where agent = 'core' and partition = {partition}")
    ended = Attempt(at, at, "balances", 3, "this code before it was corrected")
    with connect(world, "test") as connection:
        connection.execute("update positions set attempt = %s where partition = %s", (Json(ended), partition))
    with running(world, tmp_path, "") as crew:
        log.deposit("a", 1)
        until(lambda: transactions(world) == {"a": 4, "b": 1}, "it goes on")
        log.deposit("a", 1)
        until(lambda: transactions(world) == {"a": 5, "b": 1}, "it goes on beyond what was attempted before")
        attempts = rows(world, "select attempt::text from positions order by partition")
        log.deposit("a", 1)
        until(lambda: transactions(world) == {"a": 6, "b": 1}, "it folds on")
        assert rows(world, "select attempt::text from positions order by partition") == attempts, "only the first one"
        assert crew.agents[0].starts == 1
    assert verify(world, dict(all_views())).differences == 0


@OTHERS
def test_ends_at_changing_moments_stop_no_view(world: Settings, tmp_path: Path) -> None:
    Log(world).deposit("a", 40)
    (ends := tmp_path / "ends").write_text("1211211")  # at the second event, alone, twice; applied; alone, twice
    fault = "calls = 0\n\n\n" + EVOLVE + AT_CALLS.format(ends, KILL)
    with running(world, tmp_path, "projections/balances.py", EVOLVE, fault):
        until(lambda: transactions(world) == {"a": 39}, "all is folded")
    assert not ends.read_text()
    assert rows(world, "select * from stopped_views") == []
    assert verify(world, dict(all_views())).differences == 0


@pytest.mark.parametrize(
    ("before", "said"),
    [
        (STATES, "stops: ended-the-agent: View 'streams_accounts' can't fold event 1 of accounts/a "),
        pytest.param(
            EVENT, "stops: unreadable-event: AccountOpened of accounts/a can't be read (partition ", marks=OTHERS
        ),
    ],
)
def test_what_ends_its_agent_and_never_leaves_ends_it_with_a_named_error(
    world: Settings, tmp_path: Path, before: str, said: str
) -> None:
    log = Log(world)
    log.commit("a", AccountOpened(overdraft_limit=606, on=DAY))
    log.flush()
    with running(
        world, tmp_path, "domain/accounts.py", before.splitlines(keepends=True)[0], before.format(KILL)
    ) as crew:
        file = tmp_path / f"{crew.agents[0].name}.log"
        until(lambda: file.exists() and said in file.read_text(), "it says which")
    assert rows(world, "select * from stopped_views") == []


def test_a_policy_that_ends_its_process_holds_one_partition_until_it_can_go_on(world: Settings, tmp_path: Path) -> None:
    def decided(account: str) -> set[str]:
        return {commit.stream for commit in commits(world) if commit.stream.startswith(f"accounts/{account}-")}

    here = partition_of("accounts/a", world.partitions)
    other = next(name for name in "bcdefghijkl" if partition_of(f"accounts/{name}", world.partitions) != here)
    (cause := tmp_path / "cause").touch()
    code = FORWARD.format(cause)
    with running(world, tmp_path, "policies/forward.py", "", code, policies=True) as crew:
        until(lambda: rows(world, "select 1 from positions where agent = 'policy_forward'"), "it is live")
        send(world, open_account("a"), *(deposit("a", f"a{number}", 1) for number in range(3)))
        file = tmp_path / f"{crew.policies[0].name}.log"
        said = "ended-the-agent: Policy 'forward' can't react to event 3 of accounts/a "
        until(lambda: file.exists() and said in file.read_text(), "it says which")
        send(world, open_account(other), deposit(other, "b0", 1))
        until(lambda: (decided("a"), decided(other)) == ({"accounts/a-2"}, {f"accounts/{other}-2"}), "others go on")
        behind = f"select distinct next_offset from positions where agent like 'policy%' and partition = {here}"
        until(lambda: len(rows(world, behind)) == 2, "other policies go on")
    cause.unlink()
    with running(world, tmp_path, "policies/forward.py", "", code, policies=True):
        until(lambda: len(decided("a")) == 3, "it is tried again, and goes on")


def test_a_message_that_ends_its_process_holds_one_partition_until_the_code_is_corrected(
    world: Settings, tmp_path: Path
) -> None:
    def paid(account: str) -> int:
        return sum(commit.stream == f"accounts/{account}" for commit in commits(world)) - 1

    set_up(world)
    topic = world.events_topic.replace("events", "billing")
    world = world.model_copy(update={"sources": {"billing": Source(topic=topic)}})
    admin = clients.admin(world)
    [made] = admin.create_topics([NewTopic(topic, 2, 1)]).values()
    made.result(60)
    send(world, open_account("a"), open_account("b"))
    producer = clients.producer(world)
    for partition, account, count in ((0, "a", 5), (1, "b", 5)):
        for cents in range(1, count + 1):
            producer.produce(topic, json.dumps({"account": account, "cents": cents}).encode(), partition=partition)
    producer.flush(60)
    ends = HEAR.format("if at.partition == 0 and message.cents == 4:\n        os.kill(os.getpid(), 9)")
    with running(world, tmp_path, "policies/hear.py", "", ends, policies=True) as crew:
        file = tmp_path / f"{crew.policies[0].name}.log"
        until(
            lambda: file.exists() and "receive " + topic + "/0@3: it ended one process" in file.read_text(), "it says"
        )
        until(lambda: (paid("a"), paid("b")) == (3, 5), "what comes before it and the other partition go on")
    with running(world, tmp_path, "policies/hear.py", "", HEAR.format("pass"), policies=True):
        until(lambda: paid("a") == 5, "corrected code goes on")
    assert paid("b") == 5
