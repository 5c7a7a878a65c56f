"""Where a page ended: an opaque text, bound to the question it belongs to."""

from __future__ import annotations

import base64
from collections.abc import Sequence

import msgspec

from infra.errors import SamefoldError
from projections.engine.views.view import fingerprint


class BadCursor(SamefoldError):
    """A cursor of another question, or none at all."""

    is_public = True


class _Place(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    question: str
    values: list[str]


_decode = msgspec.json.Decoder(_Place).decode


def cursor_after(question: Sequence[str], values: Sequence[str]) -> str:
    """The cursor that goes on after these values, for whoever asks the same question again."""
    place = msgspec.json.encode(_Place(_name(question), list(values)))
    return base64.urlsafe_b64encode(place).rstrip(b"=").decode()


def values_of(cursor: str, question: Sequence[str], count: int) -> list[str]:
    """The values that a cursor was made with, of which there are `count`. Raises BadCursor."""
    try:
        place = _decode(base64.b64decode(cursor + "=" * (-len(cursor) % 4), b"-_", validate=True))
    except (ValueError, msgspec.DecodeError):
        place = None
    if place is None or place.question != _name(question) or len(place.values) != count:
        raise BadCursor(
            "The cursor is not one of this question.", "Follow an answer's `next` as it is, or begin without a cursor."
        )
    return place.values


def _name(question: Sequence[str]) -> str:
    return fingerprint(msgspec.json.encode(list(question)).decode())
