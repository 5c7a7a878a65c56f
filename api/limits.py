"""Bodies are read within bounds: of size, before all of it is here, and of time."""

from __future__ import annotations

import asyncio

from fastapi import Request
from starlette.requests import ClientDisconnect

from api.problems import kind

TOO_LARGE = kind(
    413,
    "too-large",
    "That is too much.",
    "A command's record may have `max_command_bytes`, and the events it leads to `max_commit_bytes` (settings of the service).",
)
TOO_SLOW = kind(
    408, "too-slow", "The request did not arrive in time.", "Nothing was done. Send it again, all of it at once."
)
BAD_LENGTH = kind(400, "bad-length", "The length of the body is not a number.", "Leave Content-Length to your library.")
CUT_OFF = kind(400, "cut-off", "The request ended too early.", "The connection was lost in the midst of the body.")


async def body_of(request: Request, most: int, within_s: float) -> bytes:
    """The body, of at most that many bytes. Raises Problem 400, 408, 413, having read no more than it must."""
    declared = request.headers.get("Content-Length")
    if declared is not None:
        if not declared.isdecimal():
            raise BAD_LENGTH()
        if int(declared[:20]) > most:
            raise _too_large(most)
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(within_s):
            async for part in request.stream():
                size += len(part)
                if size > most:
                    raise _too_large(most)
                parts.append(part)
    except TimeoutError:
        raise TOO_SLOW(f"The body took longer than {within_s:g} s.", headers={"Connection": "close"}) from None
    except ClientDisconnect:
        raise CUT_OFF() from None
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _too_large(most: int) -> Exception:
    return TOO_LARGE(f"The body may have {most} bytes.", limit=most)
