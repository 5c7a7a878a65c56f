"""`GET /health/live`, `GET /health/ready` and `GET /metrics`, from the checks that are made anyway: a probe asks no store."""

from __future__ import annotations

import asyncio
import time
from typing import NamedTuple, NotRequired

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response
from typing_extensions import TypedDict

from api.openapi import RETRY_AFTER, Described, describe, problems
from api.problems import kind, retry_later, why
from api.stores import HealthSnapshot, StoreChecks
from infra.errors import SamefoldError
from infra.observability import metrics
from infra.settings import Settings
from projections.engine.live.lag import Lags, tell_lags
from projections.engine.views.view import CORE

BLIND_S = 10.0
"""After so long without a complete snapshot, and without a reason, something is wrong with the checks."""
SUBJECTS = ("kafka", "database", "topics", "contract", "views")

NOT_READY = kind(503, "not-ready", "This process can't do its work now.")


class ReadModelStandsStill(SamefoldError):
    """The log goes on, and the read model that commands are answered from does not."""

    is_public = True


class Blind(SamefoldError):
    """This process has no recent picture of both stores."""

    is_public = True


class Checked(TypedDict):
    """One condition of being ready."""

    ok: bool
    code: NotRequired[str]
    why: NotRequired[str]
    cure: NotRequired[str]


class Ready(TypedDict):
    """The body of an answer."""

    status: str
    checks: dict[str, Checked]


class Check(NamedTuple):
    """One condition of being ready, and the named error where it does not hold."""

    name: str
    error: SamefoldError | None

    def as_dict(self) -> Checked:
        if self.error is None:
            return {"ok": True}
        what, cure = why(self.error)
        return {"ok": False, "code": self.error.code, "why": what, "cure": cure}


class Readiness:
    """Listens to the checks of the stores in one process, and keeps its gauges."""

    def __init__(self, settings: Settings, stores: StoreChecks) -> None:
        self._settings = settings
        self._stores = stores
        self._lags = Lags()
        self._seen: HealthSnapshot | None = None
        stores.subscribe(self.checked)

    def checked(self) -> None:
        """After each check."""
        seen = self._stores.seen
        if seen is not None and seen is not self._seen:
            self._seen = seen
            self._lags.saw(seen.at, seen.positions, seen.ends)
            tell_lags(self._lags.now, {view: seen.parked.get(view, 0) for view in seen.live})
        for check in self.checks():
            metrics.READY.labels(check.name).set(check.error is None)

    def checks(self) -> list[Check]:
        wrong = self._stores.failures
        found = [Check(subject, wrong.get(subject) or wrong.get("start")) for subject in SUBJECTS]
        blind = None if any(check.error for check in found) else self._blind()
        return [*found, Check("looks", blind), Check("positions", self._standing_still())]

    def _blind(self) -> SamefoldError | None:
        age = time.monotonic() - self._seen.at if self._seen else None
        if age is not None and age <= BLIND_S:
            return None
        return Blind(
            f"The last complete check of both stores is {'not there' if age is None else f'{age:.0f} s old'}.",
            "If it stays so, restart this process, and tell its authors what its log says.",
        )

    def _standing_still(self) -> SamefoldError | None:
        longest = self._settings.api_stall_s
        still = {who: lag for who, lag in self._lags.now.items() if who[0] == CORE and lag.still > longest}
        if not still:
            return None
        (agent, partition), lag = max(still.items(), key=lambda item: item[1].still)
        return ReadModelStandsStill(
            f"Agent '{agent}' has not moved in partition {partition} for {lag.still:.0f} s, {lag.records} records behind the log"
            + (f", and in {len(still) - 1} others." if len(still) > 1 else "."),
            "Is an agent running (`samefold run agent`)? Its log says what holds it up.",
        )


def router() -> APIRouter:
    routes = APIRouter(route_class=Described)
    routes.add_api_route("/health/live", describe(_live), tags=["health"], response_model=dict[str, str])
    routes.add_api_route(
        "/health/ready",
        describe(_ready),
        tags=["health"],
        response_model=Ready,
        response_description="Every check holds.",
        responses={503: problems("A check does not hold: `checks` has them all.", NOT_READY, headers=RETRY_AFTER)},
    )
    routes.add_api_route("/metrics", describe(_metrics), include_in_schema=False)
    return routes


async def _live(_request: Request) -> Response:
    """Whether the process answers at all. Nothing else counts: to restart it would not bring back what it waits for."""
    return Response(b'{"status":"live"}', media_type="application/json")


async def _ready(request: Request) -> Response:
    """Whether requests should be sent here, with the reason of each check that fails."""
    readiness: Readiness = request.app.state.readiness
    found = readiness.checks()
    checks = {check.name: check.as_dict() for check in found}
    if wrong := [check.name for check in found if check.error is not None]:
        raise NOT_READY(f"Not as it should be: {', '.join(wrong)}.", headers=retry_later(), checks=checks)
    return Response(msgspec.json.encode(Ready(status="ready", checks=checks)), media_type="application/json")


async def _metrics(request: Request) -> Response:
    """In Prometheus' text format, or in OpenMetrics where `Accept` asks for that."""
    body, media_type = await asyncio.to_thread(metrics.exposition, request.headers.get("Accept", ""))
    return Response(body, headers={"Content-Type": media_type})
