"""`GET /queries/NAME`: the questions of the author's, over several views: one route for each file in `projections/queries/`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Request
from pydantic import Field, WithJsonSchema
from starlette.responses import Response
from typing_extensions import TypedDict

from api.cursors import BAD_CURSOR, named, next_path, place_of
from api.door import caller_of
from api.openapi import AFTER, PREFER, Json, Parked, Position, parameter, responses
from api.permissions import rows_for
from api.problems import callers_fault, invalid, kind_of
from api.requests import path_of, preferences, refuse_unknown
from api.services import TOO_MANY_SEARCHES, services_of
from api.view_parameters import CURSOR, LIMIT
from api.view_questions import FEW_ROWS, is_nullable, limit_of
from api.view_reader import content_tag
from api.views import IF_NONE_MATCH, NEXT, READ, UNREAD, answered, found_by
from projections.engine.queries.query import OWN, BadQuery, Query, QueryFailed
from projections.engine.queries.statement import Answer, Behind
from projections.engine.views.columns import BadValue, Column, schema_of, value_of

QUERY_FAILED = callers_fault(QueryFailed, 422, "The query can't be computed with these parameters.")


def router_of(queries: Mapping[str, Query]) -> APIRouter:
    """The routes of all queries."""
    router = APIRouter(tags=["queries"])
    for query in queries.values():
        title = "".join(part.capitalize() for part in query.name.split("_"))
        columns = {one.name: Annotated[Any, WithJsonSchema(schema_of(one))] for one in query.columns}
        row = TypedDict(f"{title}QueryRow", columns)  # type: ignore[misc]
        more: Any = Annotated[bool, Field(description="Whether there are more rows than `limit`.")]
        own = (*_COMMON, CURSOR) if query.order else _COMMON
        going_on = {"next": NEXT} if query.order else {"more": more}
        members = {"items": list[row], **going_on, "position": Position, "parked": Parked}
        answer = TypedDict(f"{title}QueryAnswer", members)  # type: ignore[misc]
        router.add_api_route(
            f"/queries/{query.name}",
            partial(_answer, query),
            openapi_extra={
                "parameters": [
                    *(_parameter(query, one) for one in query.parameters),
                    *own,
                ]
            },
            operation_id=f"queries_{query.name}",
            summary=f"The answer to {query.name}",
            description=query.question or f"The rows of {query.name}.",
            response_model=answer,
            response_description="Rows in the order of the query.",
            responses=responses(READ, *UNREAD, *_REFUSED, *((BAD_CURSOR,) if query.order else ())),
        )
    return router


async def _answer(query: Query, request: Request) -> Response:
    only, services = rows_for(request, query), services_of(request)
    caller = caller_of(request)
    subject = caller.subject if caller else None
    values, limit = _asked(query, request)
    given, behind = dict(request.query_params), None
    bound = _bound(query, given, subject or "")
    if "cursor" in given:
        behind = place_of(given["cursor"], bound, partial(_behind, query))

    async def read() -> Answer:
        """Who waits for a position is no search meanwhile."""
        async with services.searching(subject):
            return await services.views.answer(query, values, limit + 1, only, behind)

    found = await found_by(query, request, read)
    rows, is_more = await services.views.opened(found.rows[:limit], found.has_personal), len(found.rows) > limit
    members: dict[str, Any] = {"more": is_more}
    if query.order:
        last = _last(found, limit, behind) if is_more else None
        path = path_of("queries", query.name)
        members = {"next": last and next_path(path, given, bound, [*last.values, str(last.equal)])}
    position = str(found.position)
    body = msgspec.json.encode({"items": rows, **members, "position": position, "parked": found.parked})
    tag = content_tag(*rows, msgspec.json.encode([members, found.parked]))
    preferred = preferences(request).applied if "after" in request.query_params else {}
    return answered(request, tag, {"Samefold-Position": position}, body, preferred)


def _bound(query: Query, given: Mapping[str, str], caller: str) -> dict[str, str]:
    """What cursors are bound to."""
    asked = [part for one in query.parameters for part in (one.name, given.get(one.name, "-"))]
    return {
        "query or release": named([query.name, query.sql, *(one.shape for one in query.columns)]),
        "parameters": named(asked),
        "caller": named([caller]),
    }


def _behind(query: Query, given: Sequence[str | None]) -> Behind:
    """The place that a cursor has. Raises ValueError."""
    *values, equal = given
    if len(values) != len(query.order) or not re.fullmatch("[0-9]{1,9}", equal or ""):
        raise ValueError
    return Behind(tuple(values), int(equal or ""))


def _last(found: Answer, limit: int, behind: Behind | None) -> Behind:
    """Behind the last of so many rows, which came behind others."""
    equal = behind.equal if behind else 0
    for repeats in found.repeats[:limit]:
        equal = equal + 1 if repeats else 1
    return Behind(found.places[limit - 1], equal)


def _asked(query: Query, request: Request) -> tuple[dict[str, Any], int]:
    """The author's parameters, and how many rows. Raises Problem 422."""
    own = OWN if query.order else {*OWN} - {"cursor"}
    refuse_unknown(request, {*own, *(one.name for one in query.parameters)})
    given, values, errors = dict(request.query_params), dict(query.defaults), list[tuple[str, str]]()
    for one in query.parameters:
        if (text := given.get(one.name)) is None:
            if one.name not in values:
                errors.append((f"query.{one.name}", "It is missing."))
            continue
        try:
            values[one.name] = None if text == "" and is_nullable(one) else value_of(one, text)
        except BadValue as error:
            errors.append((f"query.{one.name}", f"{error.message.replace('column', 'parameter')} {error.hint}"))
    limit = FEW_ROWS
    try:
        limit = limit_of(given.get("limit", str(limit)))
    except ValueError as error:
        errors.append(("query.limit", str(error)))
    if errors:
        raise invalid(errors)
    return values, limit


def _parameter(query: Query, one: Column) -> Json:
    schema, about, default = schema_of(replace(one, optional=False)), "", query.defaults.get(one.name)
    if default is not None:
        schema["default"] = msgspec.to_builtins(default)
    if is_nullable(one):
        schema, about = {"anyOf": [schema, {"const": ""}]}, "Empty: null."
    return parameter("query", one.name, about, schema) | {"required": one.name not in query.defaults}


_COMMON = (LIMIT, AFTER, PREFER, IF_NONE_MATCH)
_REFUSED = (TOO_MANY_SEARCHES, QUERY_FAILED, kind_of(BadQuery))
