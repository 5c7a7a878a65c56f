"""What the API says when it does not do what was asked: RFC 9457, `application/problem+json`, and nothing else.

A kind of problem is declared once, beside the code that raises it, and explained in docs/http-api.md:

    UNKNOWN_VIEW = kind(404, "unknown-view", "There is no such view.")
    raise UNKNOWN_VIEW(f"No view is called '{name}'.", view=name)
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from http import HTTPStatus
from itertools import islice
from typing import Any, NamedTuple
from uuid import uuid4

import msgspec
import psycopg
from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from infra.database.connect import DatabaseAway, named, passes
from infra.errors import SamefoldError
from infra.log.clients import KafkaAway
from infra.observability import correlation

log = logging.getLogger(__name__)

MEDIA_TYPE = "application/problem+json"
RETRY_AFTER_S = 1


GONE_STATUS = 499
"""In metrics and traces, of a request whose client has gone before the answer; nginx calls it so."""


class ClientGone(Exception):
    """The connection was lost while the request waited."""


class Kind(NamedTuple):
    """One kind of problem: the same status, code and title whenever it occurs."""

    status: int
    code: str
    title: str

    def __call__(self, detail: str = "", *, headers: Mapping[str, str] | None = None, **members: Any) -> Problem:
        """One occurrence of it. `members` are further members of the JSON object."""
        return Problem(self.status, self.code, self.title, detail, headers=headers, **members)


KINDS: dict[str, Kind] = {}
"""All that are declared, by code."""


def kind(status: int, code: str, title: str) -> Kind:
    """Declare a kind of problem. Its code never changes: clients branch on it."""
    return KINDS.setdefault(code, Kind(status, code, title))


class Problem(Exception):
    """An answer that is not 2xx. `context` is that of a refusal, whose code is unique in its context only."""

    def __init__(
        self,
        status: int,
        code: str,
        title: str,
        detail: str = "",
        *,
        headers: Mapping[str, str] | None = None,
        context: str | None = None,
        **members: Any,
    ) -> None:
        super().__init__(f"{status} {code}")
        self.status = status
        self.code = code
        self.title = title
        self.detail = detail
        self.headers = dict(headers or {})
        self.context = context
        self.members = members

    @property
    def type(self) -> str:
        """Names the kind of problem; docs/http-api.md explains it. Nothing is served under it."""
        return f"/problems/{self.context}/{self.code}" if self.context else f"/problems/{self.code}"

    def body(self) -> dict[str, Any]:
        detail = {"detail": self.detail} if self.detail else {}
        known = {"type": self.type, "title": self.title, "status": self.status} | detail | {"code": self.code}
        return known | self.members

    def response(self) -> Response:
        return Response(msgspec.json.encode(self.body()), self.status, self.headers, MEDIA_TYPE)


def problem_of(error: SamefoldError, status: int = 503, **members: Any) -> Problem:
    """A named error as a problem; what is away, or not as promised, may be so no longer in a moment.

    This is the one place that decides what a client is told of an error: its message only where that is public.
    """
    retry = retry_later() if status == HTTPStatus.SERVICE_UNAVAILABLE else {}
    cure = {"cure": error.cure} if error.is_public and error.cure else {}
    detail = error.message if error.is_public else ""
    return Problem(status, error.code, _title(type(error)), detail, headers=retry, **cure, **members)


def logged(error: SamefoldError, status: int = 503) -> Problem:
    """The same for an error that this request met: what its client is not told stands in the log."""
    problem = problem_of(error, status)
    if not error.is_public:
        problem = traceable(problem)
        log.warning("answered %d %s: %s", status, error.code, error)
    return problem


def traceable(problem: Problem) -> Problem:
    """The problem with the id under which the log tells of this request from now on: the caller's, or a new one."""
    if (found := correlation.current.get()) is None:
        found = uuid4().hex
        correlation.current.set(found)
    problem.headers["Correlation-Id"] = problem.members["correlation_id"] = found
    return problem


def why(error: SamefoldError) -> tuple[str, str]:
    """What anybody may be told of an error, and what to do about it."""
    if error.is_public:
        return error.message, error.cure
    return _title(type(error)), "The log of this process tells more."


def install(app: FastAPI) -> None:
    """Make every answer that is not 2xx a problem."""
    app.add_exception_handler(Problem, _problem)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(SamefoldError, _named)
    app.add_exception_handler(psycopg.Error, _database)
    app.add_exception_handler(ClientGone, _to_nobody)
    app.add_exception_handler(Exception, _defect)


NOT_FOUND = kind(404, "not-found", "There is nothing here.")
METHOD_NOT_ALLOWED = kind(405, "method-not-allowed", "This path does not support this method.")
BAD_REQUEST = kind(400, "bad-request", "The request can't be understood.")
INVALID = kind(422, "invalid", "Some of what was sent does not fit.")
DEFECT = kind(500, "defect", "The server made a mistake.")
MOST_ERRORS = 20
LONGEST_PLACE = 100


def invalid(errors: Iterable[tuple[str, str]]) -> Problem:
    """INVALID with the first of these (place, what is wrong with it): a problem does not give back all that was sent."""
    first = islice(errors, MOST_ERRORS)
    return INVALID(errors=[{"at": place[:LONGEST_PLACE], "problem": problem} for place, problem in first])


async def _problem(_request: Request, error: Exception) -> Response:
    assert isinstance(error, Problem)
    return error.response()


async def _http(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    status, headers = error.status_code, dict(error.headers or {})
    if known := {404: NOT_FOUND, 405: METHOD_NOT_ALLOWED}.get(status):
        return known(headers=headers).response()
    phrase = HTTPStatus(status).phrase
    return Problem(status, "-".join(phrase.lower().split()), phrase, headers=headers).response()


async def _named(_request: Request, error: Exception) -> Response:
    assert isinstance(error, SamefoldError)
    status = 503 if isinstance(error, DatabaseAway | KafkaAway) else 500
    return logged(error, status).response()


async def _database(request: Request, error: Exception) -> Response:
    assert isinstance(error, psycopg.Error)
    if not passes(error):
        raise error
    return logged(named(error, request.app.state.services.settings)).response()


async def _to_nobody(_request: Request, _error: Exception) -> Response:
    return Response(status_code=GONE_STATUS)


async def _defect(_request: Request, _error: Exception) -> Response:
    # the server logs the traceback in a moment, and closes the connection
    return traceable(DEFECT(headers={"Connection": "close"})).response()


def retry_later() -> dict[str, str]:
    """The header of a problem that may be over in a moment."""
    return {"Retry-After": str(RETRY_AFTER_S)}


def _title(error: type[SamefoldError]) -> str:
    """The first sentence of what the error's class says of itself."""
    return " ".join((error.__doc__ or error.code).split()).partition(". ")[0].rstrip(".") + "."
