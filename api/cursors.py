"""Cursors: where the page before ended. Each is bound to its question, so that one of another question is refused by name."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar
from urllib.parse import urlencode

import msgspec

from api.problems import kind
from projections.engine.views.columns import BadValue
from projections.engine.views.view import fingerprint

BAD_CURSOR = kind(422, "bad-cursor", "The cursor is invalid, or of another query.")

T = TypeVar("T")


class _Place(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    bound: list[str]
    values: list[str | None]


def next_path(path: str, given: Mapping[str, str], bound: Mapping[str, str], values: Sequence[str | None]) -> str:
    """The path of the page behind the row with these values, of the question with the given parameters."""
    made = msgspec.json.encode(_Place(list(bound.values()), list(values)))
    cursor = base64.urlsafe_b64encode(made).rstrip(b"=").decode()
    rest = {name: text for name, text in given.items() if name not in ("cursor", "after")}
    return f"{path}?{urlencode(rest | {'cursor': cursor})}"


def place_of(cursor: str, bound: Mapping[str, str], parse: Callable[[list[str | None]], T]) -> T:
    """What `parse` makes of the values that a cursor was made with; it may raise ValueError, BadValue. Raises Problem 422."""
    try:
        place = msgspec.json.decode(
            base64.b64decode(cursor + "=" * (-len(cursor) % 4), b"-_", validate=True), type=_Place
        )
        others = [what for (what, name), own in zip(bound.items(), place.bound, strict=True) if own != name]
        if not others:
            return parse(place.values)
        detail = f"The cursor is of another query: of another {' and another '.join(others)}."
    except (ValueError, msgspec.DecodeError, BadValue):
        detail = "The cursor is none that an answer gave."
    raise BAD_CURSOR(detail, hint="Use an answer's `next` unchanged, or start without a cursor.")


def named(parts: Iterable[str]) -> str:
    """A short name of these texts, to bind a cursor to them."""
    return fingerprint(msgspec.json.encode(list(parts)).decode())[:8]
