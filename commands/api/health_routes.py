"""`GET /health/live` and `GET /health/ready`: for load balancers and whatever starts processes again."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from commands.api.problems import RETRY_AFTER_S, kind
from commands.api.readiness import Readiness

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


@router.get("/ready", response_model=None, responses={503: {"description": NOT_READY.title}})
async def ready(request: Request) -> Response:
    """Whether requests should be sent here, with the reason of each check that fails."""
    readiness: Readiness = request.app.state.readiness
    found = readiness.checks()
    checks: dict[str, Any] = {check.name: check.as_dict() for check in found}
    if wrong := [check.name for check in found if check.error is not None]:
        retry = {"Retry-After": str(RETRY_AFTER_S)}
        raise NOT_READY(f"Not as it should be: {', '.join(wrong)}.", headers=retry, checks=checks)
    return Response(msgspec.json.encode({"status": "ready", "checks": checks}), 200, media_type="application/json")
