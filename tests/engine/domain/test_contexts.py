"""make test: pure. Bounded contexts are found by their shape, and named errors say what is missing."""

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, TypeAlias

import pytest

import domain
from domain.engine import contexts as found
from domain.engine.contexts import (
    BadContext,
    Context,
    UnreadableEvent,
    context_of,
    contexts,
    decode_event,
    refusals_of,
)
from domain.engine.versions import stored_name
from domain.language import fact
from tests.engine import purse
from tests.engine.purse import PURSE, Fill, Filled, Spent


def module(**names: object) -> ModuleType:
    made = ModuleType("domain.made")
    vars(made).update(names, __name__="domain.made")
    return made


DomainOf: TypeAlias = Callable[..., dict[str, Context]]


@pytest.fixture
def domain_of(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[DomainOf]:
    """The contexts of `domain/` with these files in it too."""
    names: set[str] = set()

    def discover(**files: str) -> dict[str, Context]:
        folder = tmp_path_factory.mktemp("more")
        names.update(files)
        for name, text in files.items():
            (folder / f"{name}.py").write_text(text)
        monkeypatch.setattr(domain, "__path__", [*domain.__path__, str(folder)])
        return found.contexts.__wrapped__()

    yield discover
    for name in names:
        sys.modules.pop(f"domain.{name}", None)
        vars(domain).pop(name, None)


SAVINGS = """
from dataclasses import dataclass
from domain.language import Refusal, fact
@fact
class Save: ...
@fact
class Saved: ...
Command = Save
Event = Saved
STATE_VERSION = 3
@dataclass(frozen=True, slots=True)
class State:
    saved: int = 0
def decide(command, state): return [Saved()]
def evolve(state, event): return state
"""


def test_a_file_put_into_domain_is_a_context_and_nothing_else_is_needed(domain_of: DomainOf) -> None:
    every = domain_of(savings=SAVINGS, helpers="def nothing(): ...\n")
    assert set(every) == {*contexts(), "savings"}
    assert (every["savings"].name, every["savings"].state_version) == ("savings", 3)
    assert set(every["savings"].commands) == {"Save"}


@pytest.mark.parametrize("kept", [[], ["Event", "State", "evolve"], ["Command", "STATE_VERSION"]], ids=str)
def test_everything_a_context_lacks_is_named_at_once(kept: list[str]) -> None:
    lacks = [f"`{name}`" for name in ("Command", "Event", "State", "STATE_VERSION", "evolve") if name not in kept]
    with pytest.raises(BadContext, match=rf"domain\.made has `decide` but no {', '.join(lacks)}\."):
        context_of(module(decide=purse.decide, **{name: vars(purse)[name] for name in kept}))


def test_a_renamed_class_keeps_its_old_name_in_the_log() -> None:
    @fact
    class Replenished:
        stored_as: ClassVar[str] = "Filled"
        cents: int

    assert stored_name(Replenished) == "Filled"
    renamed = context_of(module(**(vars(purse) | {"Event": Replenished | Spent})))
    assert decode_event(renamed, "Filled", b'{"cents":5}') == Replenished(cents=5)


@pytest.mark.parametrize("data", [b"", b"null", b"{}", b'{"cents":"5"}', b'{"cents":5,"note":7}', b'{"note":"\xff"}'])
def test_an_event_whose_body_does_not_fit_is_never_skipped(data: bytes) -> None:
    with pytest.raises(UnreadableEvent, match=r"'purse\.Filled'"):
        decode_event(PURSE, "Filled", data)


@fact
class Opened:
    payload: Any


@dataclass(frozen=True)
class Either:
    it: Filled | Spent | None = None


@dataclass(frozen=True)
class Needy:
    cents: int


@dataclass(frozen=True)
class Endless:
    limit: float = math.inf


@dataclass(frozen=True)
class Loose:
    limit: float = 0


class Unread:
    """Nothing that pydantic could make of JSON."""


@fact
class Found:
    stored_as: ClassVar[str] = "Filled"
    cents: int


@pytest.mark.parametrize(
    ("names", "why"),
    [
        ({"State": Either}, r"^domain\.made: Either\.it is .*Filled \| .*Spent.*, which JSON can't tell apart"),
        ({"State": Needy}, r"`State` of domain\.made can't be created without arguments: .*cents"),
        ({"State": Endless}, r"Expected `float`, got `null` - at `\$\.limit`"),
        ({"Event": Opened}, r"Opened\.payload is "),
        ({"Event": Filled | Spent | Found}, "stored as 'Filled': Filled and Found"),
        ({"Event": Filled | list[int]}, r"`Event` of domain\.made has a member"),
        ({"Command": Fill | Unread}, "the command Unread can't be read from JSON"),
    ],
    ids=str,
)
def test_what_can_not_be_kept_is_refused_at_the_start_by_name(names: dict[str, Any], why: str) -> None:
    with pytest.raises(BadContext, match=why) as refused:
        context_of(module(**(vars(purse) | names)))
    assert "a field that says which" in refused.value.hint or Either not in names.values()


def test_a_streams_first_state_is_what_the_database_would_give_back() -> None:
    context = context_of(module(**(vars(purse) | {"State": Loose, "evolve": lambda state, event: state})))
    assert repr(context.initial) == "Loose(limit=0.0)"
    assert repr(context.fold(Loose(), Filled(cents=1))) == "Loose(limit=0.0)"


def test_an_event_belongs_to_one_context(domain_of: DomainOf) -> None:
    deposits = SAVINGS.replace("@fact\nclass Saved: ...", "from domain.savings import Saved")
    with pytest.raises(
        BadContext, match=r"domain\.savings\.Saved is in the `Event` of two contexts, 'deposits' and 'savings'"
    ):
        domain_of(savings=SAVINGS, deposits=deposits)


def test_a_context_that_has_the_name_of_samefolds_own_folder_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python would find the folder, and the service would start without the context."""
    (tmp_path / "engine.py").write_text(SAVINGS)
    monkeypatch.setattr(domain, "__path__", [*domain.__path__, str(tmp_path)])
    with pytest.raises(BadContext, match=r"domain/engine\.py can't be found"):
        found.contexts.__wrapped__()


def test_commands_states_and_names_may_be_shared(domain_of: DomainOf) -> None:
    deposits = SAVINGS.replace("@fact\nclass Save: ...", "from domain.savings import Save, State")
    every = domain_of(savings=SAVINGS, deposits=deposits)
    assert every["savings"].events.keys() == every["deposits"].events.keys()


def test_a_refusal_of_a_shared_module_is_one_of_each_context(domain_of: DomainOf) -> None:
    rules = 'from domain.language import Refusal\nclass NotToday(Refusal):\n    "The bank is closed."\n'
    every = domain_of(rules=rules, savings=SAVINGS + 'class TooMuch(Refusal):\n    "Nobody saves as much."\n')
    assert refusals_of(every["savings"])["not-today"].message == "The bank is closed."
    assert {"too-much", "not-today"} <= set(refusals_of(every["savings"]))
    assert "not-today" in refusals_of(every["accounts"])
    assert "too-much" not in refusals_of(every["accounts"])
    assert "account-is-closed" not in refusals_of(every["savings"])


def test_a_refusal_of_another_context_that_is_imported_is_one_of_this_too(domain_of: DomainOf) -> None:
    every = domain_of(savings=SAVINGS + "from domain.accounts import AccountIsClosed\n")
    found = refusals_of(every["savings"])
    assert "account-is-closed" in found
    assert "account-not-open" not in found


@pytest.mark.parametrize("where", ["savings", "rules"])
def test_a_refusal_may_not_have_the_code_of_another_answer(domain_of: DomainOf, where: str) -> None:
    files = {"savings": SAVINGS, "rules": "from domain.language import Refusal\n"}
    files[where] += 'class Failed(Refusal):\n    "It did not work."\n'
    with pytest.raises(
        BadContext, match=rf"domain\.{where} has a refusal Failed with the code 'failed', which is taken"
    ):
        domain_of(**files)
