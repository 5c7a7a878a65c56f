"""Whether this process can do its work, check by check, from the looks at the world that are taken anyway: a probe asks nobody."""

from __future__ import annotations

import time
from typing import NamedTuple

from api.look import Look, Seen
from api.problems import why
from infra.errors import SamefoldError
from infra.observability import metrics
from infra.settings import Settings
from projections.engine.live.lag import Lags
from projections.engine.live.measures import tell_lags
from projections.engine.views.view import CORE

BLIND_S = 10.0
"""After so long without a complete look, and without a reason, something is wrong with the looking."""
SUBJECTS = ("kafka", "database", "topics", "contract", "views")


class ReadModelStandsStill(SamefoldError):
    """The log goes on, and the read model that commands are answered from does not."""

    is_public = True


class Blind(SamefoldError):
    """This process has not seen for a while how the world is."""

    is_public = True


class Check(NamedTuple):
    """One condition of being ready, and the named error where it does not hold."""

    name: str
    error: SamefoldError | None

    def as_dict(self) -> dict[str, object]:
        if self.error is None:
            return {"ok": True}
        what, cure = why(self.error)
        return {"ok": False, "code": self.error.code, "why": what, "cure": cure}


class Readiness:
    """Listens to the looks of one process, and keeps its gauges."""

    def __init__(self, settings: Settings, look: Look) -> None:
        self._settings = settings
        self._look = look
        self._lags = Lags()
        self._seen: Seen | None = None
        look.tell(self.looked)

    def looked(self) -> None:
        """After each look."""
        seen = self._look.seen
        if seen is not None and seen is not self._seen:
            self._seen = seen
            self._lags.saw(seen.at, seen.positions, seen.ends)
            tell_lags(self._lags.now, {view: seen.parked.get(view, 0) for view in seen.live})
        for check in self.checks():
            metrics.READY.labels(check.name).set(check.error is None)

    def checks(self) -> list[Check]:
        wrong = self._look.wrong
        found = [Check(subject, wrong.get(subject) or wrong.get("start")) for subject in SUBJECTS]
        blind = None if any(check.error for check in found) else self._blind()
        return [*found, Check("looks", blind), Check("positions", self._still())]

    def _blind(self) -> SamefoldError | None:
        age = time.monotonic() - self._seen.at if self._seen else None
        if age is not None and age <= BLIND_S:
            return None
        return Blind(
            f"The last complete look at both stores is {'not there' if age is None else f'{age:.0f} s old'}.",
            "If it stays so, start this process again, and tell its authors what its log says.",
        )

    def _still(self) -> SamefoldError | None:
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
