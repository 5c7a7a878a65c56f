"""`python -m proofs.one_fault --minutes 10 --seed 1`: generated services, each with one fault in one file, among others that work.

A town is a copy of this repository with some contexts more, each a service of its own kind of value with a fault in its context,
its view or its policy. It runs as in production. Clients send each context all values that its type may and may not take; all the
while the bank, which has no fault, must answer every command, and its views must be up to date. The last line counts them, or a
line begins with FOUND, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx

from infra.settings import PREFIX
from proofs.patches import ROOT
from tests.engine.api.front import is_ready
from tools.dev.process import free_ports
from tools.dev.stack import Stack
from tools.testing.fixtures import world_of
from tools.testing.waiting import until

TOGETHER = 40
"""Services of one town."""
LIMIT_S = "0.5"
ANSWER_S = 60.0
HUGE = "9" * 400
TIMES = [
    "2026-12-01T10:00:00Z",
    "2026-12-01T10:00:00",
    "9999-12-31T23:59:59-12:00",
    "0001-01-01T00:00:00+14:00",
    "2026-13-01T10:00:00Z",
]
VALUES: dict[str, Sequence[str]] = {
    "int": ["1", "9223372036854775807", "9223372036854775808", "-9223372036854775809", HUGE, "1e3", "1.5", "true"],
    "bool": ["true", "1", "null"],
    "str": ['"a"', '""', r'"\u0000"', r'"\ud800"', r'"\u200b"', json.dumps("x" * 100_000), json.dumps("😀" * 60), "1"],
    "Text": ['"a"', r'"\u0007"', json.dumps("😀" * 60), json.dumps("x" * 201)],
    "Decimal": ['"1.5"', '"1e1001"', f'"{HUGE * 3}"', '"NaN"', '"-0"', '"Infinity"', "1.5"],
    "float": ["1.5", "1e308", "1e309", "-0.0", '"NaN"', HUGE],
    "date": ['"2026-12-01"', '"0000-01-01"', '"9999-12-31"', '"2026-02-30"'],
    "Moment": [f'"{one}"' for one in TIMES],
    "AwareDatetime": [f'"{one}"' for one in TIMES],
    "bytes": ['"YQ=="', '"%%"', '""'],
    "UUID": ['"8e8e0d7c-9f52-4f6c-8b2c-3f2f0a1b2c3d"', '"no"'],
    "int | None": ["null", "1", "9223372036854775808"],
    "tuple[int, ...]": ["[]", "[1, 2]", "[9223372036854775808]", "[null]"],
    "dict[str, int]": ["{}", '{"a": 1}', '{"a": 1, "a": 2}', '{"\\u0000": 1}', '{"a": 9223372036854775808}'],
}
"""By type, as JSON: what it takes and what it does not."""
COLUMNS = {"int", "bool", "str", "Text", "Decimal", "date", "bytes", "UUID", "Moment", "AwareDatetime"}
"""Types that a column has; of others a view keeps the text."""

CONTEXT = '''
"""Things."""
from dataclasses import dataclass, replace
from datetime import date, datetime
from decimal import Decimal
from typing import TypeAlias
from uuid import UUID

from pydantic import AwareDatetime

from domain.language import Moment, Refusal, Text, fact


@fact
class Kept:
    value: TYPE


Event: TypeAlias = Kept


@fact
class Keep:
    value: TYPE


Command: TypeAlias = Keep


class NotNow(Refusal):
    """Not now."""


STATE_VERSION = 1


@dataclass(frozen=True, slots=True)
class State:
    times: int = 0


def decide(command: Command, state: State) -> list[Event]:
    DECIDE
    return [Kept(value=command.value)]


def evolve(state: State, event: Event) -> State:
    EVOLVE
    return replace(state, times=state.times + 1)
'''
VIEW = '''
"""What was kept?"""
from datetime import date, datetime
from decimal import Decimal
from typing import NamedTuple
from uuid import UUID

from domain.CONTEXT import Kept
from projections.engine import At, Key

VERSION = 1


class Row(NamedTuple):
    name: Key[str]
    value: COLUMN | None
    times: int


def evolve(row: Row | None, event: Kept, at: At) -> Row | None:
    times = (row.times if row else 0) + 1
    VIEW
    return Row(at.id, VALUE, times)
'''
POLICY = '''
"""What follows?"""
from collections.abc import Iterable
from datetime import timedelta

from domain.CONTEXT import Keep, Kept
from policies.engine import At, Post, Send

VERSION = 1


def react(event: Kept, at: At) -> Iterable[Send | Post]:
    if at.id.startswith("from"):
        return
    POLICY
    yield Send(f"{at.context}/from-{at.id}", Keep(value=event.value))
'''
SHARED = {
    "raises": "raise ValueError('no')",
    "never ends": "while True: pass",
    "backtracks": "__import__('re').fullmatch('(a*)*b', 'a' * 40)",
    "is deep": "(f := lambda n: f(n + 1))(0)",
    "ends the process, it thinks": "raise SystemExit(3)",
    "catches all": "\n    ".join(["while True:", "    try:", "        while True: pass", "    except Exception: pass"]),
}
FAULTS: dict[str, dict[str, str]] = {
    "": {"none": ""},
    "DECIDE": SHARED
    | {
        "another type": "return ['no event']",
        "nothing": "return None",
        "too many": "return [Kept(value=command.value)] * 200_000",
        "an unfit event": "return [Kept.__new__(Kept)]",
    },
    "EVOLVE": SHARED | {"another type": "return event", "nothing": "return None"},
    "VIEW": SHARED
    | {
        "another type": "return (at.id, 1)",
        "another key": "return Row('x' + at.id, None, times)",
        "a key too long": "return Row(at.id + 'x' * 5_000, None, times)",
        "NUL": "return Row(at.id, None, '\\0')",
        "too large": "return Row(at.id, None, 2**70)",
        "no number": "return Row(at.id, None, float('nan'))",
    },
    "POLICY": SHARED
    | {
        "a name too long": "yield Send(at.context + '/' + 'x' * 300, Keep(value=event.value))",
        "an unknown context": "yield Send('nowhere/1', Keep(value=event.value))",
        "no command": "yield Send(at.stream, event)",
        "no wish": "yield 7",
        "too many": "yield from [Send(at.context + '/from-1', Keep(value=event.value))] * 2_000",
        "never": "yield Send(at.context + '/from-1', Keep(value=event.value), due=at.time + timedelta(days=10**7))",
    },
}
"""By place, one line of code for each."""


class Fault(NamedTuple):
    number: int
    kind: str
    place: str
    name: str

    def __str__(self) -> str:
        return f"c{self.number}: {self.kind}, {self.place or 'no place'}: {self.name}"

    def files(self) -> Iterator[tuple[str, str]]:
        """Where, and what they say."""
        column = {"Text": "str", "Moment": "datetime", "AwareDatetime": "datetime"}.get(self.kind, self.kind)
        words = dict.fromkeys(filter(None, FAULTS), "") | {"CONTEXT": f"c{self.number}", "TYPE": self.kind}
        words["VALUE"] = "event.value" if self.kind in COLUMNS else "repr(event.value).replace('\\0', '')"
        words["COLUMN"] = column if self.kind in COLUMNS else "str"
        if self.place:
            words[self.place] = FAULTS[self.place][self.name]
        yield f"domain/c{self.number}.py", _filled(CONTEXT, words)
        yield f"projections/v{self.number}.py", _filled(VIEW, words)
        yield f"policies/p{self.number}.py", _filled(POLICY, words)


def _filled(text: str, words: Mapping[str, str]) -> str:
    return re.sub("|".join(words), lambda found: words[found[0]], text).lstrip()


def town(chance: random.Random) -> list[Fault]:
    every = [(place, name) for place, faults in FAULTS.items() for name in faults]
    return [Fault(n, chance.choice(list(VALUES)), *chance.choice(every)) for n in range(TOGETHER)]


@contextmanager
def running(faults: Sequence[Fault], folder: Path, stack: Stack) -> Iterator[httpx.Client]:
    """The town's processes, ready; a client of its API."""
    tree = folder / "tree"
    tree.mkdir(parents=True)
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, capture_output=True, check=True).stdout
    subprocess.run(["tar", "x", "-C", tree], input=archive, check=True)
    for one in faults:
        for name, text in one.files():
            (tree / name).write_text(text)
    with world_of(stack) as world:
        others = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
        ours = {f"{PREFIX}DECIDE_LIMIT_S": LIMIT_S, f"{PREFIX}MAX_COMMAND_BYTES": "900000", "PYTHONPATH": str(tree)}
        environment = others | world.environment() | ours
        samefold = [sys.executable, "-c", "from tools.cli import main; main()"]

        def run(*arguments: str) -> None:
            done = subprocess.run(
                [*samefold, *arguments], cwd=tree, env=environment, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, f"samefold {' '.join(arguments)}: {done.stdout}{done.stderr}"

        for words in ("db upgrade", "db revision -m town", "db upgrade", "topics --create"):
            run(*words.split())
        [port], log = free_ports(1), folder / "log"
        with log.open("w") as output:
            process = subprocess.Popen(
                [*samefold, "run", "all", "--port", str(port)], cwd=tree, env=environment, stdout=output, stderr=output
            )
        try:
            url = f"http://127.0.0.1:{port}"
            until(lambda: is_ready(url) or process.poll() is not None, "the town is ready")
            with httpx.Client(base_url=url, timeout=ANSWER_S + 10) as client:
                yield client
            assert process.poll() is None, log.read_text()[-3_000:]
        finally:
            process.terminate()
            process.wait(60)


def found_in(client: httpx.Client, faults: Sequence[Fault], chance: random.Random) -> Iterator[str]:
    """Send everything to everybody; what is wrong."""
    sends = [(one, value) for one in faults for value in VALUES[one.kind]] * 2
    chance.shuffle(sends)
    answers: Counter[str] = Counter()
    for number, (one, value) in enumerate(sends):
        answer = client.post(
            f"/c{one.number}/{chance.choice('abc')}/keep",
            content=f'{{"value": {value}}}',
            headers={"Content-Type": "application/json", "Idempotency-Key": f'"{number}"', "Prefer": "wait=3"},
        )
        what = "accepted" if answer.is_success else answer.json()["code"]
        answers[f"{answer.status_code} {what}"] += 1
        if answer.status_code >= 500 and what != "failed":
            yield f"{one}, {value[:50]}: {answer.status_code} {answer.text[:300]}"
        if number % 5 == 0:
            yield from _bank(client, number)
    yield from _bank(client, len(sends))
    ready = client.get("/health/ready").json()
    print(dict(answers), ready.get("stopped_views"), ready.get("standing_still"), flush=True)
    wanted = {f"v{one.number}" for one in faults if one.place == "VIEW"}
    if more := set(ready.get("stopped_views", {})) - wanted:
        yield f"these views have no fault, and stopped: {sorted(more)}"


def _bank(client: httpx.Client, number: int) -> Iterator[str]:
    """An account is opened, which is answered, and its row is there."""
    body = {"overdraft_limit": 0, "on": "2026-01-01"}
    key = {"Idempotency-Key": f'"o{number}"', "Prefer": f"wait={ANSWER_S:g}"}
    opened = client.post(f"/accounts/n{number}/open-account", json=body, headers=key)
    if opened.status_code not in (200, 201):
        yield f"the bank: {opened.status_code} {opened.text[:300]}"
        return
    position = opened.json()["position"]
    row = client.get(f"/views/balances/n{number}", params={"after": position}, headers={"Prefer": f"wait={ANSWER_S:g}"})
    if row.status_code != 200:
        yield f"the bank's balances: {row.status_code} {row.text[:300]}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m proofs.one_fault", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    asked = parser.parse_args()
    ends, chance, services, wrong = time.monotonic() + 60 * asked.minutes, random.Random(asked.seed), 0, 0
    print(f"seed {asked.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="samefold-") as place:
        stack = Stack(Path(place))
        stack.up()
        try:
            while not services or time.monotonic() < ends:
                faults = town(chance)
                folder = Path(place) / f"town-{services}"
                with running(faults, folder, stack) as client:
                    for one in found_in(client, faults, chance):
                        print(f"FOUND {one}", flush=True)
                        wrong += 1
                services += len(faults)
                print(f"{services} services, {wrong} findings", flush=True)
        finally:
            stack.down()
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
