"""The service of a month: this code with parcels, whose first release meets every reason of a dead letter, and posts that tell of
them.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from demo.tree import PACKAGES
from proofs.patches import ROOT

FAULTS = {"FAILS": 7, "INVALID": 31, "LARGE": 61, "POISON": 67, "CYCLE": 71}
"""The first release does so with parcels that have such a number, or a multiple of it."""
NEVER = 10**9

DEPOTS = '''
from dataclasses import dataclass, replace
from typing import Annotated, TypeAlias, assert_never

from pydantic import Field

from domain.language import Cents, Refusal, Text, fact


@fact
class DepotEnlarged:
    by: Cents


@fact
class ParcelTakenIn:
    parcel: Text


Event: TypeAlias = DepotEnlarged | ParcelTakenIn


@fact
class EnlargeDepot:
    by: Cents


@fact
class TakeIn:
    parcel: Text
    number: Cents
    label: Annotated[str, Field(max_length=2_000_000)] = ""


Command: TypeAlias = EnlargeDepot | TakeIn


class DepotFull(Refusal):
    """The depot has no room."""


STATE_VERSION = 1


@dataclass(frozen=True, slots=True)
class State:
    room: int = 0


def decide(command: Command, state: State) -> list[Event]:
    match command:
        case EnlargeDepot(by=by):
            return [DepotEnlarged(by=by)]
        case TakeIn(number=number) if number % FAILS == 0:
            raise RuntimeError("the first release can't take it in")
        case TakeIn() if state.room == 0:
            raise DepotFull
        case TakeIn(parcel=parcel):
            return [ParcelTakenIn(parcel=parcel)]
        case _:
            assert_never(command)


def evolve(state: State, event: Event) -> State:
    match event:
        case DepotEnlarged(by=by):
            return replace(state, room=state.room + by)
        case ParcelTakenIn():
            return replace(state, room=state.room - 1)
        case _:
            assert_never(event)
'''

PARCELS = '''
from dataclasses import dataclass
from typing import TypeAlias, assert_never

from domain.language import Cents, Refusal, Text, fact


@fact
class ParcelSent:
    depot: Text
    number: Cents


@fact
class ParcelArrived:
    pass


@fact
class ParcelLost:
    refusal: Text


@fact
class ParcelTurned:
    pass


Event: TypeAlias = ParcelSent | ParcelArrived | ParcelLost | ParcelTurned


@fact
class SendParcel:
    depot: Text
    number: Cents


@fact
class Arrive:
    pass


@fact
class Lose:
    refusal: Text = ""


@fact
class Turn:
    pass


Command: TypeAlias = SendParcel | Arrive | Lose | Turn


class ParcelIsElsewhere(Refusal):
    """The parcel is not on its way."""


STATE_VERSION = 1


@dataclass(frozen=True, slots=True)
class State:
    step: str = "new"


def decide(command: Command, state: State) -> list[Event]:
    match command, state.step:
        case SendParcel(depot=depot, number=number), "new":
            return [ParcelSent(depot=depot, number=number)]
        case Arrive(), "sent":
            return [ParcelArrived()]
        case Lose(refusal=refusal), "sent":
            return [ParcelLost(refusal=refusal)]
        case Turn(), _:
            return [ParcelTurned()]
        case _:
            raise ParcelIsElsewhere


def evolve(state: State, event: Event) -> State:
    match event:
        case ParcelSent():
            return State("sent")
        case ParcelArrived():
            return State("arrived")
        case ParcelLost():
            return State("lost")
        case ParcelTurned():
            return state
        case _:
            assert_never(event)
'''

POLICY = """
from collections.abc import Iterable

from domain.depots import TakeIn
from domain.parcels import Arrive, Lose, ParcelArrived, ParcelLost, ParcelSent, ParcelTurned, Turn
from policies.engine import At, Post, Send

VERSION = 1
ON_POISON = "park"


def react(event: ParcelSent | ParcelArrived | ParcelLost | ParcelTurned, at: At) -> Iterable[Send | Post]:
    if not isinstance(event, ParcelTurned):
        for endpoint in ("archive", "tracking"):
            yield Post(endpoint, {"parcel": at.id, "what": type(event).__name__, "time": f"{at.time:%FT%TZ}"})
    match event:
        case ParcelSent(depot=depot, number=number):
            if number % POISON == 0:
                raise RuntimeError("the first release can't react to it")
            target = f"depots/{depot}" + (chr(10) if number % INVALID == 0 else "")
            take_in = TakeIn(parcel=at.id, number=number, label="x" * (1_200_000 if number % LARGE == 0 else 0))
            yield Send(target, take_in, then=Arrive(), otherwise=Lose() if number % 2 else None)
            if number % CYCLE == 0:
                yield Send(at.stream, Turn())
        case ParcelTurned() if CYCLE < NEVER:
            yield Send(at.stream, Turn())
"""


def make(folder: Path) -> None:
    """Write the code of the first release into `folder`."""
    for package in PACKAGES:
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "domain" / "parcels.py").write_text(PARCELS)
    _write(folder, FAULTS)


def make_next(folder: Path, before: Path) -> None:
    """Write the second release, which has none of the faults. Its policy has another version."""
    shutil.copytree(before, folder)
    _write(folder, dict.fromkeys(FAULTS, NEVER))
    policy = folder / "policies" / "parcels.py"
    policy.write_text(policy.read_text().replace("VERSION = 1", "VERSION = 2"))


def _write(folder: Path, faults: Mapping[str, int]) -> None:
    numbers = "".join(f"{name} = {number}\n" for name, number in {**faults, "NEVER": NEVER}.items())
    (folder / "domain" / "depots.py").write_text(numbers + DEPOTS)
    (folder / "policies" / "parcels.py").write_text(numbers + POLICY)
