"""What a request's headers ask for. A header that must be single and comes twice, or in no form that we know, is refused: 400."""

from __future__ import annotations

import re
from uuid import uuid4

from fastapi import Request

from api.problems import kind

BAD_HEADER = kind(
    400, "bad-header", "A header can't be understood.", "`detail` says which, and what it must look like."
)

MAX_BYTES = 200

_QUOTED = re.compile(r'"((?:[ !#-\[\]-~]|\\["\\])*)"').fullmatch
_BARE = re.compile(r"[!#-+\--:<-\[\]-~]+").fullmatch
"""Visible ASCII without what would make it two keys or none: quote, comma, semicolon, backslash."""
_VERSION = re.compile(r'"(0|[1-9][0-9]{0,17})"').fullmatch
_MEDIA_TYPE = re.compile(
    r"\s*+application/json\s*+(;\s*+charset\s*+=\s*+\"?utf-8\"?\s*+)?;?\s*+", re.IGNORECASE
).fullmatch
"""Possessive: with backtracking, a few thousand spaces would take seconds."""


def single(request: Request, name: str) -> str | None:
    """The header's value, or None without one. Raises Problem 400 where it comes more than once."""
    values = request.headers.getlist(name)
    if len(values) > 1:
        raise BAD_HEADER(f"{name} comes {len(values)} times; it must come once.")
    return values[0].strip(" \t") if values else None


def idempotency_key(request: Request) -> tuple[str, bool]:
    """The command's id, and whether it is the caller's; else a new one. Raises Problem 400.

    A string of RFC 9651 (`"8e03978e"`), as draft-ietf-httpapi-idempotency-key-header has it; without its quotes it is taken too.
    """
    value = single(request, "Idempotency-Key")
    if value is None:
        return str(uuid4()), False
    string = _QUOTED(value)
    key = re.sub(r'\\(["\\])', r"\1", string[1]) if string else value if _BARE(value) else ""
    if not 0 < len(key) <= MAX_BYTES:
        raise BAD_HEADER(
            f'Idempotency-Key must be a string like "8e03978e-40d5", of 1 to {MAX_BYTES} printable ASCII characters.'
        )
    return key, True


def quoted(key: str) -> str:
    """A key as the header's value; keys that were given in another way may hold what no header can: those are left as they are."""
    return '"' + re.sub(r'(["\\])', r"\\\1", key) + '"'


def expected_version(request: Request) -> int | None:
    """The version that the stream must have: of `If-Match: "3"`, or 0 for `If-None-Match: *`. Raises Problem 400."""
    match, none_match = single(request, "If-Match"), single(request, "If-None-Match")
    if match is not None and none_match is not None:
        raise BAD_HEADER("If-Match and If-None-Match exclude each other here.")
    if none_match is not None:
        if none_match != "*":
            raise BAD_HEADER("If-None-Match must be *: the stream must have no events yet.")
        return 0
    if match is None:
        return None
    found = _VERSION(match)
    if found is None:
        raise BAD_HEADER('If-Match must be one version as an answer\'s ETag has it: "3".')
    return int(found[1])


def correlation_id(request: Request) -> str | None:
    """The caller's own id of the whole matter, which is kept in the commit. Raises Problem 400."""
    value = single(request, "Correlation-Id")
    if value is not None and not (value.isascii() and value.isprintable() and 0 < len(value) <= MAX_BYTES):
        raise BAD_HEADER(f"Correlation-Id must have 1 to {MAX_BYTES} printable ASCII characters.")
    return value


def is_json(request: Request) -> bool:
    """Whether the body is declared to be JSON in UTF-8. Raises Problem 400 where it is declared twice."""
    value = single(request, "Content-Type")
    return value is not None and _MEDIA_TYPE(value) is not None
