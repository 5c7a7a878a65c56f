"""`POST /{context}/{stream_id}/{command}`: one route for each command of each context, from the unions that declare them.

A command is read, checked as the handler will check it, appended (`commands/append.py`), and waits for its outcome
(`api/waits.py`), which is the answer. The outcome is recorded in the transaction that wrote the read models, so clients always
read their own writes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from msgspec import UNSET
from pydantic import ValidationError
from starlette.responses import Response

from api import openapi, requests
from api.door import caller_of
from api.openapi import JSON, Body, Json
from api.permissions import DENIED, require_may_send
from api.problems import (
    DEFECT,
    INVALID,
    RETRY_AFTER_S,
    STOPPING,
    UNAVAILABLE,
    Kind,
    callers_fault,
    invalid,
    kind,
    kind_of,
    problem_of,
    traceable,
)
from api.requests import BAD_SEGMENT, TOO_LARGE, path_of, quoted
from api.services import Services, services_of
from api.stores import CommandNotLive, OtherViewsLive
from api.waits import TOO_MANY_WAIT, outcome_after
from commands.append import MaybeAppended, NotAppended
from commands.intake import bad_client_name, fingerprint_of, holds_nul, place_of_nul, require_members_once, validator
from commands.outcomes import Outcome
from commands.sealing import Unsealed, holds_token
from domain.engine.contexts import BadContext, Context, refusals_of
from domain.engine.personal.fields import is_personal
from domain.engine.personal.keys import KeysNotRead, SubjectForgotten
from domain.engine.versions import problems, stored_type
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
FORGOTTEN = callers_fault(SubjectForgotten, 410, "The person was forgotten.")
UNKNOWN = kind(503, "maybe-appended", "Whether the command was appended is not known.", RETRY_AFTER_S)

CONFLICT = kind(412, "version-conflict", "The stream is not at the version that was expected.")
UNCLEAR = kind(422, "unclear-stream", "The name of a new stream looks like another stream's name.")
KEY_REUSED = kind(422, "key-reused", "This Idempotency-Key was used before, with another command.")
FAILED = kind(500, "failed", "The context's code failed on this command.")
REFUSED = kind(409, "refused", "The command was refused.")
REJECTED = {"malformed": INVALID, "misrouted": FAILED} | {it.code: it for it in (CONFLICT, TOO_LARGE, FAILED, UNCLEAR)}
"""The codes that the handler itself rejects commands with; all others are refusals of the business."""

MAX_LAG = 50_000
"""Commits that the read model may be behind: about ten seconds of full load. More would only wait, and time out."""
RESERVED = frozenset({"views", "outcomes", "health", "metrics", "openapi", "docs", "console"})
"""First segments of paths that belong to no context."""


@dataclass(frozen=True, slots=True)
class CommandRef:
    """Names a command. `is_callers`: the caller chose the key, so the command may be a repeated one."""

    context: Context
    stream_id: str
    key: str
    is_callers: bool = True

    @property
    def stream(self) -> str:
        return f"{self.context.name}/{self.stream_id}"

    @property
    def location(self) -> str:
        """The path under which the outcome is found."""
        return path_of("outcomes", self.context.name, self.stream_id, self.key)


def router_of(contexts: Mapping[str, Context], bodies: list[Body]) -> APIRouter:
    """The routes of all commands, whose bodies are added to `bodies`. Raises BadContext."""
    router = APIRouter()
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
                partial(post, context, command, stored_type(command)),
                methods=["POST"],
                name=f"{context.name} {name}",
                summary=summary,
                description=about or f"{summary}.",
                operation_id=f"{context.name}_{kebab(name).replace('-', '_')}",
                tags=[context.name],
                response_model=openapi.Accepted,
                response_description="It was done, and the views of the agent 'core' show it.",
                responses=_responses(context),
                openapi_extra=body.described()
                | {"parameters": [_stream_id(context), *openapi.COMMAND_HEADERS, openapi.PREFER]},
            )
    return router


async def post(context: Context, kind_: type, stored: str, request: Request) -> Response:
    """The answer to a command of that class and stored type. Raises Problem, BadAccess, ClientGone."""
    requests.refuse_unknown(request)
    services, caller = services_of(request), caller_of(request)
    ref, prefer = _ref(request, context), requests.preferences(request)
    expected, correlation = requests.expected_version(request), requests.correlation_id(request)
    if not requests.is_json(request):
        raise NOT_JSON()
    body = await requests.body_of(request, clients.MAX_COMMAND_BYTES)
    by = UNSET if caller is None else caller.subject
    command = Command(ref.key, ref.stream, stored, msgspec.Raw(body), expected, correlation or UNSET, by=by)
    checked, unsealed = _checked(command, kind_, is_asked_about=caller is not None)
    if caller is not None:
        await require_may_send(services, caller, ref.stream, ref.key, checked)
    if unsealed is not None:  # a new key is made in Kafka: not for what can't be appended
        await _require_open(services, CommandType(context.name, stored))
    command = await _sealed(services, command, unsealed)
    fingerprint, value = _encoded(command)
    wait_s = prefer.wait_or(services.settings.api_wait_s)
    with requests.watched(request):
        recorded = await _appended(services, ref, command, value, wait_s)
    headers = {"Idempotency-Key": quoted(ref.key)} | prefer.applied
    if wait_s and recorded is not None:
        return answer_of(ref, recorded, fingerprint, headers)
    pending = {"outcome": "pending", "stream": ref.stream, "command_id": ref.key}
    where = {"Location": ref.location, "Retry-After": str(RETRY_AFTER_S)}
    return Response(msgspec.json.encode(pending), 202, headers | where, JSON)


def _ref(request: Request, context: Context) -> CommandRef:
    """The stream and the command's id. Raises Problem 400, 422."""
    stream_id = requests.segment(request, "stream_id")
    key, is_callers = requests.idempotency_key(request)
    if problem := bad_client_name(f"{context.name}/{stream_id}", key):
        raise INVALID(_sentence(problem), errors=[{"at": "stream_id", "problem": problem}])
    return CommandRef(context, stream_id, key, is_callers)


def _checked(command: Command, kind_: type, *, is_asked_about: bool) -> tuple[object, Unsealed | None]:
    """The command as its class reads it, and as it is sealed where the class has personal fields. Raises Problem 422, 500.

    The first is None where the class has personal fields and `access.py` is not asked, or where the class's own checks failed.
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
        raise invalid(problems(error)) from None  # where and what, never the value itself
    except Exception as error:  # a defect in the command's own checks, which the handler records as its outcome
        name = kind_.__name__
        if is_sealed:  # nothing is appended as plain text, nor logged
            log.error("%s: the checks of '%s' failed: %s", command.stream, name, type(error).__name__)
            raise traceable(DEFECT()) from None
        log.exception("%s: the checks of '%s' failed", command.stream, name)
        if is_asked_about:  # nothing is appended that nobody allowed
            raise traceable(DEFECT()) from None
    if holds_nul(body):
        raise invalid([(place_of_nul(body), "a text holds a NUL character, which can't be stored")])
    return checked, unsealed


async def _sealed(services: Services, command: Command, unsealed: Unsealed | None) -> Command:
    """The command with sealed values, where its class has some. Raises Problem 422, SubjectForgotten, a store's named errors."""
    if services.keys is None:
        return command
    try:
        if holds_token(command):
            raise invalid([("body", "a text holds a sealed value")])
        if unsealed is None:
            return command
        with named_errors(services.settings):
            key = await services.keys.key_for_async(services.pool, unsealed.subject)
        return limited(unsealed.sealed, key)
    except (ValueError, msgspec.DecodeError, RecursionError) as error:  # NotSealed among them
        raise invalid([("body", str(error))]) from None


def _encoded(command: Command) -> tuple[str, bytes]:
    """Its fingerprint and its record's value. Raises Problem 413, 422."""
    try:
        fingerprint = fingerprint_of(command)
        require_members_once(bytes(command.data))
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise invalid([("body", str(error))]) from None
    value, most = encode(command), clients.MAX_COMMAND_BYTES
    if len(value) > most:
        raise TOO_LARGE(f"The command takes {len(value)} bytes in the log; it may take {most}.", limit=most)
    return fingerprint, value


async def _require_open(services: Services, kind_: CommandType) -> None:
    """Raises Problem 429, 503 where no command of this type may be appended now."""
    stores = services.stores
    try:
        stores.require(OUTCOMES)
        await stores.require_command(kind_)
    except SamefoldError as error:
        raise problem_of(error, appended="no") from None
    if services.is_stopping:  # checked after the last await, so that a command is never appended without an answer
        raise STOPPING(appended="no")
    seen = stores.seen
    behind = seen.behind(all_views()[OUTCOMES].agent) if seen else 0
    if behind > MAX_LAG:
        raise BEHIND(f"It is {behind} commits behind the log.", appended="no")


async def _appended(
    services: Services, ref: CommandRef, command: Command, value: bytes, wait_s: float
) -> Outcome | None:
    """Append it and wait for its outcome, or until it is in the log where `wait_s` is 0. Raises Problem 429, 503."""
    async with services.places:
        await _require_open(services, CommandType(ref.context.name, command.type))
        topic, events = services.stores.topics()
        with services.outcomes.waiting(ref.stream, ref.key, events.partitions, may_be_there=ref.is_callers) as outcome:
            appended = services.appender.append(ref.stream, value, topic, services.gather_s())
            started = time.perf_counter()
            try:
                recorded = await outcome_after(
                    appended, outcome, wait_s or services.settings.api_wait_s, or_append=not wait_s
                )
            except NotAppended as error:
                problem = traceable(NOT_APPENDED("Kafka did not accept it.", appended="no"))
                log.warning("not appended%s: %s", _sent_by(command), error)
            except MaybeAppended as error:
                where = {"Location": ref.location, "Idempotency-Key": quoted(ref.key)}
                members = {"appended": "unknown", "command_id": ref.key, "outcome": ref.location}
                problem = traceable(UNKNOWN("Kafka has not acknowledged it.", headers=where, **members))
                log.warning("maybe appended%s: %s", _sent_by(command), error)
            else:
                if recorded is not None:
                    services.round_trip.took(time.perf_counter() - started)
                return recorded
            raise problem


def _sent_by(command: Command) -> str:
    return "" if command.by is UNSET else f", sent by {command.by!r}"


# ── the answer ──


def answer_of(ref: CommandRef, recorded: Outcome, fingerprint: str, headers: Mapping[str, str]) -> Response:
    """The answer to the sender of a command with that fingerprint. Raises Problem for all but acceptance."""
    if recorded.fingerprint != fingerprint:
        raise KEY_REUSED(headers=headers, command_id=ref.key)
    members = members_of(ref, recorded)
    headers = {**headers, "Samefold-Position": members["position"]}
    if recorded.outcome == "accepted":
        headers["ETag"] = f'"{recorded.version}"'
        return Response(msgspec.json.encode(members), 200, headers, JSON)
    detail = _sentence(message_of(recorded) or "")
    code = recorded.code or REFUSED.code
    if known := REJECTED.get(code):
        raise known(detail, headers=headers, **members)
    refusal = refusals_of(ref.context).get(code)
    kind_ = Kind(409, code, refusal.message, context=ref.context.name) if refusal else REFUSED._replace(code=code)
    raise kind_(detail, headers=headers, **members)


def members_of(ref: CommandRef, recorded: Outcome) -> dict[str, Any]:
    """What accepted and rejected outcomes have in common."""
    return {
        "outcome": recorded.outcome,
        "stream": ref.stream,
        "command_id": ref.key,
        "version": recorded.version,
        "position": str(recorded.position),
        "at": recorded.at,
    }


def message_of(recorded: Outcome) -> str | None:
    """As the business or the handler wrote it; how code failed is in the log of events, and not public."""
    return FAILED.title if recorded.code == "failed" else recorded.message


def _sentence(text: str) -> str:
    return text if not text or text[-1] in ".!?" else f"{text[:1].upper()}{text[1:]}."


# ── the OpenAPI document ──


def _stream_id(context: Context) -> Json:
    about = f"Which of {context.name}: text in NFC, without format characters; with `{context.name}/` at most 200 bytes in UTF-8."
    return openapi.text_in_path("stream_id", about, openapi.A_STREAM)


_PROBLEMS = (
    *(requests.BAD_HEADER, REFUSED, CONFLICT, TOO_LARGE, NOT_JSON),
    *(INVALID, UNCLEAR, KEY_REUSED, BAD_SEGMENT, BEHIND, TOO_MANY_WAIT, FAILED, DEFECT, *DENIED),
    *(NOT_APPENDED, UNKNOWN, STOPPING, *UNAVAILABLE, kind_of(OtherViewsLive), kind_of(CommandNotLive)),
)


def _responses(context: Context) -> openapi.Responses:
    recorded = openapi.KEY | openapi.AT_POSITION
    refusals = (Kind(409, code, refusal.message) for code, refusal in refusals_of(context).items())
    done = {"headers": recorded | openapi.ETAG | openapi.APPLIED}
    pending = {
        "headers": openapi.KEY | openapi.LOCATION | openapi.RETRY_AFTER | openapi.APPLIED,
        "model": openapi.Pending,
    }
    others: openapi.Responses = {200: done, 202: pending | {"description": "It is in the log and will be decided."}}
    sealing = (FORGOTTEN, kind_of(KeysNotRead)) if any(map(is_personal, context.commands.values())) else ()
    return openapi.responses(
        others, *_PROBLEMS, *sealing, *refusals, headers={409: recorded, 412: recorded, 503: openapi.LOCATION}
    )
