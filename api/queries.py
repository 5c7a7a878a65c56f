"""`GET /queries/NAME`: the questions of the author's, over several views: one route for each file in `projections/queries/`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Request
from pydantic import Field, WithJsonSchema
from starlette.responses import Response
from typing_extensions import TypedDict

from api.door import caller_of
from api.openapi import AFTER, PREFER, Json, Parked, Position, parameter, responses
from api.permissions import rows_for
from api.problems import callers_fault, invalid, kind_of
from api.requests import preferences, refuse_unknown
from api.services import TOO_MANY_SEARCHES, services_of
from api.view_parameters import LIMIT
from api.view_questions import FEW_ROWS, is_nullable, limit_of
from api.view_reader import content_tag
from api.views import IF_NONE_MATCH, READ, UNREAD, answered, found_by
from projections.engine.queries.query import OWN, BadQuery, Query, QueryFailed
from projections.engine.queries.statement import Answer
from projections.engine.views.columns import BadValue, Column, schema_of, value_of

QUERY_FAILED = callers_fault(QueryFailed, 422, "The query can't be computed with these parameters.")


def router_of(queries: Mapping[str, Query]) -> APIRouter:
    """The routes of all queries."""
    router = APIRouter(tags=["queries"])
    for query in queries.values():
        title = "".join(part.capitalize() for part in query.name.split("_"))
        columns = {one.name: Annotated[Any, WithJsonSchema(schema_of(one))] for one in query.columns}
        row = TypedDict(f"{title}QueryRow", columns)  # type: ignore[misc]
        more = Annotated[bool, Field(description="Whether there are more rows than `limit`.")]
        members = {"items": list[row], "more": more, "position": Position, "parked": Parked}
        answer = TypedDict(f"{title}QueryAnswer", members)  # type: ignore[misc]
        router.add_api_route(
            f"/queries/{query.name}",
            partial(_answer, query),
            openapi_extra={"parameters": [*(_parameter(query, one) for one in query.parameters), *_COMMON]},
            operation_id=f"queries_{query.name}",
            summary=f"The answer to {query.name}",
            description=query.question or f"The rows of {query.name}.",
            response_model=answer,
            response_description="Rows in the order of the query.",
            responses=responses(READ, *UNREAD, TOO_MANY_SEARCHES, QUERY_FAILED, kind_of(BadQuery)),
        )
    return router


async def _answer(query: Query, request: Request) -> Response:
    only, services = rows_for(request, query), services_of(request)
    values, limit = _asked(query, request)
    caller = caller_of(request)

    async def read() -> Answer:
        """Who waits for a position is no search meanwhile."""
        async with services.searching(caller.subject if caller else None):
            return await services.views.answer(query, values, limit + 1, only)

    found = await found_by(query, request, read)
    rows, more = await services.views.opened(found.rows[:limit], found.has_personal), len(found.rows) > limit
    position = str(found.position)
    body = msgspec.json.encode({"items": rows, "more": more, "position": position, "parked": found.parked})
    tag = content_tag(*rows, b"%a %a" % (more, found.parked))
    preferred = preferences(request).applied if "after" in request.query_params else {}
    return answered(request, tag, {"Samefold-Position": position}, body, preferred)


def _asked(query: Query, request: Request) -> tuple[dict[str, Any], int]:
    """The author's parameters, and how many rows. Raises Problem 422."""
    refuse_unknown(request, {*OWN, *(one.name for one in query.parameters)})
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
