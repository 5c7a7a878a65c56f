"""The header Prefer (RFC 7240): `respond-async` and `wait=N`. Whatever else it holds is somebody else's, and passed over."""

from __future__ import annotations

import re
from typing import NamedTuple

from fastapi import Request

_PREFERENCE = re.compile(r'\s*+([!#$%&\'*+\-.^_`|~0-9A-Za-z]++)\s*+(?:=\s*+("[^"]*+"|[^\s,;"]*+))?\s*+(?:;[^,]*+)?')
"""Possessive throughout: with backtracking, a few thousand spaces in a header would take seconds."""
_SECONDS = re.compile(r"[0-9]{1,9}").fullmatch


class Preferences(NamedTuple):
    """How a caller wants to be answered. `wait_s` is None where nothing was said."""

    respond_async: bool
    wait_s: int | None

    def wait_within(self, default_s: float, longest_s: float) -> float:
        """How long to wait, in seconds: what was asked for, up to `longest_s`."""
        if self.wait_s is None:
            return 0.0 if self.respond_async else default_s
        return min(float(self.wait_s), longest_s)

    def applied(self, longest_s: float) -> dict[str, str]:
        """The header Preference-Applied, where there is something to tell."""
        said = ["respond-async"] if self.respond_async else []
        said += [f"wait={min(self.wait_s, int(longest_s))}"] if self.wait_s is not None else []
        return {"Preference-Applied": ", ".join(said)} if said else {}


NONE = Preferences(respond_async=False, wait_s=None)


def preferences(request: Request) -> Preferences:
    """Of the same preference said twice the first counts, as the RFC has it."""
    lines = request.headers.getlist("Prefer")
    if not lines:
        return NONE
    said: dict[str, str] = {}
    for line in lines:
        for part in line.split(","):
            if match := _PREFERENCE.fullmatch(part):
                said.setdefault(match[1].lower(), (match[2] or "").strip('"'))
    wait = said.get("wait", "")
    return Preferences("respond-async" in said, int(wait) if _SECONDS(wait) else None)
