"""The door: middleware that lets in requests with a valid token, where SAMEFOLD_AUTH=jwt.

It asks before anything of the request is read or routed, so a route that is added later is behind it too.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from fastapi import Request
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from api.problems import Problem, kind, kind_of, problem_of
from api.requests import BAD_HEADER
from infra.access import Caller
from infra.errors import SamefoldError
from infra.observability.logs import Sparing
from infra.settings import Settings

if TYPE_CHECKING:
    from api.issuer import Issuer, Verified

log = logging.getLogger(__name__)
log.addFilter(Sparing(10))


class TokenRefused(SamefoldError):
    """The token is not valid."""


class KeysNotKnown(SamefoldError):
    """The issuer's keys could not be read, so no token of its can be checked."""

    is_public = True


NOT_AUTHENTICATED = kind(401, "not-authenticated", "The caller is not authenticated.")
NOT_ALLOWED = kind(403, "not-allowed", "The caller may not do that.")
PROBLEMS = (BAD_HEADER, NOT_AUTHENTICATED, NOT_ALLOWED, kind_of(KeysNotKnown))
"""What the door answers, on every path but the open ones."""
OPEN = frozenset({"/health/live", "/health/ready"})
"""For probes, which have no token."""
DOCS = re.compile(r"/docs|/openapi\.json|/static-offline-docs/.*").fullmatch
METRICS = "metrics"
"""The scope that the path of the same name needs."""
CONSOLE = "/console"
_SIGNS_IN = re.compile(rf"{CONSOLE}/(sign-in|static/.*)").fullmatch
COOKIE = b"samefold_console"
"""The console's token: a browser sends no Authorization with a link. It counts for the console's pages only."""
_BEARER = re.compile(rb"bearer +([A-Za-z0-9._~+/=-]+) *", re.IGNORECASE).fullmatch
_CALLER, _UNTIL = "samefold.caller", "samefold.until"


class Door:
    """Sets the request's caller, or answers 400, 401, 403 or 503 in the app's place."""

    def __init__(self, app: ASGIApp, settings: Settings, issuer: Issuer, open_paths: Collection[str]) -> None:
        self.app = app
        self._open = open_paths
        self._issuer = issuer
        self._shows_docs = settings.shows_docs

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._is_open(scope["path"]):
            await self.app(scope, receive, send)
            return
        try:
            scope[_CALLER], scope[_UNTIL] = caller, _ = await self._verified(scope)
            if scope["path"] == f"/{METRICS}" and METRICS not in caller.scopes:
                raise NOT_ALLOWED(f"The token lacks the scope '{METRICS}'.")
            await self.app(scope, receive, send)  # which answers its own problems
        except Problem as problem:
            signs_in = problem.kind is NOT_AUTHENTICATED and _is_console(scope["path"])
            await (_to_sign_in(scope) if signs_in else problem.response())(scope, receive, send)

    def _is_open(self, path: str) -> bool:
        return path in self._open or (self._shows_docs and DOCS(path) is not None) or _SIGNS_IN(path) is not None

    async def _verified(self, scope: Scope) -> Verified:
        cookie = _cookie(scope["headers"]) if _is_console(scope["path"]) else None
        try:
            return await self._issuer.caller_of(cookie or _token(scope["headers"]))
        except KeysNotKnown as error:
            raise problem_of(error) from None
        except TokenRefused as error:
            log.warning("refused a token from %s: %s", (scope.get("client") or ("?",))[0], error.message)
            raise NOT_AUTHENTICATED(
                error.message, headers={"WWW-Authenticate": 'Bearer error="invalid_token"'}
            ) from None


def caller_of(request: Request) -> Caller | None:
    """The caller; None without SAMEFOLD_AUTH=jwt, when every caller may do everything."""
    caller: Caller | None = request.scope.get(_CALLER)
    return caller


def valid_for_s(request: Request) -> float | None:
    """How many seconds the caller's token is still valid; None without one."""
    until: float | None = request.scope.get(_UNTIL)
    return None if until is None else max(0.0, until - time.time())


def _is_console(path: str) -> bool:
    return path == CONSOLE or path.startswith(f"{CONSOLE}/")


def _to_sign_in(scope: Scope) -> Response:
    """From a page, or from a part of one that loads itself again."""
    place = f"{CONSOLE}/sign-in"
    if (b"hx-request", b"true") in scope["headers"]:
        return Response(headers={"HX-Redirect": place})
    return RedirectResponse(place, 303)


def _cookie(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """The console's token in a cookie, where there is no other."""
    given = dict(headers)
    if b"authorization" in given:
        return None
    pairs = (one.strip().partition(b"=") for one in given.get(b"cookie", b"").split(b";"))
    return next((value.decode("latin-1") for name, _, value in pairs if name == COOKIE), None)


def _token(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """The bearer token (RFC 6750). Raises Problem 400, 401."""
    given = [value for name, value in headers if name == b"authorization"]
    if not given:
        raise NOT_AUTHENTICATED("Send a token: Authorization: Bearer …", headers={"WWW-Authenticate": "Bearer"})
    if len(given) > 1:
        raise BAD_HEADER(f"Authorization comes {len(given)} times; it must come once.")
    if (found := _BEARER(given[0])) is None:
        raise TokenRefused("The header Authorization holds no bearer token.")
    return found[1].decode()
