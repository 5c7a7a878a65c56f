"""500 clients read their own writes while the API, handlers and agents are killed with -9."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from pathlib import Path
from random import Random
from typing import Any, Literal

import msgspec
import pytest
from fastapi import Request
from starlette.responses import Response

from api import requests, views
from demo.crew import Crew, Role
from infra.database.connect import connect
from infra.settings import Settings
from infra.testing.fixtures import SEED
from projections.engine.verify.verify import verify
from projections.engine.views.core_views import all_views
from tests.engine.api.api import Api, everything
from tests.engine.api.api_clients import PATIENCE_S, Notes, Seen, clients, run_all
from tests.engine.api.evidence import Witnesses, contradictions, witnesses
from tests.engine.api.front import free_port, is_ready
from tests.engine.spine import set_up, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]

CLIENTS = 500
ROUNDS = 3
Attack = Role | Literal["sessions"]
"""On a process, or on all sessions of the database, as by a failover."""
ATTACKS: list[Attack] = ["handler", "agent", "api", "sessions"] * 2
IMPATIENT = {"api_wait_s": 1.0, "api_max_waiting": 10}
"""A client that gets one of these must find its true outcome in the end too."""
EFFECTS = {"MoneyDeposited": 1, "MoneyWithdrawn": -1}


def never_so(seen: list[Seen], log: Witnesses) -> list[Seen]:
    """Reads of a balance that never was."""
    balances: dict[str, dict[int, int]] = {}
    commits = sorted((one for of_key in log.log.values() for one in of_key), key=lambda one: one.version)
    for one in commits:
        mine = balances.setdefault(one.stream, {0: 0})
        for event in one.events:
            if sign := EFFECTS.get(event.type):
                cents = msgspec.json.decode(event.data)["cents"]
                mine[len(mine)] = mine[len(mine) - 1] + sign * cents
    return [one for one in seen if balances[one.stream].get(one.transactions) != one.cents]


def crowd(url: str, number: int, rounds: int, notes: Notes) -> None:
    asyncio.run(run_all([*clients(url, number, rounds, SEED, notes)]))


def test_nobody_reads_less_than_he_knows_while_everybody_is_killed(world: Settings, tmp_path: Path) -> None:
    set_up(world)
    notes, port = Notes(), free_port()
    hit: Counter[str] = Counter()
    began = time.monotonic()
    impatient = world.model_copy(update=IMPATIENT)
    with Crew(impatient, tmp_path, handler_count=1, agent_count=1, api_port=port) as crew:
        url = f"http://127.0.0.1:{port}"
        until(lambda: is_ready(url), "the API is ready")
        with ThreadPoolExecutor(1) as aside:
            asking = aside.submit(crowd, url, CLIENTS, ROUNDS, notes)
            for number, attack in enumerate(Random(SEED).sample(ATTACKS, len(ATTACKS)), start=1):
                answered(notes, CLIENTS * (ROUNDS + 1) * number // (len(ATTACKS) + 1), asking)
                strike(attack, crew, world)
                hit[attack] += not asking.done()
            asking.result()
    seen = witnesses(world)
    statuses = Counter(str(one.status) for one in notes.told)
    print(f"{time.monotonic() - began:.1f} s, hit {dict(hit)}, told {dict(statuses)}, {len(notes.seen)} reads")
    assert set(hit) == set(ATTACKS), "each was hit while clients asked"
    assert notes.broken > 0, "the API was killed in the midst of requests"
    for status in ("202", "409", "412", "422", "429"):
        assert statuses[status] > 0, f"no client got {status}"
    assert notes.older == []
    assert never_so(notes.seen, seen) == []
    assert contradictions(notes.told, seen) == []
    assert verify(world, all_views()).differences == 0


def answered(notes: Notes, due: int, asking: Future[None]) -> None:
    until(lambda: notes.done >= due or asking.done(), f"{due} commands have an answer", PATIENCE_S)


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


# ── with a guarantee switched off, the checks fail ──


def few(api: Api) -> Notes:
    notes = Notes()
    crowd(api.url, 10, 4, notes)
    return notes


def test_a_read_of_what_was_before_is_noticed(world: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """For example a cache that is never invalidated."""
    answered, first = views.answered, dict[str, bytes]()

    def cached(request: Request, tag: str, found: Any, body: bytes, headers: Any) -> Response:
        return answered(request, tag, found, first.setdefault(request.url.path, body), headers)

    with everything(world) as api:
        assert few(api).older == []
        monkeypatch.setattr(views, "answered", cached)
        crowd(api.url, 10, 8, notes := Notes())
    assert notes.older


def test_a_command_that_is_done_at_each_try_is_noticed(world: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    with everything(world) as api:
        ids = count()
        monkeypatch.setattr(requests, "idempotency_key", lambda _: (f"own-{next(ids)}", False))
        notes = few(api)
    assert contradictions(notes.told, witnesses(world))
