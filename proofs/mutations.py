"""Guarantees switched off one at a time, each with the test that notices: `python -m proofs.mutations [WORD…]` (`make mutants`).

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
        "the demo's commands overtake one of their account that is under way",
        "demo/sending.py",
        "if (lane := self._lanes.get(command.stream)) is not None:",
        "if (lane := None) is not None:",
        "demo/tests/test_demo_sending.py -k order",
    ),
    Mutation(
        "what is not printable stands in the log as it came",
        "infra/observability/logs.py",
        "    return text if text.isprintable() else ",
        "    return text or ",
        "tests/engine/test_logs.py -k forge",
    ),
    Mutation(
        "garbage in commands is an error instead of a rejection",
        "commands/intake.py",
        "    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:\n",
        "    except ZeroDivisionError as error:\n",
        "tests/engine/test_handler.py -k garbage_command",
    ),
    Mutation(
        "a misrouted command is decided where it stands",
        "commands/intake.py",
        "if partition_of(stream, intake.partitions) != record.partition:",
        "if False:",
        "tests/engine/test_handler.py -k another_partitioner",
    ),
    Mutation(
        "commits of any size are appended",
        "commands/decision.py",
        "    if len(value) > max_bytes:",
        "    if False:",
        "tests/engine/test_handler.py -k beyond_the_limit",
    ),
    Mutation(
        "the handler runs ahead without a bound",
        "commands/writer.py",
        "        return self.limits.run_ahead - len(self.overlay)",
        "        return 10**9",
        "tests/engine/test_handler.py -k too_far_ahead",
    ),
    Mutation(
        "an acknowledgement out of line is taken for success",
        "commands/writer.py",
        "        if seq != self.acknowledged + 1 or offset != self.epoch + seq:",
        "        if False:",
        "tests/engine/test_handler.py -k fenced_writer",
    ),
    Mutation(
        "a restored database is trusted",
        "commands/writer.py",
        "position is None or position.next_offset < self.base:",
        "position is None:",
        "tests/engine/test_handler.py -k restored",
    ),
    Mutation(
        "the live write model may be of any version",
        "commands/snapshots.py",
        "            bool(positions) and all(",
        "            True or all(",
        "tests/engine/test_handler.py -k own_version",
    ),
    Mutation(
        "a live command that another release knows is malformed",
        "commands/writer.py",
        "            if command.unknown is not None and command.unknown in self.unknown:",
        "            if False:",
        "tests/engine/test_handler.py -k live_command",
    ),
    Mutation(
        "a body has no bound",
        "api/requests.py",
        "                if size > most:",
        "                if False:",
        "tests/engine/test_api_hostile.py -k flood_is_refused",
    ),
    Mutation(
        "a body may take for ever",
        "api/requests.py",
        "asyncio.timeout(within_s)",
        "asyncio.timeout(None)",
        "tests/engine/test_api_hostile.py -k slow_bodies",
    ),
    Mutation(
        "an answer lacks what the document promises",
        "api/outcomes.py",
        '        "version": recorded.version,\n',
        "",
        "tests/engine/test_api_fuzz.py -k allows_is_answered",
    ),
    Mutation(
        "data that the document does not allow is taken",
        "api/requests.py",
        "    if found is None:\n        raise BAD_HEADER('If-Match",
        "    if found is None:\n        return None\n        raise BAD_HEADER('If-Match",
        "tests/engine/test_api_fuzz.py -k not_allow",
    ),
    Mutation(
        "a repeated command is not looked up",
        "api/outcome_waits.py",
        "if may_be_there else None",
        "if False else None",
        "tests/engine/test_api_commands.py -k repeated_command_is_looked_up",
    ),
    Mutation(
        "outcomes are not polled",
        "api/outcome_waits.py",
        "            self._are_due(self._waiting)\n        self._wake.clear()",
        "            pass\n        self._wake.clear()",
        "tests/engine/test_api_commands.py -k poll_finds",
    ),
    Mutation(
        "a key answers for any command",
        "api/outcomes.py",
        "if recorded.fingerprint != fingerprint:",
        "if False:",
        "tests/engine/test_api_commands.py -k a_key_belongs",
    ),
    Mutation(
        "the API forgets the expected version",
        "api/commands.py",
        "expected, correlation or UNSET",
        "None, correlation or UNSET",
        "tests/engine/test_api_commands.py -k may_expect_a_version",
    ),
    Mutation(
        "paths are split after they are decoded",
        "api/requests.py",
        'scope["path"] = normal(raw.partition(b"?")[0]) if raw else quote(scope["path"])',
        "pass",
        "tests/engine/test_api_commands.py -k called_almost_anything",
    ),
    Mutation(
        "the API leaves checks of commands to the handler",
        "api/commands.py",
        "            validate(body)\n",
        "            pass\n",
        "tests/engine/test_api_commands.py -k field_that_does_not_fit",
    ),
    Mutation(
        "a reader trusts the table that it knows",
        "api/view_reader.py",
        "if (found.table, found.version) == (table, view.version):",
        "if True:",
        "tests/engine/test_api_views.py -k switch_shows",
    ),
    Mutation(
        "a read waits for no position",
        "api/view_reader.py",
        "        found = await read()\n        if seen.covered_by(found.position):\n            return found\n        deadline",
        "        return await read()\n        deadline",
        "tests/engine/test_api_views.py -k waits_for_what",
    ),
    Mutation(
        "the API appends what no handler knows yet",
        "api/stores.py",
        "        if kind not in self.types:\n            raise",
        "        if False:\n            raise",
        "tests/engine/test_api_other_release.py -k no_handler_knows",
    ),
    Mutation(
        "handlers of all releases are one group",
        "commands/release.py",
        '    return f"{_stem(prefix)}{states}.',
        '    return f"{_stem(prefix)}" or f"{states}.',
        "tests/engine/test_two_releases.py",
    ),
    Mutation(
        "handlers of an older release go on deciding",
        "commands/handler.py",
        "        if snapshot.unknown and (other := self._deciding()) != self.group:",
        "        if snapshot.unknown and (other := self._deciding()) is None:",
        "tests/engine/test_two_releases.py",
    ),
    Mutation(
        "catching up must fold as quickly as agents do",
        "projections/engine/rebuild/switch.py",
        '            self.connection.execute(f"set idle_in_transaction_session_timeout = {patient_ms(self.settings)}")\n',
        "",
        "tests/engine/test_switch.py -k may_take_longer",
    ),
    Mutation(
        "another topic's id is no matter",
        "projections/engine/live/startup.py",
        "    if promised.topic_id != contract.topic_id:",
        "    if False:",
        "tests/engine/test_handler.py -k recreated",
    ),
    Mutation(
        "topics are not looked at again",
        "commands/handler.py",
        "        topics.require_same(topic, found)\n",
        "        pass\n",
        "tests/engine/test_handler.py -k more_partitions",
    ),
    Mutation(
        "a trimmed log is read from where it begins",
        "commands/handler.py",
        "            if position and first > position.next_offset and self._archived(writer.partition) < first:",
        "            if False:",
        "tests/engine/test_handler.py -k a_trimmed_log",
    ),
    Mutation(
        "a reader whose offset is gone jumps to the earliest",
        "infra/log/clients.py",
        '"auto.offset.reset": "error"',
        '"auto.offset.reset": "earliest"',
        "tests/engine/test_handler.py -k trimmed_before",
    ),
    Mutation(
        "a record of an unknown format is void",
        "infra/log/records.py",
        "        raise UnreadableRecord(",
        "        return None\n        raise UnreadableRecord(",
        "tests/engine/test_handler.py -k unknown_format",
    ),
    Mutation(
        "a database that is away ends the handler",
        "commands/handler.py",
        "        if isinstance(error, psycopg.Error) and not passes(error):",
        "        if True:",
        "tests/engine/test_handler.py -k database_away",
    ),
    Mutation(
        "a command's trace ends at the handler",
        "commands/handler.py",
        "if (headers := message.headers()) and (kept := tracing.kept(headers)):",
        "if kept := []:",
        "tests/engine/test_tracing.py -k handed_on_as_it_came",
    ),
    Mutation(
        "a handler that was fenced out lingers",
        "commands/handler.py",
        "        if not was_member:",
        "        if True:",
        "tests/engine/test_handler.py -k whose_name_another_process_takes",
    ),
    Mutation(
        "an event of newer code ends the handler",
        "commands/writer.py",
        "            except (UnknownEvent, UnreadableEvent) as error:",
        "            except () as error:",
        "tests/engine/test_writer.py -k until_an_agent_has_folded",
    ),
    Mutation(
        "a command whose checks fail is a defect of the API",
        "api/commands.py",
        "        except Exception:",
        "        except ():",
        "tests/engine/test_api_commands.py -k own_checks_fail",
    ),
    Mutation(
        "a handler that its own join has fenced ends",
        "commands/handler.py",
        "        if not was_member:",
        "        if False:",
        "tests/engine/test_handler.py -k its_own_join_has_fenced",
    ),
    Mutation(
        "a partition is assigned anew while it is being stopped",
        "infra/log/clients.py",
        "    consumer.unassign()\n",
        "",
        "tests/engine/test_arrival.py -k over_and_over",
    ),
    Mutation(
        "a producer that can't go on is kept",
        "infra/log/clients.py",
        "            self.renew(polled, error.args[0])",
        "            pass",
        "tests/engine/test_fatal_producer.py -k api_appends_again",
    ),
    Mutation(
        "what a handler's producer did not take is not in doubt",
        "infra/log/clients.py",
        "        finished.purge()\n",
        "        return\n",
        "tests/engine/test_fatal_producer.py -k handler_opens_again",
    ),
    Mutation(
        "a consumer that pauses is told where partitions end",
        "projections/engine/live/tail.py",
        "tells_ends=False",
        "tells_ends=True",
        "tests/engine/test_switch.py -k more_than_one_read",
    ),
    Mutation(
        "a reader goes on behind what came with an error",
        "projections/engine/live/log_reader.py",
        "            self._assigned = False  # fetch all of it again\n",
        "",
        "proofs/chaos/test_refused_reads.py -k goes_on_after_an_error",
    ),
    Mutation(
        "a handler that has paused goes on where the client says",
        "commands/handler.py",
        "            self._consumer.seek(here)\n",
        "",
        "proofs/chaos/test_refused_reads.py -k before_a_pause",
    ),
    Mutation(
        "a handler takes an error among the commands for a record, as the client does",
        "commands/handler.py",
        "                again.add(message.partition())\n",
        "",
        "proofs/chaos/test_refused_reads.py -k idle_handler",
    ),
    Mutation(
        "a handler takes a hole among the commands for the topic's own",
        "commands/handler.py",
        " and not self._is_gap(record, again)",
        " and record.offset < self._next[record.partition]",
        "proofs/chaos/test_refused_reads.py -k asked_for_again",
    ),
    Mutation(
        "a handler begins to read where nothing is any more",
        "commands/handler.py",
        "first.get(p.partition, 0)",
        "0",
        "tests/engine/test_handler.py -k after_they_were_decided",
    ),
    Mutation(
        "who has records deleted loses a reference",
        "infra/log/clients.py",
        "    ctypes.pythonapi.Py_IncRef(ctypes.py_object(before))\n",
        "",
        "tests/engine/test_archive.py -k keeps_what_it_gave",
    ),
    Mutation(
        "who is told that another broker leads asks with the client that remembers",
        "infra/log/topics.py",
        "                        self._client = clients.admin(self._settings)",
        "                        pass",
        "tests/engine/test_frozen_broker.py -k remembers_nothing",
    ),
    Mutation(
        "one failed look refuses commands",
        "api/stores.py",
        "        if time.monotonic() - self._kafka_at > PATIENCE_S:",
        "        if True:",
        "tests/engine/test_frozen_broker.py -k for_a_moment",
    ),
    Mutation(
        "a part that ends is told to nobody",
        "infra/processes/process_end.py",
        "            self._report(_ended(self._who, name, error))",
        "            pass",
        "tests/engine/test_no_silent_end.py -k any_part",
    ),
    Mutation(
        "a thread that raises ends alone",
        "infra/processes/process_end.py",
        "    threading.excepthook = thread_ended\n",
        "",
        "tests/engine/test_no_silent_end.py -k any_part",
    ),
    Mutation(
        "what Faust ends is nobody's affair",
        "projections/engine/live/agent.py",
        '        self.parts.task("Faust", self._faust())\n',
        "",
        "tests/engine/test_no_silent_end.py -k any_part",
    ),
    Mutation(
        "a line that is not acknowledged is taken for sent",
        "commands/client.py",
        "        if missing:\n            why",
        "        if False:\n            why",
        "tests/engine/test_send.py -k not_acknowledged",
    ),
    Mutation(
        "a line that is too large keeps others back",
        "commands/client.py",
        "            if error is not None and error.code() != KafkaError.MSG_SIZE_TOO_LARGE:",
        "            if error is not None:",
        "tests/engine/test_send.py -k too_large",
    ),
    Mutation(
        "the next handler begins too late",
        "commands/writer.py",
        "        return Serve(self.last_command + 1)",
        "        return Serve(self.last_command + 31)",
        "tests/engine/test_handler.py -k goes_on_where",
    ),
    Mutation(
        "producers use librdkafka's own partitioner",
        "infra/log/clients.py",
        '            "partitioner": LIBRDKAFKA_NAME,\n',
        "",
        "tests/engine/test_handler.py -k murmur2",
    ),
    Mutation(
        "the overlay knows no outcomes",
        "commands/overlay.py",
        "        return (stream, command_id) in self._answered",
        "        return False",
        "tests/engine/test_handler.py -k repeated",
    ),
    Mutation(
        "the database's outcomes are not looked at",
        "commands/writer.py",
        " or key in snapshot.outcomes",
        "",
        "tests/engine/test_handler.py -k repeated",
    ),
    Mutation(
        "an event of an unknown type is passed over",
        "projections/engine/fold/fold.py",
        "            if step is _ABSENT:\n                raise UnknownEvent",
        "            if step is _ABSENT:\n                continue\n                raise UnknownEvent",
        "tests/engine/test_agent.py -k right_before",
    ),
    Mutation(
        "an event of newer code ends the agent",
        "projections/engine/live/reader.py",
        "        if isinstance(result.stop, UnknownEvent):",
        "        if False:",
        "tests/engine/test_agent.py -k right_before",
    ),
    Mutation(
        "agents that know other events are one group",
        "projections/engine/live/agent.py",
        "what_it_knows(self.code, known_events())",
        "what_it_knows(self.code, [])",
        "tests/engine/test_agent.py -k right_before",
    ),
    Mutation(
        "beside an event of newer code, what else was cut short goes on behind the cut",
        "projections/engine/live/reader.py",
        "            return [Newer(result.stop), *self._ask()]",
        "            del self._parts[result.stop.partition]\n            return [Newer(result.stop), *self.tick(now)]",
        "tests/engine/test_reader.py -k cut_short",
    ),
    Mutation(
        "an event of newer code ends the agent on Spark",
        "spark_jobs/agent.py",
        "                case Status.STOPPED if isinstance(result.error, UnknownEvent):",
        "                case Status.STOPPED if False and isinstance(result.error, UnknownEvent):",
        "tests/engine/test_spark_agent.py -k newer_code",
    ),
    Mutation(
        "no row is judged",
        "projections/engine/fold/fold.py",
        "        if not inexact:\n            return changes",
        "        if True:\n            return changes",
        "tests/engine/test_exact.py -k same_in_every",
    ),
    Mutation(
        "a key may be another stream's too",
        "projections/engine/fold/fold.py",
        "                    exact.require_own(key, stream)\n",
        "",
        "tests/engine/test_exact.py -k same_in_every",
    ),
    Mutation(
        "a journal's key may be another stream's too",
        "projections/engine/fold/fold.py",
        " and exact.are_own(changes.added[view], list(streams))",
        "",
        "tests/engine/test_exact.py -k same_in_every",
    ),
    Mutation(
        "rows are judged but for those that others took the place of",
        "projections/engine/fold/fold.py",
        "                    replaced[name] += (key, row)\n",
        "                    pass\n",
        "tests/engine/test_exact.py -k does_not_park_stops",
    ),
    Mutation(
        "sums of decimals round",
        "projections/engine/fold/plan.py",
        "        return EXACT.add if column.scalar is Scalar.DECIMAL else _add",
        "        return _add",
        "tests/engine/test_exact.py -k add_up",
    ),
    Mutation(
        "a refused row is laid to the batch's last event",
        "projections/engine/store/writing.py",
        "    while fails - passes > 1:",
        "    while False:",
        "tests/engine/test_engine.py -k goes_on_without",
    ),
    Mutation(
        "an agent folds whatever is live",
        "projections/engine/live/reader.py",
        "        if positions is None or difference is not None:",
        "        if positions is None:",
        "tests/engine/test_agent.py -k another_set_is_live",
    ),
    Mutation(
        "garbage in the log is void in silence",
        "projections/engine/live/worker.py",
        "    if garbage:\n",
        "    if False:\n",
        "tests/engine/test_engine.py -k garbage",
    ),
    Mutation(
        "an agent starts on a trimmed log",
        "projections/engine/live/worker.py",
        "        if not events.first[partition] <= reading.next_offset <= events.end[partition]:",
        "        if False:",
        "tests/engine/test_agent.py -k trimmed_log",
    ),
    Mutation(
        "a file of the archive is believed without its hash",
        "infra/archive/read.py",
        "    if found != file.sha256:",
        "    if False:",
        "tests/engine/test_archive.py -k flipped",
    ),
    Mutation(
        "trim does not ask where the agents are",
        "infra/archive/trim.py",
        "        yield partition, Limit(offset, f\"agent '{agent}', which goes on there\")",
        "        pass",
        "tests/engine/test_archive.py -k slowest_agent",
    ),
    Mutation(
        "trim does not look at what Kafka holds",
        "infra/archive/trim.py",
        "        if mine != theirs:",
        "        if False:",
        "tests/engine/test_archive.py -k holds_otherwise",
    ),
    Mutation(
        "another archive is as good",
        "infra/archive/store.py",
        "    if known and found != known.encode():",
        "    if False:",
        "tests/engine/test_archive.py -k another_archive",
    ),
    Mutation(
        "executors may read another Kafka",
        "infra/processes/services.py",
        "        if topic_id != self.topic_id:",
        "        if False:",
        "tests/engine/test_whom_they_work_for.py -k kafka",
    ),
    Mutation(
        "executors may have another database",
        "infra/processes/services.py",
        "        if _database(settings) != self.database:",
        "        if False:",
        "tests/engine/test_whom_they_work_for.py -k database",
    ),
    Mutation(
        "other code may fold",
        "infra/processes/code_identity.py",
        "    if sent == CODE:",
        "    if True:",
        "tests/engine/test_whom_they_work_for.py -k local_worker",
    ),
    Mutation(
        "Java reads its settings as it likes",
        "infra/dev/kafka.py",
        "json.dumps(str(value))[1:-1]",
        "value",
        "tests/engine/test_dev_stack.py -k any_name",
    ),
    Mutation(
        "a checkpoint outlives its agent",
        "spark_jobs/agent.py",
        'prefix="checkpoint-", dir=within,',
        'prefix="checkpoint-",',
        "tests/engine/test_spark_start.py -k killed_agent",
    ),
    Mutation(
        "trim believes the manifest",
        "infra/archive/trim.py",
        "                        check_file(store, file)\n",
        "",
        "tests/engine/test_archive.py -k changed_by_hand",
    ),
    Mutation(
        "poison is passed over",
        "projections/engine/fold/fold.py",
        '    if view.on_poison != "park":\n        raise poison from error\n',
        "",
        "tests/engine/test_engine.py -k poison_stops",
    ),
    Mutation(
        "a batch is applied wherever the positions stand",
        "projections/engine/store/commit.py",
        "select 1 / (count(*) = %s)::int,",
        "select 1 / (count(*) = %s or true)::int,",
        "tests/engine/test_engine.py -k delivered_twice",
    ),
    Mutation(
        "a switch keeps the generation",
        "projections/engine/store/positions.py",
        "do update set generation = excluded.generation, ",
        "do update set generation = positions.generation, ",
        "tests/engine/test_switch.py",
    ),
    Mutation(
        "a session that another process ended is a database that is away",
        "projections/engine/rebuild/build_locks.py",
        "        if (ended := _ended(error, settings, server, claimed, made)) is not None:",
        "        if (ended := None) is not None:",
        "tests/engine/test_abandon.py -k before_it_has_a_table",
    ),
    Mutation(
        "a transaction that timed out was ended by another process",
        "projections/engine/rebuild/build_locks.py",
        "    if isinstance(error, TransactionTimedOut):\n        return None\n",
        "",
        "tests/engine/test_switch.py -k stood_still",
    ),
    Mutation(
        "that reads are refused is told once and for all",
        "commands/handler.py",
        "                    self._refused.discard(record.partition)\n",
        "",
        "proofs/chaos/test_refused_reads.py -k told_once",
    ),
    Mutation(
        "trim waits for builders that were killed",
        "infra/archive/trim.py",
        "        if build.state in FILLING and by_whom(connection, claim_of(build)):",
        "        if build.state in FILLING:",
        "tests/engine/test_archive.py -k killed_builder",
    ),
    Mutation(
        "a source that ends early is taken for all there is",
        "infra/log/source.py",
        "    position = start\n    while position < stop:\n        try:",
        "    position = start\n    if position < stop:\n        try:",
        "tests/engine/test_arrival.py -k ends_early",
    ),
    Mutation(
        "a read up to a position need not lead there",
        "projections/engine/rebuild/load.py",
        "        require_arrival(topic, partition, end, reading, start)",
        "        pass",
        "tests/engine/test_arrival.py -k less_than_all",
    ),
    Mutation(
        "nobody looks at how far the tasks of a load came",
        "projections/engine/rebuild/filling.py",
        "            require_arrival(self.settings.events_topic, partition, end, reached.get(partition, START))",
        "            pass",
        "tests/engine/test_arrival.py -k tasks_come_to",
    ),
    Mutation(
        "a file of the archive says the end that was asked for",
        "infra/archive/write.py",
        "        yield _Range(at, _end(share, at, rows, read_to), rows)",
        "        yield _Range(at, _end(share, at, rows, share.end), rows)",
        "tests/engine/test_arrival.py -k ends_early",
    ),
    Mutation(
        "a switch folds what one read gives, and goes live",
        "projections/engine/live/tail.py",
        "        if reached != dict(to):",
        "        if False:",
        "tests/engine/test_switch.py -k more_than_one_read",
    ),
    Mutation(
        "a read waits for ever for a database that hangs",
        "infra/database/deadline.py",
        "        copy.shutdown(socket.SHUT_RDWR)\n",
        "        pass\n",
        "tests/engine/test_api_waiting.py -k database_that_hangs",
    ),
    Mutation(
        "a client that has gone keeps its place",
        "api/requests.py",
        "    task.cancel()\n",
        "    pass\n",
        "tests/engine/test_api_waiting.py -k client_that_has_gone",
    ),
    Mutation(
        "commands need every view of this code",
        "api/stores.py",
        "        self.require_live(*views)\n",
        "        self.require_live(*self._versions)\n",
        "tests/engine/test_api_other_release.py -k either_release",
    ),
    Mutation(
        "an API without the views of the next release is not ready",
        "api/stores.py",
        "partial(self.require_live, *self._write_model)",
        "partial(self.require_live, *self._versions)",
        "tests/engine/test_api_health.py -k what_else_is_live",
    ),
    Mutation(
        "commands are taken whatever write model is live",
        "api/commands.py",
        "stores.require(OUTCOMES)",
        "stores.require()",
        "tests/engine/test_api_health.py -k another_write_model",
    ),
    Mutation(
        "every agent that stands still makes the API unready",
        "api/health.py",
        "if who[0] == CORE and lag.still > longest",
        "if lag.still > longest",
        "tests/engine/test_api_health.py -k stall_is_told",
    ),
    Mutation(
        "a retired agent is waited for",
        "api/stores.py",
        "from positions where topic = %s and agent in (select agent from live)",
        "from positions where topic = %s",
        "tests/engine/test_api_other_release.py -k without_live_views",
    ),
    Mutation(
        "a retired agent holds up trimming",
        "infra/archive/trim.py",
        "from positions where topic = %s and agent in (select agent from live)",
        "from positions where topic = %s",
        "tests/engine/test_api_other_release.py -k without_live_views",
    ),
    Mutation(
        "a state is folded on as evolve left it",
        "infra/domain_model/contexts.py",
        "storable.giving_exactly(self.state, self.evolve)",
        "self.evolve",
        "tests/engine/test_exact_states.py -k every_fold",
    ),
    Mutation(
        "an event that JSON makes another one of is recorded",
        "commands/decision.py",
        "            if read != event:",
        "            if False:",
        "tests/engine/test_decision.py -k another_one_of",
    ),
    Mutation(
        "a state that no JSON can hold is left to the agents",
        "commands/decision.py",
        "        if records:",
        "        if False:",
        "tests/engine/test_decision.py -k before_an_agent_meets_it",
    ),
    Mutation(
        "a number is taken for the float next to it",
        "commands/intake.py",
        "float_hook=_as_written",
        "",
        "tests/engine/test_exact_states.py -k read_as_another_one",
    ),
    Mutation(
        "commands and events may hold infinite numbers",
        "domain/language.py",
        ", allow_inf_nan=False",
        "",
        "tests/engine/test_exact_states.py -k enters_nowhere",
    ),
    Mutation(
        "verify reads rows and positions of two moments",
        "projections/engine/verify/verify.py",
        '"begin isolation level repeatable read, read only"',
        '"begin read only"',
        "tests/engine/test_verify.py -k of_one_moment",
    ),
    Mutation(
        "verify goes on with another table after a switch",
        "projections/engine/verify/verify.py",
        "        if positions is None or moved:",
        "        if positions is None:",
        "tests/engine/test_verify.py -k goes_live_during",
    ),
    Mutation(
        "verify takes its snapshot before it locks the tables",
        "projections/engine/verify/verify.py",
        '            connection.execute(sql.SQL("lock table {} in access share mode").format(names))\n'
        "            positions = read_positions(connection, agent, settings.events_topic)\n",
        "            positions = read_positions(connection, agent, settings.events_topic)\n"
        '            connection.execute(sql.SQL("lock table {} in access share mode").format(names))\n',
        "tests/engine/test_verify.py -k emptied_after",
    ),
    Mutation(
        "states are compared as bytes",
        "projections/engine/verify/verify.py",
        "    if view.kind is not Kind.SNAPSHOT or ",
        "    if True or ",
        "tests/engine/test_verify.py -k written_in_another_way",
    ),
    Mutation(
        "two contexts may own one class of event",
        "infra/domain_model/contexts.py",
        "is not context:",
        "is None:",
        "tests/engine/test_contexts.py -k belongs_to_one_context",
    ),
    Mutation(
        "a view is told of any context that has its class of event",
        "projections/engine/fold/plan.py",
        "event in view.subscription and context.name in view.contexts",
        "event in view.subscription",
        "tests/engine/test_fold.py -k own_contexts_only",
    ),
    Mutation(
        "refusals of shared modules are unknown",
        "infra/domain_model/contexts.py",
        " or _is_shared(refusal)",
        "",
        "tests/engine/test_contexts.py -k shared_module",
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
