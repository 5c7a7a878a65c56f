"""Hypothesis strategies for commands and events, read from their classes: a new one is tested at once."""

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from functools import partial
from inspect import Parameter, signature
from math import ceil, floor
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen, MultipleOf
from hypothesis import reject
from hypothesis import strategies as st
from pydantic import ValidationError

from domain.engine.value_limits import LARGEST_INT, SMALLEST_INT
from infra.processes.time_limit import watched

_NO_CONTROLS = r"^[^\x00-\x1f\x7f-\x9f]"
"""How the patterns of `Text` and its like begin: they allow all that the alphabet below has."""
_ZONES = st.just(UTC) | st.integers(-1439, 1439).map(lambda minutes: timezone(timedelta(minutes=minutes)))
_EDGES = st.sampled_from([datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)])
_WITH_ZONE = st.datetimes(datetime(1, 1, 2), datetime(9999, 12, 30), timezones=_ZONES) | _EDGES  # noqa: DTZ001
"""What validators of times take. Of a plain `datetime` the log may hold older ones without a zone."""
_TIMES: dict[Any, Callable[..., st.SearchStrategy[Any]]] = {
    date: st.dates,
    time: st.times,
    timedelta: st.timedeltas,
}
_CONTAINERS: dict[Any, Callable[..., st.SearchStrategy[Any]]] = {
    list: st.lists,
    tuple: st.tuples,
    set: st.sets,
    frozenset: st.frozensets,
    dict: st.dictionaries,
}


def facts(cls: type) -> st.SearchStrategy[Any]:
    """Instances of a class made by `fact`, or of a part of one: its fields' bounds are respected and reached, defaults used."""
    hints = get_type_hints(cls, include_extras=True)
    names = getattr(cls, "_fields", None) or [field.name for field in fields(cls)]
    values = {name: _values(hints[name]) for name in names}
    free = {name for name, one in signature(cls).parameters.items() if one.default is not Parameter.empty}
    given = {name: one for name, one in values.items() if name not in free}
    optional = {name: one for name, one in values.items() if name in free}  # in this order: what is drawn depends on it
    return st.fixed_dictionaries(given, optional=optional).map(partial(_made, cls))


@watched(lambda local: f"a check of {local['cls'].__name__}")
def _made(cls: type, values: Mapping[str, Any]) -> Any:
    try:
        return cls(**values)
    except ValidationError:
        reject()  # a validator of the class's own, or a bound that the strategies below do not know


def members(union: Any) -> list[type]:
    """The classes of a union alias; a union of one is the class itself."""
    return list(get_args(union) or (union,))


def _values(hint: Any) -> st.SearchStrategy[Any]:
    if get_origin(hint) in (Union, UnionType):
        return st.one_of([st.none() if member is NoneType else _values(member) for member in get_args(hint)])
    if get_origin(hint) is Annotated:
        plain, *notes = get_args(hint)
        bounds = {type(bound): bound for note in notes for bound in (note, *getattr(note, "metadata", ()))}
        if plain is int:
            least = bounds[Ge].ge if Ge in bounds else bounds[Gt].gt + 1 if Gt in bounds else SMALLEST_INT
            most = bounds[Le].le if Le in bounds else bounds[Lt].lt - 1 if Lt in bounds else LARGEST_INT
            step = bounds[MultipleOf].multiple_of if MultipleOf in bounds else 1
            whole = st.integers(-(-least // step), most // step)
            return (whole | st.sampled_from([-(-least // step), most // step])).map(lambda n: n * step)
        if plain in (Decimal, float, *_TIMES):
            least = bounds[Ge].ge if Ge in bounds else bounds[Gt].gt if Gt in bounds else None
            most = bounds[Le].le if Le in bounds else bounds[Lt].lt if Lt in bounds else None
            if plain in _TIMES:
                return _TIMES[plain](plain.min if least is None else least, plain.max if most is None else most)
            if MultipleOf in bounds:
                step = bounds[MultipleOf].multiple_of
                first = None if least is None else ceil(least / step)
                last = None if most is None else floor(most / step)
                return st.integers(first, last).map(lambda n: plain(n * step))
            if plain is float:
                above, below = {Ge, Gt} & {*bounds} == {Gt}, {Le, Lt} & {*bounds} == {Lt}
                return st.floats(
                    least, most, allow_nan=False, allow_infinity=False, exclude_min=above, exclude_max=below
                )
            places = next((found for one in bounds.values() if (found := getattr(one, "decimal_places", None))), None)
            return st.decimals(least, most, places=places, allow_nan=False, allow_infinity=False)
        if plain is datetime:
            return _WITH_ZONE
        if plain in (str, bytes):
            least = bounds[MinLen].min_length if MinLen in bounds else 0
            most = bounds[MaxLen].max_length if MaxLen in bounds else None
            if plain is bytes:
                return st.binary(min_size=least, max_size=most)
            alphabet = st.characters(exclude_categories=["Cc", "Cs"])
            if (pattern := _pattern(notes)) and not pattern.startswith(_NO_CONTROLS):
                found = st.from_regex(pattern, fullmatch=True, alphabet=alphabet)
                return found.filter(lambda text: least <= len(text) <= (most or len(text)))
            return st.text(alphabet, min_size=least, max_size=most)
        return _values(plain)
    if get_origin(hint) is tuple and get_args(hint)[-1] is ...:
        return st.lists(_values(get_args(hint)[0])).map(tuple)
    if get_origin(hint) in _CONTAINERS:
        return _CONTAINERS[get_origin(hint)](*map(_values, get_args(hint)))
    if hint is int:
        return st.integers(SMALLEST_INT, LARGEST_INT)
    if hint is datetime:
        return _WITH_ZONE | st.datetimes()
    if hint is float:
        return st.floats(allow_nan=False, allow_infinity=False)
    if hint is Decimal:
        return st.decimals(allow_nan=False, allow_infinity=False)
    return facts(hint) if is_dataclass(hint) or hasattr(hint, "_fields") else st.from_type(hint)


def _pattern(notes: list[Any]) -> str | None:
    found = (getattr(bound, "pattern", None) for note in notes for bound in getattr(note, "metadata", []))
    return next((pattern for pattern in found if pattern), None)
