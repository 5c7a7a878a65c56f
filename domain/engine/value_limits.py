"""Refuses values of commands and events that no column can hold, where they enter or are made.

Times without a zone or outside the years 1 to 9999 in UTC, times of day with one, whole numbers beyond 64 bits, decimals that are
not finite or have more than 1,000 digits before or behind the point. Fields that exclude them need no check: a `Moment`, a whole
number with both bounds (also beyond 64 bits).
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime, time
from decimal import Decimal
from functools import cache
from typing import Annotated, Any, ClassVar, Final, TypeAlias, get_args, get_origin, get_type_hints

from pydantic import ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError

from domain.language import Moment, in_utc

SMALLEST_INT, LARGEST_INT = -(2**63), 2**63 - 1
MOST_DIGITS: Final = 1_000
"""Most digits before and behind a decimal's point, and of one increment of a sum. Any number of those add up within `numeric`."""

_LIMITED = frozenset({int, Decimal, datetime, time})
_Types: TypeAlias = Mapping[type, Mapping[str, frozenset[Any]]]  # by class and field: limited types, and classes within


def within_limits(kind: type, read: Callable[..., Any]) -> Callable[..., Any]:
    """The function from JSON to this class. It then raises pydantic.ValidationError for what no column can hold, too."""
    types = _types_of(kind)

    def checked(*arguments: Any, **options: Any) -> Any:
        value = read(*arguments, **options)
        if found := _beyond(value, _LIMITED, types, ()):
            raise ValidationError.from_exception_data(kind.__name__, found)
        return value

    return checked if any(one & _LIMITED for fields in types.values() for one in fields.values()) else read


def plain_times(kind: type) -> list[str]:
    """The fields of the type `datetime`, which may have no zone, each with its class: `RoomBooked.since`."""
    types = _types_of(kind)
    return [f"{one.__name__}.{name}" for one, fields in types.items() for name in fields if datetime in fields[name]]


@cache
def _types_of(kind: type) -> _Types:
    found: dict[type, dict[str, frozenset[Any]]] = {}
    left = [kind]
    while left:
        if (one := left.pop()) not in found:
            hints = get_type_hints(one, include_extras=True)
            found[one] = {name: types for name, hint in hints.items() if (types := frozenset(_types(hint)))}
            left += [part for types in found[one].values() for part in types - _LIMITED]
    return found


def _types(hint: Any, notes: tuple[Any, ...] = ()) -> Iterator[Any]:
    """The types in a field's. `notes` are those of the annotations around it."""
    hint = getattr(hint, "__supertype__", hint)
    if get_origin(hint) is Annotated:
        hint, *more = get_args(hint)
        yield from _types(hint, (*notes, *more, *(one for note in more for one in getattr(note, "metadata", ()))))
    elif hint is int:
        given = {name for note in notes for name in ("ge", "gt", "le", "lt") if getattr(note, name, None) is not None}
        yield from () if given & {"ge", "gt"} and given & {"le", "lt"} else (int,)
    elif hint is datetime:
        yield from () if get_args(Moment)[1] in notes else (datetime,)
    elif hint in (Decimal, time) or dataclasses.is_dataclass(hint) or hasattr(hint, "_fields"):
        yield hint
    elif get_origin(hint) is not ClassVar:
        for one in get_args(hint):
            yield from _types(one)


def _beyond(value: Any, types: frozenset[Any], known: _Types, path: tuple[int | str, ...]) -> list[InitErrorDetails]:
    """What is wrong with each value beyond the limits."""
    kind, wrong = type(value), ""
    parts: Iterable[tuple[int | str, Any, frozenset[Any]]] = ()
    if kind is int:
        if int in types and not SMALLEST_INT <= value <= LARGEST_INT:
            wrong = "it does not fit into 64 bits"
    elif kind in known:
        parts = [(name, getattr(value, name), inner) for name, inner in known[kind].items()]
    elif isinstance(value, datetime):
        try:
            in_utc(value)
        except ValueError as error:
            wrong = str(error) if datetime in types else ""
    elif kind is time:
        if value.tzinfo is not None:
            wrong = "it has a time zone, which a time of day can't have: write 08:00:00"
    elif kind is Decimal:
        if not value.is_finite():
            wrong = "it is not a finite number"
        elif value.adjusted() >= MOST_DIGITS or value.as_tuple().exponent < -MOST_DIGITS:
            wrong = f"it has more than {MOST_DIGITS} digits before or after the point"
    elif isinstance(value, Mapping):
        parts = [(str(pair[0]), one, types) for pair in value.items() for one in pair]
    elif isinstance(value, list | tuple | set | frozenset):
        parts = [(place, one, types) for place, one in enumerate(value)]
    if wrong:
        return [InitErrorDetails(type=PydanticCustomError("beyond", "{wrong}", {"wrong": wrong}), loc=path, input=None)]
    return [found for place, part, inner in parts for found in _beyond(part, inner, known, (*path, place))]
