"""Bounded contexts are found by their shape, and named errors say what is missing."""

import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import ClassVar

import msgspec
import pytest

import domain
from domain.language import fact
from infra import contexts as found
from infra.contexts import BadContext, UnknownEvent, UnreadableEvent, context_of, contexts, decode_event, stored_name
from tests import purse
from tests.purse import PURSE, Fill, Filled, Spend, Spent, State

FILLED = b'{"cents":5,"note":"found"}'


def module(**names: object) -> ModuleType:
    made = ModuleType("domain.made")
    vars(made).update(names, __name__="domain.made")
    return made


def test_every_module_of_the_domain_with_decide_is_a_context() -> None:
    files = [file for folder in domain.__path__ for file in Path(folder).glob("*.py")]
    assert set(contexts()) == {file.stem for file in files if "\ndef decide(" in file.read_text()}
    assert set(contexts()) < {file.stem for file in files}


def test_a_file_put_into_domain_is_a_context_and_nothing_else_is_needed(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path_factory.mktemp("more")
    (folder / "savings.py").write_text(
        "from dataclasses import dataclass\n"
        "class Save: ...\n"
        "class Saved: ...\n"
        "Command = Save\n"
        "Event = Saved\n"
        "STATE_VERSION = 3\n"
        "class State: ...\n"
        "def decide(command, state): return [Saved()]\n"
        "def evolve(state, event): return state\n"
    )
    (folder / "helpers.py").write_text("def nothing(): ...\n")
    monkeypatch.setattr(domain, "__path__", [*domain.__path__, str(folder)])
    try:
        every = found.contexts.__wrapped__()
    finally:
        for name in ("savings", "helpers"):
            sys.modules.pop(f"domain.{name}", None)
            vars(domain).pop(name, None)
    assert set(every) == {*contexts(), "savings"}
    assert (every["savings"].name, every["savings"].state_version) == ("savings", 3)
    assert set(every["savings"].commands) == {"Save"}


def test_a_context_is_what_its_module_declares() -> None:
    assert PURSE.name == "purse"
    assert PURSE.commands == {"Fill": Fill, "Spend": Spend}
    assert PURSE.events == {"Filled": Filled, "Spent": Spent}
    assert PURSE.state is State
    assert PURSE.state_version == purse.STATE_VERSION
    assert PURSE.evolve(State(), Filled(cents=5)) == State(5)
    assert PURSE.decide(Spend(cents=2), State(5)) == [Spent(cents=2)]


@pytest.mark.parametrize("name", ["Command", "Event", "State", "STATE_VERSION", "evolve"])
def test_what_a_context_lacks_is_named(name: str) -> None:
    names = {key: value for key, value in vars(purse).items() if key != name}
    with pytest.raises(BadContext, match=rf"domain\.made has `decide` but no `{name}`\."):
        context_of(module(**names))


def test_everything_a_context_lacks_is_named_at_once() -> None:
    with pytest.raises(BadContext, match="no `Command`, `Event`, `State`, `STATE_VERSION`, `evolve`"):
        context_of(module(decide=purse.decide))


def test_a_renamed_class_keeps_its_old_name_in_the_log() -> None:
    @fact
    class Replenished:
        stored_as: ClassVar[str] = "Filled"
        cents: int

    assert stored_name(Replenished) == "Filled"
    renamed = context_of(module(**(vars(purse) | {"Event": Replenished | Spent})))
    assert decode_event(renamed, "Filled", b'{"cents":5}') == Replenished(cents=5)


def test_a_union_of_one_is_a_context_too() -> None:
    single = context_of(module(**(vars(purse) | {"Event": Filled, "Command": Fill})))
    assert (single.events, single.commands) == ({"Filled": Filled}, {"Fill": Fill})


def test_an_event_is_decoded_by_its_stored_name() -> None:
    assert decode_event(PURSE, "Filled", FILLED) == Filled(cents=5, note="found")
    assert decode_event(PURSE, "Filled", msgspec.Raw(FILLED)) == Filled(cents=5, note="found")


def test_a_field_that_came_later_has_its_default_in_older_events() -> None:
    assert decode_event(PURSE, "Filled", b'{"cents":5}') == Filled(cents=5)


def test_an_unknown_event_is_never_skipped() -> None:
    with pytest.raises(UnknownEvent, match=r"'purse\.Stolen'"):
        decode_event(PURSE, "Stolen", b"{}")


@pytest.mark.parametrize("data", [b"", b"null", b"{}", b'{"cents":"5"}', b'{"cents":5,"note":7}', b'{"note":"\xff"}'])
def test_an_event_whose_body_does_not_fit_is_never_skipped(data: bytes) -> None:
    with pytest.raises(UnreadableEvent, match=r"'purse\.Filled'"):
        decode_event(PURSE, "Filled", data)


def test_the_states_defaults_are_the_initial_state() -> None:
    @dataclass(frozen=True)
    class Needy:
        cents: int

    with pytest.raises(BadContext, match=r"`State` of domain\.made can't be made without arguments: .*cents"):
        context_of(module(**(vars(purse) | {"State": Needy})))
