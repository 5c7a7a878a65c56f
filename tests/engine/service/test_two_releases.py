"""make test-all + prove: one release that changes tables shows each promise; each further one takes a minute.

Two releases side by side, each with its handler, agents and API as processes, through whatever a release may change.

Each follows the one before, is started beside it, switches, and then the older one ends. All the while both APIs are sent the
commands that they know, and asked for a view that nobody changes: they answer. In the end each command was decided once, rightly.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest

from demo import tree
from demo.background_thread import BackgroundThread
from demo.proof import counted_in, rows_of
from demo.release import CommandLine
from infra.processes.supervisor import Child, agents, api, handlers
from infra.settings import Settings
from proofs.kit import Supervised
from tests.engine.spine import openings, set_up
from tools.dev.process import free_ports
from tools.testing.fixtures import ROOT
from tools.testing.waiting import DEADLINE_S, until

Posts = Mapping[str, Mapping[str, Any]]
"""Commands by path, `{}` being a new name, and their bodies."""
Edits = Mapping[str, Sequence[tuple[str, str]]]
"""By file: what stands there and what is to stand there; from nothing, a new file; to nothing, none any more."""

DEPOSITED = '''"""How much was ever paid into an account?"""

from typing import NamedTuple

from domain.accounts import MoneyDeposited
from projections.engine import At, Key

VERSION = 1


class Deposited(NamedTuple):
    account: Key[str]
    cents: int


def evolve(row: Deposited | None, event: MoneyDeposited, at: At) -> Deposited | None:
    return Deposited(at.id, (row.cents if row else 0) + event.cents)
'''
ORDERS = '''"""Orders: they are placed once."""

from dataclasses import dataclass
from typing import TypeAlias

from domain.language import Refusal, fact


@fact
class OrderPlaced:
    pieces: int


@fact
class PlaceOrder:
    pieces: int


Event: TypeAlias = OrderPlaced
Command: TypeAlias = PlaceOrder


class OrderIsPlaced(Refusal):
    """The order was placed before."""


STATE_VERSION = 1


@dataclass(frozen=True, slots=True)
class State:
    pieces: int = 0


def decide(command: Command, state: State) -> list[Event]:
    if state.pieces:
        raise OrderIsPlaced
    return [OrderPlaced(pieces=command.pieces)]


def evolve(state: State, event: Event) -> State:
    return State(state.pieces + event.pieces)
'''
SPENT = (
    ("VERSION = 2\n", "VERSION = 3\n"),
    ("    owner: str\n", "    owner: str\n    spent: int\n"),
    ("0, None, event.owner)", "0, None, event.owner, 0)"),
    ("    cents, count =", "    spent = row.spent + max(-change(event), 0)\n    cents, count ="),
    ("row.closed_on, row.owner)", "row.closed_on, row.owner, spent)"),
)
MOVED = ("VERSION = 1\n", 'VERSION = 1\nAGENT = "side"\n')
A_NOTE = """@fact
class {}:
    on: date


"""
NOTES: Edits = {
    "domain/accounts.py": [
        ("Movement: TypeAlias", A_NOTE.format("NoteTaken") + "Movement: TypeAlias"),
        ("| HoldReleased | AccountClosed", "| HoldReleased | AccountClosed | NoteTaken"),
        ("Command: TypeAlias", A_NOTE.format("TakeNote") + "Command: TypeAlias"),
        ("| ReleaseHold | CloseAccount", "| ReleaseHold | CloseAccount | TakeNote"),
        (
            "        case CloseAccount(on=on):\n",
            "        case TakeNote(on=on):\n            return [NoteTaken(on=on)]\n        case CloseAccount(on=on):\n",
        ),
        (
            "        case AccountClosed():\n",
            "        case NoteTaken():\n            return state\n        case AccountClosed():\n",
        ),
    ]
}
RAISED_STATE: Edits = {
    "domain/accounts.py": [
        ("STATE_VERSION = 3", "STATE_VERSION = 4"),
        ("holds: dict[str, int] = field(", "notes: int = 0\n    holds: dict[str, int] = field("),
        (
            "State(state.status, state.balance + change(event), state.overdraft_limit, state.holds, state.owner)",
            "replace(state, balance=state.balance + change(event))",
        ),
        (
            "            return State(state.status, state.balance - cents, state.overdraft_limit, holds, state.owner)",
            "            return replace(state, balance=state.balance - cents, holds=holds)",
        ),
        (
            "        case NoteTaken():\n            return state\n",
            "        case NoteTaken():\n            return replace(state, notes=state.notes + 1)\n",
        ),
    ]
}


GIFTS: Edits = {
    "domain/accounts.py": [
        ("Command: TypeAlias", "@fact\nclass Give:\n    cents: Cents\n    on: date\n\n\nCommand: TypeAlias"),
        ("| CloseAccount | TakeNote", "| CloseAccount | TakeNote | Give"),
        (
            "        case TakeNote(on=on):\n",
            "        case Give(cents=cents, on=on):\n            return [MoneyDeposited(cents=cents, on=on)]\n"
            "        case TakeNote(on=on):\n",
        ),
    ]
}
PACKED: Edits = {
    "domain/orders.py": [
        (
            "Event: TypeAlias = OrderPlaced\n",
            "@fact\nclass OrderPacked:\n    pieces: int\n\n\nEvent: TypeAlias = OrderPlaced | OrderPacked\n",
        ),
        (
            "Command: TypeAlias = PlaceOrder\n",
            "@fact\nclass PackOrder:\n    pieces: int\n\n\nCommand: TypeAlias = PlaceOrder | PackOrder\n",
        ),
        (
            "    if state.pieces:\n",
            "    if isinstance(command, PackOrder):\n        return [OrderPacked(pieces=command.pieces)]\n    if state.pieces:\n",
        ),
    ]
}


@dataclass(frozen=True)
class Release:
    """A release: what it changes in the one before, and what comes with it."""

    edits: Edits
    posts: Posts
    """Commands that its API knows."""
    agents: tuple[str, ...] = ("core",)
    new: tuple[str, ...] = ()
    """Those of the commands that the release before does not know."""


DEPOSIT: Posts = {"/accounts/a1/deposit": {"cents": 1, "on": "2026-01-02"}}
NOTE: Posts = {"/accounts/a2/take-note": {"on": "2026-01-02"}}
GIFT: Posts = {"/accounts/a2/give": {"cents": 7, "on": "2026-01-02"}}
ORDER: Posts = {"/orders/{}/place-order": {"pieces": 3}}
PACK: Posts = {"/orders/{}/pack-order": {"pieces": 3}}
RELEASES = [
    Release({}, DEPOSIT),
    # a view added, one raised, one moved to an agent of its own; a command and its event
    Release(
        {
            "projections/deposited.py": [("", DEPOSITED)],
            "projections/balances.py": SPENT,
            "projections/daily_totals.py": [MOVED],
            **NOTES,
        },
        {**DEPOSIT, **NOTE},
        agents=("core", "side"),
        new=tuple(NOTE),
    ),
    # a view removed; an agent retired, whose view moved back; a context added; a state raised
    Release(
        {
            "projections/deposited.py": [(DEPOSITED, "")],
            "projections/daily_totals.py": [MOVED[::-1]],
            "domain/orders.py": [("", ORDERS)],
            **RAISED_STATE,
        },
        {**DEPOSIT, **NOTE, **ORDER},
        new=tuple(ORDER),
    ),
    # a command alone, which leads to an event that there is already
    Release(GIFTS, {**DEPOSIT, **ORDER, **GIFT}, new=tuple(GIFT)),
    # a command and its event, in all partitions, which the agents of the release before do not know; no view's version is raised
    Release(PACKED, {**DEPOSIT, **ORDER, **PACK}, new=tuple(PACK)),
]


def write_trees(folder: Path, releases: Sequence[Release]) -> list[Path]:
    """A tree for each release; the first one's is the repository."""
    found = [ROOT]
    for number, release in enumerate(releases[1:], 1):
        found.append(write_tree(folder / f"r{number}", found[-1], release.edits))
    return found


def write_tree(here: Path, before: Path, edits: Edits) -> Path:
    """A copy of the tree before, with these edits."""
    for package in tree.PACKAGES:
        shutil.copytree(before / package, here / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name, changes in edits.items():
        file = here / name
        text = file.read_text() if file.exists() else ""
        for old, new in changes:
            assert old == text == "" or text.count(old) == 1, (name, old)
            text = text.replace(old, new, 1) if old else new
        file.write_text(text) if text else file.unlink()
    return here


@dataclass
class Sent:
    """A command, and what was answered: a status, and the code of a problem."""

    path: str
    stream: str
    key: str
    status: int
    code: str


class Client(BackgroundThread):
    """Sends one API the commands that its release knows, one after the other, and reads a view that all releases have alike."""

    def __init__(self, release: Release, url: str) -> None:
        super().__init__("client")
        self.release = release
        self.url = url
        self.sent: list[Sent] = []
        self.reads: Counter[int] = Counter()
        self._numbers = count()

    def start(self) -> None:
        self.__enter__()

    def stop(self) -> None:
        self._end()

    def answered(self) -> Counter[str]:
        """Commands that got their outcome, by path."""
        return Counter(one.path for one in list(self.sent) if one.status == 200)

    def _work(self) -> None:
        with httpx.Client(base_url=self.url, timeout=DEADLINE_S) as client:
            while not self._ended.wait(0.02):
                for path, body in self.release.posts.items():
                    self._post(client, path, body)
                self.reads[client.get("/views/statement?limit=1").status_code] += 1

    def _post(self, client: httpx.Client, path: str, body: Mapping[str, Any]) -> None:
        name = f"{self.url.rpartition(':')[2]}-{next(self._numbers)}"
        where = path.format(name)
        answer = client.post(where, json=body, headers={"Idempotency-Key": f'"{name}"'})
        stream = where[1:].rpartition("/")[0]
        code = "" if answer.status_code in (200, 202) else answer.json()["code"]
        self.sent.append(Sent(path, stream, name, answer.status_code, code))


class Part(Supervised):
    """Some processes of a release, until `stop`."""

    def __init__(self, children: Sequence[Child], environment: dict[str, str], logs: Path) -> None:
        super().__init__(children, environment, logs)
        self._logs = [logs / f"{child.name}.log" for child in children]
        self._before = [log.stat().st_size if log.exists() else 0 for log in self._logs]
        self.__enter__()

    def said(self) -> str:
        """What its processes have logged."""
        pairs = zip(self._logs, self._before, strict=True)
        return "".join(log.read_bytes()[before:].decode() for log, before in pairs if log.exists())


@dataclass
class Running:
    """The processes of a release, and the client of its API."""

    release: Release
    client: Client
    part: Part

    def stop(self) -> None:
        self.client.stop()
        self.part.stop()


class Service:
    """A service in production, to which one release after the other is deployed."""

    def __init__(self, world: Settings, folder: Path, releases: Sequence[Release]) -> None:
        self.world = world
        self.folder = folder
        self.releases = releases
        self.trees = write_trees(folder, releases)
        self.running: list[Running] = []
        self.clients: list[Client] = []
        self.parts: list[Part] = []

    def place(self, number: int) -> str:
        """What the names of a release's processes begin with."""
        return f"{self.world.group_prefix}-r{number}"

    def part(self, number: int, *children: Child) -> Part:
        environment = self.world.environment() | tree.environment(self.trees[number])
        started = Part(children, environment, self.folder / f"logs{number}")
        self.parts.append(started)
        return started

    def start(self, number: int, *, front_only: bool = False) -> Running:
        """All processes of a release, or its API alone, and a client of it."""
        release, [port], place = self.releases[number], free_ports(1), self.place(number)
        children = [api(place, "127.0.0.1", port)]
        if not front_only:
            children += handlers(1, place)
            for name in release.agents:
                children += agents(1, place, name)
        part = self.part(number, *children)
        url = f"http://127.0.0.1:{port}"
        until(lambda: has_looked(url), "the API has looked at the stores")
        for name in ("a1", "a2"):
            until(partial(is_open, url, name), "accounts are opened")
        client = Client(release, url)
        started = Running(release, client, part)
        self.running.append(started)
        self.clients.append(client)
        client.start()
        return started

    def samefold(self, number: int) -> CommandLine:
        return CommandLine(self.folder, self.world.environment() | tree.environment(self.trees[number]))

    def migrate(self, number: int) -> None:
        """Make the tables of a release; those that follow have its migration too."""
        self.samefold(number).run("db", "revision", "-m", f"release {number}")
        migrations = Path("projections", "migrations")
        for later in self.trees[number + 1 :]:
            shutil.copytree(self.trees[number] / migrations, later / migrations, dirs_exist_ok=True)
        self.samefold(number).run("db", "upgrade")

    def verify(self, number: int) -> None:
        assert self.samefold(number).told("verify", "--engine", "local")["differences"] == 0

    def end(self, running: Running) -> None:
        running.stop()
        self.running.remove(running)

    def until_answered(self, what: str, *, without: Sequence[str] = ()) -> None:
        """Each API that runs answers more of all commands that its release knows, but for those of its own that are new."""
        before = [(one.client, one.client.answered(), one.client.reads.copy()) for one in self.running]

        def more() -> bool:
            for client, was, reads in before:
                assert client.error is None, client.error
                now = client.answered()
                if client.reads[200] <= reads[200] + 2:
                    return False
                expected = client.release.posts.keys() - {*client.release.new} & {*without}
                if any(now[path] <= was[path] + 2 for path in expected):
                    return False
            return True

        self.until(more, what)

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for a condition; in vain, show the ends of all logs."""
        try:
            until(condition, what)
        except AssertionError:
            for log in sorted(self.folder.glob("logs*/*.log")):
                print(log, log.read_text()[-1_500:], sep="\n")
            raise

    def stop(self) -> None:
        for client in self.clients:
            client.stop()
        for part in self.parts:
            part.stop()

    def finish(self) -> None:
        """Stop the clients, and wait until every command that was taken has its outcome."""
        for client in self.clients:
            client.stop()
        self.until(lambda: not missing(self.world, self.clients), "every command that was taken has its outcome")

    def assert_all_decided_once(self, *refusals: str) -> None:
        """Each command that was taken has one commit and is accepted, each with one of these problems has none; all is answered."""
        counted = counted_in(self.world)
        outcomes = rows_of(self.world, counted).outcomes
        for client in self.clients:
            assert client.error is None, client.error
            assert client.reads.keys() == {200}
            assert {one.code for one in client.sent} <= {"", *refusals}
            for one in client.sent:
                key = (one.stream, one.key)
                outcome = outcomes[key].outcome if key in outcomes else None
                assert (counted.get(key, 0), outcome) == ((0, None) if one.code else (1, "accepted")), one


@contextmanager
def service(world: Settings, folder: Path, releases: Sequence[Release]) -> Iterator[Service]:
    found = Service(world, folder, releases)
    try:
        yield found
    finally:
        found.stop()


def has_looked(url: str) -> bool:
    try:
        return "not-looked" not in httpx.get(f"{url}/health/ready", timeout=5).text
    except httpx.TransportError:
        return False


def is_open(url: str, name: str) -> bool:
    body = {"overdraft_limit": 0, "on": "2026-01-01"}
    key = {"Idempotency-Key": f'"open-{name}"'}
    return (
        httpx.post(f"{url}/accounts/{name}/open-account", json=body, headers=key, timeout=DEADLINE_S).status_code == 200
    )


@pytest.mark.parametrize(
    "releases",
    [
        pytest.param(RELEASES[:2], marks=pytest.mark.slow, id="one"),
        pytest.param(RELEASES, marks=pytest.mark.prove(part="chaos"), id="all"),
    ],
)
def test_two_releases_side_by_side_answer_commands_and_reads_through_all_that_a_release_may_change(
    releases: Sequence[Release], world: Settings, tmp_path: Path
) -> None:
    set_up(world)
    with service(world, tmp_path, releases) as running:
        old = running.start(0)
        running.until_answered("the first release answers")
        for number, release in enumerate(releases[1:], 1):
            changes_tables = any(name.startswith("projections/") for name in release.edits)
            if changes_tables:
                running.migrate(number)
            new = running.start(number)
            running.until_answered("both answer before the switch", without=release.new if changes_tables else ())
            if changes_tables:
                running.samefold(number).run("rebuild")
            running.until_answered("both answer after the switch")
            running.end(old)
            running.until_answered("the newer one answers alone")
            old = new
        running.finish()
        running.verify(len(releases) - 1)
    running.assert_all_decided_once("command-not-live")
    sent = [one for client in running.clients for one in client.sent]
    assert {one.path for one in sent if one.code} <= {path for release in releases for path in release.new}
    assert len(openings(world)) < 3 * len(releases) * world.partitions, (
        "no two handlers take partitions from each other for long"
    )


def missing(world: Settings, clients: Sequence[Client]) -> set[tuple[str, str]]:
    taken = {(one.stream, one.key) for client in clients for one in client.sent if not one.code}
    return taken - rows_of(world, taken).outcomes.keys()
