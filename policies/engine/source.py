"""A source, read from its module: which messages of another service it takes, and how they are read (docs/sources.md)."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from types import ModuleType, UnionType
from typing import Any, TypeVar, Union, cast, dataclass_transform, get_args, get_origin

from pydantic import ConfigDict, TypeAdapter
from pydantic.dataclasses import dataclass as validated

from infra.errors import SamefoldError
from infra.settings import ENDPOINT_NAME, Settings
from projections.engine.views.columns import hints_of

MessageT = TypeVar("MessageT")
Verify = Callable[[Mapping[str, str], bytes, Sequence[str]], str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """Where a message came from; the defaults are for tests. `id` and `type` are its own, None where it has none."""

    source: str
    topic: str = ""
    partition: int = 0
    offset: int = 0
    time: datetime = datetime(1970, 1, 1, tzinfo=UTC)
    """The record's, by its producer's or its broker's clock."""
    key: str | None = None
    """As text; bytes that are none are written as `\\\\xff`."""
    id: str | None = None
    """A webhook's `webhook-id`, else CloudEvents' source and id with a space between."""
    type: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    """The record's, by their names in lower case."""


@dataclass_transform(frozen_default=True, kw_only_default=True)
def message(kind: str | None = None) -> Callable[[type[MessageT]], type[MessageT]]:
    """Make a class a message of that type, or of a topic whose messages have no types: frozen, keyword only, and strict.

    Fields that it does not name are ignored. It is built of the same types as events are (`domain.language`).
    """

    def make(cls: type[MessageT]) -> type[MessageT]:
        config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False, val_json_bytes="base64")
        made = validated(cls, frozen=True, slots=True, kw_only=True, config=config)
        setattr(made, _TYPE, kind)
        return cast(type[MessageT], made)

    return make


_TYPE = "__message_type__"


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """What a module of `policies/` that has `SOURCE` declares."""

    name: str
    receive: Callable[[Any, Received], Iterable[Any]]
    """It yields wishes: `Send`."""
    types: Mapping[str | None, TypeAdapter[Any]]
    """By message type; None alone where its one class is that of each message."""
    by_id: bool = False
    type_header: str | None = None
    decode: Callable[[bytes], Any] | None = None
    verify: Verify | None = None

    def goes_by_id(self, settings: Settings) -> bool:
        """Whether a message's own id counts, not its place: of a webhook always. Raises NotConfigured."""
        return self.by_id or bool(settings.source(self.name).secrets)


def source_of(module: ModuleType, bad: type[SamefoldError]) -> Source:
    """Raises `bad`."""
    file = f"policies/{module.__name__.rpartition('.')[2]}.py"
    receive = _function(module, "receive(message: …, at: Received) -> Iterable[Send]", bad)
    if receive is None:
        raise bad(f"{file} has SOURCE, but no function `receive`.", "Write receive(message: …, at: Received)")
    name = module.__dict__["SOURCE"]
    if not (isinstance(name, str) and re.fullmatch(ENDPOINT_NAME, name)):
        raise bad(
            f"{file} has SOURCE = {name!r}.",
            "It is a name in SAMEFOLD_SOURCES: at most 63 lower case letters, digits, - and _.",
        )
    hint = hints_of(receive, file, bad).get("message")
    types: dict[str | None, TypeAdapter[Any]] = {}
    for one in get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,):
        if not isinstance(one, type) or _TYPE not in vars(one):
            raise bad(
                f"`receive` of {file} takes {getattr(one, '__name__', one)}, which is no message.",
                'Write @message("its type") above each class that `message: A | B` names.',
            )
        kind = getattr(one, _TYPE)
        if kind in types:
            above = f'@message("{kind}")' if kind else "@message()"
            raise bad(f"{file} has two classes with {above}.", "Let one class have both's fields.")
        types[kind] = TypeAdapter(one)
    if None in types and len(types) > 1:
        raise bad(
            f"{file} has a class without a message type beside others.", 'Name the type of each: @message("its type").'
        )
    dedup, header = getattr(module, "DEDUP", None), getattr(module, "TYPE", None)
    if dedup not in (None, "id"):
        raise bad(f"{file} has DEDUP = {dedup!r}.", 'It is "id": a message\'s own id counts, not its place.')
    return Source(
        name=name,
        receive=receive,
        types=types,
        by_id=dedup == "id",
        type_header=str(header).lower() if header is not None else None,
        decode=_function(module, "decode(body: bytes) -> Any", bad),
        verify=_function(module, "verify(headers, body, secrets) -> str | None", bad),
    )


def _function(module: ModuleType, signature: str, bad: type[SamefoldError]) -> Any:
    """The module's function with that name and those parameters, None if it has none. Raises `bad`."""
    name, *parameters = re.findall(r"(?:^|[(,] ?)(\w+)", signature)  # the words at the beginning and after each ( or ,
    function = module.__dict__.get(name)
    if function is not None and not (
        inspect.isfunction(function)
        and [*inspect.signature(function).parameters] == parameters
        and not inspect.iscoroutinefunction(function)
        and not inspect.isasyncgenfunction(function)
    ):
        file = f"policies/{module.__name__.rpartition('.')[2]}.py"
        raise bad(f"`{name}` of {file} is async, or has other parameters than the engine passes.", f"Write {signature}")
    return function
