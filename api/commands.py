"""`POST /{context}/{stream_id}/{command}`: one route for each command of each context, from the unions that declare them.

A command is checked here as the handler will check it, appended, and answered with its outcome. The outcome is recorded in the
transaction that wrote the read models, so clients always read their own writes.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from inspect import Parameter

import msgspec
from fastapi import APIRouter, Request
from msgspec import UNSET
from pydantic import ValidationError
from starlette.responses import Response

from api import openapi, requests
from api.append import MaybeAppended, NotAppended, outcome_after
from api.door import caller_of
from api.openapi import JSON, Body, Json, header, in_header
from api.outcome_waits import TOO_MANY_WAIT
from api.outcomes import CONFLICT, FAILED, KEY_REUSED, REFUSED, UNCLEAR, CommandRef, answer_of
from api.permissions import DENIED, require_may_send
from api.problems import (
    CALLERS_FAULT,
    DEFECT,
    INVALID,
    RETRY_AFTER_S,
    STOPPING,
    UNAVAILABLE,
    Kind,
    invalid,
    kind,
    kind_of,
    problem_of,
    traceable,
)
from api.requests import BAD_SEGMENT, TOO_LARGE, quoted
from api.services import Services, services_of
from api.stores import CommandNotLive, OtherViewsLive
from commands.intake import bad_client_name, fingerprint_of, holds_nul, require_members_once, validator
from commands.sealing import Unsealed, holds_token
from domain.engine.contexts import BadContext, Context, refusals_of
from domain.engine.personal.fields import is_personal
from domain.engine.personal.keys import KeysNotRead, SubjectForgotten
from domain.engine.versions import stored_type
from domain.language import kebab
from infra.database.connect import named_errors
from infra.errors import SamefoldError
from infra.log import clients
from infra.log.records import Command, encode
from infra.processes.time_limit import limited
from projections.engine.store.command_types import CommandType
from projections.engine.views.core_views import OUTCOMES, all_views

log = logging.getLogger(__name__)

NOT_JSON = kind(415, "not-json", "The body must be JSON.")
BEHIND = kind(429, "read-model-behind", "The read model is too far behind.", RETRY_AFTER_S)
NOT_APPENDED = kind(503, "not-appended", "The command could not be appended.", RETRY_AFTER_S)
FORGOTTEN = kind(410, "subject-forgotten", "The person was forgotten.")
CALLERS_FAULT[SubjectForgotten] = FORGOTTEN
UNKNOWN = kind(503, "maybe-appended", "Whether the command was appended is not known.", RETRY_AFTER_S)

MAX_LAG = 50_000
"""Commits that the read model may be behind: about ten seconds of full load. More would only wait, and time out."""
RESERVED = frozenset({"views", "outcomes", "health", "metrics", "openapi", "docs"})
"""First segments of paths that belong to no context."""


def router_of(contexts: Mapping[str, Context], bodies: list[Body]) -> APIRouter:
    """The routes of all commands, whose bodies are added to `bodies`. Raises BadContext."""
    router = APIRouter(route_class=openapi.Described)
    for context in contexts.values():
        if context.name in RESERVED:
            raise BadContext(
                f"A context can't be called '{context.name}': the API has other routes under this name.",
                "Rename its file in domain/.",
            )
        for name, command in context.commands.items():
            body = Body(context, name, command)
            bodies.append(body)
            about = " ".join((body.schema.get("description") or "").split())
            summary = kebab(name).replace("-", " ").capitalize()
            router.add_api_route(
                f"/{context.name}/{{stream_id}}/{kebab(name)}",
                openapi.describe(_route(context, command), _stream_id(context), *_HEADERS, openapi.PREFER),
                methods=["POST"],
                name=f"{context.name} {name}",
                summary=summary,
                description=about or f"{summary}.",
                operation_id=_operation_id(context, name),
                tags=[context.name],
                response_model=openapi.Accepted,
                response_description="It was done, and the views of the agent 'core' show it.",
                responses=_responses(context),
                openapi_extra=body.described(),
            )
    return router


def _route(context: Context, kind_: type) -> openapi.Route:
    stored = stored_type(kind_)

    async def post(request: Request) -> Response:
        requests.refuse_unknown(request)
        settings = services_of(request).settings
        ref, prefer = _ref(request, context), requests.preferences(request)
        expected, correlation = requests.expected_version(request), requests.correlation_id(request)
        if not requests.is_json(request):
            raise NOT_JSON()
        body = await requests.body_of(request, clients.MAX_COMMAND_BYTES)
        caller = caller_of(request)
        by = UNSET if caller is None else caller.subject
        command = Command(ref.key, ref.stream, stored, msgspec.Raw(body), expected, correlation or UNSET, by=by)
        checked, unsealed = _checked(command, kind_, is_asked_about=caller is not None)
        if caller is not None:
            await require_may_send(services_of(request), caller, ref.stream, ref.key, checked)
        if unsealed is not None:  # a new key is made in Kafka: not for what can't be appended
            await _require_open(services_of(request), CommandType(context.name, stored))
        command = await _sealed(services_of(request), command, unsealed)
        headers = {"Idempotency-Key": quoted(ref.key)} | prefer.applied
        return await _append(request, ref, command, prefer.wait_or(settings.api_wait_s), headers)

    return post


def _checked(command: Command, kind_: type, *, is_asked_about: bool) -> tuple[object, Unsealed | None]:
    """The command as its class reads it, and as it is sealed where the class has personal fields. Raises Problem 422, 500.

    The first is None where nobody asks about it and it is not needed, or where the class's own checks failed.
    """
    body, is_sealed = bytes(command.data), is_personal(kind_)
    checked: object = None
    unsealed: Unsealed | None = None
    try:
        if is_sealed:
            unsealed = limited(Unsealed, command, kind_)
        if is_asked_about or not is_sealed:
            checked = limited(validator(kind_), body)
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False, include_input=False)
        # where and what, never the value itself
        raise invalid((".".join(map(str, one["loc"])) or "body", one["msg"]) for one in found) from None
    except Exception as error:  # a defect in the command's own checks, which the handler records as its outcome
        name = kind_.__name__
        if is_sealed:  # nothing is appended as plain text, nor logged
            log.error("%s: the checks of '%s' failed: %s", command.stream, name, type(error).__name__)
            raise traceable(DEFECT()) from None
        log.exception("%s: the checks of '%s' failed", command.stream, name)
        if is_asked_about:  # nothing is appended that nobody allowed
            raise traceable(DEFECT()) from None
    if holds_nul(body):
        raise INVALID(errors=[{"at": "body", "problem": "a text holds a NUL character, which can't be stored"}])
    return checked, unsealed


async def _sealed(services: Services, command: Command, unsealed: Unsealed | None) -> Command:
    """The command with sealed values, where its class has some. Raises Problem 422, SubjectForgotten, a store's named errors."""
    if services.keys is None:
        return command
    try:
        if holds_token(command):
            raise INVALID(errors=[{"at": "body", "problem": "a text holds a sealed value"}])
        if unsealed is None:
            return command
        with named_errors(services.settings):
            key = await services.keys.key_for_async(services.pool, unsealed.subject)
        return limited(unsealed.sealed, key)
    except (ValueError, msgspec.DecodeError, RecursionError) as error:  # NotSealed among them
        raise INVALID(errors=[{"at": "body", "problem": str(error)}]) from None


def _ref(request: Request, context: Context) -> CommandRef:
    """The stream and the command's id. Raises Problem 400, 422."""
    stream_id = requests.segment(request, "stream_id")
    key, is_callers = requests.idempotency_key(request)
    if problem := bad_client_name(f"{context.name}/{stream_id}", key):
        raise INVALID(f"{problem[:1].upper()}{problem[1:]}.", errors=[{"at": "stream_id", "problem": problem}])
    return CommandRef(context, stream_id, key, is_callers)


async def _append(
    request: Request, ref: CommandRef, command: Command, wait_s: float, headers: Mapping[str, str]
) -> Response:
    """Append it, and wait for the outcome as long as the client asks for and stays connected."""
    services = services_of(request)
    settings = services.settings
    try:
        fingerprint = fingerprint_of(command)
        require_members_once(bytes(command.data))
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise INVALID(errors=[{"at": "body", "problem": str(error)}]) from None
    value, most = encode(command), clients.MAX_COMMAND_BYTES
    if len(value) > most:
        raise TOO_LARGE(f"The command takes {len(value)} bytes in the log; it may take {most}.", limit=most)
    with requests.watched(request):
        async with services.places:
            await _require_open(services, CommandType(ref.context.name, command.type))
            partitions = services.events.partitions
            with services.outcomes.waiting(ref.stream, ref.key, partitions, may_be_there=ref.is_callers) as outcome:
                appended = services.appender.append(command, value, services.commands)
                try:
                    recorded = await outcome_after(
                        appended, outcome, wait_s or settings.api_wait_s, or_append=not wait_s
                    )
                except NotAppended as error:
                    problem = traceable(NOT_APPENDED("Kafka did not accept it.", appended="no"))
                    log.warning("not appended%s: %s", _sent_by(command), error)
                    raise problem from None
                except MaybeAppended as error:
                    where = {"Location": ref.location, "Idempotency-Key": quoted(ref.key)}
                    members = {"appended": "unknown", "command_id": ref.key, "outcome": ref.location}
                    problem = traceable(UNKNOWN("Kafka has not acknowledged it.", headers=where, **members))
                    log.warning("maybe appended%s: %s", _sent_by(command), error)
                    raise problem from None
    if wait_s and recorded is not None:
        return answer_of(ref, recorded, fingerprint, headers)
    pending = {"outcome": "pending", "stream": ref.stream, "command_id": ref.key}
    where = {"Location": ref.location, "Retry-After": str(RETRY_AFTER_S)}
    return Response(msgspec.json.encode(pending), 202, {**headers, **where}, JSON)


def _sent_by(command: Command) -> str:
    return "" if command.by is UNSET else f", sent by {command.by!r}"


async def _require_open(services: Services, kind_: CommandType) -> None:
    """Raises Problem 429, 503 where no command of this type may be appended now."""
    stores = services.stores
    try:
        services.appender.require()
        stores.require(OUTCOMES)
        await stores.find_command(kind_)
        stores.require_command(kind_)
    except SamefoldError as error:
        raise problem_of(error, appended="no") from None
    if services.is_stopping:  # checked after the last await, so that a command is never appended without an answer
        raise STOPPING(appended="no")
    seen = stores.seen
    behind = seen.behind(all_views()[OUTCOMES].agent) if seen else 0
    if behind > MAX_LAG:
        raise BEHIND(f"It is {behind} commits behind the log.", appended="no")


# ── the OpenAPI document ──


def _stream_id(context: Context) -> Parameter:
    about = f"Which of {context.name}: text in NFC, without format characters; with `{context.name}/` at most 200 bytes in UTF-8."
    return openapi.text_in_path("stream_id", about, openapi.A_STREAM)


_HEADERS = (
    in_header(
        "Idempotency-Key",
        "The command's id, a string of RFC 9651 (draft-ietf-httpapi-idempotency-key-header). Sent again with the same key and "
        "body, it gets the same answer and does nothing twice. Without one the service makes one, and a retry is another command. "
        "A key without spaces is accepted without its quotes, too.",
        f'"{openapi.A_KEY}"',
        pattern=requests.KEY,
    ),
    in_header(
        "If-Match",
        "The version that the stream must have, as an answer's ETag has it; else 412.",
        f'"{openapi.A_VERSION}"',
        pattern=r'^"(0|[1-9][0-9]{0,17})"$',
    ),
    in_header(
        "If-None-Match",
        "`*`: the stream must have no events yet; else 412. Not together with `If-Match`.",
        "*",
        enum=["*"],
    ),
    in_header(
        "Correlation-Id",
        "The caller's own id for all that belongs together; it is kept with the command and its events.",
        "order-4711",
        minLength=1,
        maxLength=200,
        pattern=r"^[!-~]+$",
    ),
)
_KEY = {"Idempotency-Key": header("The key that was given, or that was made for this command")}
_ETAG = {"ETag": header("The stream's version, for `If-Match`")}
_LOCATION = {"Location": header("Where the outcome is, or will be")}


_PROBLEMS = (
    *(requests.BAD_HEADER, requests.CUT_OFF, REFUSED, CONFLICT, TOO_LARGE, NOT_JSON),
    *(INVALID, UNCLEAR, KEY_REUSED, BAD_SEGMENT, BEHIND, TOO_MANY_WAIT, FAILED, DEFECT, *DENIED),
    *(NOT_APPENDED, UNKNOWN, STOPPING, *UNAVAILABLE, kind_of(OtherViewsLive), kind_of(CommandNotLive)),
)


def _responses(context: Context) -> openapi.Responses:
    recorded = _KEY | openapi.AT_POSITION
    refusals = (Kind(409, code, refusal.message) for code, refusal in refusals_of(context).items())
    done = {"headers": recorded | _ETAG | openapi.APPLIED, "links": _links(context)}
    pending = {"headers": _KEY | _LOCATION | openapi.RETRY_AFTER | openapi.APPLIED, "model": openapi.Pending}
    others: openapi.Responses = {200: done, 202: pending | {"description": "It is in the log and will be decided."}}
    sealing = (FORGOTTEN, kind_of(KeysNotRead)) if any(map(is_personal, context.commands.values())) else ()
    return openapi.responses(
        others, *_PROBLEMS, *sealing, *refusals, headers={409: recorded, 412: recorded, 503: _LOCATION}
    )


def _operation_id(context: Context, name: str) -> str:
    """The name of the command's route in generated clients: `accounts_open_account`."""
    return f"{context.name}_{kebab(name).replace('-', '_')}"


def _links(context: Context) -> Json:
    """What can follow: ask for the outcome, or send another command to the stream at its new version."""
    stream = {"path.stream_id": "$request.path.stream_id"}
    whose = {"path.context": context.name, **stream, "path.key": "$response.body#/command_id"}
    next_ = {**stream, "header.If-Match": "$response.header.ETag"}
    commands = {
        kebab(name): {"operationId": _operation_id(context, name), "parameters": next_} for name in context.commands
    }
    return {"outcome": {"operationId": "outcome", "parameters": whose}} | commands
