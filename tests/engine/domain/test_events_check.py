"""make test + test-all: some ways first. What `samefold events check` refuses, and that what it says mends it.

The cures are taken out of the messages: the lines that they show go into the file, and a case only completes an upcaster's body.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from subprocess import CompletedProcess
from types import ModuleType
from typing import Any, TypeAlias
from unittest.mock import Mock

import pytest

import domain
from domain.engine import contexts as contexts_module
from domain.engine.contexts import BadContext, Context, contexts
from domain.engine.released import read
from policies.engine import outbox, policy
from policies.engine.policy import Policy, policy_of
from policies.engine.public_schema import NothingPublic
from projections.engine.views import core_views
from projections.engine.views.core_views import snapshot_view
from projections.engine.views.view import View, view_of
from tools import golden_results as results
from tools import release_check
from tools.testing.fixtures import Samefold

ROOMS = '''"""Rooms of a hotel."""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal, TypeAlias

from pydantic import Field

from domain.language import Text, fact


@fact
class Person:
    name: Text = ""
    phone: Text = "none"


@fact
class RoomBooked:
    guest: Text
    nights: Annotated[int, Field(ge=1, le=30)]
    bed: Literal["single", "double"] = "single"
    payer: Person = Person()
    extras: list[Text] = field(default_factory=list)


@fact
class RoomFreed:
    reason: Text


Event: TypeAlias = RoomBooked | RoomFreed


@fact
class BookRoom:
    guest: Text
    nights: Annotated[int, Field(ge=1, le=30)]


@fact
class FreeRoom:
    reason: Text


Command: TypeAlias = BookRoom | FreeRoom


STATE_VERSION = 1


@dataclass(frozen=True, slots=True)
class State:
    taken: bool = False
    times: int = 0


def decide(command: Command, state: State) -> list[Event]:
    match command:
        case BookRoom():
            return [RoomBooked(guest=command.guest, nights=command.nights)]
        case FreeRoom():
            return [RoomFreed(reason=command.reason)]


def evolve(state: State, event: Event) -> State:
    return State(isinstance(event, RoomBooked), state.times + 1)
'''
GUESTS = '''"""Guests of a hotel."""

from dataclasses import dataclass
from typing import TypeAlias

from domain.language import Text, fact


@fact
class GuestCame:
    name: Text


Event: TypeAlias = GuestCame
Command: TypeAlias = GuestCame
STATE_VERSION = 1


@dataclass(frozen=True, slots=True)
class State:
    pass


def decide(command: Command, state: State) -> list[Event]:
    return [command]


def evolve(state: State, event: Event) -> State:
    return state
'''
VIEW = '''"""How often was a room booked or freed?"""

from typing import NamedTuple

from domain.rooms import Event
from projections.engine import At, Key

VERSION = 1


class RoomUse(NamedTuple):
    room: Key[str]
    events: int


def evolve(row: RoomUse | None, event: Event, at: At) -> RoomUse | None:
    return RoomUse(at.id, (row.events if row else 0) + 1)
'''
POLICY = '''"""Who books extras comes again."""

from collections.abc import Iterable
from datetime import timedelta

from domain.rooms import BookRoom, Event
from policies.engine import At, Send

VERSION = 1


def react(event: Event, at: At) -> Iterable[Send]:
    if hasattr(event, "extras"):
        yield Send(at.stream, BookRoom(guest="Ada", nights=1), due=at.time + timedelta(days=1 + len(event.extras)))
'''
NEW_VIEW = VIEW.replace("RoomUse", "Stay").replace("How often", "And again: how often")
SUMS = '''"""How much has happened at each place?"""

from collections.abc import Iterable
from typing import NamedTuple

from domain.rooms import Event
from projections.engine import At, Key, Sum

VERSION = 1


class Happened(NamedTuple):
    stream: Key[str]
    events: Sum[int]


def delta(event: Event, at: At) -> Iterable[Happened]:
    yield Happened(at.stream, 1)
'''
DOMAIN, USE, STAYS = "domain/rooms.py", "projections/room_use.py", "projections/stays.py"
NIGHTS = "policies/nights.py"
RECORD = "domain/released/rooms.json"


class Tree:
    """A context, a view and a policy of a hotel in a folder of their own, beside this code's, and the record of their releases."""

    def __init__(self, folder: Path, samefold: Samefold, patch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.record = folder / RECORD
        self._samefold = samefold
        self._patch = patch
        self._known: dict[str, Context] = {}
        for name in (RECORD, USE, NIGHTS):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
        patch.setattr(sys, "dont_write_bytecode", True)
        patch.setattr(domain, "__path__", [*domain.__path__, str(folder / "domain")])
        patch.setattr(contexts_module, "read", partial(read, folder=self.record.parent))
        patch.setattr(core_views, "all_views", self.load)
        patch.setattr(policy, "discover", self.load_policies)
        patch.setattr(results, "publication", Mock(side_effect=NothingPublic("There is none.", "")))
        for module in (release_check, outbox, policy):
            patch.setattr(module, "contexts", lambda: self._known)
        for function in (release_check.check, release_check.release):
            patch.setattr(function, "__defaults__", (None, self.record.parent))

    def load(self) -> dict[str, View]:
        """The views of the hotel, as the files are now."""
        unload()
        importlib.invalidate_caches()
        self._known = {
            name: one for name, one in contexts.__wrapped__().items() if (self.folder / f"domain/{name}.py").exists()
        }
        views = list(map(snapshot_view, self._known.values()))
        views += [view_of(module, self._known.values()) for module in self._modules("projections")]
        return {view.name: view for view in views}

    def load_policies(self) -> dict[str, Policy]:
        return {module.__name__.rpartition(".")[2]: policy_of(module) for module in self._modules("policies")}

    def _modules(self, folder: str) -> Iterator[ModuleType]:
        for file in self.folder.glob(f"{folder}/*.py"):
            module = ModuleType(f"{folder}.{file.stem}")
            self._patch.setitem(sys.modules, module.__name__, module)
            exec(file.read_text(), vars(module))
            yield module

    def samefold(self, *words: str, code: int = 0) -> CompletedProcess[str]:
        done = copy_context().run(self._samefold, *words)  # it says that the upcasters need not be tried
        assert done.returncode == code, f"{done.stdout}\n{done.stderr}"
        return done

    def check(self, code: int = 0) -> str:
        done = self.samefold("events", "check", code=code)
        return done.stdout + done.stderr

    def report(self, code: int = 0) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.samefold("events", "check", "--json", code=code).stdout)
        return found

    def write(self, name: str, *edits: tuple[str, str]) -> None:
        """Replace each text by another one; an empty one stands for a file that is not there yet."""
        file = self.folder / name
        text = file.read_text() if file.exists() else ""
        for old, new in edits:
            assert text == old == "" or text.count(old) == 1, (name, old)
            text = text.replace(old, new) if old else new
        file.write_text(text)


def unload() -> None:
    for name in ("rooms", "guests"):
        sys.modules.pop(f"domain.{name}", None)
        vars(domain).pop(name, None)


released: list[str] = []
"""The record of the hotel, once it was released: to find its bodies takes a while."""


@pytest.fixture
def hotel(tmp_path: Path, samefold: Samefold, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tree]:
    made = Tree(tmp_path / "hotel", samefold, monkeypatch)
    made.write(DOMAIN, ("", ROOMS))
    made.write(USE, ("", VIEW))
    made.write(NIGHTS, ("", POLICY))
    if not released:
        assert "Wrote domain/released/rooms.json" in made.samefold("events", "release").stdout
        released.append(made.record.read_text())
    made.write(RECORD, (made.record.read_text() if made.record.exists() else "", released[0]))
    yield made
    unload()


# The cures, out of the messages


def into_class(tree: Tree, line: str, name: str) -> None:
    tree.write(DOMAIN, (f"class {name}:\n", f"class {name}:\n    {line}\n"))


def below_class(tree: Tree, lines: str, name: str) -> None:
    text = (tree.folder / DOMAIN).read_text()
    [whole] = re.findall(rf"^class {name}:\n(?:    .*\n)+", text, re.MULTILINE)
    tree.write(DOMAIN, (whole, f"{whole}\n\n{lines}"))


def shown_upcaster(tree: Tree, said: str, name: str, body: str) -> None:
    """The upcaster that the message shows, with its body, and the import."""
    [(head, _)] = re.findall(r"^ *(@upcaster\(.*\)\n *def .*:\n)( *return .*)$", said, re.MULTILINE)
    below_class(tree, "\n".join(line.strip() for line in head.splitlines()) + f"\n    return {body}\n", name)
    [line] = re.findall(r"`(from domain\.language import .*?)`", said)
    tree.write(DOMAIN, ("\n\n\n@fact\nclass Person:", f"\n{line}\n\n\n@fact\nclass Person:"))


Cure: TypeAlias = Callable[[Tree, str], None]


def version(body: str) -> Cure:
    """VERSION and the upcaster, which makes this of `body`."""

    def cure(tree: Tree, said: str) -> None:
        [(line, name)] = re.findall(r"`(VERSION: .*?)` into (\w+)", said)
        shown_upcaster(tree, said, name, body)
        into_class(tree, line, name)

    return cure


def default(tree: Tree, said: str) -> None:
    [name] = re.findall(r"Give (\w+) a default", said)
    tree.write(DOMAIN, (f"    {name}: int\n", f"    {name}: int = 0\n"))


def missing_step(body: str) -> Cure:
    def cure(tree: Tree, said: str) -> None:
        [name] = re.findall(r"@upcaster\((\w+), ", said)
        shown_upcaster(tree, said, name, body)

    return cure


def class_line(tree: Tree, said: str) -> None:
    [(line, name)] = re.findall(r"[Ww]rite `([^`]*)` into (\w+)", said)
    into_class(tree, line, name)


def raised(tree: Tree, said: str) -> None:
    then = "(?:db revision|policies switch nights)"
    [(name, file, number)] = set(re.findall(rf"Raise (\w+) in (\S+\.py) to (\d+); then `samefold {then}`", said))
    text = (tree.folder / file).read_text()
    (tree.folder / file).write_text(re.sub(rf"^{name} = \d+", f"{name} = {number}", text, count=1, flags=re.MULTILINE))


def moment(tree: Tree, said: str) -> None:
    [(line, name, plain, field, _)] = set(
        re.findall(r"With `(.*)`, write `(.*)` for `(.*)` in `(.*)` of (\w+)\.", said)
    )
    tree.write(DOMAIN, (f"    {field}: {plain} | None", f"    {field}: {name} | None"), (PLAIN_IMPORT, f"{line}\n"))


def restored(tree: Tree, said: str) -> None:
    assert re.search(r"Restore the (class|file)", said)
    (tree.folder / DOMAIN).write_text(ROOMS)
    (tree.folder / USE).write_text(VIEW)
    (tree.folder / NIGHTS).write_text(POLICY)


@dataclass(frozen=True)
class Case:
    """What is changed, what the message must contain, and what it says to do about it."""

    edits: Sequence[tuple[str, str]]
    says: str
    cure: Cure
    file: str = DOMAIN


BOOKED_2: Sequence[tuple[str, str]] = [("class RoomBooked:\n", "class RoomBooked:\n    VERSION: ClassVar[int] = 2\n")]
STEP = """
from domain.language import Body, upcaster


@upcaster(RoomBooked, 1)
def step(body: Body) -> Body:
    return {}


Event: TypeAlias"""
SAME = ("\nEvent: TypeAlias", STEP.replace("{}", "body"))
PLAIN_IMPORT = "from datetime import datetime\n"
CLEANED: Sequence[tuple[str, str]] = [
    ("from dataclasses import", f"{PLAIN_IMPORT}from dataclasses import"),
    (
        "Event: TypeAlias = RoomBooked",
        "@fact\nclass RoomCleaned:\n    at: datetime | None\n\n\nEvent: TypeAlias = RoomBooked",
    ),
    ("RoomBooked | RoomFreed", "RoomBooked | RoomFreed | RoomCleaned"),
    ("BookRoom | FreeRoom", "BookRoom | FreeRoom | RoomCleaned"),
]
CASES = {
    "a time that may have no zone in a new event": Case(
        CLEANED,
        "rooms.RoomCleaned: field 'at' is a `datetime`, which may have no time zone, and then is refused",
        moment,
    ),
    "a member of a Literal added": Case(
        [('"double"] = "single"', '"double", "suite"] = "single"')],
        "field 'bed' takes other values: ['single', 'double'] became ['single', 'double', 'suite']; "
        "agents of the release before could not read it under this name",
        version("body"),
    ),
    "a field renamed": Case(
        [("class RoomBooked:\n    guest: Text\n", "class RoomBooked:\n    visitor: Text\n")],
        "rooms.RoomBooked: field 'guest' was removed; field 'visitor' is new, without a default",
        version('{"visitor": body.pop("guest"), **body}'),
    ),
    "a field renamed behind an alias": Case(
        [('    phone: Text = "none"', '    number: Text = Field("none", alias="phone")')],
        "rooms.RoomBooked: field 'payer.phone' was removed",
        version('{**body, "payer": {"name": body["payer"]["name"], "number": body["payer"]["phone"]}}'),
    ),
    "a new field without a default, which gets one": Case(
        [("class RoomFreed:\n", "class RoomFreed:\n    hour: int\n")],
        "rooms.RoomFreed: field 'hour' is new, without a default",
        default,
    ),
    "a changed default": Case(
        [('"double"] = "single"', '"double"] = "double"')],
        "field 'bed' had the default 'single', which older bodies rely on",
        version('{"bed": "single"} | body'),
    ),
    "a name used again": Case(
        [("class RoomFreed:\n    reason: Text\n", "class RoomFreed:\n    hours: int\n    paid: bool\n")],
        "rooms.RoomFreed: the name was released for another event, with the fields reason",
        version('{"hours": 0, "paid": False}'),
    ),
    "an event removed": Case(
        [("Event: TypeAlias = RoomBooked | RoomFreed", "Event: TypeAlias = RoomBooked")],
        "rooms.RoomFreed: it was released and is not in `Event` any more, but the log may hold it",
        restored,
    ),
    "an event renamed": Case(
        [("class RoomFreed:", "class RoomVacated:"), ("RoomBooked | RoomFreed", "RoomBooked | RoomVacated")],
        'write `stored_as: ClassVar[str] = "RoomFreed"` into RoomVacated',
        class_line,
    ),
    "a command removed": Case(
        [("Command: TypeAlias = BookRoom | FreeRoom", "Command: TypeAlias = BookRoom")],
        "rooms.FreeRoom: it was released and is not in `Command` any more, but one may be on its way",
        restored,
    ),
    "a command renamed": Case(
        [("class FreeRoom:", "class VacateRoom:"), ("BookRoom | FreeRoom", "BookRoom | VacateRoom")],
        'write `stored_as: ClassVar[str] = "FreeRoom"` into VacateRoom',
        class_line,
    ),
    "a command with one field more": Case(
        [("class FreeRoom:\n", "class FreeRoom:\n    hour: int = 12\n")],
        "rooms.FreeRoom: field 'hour' is new, with a default; handlers of the release before could not read it",
        version("body"),
    ),
    "an upcaster missing": Case(
        BOOKED_2, "RoomBooked is at version 2, but nothing leads from version 1 to 2", missing_step("body")
    ),
    "an upcaster that fails": Case(
        [*BOOKED_2, ("\nEvent: TypeAlias", STEP)],
        "rooms.RoomBooked: a body of it can't be read: UnreadableEvent",
        lambda tree, said: tree.write(DOMAIN, ("    return {}", "    return body")),
    ),
    "an upcaster that is not pure": Case(
        [
            *BOOKED_2,
            (
                "\nEvent: TypeAlias",
                STEP.replace("return {}", 'SEEN.append(1)\n    return {**body, "nights": len(SEEN)}'),
            ),
            ("\n\n@fact\nclass Person:", "\nSEEN: list[int] = []\n\n\n@fact\nclass Person:"),
        ],
        "rooms.RoomBooked: its upcasters return a different body each time",
        lambda tree, said: tree.write(DOMAIN, ("len(SEEN)", "1")),
    ),
    **{
        f"an upcaster that suits only the values beside {bed}": Case(
            [*BOOKED_2, ('Literal["single", "double"] = "single"', f'Literal["{bed}"] = "{bed}"'), SAME],
            "rooms.RoomBooked: a body of it can't be read: UnreadableEvent",
            lambda tree, said, bed=bed: tree.write(
                DOMAIN, ("    return body", f'    return {{**body, "bed": "{bed}"}}')
            ),  # type: ignore[misc]
        )
        for bed in ("single", "double")
    },
    "other fields in State": Case(
        [("    times: int = 0", "    times: int = 0\n    guest: str = ''")],
        "view streams_rooms: State has other fields",
        raised,
    ),
    "another evolve": Case(
        [("state.times + 1", "state.times + 2")],
        "view streams_rooms: its result for RoomBooked differs from the release's",
        raised,
    ),
    "another evolve, of later events only": Case(
        [("isinstance(event, RoomBooked), ", "isinstance(event, RoomBooked) or state.times > 3, ")],
        "view streams_rooms: its result for RoomFreed differs from the release's",
        raised,
    ),
    "a view that folds one event otherwise": Case(
        [("+ 1)", "+ (1 if hasattr(event, 'nights') else 2))")],
        "view room_use: its result for RoomFreed differs from the release's",
        raised,
        USE,
    ),
    "a view that stops where it did not": Case(
        [("+ 1)", "+ (1 if hasattr(event, 'nights') else 1 // 0))")],
        "view room_use: its result for RoomFreed differs from the release's: it fails with ZeroDivisionError",
        raised,
        USE,
    ),
    "a policy that wishes otherwise": Case(
        [("days=1", "hours=1")],
        "policy nights: its result for RoomBooked differs from the release's",
        raised,
        NIGHTS,
    ),
    "a policy that reacts to another event, too": Case(
        [('if hasattr(event, "extras")', "if True"), ("event.extras", "getattr(event, 'extras', ())")],
        "policy nights: its result for RoomFreed differs from the release's",
        raised,
        NIGHTS,
    ),
    "a view's columns": Case(
        [("    events: int\n", "    uses: int\n")], "view room_use: it has other columns", raised, USE
    ),
}


@pytest.mark.slow_but("a field renamed", "an upcaster missing", "another evolve", "a view's columns")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_it_is_refused_and_what_the_message_says_mends_it(hotel: Tree, case: Case) -> None:
    hotel.write(case.file, *case.edits)
    said = hotel.check(code=1)
    assert case.says in said
    refusals = [line for line in said.splitlines() if not line.startswith(" ")]
    assert len(refusals) == len({*refusals}), "each is said once"
    case.cure(hotel, said)
    hotel.check()


def test_a_plain_time_that_was_released_may_stay_and_may_become_a_moment(hotel: Tree) -> None:
    """And the other way round. Bodies without a zone, which the record of older releases has, stop neither."""
    hotel.write(DOMAIN, *CLEANED)
    moment(hotel, hotel.check(code=1))
    hotel.samefold("events", "release")
    record = hotel.record.read_text()
    hotel.record.write_text(re.sub(r'("at": "[^"]*)Z"', r'\1"', record))
    assert hotel.record.read_text() != record
    assert hotel.check() == "Everything is as it was released.\n"
    hotel.write(
        DOMAIN,
        ("    at: Moment | None", "    at: datetime | None"),
        ("import Moment\n", f"import Moment\n{PLAIN_IMPORT}"),
    )
    assert hotel.check() == "Everything is as it was released.\n"


def test_a_context_removed(hotel: Tree) -> None:
    for name in (DOMAIN, USE, NIGHTS):
        (hotel.folder / name).unlink()
    said = hotel.check(code=1)
    assert "domain/rooms.py: its events were released: RoomBooked, RoomFreed" in said
    restored(hotel, said)
    assert hotel.check() == "Everything is as it was released.\n"


@pytest.mark.slow
def test_a_version_lowered(hotel: Tree) -> None:
    """The upcaster is gone with it, as after a merge that took the older class."""
    before = (hotel.folder / DOMAIN).read_text()
    hotel.write(DOMAIN, *BOOKED_2, SAME)
    after = (hotel.folder / DOMAIN).read_text()
    hotel.samefold("events", "release")
    hotel.write(DOMAIN, (after, before))
    said = hotel.check(code=1)
    assert "rooms.RoomBooked: version 2 of it was released" in said
    class_line(hotel, said)
    said = hotel.check(code=1)
    missing_step("body")(hotel, said)
    assert hotel.check() == "Everything is as it was released.\n"


@pytest.mark.slow
def test_what_changes_after_a_second_version_was_released_has_its_lines_too(hotel: Tree) -> None:
    """Each other command stops there, because of the first one's upcaster, and says that the check says more."""
    hotel.write(DOMAIN, *BOOKED_2, SAME)
    hotel.samefold("events", "release")
    hotel.write(
        DOMAIN,
        ("    guest: Text\n    nights: Annotated[int, Field(ge=1, le=30)]\n    bed", "    visitor: Text\n    bed"),
    )
    said = hotel.check(code=1)
    assert "rooms.RoomBooked/2: field 'guest' was removed; field 'nights' was removed; field 'visitor' is new" in said
    assert "Or write `VERSION: ClassVar[int] = " in said
    assert "not-releasable" in hotel.samefold("events", "release", code=1).stderr
    with pytest.raises(BadContext, match="a body that was released as RoomBooked can't be read"):
        hotel.load()


@pytest.mark.slow
def test_a_view_s_version_lowered(hotel: Tree) -> None:
    hotel.write(USE, ("VERSION = 1", "VERSION = 2"))
    hotel.samefold("events", "release")
    hotel.write(USE, ("VERSION = 2", "VERSION = 1"))
    said = hotel.check(code=1)
    assert "view room_use: version 2 of it was released" in said
    raised(hotel, said)
    hotel.check()


def test_what_is_refused_can_not_be_released_and_has_no_steps(hotel: Tree) -> None:
    record = hotel.record.read_text()
    hotel.write(DOMAIN, *CASES["a field renamed"].edits)
    report = hotel.report(code=1)
    assert [one["what"] for one in report["refused"]] == ["rooms.RoomBooked"]
    assert report["steps"] == []
    said = hotel.samefold("events", "release", code=1).stderr
    assert said.startswith("not-releasable: This code does not keep to what was released: rooms.RoomBooked.")
    assert hotel.record.read_text() == record


# What is allowed, and in which order it is deployed

RELEASE = "samefold events release; commit domain/released with the rest"
AGENTS = "agents of this release, beside the old ones"
HANDLERS = "handlers of this release"
REST = "policies, publisher and API of this release; stop the old processes"
BY_READERS = [RELEASE, AGENTS, HANDLERS, REST]
BY_AGENTS = [AGENTS, "samefold rebuild", HANDLERS, REST]


def tables(view: str) -> list[str]:
    return [f'samefold db revision -m "{view}"; samefold db upgrade', RELEASE, *BY_AGENTS]


@dataclass(frozen=True)
class Allowed:
    """What is changed, what the report says, and the steps in order."""

    edits: Sequence[tuple[str, str]]
    news: list[str]
    steps: list[str]
    file: str = DOMAIN


CITY = ('    phone: Text = "none"\n', '    phone: Text = "none"\n    city: Text = ""\n')
ALLOWED = {
    "what fits all bodies of before": Allowed(
        [
            CITY,
            ("class RoomFreed:\n    reason: Text\n", "class RoomFreed:\n    reason: Text\n    hour: int = 12\n"),
            ("    nights: Annotated[int, Field(ge=1, le=30)]\n    bed", "    nights: int\n    bed"),
        ],
        [
            "rooms.RoomBooked: field 'nights' has another maximum: 30 became None",
            "rooms.RoomBooked: field 'nights' has another minimum: 1 became None",
            "rooms.RoomBooked: field 'payer.city' is new, with a default",
            "rooms.RoomFreed: field 'hour' is new, with a default",
        ],
        [RELEASE, "the processes of this release, in any order"],
    ),
    "a new event": Allowed(
        [
            (
                "Event: TypeAlias = RoomBooked",
                "@fact\nclass RoomCleaned:\n    by: Text\n\n\nEvent: TypeAlias = RoomBooked",
            ),
            ("RoomBooked | RoomFreed", "RoomBooked | RoomFreed | RoomCleaned"),
        ],
        ["event rooms.RoomCleaned is new"],
        BY_READERS,
    ),
    "a raised version with its upcaster": Allowed(
        [*BOOKED_2, SAME], ["event rooms.RoomBooked is at version 2, after 1"], BY_READERS
    ),
    "a new command": Allowed(
        [
            ("Command: TypeAlias = BookRoom", "@fact\nclass Clean:\n    by: Text\n\n\nCommand: TypeAlias = BookRoom"),
            ("BookRoom | FreeRoom", "BookRoom | FreeRoom | Clean"),
        ],
        ["command rooms.Clean is new"],
        [RELEASE, HANDLERS, REST],
    ),
    "a new view": Allowed([("", NEW_VIEW)], ["view stays is new"], tables("stays"), STAYS),
    "a view's version": Allowed(
        [("VERSION = 1", "VERSION = 2"), ("    events: int", "    uses: int")],
        ["view room_use is at version 2"],
        tables("room_use"),
        USE,
    ),
    "a policy's version": Allowed(
        [("VERSION = 1", "VERSION = 2"), ("days=1", "hours=1")],
        ["policy nights is at version 2"],
        [RELEASE, "the processes of this release, in any order", "samefold policies switch nights"],
        NIGHTS,
    ),
    "a state's version": Allowed(
        [("STATE_VERSION = 1", "STATE_VERSION = 2"), ("state.times + 1", "state.times + 2")],
        ["view streams_rooms is at version 2"],
        tables("streams_rooms"),
    ),
}


@pytest.mark.slow_but("a raised version with its upcaster", "a view's version")
@pytest.mark.parametrize("case", ALLOWED.values(), ids=ALLOWED.keys())
def test_what_is_allowed_is_named_with_what_its_deployment_needs(hotel: Tree, case: Allowed) -> None:
    hotel.write(case.file, *case.edits)
    report = hotel.report()
    assert (report["refused"], report["news"], report["steps"]) == ([], case.news, case.steps)
    said = hotel.check()
    places = [said.index(line) for line in [*case.news, *(f"{n}. {step}" for n, step in enumerate(case.steps, 1))]]
    assert places == sorted(places)
    hotel.samefold("events", "release")
    assert hotel.check() == "Everything is as it was released.\n"


def test_a_record_of_before_gets_the_results_with_the_next_release(hotel: Tree) -> None:
    record = json.loads(hotel.record.read_text())
    del record["views"]["policy_nights"]
    for view in record["views"].values():
        del view["results"]
    golden = record["events"]["RoomFreed"]["1"]["golden"][0]
    golden["state"] = {"taken": True, "times": 7}
    hotel.record.write_text(json.dumps(record))
    [refused] = hotel.report(code=1)["refused"]
    assert "its result for RoomFreed differs from the release's" in str(refused), "its states were recorded, too"
    golden["state"] = {"taken": False, "times": 1}
    hotel.record.write_text(json.dumps(record))
    hotel.write(USE, ("+ 1)", "+ 2)"))
    report = hotel.report()
    assert report["news"] == [
        "the results of states, views and policies are not in the record yet",
        "policy nights is not in the record yet",
    ]
    assert report["steps"] == [RELEASE, "the processes of this release, in any order"]
    hotel.samefold("events", "release")
    assert hotel.check() == "Everything is as it was released.\n"
    assert '"state"' not in hotel.record.read_text()
    hotel.write(USE, ("+ 2)", "+ 1)"))
    hotel.check(code=1)


@pytest.mark.parametrize(("file", "what"), [(STAYS, "view stays"), (NIGHTS, "policy nights")])
def test_events_of_a_whole_context_come_and_go_with_a_version_only(hotel: Tree, file: str, what: str) -> None:
    of_both = (
        ("domain.rooms import", "domain.guests import GuestCame\nfrom domain.rooms import"),
        ("(event: E", "(event: GuestCame | E"),
    )
    hotel.write("domain/guests.py", ("", GUESTS))
    hotel.write(STAYS, ("", SUMS))
    hotel.samefold("events", "release")
    first = (hotel.folder / file).read_text()
    hotel.write(file, *of_both)
    guests = hotel.record.with_name("guests.json")
    record = guests.read_text()
    guests.unlink()
    assert what not in hotel.check(), "there are no such events yet"
    guests.write_text(record)
    for version, says in (2, "did not take the events of guests"), (3, "does not take the events of guests any more"):
        said = hotel.check(code=1)
        assert f"{what}: it {says}" in said
        raised(hotel, said)
        report = hotel.report()
        assert report["news"] == [f"{what} is at version {version}"]
        assert report["steps"][-1].endswith("switch nights") or "samefold rebuild" in report["steps"]
        hotel.samefold("events", "release")
        assert hotel.check() == "Everything is as it was released.\n"
        (hotel.folder / file).write_text(first.replace("VERSION = 1", f"VERSION = {version}"))


def test_a_view_that_is_gone_needs_a_switch_but_no_table(hotel: Tree) -> None:
    (hotel.folder / USE).unlink()
    report = hotel.report()
    assert (report["news"], report["steps"]) == (["view room_use is gone"], [RELEASE, *BY_AGENTS])


def test_without_a_change_there_is_nothing_to_say_and_before_the_first_release_nothing_is_refused(hotel: Tree) -> None:
    assert hotel.check() == "Everything is as it was released.\n"
    report = hotel.report()
    assert not any(report.values()), report
    hotel.record.unlink()
    assert "nothing was released yet" in hotel.check()
    hotel.write(DOMAIN, *CLEANED)
    assert "rooms.RoomCleaned: field 'at' is a `datetime`" in hotel.check(code=1), "but for what never should be"


CONFLICT = "{\n<<<<<<< HEAD\n=======\n>>>>>>> other\n}\n"
UNREADABLE = "can't be read: ", "Take it from version control again."


def test_a_record_that_can_not_be_read_is_named(hotel: Tree) -> None:
    record = json.loads(hotel.record.read_text())
    events, [booked] = record["events"], record["events"]["RoomBooked"].values()
    versions: list[dict[str, Any]] = [{}, {"x": booked}, {"0": booked}, {"1": {}}, {"1": booked | {"schema": None}}]
    edited = (
        {"events": []},
        *({"events": events | {"RoomBooked": other}} for other in versions),
        {"views": {"room_use": {}}},
    )
    for text in ("", "[]", "{}", *(json.dumps(record | one) for one in edited), CONFLICT):
        hotel.record.write_text(text)
        said = hotel.check(code=1)
        why, cure = ("has the conflict of a merge.", "git checkout") if text == CONFLICT else UNREADABLE
        assert said.startswith(f"unreadable-release: domain/released/rooms.json {why}")
        assert cure in said


@pytest.mark.slow
def test_bodies_of_all_that_was_released_stay_in_the_record(hotel: Tree) -> None:
    """What a release wrote under the same version, a later one must read too."""
    hotel.write(DOMAIN, CITY)
    hotel.samefold("events", "release")
    hotel.write(DOMAIN, *ALLOWED["a raised version with its upcaster"].edits)
    hotel.samefold("events", "release")
    events = json.loads(hotel.record.read_text())["events"]
    first, second = (events["RoomBooked"][version]["golden"] for version in "12")
    assert {"city" in one["body"]["payer"] for one in first} == {True, False}
    assert all("city" in one["body"]["payer"] for one in second)
