"""A row as the API answers it, now or whenever it changes."""

from __future__ import annotations

import base64
import hashlib

import msgspec

from api.view_reader import Values
from projections.engine.views.queries import Found
from projections.engine.views.view import Kind, View


class RowAnswer(msgspec.Struct):
    """The body of a row."""

    row: msgspec.Raw
    position: str
    parked: int | msgspec.UnsetType = msgspec.UNSET


def stream_of(view: View, key: Values) -> str | None:
    """The stream that the row with this key is folded from, where the key tells."""
    return f"{view.contexts[0]}/{key[0]}" if tells_stream(view) else None


def tells_stream(view: View) -> bool:
    """Whether a row's key is its stream's id."""
    return view.kind is Kind.ENTITY and view.key_function is None


def row_tag(view: View, found: Found, row: msgspec.Raw) -> str:
    """A name for what an answer with this row holds."""
    return content_tag(row) if tells_stream(view) else content_tag(row, b"%d" % found.parked)


def row_body(view: View, found: Found, row: msgspec.Raw) -> bytes:
    """The answer's body. Where the key does not tell the stream, the parked ones are counted."""
    answer = RowAnswer(row, str(found.position))
    if not tells_stream(view):
        answer.parked = found.parked
    return msgspec.json.encode(answer)


def content_tag(*parts: bytes) -> str:
    """A name for what an answer holds. As the answer's position moves while that stays, an ETag of it is a weak one."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(b"%d:" % len(part))
        digest.update(part)
    return base64.urlsafe_b64encode(digest.digest()[:15]).decode()
