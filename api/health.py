"""`GET /health/live`, `GET /health/ready` and `GET /metrics`, from the last checks of the stores: a probe queries none."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, NotRequired

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response
from typing_extensions import TypedDict

from api.openapi import JSON, responses
from api.problems import RETRY_AFTER_S, kind, kind_of
from api.stores import HealthSnapshot, StoreChecks
from domain.engine.personal.keys import Keys
from infra.errors import SamefoldError
from infra.observability import metrics
from projections.engine.live.lag import Lags, PartitionLag, standing_still, tell_lags
from projections.engine.views.view import CORE

if TYPE_CHECKING:
    from api.issuer import Issuer

log = logging.getLogger(__name__)

LOG_S = 60.0
"""Between two log lines of what stands still."""
STALL_S = 30.0
"""After so long without a move behind the log, the read model stands still. Longer than a switch or a rebalance takes."""
BLIND_S = 10.0
"""The age of the last complete snapshot at which the checks themselves must be broken, unless a store is known to be wrong."""
SUBJECTS = ("kafka", "database", "topics", "contract", "views")

NOT_READY = kind(503, "not-ready", "This process can't do its work now.", RETRY_AFTER_S)


class ReadModelStandsStill(SamefoldError):
    """The log grows, and the read model that commands are answered from does not."""

    is_public = True


class Blind(SamefoldError):
    """This process has no recent snapshot of both stores."""

    is_public = True


class Checked(TypedDict):
    """One condition of being ready."""

    ok: bool
    code: NotRequired[str]
    why: NotRequired[str]
    hint: NotRequired[str]


class Ready(TypedDict):
    """The body of an answer."""

    status: str
    checks: dict[str, Checked]
    stopped_views: NotRequired[dict[str, str]]
    """By name, the code of why each stopped. Other requests are served as ever, so this process is ready."""
    unfit_topics: NotRequired[list[str]]
    """Topics of Kafka with a setting that loses history. To serve or not makes no difference to it, so this process is ready."""
    standing_still: NotRequired[dict[str, str]]
    """By agent, and for the handlers, where it has longest been without a move although there is something to do."""


class Readiness:
    """Listens to the checks of the stores in one process, and keeps its gauges."""

    def __init__(self, stores: StoreChecks, keys: Keys | None, issuer: Issuer | None) -> None:
        self._stores = stores
        self._others = {"keys": keys, "issuer": issuer}
        """Without keys where no context has personal fields, and without an issuer unless SAMEFOLD_AUTH=jwt."""
        self._lags = Lags()
        self._undecided = Lags()
        self._log_at = 0.0
        self._seen: HealthSnapshot | None = None
        self._told: object = None
        """What the gauges have."""
        stores.subscribe(self.checked)

    def checks(self) -> Mapping[str, SamefoldError | None]:
        """By name, the conditions of being ready, each with the error where it does not hold."""
        wrong = self._stores.failures
        found = {subject: wrong.get(subject) or wrong.get("start") for subject in SUBJECTS}
        blind = None if any(found.values()) else self._blind()
        others = {name: one.unready() for name, one in self._others.items() if one is not None}
        return found | others | {"looks": blind, "positions": self._core_stands_still()}

    def checked(self) -> None:
        """Called after each check of the stores."""
        seen = self._stores.seen
        if seen is not None and seen is not self._seen:
            self._seen = seen
            self._lags.saw(seen.at, seen.positions, seen.ends)
            decided, ends = ({at: one[which] for at, one in seen.commands.items()} for which in (0, 1))
            self._undecided.saw(seen.at, {"handlers": decided}, ends)
            if (news := (self.lags, seen.views)) != self._told:
                self._told = news
                tell_lags(*news)  # takes longer than all the rest of a check
            if (still := self._standing_still()) and seen.at >= self._log_at:
                self._log_at = seen.at + LOG_S
                log.warning("standing still: %s", "; ".join(f"{who}: {what}" for who, what in still.items()))
        for name, error in self.checks().items():
            metrics.READY.labels(name).set(error is None)

    @property
    def lags(self) -> Mapping[tuple[str, int], PartitionLag]:
        """Of each (agent, partition), and of `handlers`, at the last check."""
        return self._lags.now | self._undecided.now

    def ready(self) -> Ready:
        """The answer of `/health/ready`. Raises Problem 503 where a check fails."""
        found = self.checks()
        checks = {name: _checked(error) for name, error in found.items()}
        if wrong := [name for name, error in found.items() if error is not None]:
            raise NOT_READY(f"Failing: {', '.join(wrong)}.", checks=checks)
        ready = Ready(status="ready", checks=checks)
        views = self._seen.views if self._seen else ()
        if stopped := {view: code for view, _, code in views if code}:
            ready["stopped_views"] = stopped
        if unfit := [name for one in self._stores.watches for name in one.unfit]:
            ready["unfit_topics"] = sorted(unfit)
        if still := self._standing_still():
            ready["standing_still"] = still
        return ready

    def _standing_still(self) -> dict[str, str]:
        return standing_still(self.lags, STALL_S)

    def _blind(self) -> SamefoldError | None:
        age = time.monotonic() - self._seen.at if self._seen else None
        if age is not None and age <= BLIND_S:
            return None
        return Blind(
            f"The last complete check of both stores is {'missing' if age is None else f'{age:.0f} s old'}.",
            "If this goes on, restart this process, and report what its log says as a defect.",
        )

    def _core_stands_still(self) -> SamefoldError | None:
        longest = STALL_S
        still = {who: lag for who, lag in self._lags.now.items() if who[0] == CORE and lag.still > longest}
        if not still:
            return None
        (agent, partition), lag = max(still.items(), key=lambda item: item[1].still)
        return ReadModelStandsStill(
            f"Agent '{agent}' has not moved in partition {partition} for {lag.still:.0f} s, {lag.records} records behind the log"
            + (f", and in {len(still) - 1} others." if len(still) > 1 else "."),
            "Is an agent running (`samefold run agent`), with the live views (`samefold doctor`)? Its log says why it waits.",
        )


def router() -> APIRouter:
    routes = APIRouter()
    routes.add_api_route("/health/live", _live, tags=["health"], response_model=dict[str, str])
    routes.add_api_route(
        "/health/ready",
        _ready,
        tags=["health"],
        response_model=Ready,
        response_description="Every check holds.",
        responses=responses({}, NOT_READY),
    )
    routes.add_api_route("/metrics", _metrics, include_in_schema=False)
    return routes


async def _live(_request: Request) -> Response:
    """Whether the process answers at all. Nothing else counts: a restart does not bring back a store that is unavailable."""
    return Response(b'{"status":"live"}', media_type=JSON)


async def _ready(request: Request) -> Response:
    """Whether requests should be sent here, with the reason of each check that fails."""
    readiness: Readiness = request.app.state.readiness
    return Response(msgspec.json.encode(readiness.ready()), media_type=JSON)


def _checked(error: SamefoldError | None) -> Checked:
    if error is None:
        return {"ok": True}
    what, hint = kind_of(type(error)).title, "See the log of this process."
    if error.is_public:
        what, hint = error.message, error.hint
    return {"ok": False, "code": error.code, "why": what, "hint": hint}


async def _metrics(request: Request) -> Response:
    """In Prometheus' text format, or in OpenMetrics where `Accept` asks for that."""
    body, media_type = await asyncio.to_thread(metrics.exposition, request.headers.get("Accept", ""))
    return Response(body, headers={"Content-Type": media_type})
