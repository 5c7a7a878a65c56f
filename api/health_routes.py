"""`GET /health/live` and `GET /health/ready`: for load balancers and whatever starts processes again."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from api.openapi import RETRY_AFTER, problems
from api.problems import RETRY_AFTER_S, kind
from api.readiness import Readiness

router = APIRouter(prefix="/health", tags=["health"])

NOT_READY = kind(
    503,
    "not-ready",
    "This process can't do its work now.",
    "`checks` says of each condition whether it holds, and if not, why and what to do. It is asked anew twice a second.",
)


@router.get("/live")
async def live() -> dict[str, str]:
    """Whether the process answers at all. Nothing else counts: starting it again would not bring back what it waits for."""
    return {"status": "live"}


_CHECK = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, **{name: {"type": "string"} for name in ("code", "why", "cure")}},
    "required": ["ok"],
}
_READY = {
    "type": "object",
    "properties": {
        "status": {"type": "string", "enum": ["ready"]},
        "checks": {"type": "object", "additionalProperties": _CHECK},
    },
    "required": ["status", "checks"],
}
_DESCRIBED: dict[str, Any] = {
    "responses": {
        "200": {"description": "Every check holds.", "content": {"application/json": {"schema": _READY}}},
        "503": problems("Some check does not hold: `checks` has them all.", NOT_READY.code, headers=RETRY_AFTER),
    }
}


@router.get("/ready", response_model=None, openapi_extra=_DESCRIBED)
async def ready(request: Request) -> Response:
    """Whether requests should be sent here, with the reason of each check that fails."""
    readiness: Readiness = request.app.state.readiness
    found = readiness.checks()
    checks: dict[str, Any] = {check.name: check.as_dict() for check in found}
    if wrong := [check.name for check in found if check.error is not None]:
        retry = {"Retry-After": str(RETRY_AFTER_S)}
        raise NOT_READY(f"Not as it should be: {', '.join(wrong)}.", headers=retry, checks=checks)
    return Response(msgspec.json.encode({"status": "ready", "checks": checks}), 200, media_type="application/json")
