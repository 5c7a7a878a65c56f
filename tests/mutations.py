"""Guarantees switched off one at a time, each with the test that must notice: `python -m tests.mutations [WORD…]` (`make mutants`).

Each mutation is made in a copy of the tree, the named tests are run there, and a mutation that they let pass is a failure. The
protocol's own rules have their mutants beside their tests (`mutants.py`); here are those of the shells, where the world comes in.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
FAILED = 1
"""pytest's exit code for tests that ran and failed; any other tells nothing of the mutation."""


class Mutation(NamedTuple):
    """`old` stands in `file` and becomes `new`; `tests` are pytest's arguments."""

    name: str
    file: str
    old: str
    new: str
    tests: str


MUTATIONS = [
    Mutation(
        "garbage in commands is an error instead of a rejection",
        "commands/intake.py",
        "    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:\n",
        "    except ZeroDivisionError as error:\n",
        "tests/test_handler.py -k garbage_command",
    ),
    Mutation(
        "a misrouted command is decided where it stands",
        "commands/intake.py",
        "if partition_of(stream, intake.partitions) != record.partition:",
        "if False:",
        "tests/test_handler.py -k another_partitioner",
    ),
    Mutation(
        "commits of any size are appended",
        "commands/decision.py",
        "    if len(value) > max_bytes:",
        "    if False:",
        "tests/test_handler.py -k beyond_the_limit",
    ),
    Mutation(
        "the handler runs ahead without a bound",
        "commands/writer.py",
        "        return self.limits.run_ahead - len(self.overlay)",
        "        return 10**9",
        "tests/test_handler.py -k too_far_ahead",
    ),
    Mutation(
        "an acknowledgement out of line is taken for success",
        "commands/writer.py",
        "        if seq != self.acknowledged + 1 or offset != self.epoch + seq:",
        "        if False:",
        "tests/test_handler.py -k deposed",
    ),
    Mutation(
        "a restored database is trusted",
        "commands/writer.py",
        "position is None or position.next_offset < self.base:",
        "position is None:",
        "tests/test_handler.py -k restored",
    ),
    Mutation(
        "the live write model may be of any version",
        "commands/snapshots.py",
        "            bool(positions) and all(",
        "            True or all(",
        "tests/test_handler.py -k own_version",
    ),
    Mutation(
        "another topic's id is no matter",
        "projections/engine/start.py",
        "    if promised.topic_id != contract.topic_id:",
        "    if False:",
        "tests/test_handler.py -k made_anew",
    ),
    Mutation(
        "topics are not looked at again",
        "commands/handler.py",
        "            topics.require_same(topic, found)\n",
        "            pass\n",
        "tests/test_handler.py -k more_partitions",
    ),
    Mutation(
        "a trimmed log is read from where it begins",
        "commands/handler.py",
        "            if position and first > position.next_offset and self._archived(writer.partition) < first:",
        "            if False:",
        "tests/test_handler.py -k a_trimmed_log",
    ),
    Mutation(
        "a reader whose offset is gone jumps to the earliest",
        "infra/log/clients.py",
        '"auto.offset.reset": "error"',
        '"auto.offset.reset": "earliest"',
        "tests/test_handler.py -k trimmed_before",
    ),
    Mutation(
        "a record of an unknown format is void",
        "infra/log/records.py",
        "        raise UnreadableRecord(",
        "        return None\n        raise UnreadableRecord(",
        "tests/test_handler.py -k unknown_format",
    ),
    Mutation(
        "a database that is away ends the handler",
        "commands/handler.py",
        "        if isinstance(error, psycopg.Error) and not passes(error):",
        "        if True:",
        "tests/test_handler.py -k database_away",
    ),
    Mutation(
        "a command's trace ends at the handler",
        "commands/handler.py",
        "if (headers := message.headers()) and (kept := tracing.kept(headers)):",
        "if kept := []:",
        "tests/test_tracing.py -k handed_on_as_it_came",
    ),
    Mutation(
        "a handler that was fenced out lingers",
        "commands/handler.py",
        "if error.code() in (KafkaError.FENCED_INSTANCE_ID, KafkaError._FATAL) or error.fatal():",
        "if error.code() == KafkaError.FENCED_INSTANCE_ID or error.fatal():",
        "tests/test_handler.py -k another_process_takes",
    ),
    Mutation(
        "the next handler begins too late",
        "commands/writer.py",
        "        return Serve(self.last_command + 1)",
        "        return Serve(self.last_command + 31)",
        "tests/test_handler.py -k goes_on_where",
    ),
    Mutation(
        "producers use librdkafka's own partitioner",
        "infra/log/clients.py",
        '            "partitioner": LIBRDKAFKA_NAME,\n',
        "",
        "tests/test_handler.py -k murmur2",
    ),
    Mutation(
        "the overlay knows no outcomes",
        "commands/overlay.py",
        "        return (stream, command_id) in self._answered",
        "        return False",
        "tests/test_handler.py -k repeated",
    ),
    Mutation(
        "the database's outcomes are not looked at",
        "commands/writer.py",
        " or key in snapshot.outcomes",
        "",
        "tests/test_handler.py -k repeated",
    ),
    Mutation(
        "an event of an unknown type is passed over",
        "projections/engine/fold.py",
        "            if step is _ABSENT:\n                raise UnknownEvent",
        "            if step is _ABSENT:\n                continue\n                raise UnknownEvent",
        "tests/test_agent.py -k right_before",
    ),
    Mutation(
        "an agent folds whatever is live",
        "projections/engine/reader.py",
        "        if positions is None or difference is not None:",
        "        if positions is None:",
        "tests/test_agent.py -k another_set_is_live",
    ),
    Mutation(
        "garbage in the log is void in silence",
        "projections/engine/work.py",
        "    if garbage:\n",
        "    if False:\n",
        "tests/test_engine.py -k garbage",
    ),
    Mutation(
        "an agent starts on a trimmed log",
        "projections/engine/work.py",
        "        if not events.first[partition] <= reading.next_offset <= events.end[partition]:",
        "        if False:",
        "tests/test_agent.py -k trimmed_log",
    ),
    Mutation(
        "a file of the archive is believed without its hash",
        "infra/archive/read.py",
        "    if found != file.sha256:",
        "    if False:",
        "tests/test_archive.py -k flipped",
    ),
    Mutation(
        "trim does not ask where the agents are",
        "infra/archive/trim.py",
        "        yield partition, Limit(offset, f\"agent '{agent}', which goes on there\")",
        "        pass",
        "tests/test_archive.py -k slowest_agent",
    ),
    Mutation(
        "trim leaves the archive unread",
        "infra/archive/trim.py",
        "                check_file(store, file)\n",
        "",
        "tests/test_archive.py -k flipped",
    ),
    Mutation(
        "poison is passed over",
        "projections/engine/fold.py",
        '    if view.on_poison != "park":\n        raise poison from error\n',
        "",
        "tests/test_engine.py -k poison_stops",
    ),
    Mutation(
        "a batch is applied wherever the positions stand",
        "projections/engine/commit.py",
        "select 1 / (count(*) = %s)::int,",
        "select 1 / (count(*) = %s or true)::int,",
        "tests/test_engine.py -k delivered_twice",
    ),
    Mutation(
        "a switch keeps the generation",
        "projections/engine/switch.py",
        "do update set generation = excluded.generation, ",
        "do update set generation = positions.generation, ",
        "tests/test_switch.py",
    ),
]


def survives(mutation: Mutation) -> str | None:
    """Run a mutation's tests on a copy of the tree that has it; what pytest said where they did not fail."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, capture_output=True, check=True).stdout
        subprocess.run(["tar", "x", "-C", folder], input=archive, check=True)
        file = Path(folder) / mutation.file
        text = file.read_text()
        file.write_text(text.replace(mutation.old, mutation.new, 1))
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *mutation.tests.split()],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": folder},
            capture_output=True,
            text=True,
            check=False,
        )
        return None if done.returncode == FAILED else done.stdout + done.stderr


def main(words: list[str]) -> int:
    """The exit code: 1 when a mutation survived."""
    survivors = 0
    for mutation in MUTATIONS:
        if words and not any(word in mutation.name for word in words):
            continue
        said = survives(mutation)
        survivors += said is not None
        print(f"{'caught  ' if said is None else 'SURVIVED'}  {mutation.name}  ({mutation.tests})", flush=True)
        if said is not None:
            print(said[-2_000:])
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
