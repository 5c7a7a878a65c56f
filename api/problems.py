"""Every answer of the app that is not 2xx: RFC 9457, `application/problem+json`.

A kind of problem is declared once, next to the code that raises it, and explained in docs/http-api.md or docs/reading.md:

    UNKNOWN_VIEW = kind(404, "unknown-view", "There is no such view.")
    raise UNKNOWN_VIEW(f"No view is called '{name}'.", view=name)
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping
from itertools import islice
from typing import Any, NamedTuple
from uuid import uuid4

import msgspec
from fastapi import Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from infra.database.connect import DatabaseUnavailable
from infra.errors import SamefoldError
from infra.log.clients import KafkaUnavailable
from infra.observability import correlation

log = logging.getLogger(__name__)

MEDIA_TYPE = "application/problem+json"
RETRY_AFTER_S = 1
GONE_STATUS = 499
"""In metrics and traces, of a request whose client disconnected before the answer; nginx calls it so."""
MOST_ERRORS = 20
LONGEST_PLACE = 100


class ClientGone(Exception):
    """The client disconnected while its request waited."""


class Kind(NamedTuple):
    """One kind of problem: the same status, code and title whenever it occurs."""

    status: int
    code: str
    title: str
    retry_after_s: int | None = None
    """The header Retry-After, where the same request may succeed later."""
    context: str | None = None
    """Of a refusal, whose code is unique in its context only."""

    @property
    def type(self) -> str:
        """Its name; docs/http-api.md explains it. Nothing is served under it."""
        return f"/problems/{self.context}/{self.code}" if self.context else f"/problems/{self.code}"

    def __call__(self, detail: str = "", *, headers: Mapping[str, str] | None = None, **members: Any) -> Problem:
        """One occurrence of it. `members` are further members of the JSON object."""
        retry = {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}
        return Problem(self, detail, retry | dict(headers or {}), members)


class Problem(Exception):
    """An answer that is not 2xx."""

    def __init__(self, kind: Kind, detail: str, headers: dict[str, str], members: dict[str, Any]) -> None:
        super().__init__(f"{kind.status} {kind.code}")
        self.kind = kind
        self.detail = detail
        self.headers = headers
        self.members = members

    def response(self) -> Response:
        # by way of the frames that raised it, it could keep itself, and with it the request, until a collection, which is rare
        self.__traceback__ = self.__context__ = None
        kind, detail = self.kind, {"detail": self.detail} if self.detail else {}
        body = {"type": kind.type, "title": kind.title, "status": kind.status} | detail | {"code": kind.code}
        return Response(msgspec.json.encode(body | self.members), kind.status, self.headers, MEDIA_TYPE)


KINDS: dict[str, Kind] = {}
"""All declared kinds, by code."""

_OF_ERRORS: dict[type[SamefoldError], Kind] = {}


def kind(status: int, code: str, title: str, retry_after_s: int | None = None) -> Kind:
    """Declare a kind of problem. Its code never changes: clients branch on it."""
    return KINDS.setdefault(code, Kind(status, code, title, retry_after_s))


def callers_fault(error: type[SamefoldError], status: int, title: str) -> Kind:
    """Declare the kind of a named error that the caller can put right."""
    return _OF_ERRORS.setdefault(error, kind(status, error.code, title))


def kind_of(error: type[SamefoldError]) -> Kind:
    """The kind of a named error: a 503 or a 500, with the first sentence of its class's docstring as title, unless declared."""
    title = " ".join((error.__doc__ or error.code).split()).partition(". ")[0].rstrip(".")
    status, retry_after_s = (500, None) if error.is_defect else (503, RETRY_AFTER_S)
    return _OF_ERRORS.get(error) or Kind(status, error.code, f"{title}.", retry_after_s)


NOT_FOUND = kind(404, "not-found", "There is nothing under this path.")
METHOD_NOT_ALLOWED = kind(405, "method-not-allowed", "This path does not support this method.")
INVALID = kind(422, "invalid", "A part of the request is invalid.")
DEFECT = kind(500, "defect", "The server has a defect.")
STOPPING = kind(503, "stopping", "This process is stopping.", RETRY_AFTER_S)


def problem_of(error: SamefoldError, **members: Any) -> Problem:
    """A named error as a problem, mostly a 503: a store that is unavailable or inconsistent may be available again soon.

    A client learns the error's message only where that is public.
    """
    detail, hint = (error.message, error.hint) if error.is_public else ("", "")
    if hint:
        members["hint"] = hint
    return kind_of(type(error))(detail, **members)


UNAVAILABLE = (kind_of(DatabaseUnavailable), kind_of(KafkaUnavailable))
"""A store is unavailable, or refuses this process; other named errors are answered in the same way."""


def traceable(problem: Problem) -> Problem:
    """The problem with the id that log lines of this request have from now on: the caller's, or a new one."""
    if (found := correlation.current.get()) is None:
        found = uuid4().hex
        correlation.current.set(found)
    problem.headers["Correlation-Id"] = problem.members["correlation_id"] = found
    return problem


def invalid(errors: Iterable[tuple[str, str]]) -> Problem:
    """INVALID with the first of these (place, what is wrong with it): a problem does not give back all that was sent."""
    first = islice(errors, MOST_ERRORS)
    return INVALID(errors=[{"at": place[:LONGEST_PLACE], "problem": problem} for place, problem in first])


async def _problem(_request: Request, error: Problem) -> Response:
    return error.response()


async def _http(_request: Request, error: HTTPException) -> Response:
    """No route, or another method. The router raises nothing else."""
    return (METHOD_NOT_ALLOWED if error.status_code == 405 else NOT_FOUND)(headers=error.headers).response()


async def _named(_request: Request, error: SamefoldError) -> Response:
    problem = problem_of(error)
    if not error.is_public:  # what the client does not learn is logged
        log.warning("answered %d %s: %s", traceable(problem).kind.status, error.code, error)
    error.__traceback__ = None  # its frames may hold it, as of a read whose future got it: a collection is rare
    return problem.response()


async def _gone(_request: Request, _error: Exception) -> Response:
    return Response(status_code=GONE_STATUS)


async def _defect(_request: Request, _error: Exception) -> Response:
    # Uvicorn logs the traceback and closes the connection
    return traceable(DEFECT(headers={"Connection": "close"})).response()


HANDLERS: dict[int | type[Exception], Callable[[Request, Any], Coroutine[Any, Any, Response]]] = {
    Problem: _problem,
    HTTPException: _http,
    SamefoldError: _named,
    ClientGone: _gone,
    Exception: _defect,
}
"""FastAPI's. They make every answer that is not 2xx a problem."""
