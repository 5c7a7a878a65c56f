"""One month: processes that run and are away, clients that ask, an operator who brings to an end what is stuck."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import psycopg

from commands.client import Sender
from demo import tree
from infra.database.connect import connect
from infra.log import topics
from infra.log.records import Command
from infra.processes import supervisor
from infra.settings import Settings
from policies.engine.activations import activations_of
from proofs.kit import Supervised
from proofs.weather import service
from proofs.weather.clock import jump
from proofs.weather.endpoints import NAMES, WELL, Endpoints, served
from tools.dev import process
from tools.dev.stack import Stack
from tools.testing.fixtures import world_of
from tools.testing.waiting import DEADLINE_S, until

SLICES, SETTLE_S = 8, 0.4
"""Of a piece of weather: the clock jumps so often, and processes have so long after each."""
GIVES_UP_SLICES, ATTEMPT_S = 24, 1.5
"""The same of an endpoint that fails for so long that its posts give up: all of them are tried after each jump."""
LONG = timedelta(days=6)
ACCOUNTS, DEPOTS, BROUGHT = 40, 4, 1_000_00
POLICIES = ("parcels", "standing_orders", "transfers")
OLD = "old policies"
PARKED = "parked"
SENT_AGAIN = ("refused", "gone", "gave-up")
DROPPED = ("invalid-wish", "refused-by-kafka", "too-deep")
"""What is missing then, the operator sends: the end of the parcel. Of too-deep nothing is."""
PARTS = ("handlers", "agents", "policies")
POSTS_FROM = timedelta(days=9)
"""Before the loss of a database: the operator has posts made anew from there."""


class Found(Exception):
    """What a month must not end with."""


class Month:
    """`with Month(folder, seed) as month:` runs; `weather(what, length)` changes it, `end()` returns what was counted."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.random = Random(seed)
        self.folder = folder
        self.endpoints = Endpoints()
        self.sent = 0
        """Requests of clients."""
        self.stuck: dict[str, set[str]] = {}
        """The streams whose processes were stuck, by the reason."""
        self.posts_since = datetime.min.replace(tzinfo=UTC)
        self.release = 1
        self.waits = ""
        """For what processes wait at the end."""
        self._open = ExitStack()
        self._crews: dict[str, Supervised] = {}
        self._copy: Path | None = None
        self._sending: list[Command] = []
        self._asked: list[tuple[Command, datetime]] = []
        self._instalments: dict[str, date] = {}
        """The first transfer of each standing order, and its day."""
        self._parcels = 0
        self._is_kafka_there = True

    def __enter__(self) -> Month:
        open_ = self._open.enter_context
        self.folder.chmod(0o711)
        service.make(self._code)
        self.stack = Stack(self.folder / "stack")
        self._open.callback(self.stack.down)
        self.stack.up()
        self._port = open_(served(self.endpoints))
        self.world: Settings = open_(world_of(self.stack))
        self._environment = self.world.environment() | self.endpoints.configured(self._port)
        self.samefold("db", "upgrade")
        self.samefold("db", "revision", "-m", "parcels")
        service.make_next(self.folder / "release-2", self._code)
        self.samefold("db", "upgrade")
        topics.ensure(self.world)
        self._open.callback(self._stop_all)
        self._start_all()
        until(self._are_policies_live, "the policies are live")
        self._sender = Sender(self.world)
        self._open_accounts()
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()

    def samefold(self, *arguments: str, given: str = "") -> Any:
        """A command of the release that runs; its JSON if it has any."""
        done = subprocess.run(
            [sys.executable, "-c", "from tools.cli import main; main()", *arguments],
            env=os.environ | self._environment | tree.environment(self._code),
            cwd=self.folder,
            input=given,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise Found(f"`samefold {' '.join(arguments)}` ended with {done.returncode}: {done.stderr.strip()}")
        return json.loads(done.stdout) if "--json" in arguments else done.stdout

    @property
    def _code(self) -> Path:
        return self.folder / f"release-{self.release}"

    # ── the weather ──

    def weather(self, what: str, length: timedelta) -> None:
        """Let it be so for that long; then all is well again."""
        name, *how = what.split()
        until_well: Callable[[], None] = getattr(self, f"_{name}")(*how)
        gives_up = name == "endpoint" and length > LONG
        slices, settle_s = (GIVES_UP_SLICES, ATTEMPT_S) if gives_up else (SLICES, SETTLE_S)
        for part in range(slices):
            if part < SLICES // 2:
                self._ask()
            jump(length / slices)
            time.sleep(settle_s)
        until_well()
        too_old = self.endpoints.too_old
        _require(not too_old, f"posts came of events whose posts another database had made: {too_old[:3]}")

    def _calm(self) -> Callable[[], None]:
        """And an operator looks after it."""

        def end() -> None:
            self._operate()

        return end

    def _away(self, part: str) -> Callable[[], None]:
        self._crews.pop(part).stop()
        return lambda: self._start(part)

    def _handlers_away(self) -> Callable[[], None]:
        return self._away("handlers")

    def _agents_away(self) -> Callable[[], None]:
        return self._away("agents")

    def _policies_away(self) -> Callable[[], None]:
        return self._away("policies")

    def _kafka_away(self) -> Callable[[], None]:
        self.stack.kafka.stop()
        self._is_kafka_there = False

        def end() -> None:
            process.start(self.stack.kafka, DEADLINE_S)
            self._is_kafka_there = True

        return end

    def _postgres_away(self) -> Callable[[], None]:
        self.stack.postgres.stop()
        return lambda: process.start(self.stack.postgres, DEADLINE_S)

    def _all_away(self) -> Callable[[], None]:
        self._stop_all()
        return self._start_all

    def _endpoint(self, name: str, kind: str) -> Callable[[], None]:
        self.endpoints.answers[name] = kind
        return lambda: self.endpoints.answers.update({name: WELL})

    def _unnamed(self, name: str) -> Callable[[], None]:
        """The policies' settings lack an endpoint; an operator sees which processes wait for it."""

        def configure(names: Iterable[str]) -> None:
            self._crews.pop("policies").stop()
            self._environment |= self.endpoints.configured(self._port, names)
            self._start("policies")

        def end() -> None:
            for one in self._waiting("--stuck"):
                self._reasons(one)
            configure(NAMES)

        configure({*NAMES} - {name})
        return end

    def _deployment(self, outage: str = "calm") -> Callable[[], None]:
        """Both releases run for a while, and each process twice; it may begin in an outage."""
        old = dict(self._crews)
        end_outage: Callable[[], None] = getattr(self, f"_{outage}")()
        self.release = 2
        self._start_all()

        def end() -> None:
            end_outage()
            for crew in old.values():
                crew.stop()
            if "v2 is held" in self.samefold("policies"):
                self.samefold("policies", "switch", "parcels")

        return end

    def _database_restored(self) -> Callable[[], None]:
        """To the last copy, which may be taken once more, or a copy is made."""
        data, copy = self.stack.postgres.data, self.folder / "copy"
        self.stack.postgres.stop()
        if copy.exists():
            shutil.rmtree(data)
            subprocess.run(["cp", "-a", copy, data], check=True)
            if self.random.random() < 0.5:
                shutil.rmtree(copy)
        else:
            subprocess.run(["cp", "-a", data, copy], check=True)
        process.start(self.stack.postgres, DEADLINE_S)
        self._run_old_policies()
        return lambda: None

    def _database_lost(self) -> Callable[[], None]:
        """And made anew, over the same log."""
        self._stop_all()
        with connect(self.world, "weather") as db:
            name = db.info.dbname
        with psycopg.connect(self.stack.postgres.url(), autocommit=True) as db:
            db.execute(f'drop database "{name}" with (force)'.encode())
            db.execute(f'create database "{name}"'.encode())
        shutil.rmtree(self.folder / "copy", ignore_errors=True)
        self.samefold("db", "upgrade")
        self.posts_since = datetime.now(UTC).replace(microsecond=0) - POSTS_FROM
        self.endpoints.since = f"{self.posts_since:%FT%TZ}"
        self._start_all()
        until(self._is_held, "the policies are held")
        self.samefold("policies", "resume", "--posts-from", self.endpoints.since)
        self._run_old_policies()
        return lambda: None

    # ── processes ──

    def _start(self, part: str) -> None:
        self._crews[part] = self._started(part, self.release)

    def _started(self, part: str, release: int) -> Supervised:
        children = getattr(supervisor, part)(1, f"{self.world.group_prefix}-{release}")
        environment = self._environment | tree.environment(self.folder / f"release-{release}")
        crew = Supervised(children, environment, self.folder / "logs" / f"{release}")
        crew.__enter__()
        return crew

    def _start_all(self) -> None:
        for part in PARTS:
            self._start(part)

    def _stop_all(self) -> None:
        for part in [*self._crews]:
            self._crews.pop(part).stop()

    def _is_held(self) -> bool:
        found = self.samefold("policies", "--json")
        return all(found[policy]["state"] == "new-database" for policy in POLICIES)

    def _are_policies_live(self) -> bool:
        with connect(self.world, "weather") as db:
            return all(activations_of(db, policy) for policy in POLICIES)

    # ── clients ──

    def _open_accounts(self) -> None:
        today = datetime.now(UTC).date()
        for number in range(ACCOUNTS):
            self._add(f"accounts/{number}", "OpenAccount", overdraft_limit=0, on=f"{today}")
            self._add(f"accounts/{number}", "Deposit", cents=BROUGHT, on=f"{today}")
        for number in range(DEPOTS):
            self._add(f"depots/{number}", "EnlargeDepot", by=20)
        for number in range(ACCOUNTS // 2):
            first = today + timedelta(days=self.random.randint(1, 28))
            self._instalments[f"{number}{first:%Y%m}"] = first
            body = {"source": f"{number}", "target": f"{number + 1}", "cents": 100, "first": f"{first}"}
            self._add(f"standing_orders/{number}", "PlaceStandingOrder", **body)
        self._send()

    def _ask(self) -> None:
        today = datetime.now(UTC).date()
        for _ in range(10):
            number = self.sent
            source, target = self.random.sample(range(ACCOUNTS + 1), 2)  # the last one was never opened
            cents = self.random.randint(1, BROUGHT // 4)
            body = {"source": f"{source}", "target": f"{target}", "cents": cents, "on": f"{today}"}
            self._add(f"transfers/t{number}", "RequestTransfer", **body)
            depot = self.random.randrange(DEPOTS)
            self._parcels += 1
            self._add(f"parcels/{self._parcels}", "SendParcel", depot=f"{depot}", number=self._parcels)
        if self._is_kafka_there:
            self._send()

    def _add(self, stream: str, kind: str, **body: Any) -> None:
        self.sent += 1
        one = Command(f"c{self.sent}", stream, kind, msgspec.Raw(msgspec.json.encode(body)))
        self._sending.append(one)
        self._asked.append((one, datetime.now(UTC)))

    def _send(self) -> None:
        sending, self._sending = self._sending, []
        self._sender.send(sending, lambda _count: None)

    # ── the end ──

    def end(self) -> Counter[str]:
        """Bring all that is stuck to its end, and count. Raises Found."""
        self._send()
        if self.release == 1:  # which can't take in all parcels
            self.weather("deployment", timedelta(minutes=10))
        try:
            until(self._all_ended, "all processes have ended")
        except AssertionError as error:
            raise Found(f"{error}: {self.waits}") from error
        return self._counted()

    def _all_ended(self) -> bool:
        """Whether nothing waits but timers; an operator does what the documentation says about what is stuck."""
        jump(timedelta(hours=6))
        time.sleep(1)
        needed, waiting = self._operate()
        waiting = [one for one in waiting if any(thing["what"] != "timer" for thing in one["first"])]
        self.waits = f"{needed} {json.dumps(waiting[:3])}"
        return 1 not in needed and not waiting and self._is_read()

    def _operate(self) -> tuple[set[int], list[dict[str, Any]]]:
        """Do what docs/policies.md says of each reason. Returns the versions of policies that are needed, and what waited."""
        needed = self._run_old_policies()
        waiting = self._waiting()
        if not (stuck := {one["stream"]: self._reasons(one) for one in waiting if one["stuck"]}):
            return needed, waiting
        self.sent += 1
        enlarge = {"id": f"e{self.sent}", "type": "EnlargeDepot", "data": {"by": 500}}
        commands = [{"stream": f"depots/{depot}", **enlarge} for depot in range(DEPOTS)]
        for stream, reasons in stuck.items():
            if PARKED in reasons and self.release == 2 and 1 not in needed:
                self.samefold("parked", "replay", "policy_parcels", stream)
            if not _has_otherwise(stream) and not reasons.isdisjoint(DROPPED[:2]):
                commands.append({"stream": stream, "id": "ticket", "type": "Lose", "data": {}})
        self.samefold("send", "-", "--operator", "ada", "--wait", given="\n".join(map(json.dumps, commands)))
        for reason in sorted({reason.partition(":")[0] for reason in set().union(*stuck.values())}):
            if reason in DROPPED:
                self.samefold("outbox", "drop", "--yes", "--policy", "parcels", "--reason", reason)
            elif reason in SENT_AGAIN:
                self.samefold("outbox", "retry", "--policy", "parcels", "--reason", reason)
        return needed, waiting

    def _run_old_policies(self) -> set[int]:
        """Where the database is older than the switch, or new, the first release reads its events. The versions that are needed."""
        needed = {version for policy in self.samefold("policies", "--json").values() for version in policy["needs"]}
        if 1 in needed and self.release == 2 and OLD not in self._crews:
            self._crews[OLD] = self._started("policies", 1)
        return needed

    def _waiting(self, *which: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.samefold("processes", "--json", "--limit", "100000", *which)["processes"]
        return found

    def _reasons(self, one: Mapping[str, Any]) -> set[str]:
        """Why a process is stuck. Raises Found where its policy has an answer to that."""
        stream, reasons = one["stream"], {reason for thing in one["first"] if (reason := _reason(thing))}
        for reason in reasons:
            self.stuck.setdefault(reason, set()).add(stream)
        is_answered = _has_otherwise(stream) and any(reason.startswith("refused") for reason in reasons)
        _require(not is_answered, f"{stream} is stuck: {reasons}")
        return reasons

    def repaired(self) -> dict[str, int]:
        """How many processes were stuck, by the reason."""
        return {reason: len(streams) for reason, streams in sorted(self.stuck.items())}

    def _is_read(self) -> bool:
        ends = topics.describe(self.world, self.world.events_topic).end
        with connect(self.world, "weather") as db:
            rows = db.execute("select partition, next_offset from positions where next_offset >= 0").fetchall()
        return all(offset >= ends[partition] for partition, offset in rows)

    def _counted(self) -> Counter[str]:
        """What became of all that was asked. Raises Found where that is wrong."""
        counted = Counter[str]()
        with connect(self.world, "weather") as db:
            live: dict[str, str] = dict(db.execute("select view, table_name from live").fetchall())
            [(cents,)] = db.execute(f"select sum(cents)::bigint from {live['balances']}".encode()).fetchall()
            transfers = db.execute(f"select transfer, state, target from {live['transfers']}".encode()).fetchall()
            steps: dict[str, str] = dict(
                db.execute(f"select stream, state->>'step' from {live['streams_parcels']}".encode()).fetchall()
            )
        _require(cents == ACCOUNTS * BROUGHT, f"the accounts hold {cents}, and clients brought {ACCOUNTS * BROUGHT}")
        for transfer, state, target in transfers:
            counted[state] += 1
            is_right = state in ("completed", "failed") or (state == "refunded" and target == f"{ACCOUNTS}")
            _require(is_right, f"transfer {transfer} to {target} is {state}")
        asked = {one.stream.partition("/")[2] for one, _ in self._asked if one.type == "RequestTransfer"}
        paid = {name for name, first in self._instalments.items() if first < datetime.now(UTC).date()}
        lost = (asked | paid) - {transfer for transfer, _, _ in transfers}
        _require(not lost, f"no transfer is {sorted(lost)[:5]}")
        for one, asked_at in self._asked:
            if one.type == "SendParcel":
                step = steps.get(one.stream, "nowhere")
                counted[step] += 1
                _require(step in ("arrived", "lost"), f"{one.stream} is {step}")
                if asked_at >= self.posts_since:
                    self._require_posts(one.stream.partition("/")[2], f"Parcel{step.title()}")
        counted["posts"] = sum(map(len, self.endpoints.taken.values()))
        counted["requests"] = self.endpoints.requests
        self.samefold("verify")
        return counted

    def _require_posts(self, parcel: str, end: str) -> None:
        for name, taken in self.endpoints.taken.items():
            came = [body["what"] for body in taken.values() if body["parcel"] == parcel]
            is_right = sorted(came) == sorted(["ParcelSent", end])
            _require(is_right, f"endpoint {name} got {came} of parcel {parcel}")
            _require(name != "archive" or came[0] == "ParcelSent", f"endpoint {name} got {came} of parcel {parcel}")


def _has_otherwise(stream: str) -> bool:
    """Whether the wish of such a parcel names what follows from a refusal."""
    context, _, name = stream.partition("/")
    return context == "parcels" and int(name) % 2 == 1


def _reason(thing: Mapping[str, Any]) -> str | None:
    """Why a person is needed; of a rejection with its code."""
    if thing["what"] == PARKED:
        return PARKED
    return thing["why"] and ": ".join(thing["why"].split(": ")[: 2 if thing["why"].startswith("refused: ") else 1])


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise Found(what)
