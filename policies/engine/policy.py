"""A policy, read from its module: what it subscribes to, and the wishes that its `react` may yield.

Nothing is registered. The module's name is the policy's name, and the annotation of `event` is the subscription. A module with
`SOURCE` is a policy that reacts to messages of another service instead (`source`).
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pkgutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cache
from types import ModuleType
from typing import Any, Literal

import policies
from domain.engine.contexts import contexts
from domain.language import Refusal
from infra.errors import SamefoldError
from policies.engine.source import Source, source_of
from projections.engine.views.columns import hints_of
from projections.engine.views.event_context import At
from projections.engine.views.view import NAME, POLICY, events_of, version_of

PUBLIC = "public"
"""The module that says what other teams may read: no policy."""


class BadPolicy(SamefoldError):
    """A module of `policies/` does not have the shape of a policy."""


class LowerVersion(SamefoldError):
    """A newer version of the policy is live, or of the publication has published."""


@dataclass(frozen=True, slots=True)
class Send:
    """A command for a stream, sent once in effect.

    `then` and `otherwise` are commands for the stream of the event that the policy reacts to, sent when this command was accepted
    or rejected. If the class of `otherwise` has a field `refusal`, it gets the code of the rejection. A rejection that has no
    `otherwise` is a dead letter, unless its class is in `ignore`; so is one of the commands that follow.

    `later` is another command for the stream of the event, sent `after` this command and its `then` or `otherwise` have been
    answered: a timer that no outage lets overtake what it guards. `due` is when to send the command itself, an aware time, for a
    moment of the calendar; without it, at once.
    """

    stream: str
    command: Any
    then: Any = None
    otherwise: Any = None
    due: datetime | None = None
    ignore: tuple[type[Refusal], ...] = ()
    later: Any = None
    after: timedelta | None = None


@dataclass(frozen=True, slots=True)
class Post:
    """A webhook: a JSON body for an endpoint that the settings name. It arrives at least once, with the same `webhook-id`."""

    endpoint: str
    body: Any


@dataclass(frozen=True, slots=True)
class Public:
    """An event for other teams: a type of your choice, and JSON data."""

    type: str
    data: Any


@dataclass(frozen=True, slots=True, eq=False)
class Policy:
    """One version of one policy."""

    name: str
    version: int
    react: Callable[[Any, At], Iterable[Send | Post]]
    subscription: frozenset[type]
    on_poison: Literal["stop", "park"] = "stop"
    source: Source | None = None
    """Of one that reacts to messages: its subscription is empty, and its agent reads only the outcomes of what it sent."""

    @property
    def agent(self) -> str:
        """The name of its positions."""
        return agent_of(self.name)


def agent_of(policy: str) -> str:
    return f"{POLICY}{policy}"


@cache
def discover() -> dict[str, Policy]:
    """All policies by name. A module whose name begins with `_` is none, but policies may import it.

    Raises BadPolicy, BadContext.
    """
    names = {info.name for info in pkgutil.iter_modules(policies.__path__) if not info.ispkg} - {PUBLIC}
    found = sorted(name for name in names if not name.startswith("_"))
    return {name: policy_of(importlib.import_module(f"policies.{name}")) for name in found}


def has_public() -> bool:
    """Whether this service publishes anything."""
    return importlib.util.find_spec(f"policies.{PUBLIC}") is not None


def policy_of(module: ModuleType) -> Policy:
    """The policy that a module declares. Raises BadPolicy."""
    name = module.__name__.rpartition(".")[2]
    if not NAME.fullmatch(name) or len(name) > 30:
        raise BadPolicy(
            f"policies/{name}.py can't be a policy: its name is not valid.",
            "Rename the file: at most 30 lower case letters, digits and underscores.",
        )
    if hasattr(module, "SOURCE"):
        source, version = source_of(module, BadPolicy), version_of(module, f"policies/{name}.py", BadPolicy)
        return Policy(name, version, lambda *_: (), frozenset(), _on_poison(module, name), source)
    version, function, subscription = declared(module, "react", "Iterable[Send | Post]")
    return Policy(name, version, function, subscription, _on_poison(module, name))


def _on_poison(module: ModuleType, name: str) -> Literal["stop", "park"]:
    on_poison: Literal["stop", "park"] = getattr(module, "ON_POISON", "stop")
    if on_poison not in ("stop", "park"):
        raise BadPolicy(f"Policy '{name}' has ON_POISON = {on_poison!r}.", 'It is "stop" (the default) or "park".')
    return on_poison


def declared(module: ModuleType, name: str, result: str) -> tuple[int, Callable[[Any, At], Any], frozenset[type]]:
    """The module's version, its function of that name, and the events that its annotation subscribes to. Raises BadPolicy."""
    function, file = module.__dict__.get(name), f"policies/{module.__name__.rpartition('.')[2]}.py"
    signature = f"{name}(event: …, at: At) -> {result}"
    if not inspect.isfunction(function) or tuple(inspect.signature(function).parameters) != ("event", "at"):
        raise BadPolicy(
            f"{file} has no function `{name}` with the parameters that the engine passes.", f"Write {signature}"
        )
    events = events_of(hints_of(function, file, BadPolicy).get("event"), file, contexts().values(), BadPolicy)
    return version_of(module, file, BadPolicy), function, events
