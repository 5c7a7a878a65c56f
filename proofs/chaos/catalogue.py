"""All faults by the lane in which they follow one another; lanes run side by side, services alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle
from typing import NamedTuple

from infra.processes.faultpoints import AGENT, BUILDER, HANDLER, AgentPoint, BuilderPoint, HandlerPoint
from infra.processes.supervisor import Child
from proofs.chaos import point_faults, process_faults, service_faults, wire_faults
from proofs.chaos.field import Field
from proofs.chaos.stumbles import JOBS, STORES, WAYS, How, Store, stumble


class Fault(NamedTuple):
    """`act` returns whether it took effect; then `kind` is one of those that were counted."""

    kind: str
    act: Callable[[Field], bool]


class Lane(NamedTuple):
    """`quiet_s` is the shortest and the longest pause between two of its faults, in seconds."""

    name: str
    faults: Sequence[Fault]
    quiet_s: tuple[float, float]


Act = Callable[[Field], bool]


def _handler(field: Field) -> Child:
    return field.random.choice(field.crew.handlers)


def _agent(field: Field) -> Child:
    return field.random.choice(field.crew.agents)


def _at_handler_point(act: Callable[[Field, Child, HandlerPoint], bool], point: HandlerPoint) -> Act:
    return lambda field: act(field, _handler(field), point)


def _at_agent_point(act: Callable[[Field, Child, AgentPoint], bool], point: AgentPoint) -> Act:
    return lambda field: act(field, _agent(field), point)


def _at_builder_point(act: Callable[[Field, BuilderPoint], bool], point: BuilderPoint) -> Act:
    return lambda field: act(field, point)


def _stumble(store: Store, how: How, first: int) -> Act:
    jobs = cycle([*JOBS[first % len(JOBS) :], *JOBS[: first % len(JOBS)]])
    return lambda field: stumble(field, store, how, next(jobs))


HANDLERS = [
    *(Fault(f"killed: {point}", _at_handler_point(point_faults.kill_at, point)) for point in HANDLER),
    *(Fault(f"frozen: {point}", _at_handler_point(point_faults.freeze_at, point)) for point in HANDLER),
    Fault("killed: handler", lambda field: process_faults.kill(field, _handler(field))),
    Fault("frozen: handler", lambda field: process_faults.freeze(field, _handler(field))),
    Fault("produce: answer held past the time-out", wire_faults.produce_answer_held),
    Fault("produce: request held over a takeover, then appended", wire_faults.produce_request_held),
]
AGENTS = [
    *(Fault(f"killed: {point}", _at_agent_point(point_faults.kill_at, point)) for point in AGENT),
    *(Fault(f"frozen: {point}", _at_agent_point(point_faults.freeze_at, point)) for point in AGENT),
    Fault("killed: agent", lambda field: process_faults.kill(field, _agent(field))),
    Fault("frozen: agent", lambda field: process_faults.freeze(field, _agent(field))),
    Fault("rebalance: an agent joined", process_faults.rebalance),
    Fault("rebalance: an agent left", process_faults.rebalance),
    Fault("COMMIT: request held past the time-outs", wire_faults.commit_held),
]
BUILDERS = [
    *(Fault(f"killed: {point}", _at_builder_point(point_faults.kill_builder_at, point)) for point in BUILDER),
    *(Fault(f"frozen: {point}", _at_builder_point(point_faults.freeze_builder_at, point)) for point in BUILDER),
    Fault("switch COMMIT: request cut off", lambda field: wire_faults.switch_cut(field, "COMMIT")),
    Fault("switch COMMIT: answer cut off", lambda field: wire_faults.switch_cut(field, "COMMIT answer")),
]
WIRE = [
    Fault("produce: request cut off", lambda field: wire_faults.produce_cut(field, "produce")),
    Fault("produce: answer cut off", lambda field: wire_faults.produce_cut(field, "produce answer")),
    Fault("COMMIT: request cut off", lambda field: wire_faults.commit_cut(field, "COMMIT")),
    Fault("COMMIT: answer cut off", lambda field: wire_faults.commit_cut(field, "COMMIT answer")),
]
SERVICES = [
    *(Fault(f"{store}: {how}", _stumble(store, how, number)) for store in STORES for number, how in enumerate(WAYS)),
    Fault("database: immediate shutdown", service_faults.shut_down_at_once),
    Fault("session terminated", service_faults.terminate_sessions),
]
JOBS_BESIDE = [f"{job} while the {store} stumbled" for store in STORES for job in JOBS]
"""Each stumble counts for the job beside it too, which is another one each time."""
LANES = (
    Lane("handlers", HANDLERS, (0.0, 0.5)),
    Lane("agents", AGENTS, (0.0, 0.5)),
    Lane("builders", BUILDERS, (0.0, 0.5)),
    Lane("wire", WIRE, (2.0, 6.0)),
)
ALONE = Lane("services", SERVICES, (2.0, 10.0))
KINDS = [*(fault.kind for lane in (*LANES, ALONE) for fault in lane.faults), *JOBS_BESIDE]
