"""Middleware that lets in only who shows a valid token, where SAMEFOLD_AUTH=jwt."""

from __future__ import annotations

from fastapi import Request

from infra.access import Caller


def caller_of(request: Request) -> Caller | None:
    """Who asks; None where SAMEFOLD_AUTH=off, and everybody may do everything."""
    caller: Caller | None = request.scope.get("samefold.caller")
    return caller
