"""Topics and a database under load with their processes and judge, and what faults need: to see that they took effect, and that the
work goes on."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Self

import psycopg

from infra.database.connect import DatabaseUnavailable, connect
from infra.log import topics
from infra.processes.engines import Local
from infra.processes.faultpoints import Point
from infra.processes.supervisor import Child
from projections.engine.operate.verify import verify
from projections.engine.rebuild.rebuild import resume
from projections.engine.store.positions import stopped_views
from projections.engine.views.core_views import all_views
from proofs.bank_oracle import places_in
from proofs.chaos.armed import Control, Strike
from proofs.chaos.crew import Crew
from proofs.chaos.front import Front
from proofs.chaos.ground import Ground
from proofs.chaos.judge import Judge
from proofs.chaos.load import Load
from proofs.chaos.policy_judge import is_at_rest
from proofs.chaos.report import COMMANDS, SNAPSHOTS, Effects
from proofs.chaos.tail import Mark, Progress, Tail
from proofs.kit import name_of
from tools.migrations.migrate import upgrade

PATIENCE_S = 60.0
"""To recover from anything; longer is a violation (F)."""


class NotReached(Exception):
    """What was waited for did not come about."""


class Field:
    """`with Field(ground, folder, seed) as field:` runs the load; `finish` ends it and judges the whole."""

    def __init__(
        self,
        ground: Ground,
        folder: Path,
        seed: int,
        *,
        rate: int = 300,
        lacking: Mapping[str, str] | None = None,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self.ground = ground
        self.patience_s = patience_s
        self.folder = folder
        self.world = ground.world()
        self.fronted = ground.fronted(self.world)
        self.effects = Effects()
        self.random = random.Random(seed)
        self.violations: list[str] = []
        self.tail = Tail(self.world)
        self.progress = Progress(self.world)
        self.load = Load(self.world, self.progress, seed, rate)
        self.judge = Judge(self.world, self.tail, self.load.sent)
        self.crew = Crew(self.fronted, ground.control, folder, lacking)
        self.front = Front(self.crew.api_port, self.load.sent, self.load.acknowledged)
        self._abandoned = False
        self._open = ExitStack()
        self._numbers = count(1)

    def __enter__(self) -> Self:
        upgrade(self.world)
        topics.ensure(self.world)
        try:
            for part in (self.tail, self.progress, self.judge, self.crew):
                self._open.enter_context(part)
            # a policy of a service that was asked something already would not go live by itself
            self.until(self._policies_are_live, "policies are live")
            self._open.enter_context(self.load)
            self._open.enter_context(self.front)
            self.until(lambda: all(epoch >= 0 for epoch, _ in self.tail.counted), "every partition is written")
            self.until_agents_pass(self.tail.mark())
        except BaseException:
            self._open.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is not None:
            self.abandon()
        self._open.close()

    @property
    def control(self) -> Control:
        return self.ground.control

    def all_violations(self) -> list[str]:
        ends = [f"a process ended: {end}" for end in self.crew.ends()]
        return [*self.violations, *self.judge.violations, *self.progress.violations, *self.front.violations, *ends]

    def counts(self) -> Counter[str]:
        """What the report says was checked."""
        seen, policies = self.judge.seen, self.judge.policies
        return Counter(
            {
                COMMANDS: len(self.load.acknowledged),
                "commits that count": self.judge.ledger.commits,
                "records of the log that were void": self.tail.void(),
                "transfers that ended": len(self.judge.ledger.ends),
                SNAPSHOTS: seen.snapshots,
                "rows in them": seen.rows,
                "rows of the outbox in them": policies.rows,
                "looks that found no database": seen.missed,
                "reads of positions": self.progress.looks,
            }
        )

    def number(self) -> int:
        """One that was not given before, for names."""
        return next(self._numbers)

    # ── waiting ──

    def until(self, holds: Callable[[], bool], what: str, seconds: float | None = None) -> None:
        """Raises NotReached when it does not come about in time, or can't."""
        seconds = self.patience_s if seconds is None else seconds
        deadline = time.monotonic() + seconds
        while not holds():
            for error in (self.tail.error, self.load.error, self.front.error):
                if error is not None:
                    raise NotReached(f"{what}: {error!r}") from error
            if self._abandoned or not self.crew.is_watched or time.monotonic() > deadline:
                raise NotReached(f"in {seconds:.0f} s: {what}")
            time.sleep(0.01)  # between two polls

    def goes_on(self, holds: Callable[[], bool], what: str) -> None:
        """What must come about after a fault, whatever it was."""
        try:
            self.until(holds, what)
        except NotReached as error:
            if not self._abandoned:
                self.violations.append(f"F: {error}")
            raise

    def abandon(self) -> None:
        """Give up: every wait ends with NotReached at once, and no command is waited for."""
        self._abandoned = True
        self.load.abandon()

    def until_struck(self, strike: Strike, seconds: float = 20) -> bool:
        """Whether the point was reached in time; where not, it is disarmed."""
        if strike.struck.wait(seconds):
            return True
        self.control.disarm(strike)
        return strike.struck.wait(0.2)

    def pause(self, seconds: float) -> None:
        """Let that much time pass: how long a fault lasts, not how long something takes. Ends early when all is abandoned."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self._abandoned:
            time.sleep(0.01)

    # ── how each role is seen to go on ──

    def recovered(self, role: str, mark: Mark, fenced: str = "", *, began: float | None = None) -> None:
        """Wait until the work that a fault at `mark` stopped goes on, and keep how long that took, from `began` or from now.

        A handler's: in each partition that the fenced handler wrote, a commit counts in a new epoch; without any,
        a commit counts in each. An agent's: every position lies beyond the log's end of then. Policies': the same, and then a
        command of theirs counts. The broker's and the database's: commands that were acknowledged since have their outcomes.
        """
        with self.effects.recovery(role, began):
            match role:
                case "handler":
                    self.until_decided(mark, fenced)
                case "agent" | "builder":
                    self.until_agents_pass(mark)
                case "policies":
                    self.until_policies_pass(mark)
                case _:
                    self.until_visible()

    def until_decided(self, mark: Mark, fenced: str = "") -> None:
        own = [partition for partition, writer in enumerate(self._writers(mark)) if fenced and writer == fenced]
        counted = self.tail.counted
        if own:
            self.goes_on(
                lambda: all(counted[p][0] > mark.epochs[p] for p in own),
                f"commits count in new epochs of partitions {own}, which {fenced} wrote",
            )
        else:
            self.goes_on(
                lambda: all(offset >= end for (_, offset), end in zip(counted, mark.ends, strict=True)),
                f"commits count beyond {mark.ends}",
            )

    def until_agents_pass(self, mark: Mark) -> None:
        self.goes_on(
            lambda: all(place.next_offset > end for place, end in zip(self.progress.places, mark.ends, strict=True)),
            f"positions move beyond {mark.ends}",
        )

    def until_policies_pass(self, mark: Mark) -> None:
        self.goes_on(
            lambda: all(
                place.next_offset > end
                for places in self.progress.policies.values()
                for place, end in zip(places, mark.ends, strict=True)
            ),
            f"policies move beyond {mark.ends}",
        )
        wished = self.tail.wished
        self.goes_on(lambda: self.tail.wished > wished, "a policy's command counts")

    def _policies_are_live(self) -> bool:
        with connect(self.world, "chaos") as connection:
            return all(places_in(connection, agent) for agent in self.progress.policies)

    def _is_at_rest(self) -> bool:
        with connect(self.world, "chaos") as connection:
            return is_at_rest(connection)

    def stopped(self) -> list[str]:
        """The views that are stopped now."""
        try:
            with connect(self.world, "chaos") as connection:
                return [one.view for one in stopped_views(connection)]
        except (psycopg.Error, DatabaseUnavailable):
            return []

    def until_visible(self) -> None:
        """A command that is acknowledged from now on has its outcome, in every partition."""
        ends = list(self.load.ends)
        self.goes_on(
            lambda: all(p.command_offset > end for p, end in zip(self.progress.places, ends, strict=True)),
            f"commands beyond {ends} have their outcomes",
        )

    def until_answered(self) -> None:
        """A command that a client begins from now on has its answer over HTTP."""
        now = time.monotonic()
        self.goes_on(lambda: self.front.newest > now, "a command over HTTP is answered")

    def _writers(self, mark: Mark) -> list[str]:
        return [reader.writers.get(epoch, "") for reader, epoch in zip(self.tail.readers, mark.epochs, strict=True)]

    def works_again(self, child: Child) -> None:
        """Wait until this very process, or its successor, does what it is for."""
        point: Point = "commit acknowledged" if child in self.crew.handlers else "COMMIT acknowledged"
        deadline = time.monotonic() + self.patience_s
        while time.monotonic() < deadline and not self._abandoned:
            pid = self.crew.process(child).pid
            if self.control.pid(name_of(child)) == pid:
                strike = self.control.arm(name_of(child), point, 1, "tell")
                if self.until_struck(strike, 5):
                    return
            time.sleep(0.02)  # between two polls
        if not self._abandoned:
            self.violations.append(f"F: {child.name} does not come back to its work")
        raise NotReached(f"{child.name} does not come back to its work")

    # ── judging ──

    def sound(self) -> None:
        """What goes in now comes out, and one more snapshot is compared; then the violations are of all that was."""
        self.until_visible()
        self.judge.look()

    def logs(self) -> str:
        """The ends of the processes' logs."""
        return "\n".join(f"--- {file.name}\n{file.read_text()[-2_000:]}" for file in sorted(self.folder.iterdir()))

    def finish(self) -> None:
        """End the load, wait for the last outcome, and judge the whole: the violations are all there then."""
        self.front.stop()
        self.load.stop()
        ends = list(self.load.ends)
        self.goes_on(
            lambda: all(p.command_offset >= end for p, end in zip(self.progress.places, ends, strict=True)),
            "every command has its outcome",
        )
        self.goes_on(self._is_at_rest, "every transfer has ended")
        resume(self.world, [], all_views())
        self.judge.look(at_rest=True)
        answers = self.judge.ledger.answers
        unanswered = self.load.acknowledged - answers.keys()
        wished = self.judge.policies.made
        unsent = {key for key in answers if key not in self.load.sent and key[1] not in wished}
        if unanswered or unsent:
            self.violations.append(
                f"F: acknowledged, without an outcome: {sorted(unanswered)[:5]}; never sent: {unsent}"
            )
        self.violations += self.front.judge(answers)
        found = verify(self.world, all_views(), engine_for=lambda _: Local(1))
        if found.differences:
            self.violations.append(f"C: samefold verify finds {found.differences} differences")
