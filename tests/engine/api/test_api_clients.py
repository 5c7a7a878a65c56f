"""make test-all + prove: with a few clients each kind of process is killed once; 500 find more by chance.

Clients that trust nobody: each posts, at once reads what it wrote, asks until it has an answer, and notes everything,
while the API, handlers and agents are killed with -9.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Literal, NamedTuple

import httpx
import msgspec
import pytest

from demo.crew import Crew, Role
from infra.database.connect import connect
from infra.settings import Settings
from projections.engine.operate.verify import verify
from projections.engine.views.core_views import all_views
from tests.engine.api.evidence import Told, Witnesses, contradictions, told, witnesses
from tests.engine.api.front import free_port, is_ready
from tests.engine.spine import set_up
from tools.testing.fixtures import SEED
from tools.testing.waiting import DEADLINE_S, SLOWNESS, until

FEW, MANY = (25, 4), (500, 3)
"""Clients, and the turns of each."""
Attack = Role | Literal["sessions"]
"""On a process, or on all sessions of the database, as by a failover."""
ATTACKS: list[Attack] = ["handler", "agent", "api", "sessions"]
IMPATIENT = {"api_wait_s": 1.0, "api_max_waiting": 10}
"""A client that gets one of these must find its true outcome in the end too."""
EFFECTS = {"MoneyDeposited": 1, "MoneyWithdrawn": -1}


ON = "2026-01-02"
TIMEOUT_S = 5.0 * SLOWNESS

Answer = dict[str, Any]


class Seen(NamedTuple):
    """One look at a balance: cents after so many transactions. `at_least` is how many the client knew of."""

    stream: str
    transactions: int
    cents: int
    at_least: int


@dataclass(slots=True)
class Notes:
    """What all clients were told and saw."""

    told: list[Told] = field(default_factory=list)
    seen: list[Seen] = field(default_factory=list)
    broken: int = 0
    """Connections that ended without an answer, or were refused."""
    done: int = 0
    """Commands that have their answer."""

    @property
    def older(self) -> list[Seen]:
        """Reads of somebody who knew better."""
        return [one for one in self.seen if one.transactions < one.at_least]


@dataclass(slots=True)
class Client:
    """Some commands to one account, which others write to as well, each followed by a read where it was accepted."""

    number: int
    stream: str
    chance: Random
    notes: Notes
    http: httpx.AsyncClient
    knows: int = 0
    """Transactions of the account that this client knows to have happened."""
    version: int = 0

    async def run(self, turns: int) -> None:
        # all who share the account open it, with the same key: one effect, and one answer for all
        await self._post("open-account", f"open-{self.stream}", {"overdraft_limit": 0, "on": ON}, None)
        for turn in range(turns):
            await self._turn(f"c{self.number}-{turn}")

    async def _turn(self, key: str) -> None:
        kind = self.chance.choice(("deposit", "deposit", "withdraw"))
        data = {"cents": self.chance.randint(1, 1_000), "on": ON}
        expected = self.version if self.chance.random() < 0.3 else None
        status = await self._post(kind, key, data, expected)
        if status == 200:
            await self._look()
        if self.chance.random() < 0.05:
            await self._post(kind, key, data | {"cents": 2_000}, expected)

    async def _post(self, kind: str, key: str, data: Answer, expected: int | None) -> int:
        headers = {"Idempotency-Key": f'"{key}"'} | ({} if expected is None else {"If-Match": f'"{expected}"'})
        while True:
            answer = await self._ask("POST", f"/{self.stream}/{kind}", headers, data)
            if answer is None:
                self.notes.told.append(Told(self.stream, key, None))
                continue
            body = answer.json()
            self.notes.told.append(told(self.stream, key, answer.status_code, body))
            if answer.status_code in {202, 429, 503}:
                await self._pause()
                continue
            if answer.status_code == 200:
                self.version = max(self.version, body["version"])
                self.knows = max(self.knows, body["version"] - 1)  # its first event opened it
            self.notes.done += 1
            return answer.status_code

    async def _look(self) -> None:
        while True:
            answer = await self._ask("GET", f"/views/balances/{self.stream.partition('/')[2]}", {}, None)
            if answer is not None and answer.status_code not in {429, 503}:
                break
            await self._pause()
        assert answer.status_code == 200, answer.text
        row = answer.json()["row"]
        self.notes.seen.append(Seen(self.stream, row["transactions"], row["cents"], self.knows))
        self.knows = max(self.knows, row["transactions"])

    async def _ask(self, method: str, path: str, headers: dict[str, str], data: Answer | None) -> httpx.Response | None:
        try:
            return await self.http.request(method, path, headers=headers, json=data)
        except httpx.TransportError:
            self.notes.broken += 1
            await self._pause()
            return None

    async def _pause(self) -> None:
        """Between two tries, of which the whole run's deadline is the bound."""
        await asyncio.sleep(0.1 + 0.2 * self.chance.random())


async def run_all(url: str, notes: Notes, clients: int, turns: int) -> None:
    """Five to an account, until each is through. Raises the first error of any, and TimeoutError."""
    nothing_to_trust = ssl.create_default_context()  # made once: it takes longer than all the rest
    async with asyncio.timeout(3 * DEADLINE_S), AsyncExitStack() as stack, asyncio.TaskGroup() as group:
        for n in range(clients):
            http = httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, verify=nothing_to_trust, trust_env=False)
            await stack.enter_async_context(http)
            chance = Random(f"{SEED}-{n}")
            group.create_task(Client(n, f"accounts/shared-{n // 5}", chance, notes, http).run(turns))


def never_so(seen: list[Seen], log: Witnesses) -> list[Seen]:
    balances: dict[str, dict[int, int]] = {}
    commits = sorted((one for of_key in log.log.values() for one in of_key), key=lambda one: one.version)
    for one in commits:
        mine = balances.setdefault(one.stream, {0: 0})
        for event in one.events:
            if sign := EFFECTS.get(event.type):
                cents = msgspec.json.decode(event.data)["cents"]
                mine[len(mine)] = mine[len(mine) - 1] + sign * cents
    return [one for one in seen if balances[one.stream].get(one.transactions) != one.cents]


@pytest.mark.parametrize(
    ("clients", "turns"),
    [pytest.param(*FEW, marks=pytest.mark.slow), pytest.param(*MANY, marks=pytest.mark.prove(part="chaos"))],
)
def test_nobody_reads_less_than_he_knows_while_everybody_is_killed(
    world: Settings, tmp_path: Path, clients: int, turns: int
) -> None:
    set_up(world)
    notes, port = Notes(), free_port()
    hit: Counter[str] = Counter()
    began = time.monotonic()
    impatient = world.model_copy(update=IMPATIENT if (clients, turns) == MANY else {})
    with Crew(impatient, tmp_path, handler_count=1, agent_count=1, api_port=port) as crew:
        url = f"http://127.0.0.1:{port}"
        until(lambda: is_ready(url), "the API is ready")
        with ThreadPoolExecutor(1) as aside:
            asking = aside.submit(asyncio.run, run_all(url, notes, clients, turns))
            attacks = ATTACKS * (2 if (clients, turns) == MANY else 1)
            for number, attack in enumerate(Random(SEED).sample(attacks, len(attacks)), start=1):
                answered(notes, clients * (turns + 1) * number // (len(attacks) + 1), asking)
                strike(attack, crew, world)
                hit[attack] += not asking.done()
            asking.result()
    seen = witnesses(world)
    statuses = Counter(str(one.status) for one in notes.told)
    print(f"{time.monotonic() - began:.1f} s, hit {dict(hit)}, told {dict(statuses)}, {len(notes.seen)} reads")
    assert set(hit) == set(ATTACKS), "each was hit while clients asked"
    assert notes.broken > 0, "the API was killed in the midst of requests"
    for status in ("202", "409", "412", "422", "429") if (clients, turns) == MANY else ("200", "422"):
        assert statuses[status] > 0, f"no client got {status}"
    assert notes.older == []
    assert never_so(notes.seen, seen) == []
    assert contradictions(notes.told, seen) == []
    assert verify(world, all_views()).differences == 0


def answered(notes: Notes, due: int, asking: Future[None]) -> None:
    until(lambda: notes.done >= due or asking.done(), f"{due} commands have an answer")


def strike(attack: Attack, crew: Crew, world: Settings) -> None:
    if attack != "sessions":
        [child] = crew.members(attack)
        until(lambda: crew.kill(child) is not None, f"there is a process to kill as {attack}")
        return
    with connect(world, "test") as db:
        db.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity"
            " where datname = current_database() and pid <> pg_backend_pid()"
        )
