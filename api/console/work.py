"""`/console/work`: what waits for a person or for its time, which policies react, and what this code reads and writes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple, TypeAlias

from fastapi import APIRouter, Request
from psycopg.rows import dict_row
from starlette.responses import Response

from api.console import site
from api.console.actions import Actions, code_version
from api.console.site import Section, url
from api.problems import invalid
from api.services import services_of
from domain.engine.contexts import contexts
from domain.engine.released import KINDS, read
from domain.engine.versions import stored_name, type_of, version_of
from infra.database.connect import Connection
from infra.errors import SamefoldError
from policies.engine.operate import policy_states
from projections.engine.store.positions import LIVE

Question: TypeAlias = Callable[[Connection], Any]
SHOWN = 50
"""Of each list; the rest is on its next pages."""


class Listing(NamedTuple):
    """A list's statement, and the columns that put it in order, which begin with those of an index.

    `{after}` is replaced by the condition of a later page, `{first}` by the order and the limit. Nothing is sorted or counted
    but what is shown.
    """

    statement: str
    key: tuple[str, ...]

    def text(self, *, is_later: bool) -> bytes:
        key = ", ".join(self.key)
        after = f"and ({key}) > ({', '.join(['%s'] * len(self.key))})" if is_later else ""
        first = f"order by {key} limit {SHOWN + 1}"
        return self.statement.format(after=after, first=first, live=LIVE, unsent=_UNSENT).encode()


_UNSENT = "kind = 'send' and sent_at is null and dead is null"
LISTS = {
    "parked": Listing(
        """select p.*, l.version as live from {live} l, lateral (
             select view, table_name, stream, since_version, error, parked_at from parked
              where table_name = l.table_name {after} {first}) p {first}""",
        ("table_name", "stream"),
    ),
    "dead": Listing(
        """select id, policy, kind, stream, version, target, type, wished_at, dead
             from outbox where dead is not null {after} {first}""",
        ("policy", "stream", "id"),
    ),
    "dead_posts": Listing(
        """select id, policy, stream, version, endpoint, wished_at, attempts, dead
             from posts where dead is not null {after} {first}""",
        ("wished_at", "id"),
    ),
    "timers": Listing(
        """select t.* from (select policy from activations group by policy) a, (select distinct partition from positions) p,
             lateral (select id, policy, stream, version, number, target, type, due, wished_at from outbox o
                       where o.policy = a.policy and o.partition = p.partition and {unsent} and due is not null
                         {after} {first}) t {first}""",
        ("due", "stream", "version", "number", "id"),
    ),
    "posts": Listing(
        """select id, endpoint, policy, stream, version, number, wished_at, attempts, next_attempt
             from posts left join lanes using (endpoint, policy, stream) where dead is null {after} {first}""",
        ("endpoint", "policy", "stream", "version", "number", "id"),
    ),
    "wishes": Listing(
        """select id, policy, partition, stream, version, number, target, type, wished_at
             from outbox where {unsent} and due is null {after} {first}""",
        ("policy", "partition", "stream", "version", "number", "id"),
    ),
}
"""By the section that shows it."""
_ACTIONS = "select id, at, by, command, ended_at, exit_code from operator_actions order by at desc, id desc limit 20"
_ACTIVATIONS = "select policy, number, version, at from activations order by at desc, policy, number desc limit 50"


_BY_INDEX = b"set enable_sort = off"
"""In the order of the key, whatever PostgreSQL expects: of a comparison of rows it looks at the first column only."""


def rows_of(connection: Connection, statement: str | bytes, values: Any = ()) -> list[dict[str, Any]]:
    connection.execute(_BY_INDEX)
    text = statement if isinstance(statement, bytes) else statement.encode()
    return connection.cursor(row_factory=dict_row).execute(text, values).fetchall()


async def work(request: Request) -> Response:
    topic, console = services_of(request).settings.events_topic, site.console_of(request)
    after = {name: _after(request, name) for name in LISTS}

    def listed(name: str) -> Question:
        text = LISTS[name].text(is_later=bool(after[name]))
        return lambda connection: rows_of(connection, text, after[name])

    questions: dict[str, Question] = {name: listed(name) for name in LISTS} | {
        "policies": lambda connection: policy_states(connection, topic),
        "activations": lambda connection: rows_of(connection, _ACTIVATIONS),
        "actions": lambda connection: rows_of(connection, _ACTIONS),
    }
    found = dict(zip(questions, await asyncio.gather(*map(console.ask, questions.values())), strict=True))
    actions: Actions = request.app.state.actions
    return site.page(
        request,
        "work.html",
        found=await site.opened(request, {name: section.found for name, section in found.items()}),
        errors={name: section.error for name, section in found.items()},
        more={name: _more(name, found[name].found or []) for name in LISTS},
        shown=SHOWN,
        code_version=code_version,
        released=_released(),
        running=actions.running,
    )


def _after(request: Request, name: str) -> list[Any]:
    """The key after which the list's page begins. Raises Problem 422."""
    if not (text := request.query_params.get(name)):
        return []
    with suppress(ValueError, RecursionError):
        found = json.loads(text)
        json.dumps(found, ensure_ascii=False).encode()  # half of a character is none
        if (
            isinstance(found, list)
            and len(found) == len(LISTS[name].key)
            and all(isinstance(one, str | int) for one in found)
        ):
            return found
    raise invalid([(f"query.{name}", "it is no place in the list")])


def _more(name: str, found: list[dict[str, Any]]) -> str | None:
    """The address of the list's next page, if it has one."""
    if len(found) <= SHOWN:
        return None
    place = [found[SHOWN - 1][column] for column in LISTS[name].key]
    return url("/work", **{name: json.dumps(place, ensure_ascii=False, default=str)}) + f"#{name}"


@cache
def _released() -> Section[list[dict[str, Any]]]:
    """By context and kind, the stored types that this code writes, the older versions that it reads, and what was not released."""
    try:
        records = {context.name: read(context.name) for context in contexts().values()}
    except SamefoldError as error:
        return Section(None, error.with_traceback(None))
    found = []
    for context in contexts().values():
        for kind in KINDS:
            facts = [(stored_name(fact), version_of(fact)) for fact in getattr(context, kind).values()]
            released = {name: records[context.name][kind].get(name, {}) for name, _ in facts}
            types = [(type_of(*one), range(1, one[1]), str(one[1]) in released[one[0]]) for one in facts]
            found.append({"context": context.name, "kind": kind, "types": types})
    return Section(found, None)


def add_to(router: APIRouter) -> None:
    site.add(router, "/work", work)
