"""The bounded contexts of `domain/`, found rather than registered.

A context is a module of `domain/` with `decide`. Its unions `Command` and `Event` and its class `State` say all the rest.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any, get_args

import msgspec

import domain
from infra.errors import SamefoldError


class BadContext(SamefoldError):
    """A module of `domain/` does not have the shape of a bounded context."""


@dataclass(frozen=True, slots=True)
class Context:
    """One bounded context. Names of commands and events are those that are stored in the log."""

    name: str
    commands: dict[str, type]
    events: dict[str, type]
    state: type
    state_version: int
    decide: Callable[[Any, Any], list[Any]]
    evolve: Callable[[Any, Any], Any]


@cache
def contexts() -> dict[str, Context]:
    """All contexts by name. Raises BadContext."""
    found = {}
    for module_info in pkgutil.iter_modules(domain.__path__):
        module = importlib.import_module(f"domain.{module_info.name}")
        if hasattr(module, "decide"):
            found[module_info.name] = context_of(module)
    return found


def context_of(module: ModuleType) -> Context:
    """The context a module declares. Raises BadContext naming what is missing."""
    missing = [n for n in ("Command", "Event", "State", "STATE_VERSION", "decide", "evolve") if not hasattr(module, n)]
    if missing:
        raise BadContext(
            f"{module.__name__} has `decide` but no {', '.join(f'`{name}`' for name in missing)}.",
            "Add what is missing, in the order events, commands, errors, state, decide, evolve: see domain/accounts.py.",
        )
    try:
        module.State()
    except TypeError as error:
        raise BadContext(
            f"`State` of {module.__name__} can't be made without arguments: {error}.",
            "Give every field a default: together they are the state of a stream without events.",
        ) from error
    return Context(
        name=module.__name__.rpartition(".")[2],
        commands=_by_stored_name(module.Command),
        events=_by_stored_name(module.Event),
        state=module.State,
        state_version=module.STATE_VERSION,
        decide=module.decide,
        evolve=module.evolve,
    )


def _by_stored_name(union: Any) -> dict[str, type]:
    """Classes of a union by the name they are stored under; a union of one is the class itself."""
    return {stored_name(member): member for member in get_args(union) or (union,)}


def stored_name(fact: type) -> str:
    """The name an event or command has in the log: its class name, or `stored_as` where the class was renamed."""
    return str(getattr(fact, "stored_as", fact.__name__))


class UnknownEvent(SamefoldError):
    """A commit that counts holds an event that this code does not know: skipping it would make readers disagree."""


class UnreadableEvent(SamefoldError):
    """A commit that counts holds an event whose body does not fit its class."""


def decode_event(context: Context, name: str, data: msgspec.Raw | bytes) -> Any:
    """The event of that stored name. Raises UnknownEvent, UnreadableEvent."""
    event = context.events.get(name)
    if event is None:
        raise UnknownEvent(
            f"The log holds an event '{context.name}.{name}' that this code does not know.",
            "Deploy the version of the code that wrote it, or newer; nothing was skipped.",
        )
    try:
        return _decoder(event)(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UnreadableEvent(
            f"The log holds an event '{context.name}.{name}' that does not fit this code's class: {error}.",
            "Nothing was skipped. Give fields that were added later a default, and never rename or narrow one.",
        ) from error


@cache
def _decoder(event: type) -> Callable[[msgspec.Raw | bytes], Any]:
    return msgspec.json.Decoder(event).decode
