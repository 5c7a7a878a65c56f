"""`GET /metrics`, for Prometheus: of this process."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request
from starlette.responses import Response

from infra.observability.metrics import exposition

router = APIRouter()


@router.get("/metrics", include_in_schema=False)
async def metrics(request: Request) -> Response:
    """In Prometheus' text format, or in OpenMetrics where `Accept` asks for that."""
    body, media_type = await asyncio.to_thread(exposition, request.headers.get("Accept", ""))
    return Response(body, headers={"Content-Type": media_type})
