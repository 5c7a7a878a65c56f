"""Paths are split before they are decoded, so that `%2F` stays inside its segment (RFC 3986, section 2.2).

A stream's name may hold a slash, an emoji, anything but control characters. Servers and frameworks decode the whole path first,
and then can't tell a slash that separates from one that belongs to a name.
"""

from __future__ import annotations

from urllib.parse import quote, unquote_to_bytes

from fastapi import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from api.problems import kind

BAD_SEGMENT = kind(
    422, "bad-segment", "A part of the path is not UTF-8.", "Encode the text as UTF-8, and that by percent signs."
)

_PLAIN = "!$&'()*+,;=:@"
"""What RFC 3986 allows in a segment beside letters, digits and `-._~`."""


class RawPath:
    """Has the app route on the path as it came, each segment in its normal form: encoded where it must be, and nowhere else."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            raw: bytes = scope.get("raw_path") or b""
            scope["path"] = normal(raw.partition(b"?")[0]) if raw else quote(scope["path"])
        await self.app(scope, receive, send)


def normal(raw: bytes) -> str:
    """A raw path with equal segments written equally: `/a%2Fb/%64` becomes `/a%2Fb/d`."""
    if b"%" not in raw and raw.isascii():
        return raw.decode()
    return "/".join(quote(unquote_to_bytes(segment), safe=_PLAIN) for segment in raw.split(b"/"))


def segment(request: Request, name: str) -> str:
    """The decoded text of a path parameter. Raises Problem 422."""
    try:
        return unquote_to_bytes(request.path_params[name]).decode()
    except UnicodeDecodeError:
        raise BAD_SEGMENT(f"'{name}' is not UTF-8.") from None


def path_of(*segments: str) -> str:
    """The path of these segments, each encoded by itself."""
    return "".join(f"/{quote(one, safe=_PLAIN)}" for one in segments)
