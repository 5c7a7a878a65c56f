"""`POST /{context}/{stream_id}/{command}`: one route for each command of each context, made of the unions that declare them.

A command is checked here as the handler will check it, appended, and answered with its outcome: recorded in the transaction that
wrote the read models, so that whoever has the answer reads what was done.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from functools import partial
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from msgspec import UNSET
from pydantic import ValidationError
from starlette.responses import Response

from api import timed
from api.answering import Recorded, end_with
from api.appending import MaybeAppended, NotAppended
from api.client import Client, ClientGone, client_of
from api.command_docs import described, operation_id
from api.command_schemas import kebab
from api.limits import TOO_LARGE, body_of
from api.outcomes import Asked, answer_of
from api.preferences import Preferences, preferences
from api.problems import INVALID, RETRY_AFTER_S, Problem, invalid, kind, problem_of, traceable
from api.request_headers import correlation_id, expected_version, idempotency_key, is_json, quoted
from api.segments import segment
from api.world import World, world_of
from commands.intake import bad_name, fingerprint_of, holds_nul, validator
from infra.domain_model.contexts import BadContext, Context, refusals_of
from infra.errors import SamefoldError
from infra.log.records import Command, encode
from projections.engine.store.command_types import CommandType
from projections.engine.views.core_views import OUTCOMES, all_views

log = logging.getLogger(__name__)

NOT_JSON = kind(415, "not-json", "The body must be JSON.", "Send it with `Content-Type: application/json`, in UTF-8.")
BEHIND = kind(
    429,
    "read-model-behind",
    "The read model is too far behind.",
    "Nothing was appended. Commands are taken again when it has caught up: come back after `Retry-After` seconds.",
)
NOT_APPENDED = kind(
    503,
    "not-appended",
    "The command could not be appended.",
    "This request has no effect. Send it again after `Retry-After` seconds, with the same Idempotency-Key.",
)
UNKNOWN = kind(
    503,
    "maybe-appended",
    "Whether the command was appended is not known.",
    "Send it again with the same Idempotency-Key, which does nothing twice, or ask for its outcome at `Location`.",
)

RESERVED = frozenset({"views", "outcomes", "problems", "health", "metrics", "openapi"})
"""What paths begin with that are of no context."""


def router_of(contexts: Mapping[str, Context]) -> APIRouter:
    """The routes of all commands. Raises BadContext."""
    router = APIRouter()
    for context in contexts.values():
        if context.name in RESERVED:
            raise BadContext(
                f"A context can't be called '{context.name}': the API answers something else there.",
                "Rename its file in domain/.",
            )
        refusals = refusals_of(context)
        for name, command in context.commands.items():
            router.add_api_route(
                f"/{context.name}/{{stream_id}}/{kebab(name)}",
                _route(context, name, command),
                methods=["POST"],
                name=f"{context.name} {name}",
                operation_id=operation_id(context, name),
                tags=[context.name],
                response_model=None,
                openapi_extra=described(context, name, command, refusals),
            )
    return router


def _route(context: Context, name: str, kind_: type) -> Callable[[Request], Awaitable[Response]]:
    validate = validator(kind_)

    async def post(request: Request) -> Response:
        world = world_of(request)
        asked, prefer = _asked(request, context), preferences(request)
        expected, correlation = expected_version(request), correlation_id(request)
        body = await _body(request, world)
        try:
            validate(body)
        except ValidationError as error:
            raise invalid(_errors(error)) from None
        except Exception:  # a defect in the command's own checks, which the handler records as its outcome
            log.exception("%s: the checks of '%s' failed", asked.stream, name)
        command = _command(asked, name, body, correlation, expected)
        return await _append(world, asked, command, prefer, client_of(request))

    return post


def _asked(request: Request, context: Context) -> Asked:
    """What is asked of which stream, under which id. Raises Problem 400, 422."""
    stream_id = segment(request, "stream_id")
    key, is_callers = idempotency_key(request)
    if problem := bad_name(f"{context.name}/{stream_id}", key):
        raise INVALID(f"{problem[:1].upper()}{problem[1:]}.", errors=[{"at": "stream_id", "problem": problem}])
    return Asked(context, stream_id, key, is_callers)


async def _body(request: Request, world: World) -> bytes:
    if not is_json(request):
        raise NOT_JSON()
    return await body_of(request, world.settings.max_command_bytes, world.settings.api_read_timeout_s)


def _command(asked: Asked, name: str, body: bytes, correlation: str | None, expected: int | None) -> Command:
    if holds_nul(body):
        problem = "a text holds a NUL character, which can't be stored"
        raise INVALID(errors=[{"at": "body", "problem": problem}])
    return Command(asked.key, asked.stream, name, msgspec.Raw(body), expected, correlation or UNSET)


async def _append(world: World, asked: Asked, command: Command, prefer: Preferences, client: Client) -> Response:
    """Append it, and wait for the outcome as long as the caller wants, and is there."""
    settings = world.settings
    try:
        fingerprint = fingerprint_of(command)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise INVALID(errors=[{"at": "body", "problem": str(error)}]) from None
    value = encode(command)
    if len(value) > settings.max_command_bytes:
        most = settings.max_command_bytes
        raise TOO_LARGE(f"The command takes {len(value)} bytes in the log; it may take {most}.", limit=most)
    kind = CommandType(asked.context.name, command.type)
    if not world.look.wrong:
        await world.look.find_command(kind)
    _require_open(world, kind)
    patience = prefer.wait_within(settings.api_wait_s, settings.api_max_wait_s)
    headers = {"Idempotency-Key": quoted(asked.key)} | prefer.applied(settings.api_max_wait_s)
    partitions = world.events.partitions
    with (
        world.waits.waiting(asked.stream, asked.key, partitions, look=asked.is_callers) as outcome,
        client.watched(lambda: end_with(outcome, ClientGone())),
    ):
        appended = _begin(world, outcome, command, value)
        try:
            if patience:
                # a failed append ends the wait
                appended.add_done_callback(partial(_fail, outcome))
                async with asyncio.timeout(patience):
                    return answer_of(asked, await outcome, fingerprint, headers)
            await _acknowledged(appended, outcome, settings.api_wait_s)
        except TimeoutError:
            if not appended.done():
                late = f"There is no acknowledgement after {patience or settings.api_wait_s:g} s."
                raise _unknown(asked, late) from None
        except NotAppended as error:
            raise _not_appended(error) from None
        except MaybeAppended as error:
            problem = traceable(_unknown(asked, "Kafka did not acknowledge it."))
            log.warning("maybe appended: %s", error)
            raise problem from None
    return _pending(asked, headers)


async def _acknowledged(appended: asyncio.Future[int], outcome: asyncio.Future[Recorded], within_s: float) -> None:
    """Raises TimeoutError, NotAppended, MaybeAppended, ClientGone."""
    # not `timeout`, which would cancel the future, and a cancelled one is done
    either: list[asyncio.Future[Any]] = [appended, outcome]
    await asyncio.wait(either, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
    if appended.done():
        appended.result()
    elif outcome.done():
        outcome.result()  # what has one is in the log
    else:
        raise TimeoutError


def _begin(world: World, outcome: asyncio.Future[Recorded], command: Command, value: bytes) -> asyncio.Future[int]:
    try:
        return timed.append(world.appender, outcome, command, value, world.commands)
    except NotAppended as error:
        raise _not_appended(error) from None


def _require_open(world: World, kind: CommandType) -> None:
    """Raises Problem 429, 503 where no command of this type may be appended now."""
    try:
        world.appender.require()
        world.look.require(OUTCOMES)
        world.look.require_command(kind)
    except SamefoldError as error:
        raise problem_of(error, appended="no") from None
    seen = world.look.seen
    behind = seen.behind(all_views()[OUTCOMES].agent) if seen else 0
    if behind > world.settings.api_max_lag:
        raise BEHIND(f"It is {behind} commits behind the log.", headers=_retry(), appended="no")


def _fail(outcome: asyncio.Future[Recorded], appended: asyncio.Future[int]) -> None:
    if not (appended.cancelled() or outcome.done()) and (error := appended.exception()):
        outcome.set_exception(error)


def _not_appended(error: NotAppended) -> Exception:
    problem = traceable(NOT_APPENDED("Kafka did not take it.", headers=_retry(), appended="no"))
    log.warning("not appended: %s", error)
    return problem


def _unknown(asked: Asked, detail: str) -> Problem:
    headers = _retry() | {"Location": asked.location, "Idempotency-Key": quoted(asked.key)}
    return UNKNOWN(detail, headers=headers, appended="unknown", command_id=asked.key, outcome=asked.location)


def _pending(asked: Asked, headers: Mapping[str, str]) -> Response:
    body = {"outcome": "pending", "stream": asked.stream, "command_id": asked.key}
    where = {"Location": asked.location} | _retry()
    return Response(msgspec.json.encode(body), 202, {**headers, **where}, "application/json")


def _retry() -> dict[str, str]:
    return {"Retry-After": str(RETRY_AFTER_S)}


def _errors(error: ValidationError) -> Iterator[tuple[str, str]]:
    """Where and what, never the value itself."""
    for problem in error.errors(include_url=False, include_context=False, include_input=False):
        yield ".".join(map(str, problem["loc"])) or "body", problem["msg"]
