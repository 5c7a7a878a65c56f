"""What the hot paths cost, counted instead of timed: calls per commit, of Python's functions and into C.

Counts don't depend on the machine, on what else runs there or on Python's version, so a test can hold them. They don't see what
happens within a function (msgspec, struct, a loop); `make bench` does.
"""

from __future__ import annotations

import gc
import json
import random
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import msgspec

from commands.decision import Versioned
from commands.intake import Intake, receive
from commands.writer import Append, Limits, Phase, Snapshot, Writer
from infra.log.partitioner import partition_of
from infra.log.records import Command, EventRecord, Record, encode
from infra.log.rule import START, Reading, read
from projections.engine.fold.fold import RowCache, decode, fold, keys_to_load
from projections.engine.store.rows import writes
from tests.engine.log import commit, opening, records
from tests.engine.projections.viewkit import MOVES, PURSES, TOTALS, plan_of, views
from tests.engine.purse import PURSE, State

COMMITS = 2_000
STREAMS = 400
BATCH = 500
COMPREHENSIONS = {"<listcomp>", "<dictcomp>", "<setcomp>"}


def reading() -> Callable[[], None]:
    """Rule, decode, fold and row encoding of a log, as an agent with an entity, a journal and a summary view does it."""
    log = _log()
    plan = plan_of(views(purses=PURSES, moves=MOVES, totals=TOTALS))

    def run() -> None:
        held, position, done = RowCache(plan), START, 0
        for start in range(0, len(log), BATCH):
            position, found, _ = read(position, log[start : start + BATCH], plan.decode)
            batch = decode(plan, 0, found)
            for name, keys in keys_to_load(plan, batch, held).items():
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


def calls(run: Callable[[], None]) -> float:
    """Those of the second run, per commit: the first one fills what is cached."""
    run()
    count = 0

    def profile(frame: FrameType, event: str, _argument: Any) -> None:
        nonlocal count
        # from Python 3.12 on comprehensions are no calls
        count += event == "c_call" or (event == "call" and frame.f_code.co_name not in COMPREHENSIONS)

    gc.disable()  # its callbacks would count
    sys.setprofile(profile)
    run()
    sys.setprofile(None)
    return count / COMMITS


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


if __name__ == "__main__":
    print(json.dumps({path.__name__: calls(path()) for path in (reading, writing)}))
