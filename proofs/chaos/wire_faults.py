"""One chosen request or answer on the wire, held or cut. Each returns whether it took effect.

A frame is chosen on a connection of a handler (`produce`) or of policies (`wish`), of an agent (`COMMIT`), or of a builder that
moves the pointers (`switch COMMIT`). The proxy says when it has it.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Literal, get_args

import psutil

from infra.processes.supervisor import Child
from proofs.chaos.armed import ACK_TIMEOUT_S
from proofs.chaos.crew import is_stopped
from proofs.chaos.field import Field
from proofs.chaos.process_faults import PAST_ALL_S, building, ended, some_views
from proofs.chaos.proxy import Action, Connection, Rule
from proofs.chaos.wires import PostgresWire
from proofs.kit import name_of

Whose = Literal["produce", "wish", "COMMIT", "switch COMMIT"]
Half = Literal["request", "answer"]
HALVES: tuple[Half, ...] = get_args(Half)
WHOSE: dict[Whose, str] = {"produce": "handler", "wish": "policies", "COMMIT": "agent", "switch COMMIT": "builder"}
"""With the role of the processes on whose connections a frame is chosen."""
REACHED_S = 20
LATER = 10
"""Up to which frame of its kind may be chosen."""


def cut(field: Field, whose: Whose, half: Half) -> bool:
    """The connection breaks before the server has the request, or when it has carried it out and who sent it does not know."""
    rule = _rule(field, whose, half, "cut")
    builder = building(field, some_views(field)) if whose == "switch COMMIT" else None
    if builder:
        field.until(lambda: rule.struck.is_set() or builder.poll() is not None, "a builder switches", 90)
    if not rule.struck.wait(0 if builder else REACHED_S):
        rule.release()
        return False
    mark = field.tail.mark()
    field.effects.took_effect(f"{whose}: {half} cut off")
    field.recovered(WHOSE[whose], mark)
    if builder:
        ended(field, builder)
    return True


def produce_answer_held(field: Field) -> bool:
    """The broker has the commit; its acknowledgement comes after the time-out, when the handler has opened its partitions again."""
    rule = _rule(field, "produce", "answer", "hold")
    try:
        if not rule.struck.wait(REACHED_S):
            return False
        mark, began = field.tail.mark(), time.monotonic()
        fenced = _writer(field, rule)
        if fenced is None:
            return False
        late = began + 1.3 * ACK_TIMEOUT_S
        field.until(lambda: time.monotonic() > late, "the acknowledgement is too late")
        field.effects.took_effect("produce: answer held past the time-out")
    finally:
        rule.release()
    field.recovered("handler", mark, name_of(fenced), began=began)
    return True


def produce_request_held(field: Field) -> bool:
    """A zombie's append: held while its frozen writer is fenced, then let go. It must be in the log, and void."""
    rule = _rule(field, "produce", "request", "hold")
    frozen = None
    try:
        if not rule.struck.wait(REACHED_S):
            return False
        zombie = _writer(field, rule)
        if zombie is None:
            return False
        process = frozen = field.crew.process(zombie)
        mark = field.tail.mark()
        frozen.send_signal(signal.SIGSTOP)
        field.until(lambda: is_stopped(process), f"{zombie.name} stops")
        field.recovered("handler", mark, name_of(zombie))
        void = field.tail.void()
        rule.release()
        field.goes_on(lambda: field.tail.void() > void, "the zombie's append is in the log, and void")
        field.effects.took_effect("produce: request held over a takeover, then appended")
    finally:
        rule.release()
        if frozen is not None:
            frozen.send_signal(signal.SIGCONT)
    field.works_again(zombie)
    return True


def commit_held(field: Field) -> bool:
    """Held until the server has ended the transaction; then let go, with no client left."""
    rule = _rule(field, "COMMIT", "request", "hold")
    try:
        if not rule.struck.wait(REACHED_S):
            return False
        mark, began = field.tail.mark(), time.monotonic()
        field.recovered("agent", mark)
        field.until(lambda: time.monotonic() > began + PAST_ALL_S, "all timeouts are over")
        field.effects.took_effect("COMMIT: request held past the time-outs")
    finally:
        rule.release()
    return True


def _rule(field: Field, whose: Whose, half: Half, action: Action) -> Rule:
    is_kafka = whose in ("produce", "wish")
    kind = ("produce" if is_kafka else "COMMIT") + (" answer" if half == "answer" else "")
    if whose == "switch COMMIT":
        return field.ground.postgres.rule(kind, action, lambda connection: _session(connection).moves_pointers)
    children, nth = field.crew.members[WHOSE[whose]], field.random.randint(1, LATER)
    if is_kafka:
        return field.ground.kafka.rule(kind, action, _from(children), nth)
    names = {f"samefold {name_of(child)}"[:63] for child in children}
    return field.ground.postgres.rule(kind, action, lambda connection: _session(connection).name in names, nth)


def _session(connection: Connection) -> PostgresWire:
    assert isinstance(connection.wire, PostgresWire)
    return connection.wire


def _from(children: Sequence[Child]) -> Callable[[Connection], bool]:
    """Whether a connection is one of these processes'."""
    known: dict[int, bool] = {}

    def is_theirs(connection: Connection) -> bool:
        if connection.port not in known:
            known[connection.port] = any(connection.port in _ports(child) for child in children)
        return known[connection.port]

    return is_theirs


def _ports(child: Child) -> set[int]:
    with suppress(psutil.Error):
        return {one.laddr.port for one in psutil.Process(child.pid or 0).net_connections("tcp4")}
    return set()


def _writer(field: Field, rule: Rule) -> Child | None:
    """The handler on whose connection the rule acted."""
    assert rule.where is not None
    port = rule.where.port
    return next((child for child in field.crew.handlers if port in _ports(child)), None)
