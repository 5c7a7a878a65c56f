"""Asks `access.py` what a caller may do. Without SAMEFOLD_AUTH=jwt there is no caller, and nothing is asked."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from uuid import UUID

from fastapi import Request

from api.door import NOT_ALLOWED, caller_of
from api.problems import Problem, kind_of, traceable
from api.services import Services, services_of
from infra.access import Access, BadAccess, Caller, Right, Row, Rows, access
from infra.processes.time_limit import limited
from projections.engine.views.core_views import OUTCOMES, all_views, command_key
from projections.engine.views.queries import Readable, allowed_values
from projections.engine.views.view import View

log = logging.getLogger(__name__)

DENIED = (NOT_ALLOWED, kind_of(BadAccess))


def rows_for(request: Request, view: Readable) -> Rows | None:
    """The rows of the view or query that exist for the caller; None: all. Raises Problem 403, BadAccess."""
    caller = caller_of(request)
    if caller is None:
        return None
    allowed = limited(_access(services_of(request)).may_read, caller, view.name)
    if allowed is True:
        return None
    if not (isinstance(allowed, Rows) and allowed):
        raise _denied(caller, f"read {view.name}")
    allowed_values(view, allowed)
    return allowed


def readable(request: Request, views: Mapping[str, View]) -> list[tuple[View, bool]]:
    """Those of the views that the caller may read, or some rows of, with whether these are all rows."""
    if (caller := caller_of(request)) is None:
        return [(view, True) for view in views.values()]
    may_read = _access(services_of(request)).may_read
    found = ((view, limited(may_read, caller, view.name)) for view in views.values())
    return [
        (view, allowed is True) for view, allowed in found if allowed is True or (isinstance(allowed, Rows) and allowed)
    ]


def may_operate(request: Request, right: Right) -> bool:
    """Whether the caller has that right in the console."""
    caller = caller_of(request)
    return caller is None or limited(_access(services_of(request)).may_operate, caller, right) is True


def require_may_operate(request: Request, right: Right) -> None:
    """Raises Problem 403."""
    if not may_operate(request, right):
        caller = caller_of(request)
        assert caller is not None
        raise _denied(caller, f"{right} in the console")


async def require_may_send(services: Services, caller: Caller, stream: str, command_id: str, command: object) -> None:
    """Raises Problem 403, BadAccess, ViewNotLive, DatabaseUnavailable."""
    allowed = limited(_access(services).may_send, caller, stream, command)
    if allowed is True:
        return
    if isinstance(allowed, Row):
        # the command itself may have ended what allowed it: sent again, it gets its answer
        own = Row(OUTCOMES, command=UUID(command_key(stream, command_id)), by=caller.subject)
        if await _exists(services, allowed) or await _exists(services, own):
            return
    raise _denied(caller, f"send {type(command).__name__} to {stream!r}")


async def _exists(services: Services, row: Row) -> bool:
    """Whether the view has the row, and keeps it up to date. Raises BadAccess, ViewNotLive, DatabaseUnavailable."""
    view = all_views().get(row.view)
    missing = [column.name for column in view.key if column.name not in row.columns] if view else []
    if view is None or missing:  # a value may be one of the command's, and is not logged
        why = f"lacks the key's column '{missing[0]}'" if view else "names a view that does not exist"
        raise BadAccess(f"access.py: Row('{row.view}') {why}.", "Name a view, and all columns of its key.")
    if not (only := Rows(**row.columns)):
        return False
    values = dict(zip(only.shape[0], allowed_values(view, only), strict=True))
    key = tuple(values[column.name] for column in view.key)
    found = await services.views.by_keys(view, [key], [only])
    return bool(found.rows) and not found.parked_since


def _access(services: Services) -> Access:
    return services.access or access()


def _denied(caller: Caller, what: str) -> Problem:
    """The answer does not show whether the stream or row exists."""
    problem = traceable(NOT_ALLOWED())
    log.warning("denied: %r may not %s", caller.subject, what)
    return problem
