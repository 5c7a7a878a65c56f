"""What the hot paths cost, counted instead of timed: instructions of the interpreter, and calls into C, per commit.

Counts don't depend on the machine or on what else runs there, so a test can hold them. `hot_path.json` has them for each version of
Python, relative to the costs of a reference, plain Python that never changes, counted in the same run. They don't
see what happens within C (msgspec, struct); `make bench` does.

    python -m tests.engine.projections.hot_path        # count, and write the figures down
"""

from __future__ import annotations

import gc
import json
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import msgspec

from commands.decision import Versioned
from commands.intake import Intake, receive
from commands.writer import Append, Limits, Phase, Snapshot, Writer
from infra.log.partitioner import partition_of
from infra.log.records import Command, EventRecord, Record, encode
from infra.log.rule import START, Reading, read
from projections.engine.fold.fold import Held, decode, fold, keys_to_load
from projections.engine.store.rows import writes
from tests.engine.log import commit, opening, records
from tests.engine.projections.viewkit import MOVES, PURSES, TOTALS, plan_of, views
from tests.engine.purse import PURSE, State

COMMITS = 2_000
STREAMS = 400
BATCH = 500
FIGURES = Path(__file__).with_name("hot_path.json")
VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"


class Cost(NamedTuple):
    """For all the commits together."""

    instructions: float
    c_calls: float


def costs() -> dict[str, Cost]:
    """By name of the path: how many references it costs."""
    one = counted(reference)
    found = {"read": counted(reading()), "write": counted(writing())}
    return {
        name: Cost(*(cost / of_one for cost, of_one in zip(path, one, strict=True))) for name, path in found.items()
    }


@dataclass(slots=True)
class _Held:
    version: int = 0
    cents: int = 0


class _Line(NamedTuple):
    name: str
    version: int
    cents: int


def reference() -> None:
    """Of everything that the hot paths are made of, a little. It is not to be changed: all figures are relative to it."""
    held: dict[str, _Held] = {}
    lines: list[_Line] = []
    for number in range(COMMITS):
        name = f"purse/{number % STREAMS}"
        one = held.get(name)
        if one is None:
            one = held[name] = _Held()
        match number % 3:
            case 0:
                one.cents += number
            case _ if one.cents > number:
                one.cents -= number
            case _:
                one.version += 1
        one.version += 1
        lines.append(_Line(name, one.version, cents=one.cents))
        if len(lines) == BATCH:
            last = {line.name: (line.version, line.cents) for line in lines}
            assert sorted(last) == sorted({line.name for line in lines if line.cents >= 0})
            lines.clear()


def reading() -> Callable[[], None]:
    """Rule, decode, fold and row encoding of a log, as an agent with an entity, a journal and a summary view does it."""
    log = _log()
    plan = plan_of(views(purses=PURSES, moves=MOVES, totals=TOTALS))

    def run() -> None:
        held, position, done = Held(plan), START, 0
        for start in range(0, len(log), BATCH):
            position, found, _ = read(position, log[start : start + BATCH], plan.decode)
            batch = decode(plan, 0, found)
            for name, keys in keys_to_load(batch, held).items():
                held.rows[name].update(dict.fromkeys(keys))
            changes = fold(plan, batch, held)
            for view in plan.views.values():
                assert writes(view, view.table_name, [changes])
            held.merge(changes)
            done += len(found)
        assert done == COMMITS

    return run


def writing() -> Callable[[], None]:
    """From the record of a command to the bytes of its commit, and its acknowledgement, as a handler does it."""
    commands, known = _commands(), {PURSE.name: PURSE}

    def run() -> None:
        intake = Intake("topic", 1, contexts=known)
        writer = Writer(0, "topic", Limits(COMMITS, 10_000, 30.0))
        writer.phase, writer.epoch, writer.generation = Phase.SERVING, 0, "g"
        shown = Reading(1, 0, 0, -1)
        for start in range(0, COMMITS, BATCH):
            received = [receive(record, intake) for record in commands[start : start + BATCH]]
            streams, _ = writer.wants(received)
            rows = {stream: Versioned(1, State(10**6)) for _, stream in streams}
            actions = writer.on_commands(received, Snapshot({0: shown}, "g", True, rows), 0.0)
            assert len(actions) == BATCH
            for action in actions:
                assert isinstance(action, Append)
                writer.on_acknowledged(action.seq, action.seq, 0.0)

    return run


def counted(run: Callable[[], None]) -> Cost:
    """The cost of the second run: the first one fills what is cached."""
    run()
    c_calls = 0

    def profile(frame: FrameType, event: str, _argument: Any) -> None:
        nonlocal c_calls
        c_calls += event == "c_call"

    before = sys.getprofile()
    gc.disable()  # its callbacks would count
    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(before)
        gc.enable()
    return Cost(_instructions(run), c_calls)


def _instructions(run: Callable[[], None]) -> int:
    """Those of one run. From Python 3.12 on a trace function does not see all of them."""
    found = 0

    def count(*_: Any) -> None:
        nonlocal found
        found += 1

    def trace(frame: FrameType, event: str, _argument: Any) -> Any:
        if event == "opcode":
            count()
        elif event == "call":
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return trace

    before = sys.gettrace()
    gc.disable()
    try:
        if sys.version_info >= (3, 12):
            seen, tool = sys.monitoring, sys.monitoring.PROFILER_ID
            seen.use_tool_id(tool, "hot path")
            seen.register_callback(tool, seen.events.INSTRUCTION, count)
            seen.set_events(tool, seen.events.INSTRUCTION)
        else:
            sys.settrace(trace)
        run()
    finally:
        if sys.version_info >= (3, 12):
            seen.set_events(tool, seen.events.NO_EVENTS)
            seen.register_callback(tool, seen.events.INSTRUCTION, None)
            seen.free_tool_id(tool)
        else:
            sys.settrace(before)
        gc.enable()
    return found


def _log() -> list[Record]:
    chance = random.Random(1)
    versions = dict.fromkeys(range(STREAMS), 0)
    values = [opening()]
    for seq in range(1, COMMITS + 1):
        stream = chance.randrange(STREAMS)
        versions[stream] += 1
        event = EventRecord("Filled", msgspec.Raw(b'{"cents":%d,"note":""}' % chance.randint(1, 10_000)))
        values.append(
            commit(0, seq, stream=f"purse/{stream}", version=versions[stream], events=[event], command_offset=seq)
        )
    return records(values)


def _commands() -> list[Record]:
    chance = random.Random(2)
    found = []
    for offset in range(COMMITS):
        stream = f"purse/{chance.randrange(STREAMS)}"
        assert partition_of(stream, 1) == 0
        body = msgspec.Raw(b'{"cents":%d}' % chance.randint(1, 10))
        found.append(Record(0, offset, 0, stream.encode(), encode(Command(f"c{offset}", stream, "Spend", body))))
    return found


def main() -> None:
    found = costs()
    figures = json.loads(FIGURES.read_text())
    figures[VERSION] = {name: cost._asdict() for name, cost in found.items()}
    FIGURES.write_text(json.dumps(figures, indent=2, sort_keys=True) + "\n")
    for name, cost in found.items():
        print(f"{name}: {cost.instructions:.3f} references' instructions, {cost.c_calls:.3f} references' calls into C")


if __name__ == "__main__":
    main()
