"""make test: a state machine without a store.

The writer of a partition: the way through its phases, and the eleven precise rules."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from commands.decision import Versioned
from commands.intake import Received, reason
from commands.writer import (
    Action,
    Append,
    Confirm,
    Limits,
    Load,
    Open,
    Phase,
    ReadLog,
    Refuse,
    ReopenReason,
    Serve,
    Snapshot,
    Wait,
    Writer,
)
from infra.log.records import Commit, EventRecord, Reason, Record, decode_event
from infra.log.rule import START, Reading
from infra.processes.time_limit import SLOW, TooSlow
from projections.engine.store.command_types import CommandType
from tests.engine.log import TOPIC_ID, commit, opening, records
from tests.engine.purse import PURSE, Command, Fill, Spend, State

FILLED = EventRecord("Filled", msgspec.Raw(b'{"cents":5}'))


def received(
    offset: int, command: Command, *, id_: str | None = None, stream: str = "purse/1", **more: Any
) -> Received:
    return Received(offset, stream, id_ or f"c{offset}", "f", context=PURSE, command=lambda: command, **more)


def malformed(offset: int) -> Received:
    return Received(offset, "-/0", f"t:0:{offset}", "f", rejection=reason("malformed", "?"))


def snapshot(
    position: Reading | None,
    *,
    rows: dict[str, Versioned] | None = None,
    outcomes: Sequence[tuple[str, str]] = (),
    generation: str = "g",
    fits: bool = True,
) -> Snapshot:
    positions = {} if position is None else {0: position}
    return Snapshot(positions, generation, fits, rows or {}, frozenset(outcomes))


def purse(version: int, cents: int) -> dict[str, Versioned]:
    return {"purse/1": Versioned(version, State(cents))}


def fresh(**limits: Any) -> Writer:
    return Writer(0, TOPIC_ID, Limits(**{"run_ahead": 10, "max_commit_bytes": 10_000, "ack_timeout_s": 30} | limits))


def take_over(writer: Writer, log: Sequence[bytes], position: Reading = START, generation: str = "g") -> Action:
    """From the start to what follows the log, with the writer's opening at its end; the last action."""
    assert writer.start() == Load()
    assert writer.on_position(snapshot(position, generation=generation), len(log)) == Open()
    assert writer.on_opened(len(log)) == ReadLog(position.next_offset, len(log) + 1)
    return writer.on_log(records([*log, opening()])[position.next_offset :])


def started(position: Reading = START, log_end: int = 0, **limits: Any) -> Writer:
    """A writer that opens at the log's end."""
    writer = fresh(**limits)
    writer.start()
    assert writer.on_position(snapshot(position), log_end) == Open()
    return writer


def serving(log: Sequence[bytes] = (), position: Reading = START, **limits: Any) -> Writer:
    """A writer that serves, its epoch at the end of the log."""
    writer = fresh(**limits)
    assert isinstance(take_over(writer, log, position), Serve)
    return writer


def appended(actions: Sequence[Action]) -> list[Commit]:
    """The commits that the actions append."""
    commits = []
    for action in actions:
        assert isinstance(action, Append)
        entry = decode_event(Record(0, 0, 0, None, action.value))
        assert isinstance(entry, Commit)
        assert action.stream == entry.stream
        commits.append(entry)
    return commits


def gives_up(actions: Sequence[Action] | Action | None) -> bool:
    """Whether the writer gave up its epoch."""
    last = actions[-1] if isinstance(actions, list) else actions
    return isinstance(last, Confirm)


# The way through the phases.


def test_it_waits_for_the_read_models_positions() -> None:
    writer = fresh()
    writer.start()
    assert isinstance(writer.on_position(snapshot(None), 0), Wait)
    assert writer.on_position(snapshot(START), 0) == Open()


def test_it_refuses_a_log_that_ends_before_the_read_models_position() -> None:
    writer = fresh()
    writer.start()
    assert isinstance(writer.on_position(snapshot(Reading(5, 0, 4, 4)), 4), Refuse)


def test_it_refuses_a_recreated_commands_topic() -> None:
    writer = fresh()
    assert isinstance(take_over(writer, [opening(topic_id="another"), commit(0, 1)]), Refuse)


@pytest.mark.parametrize(
    ("offset", "log"),
    [(1, [opening(), commit(0, 1)]), (0, [opening("w"), opening("x"), commit(1, 1)])],
    ids=["another record stands where its opening should", "it was fenced before it was read"],
)
def test_an_opening_that_does_not_count_does_not_serve(offset: int, log: list[bytes]) -> None:
    writer = started()
    writer.on_opened(offset)
    assert gives_up(writer.on_log(records(log)))


@pytest.mark.parametrize(("kind", "body"), [("Stolen", b"{}"), ("Filled", b'{"cents":"many"}')])
def test_it_waits_until_an_agent_has_folded_an_event_that_it_can_not_fold(kind: str, body: bytes) -> None:
    """Of a newer code's. It goes on with the state that the database has by then, and with other partitions meanwhile."""
    writer = serving([opening(), commit(0, 1, version=1, events=[EventRecord(kind, msgspec.Raw(body))])])
    epoch = writer.epoch
    [confirm] = writer.on_commands([received(1, Fill(cents=5))], snapshot(START), 0)
    assert isinstance(confirm, Confirm)
    assert confirm.reason is ReopenReason.EVENT
    writer.on_confirmed()
    assert isinstance(writer.on_position(snapshot(Reading(epoch, 0, 1, 0)), epoch + 1), Wait), "no opening a try"
    writer.start()
    assert isinstance(writer.on_position(snapshot(Reading(epoch + 1, epoch, 0, 1)), epoch + 1), Open)


def test_commits_carry_the_epoch_and_rising_seqs() -> None:
    writer = serving([opening()])
    commits = appended(writer.on_commands([received(n, Fill(cents=5)) for n in range(3)], snapshot(START), 0))
    assert [(c.epoch, c.seq, c.version, c.command_offset) for c in commits] == [
        (1, 1, 1, 0),
        (1, 2, 2, 1),
        (1, 3, 3, 2),
    ]


def test_a_command_is_decided_on_those_before_it_in_the_batch_and_before_the_batch() -> None:
    writer = serving()
    first = appended(writer.on_commands([received(0, Fill(cents=5)), received(1, Spend(cents=3))], snapshot(START), 0))
    second = appended(
        writer.on_commands([received(2, Spend(cents=2)), received(3, Spend(cents=1))], snapshot(START), 0)
    )
    assert [c.outcome for c in first + second] == ["accepted", "accepted", "accepted", "rejected"]


def test_streams_do_not_mix() -> None:
    writer = serving()
    batch = [received(0, Fill(cents=5)), received(1, Spend(cents=5), stream="purse/2")]
    assert [c.outcome for c in appended(writer.on_commands(batch, snapshot(START), 0))] == ["accepted", "rejected"]


def test_it_wants_what_the_overlay_does_not_have() -> None:
    writer = serving([opening(), commit(0, 1, stream="purse/9", command_id="r")])
    writer.on_commands([received(1, Fill(cents=5))], snapshot(START), 0)
    again = received(2, Fill(cents=5), id_="c1")
    new = received(3, Fill(cents=5))
    other = received(4, Fill(cents=5), stream="purse/9", id_="r")
    streams, outcomes = writer.wants([again, new, other, malformed(5)])
    assert streams == {("purse", "purse/9")}
    assert outcomes == {("purse/1", "c3"), ("-/0", "t:0:5")}


# A repeated command is answered by its first outcome.


def test_an_outcome_in_the_database_is_not_decided_again() -> None:
    seen = snapshot(START, outcomes=[("purse/1", "c0")])
    assert serving().on_commands([received(0, Fill(cents=5))], seen, 0) == []


@pytest.mark.parametrize("command", [Fill(cents=5), Spend(cents=5)])
def test_a_repeated_command_appends_nothing_whether_accepted_or_rejected(command: Command) -> None:
    writer = serving()
    both = [received(0, command, id_="a"), received(1, command, id_="a")]
    assert len(writer.on_commands(both, snapshot(START), 0)) == 1
    assert writer.on_commands([received(2, command, id_="a")], snapshot(START), 0) == []


def test_a_repeated_command_is_told_before_its_expected_version_is_looked_at() -> None:
    writer = serving()
    repeated = [received(n, Fill(cents=5), id_="a", expected_version=0) for n in range(2)]
    assert [c.outcome for c in appended(writer.on_commands(repeated, snapshot(START), 0))] == ["accepted"]


@pytest.mark.parametrize("why", [None, Reason("too-little", "?")])
def test_an_outcome_read_up_to_the_opening_is_not_decided_again(why: Reason | None) -> None:
    writer = serving([opening(), commit(0, 1, command_id="c7", command_offset=0, reason=why)])
    assert writer.on_commands([received(7, Fill(cents=5))], snapshot(START), 0) == []


def test_commands_that_are_delivered_again_are_passed_over() -> None:
    writer = serving([opening(), commit(0, 1, command_offset=4)])
    batch = [received(4, Fill(cents=5)), received(5, Fill(cents=5))]
    assert [c.command_offset for c in appended(writer.on_commands(batch, snapshot(START), 0))] == [5]
    assert writer.on_commands(batch, snapshot(START), 0) == []


def test_poison_is_answered_and_what_follows_it_goes_on() -> None:
    writer = serving()
    commits = appended(writer.on_commands([malformed(0), received(1, Fill(cents=5))], snapshot(START), 0))
    assert [(c.stream, c.outcome, c.version) for c in commits] == [("-/0", "rejected", 0), ("purse/1", "accepted", 1)]


def test_what_follows_a_decision_that_was_too_slow_waits_for_another_turn() -> None:
    """Many such in one batch would outlast the handler's place in its group."""

    def decide(*_: Any) -> Any:
        raise TooSlow(f"{SLOW} it takes longer than 10 s")

    writer = serving()
    batch = [received(n, Fill(cents=5)) for n in range(3)]
    batch[1] = msgspec.structs.replace(batch[1], context=replace(PURSE, decide=decide))
    first = appended(writer.on_commands(batch, snapshot(START), 0))
    assert [(one.command_offset, one.outcome) for one in first] == [(0, "accepted"), (1, "rejected")]
    assert [one.command_offset for one in appended(writer.on_commands(batch, snapshot(START), 0))] == [2]


def test_a_rejected_body_leaves_the_streams_state_alone() -> None:
    # its state must be known to the next command although this one never looked at it
    writer = serving()
    unreadable = Received(0, "purse/1", "c0", "f", context=PURSE, rejection=reason("malformed", "?"))
    stored = snapshot(START, rows=purse(version=3, cents=100))
    commits = appended(writer.on_commands([unreadable, received(1, Spend(cents=100))], stored, 0))
    assert [(c.outcome, c.version) for c in commits] == [("rejected", 3), ("accepted", 4)]


# Giving up.


def ways() -> dict[str, Callable[[Writer], Sequence[Action] | Action | None]]:
    """Ways to give up, for a writer whose epoch is 1 and whose commits 1 and 2 are under way."""
    shown = Reading(2, 1, 0, -1)
    return {
        "acknowledged elsewhere": lambda w: w.on_acknowledged(1, 3, 1),
        "acknowledged nowhere": lambda w: w.on_acknowledged(1, None, 1),
        "acknowledged out of turn": lambda w: w.on_acknowledged(2, 3, 1),
        "not acknowledged": lambda w: w.on_clock(31),
        "older database": lambda w: w.on_commands([], snapshot(Reading(0, -1, 0, -1)), 1),
        "no position": lambda w: w.on_commands([], snapshot(None), 1),
        "another generation": lambda w: w.on_commands([], snapshot(shown, generation="h"), 1),
        "another version": lambda w: w.on_commands([], snapshot(shown, fits=False), 1),
        "another writer": lambda w: w.on_commands([], snapshot(Reading(5, 4, 0, -1)), 1),
    }


def with_two_under_way() -> Writer:
    writer = serving([opening()], Reading(1, 0, 0, -1))
    assert (
        len(writer.on_commands([received(n, Fill(cents=5)) for n in range(2)], snapshot(Reading(1, 0, 0, -1)), 0)) == 2
    )
    return writer


@pytest.mark.parametrize("way", ways().values(), ids=ways().keys())
def test_giving_up_drops_everything_and_asks_the_group(way: Callable[[Writer], Any]) -> None:
    writer = with_two_under_way()
    assert gives_up(way(writer))
    assert writer.phase is Phase.UNCONFIRMED
    assert len(writer.overlay) == 0
    assert not writer.overlay.answered("purse/1", "c0")
    assert writer.on_acknowledged(1, 2, 2) is None
    assert writer.on_clock(1_000) is None
    assert writer.on_confirmed() == Load()


def test_a_writer_with_no_reason_to_give_up_does_not_ask() -> None:
    writer = with_two_under_way()
    assert writer.on_acknowledged(1, 2, 1) is None
    assert writer.on_acknowledged(2, 3, 1) is None
    assert writer.on_clock(1_000) is None
    assert writer.on_commands([], snapshot(Reading(3, 1, 1, 0)), 1) == []
    assert writer.phase is Phase.SERVING


def test_after_giving_up_nothing_but_the_log_and_the_database_is_believed() -> None:
    writer = with_two_under_way()
    writer.on_clock(31)
    writer.on_confirmed()
    # both commits were lost: the commands are decided again, on the log's state
    writer.on_position(snapshot(START), 2)
    writer.on_opened(2)
    assert writer.on_log(records([opening(), opening(), opening()])) == Serve(0)
    commits = appended(writer.on_commands([received(n, Spend(cents=5)) for n in range(2)], snapshot(START), 40))
    assert [(c.epoch, c.seq, c.outcome) for c in commits] == [(2, 1, "rejected"), (2, 2, "rejected")]


# The eleven precise rules. `proofs/model/mutants.txt` has writers without each; the last one is in `proofs/mutations.txt`.


def test_rule_1_rows_may_be_newer_than_the_position_but_never_older() -> None:
    log = [
        opening(),
        commit(0, 1, version=1, events=[FILLED]),
        commit(0, 2, version=2, events=[FILLED], command_offset=1),
    ]
    newer = serving(log)
    seen = snapshot(START, rows=purse(version=1, cents=5))
    [one] = appended(newer.on_commands([received(2, Spend(cents=10))], seen, 0))
    assert (one.outcome, one.version) == ("accepted", 3)
    [two] = appended(newer.on_commands([received(3, Spend(cents=1))], seen, 0))
    assert two.outcome == "rejected"

    older = serving([*log[:1], commit(0, 1, version=3, events=[FILLED])])
    assert gives_up(older.on_commands([received(2, Spend(cents=10))], seen, 0))


def test_rule_2_a_row_loaded_before_the_base_is_never_used() -> None:
    position = Reading(1, 0, 0, -1)
    writer = serving([opening()], position)
    writer.on_commands([received(0, Fill(cents=5))], snapshot(position), 0)
    writer.on_commands([], snapshot(Reading(3, 1, 1, 0)), 1)  # the database has the commit: the overlay forgets it
    late = snapshot(Reading(2, 1, 0, -1))  # a replica that does not have it
    assert gives_up(writer.on_commands([received(1, Spend(cents=5))], late, 0))


def test_rule_2_the_base_begins_at_the_openings_position() -> None:
    writer = serving([opening(), commit(0, 1, version=1, events=[FILLED])], Reading(2, 0, 1, 0))
    restored = snapshot(Reading(1, 0, 0, -1))
    assert gives_up(writer.on_commands([received(1, Spend(cents=5))], restored, 0))


def test_rule_3_an_own_entry_stays_until_the_database_shows_its_epoch_and_seq() -> None:
    log = [opening(), *(commit(0, n, command_offset=n - 1) for n in range(1, 6))]
    position = Reading(5, 0, 4, 3)
    writer = serving(log, position)
    writer.on_commands([received(7, Fill(cents=5)), received(8, Fill(cents=5))], snapshot(position), 0)
    for offset in (7, 8):
        assert writer.on_acknowledged(offset - 6, offset, 1) is None
    for before_it in (Reading(6, 0, 5, 4), Reading(7, 6, 0, 4)):
        writer.on_commands([], snapshot(before_it), 1)
        assert [writer.overlay.answered("purse/1", id_) for id_ in ("c7", "c8")] == [True, True]
    shows_the_first = snapshot(Reading(8, 6, 1, 7), rows=purse(version=1, cents=5))
    writer.on_commands([], shows_the_first, 1)
    assert [writer.overlay.answered("purse/1", id_) for id_ in ("c7", "c8")] == [False, True]
    [spent] = appended(writer.on_commands([received(9, Spend(cents=10))], shows_the_first, 1))
    assert (spent.outcome, spent.version) == ("accepted", 3)
    writer.on_commands([], snapshot(Reading(10, 6, 3, 9)), 1)
    assert len(writer.overlay) == 0


def test_rule_3_an_entry_read_before_the_opening_stays_until_the_position_is_beyond_its_offset() -> None:
    log = [opening(), commit(0, 1, version=1, events=[FILLED], command_id="a")]
    writer = serving(log)
    again = received(5, Fill(cents=5), id_="a")
    assert writer.on_commands([again], snapshot(Reading(1, 0, 0, -1)), 0) == []
    assert writer.overlay.answered("purse/1", "a")
    assert writer.on_commands([], snapshot(Reading(2, 0, 1, 0)), 1) == []
    assert len(writer.overlay) == 0


def test_rule_4_the_opening_is_read_when_its_own_record_was_consumed() -> None:
    log = records([opening(), commit(0, 1, command_offset=0), commit(0, 2, command_offset=1), opening()])
    writer = started(START, 3)
    assert writer.on_opened(3) == ReadLog(0, 4)
    for stop in range(3):
        assert writer.on_log(log[stop : stop + 1]) == ReadLog(stop + 1, 4)
    assert writer.on_log([]) == ReadLog(3, 4)
    assert writer.on_log(log[3:]) == Serve(2)


def test_rule_4_an_acknowledgement_without_an_exact_offset_is_none() -> None:
    writer = started(Reading(1, 0, 0, -1), 1)
    assert gives_up(writer.on_opened(None))


def test_rule_5_a_commit_without_an_acknowledgement_is_not_taken_for_written() -> None:
    writer = serving()
    writer.on_commands([received(n, Fill(cents=5)) for n in range(2)], snapshot(START), 100)
    assert writer.on_acknowledged(1, 1, 120) is None
    assert writer.on_clock(149) is None
    assert gives_up(writer.on_clock(151))


def test_rule_6_after_giving_up_it_opens_only_when_the_group_confirms_it() -> None:
    writer = serving()
    writer.on_commands([received(0, Fill(cents=5))], snapshot(START), 0)
    assert isinstance(writer.on_acknowledged(1, 4, 1), Confirm)
    assert writer.phase is Phase.UNCONFIRMED
    assert gives_up(writer.on_commands([received(1, Fill(cents=5))], snapshot(START), 1))
    assert writer.on_confirmed() == Load()


def test_rule_7_a_writer_runs_ahead_by_a_bounded_number_of_commits() -> None:
    log = [opening(), *(commit(0, n, command_offset=n - 1) for n in range(1, 3))]
    writer = serving(log, run_ahead=4)
    waiting = [
        received(2, Fill(cents=5)),
        received(3, Spend(cents=99)),
        *(received(n, Fill(cents=5)) for n in range(4, 8)),
    ]
    # commits read, rejections and what is acknowledged already are all ahead of the database
    batch = waiting[: max(writer.room, 0)]
    assert len(writer.on_commands(batch, snapshot(START), 0)) == 2
    assert [writer.on_acknowledged(offset - 3, offset, 1) for offset in (4, 5)] == [None, None]
    assert writer.room == 0
    writer.on_commands([], snapshot(Reading(5, 3, 1, 2)), 1)
    assert writer.room == 3


def test_rule_8_commands_are_needed_back_to_the_last_that_counts_and_no_further() -> None:
    log = [
        opening(),
        commit(0, 1, command_offset=3),
        commit(0, 2, command_offset=8),
        opening(),
        commit(0, 3, command_offset=9),
    ]
    assert take_over(fresh(), log) == Serve(9)
    assert take_over(fresh(), log, Reading(5, 3, 0, 8)) == Serve(9)
    assert take_over(fresh(), []) == Serve(0)


def test_rule_9_a_writer_opens_only_when_the_database_is_near_the_logs_end() -> None:
    writer = fresh(run_ahead=4)
    writer.start()
    assert isinstance(writer.on_position(snapshot(Reading(5, 0, 4, 3)), 10), Wait)
    assert writer.phase is Phase.LOADING
    assert writer.on_position(snapshot(Reading(6, 0, 5, 4)), 10) == Open()


def test_rule_10_another_version_of_the_write_model_waits() -> None:
    writer = fresh()
    writer.start()
    assert isinstance(writer.on_position(snapshot(START, fits=False), 0), Wait)
    assert writer.phase is Phase.LOADING


STEAL = CommandType("purse", "Steal")


def test_rule_11_a_live_command_that_this_code_does_not_know_is_left_to_another_release() -> None:
    """So are the commands behind it, until it has an outcome or its type is no longer live. Others are decided as usual."""

    def stolen(offset: int, unknown: CommandType) -> Received:
        return msgspec.structs.replace(malformed(offset), unknown=unknown)

    def shown(position: Reading, *unknown: CommandType) -> Snapshot:
        return replace(snapshot(position), unknown=frozenset(unknown))

    writer = fresh()
    writer.start()
    assert writer.on_position(shown(START, STEAL), 0) == Open()
    writer.on_opened(0)
    writer.on_log(records([opening()]))
    commands = [received(0, Fill(cents=5)), stolen(1, CommandType("purse", "Rob")), stolen(2, STEAL)]
    *before, last = writer.on_commands([*commands, received(3, Fill(cents=5))], snapshot(START), 0)
    assert [one.command_id for one in appended(before)] == ["c0", "t:0:1"]
    assert isinstance(last, Confirm)
    assert last.reason is ReopenReason.COMMAND
    for _ in range(3):
        writer.on_confirmed()
        assert isinstance(writer.on_position(shown(Reading(3, 0, 2, 1), STEAL), 3), Wait), "no opening follows another"
    for later in (shown(Reading(5, 3, 1, 2), STEAL), shown(Reading(3, 0, 2, 1))):
        writer.on_confirmed()
        assert writer.on_position(later, later.positions[0].next_offset) == Open()
