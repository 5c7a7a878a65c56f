"""What the functions of generated views and contexts do: `act` and `picks` of each event say it. Nothing here knows the engine.

The columns of a row are written into the next one (`seen`), so a row that differs in one way to fold it shows in the next.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from datetime import datetime
from typing import Any

from proofs.one_fold.values import Type, Word

SEEN = "seen"
"""The last column of rows and states."""


def tell(value: Any) -> str:
    """Which value it is, and of which class."""
    if is_dataclass(value):
        return f"{type(value).__name__}({', '.join(tell(getattr(value, f.name)) for f in fields(value) if f.name != SEEN)})"
    if isinstance(value, set | frozenset):
        return f"{type(value).__name__}{sorted(map(tell, value))}"
    if isinstance(value, tuple | list):
        return f"{type(value).__name__}{[tell(one) for one in value]}"
    if isinstance(value, dict):
        return f"{type(value).__name__}{[(tell(k), tell(v)) for k, v in value.items()]}"
    if isinstance(value, datetime):
        return f"{value!r} {value.fold}"
    return f"{type(value).__name__} {value!r}"


def pick(kind: Type, number: int, *, optional: bool = False) -> Any:
    """Of the values that fit, or, below zero, of those that don't."""
    if number < 0:
        return kind.bad[(-number - 1) % len(kind.bad)] if kind.bad else None
    if optional:
        return (*kind.good, None)[number % (len(kind.good) + 1)]
    return kind.good[number % len(kind.good)]


def keys(kinds: Sequence[Type], event: Any) -> tuple[Any, ...]:
    return tuple(pick(kind, number) for kind, number in zip(kinds, event.keys, strict=False))


def owner(name: str, event: Any) -> str:
    """What a key begins with: the name of the event's stream, or of another one."""
    return "stray" if event.act == "stray" else name


class Fields:
    """The columns that are no keys, and their types; `optional` are those that may be None."""

    def __init__(self, kinds: Mapping[str, Type], optional: Sequence[str] = ()) -> None:
        self.kinds = kinds
        self.optional = optional

    def values(self, event: Any, shift: int = 0) -> dict[str, Any]:
        picks = event.picks
        return {
            name: pick(kind, picks[(place + shift) % len(picks)], optional=name in self.optional)
            for place, (name, kind) in enumerate(self.kinds.items())
        }

    def folded(self, before: Any, event: Any) -> dict[str, Any]:
        """Every other one is that of the row before."""
        values = self.values(event)
        return {name: getattr(before, name) if place % 2 else values[name] for place, name in enumerate(values)}


def spoil(row: Any) -> None:
    """Change what can be changed in place. The row before is no argument to keep anything in."""
    for value in row or ():
        if isinstance(value, list):
            value.reverse()
        if isinstance(value, dict):
            value.clear()


def entity(row_class: Any, columns: Fields, key: tuple[Any, ...], row: Any, event: Any) -> Any:
    seen = tell(None if row is None else tuple(row[:-1]))
    spoil(row)
    match event.act:
        case "raise":
            raise ValueError("on purpose")
        case "gone":
            return None
        case "alien":
            return ("alien",)
        case "keep" if row is not None:
            return row
    values = columns.folded(row, event) if event.act == "fold" and row is not None else columns.values(event)
    if event.act == "word":
        key = (Word(key[0]), *key[1:])
    return row_class(*key, **values, seen=seen)


def rows(row_class: Any, columns: Fields, key: tuple[Any, ...], event: Any, after: Any) -> Iterator[Any]:
    """Key columns are `key` and a number."""
    for n in range({"gone": 0, "fold": 2, "keep": 3}.get(event.act, 1)):
        yield row_class(*key, n, **columns.values(event, n), seen=tell(after))
    if event.act == "stray":
        yield row_class("stray", *key[1:], 0, **columns.values(event), seen="")
    if event.act == "alien":
        yield ("alien",)
    if event.act == "raise":
        raise ValueError("on purpose")


def increments(row_class: Any, columns: Fields, key: tuple[Any, ...], event: Any) -> Iterator[Any]:
    for n in range({"gone": 0, "fold": 2}.get(event.act, 1)):
        yield row_class(*key, **columns.values(event, n))
    if event.act == "alien":
        yield ("alien",)
    if event.act == "raise":
        raise ValueError("on purpose")


def state(columns: Fields, before: Any, event: Any) -> Any:
    picks = type("Picked", (), {"picks": tuple(map(abs, event.picks))})
    values = columns.folded(before, picks) if event.act == "fold" else columns.values(picks)
    return type(before)(**values, seen=tell(before))
