"""All faults by the lane in which they follow one another; lanes run in parallel, services alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle
from typing import NamedTuple

from infra.processes.faultpoints import AGENT, BUILDER, HANDLER, RELAY, BuilderPoint
from infra.processes.supervisor import Child
from proofs.chaos import process_faults as faults
from proofs.chaos import wire_faults
from proofs.chaos.field import Field
from proofs.chaos.stumbles import JOBS, STORES, WAYS, How, Store, shut_down_at_once, stumble, terminate_sessions


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


def _handlers(field: Field) -> Sequence[Child]:
    return field.crew.handlers


def _agents(field: Field) -> Sequence[Child]:
    return field.crew.agents


def _policies(field: Field) -> Sequence[Child]:
    return field.crew.policies


def _one_of(children: Callable[[Field], Sequence[Child]], act: Callable[..., bool], point: str | None) -> Act:
    return lambda field: act(field, field.random.choice(children(field)), point)


def _builder(act: Callable[[Field, BuilderPoint], bool], point: BuilderPoint) -> Act:
    return lambda field: act(field, point)


def _stumble(store: Store, how: How, first: int) -> Act:
    jobs = cycle([*JOBS[first % len(JOBS) :], *JOBS[: first % len(JOBS)]])
    return lambda field: stumble(field, store, how, next(jobs))


HANDLERS = [
    *(Fault(f"killed: {point or 'handler'}", _one_of(_handlers, faults.kill, point)) for point in (*HANDLER, None)),
    *(Fault(f"frozen: {point or 'handler'}", _one_of(_handlers, faults.freeze, point)) for point in (*HANDLER, None)),
    Fault("produce: answer held past the time-out", wire_faults.produce_answer_held),
    Fault("produce: request held over a takeover, then appended", wire_faults.produce_request_held),
]
AGENTS = [
    *(Fault(f"killed: {point or 'agent'}", _one_of(_agents, faults.kill, point)) for point in (*AGENT, None)),
    *(Fault(f"frozen: {point or 'agent'}", _one_of(_agents, faults.freeze, point)) for point in (*AGENT, None)),
    Fault("rebalance: an agent joined", faults.rebalance),
    Fault("rebalance: an agent left", faults.rebalance),
    Fault("COMMIT: request held past the time-outs", wire_faults.commit_held),
]
IN_A_BATCH = ("batch read", "rows sent", "COMMIT sent", "COMMIT acknowledged")
POLICIES = [
    *(Fault(f"killed: {point or 'policies'}", _one_of(_policies, faults.kill, point)) for point in (*RELAY, None)),
    *(Fault(f"frozen: {point or 'policies'}", _one_of(_policies, faults.freeze, point)) for point in (*RELAY, None)),
    *(Fault(f"killed: policies, {point}", _one_of(_policies, faults.kill, point)) for point in IN_A_BATCH),
    *(Fault(f"frozen: policies, {point}", _one_of(_policies, faults.freeze, point)) for point in IN_A_BATCH),
    Fault("wish: request cut off", lambda field: wire_faults.wish_cut(field, "produce")),
    Fault("wish: answer cut off", lambda field: wire_faults.wish_cut(field, "produce answer")),
]
BUILDERS = [
    *(Fault(f"killed: {point}", _builder(faults.kill_builder, point)) for point in BUILDER),
    *(Fault(f"frozen: {point}", _builder(faults.freeze_builder, point)) for point in BUILDER),
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
    Fault("database: immediate shutdown", shut_down_at_once),
    Fault("session terminated", terminate_sessions),
]
JOBS_MEANWHILE = [f"{job} while the {store} stumbled" for store in STORES for job in JOBS]
"""Each stumble counts for the job that runs meanwhile too, which is another one each time."""
LANES = (
    Lane("handlers", HANDLERS, (0.0, 0.5)),
    Lane("agents", AGENTS, (0.0, 0.5)),
    Lane("policies", POLICIES, (0.0, 0.5)),
    Lane("builders", BUILDERS, (0.0, 0.5)),
    Lane("wire", WIRE, (2.0, 6.0)),
)
ALONE = Lane("services", SERVICES, (2.0, 10.0))
KINDS = [*(fault.kind for lane in (*LANES, ALONE) for fault in lane.faults), *JOBS_MEANWHILE]
