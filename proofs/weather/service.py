"""The service of a month: this code with parcels, which depots refuse for every reason, and posts that tell of them."""

from __future__ import annotations

import shutil
from pathlib import Path

from demo.tree import PACKAGES
from proofs.patches import ROOT

BROKEN = 7
"""The first release can't take in a parcel with such a number, or a multiple of it."""

DEPOTS = '''
from dataclasses import dataclass, replace
from typing import TypeAlias, assert_never

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
        case TakeIn(number=number) if number % BROKEN == 0:
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


Event: TypeAlias = ParcelSent | ParcelArrived | ParcelLost


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


Command: TypeAlias = SendParcel | Arrive | Lose


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
        case _:
            assert_never(event)
'''

POLICY = """
from collections.abc import Iterable

from domain.depots import TakeIn
from domain.parcels import Arrive, Lose, ParcelArrived, ParcelLost, ParcelSent
from policies.engine import At, Post, Send

VERSION = 1


def react(event: ParcelSent | ParcelArrived | ParcelLost, at: At) -> Iterable[Send | Post]:
    for endpoint in ("archive", "tracking"):
        yield Post(endpoint, {"parcel": at.id, "what": type(event).__name__})
    match event:
        case ParcelSent(depot=depot, number=number):
            take_in = TakeIn(parcel=at.id, number=number)
            yield Send(f"depots/{depot}", take_in, then=Arrive(), otherwise=Lose() if number % 2 else None)
"""


def make(folder: Path) -> None:
    """Write the code of the first release into `folder`."""
    for package in PACKAGES:
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "domain" / "depots.py").write_text(DEPOTS.replace("BROKEN", str(BROKEN)))
    (folder / "domain" / "parcels.py").write_text(PARCELS)
    (folder / "policies" / "parcels.py").write_text(POLICY)


def make_next(folder: Path, before: Path) -> None:
    """Write the second release, which takes in all parcels. Its policy has another version."""
    shutil.copytree(before, folder)
    (folder / "domain" / "depots.py").write_text(DEPOTS.replace("BROKEN", f"{10**9}"))
    (folder / "policies" / "parcels.py").write_text(POLICY.replace("VERSION = 1", "VERSION = 2"))
