"""One chosen request or answer on the wire, held or cut. Each returns whether it took effect.

A frame is chosen on a connection of a handler or of policies (produce), or of an agent (COMMIT). The proxy says when it has it.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from typing import Literal

import psutil

from infra.processes.supervisor import Child
from proofs.chaos.crew import is_stopped
from proofs.chaos.field import Field
from proofs.chaos.postgres_wire import PostgresWire
from proofs.chaos.process_faults import PAST_ALL_S, ended, some_views
from proofs.chaos.proxy import Connection, Rule
from proofs.kit import name_of

REACHED_S = 20
LATER = 10
"""Up to which frame of its kind may be chosen."""


# ── produce ──


def produce_answer_held(field: Field) -> bool:
    """The broker has the commit; its acknowledgement comes after the time-out, when the handler has opened its partitions again."""
    rule = _produce(field, "produce answer", "hold")
    try:
        if not rule.struck.wait(REACHED_S):
            return False
        mark, began = field.tail.mark(), time.monotonic()
        fenced = _writer(field, rule)
        if fenced is None:
            return False
        field.until(
            lambda: time.monotonic() > began + 1.3 * field.world.ack_timeout_s, "the acknowledgement is too late"
        )
        field.effects.took_effect("produce: answer held past the time-out")
    finally:
        field.ground.kafka.release(rule)
    field.recovered("handler", mark, name_of(fenced), began=began)
    return True


def produce_request_held(field: Field) -> bool:
    """A zombie's append: held while its frozen writer is fenced, then let go. It must be in the log, and void."""
    rule = _produce(field, "produce", "hold")
    frozen = None
    try:
        if not rule.struck.wait(REACHED_S):
            return False
        zombie = _writer(field, rule)
        if zombie is None:
            return False
        frozen = field.crew.process(zombie)
        mark = field.tail.mark()
        frozen.send_signal(signal.SIGSTOP)
        process = frozen
        field.until(lambda: is_stopped(process), f"{zombie.name} stops")
        field.recovered("handler", mark, name_of(zombie))
        void = field.tail.void()
        field.ground.kafka.release(rule)
        field.goes_on(lambda: field.tail.void() > void, "the zombie's append is in the log, and void")
        field.effects.took_effect("produce: request held over a takeover, then appended")
    finally:
        field.ground.kafka.release(rule)
        if frozen is not None:
            frozen.send_signal(signal.SIGCONT)
    field.works_again(zombie)
    return True


def produce_cut(field: Field, what: Literal["produce", "produce answer"]) -> bool:
    """The connection breaks before the broker has the request, or before the handler has its answer."""
    rule = _produce(field, what, "cut")
    if not _struck(field, rule):
        return False
    mark = field.tail.mark()
    field.effects.took_effect(f"produce: {'request' if what == 'produce' else 'answer'} cut off")
    field.recovered("handler", mark)
    return True


def wish_cut(field: Field, what: Literal["produce", "produce answer"]) -> bool:
    """The connection breaks before the broker has a policy's command, or before the relay has its answer."""
    rule = field.ground.kafka.rule(what, "cut", _from(field.crew.policies), field.random.randint(1, LATER))
    if not _struck(field, rule):
        return False
    mark = field.tail.mark()
    field.effects.took_effect(f"wish: {'request' if what == 'produce' else 'answer'} cut off")
    field.recovered("policies", mark)
    return True


def _produce(field: Field, kind: Literal["produce", "produce answer"], action: Literal["hold", "cut"]) -> Rule:
    return field.ground.kafka.rule(kind, action, _from(field.crew.handlers), field.random.randint(1, LATER))


def _from(children: Sequence[Child]) -> Callable[[Connection], bool]:
    """Whether a connection is one of these processes'."""
    known: dict[int, bool] = {}

    def is_theirs(connection: Connection) -> bool:
        if connection.port not in known:
            known[connection.port] = any(connection.port in _ports(child) for child in children)
        return known[connection.port]

    return is_theirs


def _ports(child: Child) -> set[int]:
    try:
        return {one.laddr.port for one in psutil.Process(child.pid or 0).net_connections("tcp4")}
    except psutil.Error:
        return set()


def _struck(field: Field, rule: Rule) -> bool:
    if rule.struck.wait(REACHED_S):
        return True
    field.ground.kafka.release(rule)
    return False


def _writer(field: Field, rule: Rule) -> Child | None:
    """The handler on whose connection the rule acted."""
    assert rule.where is not None
    for child in field.crew.handlers:
        if rule.where.port in _ports(child):
            return child
    return None


# ── COMMIT ──


def commit_held(field: Field) -> bool:
    """Held until the server has ended the transaction; then let go, with no client left."""
    rule = field.ground.postgres.rule("COMMIT", "hold", _agents(field), field.random.randint(1, LATER))
    try:
        if not rule.struck.wait(REACHED_S):
            return False
        mark, began = field.tail.mark(), time.monotonic()
        field.recovered("agent", mark)
        field.until(lambda: time.monotonic() > began + PAST_ALL_S, "all timeouts are over")
        field.effects.took_effect("COMMIT: request held past the time-outs")
    finally:
        field.ground.postgres.release(rule)
    return True


def commit_cut(field: Field, what: Literal["COMMIT", "COMMIT answer"]) -> bool:
    """An agent's session breaks before the server has the COMMIT, or when it has carried it out and the agent does not know."""
    rule = field.ground.postgres.rule(what, "cut", _agents(field), field.random.randint(1, LATER))
    if not rule.struck.wait(REACHED_S):
        field.ground.postgres.release(rule)
        return False
    mark = field.tail.mark()
    field.effects.took_effect(f"COMMIT: {'request' if what == 'COMMIT' else 'answer'} cut off")
    field.recovered("agent", mark)
    return True


def switch_cut(field: Field, what: Literal["COMMIT", "COMMIT answer"]) -> bool:
    """The same, of the transaction in which a builder moves the pointers."""
    rule = field.ground.postgres.rule(what, "cut", lambda connection: _wire(connection).moves_pointers, 1)
    builder = field.crew.start("proofs.chaos.rebuilding", f"builder-{field.number()}", *some_views(field))
    field.until(lambda: rule.struck.is_set() or builder.poll() is not None, "a builder switches", 90)
    if not rule.struck.is_set():
        field.ground.postgres.release(rule)
        return False
    mark = field.tail.mark()
    field.effects.took_effect(f"switch COMMIT: {'request' if what == 'COMMIT' else 'answer'} cut off")
    field.recovered("builder", mark)
    ended(field, builder)
    return True


def _agents(field: Field) -> Callable[[Connection], bool]:
    names = {f"samefold {name_of(child)}"[:63] for child in field.crew.agents}
    return lambda connection: _wire(connection).name in names


def _wire(connection: Connection) -> PostgresWire:
    assert isinstance(connection.wire, PostgresWire)
    return connection.wire
