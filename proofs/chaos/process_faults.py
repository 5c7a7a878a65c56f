"""Processes killed or frozen, at any moment or exactly at a point of their way, and agents that come and go.

Each fault returns whether it took effect: at a point, the process itself reported that it was there; then the kernel showed it
dead by SIGKILL, or stopped. It is frozen past all timeouts, its locks' and its group's, and until others have done its work; then
it goes on as if nothing had happened.
"""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Sequence

from infra.processes.faultpoints import AGENT, Point
from infra.processes.supervisor import Child
from projections.engine.views.core_views import all_views
from proofs.chaos.armed import Action
from proofs.chaos.crew import end_of, is_stopped, was_killed
from proofs.chaos.field import Field, NotReached
from proofs.chaos.tail import Mark
from proofs.kit import name_of

AT_START = {
    *("position loaded", "opening sent", "opening acknowledged", "opening read"),
    *("positions read", "seek done"),
}
"""Points that a process passes when it gets partitions, so soon after its start."""
MANY = {
    **dict.fromkeys(("commit sent", "commit acknowledged"), 120),
    **dict.fromkeys(("states loaded", "command read", "batch read"), 5),
    **dict.fromkeys(("wish sent", "wish acknowledged"), 20),
    **dict.fromkeys(("build part written", "build part committed"), 4),
}
"""Of points that are passed often, up to which passing may be chosen; of the others it is the first."""
PAST_ALL_S = 4.5
"""Longer than session, statement and idle timeouts and what may be a transaction's longest."""
BUILDER_S = 300.0
"""In which a builder that nobody disturbs has come to any point, or to its end: a rebuild takes as long as the machine lets it."""

Process = subprocess.Popen[bytes]


def kind_of(role: str, point: Point | None) -> str:
    """What a fault at this point is counted as."""
    return f"{role}, {point}" if role == "policies" and point in AGENT else point or role


def kill(field: Field, child: Child | None, point: Point | None = None) -> bool:
    """Dead; its successor, or another process, does its work. Without a child it is a builder that is struck."""
    found = _hit(field, child, point, "kill")
    if found is None:
        return False
    process, mark = found
    role, name = field.crew.role(child), name_of(child) if child else ""
    field.until(lambda: was_killed(process), f"{name or role} dies at '{point}'")
    field.effects.took_effect(f"killed: {kind_of(role, point)}")
    field.recovered(role, mark, name)
    if child:
        field.works_again(child)
    return True


def freeze(field: Field, child: Child | None, point: Point | None = None) -> bool:
    """Stopped, and awake again after all timeouts, when others have done its work. A builder must come to an end then."""
    found = _hit(field, child, point, "freeze")
    if found is None:
        return False
    process, mark = found
    role, name = field.crew.role(child), name_of(child) if child else ""
    began = time.monotonic()
    try:
        field.until(lambda: is_stopped(process), f"{name or role} stops at '{point}'")
        field.effects.took_effect(f"frozen: {kind_of(role, point)}")
        field.recovered(role, mark, name)
        field.until(lambda: time.monotonic() > began + PAST_ALL_S, "all timeouts are over")
    finally:
        process.send_signal(signal.SIGCONT)
    if child:
        field.works_again(child)
    else:
        ended(field, process)
    return True


def _hit(field: Field, child: Child | None, point: Point | None, action: Action) -> tuple[Process, Mark] | None:
    """The process that was struck, and the log of that moment; None where it did not come to the point."""
    nth = field.random.randint(1, MANY.get(point or "", 1))
    if child is None:
        assert point
        name = f"builder-{field.number()}"
        strike = field.control.arm(field.crew.named(name), point, nth, action, at_start=True)
        process = building(field, some_views(field), name)
        field.until(lambda: strike.struck.is_set() or process.poll() is not None, f"{name} is at '{point}'", BUILDER_S)
        return (process, field.tail.mark()) if field.until_struck(strike, 0.2) else None
    process, name = field.crew.process(child), name_of(child)
    if point is None:
        mark = field.tail.mark()
        process.send_signal(signal.SIGKILL if action == "kill" else signal.SIGSTOP)
        return process, mark
    if point in AT_START:
        strike = field.control.arm(name, point, nth, action, at_start=True)
        process.kill()
        process.wait(10)
        field.effects.took_effect(f"killed: {field.crew.role(child)}")
        process = field.crew.process(child)
    else:
        field.until(lambda: field.control.pid(name) == process.pid, f"{name} is there")
        strike = field.control.arm(name, point, nth, action)
    return (process, field.tail.mark()) if field.until_struck(strike) and strike.pid == process.pid else None


def rebalance(field: Field) -> bool:
    """Another agent joins, is given partitions and commits a batch, and leaves: the group divides them again, each time twice."""
    name = f"agent-passing-{field.number()}"
    working = field.control.arm(field.crew.named(name), "COMMIT acknowledged", 1, "tell", at_start=True)
    process = field.crew.start("projections.engine.live.agent", name)
    try:
        if not field.until_struck(working, 30):
            raise NotReached(f"{name} gets partitions")
        field.effects.took_effect("rebalance: an agent joined")
    finally:
        mark = field.tail.mark()
        process.terminate()
        process.wait(30)
        end_of(process)
    field.effects.took_effect("rebalance: an agent left")
    field.recovered("agent", mark)
    return True


# ── builders ──


def some_views(field: Field) -> list[str]:
    """One or two of them."""
    return sorted(field.random.sample(sorted(all_views()), field.random.randint(1, 2)))


def building(field: Field, views: Sequence[str], name: str = "") -> Process:
    """A builder that rebuilds these views and switches to them."""
    return field.crew.start("proofs.chaos.rebuilding", name or f"builder-{field.number()}", *views)


def rebuilt(field: Field, views: Sequence[str]) -> bool:
    """A rebuild without a fault of its own succeeds; those of others may make it begin again."""
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        if ended(field, building(field, views)) == 0:
            return True
    field.violations.append(f"F: {views} can't be rebuilt")
    raise NotReached(f"{views} rebuilt")


def resumed(field: Field) -> bool:
    """A view has stopped, and is resumed with code that takes the event; the agents' own does not take the next such."""
    try:
        field.until(lambda: bool(field.stopped()), "a view stops", 20)
    except NotReached:
        return False
    with field.effects.recovery("a stopped view"):
        again = field.crew.samefold(field.folder / f"resume-{field.number()}.out", "views", "resume")
        field.goes_on(lambda: again.poll() is not None, "`samefold views resume` comes to its end")
        if again.returncode not in (0, 1, 2):  # done; a named error under fire; resumed or rebuilt by another meanwhile
            field.violations.append(f"`samefold views resume` ended with exit code {again.returncode}")
    if again.returncode == 0:
        field.effects.took_effect("view stopped and resumed")
    return again.returncode == 0


def ended(field: Field, process: Process) -> int:
    """The exit code of a builder that is not killed."""
    field.goes_on(lambda: process.poll() is not None, "a builder comes to its end")
    if process.returncode not in (0, 1):  # done, or a named error
        field.violations.append(f"a builder ended with exit code {process.returncode}")
    return process.returncode
