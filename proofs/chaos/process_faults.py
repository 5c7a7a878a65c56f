"""Processes killed and frozen at any moment, and agents that come and go. Each returns whether it took effect."""

from __future__ import annotations

import signal
import time

from infra.processes.supervisor import Child
from proofs.chaos.crew import end_of, is_stopped, name_of, was_killed
from proofs.chaos.field import Field, NotReached
from proofs.chaos.point_faults import PAST_ALL_S


def kill(field: Field, child: Child) -> bool:
    """SIGKILL from outside."""
    role = "handler" if child in field.crew.handlers else "agent"
    process = field.crew.process(child)
    mark = field.tail.mark()
    process.kill()
    field.until(lambda: was_killed(process), f"{child.name} dies")
    field.effects.took_effect(f"killed: {role}")
    field.recovered("handler" if role == "handler" else "agent", mark, name_of(child))
    field.works_again(child)
    return True


def freeze(field: Field, child: Child) -> bool:
    """SIGSTOP from outside, past all timeouts and until others have done its work; then SIGCONT."""
    is_handler = child in field.crew.handlers
    process = field.crew.process(child)
    began, mark = time.monotonic(), field.tail.mark()
    process.send_signal(signal.SIGSTOP)
    try:
        field.until(lambda: is_stopped(process), f"{child.name} stops")
        field.effects.took_effect(f"frozen: {'handler' if is_handler else 'agent'}")
        field.recovered("handler" if is_handler else "agent", mark, name_of(child))
        field.until(lambda: time.monotonic() > began + PAST_ALL_S, "all timeouts are over")
    finally:
        process.send_signal(signal.SIGCONT)
    field.works_again(child)
    return True


def rebalance(field: Field, times: int = 1) -> bool:
    """Another agent joins, is given partitions and commits a batch, and leaves: the group divides them anew, each time twice."""
    for _ in range(times):
        name = f"agent-passing-{field.number()}"
        working = field.control.arm(field.crew.named(name), "COMMIT acknowledged", 1, "tell", at_start=True)
        process = field.crew.beside("projections.engine.live.agent", name)
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
