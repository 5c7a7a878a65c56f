"""Server-sent events: a stream's commits, and a view's row, as they come. A client that comes back goes on where it was.

`GET /{context}/{stream_id}/events/live` and `GET /views/{view}/{key…}/live`.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Mapping

import msgspec
from fastapi import APIRouter, Request
from fastapi.sse import KEEPALIVE_COMMENT, format_sse_event
from starlette.responses import Response

from api import history_docs, view_docs
from api.event_stream import EventStream, first_frame
from api.history_docs import MOST_EVENTS
from api.history_routes import LARGEST, entries, stream_in, version_of
from api.problems import INVALID
from api.readers import Readers, readers_of
from api.request_headers import single
from api.rows import tells_stream
from api.stream_feed import Follower
from api.view_requests import as_problems, key_of, number_of, refuse_unknown
from api.view_routes import Route, path_to_row, require_promises
from api.world import world_of
from infra.domain_model.contexts import Context
from infra.errors import SamefoldError
from infra.log.history import Wanted
from infra.log.partitioner import partition_of
from infra.log.rule import START, Counted, Reading
from projections.engine.views.view import View

log = logging.getLogger(__name__)

LONGEST_TAG = 100


def router_of(contexts: Mapping[str, Context], views: Mapping[str, View]) -> APIRouter:
    """The routes of all contexts, and of all views but those that the write side lives on."""
    router = APIRouter()
    for context in contexts.values():
        router.add_api_route(
            f"/{context.name}/{{stream_id}}/events/live",
            _commits(context),
            operation_id=f"{context.name}_live",
            tags=[context.name],
            response_model=None,
            response_class=EventStream,
            status_code=200,
            openapi_extra=history_docs.live(context),
        )
    for view in views.values():
        if not view.is_system:
            router.add_api_route(
                f"{path_to_row(view)}/live",
                _row(view),
                operation_id=f"views_{view.name}_live",
                tags=["views"],
                response_model=None,
                response_class=EventStream,
                status_code=200,
                openapi_extra=view_docs.live_row(view, parked=not tells_stream(view)),
            )
    return router


def _row(view: View) -> Route:
    async def route(request: Request) -> Response:
        key = key_of(view, request)
        refuse_unknown(request, set())
        seen = _last_event_id(request)
        require_promises(world_of(request))
        readers = readers_of(request)
        with as_problems():
            await readers.views.require_live(view)
        readers.room.enter()
        feed = readers.rows(view)
        watcher = feed.watch(key, seen)

        def end() -> None:
            feed.leave(watcher)
            readers.room.leave()

        return EventStream(watcher.frames(), end)

    return route


def _commits(context: Context) -> Route:
    async def route(request: Request) -> Response:
        stream = stream_in(context, request)
        after = _version_seen(request)
        world, readers = world_of(request), readers_of(request)
        require_promises(world)
        readers.room.enter()
        try:
            with as_problems():
                follower = await readers.streams.follow(stream, partition_of(stream, world.events.partitions))
        except BaseException:
            readers.room.leave()
            raise

        def end() -> None:
            readers.streams.leave(follower)
            readers.room.leave()

        try:
            here = readers.streams.stands_at(follower)
            # after the place was taken: what is beyond this version comes from there on
            version, _ = await version_of(request, context, stream)
        except BaseException:
            end()
            raise
        missed = None if after >= version else Wanted(stream, follower.partition, after, version)
        return EventStream(_frames(readers, follower, after, here, missed), end)

    return route


async def _frames(
    readers: Readers, follower: Follower, after: int, here: Reading, missed: Wanted | None
) -> AsyncGenerator[bytes, None]:
    """What was missed before `here`, then what the follower is given; and again so, whenever that was too much for its buffer."""
    yield first_frame()
    reading = START if missed else here
    while not follower.is_ended:
        if missed:
            try:
                async for page in _pages(readers, missed, reading, here.next_offset):
                    yield KEEPALIVE_COMMENT
                    for one in page:
                        yield _frame(one, after)
                        after = one.commit.version
            except SamefoldError as error:  # the client comes back, and is told by a problem or served
                log.debug("%s: %s", follower.stream, error)
                return
            reading = here
        while not (follower.is_lost or follower.is_ended):
            if not await follower.signal.wait():
                yield KEEPALIVE_COMMENT
            while (given := follower.take()) is not None:
                commit = given.commit
                if commit.version > after:
                    yield _frame(given, after)
                    after = commit.version
                reading = Reading(given.offset + 1, commit.epoch, commit.seq, commit.command_offset)
        if follower.is_ended:
            return
        follower.start_anew()
        here = readers.streams.stands_at(follower)
        missed = Wanted(follower.stream, follower.partition, after, LARGEST)


async def _pages(readers: Readers, wanted: Wanted, at: Reading, stop: int) -> AsyncGenerator[list[Counted], None]:
    """All that is wanted, a page at a time; nobody else is kept waiting while a client takes its time over one."""
    while True:
        page = await readers.scans.page(wanted, at, stop, MOST_EVENTS, patiently=True)
        yield page.commits
        if page.is_last:
            return
        at = page.next


def _frame(one: Counted, after: int) -> bytes:
    commit = one.commit
    data = {"stream": commit.stream, "version": commit.version, "events": list(entries(one, after))}
    return format_sse_event(event="commit", id=str(commit.version), data_str=msgspec.json.encode(data).decode())


def _version_seen(request: Request) -> int:
    """The version whose events, and all before, the client has. Raises Problem 400, 422."""
    refuse_unknown(request, {"from_version"})
    from_version = number_of(request.query_params.get("from_version"), 1, LARGEST)
    if from_version is None:
        raise INVALID(errors=[{"at": "query.from_version", "problem": "It is a version: 1, 2, 3, …"}])
    seen = _last_event_id(request)
    if seen is None:
        return from_version - 1
    version = 0 if seen == "0" else number_of(seen, 0, LARGEST)
    if version is None:
        raise INVALID(errors=[{"at": "header.Last-Event-ID", "problem": "It is the id of an event of this stream."}])
    return version


def _last_event_id(request: Request) -> str | None:
    """Raises Problem 400, 422."""
    seen = single(request, "Last-Event-ID")
    if seen is not None and len(seen) > LONGEST_TAG:
        raise INVALID(errors=[{"at": "header.Last-Event-ID", "problem": "It is the id of an event that was sent."}])
    return seen or None
