"""Processes killed or frozen exactly at a point of their way.

Each fault returns whether it took effect: the process itself said that it was at the point, and then the kernel showed it dead by
SIGKILL, or stopped. It is frozen past all timeouts, its locks' and its group's, and until others have done its work; then it goes
on as if nothing had happened.
"""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Sequence

from infra.processes.faultpoints import AgentPoint, BuilderPoint, HandlerPoint
from infra.processes.supervisor import Child
from projections.engine.views.core_views import all_views
from proofs.chaos.control import Action, Strike
from proofs.chaos.crew import is_stopped, name_of, was_killed
from proofs.chaos.effects import Role
from proofs.chaos.field import Field, NotReached
from proofs.chaos.rebuilding import NAMED_ERROR

AT_START = {
    *("position loaded", "opening sent", "opening acknowledged", "opening read"),
    *("positions read", "seek done"),
}
"""Points that a process passes when it gets partitions, so soon after its start."""
MANY = {"commit sent": 120, "commit acknowledged": 120, "states loaded": 5, "command read": 5, "batch read": 5}
"""Of points that are passed often, up to which passing may be chosen; of the others it is the first."""
PAST_ALL_S = 4.5
"""Longer than session, statement and idle timeouts and what may be a transaction's longest."""


def kill_at(field: Field, child: Child, point: HandlerPoint | AgentPoint) -> bool:
    """Dead at the point; its successor, or another process, does its work."""
    process = _struck(field, child, point, "kill")
    if process is None:
        return False
    mark = field.tail.mark()
    field.until(lambda: was_killed(process), f"{child.name} dies at '{point}'")
    field.effects.took_effect(f"killed: {point}")
    field.recovered(_role(field, child), mark, name_of(child))
    field.works_again(child)
    return True


def freeze_at(field: Field, child: Child, point: HandlerPoint | AgentPoint) -> bool:
    """Stopped at the point, and awake again when others have done its work."""
    process = _struck(field, child, point, "freeze")
    if process is None:
        return False
    began, mark = time.monotonic(), field.tail.mark()
    try:
        field.until(lambda: is_stopped(process), f"{child.name} stops at '{point}'")
        field.effects.took_effect(f"frozen: {point}")
        field.recovered(_role(field, child), mark, name_of(child))
        field.until(lambda: time.monotonic() > began + PAST_ALL_S, "all timeouts are over")
    finally:
        process.send_signal(signal.SIGCONT)
    field.works_again(child)
    return True


def _struck(
    field: Field, child: Child, point: HandlerPoint | AgentPoint, action: Action
) -> subprocess.Popen[bytes] | None:
    """The process that has come to the point, if it did."""
    name = name_of(child)
    process = field.crew.process(child)
    nth = field.random.randint(1, MANY.get(point, 1))
    if point in AT_START:
        strike = field.control.arm(name, point, nth, action, at_start=True)
        process.kill()
        process.wait(10)
        field.effects.took_effect(f"killed: {_role(field, child)}")
        process = field.crew.process(child)
    else:
        field.until(lambda: field.control.pid(name) == process.pid, f"{name} is there")
        strike = field.control.arm(name, point, nth, action)
    return process if field.until_struck(strike) and strike.pid == process.pid else None


def _role(field: Field, child: Child) -> Role:
    return "handler" if child in field.crew.handlers else "agent"


# ── builders ──


def kill_builder_at(field: Field, point: BuilderPoint) -> bool:
    """Dead at the point: agents go on."""
    views = some_views(field)
    strike, process = _builder(field, views, point, "kill")
    if not field.until_struck(strike, 30):
        return False
    mark = field.tail.mark()
    field.until(lambda: was_killed(process), f"the builder dies at '{point}'")
    field.effects.took_effect(f"killed: {point}")
    field.recovered("builder", mark)
    return True


def freeze_builder_at(field: Field, point: BuilderPoint) -> bool:
    """Stopped at the point, and awake again after all timeouts: it ends, with success or a named error."""
    views = some_views(field)
    strike, process = _builder(field, views, point, "freeze")
    if not field.until_struck(strike, 30):
        return False
    began, mark = time.monotonic(), field.tail.mark()
    try:
        field.until(lambda: is_stopped(process), f"the builder stops at '{point}'")
        field.effects.took_effect(f"frozen: {point}")
        field.recovered("builder", mark)
        field.until(lambda: time.monotonic() > began + PAST_ALL_S, "all timeouts are over")
    finally:
        process.send_signal(signal.SIGCONT)
    ended(field, process)
    return True


def _builder(
    field: Field, views: Sequence[str], point: BuilderPoint, action: Action
) -> tuple[Strike, subprocess.Popen[bytes]]:
    name = f"builder-{field.number()}"
    nth = field.random.randint(1, 4) if point in ("build part written", "build part committed") else 1
    strike = field.control.arm(field.crew.named(name), point, nth, action, at_start=True)
    return strike, field.crew.beside("proofs.chaos.rebuilding", name, *views)


def some_views(field: Field) -> list[str]:
    """One or two of them."""
    return sorted(field.random.sample(sorted(all_views()), field.random.randint(1, 2)))


def rebuilt(field: Field, views: Sequence[str]) -> None:
    """A rebuild without a fault of its own succeeds; those of others may make it begin again."""
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        process = field.crew.beside("proofs.chaos.rebuilding", f"builder-{field.number()}", *views)
        if ended(field, process) == 0:
            return
    field.violations.append(f"F: {views} can't be rebuilt")
    raise NotReached(f"{views} rebuilt")


def ended(field: Field, process: subprocess.Popen[bytes]) -> int:
    """The exit code of a builder that nobody kills."""
    field.goes_on(lambda: process.poll() is not None, "a builder comes to its end")
    if process.returncode not in (0, NAMED_ERROR):
        field.violations.append(f"a builder ended with exit code {process.returncode}")
    return process.returncode
