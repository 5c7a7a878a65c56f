"""`POST /hooks/NAME`: what other services send to a webhook of SAMEFOLD_SOURCES that policies receive from.

The signature is the right: no token and no `access.py` is asked for. A message is answered with 202 when Kafka has acknowledged it
in the topic `inbox`, from where policies receive it. One that is sent twice is there twice: its id makes its effect once.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Iterable
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from api import openapi, requests
from api.openapi import JSON
from api.problems import DEFECT, RETRY_AFTER_S, UNAVAILABLE, kind, traceable
from api.requests import BAD_HEADER, TOO_LARGE
from api.services import services_of
from api.waits import TOO_MANY_WAIT
from commands.append import MaybeAppended, NotAppended
from infra.errors import in_words
from infra.log import clients
from infra.log.records import Headers
from infra.processes.time_limit import limited
from policies.engine.inbox import HOOK, ID, SIGNATURE, TIMESTAMP, Hook
from policies.engine.source import Verify

log = logging.getLogger(__name__)

COMPRESSED = kind(415, "compressed", "The body must not be compressed.")
NOT_RECEIVED = kind(503, "not-received", "The message may not have been received.", RETRY_AFTER_S)
WRONG_SIGNATURE = kind(401, "wrong-signature", "The message is not signed as this webhook needs it.")
_CHALLENGE = {"WWW-Authenticate": "Webhook-Signature"}
"""RFC 9110 wants one; no scheme is registered for webhooks."""
LONGEST_ID = 255
_SECONDS = re.compile("[0-9]{1,12}").fullmatch


def path_of(hook: Hook) -> str:
    return f"/hooks/{hook.name}"


def router_of(hooks: Iterable[Hook]) -> APIRouter:
    """A route for each webhook."""
    router = APIRouter()
    for hook in hooks:
        router.add_api_route(
            path_of(hook),
            partial(post, hook),
            methods=["POST"],
            name=f"Webhook {hook.name}",
            description=f"Signed by Standard Webhooks' {ID}, {TIMESTAMP}, {SIGNATURE}, or as the policy's `verify` wants.",
            operation_id=f"hooks_{hook.name.replace('-', '_')}",
            tags=["hooks"],
            status_code=202,
            response_model=dict[str, Any],
            responses=openapi.responses({}, *_PROBLEMS),
            openapi_extra={"requestBody": {"content": {JSON: {"schema": {}}}}},
        )
    return router


async def post(hook: Hook, request: Request) -> Response:
    """The answer to a message. Raises Problem, ClientGone."""
    services = services_of(request)
    if "Content-Encoding" in request.headers:
        raise COMPRESSED()
    body = await requests.bytes_of(request, clients.MAX_COMMAND_BYTES)
    ident = _authors_id(hook, hook.verify, request, body) if hook.verify else _id(hook, request, body)
    if not 0 < len(ident) <= LONGEST_ID or not ident.isprintable():
        raise BAD_HEADER(f"The message's id must have 1 to {LONGEST_ID} printable characters.")
    async with services.receiving:
        inbox, headers = services.stores.inbox(), _kept(hook, request, ident)
        try:
            async with asyncio.timeout(services.settings.api_wait_s):
                await services.appender.append(ident, body, inbox, headers=headers)
        except (NotAppended, MaybeAppended, TimeoutError) as error:
            problem = traceable(NOT_RECEIVED("Kafka has not acknowledged it."))
            log.warning("a message to webhook '%s' may not be in the inbox: %s", hook.name, in_words(error))
            raise problem from None
    return Response(b"{}", 202, media_type=JSON)


def _id(hook: Hook, request: Request, body: bytes) -> str:
    """The id of a message that is signed as Standard Webhooks says. Raises Problem 400, 401."""
    ident, sent, signatures = (requests.single(request, name) for name in (ID, TIMESTAMP, SIGNATURE))
    if not (ident and len(ident) <= LONGEST_ID and sent and signatures and _SECONDS(sent)):
        raise BAD_HEADER(
            f"{ID}, of up to {LONGEST_ID} characters, {SIGNATURE} and {TIMESTAMP}, in seconds since 1970, must be given."
        )
    if abs(time.time() - int(sent)) > hook.source.tolerance_s:
        raise WRONG_SIGNATURE(
            f"{TIMESTAMP} is more than {hook.source.tolerance_s:g} s away from the time here.", headers=_CHALLENGE
        )
    if not hook.is_signed(ident, sent, signatures, body):
        raise WRONG_SIGNATURE("No signature is right.", headers=_CHALLENGE)
    return ident


def _authors_id(hook: Hook, verify: Verify, request: Request, body: bytes) -> str:
    """The id of a message by the author's `verify`. Raises Problem 401, 500."""
    try:
        ident = limited(verify, request.headers, body, [one.get_secret_value() for one in hook.source.secrets])
        if not isinstance(ident, str | None):
            raise TypeError
    except Exception as error:  # its words may hold a secret
        log.error("the `verify` of webhook '%s' failed: %s", hook.name, type(error).__name__)
        raise traceable(DEFECT()) from None
    if ident is None:
        raise WRONG_SIGNATURE(headers=_CHALLENGE)
    return ident


def _kept(hook: Hook, request: Request, ident: str) -> Headers:
    """The headers of the message's record, without the trace."""
    names = (name for name in (TIMESTAMP, "content-type", *hook.types) if name in request.headers)
    own = {name: request.headers[name].encode("latin-1") for name in names}
    return [*(own | {ID: ident.encode(), HOOK: hook.name.encode()}).items()]


_PROBLEMS = (BAD_HEADER, WRONG_SIGNATURE, TOO_LARGE, COMPRESSED, TOO_MANY_WAIT, DEFECT, NOT_RECEIVED, *UNAVAILABLE)
