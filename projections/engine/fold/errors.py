"""The errors of folding and committing.

EngineStop                  the log can't be folded beyond an event; everything before it can
├── PoisonEvent             a view's function failed, or the database refused its row:
│   ├── TooSlowFold         it did not end within the time limit
│   └── EndedTheAgent       it ended the process, again and again
├── OtherCode               the record is one that other code folds:
│   └── UnknownEvent        a counted commit has a type or context that this code does not know
├── UnreadableEvent         an event of a known type does not decode
└── OutOfStep               a stream's stored version is not the one before the commit
LogChanged                  the log, read again, does not lead to the recorded position
"""

from __future__ import annotations

from typing import ClassVar

from domain.engine.contexts import unreadable_hint
from infra.errors import SamefoldError, in_words
from infra.log.rule import Reading
from infra.processes.time_limit import TooSlow
from projections.engine.views.core_views import OUTCOMES, snapshot_view_name
from projections.engine.views.event_context import At
from projections.engine.views.view import POLICY

PARK = 'Or continue without the stream: ON_POISON = "park".'


class EngineStop(SamefoldError):
    """Folding stops at a record of the log. Nothing was skipped, and nothing after it is committed."""

    other_code: ClassVar[str] = "corrected code"
    """What the partition waits for, where it does."""

    def __init__(self, message: str, hint: str, *, partition: int, offset: int) -> None:
        super().__init__(message, f"Nothing was skipped. {hint}")
        self.partition = partition
        self.offset = offset


class PoisonEvent(EngineStop):
    """A view failed at an event, which has this version in its stream."""

    way_out: ClassVar[str] = PARK

    def __init__(
        self, view: str, stream: str, version: int, *, partition: int, offset: int, cause: BaseException | str
    ) -> None:
        what = cause if isinstance(cause, str) else in_words(cause)
        policy = view.startswith(POLICY)
        who = f"Policy '{view.removeprefix(POLICY)}' can't react to" if policy else f"View '{view}' can't fold"
        super().__init__(
            f"{who} event {version} of {stream} (partition {partition}, offset {offset}): {what.rstrip('.')}.",
            _poison_hint(view, self.way_out),
            partition=partition,
            offset=offset,
        )
        self.view = view
        self.stream = stream
        self.version = version
        self.cause = what


class TooSlowFold(PoisonEvent):
    """A view's function did not end within the time limit. It never parks: a rebuild may be quicker, and would differ."""

    code: ClassVar[str] = "too-slow"
    way_out: ClassVar[str] = (
        "It never parks. If it has to be slow, raise SAMEFOLD_DECIDE_LIMIT_S and "
        "SAMEFOLD_IDLE_IN_TRANSACTION_TIMEOUT_MS."
    )


class EndedTheAgent(PoisonEvent):
    """A view's function ended each process that folded the event: a crash in native code, or no memory. It never parks."""

    way_out: ClassVar[str] = "It never parks. A command that folds it, like `samefold views resume`, ends, too."


def poison(view: str, at: At, error: BaseException) -> PoisonEvent:
    if isinstance(error, KeyboardInterrupt):
        raise error  # a rebuild is interrupted
    kind, cause = (TooSlowFold, str(error)) if isinstance(error, TooSlow) else (PoisonEvent, error)
    return kind(view, at.stream, at.version, partition=at.partition, offset=at.offset, cause=cause)


class OtherCode(EngineStop):
    """A partition waits at a record that other code folds. The others continue."""

    other_code: ClassVar[str] = "newer code"


class UnknownEvent(OtherCode):
    """A counted commit has an event that this code does not know."""

    def __init__(self, stream: str, kind: str | None, *, partition: int, offset: int) -> None:
        what = f"an event '{kind}'" if kind else "events of a context"
        super().__init__(
            f"{stream} has {what} that this code does not know (partition {partition}, offset {offset}).",
            "Run the code that knows it: a newer release, or one that still has the deleted class. A renamed class needs "
            "its old name in `stored_as`; a log that only you have is removed by `samefold dev reset`.",
            partition=partition,
            offset=offset,
        )


class UnreadableEvent(EngineStop):
    """An event's body does not fit its class."""

    def __init__(self, stream: str, kind: str, error: Exception, *, partition: int, offset: int) -> None:
        super().__init__(
            f"{kind} of {stream} can't be read (partition {partition}, offset {offset}): {error}.",
            unreadable_hint(kind, error),
            partition=partition,
            offset=offset,
        )


class OutOfStep(EngineStop):
    """A stream's snapshot is not the one that a commit follows."""

    def __init__(self, stream: str, has: int, wanted: int, *, partition: int, offset: int) -> None:
        super().__init__(
            f"{stream} is at version {has} in the database, but the commit at partition {partition}, offset "
            f"{offset} follows version {wanted}.",
            "Rows were changed by hand, or restored without their positions. Run `samefold rebuild` to recreate them.",
            partition=partition,
            offset=offset,
        )


class LogChanged(SamefoldError):
    """The log, read again, does not lead to the position recorded in the database. `found` is where it leads."""

    def __init__(self, topic: str, partition: int, start: Reading, found: Reading, recorded: object) -> None:
        self.found = found
        super().__init__(
            f"{topic}[{partition}], read from offset {start.next_offset} on, leads to {found}, "
            f"but the database has {recorded}.",
            "The database belongs to another log, or positions were changed by hand. Restore log and database together.",
        )


def _poison_hint(view: str, way_out: str) -> str:
    if view == OUTCOMES:
        return (
            f"If rows were changed by hand, `samefold rebuild {view}` recreates them. Else check which other programs write to the "
            "topic: no release wrote this commit."
        )
    if view.startswith(POLICY):
        return f"Correct `react` in policies/{view.removeprefix(POLICY)}.py and start again. {way_out}"
    states = snapshot_view_name("")
    if view.startswith(states):
        where = f"`State` and `evolve` in domain/{view.removeprefix(states)}.py"
        return (
            f"Correct {where} and start again; a changed fold needs a raised STATE_VERSION and `samefold rebuild`."
            + ("" if way_out == PARK else f" {way_out}")
        )
    return (
        f"Correct projections/{view}.py; if the view has stopped, `samefold views resume {view}` then. A changed fold needs a "
        f"raised VERSION and `samefold rebuild`. {way_out}"
    )
