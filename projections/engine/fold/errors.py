"""The named errors of folding and committing.

EngineStop                  the log can't be folded beyond a place; everything before it can
├── PoisonEvent             a view's function failed, or the database refused its row
├── UnknownEvent            a counted commit holds a type or context that this code does not know
├── UnreadableEvent         an event of a known type does not decode
└── OutOfStep               a stream's stored version is not the one before the commit
LogChanged                  the log, read again, does not lead to the position that was recorded for it
"""

from __future__ import annotations

from typing import ClassVar

from infra.errors import SamefoldError, in_words
from infra.log.rule import Reading


class EngineStop(SamefoldError):
    """Folding stops at a place in the log. Nothing was skipped, and nothing beyond it is committed."""

    code: ClassVar[str] = "engine-stop"

    def __init__(self, message: str, cure: str, *, partition: int, offset: int) -> None:
        super().__init__(message, cure)
        self.partition = partition
        self.offset = offset


class PoisonEvent(EngineStop):
    """A view can't take an event. `version` is the event's in its stream."""

    def __init__(
        self, view: str, stream: str, version: int, *, partition: int, offset: int, cause: BaseException | str
    ) -> None:
        what = cause if isinstance(cause, str) else in_words(cause)
        super().__init__(
            f"View '{view}' can't take event {version} of {stream} (partition {partition}, offset {offset}): {what.rstrip('.')}.",
            f"Nothing was skipped. Correct projections/{view}.py and start again; a changed fold needs a raised VERSION "
            'and `samefold rebuild`. Or let it go on without the stream: ON_POISON = "park".',
            partition=partition,
            offset=offset,
        )
        self.view = view
        self.stream = stream
        self.version = version
        self.cause = what


class UnknownEvent(EngineStop):
    """A counted commit holds an event that this code has never heard of."""

    def __init__(self, stream: str, kind: str | None, *, partition: int, offset: int) -> None:
        what = f"an event '{kind}'" if kind else "events of a context"
        super().__init__(
            f"{stream} has {what} that this code does not know (partition {partition}, offset {offset}).",
            "Nothing was skipped. Run the code that knows it: newer than this, or with the class that was deleted.",
            partition=partition,
            offset=offset,
        )


class UnreadableEvent(EngineStop):
    """An event's body does not fit its class."""

    def __init__(self, stream: str, kind: str, error: Exception, *, partition: int, offset: int) -> None:
        super().__init__(
            f"{kind} of {stream} can't be read (partition {partition}, offset {offset}): {error}.",
            f"Nothing was skipped. A field added to {kind} later needs a default; one that was removed must come back.",
            partition=partition,
            offset=offset,
        )


class OutOfStep(EngineStop):
    """A stream's snapshot is not the one that a commit follows."""

    def __init__(self, stream: str, has: int, wanted: int, *, partition: int, offset: int) -> None:
        super().__init__(
            f"{stream} stands at version {has} in the database, but the commit at partition {partition}, offset "
            f"{offset} follows version {wanted}.",
            "Rows were changed by hand or restored apart from the positions: `samefold rebuild` makes them anew.",
            partition=partition,
            offset=offset,
        )


class LogChanged(SamefoldError):
    """The log, read again, does not lead to the position that the database has recorded. `found` is where it leads."""

    def __init__(self, topic: str, partition: int, start: Reading, found: Reading, recorded: object) -> None:
        self.found = found
        super().__init__(
            f"{topic}[{partition}], read from offset {start.next_offset} on, leads to {found}, "
            f"but the database says {recorded}.",
            "The database belongs to another log, or positions were changed by hand: restore the two that belong together.",
        )
