"""Which types JSON gives back exactly, and whether a value has exactly its declared types.

States are JSON in the database, events in the log. A handler that has a state in memory and one that reads it must decide the same.
So a type is refused, by name, if JSON can't tell all its values apart; and a state that does not have exactly its types (an `int`
where a `float` is declared, a time in another zone than UTC) is replaced by what JSON gives back, before the next fold.
"""

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, MutableMapping, MutableSequence, MutableSet, Sequence
from collections.abc import Set as AbstractSet
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from functools import cache, cached_property, partial
from itertools import count
from threading import RLock
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints
from uuid import UUID

import msgspec

encode = msgspec.json.encode

_PLAIN: tuple[type, ...] = (bool, int, str, bytes, date, timedelta, Decimal, UUID)
_VALUES: dict[type, str] = {
    float: "{0}.__class__ is float and {0} - {0} == 0.0",
    datetime: "{0}.__class__ is datetime and ({0}.tzinfo is None or {0}.tzinfo is UTC) and not {0}.fold",
    time: "{0}.__class__ is time and ({0}.tzinfo is None or {0}.tzinfo is UTC) and not {0}.fold",
    NoneType: "{0} is None",
}
"""Python conditions that are true of exact values; `{0}` is the value's name."""
CONTAINERS: dict[Any, type] = {
    **{kind: kind for kind in (list, set, frozenset)},
    **dict.fromkeys((Collection, Sequence, MutableSequence), list),
    **dict.fromkeys((AbstractSet, MutableSet), set),
}
"""The type that a JSON array is decoded to, by declared type."""
MAPPINGS = (dict, Mapping, MutableMapping)
_KEYS = {*_PLAIN, float, datetime, time} - {bool}


class NotExact(Exception):
    """JSON does not give back every value of a type. `where` is the path to it, `hint` says what to write instead."""

    def __init__(self, where: str, why: str, hint: str) -> None:
        super().__init__(f"{where} {why}")
        self.hint = hint


class Lost(ValueError):
    """A value that JSON does not give back."""


def require_exact(kind: type) -> bool:
    """Raises NotExact where JSON does not give back every value of the type.

    Returns whether decoding makes its values without an author's `__post_init__`.
    """
    conditions = _Conditions()
    conditions.of(kind, "v", kind.__name__)
    return conditions.is_plain


building = RLock()
"""Held while decoders are made: msgspec (0.22) ends the process where two threads make those of one class at the same time."""


@cache
def decoder(kind: type) -> Callable[[bytes | str | msgspec.Raw], Any]:
    """The function from JSON to a value of the type. It raises msgspec.DecodeError, UnicodeDecodeError."""
    with building:
        return msgspec.json.Decoder(kind).decode


def through_json(kind: type, value: Any) -> Any:
    """A value as JSON gives it back. Raises Lost where that is another value."""
    try:
        read = decoder(kind)(encode(value))
    except (TypeError, ValueError, msgspec.MsgspecError) as error:
        raise Lost(f"{type(value).__name__} can't be stored: {error}") from error
    require_same(value, read)
    return read


def giving_exactly(kind: type, function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """The function, with its results as JSON gives them back. It then raises Lost too. Raises NotExact.

    A result that is exact already costs only a check of its types.
    """
    conditions = _Conditions()
    exact = conditions.of(kind, "v", kind.__name__).replace("v", "(v := function(a, b))", 1)
    conditions.names |= {"function": function, "through_json": partial(through_json, kind)}
    made: Callable[[Any, Any], Any] = eval(f"lambda a, b: v if {exact} else through_json(v)", conditions.names)  # noqa: S307
    return made


def require_same(value: Any, read: Any) -> None:
    """Raises Lost where JSON gave back another value; its type may differ."""
    if where := _difference(value, read):
        raise Lost(f"{type(value).__name__} can't be stored: JSON does not give back its {where}")


def comparable(value: Any) -> Any:
    """A form in which two values decoded from JSON are equal only if they are identical. Sets have no order."""
    if dataclasses.is_dataclass(value):
        return [comparable(getattr(value, field.name)) for field in dataclasses.fields(value)]
    match value:
        case set() | frozenset():
            return sorted(map(repr, map(comparable, value)))
        case dict():
            return [(comparable(key), comparable(item)) for key, item in value.items()]
        case list() | tuple():
            return [comparable(item) for item in value]
        case _:
            return repr(value)


@cache
def _names(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))


def _difference(value: Any, read: Any, path: str = "value") -> str | None:
    """The path to the first difference, or None."""
    if (kind := type(value)) in _PLAIN and kind is type(read):  # most are, and `match` costs four times as much
        return None if value == read else f"{path} ({value!r})"
    match value:
        case float() if not math.isfinite(value):
            return f"{path} ({value})"
        case datetime() | time() if isinstance(read, type(value)):
            same = value.utcoffset() == read.utcoffset() and value.replace(tzinfo=None) == read.replace(tzinfo=None)
            return None if same else f"{path} ({value!r})"
        case list() | tuple() if isinstance(read, (list, tuple)) and len(value) == len(read):
            pairs = [(a, b, f"{path}[{n}]") for n, (a, b) in enumerate(zip(value, read, strict=True))]
        case dict() if isinstance(read, dict) and len(value) == len(read):
            both = zip(value.items(), read.items(), strict=True)
            pairs = [pair for (k, v), (j, w) in both for pair in ((k, j, f"{path} key"), (v, w, f"{path}[{k!r}]"))]
        case _ if kind is type(read) and dataclasses.is_dataclass(kind):
            pairs = [(getattr(value, name), getattr(read, name), f"{path}.{name}") for name in _names(kind)]
        case _:
            return None if value == read else f"{path} ({value!r})"
    return next((found for pair in pairs if (found := _difference(*pair))), None)


class _Conditions:
    """Generates for types a Python expression that is true of their exact values. Compiled, it keeps the fold fast."""

    def __init__(self) -> None:
        self.names: dict[str, Any] = {"datetime": datetime, "time": time, "UTC": UTC, "float": float}
        self._number = count()
        self._within: list[type] = []
        self.is_plain = True

    def function(self, kind: Any, where: str) -> Callable[[Any], bool]:
        found: Callable[[Any], bool] = eval(f"lambda v: {self.of(kind, 'v', where)}", self.names)  # noqa: S307
        return found

    def of(self, kind: Any, value: str, where: str) -> str:
        """The condition for a value, given as the expression `value`."""
        kind = _unwrapped(kind)
        origin, arguments = get_origin(kind), get_args(kind)
        if origin in (Union, UnionType):
            _require_readable(kind, where)
            return self._named(value, lambda v: " or ".join(self.of(one, v, where) for one in arguments))
        if origin is Literal:
            _require_readable(kind, where)
            types = set(map(type, arguments))
            if len(types) > 1:
                return self.of(Union[tuple(Literal[one] for one in arguments)], value, where)  # noqa: UP007
            kind, known = self._name(types.pop()), self._name(frozenset(arguments))
            return self._named(value, lambda v: f"{v}.__class__ is {kind} and {v} in {known}")
        if kind in _VALUES:
            return self._named(value, _VALUES[kind].format)
        if kind in _PLAIN:
            return f"{value}.__class__ is {self._name(kind)}"
        if kind in (tuple[()], tuple) or origin is tuple:
            return self._tuple(kind, arguments, value, where)
        if origin in CONTAINERS and len(arguments) == 1:
            made = self._name(CONTAINERS[origin])
            return self._named(value, lambda v: f"{v}.__class__ is {made} and {self._all(arguments[0], v, where)}")
        if origin in MAPPINGS and len(arguments) == 2:
            return self._mapping(arguments, value, where)
        if isinstance(kind, type) and issubclass(kind, Enum):
            _require_readable(kind, where)
            return f"{value}.__class__ is {self._name(kind)}"
        if isinstance(kind, type) and (
            dataclasses.is_dataclass(kind) or (issubclass(kind, tuple) and hasattr(kind, "_fields"))
        ):
            return self._record(kind, value, where)
        raise NotExact(where, f"is {_name_of(kind)}, whose values JSON does not give back.", _ALLOWED)

    def _tuple(self, kind: Any, arguments: tuple[Any, ...], value: str, where: str) -> str:
        if kind is tuple:
            raise NotExact(where, "is a tuple of anything.", "Say what it holds: `tuple[int, ...]`.")
        made = self._name(tuple)
        if len(arguments) == 2 and arguments[1] is ...:
            return self._named(value, lambda v: f"{v}.__class__ is {made} and {self._all(arguments[0], v, where)}")
        length = len(arguments)

        def each(v: str) -> str:
            items = [self.of(one, f"{v}[{n}]", f"{where}[{n}]") for n, one in enumerate(arguments)]
            return " and ".join([f"{v}.__class__ is {made} and len({v}) == {length}", *items])

        return self._named(value, each)

    def _mapping(self, arguments: tuple[Any, ...], value: str, where: str) -> str:
        keys = _unwrapped(arguments[0])
        kinds = set(map(type, get_args(keys))) if get_origin(keys) is Literal else {keys}
        if len(kinds) != 1 or not all(
            one in _KEYS or (isinstance(one, type) and issubclass(one, Enum)) for one in kinds
        ):
            raise NotExact(
                where,
                f"has keys of type {_name_of(keys)}, which JSON does not give back.",
                "Use str, int, float, bytes, date, datetime, time, timedelta, Decimal, UUID, an Enum or a Literal.",
            )
        made = self._name(dict)
        same = f" and all(map({self._name(_is_key)}, {{0}}))".format if keys is Decimal else lambda _: ""
        return self._named(
            value,
            lambda v: (
                f"{v}.__class__ is {made} and (not {v} or {self._all(keys, v, f'{where} key')}{same(v)}"
                f" and {self._all(arguments[1], f'{v}.values()', where)})"
            ),
        )

    def _all(self, kind: Any, values: str, where: str) -> str:
        kind = _unwrapped(kind)
        if kind in _PLAIN or (isinstance(kind, type) and issubclass(kind, Enum)):
            self.of(kind, "v", f"{where}[]")
            return f"set(map(type, {values})) <= {self._name({kind})}"
        return f"all(map({self._name(self.function(kind, f'{where}[]'))}, {values}))"

    def _record(self, kind: Any, value: str, where: str) -> str:
        """The condition for a dataclass or a named tuple, with its fields."""
        if kind in self._within:
            raise NotExact(where, f"is a {kind.__name__} within a {kind.__name__}: as deep as memory.", _ALLOWED)
        try:
            hints = get_type_hints(kind)
        except NameError as error:
            hint = "Import what the annotations name at the top of the module (not under TYPE_CHECKING)."
            raise NotExact(where, f"has an annotation that can't be resolved: {error}.", hint) from error
        if dataclasses.is_dataclass(kind):
            fields = [field.name for field in dataclasses.fields(kind)]
            require_plain(kind, where)
        else:
            fields = list(kind._fields)
        self._within.append(kind)

        def each(v: str) -> str:
            # decoding calls __post_init__ again, with unknown effects
            again = ["False"] if hasattr(kind, "__post_init__") else []
            self.is_plain = self.is_plain and not again
            of_fields = [self.of(hints[name], f"{v}.{name}", f"{where}.{name}") for name in fields]
            return " and ".join([f"{v}.__class__ is {self._name(kind)}", *again, *of_fields])

        try:
            condition = self._named(value, each)
        finally:
            self._within.pop()
        _require_readable(kind, where)
        return condition

    def _name(self, thing: Any) -> str:
        """A name for the thing in the generated expression."""
        for name, known in self.names.items():
            if known is thing:
                return name
        name = f"k{next(self._number)}"
        self.names[name] = thing
        return name

    def _named(self, value: str, condition: Callable[[str], str]) -> str:
        """The condition in brackets; a value that is no plain name gets one."""
        if value.isidentifier():
            return f"({condition(value)})"
        name = f"x{next(self._number)}"
        return f"({condition(name)})".replace(name, f"({name} := {value})", 1)


def _is_key(number: Decimal) -> bool:
    """Whether a decimal survives as a key of JSON: there -0 becomes 0, and not every NaN can be decoded."""
    return number.is_finite() and bool(number or not number.is_signed())


def require_plain(kind: Any, where: str) -> None:
    """Raises NotExact unless a dataclass is immutable and has no state besides its fields."""
    if kind.__eq__ is object.__eq__:
        raise NotExact(
            where, "can't be compared.", "Leave out `eq=False`: what is read back must equal what was stored."
        )
    if not kind.__dataclass_params__.frozen:
        raise NotExact(where, "can be changed in place.", "Write `@dataclass(frozen=True, slots=True)`.")
    for field in dataclasses.fields(kind):
        if not field.init:
            raise NotExact(f"{where}.{field.name}", "is a field without `init`.", "Make it a property.")
    for base in kind.__mro__:
        for name, value in vars(base).items():
            if isinstance(value, cached_property):
                hint = "Make it a property: its cached value would be stored."
                raise NotExact(f"{where}.{name}", "is a cached_property.", hint)


def _require_readable(kind: Any, where: str) -> None:
    """Raises NotExact where no decoder can tell the type's values apart."""
    try:
        with building:
            msgspec.json.Decoder(kind)
    except (TypeError, NotImplementedError) as error:
        why = str(error).partition(" - type")[0]
        raise NotExact(where, f"is {_name_of(kind)}, which JSON can't tell apart: {why}.", _ALLOWED) from error


def _unwrapped(kind: Any) -> Any:
    while hasattr(kind, "__supertype__"):
        kind = kind.__supertype__
    return kind


def _name_of(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) and not get_args(kind) else str(kind)


_ALLOWED = (
    "Write bool, int, float, str, bytes, date, datetime, time, timedelta, Decimal, UUID, an Enum or Literal of texts or whole "
    "numbers, a dataclass (one with a field that says which, instead of several), or tuple, list, set, frozenset, dict of these."
)
