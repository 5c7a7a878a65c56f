"""The bounded contexts of `domain/`. They need no registration: a context is a module of `domain/` with a function `decide`."""

import importlib
import pkgutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import msgspec
from pydantic import TypeAdapter
from pydantic.errors import PydanticUserError

import domain
from domain.engine import storable, versions
from domain.engine.personal.fields import decided_decoder, is_personal, sealed_validator, subject_field
from domain.engine.released import KINDS, Kind, golden_bodies, read
from domain.engine.schemas import schema_of
from domain.engine.versions import BadContext as BadContext  # noqa: PLC0414  # exported: it is what `contexts` raises
from domain.engine.versions import Older, Steps, stored_name, stored_type
from domain.language import Refusal
from infra.errors import SamefoldError, in_words
from infra.processes.time_limit import limited

RECORDED = frozenset({"version-conflict", "malformed", "too-large", "misrouted", "failed", "unclear-stream"})
"""The handler's own rejection codes."""


untried: ContextVar[bool] = ContextVar("untried", default=False)
"""Whether `contexts` leaves the bodies in the record of releases to `samefold events`, which says more about them."""


@dataclass(frozen=True, slots=True)
class Context:
    """One bounded context, with commands and events by their names in the log. Its constructor raises BadContext.

    Fold with `fold`, from `initial` on: then the state is exactly the one that the database would return.
    """

    name: str
    commands: dict[str, type]
    events: dict[str, type]
    state: type
    state_version: int
    decide: Callable[[Any, Any], list[Any]]
    evolve: Callable[[Any, Any], Any]
    """The author's function. Its result may differ from what JSON gives back."""
    upcasters: Mapping[type, Steps] = field(default_factory=dict)
    """By event or command that has older versions."""
    initial: Any = field(init=False)
    """The state of a stream without events."""
    fold: Callable[[Any, Any], Any] = field(init=False)
    """The state after an event. Raises storable.Lost, and what `evolve` raises."""
    stored: dict[type, tuple[str, Callable[[Any], Any]]] = field(init=False)
    """By class of event, its stored type, and the decoder of what `decide` returned."""
    readers: dict[str, tuple[type, Callable[[Any], Any]]] = field(init=False)
    """Class of event and decoder by stored type, older versions included. The decoders raise what `decode_event` names."""
    command_types: dict[str, tuple[type, Older | None]] = field(init=False)
    """Class of command by stored type; for an older version, the way to the class."""
    command_readers: dict[str, Callable[[bytes], Any]] = field(init=False)
    """By stored type, the function from a body to a command. They raise pydantic.ValidationError, and what `Older` names."""

    def __post_init__(self) -> None:
        for command in self.commands.values():
            subject_field(command)
        for kind in (*self.commands.values(), *self.events.values()):
            is_personal(kind)
        try:
            is_plain = {event: storable.require_exact(event) for event in self.events.values()}
            object.__setattr__(self, "fold", storable.giving_exactly(self.state, self.evolve))
        except storable.NotExact as error:
            raise BadContext(f"domain.{self.name}: {error}", error.hint) from error
        try:
            object.__setattr__(self, "initial", storable.through_json(self.state, self.state()))
        except storable.Lost as error:
            raise BadContext(
                f"domain.{self.name}: the defaults of State: {error}.", "Give that field a default of its own type."
            ) from error
        stored, readers = {}, dict[str, tuple[type, Callable[[Any], Any]]]()
        for event in self.events.values():
            name, decode = stored_type(event), storable.decoder(event)
            stored[event] = name, decided_decoder(event, decode)
            readers[name] = event, decode if is_plain[event] else partial(limited, decode)
        object.__setattr__(self, "stored", stored)
        types: dict[str, tuple[type, Older | None]] = {stored_type(one): (one, None) for one in self.commands.values()}
        for fact, steps in self.upcasters.items():
            for step in versions.older(fact, steps):
                if fact in stored:
                    readers[step.type] = fact, versions.reader(fact, step)
                if self.commands.get(stored_name(fact)) is fact:
                    types[step.type] = fact, step
        object.__setattr__(self, "readers", readers)
        object.__setattr__(self, "command_types", types)
        object.__setattr__(self, "command_readers", {name: _command_reader(*one) for name, one in types.items()})


def _command_reader(kind: type, older: Older | None) -> Callable[[bytes], Any]:
    validate = sealed_validator(kind)
    return validate if older is None else lambda body: validate(older.body(body))


@cache
def contexts() -> dict[str, Context]:
    """All contexts by name. Raises BadContext, and UnreadableRelease where a context with older versions has a broken record."""
    with storable.building:
        return _all()


def _all() -> dict[str, Context]:
    if any(Path(folder, "engine.py").is_file() for folder in domain.__path__):
        raise BadContext(
            "domain/engine.py can't be found: Samefold's folder domain/engine has its name.",
            "Rename the file. A context whose events are in the log can't be renamed: stay with the release before, and report it.",
        )
    found: dict[str, Context] = {}
    for module_info in pkgutil.iter_modules(domain.__path__):
        module = importlib.import_module(f"domain.{module_info.name}")
        if hasattr(module, "decide"):
            found[module_info.name] = context_of(module)
    owners: dict[type, Context] = {}
    for context in found.values():
        refusals_of(context)
        if any(context.upcasters.values()) and not untried.get():
            _require_released(context)
        for event in context.events.values():
            if (other := owners.setdefault(event, context)) is not context:
                raise BadContext(
                    f"The event {event.__module__}.{event.__qualname__} is in the `Event` of two contexts, "
                    f"'{other.name}' and '{context.name}': a view could not tell which context it belongs to.",
                    f"Write a class of that name in domain/{context.name}.py and put it into its `Event`; the log stays as it is.",
                )
    return found


def has_personal_fields() -> bool:
    """Whether any context has. Without them there are no keys: no topic, no thread, no query. Raises BadContext."""
    return any(
        is_personal(kind) for one in contexts().values() for kind in (*one.commands.values(), *one.events.values())
    )


def context_of(module: ModuleType) -> Context:
    """The context a module declares. Raises BadContext naming what is missing."""
    missing = [n for n in ("Command", "Event", "State", "STATE_VERSION", "decide", "evolve") if not hasattr(module, n)]
    if missing:
        raise BadContext(
            f"{module.__name__} has `decide` but no {', '.join(f'`{name}`' for name in missing)}.",
            "Add what is missing, in the order events, commands, errors, state, decide, evolve.",
        )
    try:
        module.State()
    except TypeError as error:
        raise BadContext(
            f"`State` of {module.__name__} can't be created without arguments: {error}.",
            "Give every field a default: `State()` is the state of a stream without events.",
        ) from error
    commands, events = _commands(module), _by_stored_name(module, "Event")
    return Context(
        name=module.__name__.rpartition(".")[2],
        commands=commands,
        events=events,
        state=module.State,
        state_version=module.STATE_VERSION,
        decide=module.decide,
        evolve=module.evolve,
        upcasters=versions.upcasters_of(module, [*commands.values(), *events.values()]),
    )


def _commands(module: ModuleType) -> dict[str, type]:
    """The commands by stored name. A field may have any type that pydantic can read from JSON."""
    commands = _by_stored_name(module, "Command")
    for command in commands.values():
        try:
            schema_of(command, by_alias=False)
        except PydanticUserError as error:
            raise BadContext(
                f"{module.__name__}: the command {command.__name__} can't be read from JSON: {error.message}.",
                "Write `@fact` above the class, and types that pydantic knows into its fields.",
            ) from error
    return commands


def _by_stored_name(module: ModuleType, union: str) -> dict[str, type]:
    """The classes of a union by stored name; a union of one is the class itself."""
    found: dict[str, type] = {}
    members = getattr(module, union)
    for member in get_args(members) or (members,):
        if not isinstance(member, type):
            raise BadContext(
                f"`{union}` of {module.__name__} has a member {member}, which is no class.",
                f"Write `{union}: TypeAlias = One | Other`, with classes under `@fact`.",
            )
        name = stored_name(member)
        if found.setdefault(name, member) is not member:
            raise BadContext(
                f"`{union}` of {module.__name__} has two classes that are stored as '{name}': "
                f"{found[name].__name__} and {member.__name__}.",
                "Rename one of them, or remove its `stored_as`.",
            )
    return found


def refusals_of(context: Context) -> dict[str, type[Refusal]]:
    """The context's refusals by code, sorted.

    They are those of its module, those that it imports by name, and those of modules of `domain/` that are no contexts. Raises
    BadContext where two have the same code, or one has a code of the handler's own.
    """
    home = context.decide.__module__
    imported = {id(value) for value in vars(sys.modules[home]).values()}
    own = [
        refusal
        for refusal in _below(Refusal)
        if "code" in vars(refusal)  # else its class statement failed
        and (refusal.__module__ == home or id(refusal) in imported or _is_shared(refusal))
    ]
    found: dict[str, type[Refusal]] = {}
    for refusal in sorted(own, key=lambda one: one.code):
        if refusal.code in found or refusal.code in RECORDED:
            raise BadContext(
                f"{refusal.__module__} has a refusal {refusal.__qualname__} with the code '{refusal.code}', which is taken.",
                "Give the class another name: its code is its name in kebab case.",
            )
        found[refusal.code] = refusal
    return found


def _is_shared(refusal: type[Refusal]) -> bool:
    """Whether it is defined in a module of `domain/` that is no context."""
    there = vars(sys.modules.get(refusal.__module__, domain))
    return refusal.__module__.startswith("domain.") and "decide" not in there and there.get(refusal.__name__) is refusal


def _below(root: type[Refusal]) -> Iterator[type[Refusal]]:
    for refusal in root.__subclasses__():
        yield refusal
        yield from _below(refusal)


class UnreadableState(SamefoldError):
    """The database holds a state that does not fit this code's State."""


def unreadable_state(stream: str, error: Exception) -> UnreadableState:
    return UnreadableState(
        f"The state of stream '{stream}' in the database does not fit this code's State: {error}.",
        "Raise the context's STATE_VERSION, `samefold db revision`, `samefold db upgrade`, `samefold rebuild`: "
        "it is folded again from the log.",
    )


class UnknownEvent(SamefoldError):
    """A commit that counts has an event that this code does not know. If it were skipped, readers would disagree."""


class UnreadableEvent(SamefoldError):
    """A commit that counts has an event whose body does not fit its class."""


def decode_event(context: Context, name: str, data: msgspec.Raw | bytes) -> Any:
    """The event of that stored type. Raises UnknownEvent, UnreadableEvent."""
    found = context.readers.get(name)
    if found is None:
        raise UnknownEvent(
            f"The log holds an event '{context.name}.{name}' that this code does not know.",
            "Deploy the version of the code that wrote it, or newer; nothing was skipped.",
        )
    try:
        return found[1](data)
    except MemoryError:
        raise
    except Exception as error:
        raise UnreadableEvent(
            f"The log holds an event '{context.name}.{name}' that does not fit this code's class: {error}.",
            f"Nothing was skipped. {unreadable_hint(name, error)}",
        ) from error


def read_released(context: Context, kind: Kind, stored: str, body: bytes) -> Any:
    """The event or command, as this code reads it. Raises what its reader raises."""
    if kind == "events":
        return decode_event(context, stored, body)
    fact, older = context.command_types[stored]
    return TypeAdapter(fact).validate_json(older.body(body) if older else body)


def _require_released(context: Context) -> None:
    """Require that a context's upcasters lead what was released to the classes of today. Raises BadContext."""
    record = read(context.name)
    for kind in KINDS:
        for stored, one in golden_bodies(record[kind]):
            if stored in (context.readers if kind == "events" else context.command_types):
                try:
                    read_released(context, kind, stored, storable.encode(one["body"]))
                except Exception as error:
                    raise BadContext(
                        f"domain.{context.name}: a body that was released as {stored} can't be read: {in_words(error)}.",
                        "Correct its upcasters. `samefold events check` says more.",
                    ) from error


def unreadable_hint(stored: str, error: Exception) -> str:
    """What to do about an event that can't be read."""
    if isinstance(error, versions.UpcastFailed):
        return "Correct the upcaster, and start again."
    return (
        f"`samefold events check` says what was changed in {stored} since it was released. If it never was: give what is new a "
        "default, or remove the log that only you have (`samefold dev reset`)."
    )
