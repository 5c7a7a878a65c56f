"""`/console/views`: which version and table readers see, what this code has, and what is being built."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any
from uuid import UUID

from fastapi import APIRouter, Request
from psycopg.rows import dict_row
from starlette.responses import Response

from api.console import site
from api.services import services_of
from infra.database.connect import Connection
from projections.engine.rebuild.builds import LEFT, OF_THE_PAST, Build, BuildState, builds_of
from projections.engine.rebuild.switch import Pointer, pointers
from projections.engine.store.positions import StoppedView, stopped_views
from projections.engine.views.core_views import all_views
from projections.engine.views.view import Kind, View

_rows_before: dict[UUID, tuple[float, int]] = {}
"""Of builds that load: when somebody looked last, and how many rows there were."""


async def views(request: Request) -> Response:
    found = await site.console_of(request).ask(_views)
    seen = services_of(request).stores.seen
    parked = {view: streams for view, streams, _ in seen.views} if seen else {}
    shown = [one | {"parked": parked.get(one["name"], 0)} for one in found.found or ()]
    why = await site.opened(request, {one["name"]: one["stopped"].error for one in shown if one["stopped"]})
    template = "views-live.html" if "HX-Request" in request.headers else "views.html"
    several = sum(one["needs_build"] for one in shown) > 1  # those of one agent can only go live together
    return site.page(request, template, views=shown, several=several, why=why, database=found.error)


def _views(connection: Connection) -> list[dict[str, Any]]:
    """Each view that is live or in this code, with its tables."""
    code, live = all_views(), pointers(connection)
    stopped = {one.view: one for one in stopped_views(connection)}
    builds = builds_of(connection)
    tables = _tables(connection, [*(build.table for build in builds), *(view.table_name for view in code.values())])
    return [
        _view(
            name, code.get(name), live.get(name), stopped.get(name), [one for one in builds if one.view == name], tables
        )
        for name in sorted({*code, *live}, key=lambda name: (name not in code or code[name].is_system, name))
    ]


def _view(
    name: str,
    code: View | None,
    live: Pointer | None,
    stopped: StoppedView | None,
    builds: list[Build],
    tables: Mapping[str, Mapping[str, Any]],
) -> dict[str, Any]:
    there = [build for build in builds if build.table in tables]
    others = [one for one in there if live is None or one.table != live.table]
    # a rebuild's build, else the table that was live before; only this code's version can be gone to
    ready = [
        one
        for one in others
        if code and one.version == code.version and one.state in (BuildState.READY, BuildState.OLD)
    ]
    is_resumed = code and stopped and code.kind is not Kind.JOURNAL and code.version == stopped.version
    how = "switch" if code is None else "views resume" if is_resumed else "rebuild"
    return {
        "name": name,
        "kind": code.kind if code else None,
        "question": code.question.split("\n\n")[0] if code else "",
        "code": code.version if code else None,
        "live": live.version if live and not stopped else None,
        "agent": code.agent if code else live.agent if live else None,
        "table": tables.get(live.table) if live else None,
        "stopped": stopped,
        "how": how,
        "builds": [_build(one, tables[one.table]) for one in others],
        "switch_to": code.version if code and ready and (live is None or live.version != code.version) else None,
        "needs_upgrade": code is not None and code.table_name not in tables,
        "needs_build": code is not None
        and (live is None or live.version != code.version)
        and not ready
        and not any(one.version == code.version and one.state is BuildState.LOADING for one in there),
    }


def _build(build: Build, table: Mapping[str, Any]) -> dict[str, Any]:
    is_loading = build.state in (BuildState.LOADING, BuildState.PAST_LOADING)
    rate = None
    if is_loading:
        now, (at, rows) = time.monotonic(), _rows_before.get(build.id, (0.0, 0))
        _rows_before[build.id] = now, table["loaded"]
        rate = (table["loaded"] - rows) / (now - at) if at and now > at else None
    else:
        _rows_before.pop(build.id, None)
    can_go = build.state in (*LEFT, *OF_THE_PAST) and not is_loading
    return {"build": build, "table": table, "is_loading": is_loading, "rate": rate, "may_drop": can_go}


def _tables(connection: Connection, names: list[str]) -> dict[str, dict[str, Any]]:
    """By name, those of the tables that exist, as PostgreSQL's own catalogue and counters describe them."""
    found = connection.cursor(row_factory=dict_row).execute(_TABLES, (names,)).fetchall()
    return {one["name"]: one for one in found}


_TABLES = """
select t.relname as name, pg_total_relation_size(t.oid) as bytes,
       greatest(t.reltuples::bigint, pg_stat_get_live_tuples(t.oid)) as rows,
       (select coalesce(sum(p.rows), 0)::bigint from build_parts p join builds b on b.id = p.build where b.table_name = t.relname)
         + (select coalesce(sum(c.tuples_processed), 0)::bigint from pg_stat_progress_copy c where c.relid = t.oid) as loaded,
       (select coalesce(json_agg(json_build_object('name', i.relname, 'valid', x.indisvalid, 'bytes', pg_relation_size(i.oid),
                 'definition', regexp_replace(pg_get_indexdef(i.oid), '^.* USING ', '')) order by i.relname), '[]')
          from pg_index x join pg_class i on i.oid = x.indexrelid where x.indrelid = t.oid) as indexes
  from pg_class t
 where t.relname = any(%s) and t.relnamespace = (select oid from pg_namespace where nspname = current_schema())
"""


def add_to(router: APIRouter) -> None:
    site.add(router, "/views", views)
