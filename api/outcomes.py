"""From an outcome as it is recorded to the answer of the API."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.responses import Response

from api.answering import Recorded
from api.limits import TOO_LARGE
from api.problems import INVALID, Problem, kind
from api.segments import path_of
from infra.domain_model.contexts import Context, refusals_of

CONFLICT = kind(
    412,
    "version-conflict",
    "The stream is not at the version that was expected.",
    "Nothing was done. Read the stream anew, decide again, and send that under a new Idempotency-Key.",
)
KEY_REUSED = kind(
    422,
    "key-reused",
    "This Idempotency-Key was used before, with another command.",
    "Nothing was done this time. A key belongs to one command: its type, its body and the version it expects.",
)
FAILED = kind(
    500,
    "failed",
    "The code of the business failed on this command.",
    "A defect of the service. Nothing was done, and the same command under the same key will always be answered so.",
)
REFUSED = kind(
    409,
    "refused",
    "The business said no.",
    "A refusal that this version of the service no longer knows; `code` and `detail` are as they were recorded.",
)

JSON = "application/json"


@dataclass(frozen=True, slots=True)
class Asked:
    """Whose outcome it is. `is_callers`: the caller chose the key, so the command may be a repeated one."""

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


def recorded_as(asked: Asked, recorded: Recorded) -> dict[str, Any]:
    """An outcome's members, of either kind."""
    return {
        "outcome": recorded.outcome,
        "stream": asked.stream,
        "command_id": asked.key,
        "version": recorded.version,
        "position": str(recorded.position),
        "at": recorded.at,
    }


def answer_of(asked: Asked, recorded: Recorded, fingerprint: str, headers: Mapping[str, str]) -> Response:
    """The answer to whoever sent the command with that fingerprint. Raises Problem for all but acceptance."""
    if recorded.fingerprint != fingerprint:
        raise KEY_REUSED(headers=headers, command_id=asked.key)
    members = recorded_as(asked, recorded)
    headers = {**headers, "Samefold-Position": members["position"]}
    if recorded.outcome == "accepted":
        headers["ETag"] = f'"{recorded.version}"'
        return Response(msgspec.json.encode(members), 200, headers, JSON)
    raise _rejection(asked, recorded, headers, members)


def _rejection(asked: Asked, recorded: Recorded, headers: Mapping[str, str], members: dict[str, Any]) -> Problem:
    detail = _sentence(message_of(recorded) or "")
    match recorded.code:
        case "version-conflict":
            return CONFLICT(detail, headers=headers, **members)
        case "malformed":
            return INVALID(detail, headers=headers, **members)
        case "too-large":
            return TOO_LARGE(detail, headers=headers, **members)
        case "failed" | "misrouted":
            return FAILED(detail, headers=headers, **members)
        case code:
            refusal = refusals_of(asked.context).get(code or "")
            if refusal is None:
                return Problem(409, code or REFUSED.code, REFUSED.title, detail, headers=headers, **members)
            context = asked.context.name
            return Problem(409, refusal.code, refusal.message, detail, headers=headers, context=context, **members)


def message_of(recorded: Recorded) -> str | None:
    """As the business wrote it, or what the handler noted; how its code failed is told by the log of events alone."""
    return FAILED.title if recorded.code == "failed" else recorded.message


def _sentence(text: str) -> str:
    return text if not text or text[-1] in ".!?" else f"{text[:1].upper()}{text[1:]}."
