"""Clients that trust nobody: each posts, at once reads what it wrote, asks until it has an answer, and notes everything."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, NamedTuple

import httpx

from tests.engine.api.evidence import Told, told

ON = "2026-01-02"
TIMEOUT_S = 5.0
PATIENCE_S = 200.0
"""Until a request must have found a server that answers it. Most are told to wait, since a tenth may: some are unlucky."""

Answer = dict[str, Any]


class Seen(NamedTuple):
    """One look at a balance: cents after so many transactions. `at_least` is how many the client knew of."""

    stream: str
    transactions: int
    cents: int
    at_least: int

    @property
    def is_older(self) -> bool:
        return self.transactions < self.at_least


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
        return [one for one in self.seen if one.is_older]


@dataclass(slots=True)
class Client:
    """`rounds` commands to one account, which others write to as well, each followed by a read where it was accepted."""

    number: int
    stream: str
    rounds: int
    chance: Random
    notes: Notes
    http: httpx.AsyncClient
    knows: int = 0
    """Transactions of the account that this client knows to have happened."""
    version: int = 0

    async def run(self) -> None:
        # all who share the account open it, with the same key: one effect, and one answer for all
        await self._post("open-account", f"open-{self.stream}", {"overdraft_limit": 0, "on": ON}, None)
        for turn in range(self.rounds):
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
        """The command's final status."""
        headers = {"Idempotency-Key": f'"{key}"'} | ({} if expected is None else {"If-Match": f'"{expected}"'})
        deadline = time.monotonic() + PATIENCE_S
        while True:
            assert time.monotonic() < deadline, f"{key} has no answer"
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
        deadline = time.monotonic() + PATIENCE_S
        while True:
            assert time.monotonic() < deadline, f"{self.stream} can't be read"
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
        """Between two tries, which deadlines bound."""
        await asyncio.sleep(0.1 + 0.2 * self.chance.random())


def clients(url: str, number: int, rounds: int, seed: int, notes: Notes) -> Iterator[Client]:
    """Five to an account."""
    nothing_to_trust = ssl.create_default_context()  # made once: it takes longer than all the rest
    for n in range(number):
        http = httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, verify=nothing_to_trust, trust_env=False)
        yield Client(n, f"accounts/shared-{n // 5}", rounds, Random(f"{seed}-{n}"), notes, http)


async def run_all(crowd: Sequence[Client]) -> None:
    """Until each is through. Raises the first error of any, when all others are cancelled."""
    try:
        async with asyncio.TaskGroup() as group:
            for one in crowd:
                group.create_task(one.run())
    finally:
        for one in crowd:
            await one.http.aclose()
