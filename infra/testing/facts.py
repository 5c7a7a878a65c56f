"""Hypothesis strategies for commands and events, read from their classes: a new one is tested at once."""

from dataclasses import fields
from decimal import Decimal
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Le, MaxLen, MinLen
from hypothesis import strategies as st
from pydantic.dataclasses import is_pydantic_dataclass

_NO_CONTROLS = r"^[^\x00-\x1f\x7f-\x9f]"
"""How the patterns of `Text` and its like begin: they allow all that the alphabet below has."""


def facts(cls: type) -> st.SearchStrategy[Any]:
    """Instances of a class made by `fact`, the bounds of its fields respected and reached."""
    hints = get_type_hints(cls, include_extras=True)
    return st.builds(cls, **{field.name: _values(hints[field.name]) for field in fields(cls)})


def members(union: Any) -> list[type]:
    """The classes of a union alias; a union of one is the class itself."""
    return list(get_args(union) or (union,))


def _values(hint: Any) -> st.SearchStrategy[Any]:
    if get_origin(hint) in (Union, UnionType):
        return st.one_of([st.none() if member is NoneType else _values(member) for member in get_args(hint)])
    if get_origin(hint) is Annotated:
        plain, *notes = get_args(hint)
        bounds = {type(bound): bound for note in notes for bound in getattr(note, "metadata", [])}
        if plain is int:
            return st.integers(bounds[Ge].ge, bounds[Le].le)
        if plain is str:
            alphabet = st.characters(exclude_categories=["Cc", "Cs"])
            least = bounds[MinLen].min_length if MinLen in bounds else 0
            most = bounds[MaxLen].max_length if MaxLen in bounds else None
            if (pattern := _pattern(notes)) and not pattern.startswith(_NO_CONTROLS):
                found = st.from_regex(pattern, fullmatch=True, alphabet=alphabet)
                return found.filter(lambda text: least <= len(text) <= (most or len(text)))
            return st.text(alphabet, min_size=least, max_size=most)
        return _values(plain)
    if get_origin(hint) is tuple and get_args(hint)[1:] == (...,):
        return st.lists(_values(get_args(hint)[0]), max_size=3).map(tuple)
    if get_origin(hint) is dict:
        return st.dictionaries(*map(_values, get_args(hint)), max_size=3)
    if hint is Decimal:
        return st.decimals(allow_nan=False, allow_infinity=False)
    return facts(hint) if is_pydantic_dataclass(hint) else st.from_type(hint)


def _pattern(notes: list[Any]) -> str | None:
    found = (getattr(bound, "pattern", None) for note in notes for bound in getattr(note, "metadata", []))
    return next((pattern for pattern in found if pattern), None)
